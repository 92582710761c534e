"""Triton's own errors, which it gave before or instead of a model: their codes.

Over HTTP Triton answers these with 400 or 500, whoever is to act, and says no more than the text. They are the only
errors that are told apart by their texts. Errors of the models have a code: see `split_code`.
"""

from __future__ import annotations

from redraft.errors import Code, RequestError
from redraft.serving.triton.messages import split_code

_TRITONS_OWN = {
    "Failed to increase the shared memory": Code.TOO_LARGE,  # a tensor that /dev/shm has no room for: 500
    "Unable to parse": Code.INVALID_REQUEST,  # a value of another type than the model's: 500 in some places
    "failed to parse the request JSON": Code.INVALID_REQUEST,  # a number too large for a double: 500
    "attempt to access JSON": Code.INVALID_REQUEST,  # a field of another kind than the protocol's: 500
}


def failure(text: str, status: int) -> RequestError:
    """The error for one that Triton answered over HTTP, be its status the success that streams begin with."""
    code, text = split_code(text)
    if code is None:
        code = next((code for part, code in _TRITONS_OWN.items() if part in text), Code.of_http(max(status, 400)))
    return RequestError(text, code)
