"""The error of a checkpoint that the target definition cannot compute."""

from __future__ import annotations

LONGEST = 500
"""Characters of what is lacking: a value that a file has may be of any length"""


class UnsupportedModelError(ValueError):
    """The checkpoint needs an architecture or a feature that the target definition lacks."""

    def __init__(self, found: str, supported: str | None = None):
        """`found`: what is lacking; `supported`: the families that there are, in words."""
        self.found = found if len(found) <= LONGEST else f"{found[: LONGEST - 3]}..."
        super().__init__(f"unsupported model: {self.found}" + (f". Supported: {supported}." if supported else ""))
