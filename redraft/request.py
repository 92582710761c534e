"""What a client asks of an engine: a request, its fields and limits; and what it gains and costs."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from redraft.errors import Code, RequestError, place
from redraft.fields import entry, fields_of
from redraft.options import Options

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


FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
Alternatives = list[tuple[int, float]]
"""The most likely tokens at a place, each with its log-probability, the most likely first, of equals the lowest id."""
StopReason = int | str
"""What ended a text beside the model's own end tokens: a stop word, or the id of a token of `stop_token_ids`."""


class InvalidRequest(RequestError, ValueError):
    """A message that cannot be served as it is; the text says which field, its value and what was expected.

    It is a ValueError, so that pydantic's validators may raise it.
    """


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
                f"{self.text_bytes} bytes",
                Code.CONTEXT_LENGTH,
            )

    def check_tokens(self, count: int) -> None:
        """Raises InvalidRequest for a prompt of too many tokens."""
        if count > self.tokens:
            text = f"the prompt has {count} tokens: expected at most {self.tokens}"
            raise InvalidRequest(text, Code.CONTEXT_LENGTH)


PROTOCOL_LIMITS = PromptLimits()


class StrictModel(BaseModel):
    """A message or a part of one: no unknown fields, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def seed_or_drawn(seed: int) -> int | None:
    """A seed; None for -1, with which vLLM and llama.cpp draw one."""
    return None if seed == -1 else seed


# The table of request fields: each is one entry of these classes, and `docs/developers/add-a-request-field.md` says
# what an entry does. The front ends that generate have all fields of `SamplingOptions` and `TextOptions`.


class SamplingOptions(StrictModel):
    """How the next token is chosen; a field that is absent (or null) has no effect.

    Decoding is greedy without a temperature. After it, `min_p` filters first, then `top_k` and `top_p`. Biases come
    before penalties and filters.
    """

    temperature: FiniteFloat | None = entry(
        None, "greedy below 0.0001, and where `top_k` is 1; else what sampling divides the logits by", ge=0
    )
    top_k: TopK | None = entry(None, "the most likely tokens only; 0 and -1 mean all", tensorrt_llm="runtime_top_k")
    top_p: FiniteFloat | None = entry(
        None,
        "the most likely tokens only that together have this probability; 0 counts as absent",
        tensorrt_llm="runtime_top_p",
        ge=0,
        le=1,
    )
    min_p: FiniteFloat | None = entry(
        None,
        "only tokens with at least this share of the most likely one's probability, after the temperature and before "
        "`top_k` and `top_p`",
        ge=0,
        le=1,
    )
    seed: Annotated[int, Field(ge=-1, lt=2**64), AfterValidator(seed_or_drawn)] | None = entry(
        None,
        "the same seed and request give the same text; another release may give another one. -1 is drawn",
        ensemble="random_seed seed",
        dtype="UINT64",
    )
    repetition_penalty: FiniteFloat | None = entry(
        None, "divides or multiplies the logits of the prompt's and the answer's tokens", ge=1 / MAX_PENALTY,
        le=MAX_PENALTY,
    )  # fmt: skip
    presence_penalty: FiniteFloat | None = entry(
        None, "subtracted from the logits of tokens that were there", ge=-MAX_PENALTY, le=MAX_PENALTY
    )
    frequency_penalty: FiniteFloat | None = entry(
        None, "subtracted from a token's logit each time that it was there", ge=-MAX_PENALTY, le=MAX_PENALTY
    )
    min_length: int | None = entry(
        None,
        "no end token before this many tokens",
        v1="min_tokens",
        ensemble="min_length min_tokens",
        ge=0,
        le=INT32_MAX,
    )
    logit_bias: dict[TokenId, Bias] | None = entry(
        None,
        "numbers from -100 to 100 by token id, added to the logits before penalties and filters",
        ensemble="",
        max_length=MAX_BIASES,
    )


class SamplingConfig(SamplingOptions):
    """The sampling of the worker's request."""

    penalize_prompt: bool = entry(
        True,
        "false: the presence and frequency penalties count the answer's tokens only, as `/v1` always has it",
        v1="",
        ensemble="",
    )

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


