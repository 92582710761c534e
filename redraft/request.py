"""What a client asks of an engine: a request, its sampling settings, their limits; and what it cost."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, TypedDict, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from redraft.errors import place

INT32_MAX = 2**31 - 1
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_INPUT_IDS = 2**20
MAX_WORDS = {"stop_words": 64, "bad_words": 1024, "stop_token_ids": 64}
MAX_WORDS_CHARACTERS = {"stop_words": 4096, "bad_words": 16_384}
"""All words of a list together: every token of the answer is compared with each of them."""
MAX_BIASES = 1024
"""Most tokens of `logit_bias`."""
MAX_WORDS_TOKENS = {"stop_word_ids": 4096, "bad_word_ids": 16_384}
"""The same of words given as token ids; each is at least one character."""
MAX_PENALTY = 1e6
"""The largest size of a penalty: products and sums of logits stay far inside float32."""
MIN_TEMPERATURE = 1e-4
"""Below it, sampling is greedy: the quotients would leave float32."""
MAX_GUIDE_CHARACTERS = 2**18
MAX_CHOICES = 1024
MOST_ALTERNATIVES = 20
"""The largest `top_log_probs`."""
EXTRAS = ("log_probs", "top_log_probs", "prompt_log_probs", "prompt_top_log_probs", "draft_trees")
"""Lists that an `Output`, a `Chunk` and an `Answer` have only where the request asks for them."""
MAX_TOKENS = 256
"""How many tokens `request` asks for where none are named."""
MAX_TIMEOUT_S = 86_400.0
AUTO_REGRESSIVE = "auto_regressive"
"""The method that every bundle has: no drafts."""
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(lambda count: max(count, 0))]
"""0 and, as other servers have it, -1: all tokens."""
Bias = Annotated[float, Field(ge=-100, le=100)]
Word = Annotated[str, Field(max_length=1000)]


StopReason = int | str
"""What ended a text beside the model's own end tokens: a stop word, or the id of a token of `stop_token_ids`."""


class InvalidRequest(ValueError):
    """A message that cannot be served as it is; the text says which field, its value and what was expected."""


@dataclass(frozen=True)
class PromptLimits:
    """The largest prompt that a worker takes. What is larger is refused before it is decoded or encoded."""

    tokens: int = MAX_INPUT_IDS
    text_bytes: int = MAX_MESSAGE_BYTES

    @classmethod
    def of(cls, limits: Mapping[str, int]) -> PromptLimits:
        """Those that a worker's status tells."""
        return cls(limits["max_len"] - 1, limits["text_bytes"])

    def check_text(self, size: int) -> None:
        """Raises InvalidRequest for a text of `size` bytes that cannot fit."""
        if size > self.text_bytes:
            raise InvalidRequest(
                f"text: {size} bytes cannot fit a context of {self.tokens + 1} tokens: expected at most "
                f"{self.text_bytes} bytes"
            )

    def check_tokens(self, count: int) -> None:
        """Raises InvalidRequest for a prompt of too many tokens."""
        if count > self.tokens:
            raise InvalidRequest(f"the prompt has {count} tokens: expected at most {self.tokens}")


PROTOCOL_LIMITS = PromptLimits()


