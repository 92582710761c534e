"""Run time of the speculative-decoding service. `from redraft import LLM` is the way in from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.llm import LLM, Answer

__all__ = ["LLM", "Answer"]


def __getattr__(name: str) -> Any:
    """Import what has been asked for; `import redraft` itself loads nothing."""
    if name in __all__:
        from redraft import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