class Guide(StrictModel):
    """What the answer must be: `json` (any object, without a text), JSON that a `json_schema` describes, a text that
    a `regex` matches from start to end, one of a `grammar` (Lark or GBNF), or a `choice` from a JSON list of texts."""

    kind: GuideKind = entry(
        ...,
        "`json`, `json_schema`, `regex` or `ebnf_grammar`; `structural_tag` is refused, and `choice` has no name here. "
        '`""` means none',
        v1="",
        ensemble="guided_decoding_guide_type",
    )
    text: str = entry(
        "",
        "the schema, regex or grammar; empty for `json`",
        v1="",
        ensemble="guided_decoding_guide",
        max_length=MAX_GUIDE_CHARACTERS,
        validate_default=True,
    )
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


class TextOptions(StrictModel):
    """How a text is drafted, cached and written, and what ends it."""

    stream: bool = entry(
        False, "false: one answer with the whole text; true: chunks of new text", tensorrt_llm="streaming"
    )
    stop_words: list[Word] = entry(
        [],
        "words that end the text, which includes them unless `include_stop_words` is false; at most "
        f"{MAX_WORDS_CHARACTERS['stop_words']} characters in all",
        v1="stop",
        tensorrt_llm="",
        max_length=MAX_WORDS["stop_words"],
    )
    include_stop_words: bool = entry(
        True, "false: the text ends before the stop word", v1="include_stop_str_in_output", ensemble=""
    )
    stop_token_ids: list[TokenId] = entry(
        [],
        "tokens that end the text beside the end tokens, and are no part of it",
        max_length=MAX_WORDS["stop_token_ids"],
    )
    bad_words: list[Word] = entry(
        [],
        f"words that the text never has; at most {MAX_WORDS_CHARACTERS['bad_words']} characters in all",
        tensorrt_llm="",
        max_length=MAX_WORDS["bad_words"],
    )
    skip_special_tokens: bool = entry(
        True, "false: the text has special tokens too, other than those that end it", ensemble=""
    )
    method: str | None = entry(
        None,
        "one of the bundle's methods of drafting, or `auto_regressive`; none: the bundle's first",
        v1="drafting_method",
        ensemble="drafting_method",
        max_length=200,
    )
    draft_trees: bool = entry(False, "true: the answer has [the tree of each step](openai.md#draft-trees)", ensemble="")
    cache_prompt: bool = entry(
        True,
        "false: the prompt is prefilled anew, and [no other request reuses it](../guides/prefix-reuse.md)",
    )
    cache_salt: str | None = entry(
        None, "the request shares cached tokens only with requests of the same text", min_length=1, max_length=1000
    )
    store: bool = entry(
        True,
        "false: nothing of it is stored, for [drafters to learn from](../guides/drafts-that-learn.md) or "
        "[to be drafted again](../guides/served-texts.md)",
    )
    timeout_s: float | None = entry(
        None,
        "seconds from arrival, in the queue or not, after which the request ends with the text so far",
        v1="timeout",
        ensemble="",
        gt=0,
        le=MAX_TIMEOUT_S,
        allow_inf_nan=False,
    )

    @field_validator("stop_words", "bad_words")
    @classmethod
    def _drop_empty(cls, words: list[str], info: ValidationInfo) -> list[str]:
        most, size = MAX_WORDS_CHARACTERS[str(info.field_name)], sum(map(len, words))
        if size > most:
            raise PydanticCustomError("words_too_long", f"expected at most {most} characters in all, got {size}")
        return [word for word in words if word]


