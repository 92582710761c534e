"""What a folder says of the bundle in it, for a start that does not wait for the imports that reading it takes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

MANIFEST, CONFIG = "manifest.json", "config.json"


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, whole or damaged."""
    return (folder / MANIFEST).is_file()


def bundle_ranks(bundle: Path) -> int:
    """How many ranks a bundle needs; 1 where its configuration does not say, which the worker then judges."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        count = json.loads((bundle / CONFIG).read_bytes()).get("tensor_parallel", 1)
        return count if type(count) is int and count > 0 else 1
    return 1
