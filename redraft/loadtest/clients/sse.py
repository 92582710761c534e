"""Server-sent events of one POST, and a session for many of them at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from redraft.loadtest.clients.base import TIMEOUT_S, GenerationError

LONGEST_LINE = 1 << 20


def new_session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session without a limit on connections: requests must never wait for each other on this side."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        read_bufsize=LONGEST_LINE,
        headers=headers,
    )


async def events(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """The data of each event. Raises GenerationError for another status than 200 and for a connection that breaks."""
    try:
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                raise GenerationError(f"status {answer.status}: {error_message(await answer.text())}")
            async for line in answer.content:
                if line.startswith(b"data:"):
                    yield line[5:].decode("utf-8", "replace").strip()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise GenerationError(f"{url}: {error or 'no answer in time'}") from None


async def is_there(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server answers at `url`, with whatever status."""
    try:
        async with session.get(url):
            return True
    except aiohttp.ClientError:
        return False


def content(data: str) -> dict[str, Any]:
    """The JSON object of an event's data. Raises GenerationError for anything else, such as half an event."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise GenerationError(f"expected a JSON object as an event, got {data[:200]!r}")
    return event


def error_message(body: str) -> str:
    """The message of an error in Triton's or OpenAI's shape; the body itself where it has neither."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body
