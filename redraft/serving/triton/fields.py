"""The request fields of the TensorRT-LLM Triton models, translated to the worker's protocol.

Tensors arrive with a batch dimension of 1 in front. Everything is checked here or by `redraft.worker.protocol`;
messages name the field as the client knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from redraft.request import (
    FIELDS,
    MAX_MESSAGE_BYTES,
    MAX_WORDS_TOKENS,
    PROTOCOL_LIMITS,
    GenerateRequest,
    InvalidRequest,
    PromptLimits,
    describe,
    shown,
)
from redraft.samplers import PENALTIES, penalized, turned_off

_GUIDE_KINDS = {"json": "json", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
NUM_TOKENS = ("return_num_input_tokens", "return_num_output_tokens")
PERF_METRICS = "return_perf_metrics"
STOP = "stop"
_SEQUENCE_PARAMETERS = {"sequence_id", "sequence_start", "sequence_end"}
_TRITON_PARAMETERS = {"id", "priority", "timeout", "binary_data_output"} | _SEQUENCE_PARAMETERS
_CLIENT_PARAMETERS = {"Streaming", "accumulate_tokens"}
"""Sent by clients of TensorRT-LLM, without effect there too: the tensor `stream` says the first, and whoever sends the
second joins the chunks itself."""
_MAX_PARAMETERS = 10_000
_MOST_NAMED = 4


class Rule(Enum):
    """What a model does with a tensor that is no field of the worker's request."""

    FLAG = "answered by the model itself"
    IGNORED = "accepted without effect"
    ONE = "must be 1"
    FALSE = "must be false"
    CUT = "applied to another tensor"


class OtherTensor(NamedTuple):
    """A tensor of TensorRT-LLM's models that is no field of the worker's request, by its names in `ensemble` and
    `tensorrt_llm`; an empty name means that the model does not have it."""

    ensemble: str
    tensorrt_llm: str
    dtype: str
    dims: str
    rule: Rule
    meaning: str


_ONE_SEQUENCE, _NO_LOGITS = "one sequence per request", "logits are not returned"
_BEAMS, _ENCODERS, _DECAY = "concerns beam search", "concerns encoders", "concerns a top-p that decays"
OTHER_TENSORS = (
    OtherTensor("", "input_lengths", "INT32", "1", Rule.CUT, "how many of `input_ids` are the prompt"),
    OtherTensor(NUM_TOKENS[0], NUM_TOKENS[0], "BOOL", "1", Rule.FLAG, "adds `num_input_tokens`"),
    OtherTensor(NUM_TOKENS[1], NUM_TOKENS[1], "BOOL", "1", Rule.FLAG, "adds `num_output_tokens`"),
    OtherTensor(PERF_METRICS, PERF_METRICS, "BOOL", "1", Rule.FLAG, "adds the [metrics of a request](#outputs)"),
    OtherTensor("", STOP, "BOOL", "1", Rule.FLAG, "[stops](#stopping-a-request) the request with the same id"),
    OtherTensor("beam_width", "beam_width", "INT32", "1", Rule.ONE, _ONE_SEQUENCE),
    OtherTensor("num_return_sequences", "num_return_sequences", "INT32", "1", Rule.ONE, _ONE_SEQUENCE),
    OtherTensor("", "runtime_top_p_decay", "FP32", "1", Rule.ONE, "top-p stays the same"),
    OtherTensor("return_context_logits", "return_context_logits", "BOOL", "1", Rule.FALSE, _NO_LOGITS),
    OtherTensor("return_generation_logits", "return_generation_logits", "BOOL", "1", Rule.FALSE, _NO_LOGITS),
    OtherTensor("length_penalty", "len_penalty", "FP32", "1", Rule.IGNORED, _BEAMS),
    OtherTensor("", "early_stopping", "BOOL", "1", Rule.IGNORED, _BEAMS),
    OtherTensor("", "beam_search_diversity_rate", "FP32", "1", Rule.IGNORED, _BEAMS),
    OtherTensor("decoder_text_input", "", "STRING", "1", Rule.IGNORED, _ENCODERS),
    OtherTensor("", "decoder_input_ids", "INT32", "-1", Rule.IGNORED, _ENCODERS),
    OtherTensor("", "decoder_input_lengths", "INT32", "1", Rule.IGNORED, _ENCODERS),
    OtherTensor("", "runtime_top_p_min", "FP32", "1", Rule.IGNORED, _DECAY),
    OtherTensor("", "runtime_top_p_reset_ids", "INT32", "1", Rule.IGNORED, _DECAY),
)


