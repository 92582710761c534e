"""The models around `tensorrt_llm`: `preprocessing` encodes a prompt and its words, `postprocessing` decodes an answer.

Imported inside Triton's Python backend only.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from redraft.errors import Code
from redraft.request import InvalidRequest
from redraft.serving.triton.backend import end_with_supervisor, error_response, inputs
from redraft.serving.triton.fields import PREPROCESSING
from redraft.serving.triton.messages import INTERNAL_ERROR
from redraft.text import TextCodec
from redraft.worker.protocol import PROBE


def _read(bundle: Path) -> tuple[TextCodec, dict[str, Any]]:
    """A bundle's tokenizer and configuration."""
    # By their bytes: this Python takes paths for ASCII, and the tokenizer's reader wants UTF-8.
    pb_utils.Logger.log_info(f"reads the tokenizer of {bundle.name!a}")
    tokenizer = (bundle / "tokenizer.json").read_bytes().decode()
    return TextCodec.of_json(tokenizer), json.loads((bundle / "config.json").read_bytes())


class TokenModel:
    """Base of both models: each request has one response, made of arrays and the bundle's tokenizer."""

    def initialize(self, args: dict[str, str]) -> None:
        """Take the bundle's folder from the model's parameter `tokenizer_dir`. It is read at the first request, and
        again where a link leads to another bundle."""
        end_with_supervisor()
        parameters = json.loads(args["model_config"])["parameters"]
        self._bundle = Path(parameters["tokenizer_dir"]["string_value"])
        self._read = lru_cache(1)(_read)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer Triton's requests."""
        return [self._answer(request) for request in requests]

    def outputs(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Output arrays by name, for the input arrays. Raises InvalidRequest."""
        raise NotImplementedError

    @property
    def codec(self) -> TextCodec:
        """The bundle's tokenizer."""
        return self._read(self._bundle.resolve())[0]

    @property
    def config(self) -> dict[str, Any]:
        """The bundle's configuration."""
        return self._read(self._bundle.resolve())[1]

    def _answer(self, request: Any) -> Any:
        if request.request_id() == PROBE:  # answered without the tokenizer, which would take memory that nobody needs
            return pb_utils.InferenceResponse([])
        try:
            outputs = self.outputs(inputs(request))
            return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
        except InvalidRequest as error:
            return error_response(error.code, error.message)
        except Exception:
            pb_utils.Logger.log_error(traceback.format_exc())
            return error_response(Code.INTERNAL, INTERNAL_ERROR)


class Preprocessing(TokenModel):
    """From text to the inputs of `tensorrt_llm`."""

    def outputs(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`INPUT_ID` int32[1, n], words int32[1, 2, n], the rest int32[1, 1]."""
        limits = self.codec.limits(self.config["limits"]["max_len"])
        request = PREPROCESSING.parse("preprocessing", tensors, limits=limits)
        prompt = self.codec.encode(request.text or "", request.add_special_tokens)
        limits.check_tokens(len(prompt))
        end_id = request.end_id
        if end_id is None:
            end_id = next(iter(self.config["target"]["eos_token_ids"]), -1)
        pad_id = end_id if request.pad_id is None else request.pad_id
        numbers = {
            "REQUEST_INPUT_LEN": len(prompt),
            "REQUEST_OUTPUT_LEN": request.max_tokens,
            "DECODER_INPUT_ID": pad_id,
            "REQUEST_DECODER_INPUT_LEN": 1,
            "OUT_END_ID": end_id,
            "OUT_PAD_ID": pad_id,
        }
        return {
            "INPUT_ID": np.array([prompt], np.int32),
            "STOP_WORDS_IDS": self._words(request.stop_words, "STOP_WORDS_DICT" in tensors),
            "BAD_WORDS_IDS": self._words(request.bad_words, "BAD_WORDS_DICT" in tensors),
            **{name: np.array([[number]], np.int32) for name, number in numbers.items()},
        }

    def _words(self, words: list[str], in_request: bool) -> np.ndarray:
        """Words as int32[1, 2, n]: the ids of all of them one after the other, and where each word ends. The shorter
        row is filled up, with -1 below; n is at least 1 for words that were given, as TensorRT-LLM has it."""
        encoded = self.codec.encode_words(words)
        array = np.zeros((1, 2, max(sum(map(len, encoded)), int(in_request))), np.int32)
        array[0, 1] = -1
        array[0, 0, : sum(map(len, encoded))] = [token for ids in encoded for token in ids]
        array[0, 1, : len(encoded)] = np.cumsum([len(ids) for ids in encoded])
        return array


class Postprocessing(TokenModel):
    """From the outputs of `tensorrt_llm` to text."""

    def outputs(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`OUTPUT` string[b], from ids int32[1, b, n] and their numbers int32[1, b]."""
        (beams,), (lengths,) = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
        if len(beams) != len(lengths):
            raise InvalidRequest(
                f"SEQUENCE_LENGTH: expected one for each of {len(beams)} sequences, got {len(lengths)}"
            )
        texts = [self._decode(ids, int(length)) for ids, length in zip(beams, lengths, strict=True)]
        return {"OUTPUT": np.array(texts, np.object_)}

    def _decode(self, ids: np.ndarray, length: int) -> bytes:
        most, vocab_size = self.config["limits"]["max_len"], self.config["target"]["vocab_size"]
        if not 0 <= length <= min(len(ids), most):
            raise InvalidRequest(f"SEQUENCE_LENGTH: expected 0 to {min(len(ids), most)}, got {length}")
        tokens = ids[:length].tolist()
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise InvalidRequest(f"TOKENS_BATCH: expected token ids from 0 to {vocab_size - 1}, got {wrong[0]}")
        return self.codec.decode(tokens).encode()