class GenerateRequest(TextOptions):
    """The worker's request: generate up to `max_tokens` tokens after a prompt given as `text` or as `input_ids`.

    `text` is taken as it is: a chat template is applied by the client, who sends its text with `add_special_tokens`
    false, since templates write them. Log-probabilities are the target's own, before processors and filters.
    """

    op: Literal["generate"] = "generate"
    id: str = Field(min_length=1, max_length=200)
    text: str | None = entry(
        None,
        "the prompt, taken as it is, without a chat template; this or `input_ids` is required",
        v1="",
        ensemble="text_input",
        tensorrt_llm="",
    )
    input_ids: list[TokenId] | None = entry(
        None,
        "the prompt's token ids, cut to `input_lengths`",
        v1="",
        ensemble="",
        tensorrt_llm="input_ids",
        max_length=MAX_INPUT_IDS,
        fail_fast=True,
    )
    max_tokens: int = entry(
        ...,
        "from 1 to what the context leaves. 0 only scores the prompt, with `prompt_log_probs`",
        v1="",
        tensorrt_llm="request_output_len",
        le=INT32_MAX,
    )
    add_special_tokens: bool = entry(
        True,
        "false: the tokenizer adds no special token, such as one that begins every text: for chats, whose templates "
        "write them. A token that the text begins with is not doubled",
        v1="",
        tensorrt_llm="",
    )
    sampling: SamplingConfig = SamplingConfig()
    end_id: int | None = entry(
        None,
        "replaces the model's own end tokens, unless it is one of them; -1: no token ends the text but "
        "`stop_token_ids`",
        v1="",
        ge=-1,
        le=INT32_MAX,
    )
    pad_id: int | None = entry(None, "accepted without effect", v1="", ge=-1, le=INT32_MAX)
    stop_word_ids: list[list[TokenId]] = entry(
        [],
        f"stop words as token ids, matched token by token; at most {MAX_WORDS_TOKENS['stop_word_ids']} ids in all",
        v1="",
        ensemble="",
        tensorrt_llm="stop_words_list",
        max_length=MAX_WORDS["stop_words"],
    )
    bad_word_ids: list[list[TokenId]] = entry(
        [],
        f"bad words as token ids; at most {MAX_WORDS_TOKENS['bad_word_ids']} ids in all",
        v1="",
        ensemble="",
        tensorrt_llm="bad_words_list",
        max_length=MAX_WORDS["bad_words"],
    )
    return_log_probs: bool = entry(False, "adds the log-probabilities of the answer's tokens", v1="")
    top_log_probs: int = entry(
        0,
        "this many alternatives for each token, with their log-probabilities; implies `return_log_probs`. In `/v1` "
        "`top_logprobs`, or the number `logprobs` of completions",
        v1="",
        ensemble="",
        ge=0,
        le=MOST_ALTERNATIVES,
    )
    prompt_log_probs: bool = entry(
        False,
        "adds the log-probabilities of the prompt's tokens, of all but the first. In `/v1` `prompt_logprobs`, or "
        "`echo` with `logprobs`",
        v1="",
        ensemble="",
    )
    guide: Guide | None = entry(
        None,
        "what the answer must be, unless another limit cuts it short: a "
        "[guide](../guides/structured-output.md) of a kind and a text. In `/v1` a [format](openai.md#formats)",
        v1="",
        ensemble="",
    )
    exclude_input_in_output: bool = entry(
        True, "false: the answer starts with the prompt; a stream never does in Triton's models", v1=""
    )
    client: str | None = Field(default=None, max_length=200)
    """Whose request it is, where a worker limits the requests of each client."""
    scope: str | None = Field(default=None, max_length=200)
    """A digest of its API key, by which the texts are told apart that requests may be drafted from."""

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


FIELDS = tuple(fields_of(GenerateRequest))
"""The table's entries."""
V1_NAMES = {field.name: field.v1 for field in FIELDS if field.v1}
"""The fields of `SamplingOptions` and `TextOptions`, with their names in `/v1`."""


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


@dataclasses.dataclass
class Generated:
    """What a request has gained: its whole answer, or what is new since the last part.

    A finish reason, a stop reason and statistics come with the last part. Log-probabilities and draft trees are there
    where asked for. `log_probs` has one per token, `prompt_log_probs` one per token of the prompt, None for its first;
    these come with the first part. The `top` ones have a list of (token id, log-probability) per token, the most likely
    first. `draft_trees` are those of the steps that gained the tokens.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None
    stats: SequenceStats | None = None
    log_probs: list[float] | None = None
    top_log_probs: list[Alternatives] | None = None
    prompt_log_probs: list[float | None] | None = None
    prompt_top_log_probs: list[Alternatives] | None = None
    draft_trees: list[DraftTree] | None = None


GENERATED = tuple(field.name for field in dataclasses.fields(Generated))
_LISTS = ("token_ids", "log_probs", "top_log_probs", "prompt_log_probs", "prompt_top_log_probs", "draft_trees")


def joined(parts: Sequence[Generated]) -> dict[str, Any]:
    """The fields of a whole answer, from its parts in their order. A list that no part has stays None."""
    whole = {name: getattr(parts[-1], name) for name in GENERATED} | {"text": "".join(part.text for part in parts)}
    for name in _LISTS:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        whole[name] = list(chain.from_iterable(values)) if values else None
    return whole


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