@dataclass(frozen=True)
class Contract:
    """The tensors of one Triton model. `fields` maps a tensor's name to the place of its field in the worker's request;
    where several names mean one field, a request may use any of them. `others` are those that are no such field."""

    required: tuple[str, ...]
    fields: Mapping[str, str]
    others: Mapping[str, OtherTensor]

    @classmethod
    def of_model(cls, model: Literal["ensemble", "tensorrt_llm"], *required: str) -> Contract:
        """The contract of a model that generates, from the table of request fields."""
        fields = {name: field.path for field in FIELDS for name in getattr(field, model)}
        return cls(required, fields, {name: tensor for tensor in OTHER_TENSORS if (name := getattr(tensor, model))})

    def parse(
        self,
        request_id: str,
        tensors: Mapping[str, np.ndarray],
        parameters: str = "",
        limits: PromptLimits = PROTOCOL_LIMITS,
        timeout_us: int = 0,
    ) -> GenerateRequest:
        """The worker's request for one Triton request. The answer of a stream never starts with the prompt.

        `tensors` are the inputs by name, batch dimension included; `parameters` is Triton's JSON of request
        parameters, where the HTTP generate endpoint puts the id, the timeout and every field that the model does not
        know; `limits` are the worker's; `timeout_us` is the timeout of the other endpoints, 0 for none. Raises
        InvalidRequest with the client's field name, the value and the expectation.
        """
        penalties = penalized({name: _scalar(name, tensors[name]) for name in PENALTIES if name in tensors})
        timeout_us = self._check_parameters(parameters, penalties).get("timeout", timeout_us)
        if type(timeout_us) is not int or timeout_us < 0:
            raise InvalidRequest(f"timeout: expected a whole number of microseconds, got {shown(timeout_us)}")
        for name in self.required:
            if name not in tensors:
                raise InvalidRequest(f"{name}: required field is missing")
        if "input_lengths" in tensors:
            tensors = _cut(tensors)
        values: dict[str, tuple[str, Any]] = {}
        for name, tensor in tensors.items():
            if field := self.fields.get(name):
                self._check_size(name, tensor, limits)
                value = _READERS.get(field, _scalar)(name, tensor)
                other, before = values.setdefault(field, (name, value))
                if other != name and before != value:
                    raise InvalidRequest(
                        f"{other} and {name} mean the same: expected one value, got {shown(before)} and {shown(value)}"
                    )
            elif name in self.others:
                _check_other(name, tensor, self.others[name])
            else:
                raise InvalidRequest(f"{name}: unknown field")
        message: dict[str, Any] = {"id": request_id}
        for field, (name, value) in values.items():
            # Tensors have no null, so that an empty text stands for an absent one.
            if name in self.required or value not in ("", None):
                _put(message, field, value)
        if timeout_us:
            message["timeout_s"] = timeout_us / 1e6
        if message.get("stream"):
            message["exclude_input_in_output"] = True
        try:
            return GenerateRequest.model_validate(message)
        except ValidationError as error:
            raise InvalidRequest(self.in_client_terms(describe(error), tensors)) from None

    def flagged(self, tensors: Mapping[str, np.ndarray]) -> frozenset[str]:
        """The flags that a request sets. Raises InvalidRequest for one that is no single value."""
        flags = (name for name, other in self.others.items() if other.rule is Rule.FLAG and name in tensors)
        return frozenset(name for name in flags if _scalar(name, tensors[name]))

    def in_client_terms(self, text: str, used_names: Iterable[str] = ()) -> str:
        """An error text (`field: problem; field: problem`) with the client's names of the fields: of
        several, one of `used_names`."""
        names = {protocol: client for client, protocol in self.fields.items()}
        names |= {self.fields[client]: client for client in used_names if client in self.fields}
        pattern = "|".join(re.escape(name) for name in names)
        return re.sub(rf"(?:^|(?<=; ))({pattern})(?!\w)", lambda match: names[match.group()], text)

    def _check_parameters(self, parameters: str, penalties: bool) -> dict[str, Any]:
        """Triton's parameters of a request with or without penalties; none of them is unknown."""
        if len(parameters) > _MAX_PARAMETERS:
            raise InvalidRequest(
                f"id and unknown fields: expected at most {_MAX_PARAMETERS} characters, got {len(parameters)}"
            )
        try:
            values: dict[str, Any] = json.loads(parameters) if parameters else {}
        except RecursionError:
            raise InvalidRequest("id and unknown fields: expected JSON that is not nested so deeply") from None
        expected = _TRITON_PARAMETERS | _CLIENT_PARAMETERS
        unknown = [
            name
            for name, value in values.items()
            if not (name in expected or name.startswith("triton_") or turned_off(name, value, penalties))
        ]
        if unknown:
            known = ", ".join(sorted({*self.fields, *self.others}))
            named = ", ".join(shown(name) for name in sorted(unknown)[:_MOST_NAMED])
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            raise InvalidRequest(f"unknown field {named}{more}: expected some of {known}")
        return values

    def _check_size(self, name: str, tensor: np.ndarray, limits: PromptLimits) -> None:
        """Refuse what is too large before it is converted."""
        field = self.fields[name]
        try:
            if field == "text" and tensor.size == 1:
                limits.check_text(len(tensor.item()))
            elif field == "input_ids":
                limits.check_tokens(tensor.size)
            elif field in MAX_WORDS_TOKENS:
                if tensor.size // 2 > (most := MAX_WORDS_TOKENS[field]):
                    raise InvalidRequest(f"{field}: expected at most {most} token ids, got {tensor.size // 2}")
            elif field in _MAX_ITEMS and tensor.size > (most := _MAX_ITEMS[field]):
                raise InvalidRequest(f"{field}: expected at most {most} items, got {tensor.size}")
        except InvalidRequest as error:
            raise InvalidRequest(self.in_client_terms(error.message), error.code) from None


