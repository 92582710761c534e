"""What `kubectl kustomize` makes of a folder."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def kustomize(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents of a folder with a kustomization, by kind and name."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    return {f"{document['kind']} {document['metadata']['name']}": document for document in made}
