"""A JSON body: what its unknown fields, its nulls, and the fields that are known and not served mean."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from redraft.openai.errors import UNSERVED
from redraft.samplers import PENALIZED, SAMPLERS, asks_for_nothing, penalized, turned_off

TEXT_ONLY = "this model reads and writes text only"
OF_CHATS = "chat completions and responses have it"
OF_COMPLETIONS = "completions have it"
ALL_CHOICES = "no choices are dropped: expected n"
LOG_PROBS = "message.output_text.logprobs"
"""The value of a response's `include` that asks for log-probabilities."""
NO_ADAPTERS = "no adapters are served"
NO_GATEWAY = "there is one model, and no gateway before it"
NO_IDS = "token ids are not returned"
NO_TEXT = "no text is generated here"
NO_TRANSFER = "no caches are sent to other servers"
STATELESS = "no answer can be read again: send what was said before as input"

MAX_FIELDS = 256
"""Fields of a JSON body or of a message."""
MAX_ITEMS = 10_000
"""Items of a field, such as the messages of a conversation. Each that is wrong becomes an error of its own, and a
hundred thousand of them take seconds in which no stream goes on."""

Unserved = dict[str, tuple[tuple[Any, ...], str]]
"""Fields that are known and not served, each with the values that ask for nothing beside `EMPTY`, and what to say of
others."""

