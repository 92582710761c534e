"""Who may reach the front end, checked before a request is read.

A web page in a browser on the same machine can send requests to 127.0.0.1. It cannot choose the Host header, which
names the page's own site even where DNS points that name here, nor hide its Origin. So both must be this service's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import traceback
import uuid
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redraft.errors import Code
from redraft.openai.errors import ApiError
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.page import FILES
from redraft.openai.sse import json_response
from redraft.request import clipped
from redraft.serving.guard.limits import LINGER_S

EVERY_HOST = "*"
PROBED_PATHS = ("/health", "/metrics")
OPEN_PATHS = (*PROBED_PATHS, *FILES)
"""Paths that need no key: the live page asks for it."""
BEARER = "bearer "
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

log = logging.getLogger("redraft.openai")


@dataclass(frozen=True)
class Access:
    """The names that this service is reached by, and the keys of which it asks for one."""

    address: str = "127.0.0.1"
    hosts: frozenset[str] = field(default_factory=frozenset)
    keys: frozenset[str] = field(default_factory=frozenset, repr=False)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError for a request that may not pass."""
        if len(headers.getlist("host")) > 1:  # a proxy in front may have read another one
            raise ApiError("the request has several Host headers: expected one")
        host = headers.get("host", "")
        if not self._ours(_host_name(host)):
            raise ApiError(
                f"Host {clipped(host)!r} is not this server's: --allow-host accepts it", code=Code.HOST_NOT_ALLOWED
            )
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()) and not self._named(origin):
                raise ApiError(
                    f"Origin {clipped(origin)!r} is not this server's: --allow-host accepts it",
                    code=Code.ORIGIN_NOT_ALLOWED,
                )
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign and headers.get("sec-fetch-mode") != "navigate" and "origin" not in headers:
            raise ApiError("web pages of other sites may not use this server", code=Code.ORIGIN_NOT_ALLOWED)
        if self.keys and scope["path"] not in OPEN_PATHS:
            self._check_key(_bearer_key(headers))

    def client(self, scope: Scope, headers: Headers) -> str | None:
        """The name that a request's client has in the limit on each client's requests: its address or, of several keys,
        a digest of its own."""
        if len(self.keys) > 1 and (key := _bearer_key(headers)) is not None:
            return f"key {hashlib.sha256(key).hexdigest()[:16]}"
        address = scope.get("client")
        return address[0] if address else None

    def scope(self, headers: Headers) -> str | None:
        """What a request's texts are told apart by from those of other keys: a digest of its key, None where the
        service asks for none."""
        if not self.keys or (key := _bearer_key(headers)) is None:
            return None
        return hashlib.blake2b(key, person=b"redraft texts", digest_size=16).hexdigest()

    def _check_key(self, key: bytes | None) -> None:
        """Each key is compared to its end, so that the time tells nothing."""
        # All keys are compared, so that the time does not tell which one is nearest.
        if key is None or not sum(hmac.compare_digest(key, known.encode()) for known in self.keys):
            message = "expected the header `Authorization: Bearer KEY` with this server's key"
            raise ApiError(message, code=Code.INVALID_API_KEY, headers={"WWW-Authenticate": "Bearer"})

    def _ours(self, name: str) -> bool:
        """Whether a host name is this service's. Where it listens on every address, all addresses are: a page's site
        that DNS points here has a name."""
        if {name, EVERY_HOST} & self.hosts or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self.address == "0.0.0.0"

    def _named(self, origin: str) -> bool:
        """Whether a page's site is one of the hosts that the service was told to accept."""
        return bool({_host_name(origin.partition("://")[2]), EVERY_HOST} & self.hosts)


class Gate:
    """ASGI middleware around everything: access, request ids, and the log. An answer that does not wait for the
    request's body ends the connection: the rest of the body is not worth reading.

    The log has a line per request: method, path, status, seconds, request id and `traceparent`, nothing of its body.
    """

    def __init__(self, app: ASGIApp, access: Access, metrics: FrontEndMetrics):
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        request_headers = _request_headers(headers)
        started, status = time.perf_counter(), 0
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def receive_on() -> Message:
            nonlocal unread
            message = await receive()
            unread = bool(message.get("more_body"))
            return message

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(request_headers | ({"connection": "close"} if unread else {}))
            elif unread and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drop_body(receive_on)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            try:
                self._access.check(scope, headers)
                state = scope.setdefault("state", {})
                state["client"], state["scope"] = self._access.client(scope, headers), self._access.scope(headers)
                await self._app(scope, receive_on, send_on)
            except ApiError as error:
                await json_response(error.body, error.status, error.headers)(scope, receive_on, send_on)
            except Exception as error:  # the application has answered, and raises it again
                log_failure(error)
        finally:
            self._note(scope, status, time.perf_counter() - started, request_headers)

    def _note(
        self, scope: MutableMapping[str, Any], status: int, seconds: float, request_headers: dict[str, str]
    ) -> None:
        route = scope.get("route")
        self._metrics.count_answer(route.path if route else "other", status)
        level = logging.DEBUG if scope["path"] in PROBED_PATHS else logging.INFO
        path, ids = clipped(repr(scope["path"])[1:-1]), " ".join(request_headers.values())
        fields = {
            "method": scope["method"],
            "path": path,
            "status": status or None,
            "seconds": round(seconds, 3),
            **{name.replace("-", "_"): value for name, value in request_headers.items()},
        }
        values = scope["method"], path, status or "gone", seconds, ids
        log.log(level, "%s %s %s %.3f s %s", *values, extra={"fields": fields})


async def _drop_body(receive: Receive) -> None:
    """Read on for a moment: a connection that is closed while its client sends may take the answer with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass


def log_failure(error: Exception) -> None:
    """Log where this server failed; not the error's text, which may hold a part of a prompt."""
    log.error("%s in\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


def _request_headers(headers: Headers) -> dict[str, str]:
    """The headers of the answer that say which request it belongs to: what the client sent, where it is well formed."""
    request_id = headers.get("x-request-id", "")
    names = {"x-request-id": request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex}
    if _TRACE_PARENT.fullmatch(trace := headers.get("traceparent", "")):
        names["traceparent"] = trace
    return names


def _bearer_key(headers: Headers) -> bytes | None:
    """The key that a request comes with."""
    header = headers.get("authorization", "")
    return header[len(BEARER) :].encode("latin-1") if header[: len(BEARER)].lower() == BEARER else None


def _host_name(host: str) -> str:
    """A Host header's name, lower case, without the port; "" for one that cannot be read."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def hosts(names: Iterable[str]) -> frozenset[str]:
    """Host names as requests are compared with them."""
    return frozenset(name.lower() for name in names)
