"""The interface of the clients that a load test sends with."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from redraft.chat import ChatMessage
from redraft.metrics import read

TIMEOUT_S = 600.0
"""Longest time of one request."""


class GenerationError(RuntimeError):
    """A request that the server refused or lost; the text is the server's message."""


@dataclass(frozen=True)
class Generation:
    """One request; `sampling` holds fields of `redraft.request.SamplingConfig`."""

    text: str
    """The whole prompt, written with the chat template."""
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    method: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    """The conversation that `text` was written from; empty where the text is none. Servers that apply the template
    themselves are sent it instead of the text."""
    add_special_tokens: bool = True
    """False: the server's tokenizer adds none to the text, since the template has written them."""


@dataclass
class Piece:
    """What one streamed chunk brings; all but the text only where the server tells it."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)
    output_tokens: int | None = None
    """Tokens of the whole answer."""


class Client(Protocol):
    """A connection to a server that streams generations."""

    def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the pieces of a generation as they come. Raises GenerationError."""
        ...

    async def counters(self) -> dict[str, float]:
        """Counters since the server's start, by name; empty where it has none."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


async def read_counters(metrics_url: str | None) -> dict[str, float]:
    """The values of our metrics on a page by name, see `redraft.metrics.read`; empty without a page.

    Raises GenerationError for a page that is not there, or is none.
    """
    return await asyncio.to_thread(_fetch, metrics_url) if metrics_url else {}


def _fetch(url: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return read(answer.read().decode())
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise GenerationError(f"{url}: no metrics: {error}") from None
