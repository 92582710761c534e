"""Triton's HTTP streams, `generate_stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redraft.loadtest.clients import sse
from redraft.loadtest.clients.base import Generation, GenerationError, Piece, read_counters


class TritonHttp:
    """The decoupled model `model` of the Triton server at `url`, http://HOST:PORT; `metrics_url` is its Prometheus
    page. Made inside a running event loop."""

    def __init__(self, url: str, model: str = "ensemble", metrics_url: str | None = None):
        self._session = sse.new_session()
        self._live, self._url = f"{url}/v2/health/live", f"{url}/v2/models/{model}/generate_stream"
        self._metrics_url = metrics_url

    async def is_live(self) -> bool:
        """Whether a server answers at all."""
        return await sse.is_there(self._session, self._live)

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the text of each event. Raises GenerationError."""
        async for data in sse.events(self._session, self._url, _body(generation)):
            event = sse.content(data)
            if "error" in event:
                raise GenerationError(sse.error_message(data))
            if not isinstance(text := event.get("text_output"), str):
                raise GenerationError(f"expected text_output in each event, got {data[:200]!r}")
            yield Piece(text)

    async def counters(self) -> dict[str, float]:
        """See `read_counters`."""
        return await read_counters(self._metrics_url)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _body(generation: Generation) -> dict[str, Any]:
    fields = {"random_seed" if name == "seed" else name: value for name, value in generation.sampling.items()}
    fields |= {"text_input": generation.text, "max_tokens": generation.max_tokens}
    fields |= {"stream": True, "exclude_input_in_output": True}
    if not generation.add_special_tokens:
        fields["add_special_tokens"] = False
    if generation.bad_words:
        fields["bad_words"] = list(generation.bad_words)
    if generation.method:
        fields["drafting_method"] = generation.method
    return fields
