"""Run time of the speculative-decoding service. `from redraft import LLM` is the way in from Python."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.llm import LLM, Answer

__all__ = ["LLM", "Answer"]

# Without this, `import openvino` reports itself to its makers' statistics.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    """Import what has been asked for; `import redraft` itself loads nothing."""
    if name in __all__:
        from redraft import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
