"""The request fields of the TensorRT-LLM Triton models, translated to the worker's protocol.

Tensors arrive with a batch dimension of 1 in front. Everything is checked here or by `redraft.worker.protocol`;
messages name the field as the client knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from redraft.request import (
    MAX_MESSAGE_BYTES,
    MAX_WORDS,
    PROTOCOL_LIMITS,
    GenerateRequest,
    InvalidRequest,
    PromptLimits,
    describe,
    shown,
)

_SHARED = {
    "temperature": "sampling.temperature",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "min_length": "sampling.min_length",
    "random_seed": "sampling.seed",
    "end_id": "end_id",
    "pad_id": "pad_id",
    "return_log_probs": "return_log_probs",
    "exclude_input_in_output": "exclude_input_in_output",
    "drafting_method": "method",
}
_LISTS = {"input_ids", "stop_words", "bad_words"}
_MUST_BE_ONE = {"beam_width", "num_return_sequences"}
_SEQUENCE_PARAMETERS = {"sequence_id", "sequence_start", "sequence_end"}
_TRITON_PARAMETERS = {"id", "priority", "timeout", "binary_data_output"} | _SEQUENCE_PARAMETERS
_CLIENT_PARAMETERS = {"Streaming"}
"""Sent by TensorRT-LLM's own clients; the tensor `stream` says the same."""
_MAX_PARAMETERS = 10_000
_MOST_NAMED = 4


@dataclass(frozen=True)
class Contract:
    """Field names of one Triton model: `fields` maps a client's name to the protocol's (dotted) name.

    What is `without_effect` concerns beam search, and is accepted.
    """

    required: tuple[str, ...]
    fields: Mapping[str, str]
    without_effect: tuple[str, ...]

    def parse(
        self,
        request_id: str,
        tensors: Mapping[str, np.ndarray],
        parameters: str = "",
        limits: PromptLimits = PROTOCOL_LIMITS,
    ) -> GenerateRequest:
        """The worker's request for one Triton request.

        `tensors` are the inputs by name, batch dimension included; `parameters` is Triton's JSON of request
        parameters, where the HTTP generate endpoint puts the id and every field that the model does not know; `limits`
        are the worker's. Raises InvalidRequest with the client's field name, the value and the expectation.
        """
        self._refuse_unknown(parameters)
        for name in self.required:
            if name not in tensors:
                raise InvalidRequest(f"{name}: required field is missing")
        if "input_lengths" in tensors:
            tensors = _cut(tensors)
        message: dict[str, Any] = {"id": request_id}
        for name, tensor in tensors.items():
            if name in _MUST_BE_ONE:
                if (value := _scalar(name, tensor)) != 1:
                    raise InvalidRequest(f"{name}: expected 1 (one sequence per request), got {value}")
            elif name in self.fields:
                self._check_size(name, tensor, limits)
                value = _list(name, tensor) if self.fields[name] in _LISTS else _scalar(name, tensor)
                _put(message, self.fields[name], value)
            elif name not in self.without_effect:
                raise InvalidRequest(f"{name}: unknown field")
        try:
            return GenerateRequest.model_validate(message)
        except ValidationError as error:
            raise InvalidRequest(self.in_client_terms(describe(error))) from None

    def in_client_terms(self, text: str) -> str:
        """An error text (`field: problem; field: problem`) with the client's names of the fields."""
        names = {protocol: client for client, protocol in self.fields.items()}
        pattern = "|".join(re.escape(name) for name in names)
        return re.sub(rf"(?:^|(?<=; ))({pattern})(?!\w)", lambda match: names[match.group()], text)

    def _refuse_unknown(self, parameters: str) -> None:
        if len(parameters) > _MAX_PARAMETERS:
            raise InvalidRequest(
                f"id and unknown fields: expected at most {_MAX_PARAMETERS} characters, got {len(parameters)}"
            )
        try:
            given = json.loads(parameters) if parameters else {}
        except RecursionError:
            raise InvalidRequest("id and unknown fields: expected JSON that is not nested so deeply") from None
        expected = _TRITON_PARAMETERS | _CLIENT_PARAMETERS
        unknown = [name for name in given if name not in expected and not name.startswith("triton_")]
        if unknown:
            known = ", ".join(sorted({*self.fields, *_MUST_BE_ONE, *self.without_effect}))
            named = ", ".join(shown(name) for name in sorted(unknown)[:_MOST_NAMED])
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            raise InvalidRequest(f"unknown field {named}{more}: expected some of {known}")

    def _check_size(self, name: str, tensor: np.ndarray, limits: PromptLimits) -> None:
        """Refuse what is too large before it is converted."""
        field = self.fields[name]
        try:
            if field == "text" and tensor.size == 1:
                limits.check_text(len(tensor.item()))
            elif field == "input_ids":
                limits.check_tokens(tensor.size)
            elif tensor.size > (most := MAX_WORDS.get(field, tensor.size)):
                raise InvalidRequest(f"{field}: expected at most {most} items, got {tensor.size}")
        except InvalidRequest as error:
            raise InvalidRequest(self.in_client_terms(str(error))) from None


ENSEMBLE = Contract(
    ("text_input", "max_tokens"),
    _SHARED
    | {
        "text_input": "text",
        "max_tokens": "max_tokens",
        "stream": "stream",
        "top_k": "sampling.top_k",
        "top_p": "sampling.top_p",
        "stop_words": "stop_words",
        "bad_words": "bad_words",
    },
    ("length_penalty",),
)
TENSORRT_LLM = Contract(
    ("input_ids", "request_output_len"),
    _SHARED
    | {
        "input_ids": "input_ids",
        "request_output_len": "max_tokens",
        "streaming": "stream",
        "runtime_top_k": "sampling.top_k",
        "runtime_top_p": "sampling.top_p",
    },
    ("len_penalty", "early_stopping"),
)


def _scalar(name: str, tensor: np.ndarray) -> Any:
    if tensor.size != 1:
        raise InvalidRequest(f"{name}: expected one value, got shape {list(tensor.shape)}")
    return _value(name, tensor.reshape(-1)[0])


def _list(name: str, tensor: np.ndarray) -> list[Any]:
    flat = tensor.reshape(-1)
    return [_value(name, item) for item in flat] if tensor.dtype == object else flat.tolist()


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