class Message(BaseModel):
    """A message or a part of one: no unknown fields, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def seed_or_drawn(seed: int) -> int | None:
    """A seed; None for -1, with which vLLM and llama.cpp draw one."""
    return None if seed == -1 else seed


class SamplingConfig(Message):
    """How the next token is chosen; a field that is absent (or null) has no effect.

    Only a temperature samples. Decoding is greedy without one, with one below 1e-4, and where `top_k` is 1. `top_k` 0
    or -1, `top_p` 0 and `seed` -1 count as absent. After the temperature, `min_p` keeps the tokens that have at least
    this share of the most likely one's probability; top-k and then top-p choose from them. `logit_bias` is added to the
    logits of the tokens with these ids, before penalties and filters. `repetition_penalty` counts the tokens of prompt
    and answer. So do the presence and frequency penalties; with `penalize_prompt` false they count those of the answer
    only.
    """

    temperature: float | None = Field(default=None, ge=0)
    top_k: TopK | None = None
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Annotated[int, Field(ge=-1, lt=2**64), AfterValidator(seed_or_drawn)] | None = None
    repetition_penalty: float | None = Field(default=None, ge=1 / MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float | None = Field(default=None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(default=None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    penalize_prompt: bool = True
    min_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    logit_bias: dict[TokenId, Bias] | None = Field(default=None, max_length=MAX_BIASES)

    @field_validator("temperature")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("expected a finite number")
        return value

    @property
    def greedy(self) -> bool:
        return self.temperature is None or self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def divisor(self) -> float:
        """What sampling divides the logits by: the temperature, at least 1e-4; 1 where there is none."""
        return 1.0 if self.temperature is None else max(self.temperature, MIN_TEMPERATURE)


GuideKind = Literal["json", "json_schema", "regex", "grammar", "choice"]
_CHOICES = TypeAdapter(
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
)


class Guide(Message):
    """What the answer must be: `json` (any object, without a text), JSON that a `json_schema` describes, a text that
    a `regex` matches from start to end, one of a `grammar` (Lark or GBNF), or a `choice` from a JSON list of texts."""

    kind: GuideKind
    text: str = Field(default="", max_length=MAX_GUIDE_CHARACTERS, validate_default=True)
    before: str = Field(default="", max_length=1000)
    """Rules in Lark, of which `before` says what comes before the guided text: a reasoning model's thoughts."""

    @field_validator("text")
    @classmethod
    def _of_its_kind(cls, text: str, info: ValidationInfo) -> str:
        kind = info.data.get("kind")
        if kind == "json" and text:
            raise ValueError("expected no text for json; json_schema takes a schema")
        if kind not in (None, "json") and not text:
            raise ValueError(f"expected the text of the {kind}")
        if kind == "choice":
            try:
                _CHOICES.validate_json(text, strict=True)
            except ValidationError:
                raise ValueError(f"expected a JSON list of 1 to {MAX_CHOICES} texts, none of them empty") from None
        return text

    @property
    def choices(self) -> list[str]:
        """The texts of a choice."""
        return _CHOICES.validate_json(self.text, strict=True)


