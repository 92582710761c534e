"""What clients may send: OpenAI's fields, those that other servers added to them, and this one's own.

A null field is an absent one. A field that asks for what this server does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from redraft.chat import Effort, Writing, effort_options
from redraft.openai.body import (
    LOG_PROBS,
    MAX_ITEMS,
    NO_TEXT,
    RESPONSES,
    UNSERVED_FIELDS,
    VERBOSITY,
    Body,
    Unserved,
    check_sizes,
)
from redraft.openai.errors import UNSERVED
from redraft.openai.structured.formats import ResponseFormat, Schema, StructuredOutputs, TextFormat, vllm_guides
from redraft.openai.structured.tools import AUTO, AnyToolChoice, ChatTools, ResponsesTools
from redraft.request import (
    INT32_MAX,
    MAX_BIASES,
    MAX_WORDS,
    MOST_ALTERNATIVES,
    V1_NAMES,
    Bias,
    Guide,
    SamplingOptions,
    TextOptions,
    TokenId,
    Word,
    seed_or_drawn,
)
from redraft.samplers import SAMPLER_SETTINGS

FORMAT = "a [format](#formats)"
MAX_CHOICES = 128
"""Sequences of one HTTP request: prompts times `n`."""


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What OpenAI and vLLM sample with where neither the client nor the model says otherwise."""


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise ValueError("expected a token id")
    return int(key)


def _one_or_more(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("expected a text or a list of texts")
    return [value] if isinstance(value, str) else value


Stop = Annotated[list[Word], BeforeValidator(_one_or_more), Field(max_length=MAX_WORDS["stop_words"])]
Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]
TokenKey = Annotated[TokenId, BeforeValidator(_token_id)]
# llama.cpp's clients send no biases as an empty list.
Biases = Annotated[
    dict[TokenKey, Bias],
    BeforeValidator(lambda value: {} if value == [] else value),
    Field(max_length=MAX_BIASES),
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), AfterValidator(seed_or_drawn)]


class StreamOptions(Body):
    """What a stream says beside its text."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ModelBody(Body):
    """A request to the model."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = SAMPLER_SETTINGS | {
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "user", "request_id", "session_id", "keep_alive", "rid", "ttl"),
        *("guided_decoding_backend", "return_mm_kwargs", "spaces_between_special_tokens"),
        *("stream_interval", "truncation_side"),
    }
    UNSERVED: ClassVar[Unserved] = UNSERVED_FIELDS

    model: str | None = Field(default=None, description="the served one; another name is a 404, no adapters are served")


class GenerationBody(ModelBody, SamplingOptions, TextOptions):
    """The fields that every endpoint which generates text has: those of the table of request fields, under the names
    that OpenAI and vLLM have for them, and what `/v1` adds to them. Where a sampling field is absent,
    `ServedModel.sampling` has the default."""

    model_config = ConfigDict(alias_generator=lambda name: V1_NAMES.get(name, name))

    # Fields of the table that clients of OpenAI and vLLM bound or write in another way.
    seed: Seed | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop_words: Stop = Field(
        default=[],
        description="a text or several; the answer ends before it, and `stop_reason` is the one that ended it",
    )
    include_stop_words: bool = Field(default=False, description="true: the answer has the stop text that ends it")
    logit_bias: Biases | None = None

    ignore_eos: bool = Field(default=False, description="true: no token ends the text but those of `stop_token_ids`")
    speculative: bool = Field(default=True, description="false: `auto_regressive`")
    structured_outputs: StructuredOutputs | None = Field(default=None, description=FORMAT)
    guided_json: Schema | None = Field(default=None, description=FORMAT)
    guided_regex: str | None = Field(default=None, description=FORMAT)
    guided_choice: list[str] | None = Field(default=None, description=FORMAT)
    guided_grammar: str | None = Field(default=None, description=FORMAT)

    @property
    def log_probs(self) -> bool:
        """Whether log-probabilities are wanted."""
        return False

    @property
    def alternatives(self) -> int:
        """Alternatives wanted for each token."""
        return 0

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives wanted for each token of the prompt; None: it is not scored."""
        return None

    def guides(self) -> Iterator[tuple[str, Guide]]:
        """Each guide that is asked for, after the name of its field. Raises ApiError."""
        yield from vllm_guides("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.structured_outputs is not None:
            yield from self.structured_outputs.guides()


def without_text() -> Unserved:
    """The fields of `GenerationBody`, for endpoints that generate no text. Their defaults ask for nothing there."""
    neutral: dict[str, tuple[float, ...]] = {name: (value,) for name, value in NEUTRAL.items()}
    neutral |= {
        "top_k": (-1, 0),
        "top_p": (0, 1),
        "min_length": (0,),
        "store": (True, False),
    }  # several numbers turn these off
    fields = {name: info for name, info in GenerationBody.model_fields.items() if name not in ModelBody.model_fields}
    return {info.alias or name: (neutral.get(name, (info.default,)), NO_TEXT) for name, info in fields.items()}


class ChoicesBody(GenerationBody):
    """What chat and text completions have in common."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    """Alternatives to each token of the prompt."""

    @model_validator(mode="after")
    def _of_a_stream_or_not(self) -> Self:
        if self.usage_at_end and not self.stream:
            raise ValueError("stream_options: expected only with stream true")
        if self.prompt_logprobs and self.stream:
            raise ValueError("prompt_logprobs: expected only with stream false")
        return self

    def guides(self) -> Iterator[tuple[str, Guide]]:
        if self.response_format is not None:
            yield from self.response_format.guides("response_format")
        yield from super().guides()

    @property
    def prompt_alternatives(self) -> int | None:
        return None if self.stream else self.prompt_logprobs

    @property
    def usage_at_end(self) -> bool:
        """Whether a last event of the stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every event of the stream has the usage so far."""
        return self.usage_at_end and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatMessage(BaseModel):
    """One message; the chat template reads it, so that its other fields are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]

    @model_validator(mode="before")
    @classmethod
    def _of_a_size(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_sizes(data)
        return data


class Reasoning(Body):
    """How much a reasoning model is to think."""

    UNSERVED: ClassVar[Unserved] = dict.fromkeys(
        ("summary", "generate_summary"), (("auto",), "thoughts are given whole, not as a summary")
    )

    effort: Effort | None = None


class Conversation(ModelBody):
    """How a conversation becomes a prompt, named as vLLM's fields."""

    chat_template_kwargs: dict[str, Any] = Field(default={})
    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Reasoning()
    """OpenAI's name of it in responses."""
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    sanitize_control_tokens: bool | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        efforts = {self.reasoning_effort, self.reasoning.effort} - {None}
        if len(efforts) > 1:
            raise ValueError(f"reasoning.effort: expected reasoning_effort's {self.reasoning_effort}, got another")
        self.writing()
        return self

    @property
    def effort(self) -> Effort | None:
        """The effort of reasoning that is asked for."""
        return self.reasoning.effort or self.reasoning_effort

    def writing(self) -> Writing:
        """The same, as chat templates take it."""
        return Writing(
            {**effort_options(self.effort), **self.chat_template_kwargs},
            self.documents,
            self.continue_final_message,
            self.add_generation_prompt,
            self.sanitize_control_tokens,
        )


class ChatBody(ChoicesBody, Conversation):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_ITEMS)
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    tools: ChatTools = Field(default=[])
    tool_choice: AnyToolChoice = AUTO
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _fitting_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected only with logprobs true")
        return self

    @property
    def log_probs(self) -> bool:
        return self.logprobs

    @property
    def alternatives(self) -> int:
        return self.top_logprobs


