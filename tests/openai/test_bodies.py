"""Bodies that arrive at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from redraft.openai import service as module
from redraft.openai.errors import ApiError
from redraft.openai.schemas import CompletionBody
from redraft.openai.service import Service

BODY = b'{"prompt": "Once"}'


def test_bodies_beyond_what_all_may_have_are_refused(monkeypatch):
    """Those that have been read, or whose client is gone, count no more."""
    monkeypatch.setattr(module, "MAX_BODIES_BYTES", len(BODY) + 5)
    model = SimpleNamespace(check_name=lambda _: None, replaced=False)
    service = Service(model, None, None, silence_s=30, tracing=None)

    def accept(body: bytes, more: bool = False):
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": more})
        request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, messages.get)
        return service.accept(request, CompletionBody, lambda body, _: body.prompt)

    async def talk() -> None:
        arriving = asyncio.ensure_future(accept(BODY[:9], more=True))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await accept(BODY)
        assert (refused.value.status, "Retry-After" in refused.value.headers) == (429, True)
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
        assert (await accept(BODY))[1] == ["Once"]

    asyncio.run(talk())
