"""What `kubectl kustomize` makes of a folder."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml


@cache
def kustomize(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents of a folder with a kustomization, by kind and name. Skips the test where there is no kubectl."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed (1.22 or newer, for `labels` and `replacements`)")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    return {f"{document['kind']} {document['metadata']['name']}": document for document in made}
