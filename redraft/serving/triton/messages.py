"""The texts of the models' errors. Triton passes a text on, and of the code only a part: what it has no status for is
INTERNAL to it, its HTTP answers most errors with 400, and in streams the text is all. So the code goes with the text:
`[context_length_exceeded] the prompt has 5001 tokens: ...`. The guard takes it out again where it can say it otherwise.
"""

from __future__ import annotations

import re

from redraft.errors import Code

INTERNAL_ERROR = "internal error: the Triton server's log has the cause"
QUEUE_FULL = "Exceeds maximum queue size. Maximum queue size of the service reached"
TIMED_OUT = "Request timeout expired"
"""What TensorRT-LLM's clients look for, over gRPC and over HTTP."""
_CODED = re.compile(r"\[(\w+)\] (.*)", re.DOTALL)


def with_code(code: Code, text: str) -> str:
    """An error's text with its code."""
    return f"[{code}] {text}"


def split_code(text: str) -> tuple[Code | None, str]:
    """The code and text of an error that came from Triton; None where Triton itself gave the error."""
    match = _CODED.fullmatch(text)
    return (Code(match[1]), match[2]) if match else (None, text)
