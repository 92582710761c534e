"""OpenAI's API: chat completions for conversations, completions for texts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from redraft.loadtest.clients import sse
from redraft.loadtest.clients.base import Generation, GenerationError, Piece, read_counters

KEY = "REDRAFT_API_KEY"
"""The environment variable with the server's keys, if it asks for one: the first is sent."""


class OpenAIServer:
    """The model `model` of the server whose `/v1` is at `url`, http://HOST:PORT, by default its first one.

    `metrics_url` is the Prometheus page of the service's Triton. Made inside a running event loop.
    """

    def __init__(self, url: str, model: str | None = None, metrics_url: str | None = None):
        keys = os.environ.get(KEY, "").split()
        self._session = sse.new_session({"Authorization": f"Bearer {keys[0]}"} if keys else None)
        self._url, self.model, self._metrics_url = f"{url}/v1", model or "", metrics_url

    async def is_live(self) -> bool:
        """Whether a server answers at all. Finds the model's name. Raises GenerationError for one that refuses."""
        try:
            async with self._session.get(f"{self._url}/models") as answer:
                if answer.status != 200:
                    message = sse.error_message(await answer.text())
                    raise GenerationError(f"{self._url}/models: status {answer.status}: {message}")
                self.model = self.model or (await answer.json())["data"][0]["id"]
        except aiohttp.ClientError:
            return False
        return True

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the text of each event, and at the end the number of tokens that the server counted. Raises
        GenerationError."""
        path = "chat/completions" if generation.messages else "completions"
        async for data in sse.events(self._session, f"{self._url}/{path}", self._body(generation)):
            if data == "[DONE]":
                return
            event = sse.content(data)
            if event.get("error"):
                raise GenerationError(sse.error_message(data))
            text = "".join(_text(choice) for choice in event["choices"])
            tokens = (event.get("usage") or {}).get("completion_tokens")
            yield Piece(text, statistics=event.get("metrics") or {}, output_tokens=tokens)
        raise GenerationError("the stream ended before [DONE]")

    def _body(self, generation: Generation) -> dict[str, Any]:
        body = {"min_tokens" if name == "min_length" else name: value for name, value in generation.sampling.items()}
        body |= {"model": self.model, "max_tokens": generation.max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if generation.bad_words:
            body["bad_words"] = list(generation.bad_words)
        if generation.method:
            body["drafting_method"] = generation.method
        if generation.messages:
            return body | {"messages": list(generation.messages)}
        plain = {} if generation.add_special_tokens else {"add_special_tokens": False}
        return body | plain | {"prompt": generation.text}

    async def counters(self) -> dict[str, float]:
        """See `read_counters`."""
        return await read_counters(self._metrics_url)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _text(choice: dict[str, Any]) -> str:
    return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
