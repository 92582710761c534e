"""The client of a protocol, connected."""

from __future__ import annotations

from redraft.loadtest.clients.base import Client, GenerationError
from redraft.loadtest.clients.openai import OpenAIServer
from redraft.loadtest.clients.triton_grpc import TritonGrpc
from redraft.loadtest.clients.triton_http import TritonHttp

PORTS = {"grpc": 8001, "http": 8000, "openai": 8003}
"""Protocols, and the port of each on which `redraft serve` listens."""
MODEL = "ensemble"


def address(protocol: str, url: str | None) -> str:
    """HOST:PORT for gRPC, http://HOST:PORT for the others; by default that of a service on this machine."""
    url = (url or f"127.0.0.1:{PORTS[protocol]}").rstrip("/").removesuffix("/v1")
    return url if protocol == "grpc" or "://" in url else f"http://{url}"


async def connect(protocol: str, url: str | None, model: str | None, metrics_url: str | None) -> Client:
    """A client of the server at `url`. Raises GenerationError where none answers."""
    where = address(protocol, url)
    client: TritonGrpc | TritonHttp | OpenAIServer
    if protocol == "openai":
        client = OpenAIServer(where, model, metrics_url)
    else:
        client = (TritonGrpc if protocol == "grpc" else TritonHttp)(where, model or MODEL, metrics_url)
    try:
        live = await client.is_live()
    except GenerationError:
        await client.close()
        raise
    if not live:
        await client.close()
        raise GenerationError(f"no server at {where} ({protocol}): `redraft serve` starts one")
    return client