class GenerateRequest(Message):
    """Generate up to `max_tokens` tokens after a prompt given as `text` or as `input_ids`.

    `text` is taken as it is: a chat template is applied by the client, who sends its text with `add_special_tokens`
    false, since templates write them. Generation ends at the first of `stop_words`,
    which the text includes, as with TensorRT-LLM, unless `include_stop_words` is false; `bad_words` are never
    generated. `stop_word_ids` and `bad_word_ids` are further words as token ids, matched token by token. With
    `exclude_input_in_output` false the first chunk's text starts with the prompt. `end_id` replaces the model's own end
    tokens, unless it is one of them; -1 means that only `stop_token_ids`, if any, end the text. These end it beside the
    end tokens, and it has none of them. The text has special tokens other than those
    that end it only with `skip_special_tokens` false. `method` names one of the bundle's methods of
    drafting, or `auto_regressive`; the bundle's first is the default.

    Log-probabilities are the target's own, before processors and filters: of the answer's tokens with
    `return_log_probs`, of the prompt's with `prompt_log_probs`. `top_log_probs` adds so many alternatives to each
    token, and implies `return_log_probs`. `max_tokens` 0 only scores the prompt.

    With `draft_trees` an output has the tree that each of its steps verified: see `DraftTree`. With a `guide` the
    answer is what it asks for, unless another limit cuts it short.
    """

    op: Literal["generate"] = "generate"
    id: str = Field(min_length=1, max_length=200)
    text: str | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer puts its special tokens around the text, such as one that begins every text."""
    input_ids: list[TokenId] | None = Field(default=None, max_length=MAX_INPUT_IDS, fail_fast=True)
    max_tokens: Annotated[int, Field(le=INT32_MAX)]
    stream: bool = False
    sampling: SamplingConfig = SamplingConfig()
    end_id: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    pad_id: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    stop_words: list[Word] = Field(default_factory=list, max_length=MAX_WORDS["stop_words"])
    include_stop_words: bool = True
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_WORDS["stop_token_ids"])
    skip_special_tokens: bool = True
    bad_words: list[Word] = Field(default_factory=list, max_length=MAX_WORDS["bad_words"])
    stop_word_ids: list[list[TokenId]] = Field(default_factory=list, max_length=MAX_WORDS["stop_words"])
    bad_word_ids: list[list[TokenId]] = Field(default_factory=list, max_length=MAX_WORDS["bad_words"])
    return_log_probs: bool = False
    top_log_probs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    prompt_log_probs: bool = False
    draft_trees: bool = False
    guide: Guide | None = None
    exclude_input_in_output: bool = True
    method: str | None = Field(default=None, max_length=200)
    cache_prompt: bool = True
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1000)
    """Cached tokens are shared, unless `cache_prompt` is false, with requests of the same salt."""
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    """Seconds from arrival, in the queue or not, after which the request ends with the text so far."""
    client: str | None = Field(default=None, max_length=200)
    """Whose request it is, where a worker limits the requests of each client."""

    @field_validator("stop_words", "bad_words")
    @classmethod
    def _drop_empty(cls, words: list[str], info: ValidationInfo) -> list[str]:
        most, size = MAX_WORDS_CHARACTERS[str(info.field_name)], sum(map(len, words))
        if size > most:
            raise PydanticCustomError("words_too_long", f"expected at most {most} characters in all, got {size}")
        return [word for word in words if word]

    @field_validator("stop_word_ids", "bad_word_ids")
    @classmethod
    def _drop_no_ids(cls, words: list[list[int]], info: ValidationInfo) -> list[list[int]]:
        most, size = MAX_WORDS_TOKENS[str(info.field_name)], sum(map(len, words))
        if size > most:
            raise PydanticCustomError("words_too_long", f"expected at most {most} token ids in all, got {size}")
        return [word for word in words if word]

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("expected exactly one of text and input_ids")
        if self.text == "":
            raise ValueError("text is empty: expected at least one character")
        if self.input_ids == []:
            raise ValueError("input_ids is empty: expected at least one token")
        return self

    @model_validator(mode="after")
    def _some_result(self) -> GenerateRequest:
        least = 0 if self.prompt_log_probs else 1
        if self.max_tokens < least:
            raise ValueError(f"max_tokens: expected at least {least}, got {shown(self.max_tokens)}")
        self.return_log_probs |= self.top_log_probs > 0
        return self


class Options(TypedDict, total=False):
    """Options of a request, with the names and meaning of `GenerateRequest` and `SamplingConfig`.

    Without `temperature` decoding is greedy. Without `seed` one is drawn; `stats.seed` has it.
    """

    add_special_tokens: bool
    method: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalize_prompt: bool
    min_length: int | None
    logit_bias: dict[int, float] | None
    stop_words: list[str]
    include_stop_words: bool
    stop_token_ids: list[int]
    skip_special_tokens: bool
    bad_words: list[str]
    end_id: int | None
    return_log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    draft_trees: bool
    guide: Guide | None
    cache_prompt: bool
    cache_salt: str | None
    timeout_s: float | None


def request(
    text: str, max_tokens: int = MAX_TOKENS, *, stream: bool = False, **options: Unpack[Options]
) -> GenerateRequest:
    """A request to continue a text. Raises InvalidRequest, which names the option, its value and what was expected."""
    sampling = {name: value for name, value in options.items() if name in SamplingConfig.model_fields}
    fields = {name: value for name, value in options.items() if name not in sampling}
    fields |= {"id": "r", "text": text, "max_tokens": max_tokens, "stream": stream}
    try:
        return GenerateRequest.model_validate(fields | {"sampling": SamplingConfig.model_validate(sampling)})
    except ValidationError as error:
        raise InvalidRequest(describe(error)) from None


Origin = Literal["root", "drafter", "ngrams", "both", "resampled", "grammar"]
"""What proposed a node of a draft tree: the drafter network, n-grams, both of them, or, where neither did now, an
earlier draft that was sampled again, or else the request's guide."""


