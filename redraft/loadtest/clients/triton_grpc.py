"""Triton's gRPC streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from redraft.loadtest.clients.base import TIMEOUT_S, Generation, GenerationError, Piece, read_counters

FLOAT_FIELDS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
DTYPES = {**dict.fromkeys(FLOAT_FIELDS, np.float32), "top_k": np.int32, "min_length": np.int32}


class TritonGrpc:
    """The decoupled model `model` of the Triton server at `url`, HOST:PORT; `metrics_url` is its Prometheus page."""

    def __init__(self, url: str, model: str = "ensemble", metrics_url: str | None = None):
        self._client = InferenceServerClient(url)
        self._model, self._metrics_url = model, metrics_url

    async def is_live(self) -> bool:
        """Whether a server answers at all."""
        try:
            return await self._client.is_server_live()
        except InferenceServerException:
            return False

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the text of each response until the server marks its last. Raises GenerationError."""
        hold_open = asyncio.Event()
        responses = self._client.stream_infer(self._requests(generation, hold_open), stream_timeout=TIMEOUT_S)
        try:
            async for result, error in responses:
                if error is not None:
                    raise GenerationError(error.message())
                text = result.as_numpy("text_output")
                if text is not None and text.size:
                    yield Piece(text.reshape(-1)[0].decode("utf-8", "replace"))
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return
            raise GenerationError("the stream ended before the final response")
        except InferenceServerException as error:
            raise GenerationError(error.message()) from None
        except grpc.RpcError as error:
            raise GenerationError(str(error.details())) from None
        finally:
            hold_open.set()
            responses.cancel()

    async def _requests(self, generation: Generation, hold_open: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": self._model, "inputs": _inputs(generation)}
        await hold_open.wait()

    async def counters(self) -> dict[str, float]:
        """See `read_counters`."""
        return await read_counters(self._metrics_url)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _inputs(generation: Generation) -> list[InferInput]:
    values: dict[str, np.ndarray] = {
        "text_input": np.array([[generation.text.encode()]], object),
        "max_tokens": np.array([[generation.max_tokens]], np.int32),
        "stream": np.array([[True]]),
        "exclude_input_in_output": np.array([[True]]),
    }
    if not generation.add_special_tokens:
        values["add_special_tokens"] = np.array([[False]])
    for name, value in generation.sampling.items():
        if name == "seed":
            values["random_seed"] = np.array([[value]], np.uint64)
        else:
            values[name] = np.array([[value]], DTYPES[name])
    if generation.bad_words:
        values["bad_words"] = np.array([[word.encode() for word in generation.bad_words]], object)
    if generation.method:
        values["drafting_method"] = np.array([[generation.method.encode()]], object)
    inputs = []
    for name, array in values.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
