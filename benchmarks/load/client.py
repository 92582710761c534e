"""Streams generations from a Triton server (gRPC) or straight from an engine worker, through one interface."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from redraft.request import GenerateRequest, SamplingConfig
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import Chunk, ErrorMessage

FLOAT_FIELDS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
DTYPES = {**dict.fromkeys(FLOAT_FIELDS, np.float32), "top_k": np.int32, "min_length": np.int32}
METRICS_DELAY_S = 1.0


class GenerationError(RuntimeError):
    """A request that the server refused or lost; the text is the server's message."""


@dataclass(frozen=True)
class Generation:
    """One request; `sampling` holds fields of `redraft.request.SamplingConfig`."""

    text: str
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    method: str | None = None


@dataclass
class Piece:
    """What one streamed chunk brings; token ids and statistics only where the server tells them."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A server that streams generations."""

    def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the pieces of a generation as they come. Raises GenerationError."""
        ...

    async def counters(self) -> dict[str, float]:
        """Counters since the server's start, by name; empty where it has none."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class TritonBackend:
    """The decoupled model `model` of the Triton server at `url` (gRPC); `metrics_url` is its Prometheus page."""

    def __init__(self, url: str, model: str = "ensemble", metrics_url: str | None = None, timeout: float = 600.0):
        self._client = InferenceServerClient(url)
        self._model, self._metrics_url, self._timeout = model, metrics_url, timeout

    async def is_live(self) -> bool:
        """Whether a server answers at all."""
        try:
            return await self._client.is_server_live()
        except InferenceServerException:
            return False

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the text of each response until the server marks its last. Raises GenerationError."""
        hold_open = asyncio.Event()
        responses = self._client.stream_infer(self._requests(generation, hold_open), stream_timeout=self._timeout)
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
        """The values of the metrics page whose names start with `redraft_`, prefix removed, summed over labels.

        Waits first, since the page follows the worker with a delay.
        """
        if self._metrics_url is None:
            return {}
        await asyncio.sleep(METRICS_DELAY_S)
        return parse_metrics(await asyncio.to_thread(_fetch, self._metrics_url))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


class WorkerBackend:
    """The engine worker at `socket_path`, without a server in between."""

    def __init__(self, socket_path: str, timeout: float = 30.0):
        self.client = WorkerClient(socket_path)
        if not self.client.wait_connected(timeout):
            raise GenerationError(f"no engine worker at {socket_path} within {timeout} s")

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the worker's chunks, the last with the request's statistics. Raises GenerationError."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Chunk | ErrorMessage]()
        request = worker_request(generation, self.client.new_id())

        def deliver(message: Chunk | ErrorMessage) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        try:
            self.client.submit(request, deliver)
        except WorkerError as error:
            raise GenerationError(f"{error.code}: {error}") from None
        ended = False
        try:
            while not ended:
                message = await messages.get()
                if isinstance(message, ErrorMessage):
                    ended = True
                    raise GenerationError(f"{message.code}: {message.message}")
                ended = message.done
                statistics = asdict(message.stats) if message.stats else {}
                yield Piece(message.text, message.token_ids, statistics)
        finally:
            if not ended:
                self.client.cancel(request.id)

    async def counters(self) -> dict[str, float]:
        """The worker's totals."""
        return dict((await asyncio.to_thread(self.client.status)).totals)

    async def close(self) -> None:
        """Close the connection."""
        self.client.close()


def worker_request(generation: Generation, request_id: str) -> GenerateRequest:
    """The worker's form of a generation, streamed."""
    return GenerateRequest(
        id=request_id,
        text=generation.text,
        max_tokens=generation.max_tokens,
        stream=True,
        sampling=SamplingConfig(**generation.sampling),
        bad_words=list(generation.bad_words),
        method=generation.method,
    )


def _inputs(generation: Generation) -> list[InferInput]:
    values: dict[str, np.ndarray] = {
        "text_input": np.array([[generation.text.encode()]], object),
        "max_tokens": np.array([[generation.max_tokens]], np.int32),
        "stream": np.array([[True]]),
        "exclude_input_in_output": np.array([[True]]),
    }
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


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError) as error:
        raise GenerationError(f"{url}: no metrics: {error}") from None


def parse_metrics(page: str, prefix: str = "redraft_") -> dict[str, float]:
    """Samples of a Prometheus text page under `prefix`, prefix removed and summed over labels, buckets left out."""
    values: dict[str, float] = {}
    for match in re.finditer(rf"^{prefix}(\w+)(\{{.*\}})? (\S+)", page, re.MULTILINE):
        name = match[1]
        if not name.endswith("_bucket"):
            values[name] = values.get(name, 0.0) + float(match[3])
    return values
