"""A JSON body: what its unknown fields, its nulls, and the fields that are known and not served mean."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from redraft.openai.errors import UNSERVED

TEXT_ONLY = "this model reads and writes text only"
OF_CHATS = "chat completions and responses have it"
ALL_CHOICES = "no choices are dropped: expected n"
LOG_PROBS = "message.output_text.logprobs"
"""The value of a response's `include` that asks for log-probabilities."""
NO_TRANSFER = "no caches are sent to other servers"
NO_IDS = "token ids are not returned"

MAX_FIELDS = 256
"""Fields of a JSON body or of a message."""
MAX_ITEMS = 10_000
"""Items of a field, such as the messages of a conversation. Each that is wrong becomes an error of its own, and a
hundred thousand of them take seconds in which no stream goes on."""

Unserved = dict[str, tuple[tuple[Any, ...], str]]
"""Fields that are known and not served, each with the values that ask for nothing beside `EMPTY`, and what to say of
others."""
EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values of unserved fields that ask for nothing; a null field is an absent one anyway."""

SAMPLED: Unserved = {
    "allowed_token_ids": ((), "logit_bias with positive numbers favours tokens"),
    "ec_transfer_params": ((), NO_TRANSFER),
    "guided_whitespace_pattern": ((), "the grammar says where white space may stand"),
    "kv_transfer_params": ((), NO_TRANSFER),
    "logits_processors": ((), "no code of clients is run"),
    "logprob_token_ids": ((), "log-probabilities are those of the most likely tokens: expected top_logprobs"),
    "mm_processor_kwargs": ((), TEXT_ONLY),
    "priority": ((0,), "requests have no priorities"),
    "repetition_detection": ((), "no repetition is looked for: expected a penalty"),
    "return_prompt_text": ((), "the prompt is not returned"),
    "return_token_ids": ((), NO_IDS),
    "return_token_offsets": ((), NO_IDS),
    "return_tokens_as_token_ids": ((), NO_IDS),
    "routed_experts_prompt_start": ((0,), "no routed experts are returned"),
    "structural_tag": ((), "expected structured_outputs or response_format"),
    "thinking_token_budget": ((-1,), "no budget of thoughts is kept"),
    "truncate_prompt_tokens": ((), "no prompt is cut"),
    "use_beam_search": ((), "no beam search is served"),
    "vllm_xargs": ((), "there are no extensions"),
    "watermarking": ((), "no watermark is written"),
}
"""Of every endpoint that generates text."""
CHAT: Unserved = {
    "add_special_tokens": ((), "the chat template writes the special tokens"),
    "audio": ((), TEXT_ONLY),
    "best_of": ((1,), ALL_CHOICES),
    "chat_template": ((), "the bundle's template is used: expected chat_template_kwargs"),
    "echo": ((), "completions have it"),
    "function_call": (("none", "auto"), "expected tools and tool_choice"),
    "functions": ((), "expected tools"),
    "media_io_kwargs": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "moderation": ((), "no moderation is served"),
    "prediction": ((), "no predicted outputs are served"),
    "reasoning_effort": (("none", "medium"), "this model has no reasoning to set"),
    "store": ((), "nothing is stored"),
    "verbosity": (("medium",), "this model has no verbosity to set"),
    "web_search_options": ((), "no hosted tools are served"),
}
COMPLETIONS: Unserved = {
    "modalities": ((["text"],), TEXT_ONLY),
    "parallel_tool_calls": ((True,), OF_CHATS),
    "prompt_embeds": ((), "expected a prompt of text or token ids"),
    "store": ((), "nothing is stored"),
    "suffix": ((), "no text is put between two others: expected prompt only"),
    "tool_choice": (("none", "auto"), OF_CHATS),
    "tools": ((), OF_CHATS),
    "top_logprobs": ((0,), "expected the number as logprobs"),
}
STATELESS = "nothing is stored: send what was said before as input"
RESPONSES: Unserved = {
    "access_programs": ((), STATELESS),
    "background": ((), STATELESS),
    "background_options": ((), STATELESS),
    "best_of": ((1,), ALL_CHOICES),
    "context_management": ((), "no context is compacted"),
    "conversation": ((), STATELESS),
    "draft_trees": ((), "completions and chat completions have them"),
    "enable_response_messages": ((), "the messages that the template reads are not returned"),
    "image": ((), TEXT_ONLY),
    "logprobs": ((), f"expected include of {LOG_PROBS}"),
    "max_tool_calls": ((0,), "no hosted tools are served"),
    "media_io_kwargs": ((), TEXT_ONLY),
    "moderation": ((), "no moderation is served"),
    "modalities": ((["text"],), TEXT_ONLY),
    "n": ((1,), "a response has one answer"),
    "previous_input_messages": ((), STATELESS),
    "previous_response_id": ((), STATELESS),
    "prompt": ((), "no prompts are stored: expected input"),
    "prompt_logprobs": ((), "completions and chat completions have them"),
    "reasoning": (
        ({"effort": "none"}, {"effort": "medium"}, {"summary": "auto"}, {"effort": "medium", "summary": "auto"}),
        "this model has no reasoning to set",
    ),
    "response_format": (({"type": "text"},), "expected text.format"),
    "store": ((), STATELESS),
    "truncation": (("disabled",), "no input is cut: expected disabled"),
}
TOKENIZE: Unserved = {
    **{name: CHAT[name] for name in ("chat_template", "media_io_kwargs")},
    **{name: SAMPLED[name] for name in ("mm_processor_kwargs", "return_token_offsets")},
    "tool_choice": (("none", "auto"), OF_CHATS),
}


class Body(BaseModel):
    """A JSON body or a part of one: no conversion of types, unknown fields refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are about the service, not about the text."""
    UNSERVED: ClassVar[Unserved] = {}
    """Beside those of the classes that it extends."""
    LONG: ClassVar[frozenset[str]] = frozenset()
    """Fields that may have more than MAX_ITEMS items."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_sizes(data, cls.LONG | cls.WITHOUT_EFFECT)
        unserved, kept = _unserved(cls), {}
        for name, value in data.items():
            if value is None or name in cls.WITHOUT_EFFECT:
                continue
            if name in unserved:
                neutral, text = unserved[name]
                if not asks_for_nothing(value, neutral):
                    raise PydanticCustomError(UNSERVED, "{field}: {text}", {"field": name, "text": text})
                continue
            kept[name] = value
        return kept


def check_sizes(data: Mapping[str, Any], unchecked: Container[str] = ()) -> None:
    """Raises ValueError for an object with too many fields, or a field with too many items."""
    if len(data) > MAX_FIELDS:
        raise ValueError(f"expected at most {MAX_FIELDS} fields, got {len(data)}")
    for name, value in data.items():
        if isinstance(value, list | dict) and len(value) > MAX_ITEMS and name not in unchecked:
            raise ValueError(f"{name}: expected at most {MAX_ITEMS} items, got {len(value)}")


@cache
def _unserved(body: type[Body]) -> Unserved:
    """A body's unserved fields and those of the classes that it extends."""
    tables = [vars(base).get("UNSERVED", {}) for base in reversed(body.__mro__)]
    return {name: entry for table in tables for name, entry in table.items()}


def asks_for_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Whether a field's value is empty, in that its own fields are null, or one of the `neutral` ones."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    return any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in (*EMPTY, *neutral))
