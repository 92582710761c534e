"""The live page: static files, which need nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File and content type by path."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Browsers load and send nothing beyond this server, and no other page frames this one."""


def add_page(app: FastAPI) -> None:
    """Serve the page's files."""
    for path, (name, kind) in FILES.items():
        app.get(path)(_sender((files(__name__) / name).read_bytes(), kind))


def _sender(data: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(data, media_type=kind, headers=HEADERS)

    return send
