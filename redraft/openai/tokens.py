"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: texts and conversations as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from redraft.openai.body import MAX_ITEMS, Unserved
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatMessage, Conversation, ModelBody, without_text
from redraft.openai.structured.tools import AUTO, ChatTools
from redraft.openai.structured.use import tool_use
from redraft.openai.translate import prompt_text
from redraft.request import INT32_MAX, MAX_INPUT_IDS

MAX_TEXT_BYTES = 2**20
"""A text that is counted, unless the context holds a longer one. A tokenizer takes half a minute for 15 MB, and has one
of the few threads that read large bodies meanwhile."""


class TokenizeBody(Conversation):
    """A text, or a conversation as `/v1/chat/completions` takes it."""

    UNSERVED: ClassVar[Unserved] = without_text()

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_ITEMS)
    tools: ChatTools = Field(default=[])
    add_special_tokens: bool | None = None
    """None: for a text only, since chat templates write them."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("prompt: expected either prompt or messages")
        return self


class DetokenizeBody(ModelBody):
    """Token ids."""

    UNSERVED: ClassVar[Unserved] = without_text()
    LONG: ClassVar[frozenset[str]] = frozenset({"tokens"})

    tokens: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(max_length=MAX_INPUT_IDS, fail_fast=True)


def tokenize(body: TokenizeBody, model: ServedModel) -> dict[str, Any]:
    """The token ids of a text or conversation, also of one that the context does not hold. Raises ApiError."""
    if body.messages is None:
        text, param = body.prompt or "", "prompt"
    else:
        tools = tool_use([tool.function for tool in body.tools], AUTO, True, model)
        messages = [message.model_dump() for message in body.messages]
        text, param = prompt_text(messages, tools, model, "messages", body.writing())[0], "messages"
    model.check_unicode(text, param)
    size, most = len(text.encode()), max(MAX_TEXT_BYTES, model.text_bytes)
    if size > most:
        raise ApiError(f"{param}: expected at most {most} bytes, got {size}", param)
    encoder = model.codec if body.messages is None else model.encoder(body.writing())
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    ids = encoder.encode(text, special)
    texts = [model.codec.token_string(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": texts}


def detokenize(body: DetokenizeBody, model: ServedModel) -> dict[str, Any]:
    """The text of token ids, special tokens too. Raises ApiError for an id that the model does not have."""
    if max(body.tokens, default=0) >= model.vocab_size:
        text = f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}"
        raise ApiError(text, "tokens")
    return {"prompt": model.codec.decode(body.tokens, skip_special=False)}