@dataclass
class DraftTree:
    """What one step verified: a tree of N nodes, and what became of it.

    Node 0 is the root, the last token that was certain before the step; parents come before children. The prompt's last
    token is the root of the first tree, which has no other nodes.
    """

    token_ids: list[int]
    parents: list[int]
    """-1 for the root."""
    scores: list[float]
    """Estimated log-probability that a node is accepted; of random draws, that it was drawn. 0 for the root."""
    origins: list[Origin]
    path: list[int]
    """The accepted nodes, the root first, and an end token among them."""
    gained: list[int]
    """The tokens that the step added to the answer: those of the path below the root but for an end token, then one of
    the target's own choice unless the text ended before it."""


@dataclass
class SequenceStats:
    """What one request cost and gained. Depth d of `offered_by_depth` and `accepted_by_depth` is at index d - 1.

    A depth is offered where the tree goes on below the accepted path. The conditional acceptance rate of depth d is
    accepted at d over accepted at d - 1, wherever that path's tree ends.
    """

    prompt_tokens: int = 0
    cached_tokens: int = Field(default=0, description="the prompt's first tokens, whose rows were in the cache")
    output_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    reused: int = Field(default=0, description="accepted tokens that only a re-sampled draft held")
    offered_by_depth: list[int] = Field(
        default_factory=list,
        description="steps that accepted the depth before (at depth 1: the root) and whose tree had a node below it",
    )
    accepted_by_depth: list[int] = Field(default_factory=list, description="steps that accepted a token at this depth")
    rows_executed: int = 0
    seed: int = Field(default=0, description="the seed used, the worker's own where the request gave none")
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per step, bonus token included; 0 before the first step."""
        return (self.steps + self.accepted) / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        """Tokens, tokens/s, tokens/step, accepted drafted tokens and reused ones of the prompt in one line."""
        seconds = (self.queue_ms + self.prefill_ms + self.decode_ms) / 1e3
        rate = self.output_tokens / seconds if seconds else 0.0
        text = f"{self.output_tokens} tokens in {seconds:.2f} s, {rate:.0f} tokens/s, {self.acceptance_length:.2f} "
        text += f"tokens/step, {self.accepted} of {self.drafted} drafted tokens accepted"
        return f"{text}, {self.cached_tokens} prompt tokens reused" if self.cached_tokens else text


def joined_extras(parts: Sequence[Any]) -> dict[str, Any]:
    """An answer's `EXTRAS`, from those of its outputs or chunks; None for fields that none of them has."""
    found = {name: [value for part in parts if (value := getattr(part, name)) is not None] for name in EXTRAS}
    return {name: list(chain.from_iterable(values)) if values else None for name, values in found.items()}


_FIELD_PROBLEMS = {"extra_forbidden": "unknown field", "missing": "required field is missing"}
_LENGTH_UNITS = {"too_long": "items", "string_too_long": "characters"}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def describe(error: ValidationError) -> str:
    """The first problems of a pydantic error in one line, each with its field and value."""
    problems = []
    for item in error.errors()[:4]:
        field = clipped(place(item["loc"]))
        text = item["msg"].removeprefix("Value error, ")
        if problem := _FIELD_PROBLEMS.get(item["type"]):
            problems.append(f"{field}: {problem}")
        elif item["type"] == "words_too_long":
            problems.append(f"{field}: {text}")
        elif unit := _LENGTH_UNITS.get(item["type"]):
            problems.append(f"{field}: expected at most {item['ctx']['max_length']} {unit}, got {len(item['input'])}")
        elif field:
            value = "" if ", got " in text else f", got {shown(item['input'])}"
            problems.append(f"{field}: {text[:1].lower()}{text[1:]}{value}")
        else:
            problems.append(text)
    return "; ".join(problems)


def clipped(text: str, most: int = 60) -> str:
    """The start of a text that a client chose, for a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """A client's value in one short line, for a message."""
    return _SHORT.repr(value)