ENSEMBLE = Contract.of_model("ensemble", "text_input", "max_tokens")
TENSORRT_LLM = Contract.of_model("tensorrt_llm", "input_ids", "request_output_len")
PREPROCESSING = Contract(
    ("QUERY", "REQUEST_OUTPUT_LEN"),
    {
        "QUERY": "text",
        "ADD_SPECIAL_TOKENS": "add_special_tokens",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "STOP_WORDS_DICT": "stop_words",
        "BAD_WORDS_DICT": "bad_words",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
    },
    {"DECODER_QUERY": OtherTensor("", "", "STRING", "1", Rule.IGNORED, _ENCODERS)},
)


def _scalar(name: str, tensor: np.ndarray) -> Any:
    if tensor.size != 1:
        raise InvalidRequest(f"{name}: expected one value, got shape {list(tensor.shape)}")
    return _value(name, tensor.reshape(-1)[0])


def _list(name: str, tensor: np.ndarray) -> list[Any]:
    flat = tensor.reshape(-1)
    return [_value(name, item) for item in flat] if tensor.dtype == object else flat.tolist()


def _words(name: str, tensor: np.ndarray) -> list[list[int]]:
    """Words of token ids, from a tensor [1, 2, n]: the ids of all words one after the other, and where each word ends,
    filled up with -1."""
    if tensor.ndim != 3 or tensor.shape[:2] != (1, 2):
        raise InvalidRequest(f"{name}: expected shape [1, 2, n], got {list(tensor.shape)}")
    ids, ends = tensor[0].tolist()
    ends = ends[: ends.index(-1)] if -1 in ends else ends
    starts = [0, *ends[:-1]]
    if any(not start < end <= len(ids) for start, end in zip(starts, ends, strict=False)):
        raise InvalidRequest(f"{name}: expected ends of words that grow up to {len(ids)}, got {shown(ends)}")
    return [ids[start:end] for start, end in zip(starts, ends, strict=False)]


def _guide_kind(name: str, tensor: np.ndarray) -> Any:
    kind = _scalar(name, tensor)
    if kind and kind not in _GUIDE_KINDS:
        raise InvalidRequest(f"{name}: expected one of {', '.join(_GUIDE_KINDS)}, got {shown(kind)}")
    return _GUIDE_KINDS.get(kind)


_LISTS = {field.path: field for field in FIELDS if "-1" in field.tensor[1]}
_READERS: dict[str, Callable[[str, np.ndarray], Any]] = {
    path: _words if field.tensor[1] == "2, -1" else _list for path, field in _LISTS.items()
} | {"guide.kind": _guide_kind}
"""How fields of more than one value are read."""
_MAX_ITEMS = {path: int(field.bounds["max_length"]) for path, field in _LISTS.items()}


def _check_other(name: str, tensor: np.ndarray, other: OtherTensor) -> None:
    """Raises InvalidRequest for a value that asks for what this server does not have."""
    if other.rule is Rule.ONE and (value := _scalar(name, tensor)) != 1:
        raise InvalidRequest(f"{name}: expected 1 ({other.meaning}), got {shown(value)}")
    if other.rule is Rule.FALSE and (value := _scalar(name, tensor)):
        raise InvalidRequest(f"{name}: {other.meaning}: expected none, got {shown(value)}")


def _value(name: str, item: Any) -> Any:
    if isinstance(item, bytes):
        if len(item) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"{name}: expected at most {MAX_MESSAGE_BYTES} bytes, got {len(item)}")
        try:
            return item.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name}: expected UTF-8 text, got {error.reason} at byte {error.start}") from None
    if isinstance(item, np.float32):
        return float(str(item))  # the decimal that the client wrote: 0.7, not 0.699999988
    return item.item() if isinstance(item, np.generic) else item


def _cut(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors without `input_lengths`, and `input_ids` cut to it."""
    rest = dict(tensors)
    length, ids = _scalar("input_lengths", rest.pop("input_lengths")), rest["input_ids"].reshape(-1)
    if not 1 <= length <= ids.size:
        raise InvalidRequest(f"input_lengths: expected 1 to {ids.size}, the number of input_ids, got {length}")
    return rest | {"input_ids": ids[:length]}


def _put(message: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        message = message.setdefault(parent, {})
    message[leaf] = value
