"""The guard's process: `python -m redraft.serving.guard.server --http-port 8000 --grpc-port 8001 ...`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from redraft import logs
from redraft.serving.guard import over_grpc, over_http
from redraft.serving.guard.refusal import room_for_bodies


async def _serve(options: argparse.Namespace) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    room, sites = room_for_bodies(), options.allow_host
    async with (
        over_http.listening(options.address, options.http_port, options.http_socket, room, sites),
        over_http.listening(
            options.address, options.metrics_port, options.metrics_socket, room, sites, over_http.metrics_route
        ),
        over_grpc.listening(options.address, options.grpc_port, options.grpc_socket, room),
    ):
        await ending.wait()


def main(argv: list[str] | None = None) -> None:
    """Pass requests on until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m redraft.serving.guard.server", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--http-socket", type=Path, required=True, help="Triton's socket for HTTP")
    parser.add_argument("--grpc-socket", type=Path, required=True, help="Triton's socket for gRPC")
    parser.add_argument("--metrics-socket", type=Path, required=True, help="Triton's socket for metrics")
    parser.add_argument("--allow-host", type=str.lower, action="append", default=[], help="a site whose pages may ask")
    logs.configure(level=logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # it logs what malformed requests hold
    asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