PLAIN_TEXT: tuple[Any, ...] = ({"type": "text"},)
VERBOSITY: Unserved = {"verbosity": (("medium",), "this model has no verbosity to set")}
UNSERVED_FIELDS: Unserved = {
    **{name: (off, "no such sampler is served") for name, off in SAMPLERS.items()},
    **{name: (values, "penalties count all tokens of the text") for name, values in PENALIZED.items()},
    **VERBOSITY,
    "adapter_id": ((), NO_ADAPTERS),
    "add_generation_prompt": ((True, False), OF_CHATS),
    "add_special_tokens": ((), "the chat template writes the special tokens"),
    "allowed_token_ids": ((), "logit_bias with positive numbers favours tokens"),
    "audio": ((), TEXT_ONLY),
    "best_of": ((1,), ALL_CHOICES),
    "chat_template": ((), "the bundle's template is used: expected chat_template_kwargs"),
    "chat_template_kwargs": ((), OF_CHATS),
    "continue_final_message": ((), OF_CHATS),
    "custom_logit_processor": ((), "no code of clients is run"),
    "custom_params": ((), "no code of clients is run"),
    "data_sources": ((), "no hosted tools are served"),
    "decoder_input_details": ((), "expected prompt_logprobs"),
    "details": ((), "expected logprobs"),
    "documents": ((), OF_CHATS),
    "ebnf": ((), "expected structured_outputs"),
    "ec_transfer_params": ((), NO_TRANSFER),
    "echo": ((), OF_COMPLETIONS),
    "fallbacks": ((), NO_GATEWAY),
    "function_call": (("none", "auto"), "expected tools and tool_choice"),
    "functions": ((), "expected tools"),
    "grammar": ((), "expected structured_outputs"),
    "guided_whitespace_pattern": ((), "the grammar says where white space may stand"),
    "guideline": ((), "expected a system message"),
    "id_slot": ((-1,), "slots are not chosen by clients"),
    "image_data": ((), TEXT_ONLY),
    "include": ((), "responses have it"),
    "include_reasoning": ((True, False), "chat completions have it"),
    "instructions": ((), "responses have it"),
    "kv_transfer_params": ((), NO_TRANSFER),
    "logits_processors": ((), "no code of clients is run"),
    "logprob_token_ids": ((), "log-probabilities are those of the most likely tokens: expected top_logprobs"),
    "logprobs": ((), NO_TEXT),
    "lora": ((), NO_ADAPTERS),
    "lora_path": ((), NO_ADAPTERS),
    "max_tool_calls": ((0,), "no hosted tools are served"),
    "media_io_kwargs": ((), TEXT_ONLY),
    "mm_processor_kwargs": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "models": ((), NO_GATEWAY),
    "moderation": ((), "no moderation is served"),
    "n": ((1,), NO_TEXT),
    "n_discard": ((0,), "no prompt is cut"),
    "n_indent": ((0,), "lines are not counted"),
    "n_keep": ((-1, 0), "no prompt is cut"),
    "n_predict": ((-1,), "expected max_tokens"),
    "n_probs": ((0,), "expected logprobs"),
    "no_stop_trim": ((), "expected include_stop_str_in_output"),
    "options": ((), "expected its fields in the body"),
    "parallel_tool_calls": ((True, False), OF_CHATS),
    "parse_tool_calls": ((True,), "calls are always read"),
    "plugins": ((), NO_GATEWAY),
    "post_sampling_probs": ((), "log-probabilities are those before samplers"),
    "prediction": ((), "no predicted outputs are served"),
    "priority": ((0,), "requests have no priorities"),
    "prompt_embeds": ((), "expected a prompt of text or token ids"),
    "prompt_logprobs": ((), "completions and chat completions have them"),
    "provider": ((), NO_GATEWAY),
    "reasoning": (({"effort": "none"}, {"effort": "medium"}, {"summary": "auto"}), OF_CHATS),
    "reasoning_effort": (("none", "medium"), OF_CHATS),
    "reasoning_format": (("auto", "deepseek", "parsed"), "thoughts are reasoning_content"),
    "regex": ((), "expected structured_outputs"),
    "repeat_penalty": (SAMPLERS["repeat_penalty"], "expected repetition_penalty"),
    "repetition_detection": ((), "no repetition is looked for: expected a penalty"),
    "response_fields": ((), "the answer has all its fields"),
    "response_format": (PLAIN_TEXT, NO_TEXT),
    "return_cached_tokens_details": ((), "usage counts the cached tokens"),
    "return_full_text": ((), "expected echo of completions"),
    "return_hidden_states": ((), "no hidden states are returned"),
    "return_meta_info": ((), "usage and metrics are always there"),
    "return_progress": ((), "no progress is sent"),
    "return_prompt_text": ((), "the prompt is not returned"),
    "return_prompt_token_ids": ((), NO_IDS),
    "return_routed_experts": ((), "no routed experts are returned"),
    "return_token_ids": ((), NO_IDS),
    "return_token_offsets": ((), NO_IDS),
    "return_tokens": ((), NO_IDS),
    "return_tokens_as_token_ids": ((), NO_IDS),
    "route": (("fallback",), NO_GATEWAY),
    "routed_experts_prompt_start": ((0,), "no routed experts are returned"),
    "routed_experts_start_len": ((0,), "no routed experts are returned"),
    "safe_prompt": ((), "expected a system message"),
    "sanitize_control_tokens": ((), OF_CHATS),
    "separate_reasoning": ((True,), "thoughts are always apart"),
    "session_params": ((), STATELESS),
    "stop_regex": ((), "expected stop"),
    "stream_options": (({"include_usage": False},), NO_TEXT),
    "stream_reasoning": ((True,), "thoughts are streamed as they come"),
    "structural_tag": ((), "expected structured_outputs or response_format"),
    "suffix": ((), "no text is put between two others: expected prompt only"),
    "t_max_predict_ms": ((-1, 0), "expected timeout"),
    "text": (
        ({"format": PLAIN_TEXT[0]}, {"verbosity": "medium"}, {"format": PLAIN_TEXT[0], "verbosity": "medium"}),
        "responses have it: expected response_format",
    ),
    "thinking_token_budget": ((-1,), "no budget of thoughts is kept"),
    "timings_per_token": ((), "metrics are always there"),
    "tool_choice": (("none", "auto"), OF_CHATS),
    "tool_prompt": ((), "the chat template lists the tools"),
    "tools": ((), OF_CHATS),
    "top_logprobs": ((0,), "expected the number as logprobs"),
    "top_n_tokens": ((0,), "expected top_logprobs"),
    "transforms": ((), "no prompt is cut"),
    "truncate": ((), "no prompt is cut"),
    "truncate_prompt_tokens": ((), "no prompt is cut"),
    "truncation": (("disabled",), "no input is cut: expected disabled"),
    "usage": (({"include": False},), "expected stream_options"),
    "use_audio_in_video": ((), TEXT_ONLY),
    "vllm_xargs": ((), "there are no extensions"),
    "watermarking": ((), "no watermark is written"),
    "web_search_options": ((), "no hosted tools are served"),
}
"""Fields that an endpoint does not serve: every one of these, except those that are its own."""
RESPONSES: Unserved = {
    "access_programs": ((), STATELESS),
    "background": ((), STATELESS),
    "background_options": ((), STATELESS),
    "context_management": ((), "no context is compacted"),
    "conversation": ((), STATELESS),
    "draft_trees": ((), "completions and chat completions have them"),
    "enable_response_messages": ((), "the messages that the template reads are not returned"),
    "image": ((), TEXT_ONLY),
    "logprobs": ((), f"expected include of {LOG_PROBS}"),
    "n": ((1,), "a response has one answer"),
    "previous_input_messages": ((), STATELESS),
    "previous_response_id": ((), STATELESS),
    "prompt": ((), "no prompts are stored: expected input"),
    "response_format": (PLAIN_TEXT, "expected text.format"),
}


class Body(BaseModel):
    """A JSON body or a part of one: no conversion of types, unknown fields refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields that are about the service, not about the text."""
    UNSERVED: ClassVar[Unserved] = {}
    """Beside those of the classes that it extends which are no fields of its own."""
    LONG: ClassVar[frozenset[str]] = frozenset()
    """Fields that may have more than MAX_ITEMS items."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_sizes(data, cls.LONG | cls.WITHOUT_EFFECT)
        fields, kept = unserved(cls), {}
        for name, value in data.items():
            if value is None or name in cls.WITHOUT_EFFECT:
                continue
            if name in fields:
                neutral, text = fields[name]
                without_effect = name in PENALIZED and turned_off(name, value, penalized(data))
                if not (without_effect or asks_for_nothing(value, neutral)):
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


def field_names(body: type[Body]) -> set[str]:
    """The names by which clients send a body's own fields."""
    return {info.alias or name for name, info in body.model_fields.items()}


@cache
def unserved(body: type[Body]) -> Unserved:
    """The fields that a body knows and does not serve."""
    fields: Unserved = {}
    for base in reversed([base for base in body.__mro__ if issubclass(base, Body)]):
        fields = {name: entry for name, entry in fields.items() if name not in field_names(base)}
        fields |= vars(base).get("UNSERVED", {})
    return fields
