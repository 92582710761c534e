"""Bodies of each endpoint and what is made of them, without a server."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from redraft.openai.errors import ApiError, invalid_body
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.tokens import TokenizeBody, tokenize
from redraft.openai.translate import chat_job, completion_job, responses_job

NEEDED = {
    ChatBody: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    TokenizeBody: {"prompt": "Hi"},
}
GENERATING = (ChatBody, CompletionBody, ResponsesBody)
JOBS = {TokenizeBody: tokenize, ChatBody: chat_job, CompletionBody: completion_job, ResponsesBody: responses_job}


def refusal(body, model: ServedModel, **fields) -> ApiError:
    """The error of a body, from its schema or from the worker's request."""
    with pytest.raises((ApiError, ValidationError)) as raised:
        JOBS[body](body.model_validate(NEEDED[body] | fields), model)
    error = raised.value
    return invalid_body(error) if isinstance(error, ValidationError) else error