def _prompts(value: Any) -> list[str | list[int]]:
    """Each prompt, a text or token ids, of one of the four forms that a field `prompt` has."""
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])) else value
    if isinstance(prompts, list) and len(prompts) > MAX_CHOICES:
        raise ValueError(f"expected at most {MAX_CHOICES} items")
    if isinstance(prompts, list) and prompts and all(isinstance(item, str) or _are_ids(item) for item in prompts):
        return prompts
    raise ValueError("expected a text, token ids, or a list of either")


def _number_or_off(value: Any) -> Any:
    """A number; None for false, with which chat completions turn log-probabilities off."""
    return None if value is False else value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT32_MAX


class CompletionBody(ChoicesBody):
    """`POST /v1/completions`: the text is continued as it is, without a chat template."""

    LONG: ClassVar[frozenset[str]] = frozenset({"prompt"})

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int = Field(default=16, ge=0, le=INT32_MAX)
    best_of: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: Annotated[int | None, BeforeValidator(_number_or_off)] = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    @model_validator(mode="after")
    def _as_many_as_are_shown(self) -> Self:
        if self.best_of not in (None, self.n):
            text = f"no choices are dropped: expected as many as n, {self.n}"
            raise PydanticCustomError(UNSERVED, "{field}: {text}", {"field": "best_of", "text": text})
        return self

    @property
    def log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""The values of `include`. Those after the first are of items that no answer has."""


class ResponseText(Body):
    """The form of the answer."""

    UNSERVED: ClassVar[Unserved] = VERBOSITY

    format: TextFormat = TextFormat(type="text")


def _text_or_items(value: Any) -> str | list[dict[str, Any]]:
    items = isinstance(value, list) and len(value) <= MAX_ITEMS and all(isinstance(item, dict) for item in value)
    if items or isinstance(value, str):
        return value
    raise ValueError(f"expected a text or a list of at most {MAX_ITEMS} items")


class ResponsesBody(GenerationBody, Conversation):
    """`POST /v1/responses`: text in, text out. What was said before comes with the request."""

    UNSERVED: ClassVar[Unserved] = RESPONSES
    LONG: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Annotated[str | list[dict[str, Any]], PlainValidator(_text_or_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    include: list[Included] = Field(default=[])
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    text: ResponseText = ResponseText()
    stream_options: StreamOptions | None = None
    tools: ResponsesTools = Field(default=[])
    tool_choice: AnyToolChoice = AUTO
    parallel_tool_calls: bool = True

    @property
    def log_probs(self) -> bool:
        return LOG_PROBS in self.include

    @property
    def alternatives(self) -> int:
        return self.top_logprobs if self.log_probs else 0

    def guides(self) -> Iterator[tuple[str, Guide]]:
        yield from self.text.format.guides("text.format")
        yield from super().guides()
