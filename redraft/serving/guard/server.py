"""The guard's process: `python -m redraft.serving.guard.server --http-socket PATH ...`.

All else are settings of the service: a guard that is started by hand takes them from variables such as
REDRAFT_HTTP_PORT.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from redraft import logs
from redraft.serving.guard import over_grpc, over_http
from redraft.serving.guard.limits import METADATA_S
from redraft.serving.guard.refusal import room_for_bodies
from redraft.serving.metrics_page import metrics_page
from redraft.serving.settings import ServeSettings, process_settings
from redraft.worker.client import WorkerClient, WorkerError


async def _serve(settings: ServeSettings, sockets: argparse.Namespace) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    room, address = room_for_bodies(), settings.address
    sites = [site.lower() for site in settings.allow_host]
    client = WorkerClient(sockets.worker_socket)

    def workers_metrics() -> bytes:
        """Triton's page has its own metrics only. The worker's follow them."""
        try:
            engine = client.status(METADATA_S, metrics=True).metrics
        except WorkerError:
            engine = None
        return metrics_page(sockets.worker_socket, engine)

    async with (
        over_http.listening(address, settings.http_port, sockets.http_socket, room, sites),
        over_http.listening(
            address,
            settings.metrics_port,
            sockets.metrics_socket,
            room,
            sites,
            over_http.metrics_route,
            workers_metrics,
        ),
        over_grpc.listening(address, settings.grpc_port, sockets.grpc_socket, room),
    ):
        await ending.wait()
    client.close()


def main(argv: list[str] | None = None) -> None:
    """Pass requests on until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m redraft.serving.guard.server", description=__doc__)
    parser.add_argument("--http-socket", type=Path, required=True, help="Triton's socket for HTTP")
    parser.add_argument("--grpc-socket", type=Path, required=True, help="Triton's socket for gRPC")
    parser.add_argument("--metrics-socket", type=Path, required=True, help="Triton's socket for metrics")
    parser.add_argument("--worker-socket", type=Path, required=True, help="The engine worker's socket, for its metrics")
    sockets = parser.parse_args(argv)
    logs.configure(level=logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # it logs what malformed requests hold
    asyncio.run(_serve(process_settings(), sockets))


if __name__ == "__main__":
    main()
