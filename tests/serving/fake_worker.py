"""A worker without an engine, for the serving layer's tests: it answers by the worker's protocol and obeys its prompt.

The answer is " w0é w1é ..." word by word, one word per token and step; a guide's kind and text come before it. A prompt
that starts with "die" ends the process in the middle of the answer, at "hang" it answers nothing until SIGCONT, "slow",
"die", or token ids that start with 0, take 50 ms per token, "overload" is refused. In a bundle whose configuration says
`broken` it does not start, and where it says `fragile` it ends with the first request. While the bundle has a file
`refuse`, requests by the field that it names (`text` or `input_ids`) are refused; while it has `hold`, answers stop
after their first word; while it has `away`, no worker starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import time
from pathlib import Path

import zmq

from redraft.errors import Code
from redraft.metrics import ENGINE, RUNNING, SEQUENCE_STEPS, Metrics
from redraft.request import GenerateRequest, InvalidRequest, SequenceStats
from redraft.worker.protocol import (
    CancelRequest,
    Chunk,
    ErrorMessage,
    StatusRequest,
    WorkerStatus,
    pack,
    parse_request,
    unpack,
)

WORDS = [f" w{place}é" for place in range(100)]
MAX_LEN = 512


class FakeWorker:
    """Serves until SIGTERM; `steps` counts every token of every request."""

    def __init__(self, socket_path: str, bundle: Path, fragile: bool):
        self._fragile, self._refuse, self._hold = fragile, bundle / "refuse", bundle / "hold"
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        Path(socket_path).unlink(missing_ok=True)
        self._socket.bind(f"ipc://{socket_path}")
        self._running: dict[tuple[bytes, str], tuple[GenerateRequest, int, float]] = {}
        self._deadlines: dict[tuple[bytes, str], float] = {}
        self._metrics = Metrics(ENGINE)

    def run(self) -> None:
        while True:
            while self._socket.poll(1 if self._running else 100):
                peer, data = self._socket.recv_multipart()
                self._receive(peer, unpack(data))
            now, held = time.monotonic(), self._hold.exists()
            for key, (request, produced, due) in list(self._running.items()):
                if now >= due and not (held and produced):
                    self._step(key, request, produced)

    def _receive(self, peer: bytes, message: dict) -> None:
        try:
            request = parse_request(message)
        except InvalidRequest as error:
            self._send(peer, ErrorMessage(id=message["id"], code=Code.INVALID_REQUEST, message=str(error)))
            return
        if isinstance(request, GenerateRequest):
            if self._fragile:
                raise SystemExit("the engine cannot execute")
            prompt = request.text or ""
            if request.max_tokens > MAX_LEN:
                text = f"max_tokens: expected at most {MAX_LEN}, got {request.max_tokens}"
                self._send(peer, ErrorMessage(id=request.id, code=Code.INVALID_REQUEST, message=text))
            elif self._refuse.exists() and getattr(request, self._refuse.read_text()) is not None:
                self._send(peer, ErrorMessage(id=request.id, code=Code.UNAVAILABLE, message="not yet"))
            elif prompt.startswith("hang"):
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
                signal.sigwait({signal.SIGCONT})
            elif prompt.startswith("overload"):
                self._send(peer, ErrorMessage(id=request.id, code=Code.OVERLOADED, message="the queue is full (4)"))
            else:
                self._running[peer, request.id] = (request, 0, 0.0)
                self._deadlines[peer, request.id] = time.monotonic() + (request.timeout_s or math.inf)
        elif isinstance(request, CancelRequest):
            if self._running.pop((peer, request.id), None):
                self._send(peer, Chunk(id=request.id, done=True, finish_reason="cancelled"))
        else:
            self._metrics[RUNNING].set(len(self._running))
            page = self._metrics.page().decode() if isinstance(request, StatusRequest) and request.metrics else ""
            self._send(peer, WorkerStatus(running=len(self._running), kv_use=0.5, metrics=page, pid=os.getpid()))

    def _step(self, key: tuple[bytes, str], request: GenerateRequest, produced: int) -> None:
        self._metrics[SEQUENCE_STEPS].inc()
        prompt = request.text or ""
        if time.monotonic() > self._deadlines[key]:
            self._send(key[0], Chunk(id=request.id, done=True, finish_reason="timeout"))
            del self._running[key]
            return
        if prompt.startswith("die") and produced == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        words = list(itertools.islice(itertools.cycle(WORDS), produced, produced + 1))
        done = produced + 1 == request.max_tokens
        echo = prompt if produced == 0 and not request.exclude_input_in_output else ""
        if request.guide is not None and produced == 0:
            echo += f"{request.guide.kind} {request.guide.text}"
        chunk = Chunk(id=request.id, text=echo + "".join(words), token_ids=[produced % len(WORDS)], done=done)
        chunk.prompt_tokens = len(request.input_ids or prompt.split())
        if request.return_log_probs:
            chunk.log_probs = [-0.5]
        if done:
            chunk.finish_reason = "length"
            chunk.stats = SequenceStats(output_tokens=produced + 1, prefill_ms=20.0, decode_ms=5.0 * produced)
            chunk.stats.drafted, chunk.stats.accepted = 3 * produced, produced
            del self._running[key]
        else:
            slow = prompt.startswith(("slow", "die")) or (request.input_ids or [1])[0] == 0
            delay = 0.05 if slow else 0.002
            self._running[key] = (request, produced + 1, time.monotonic() + delay)
        self._send(key[0], chunk)

    def _send(self, peer: bytes, message: Chunk | ErrorMessage | WorkerStatus) -> None:
        self._socket.send_multipart([peer, pack(message)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--socket", required=True)
    args = parser.parse_args()
    config = json.loads((Path(args.bundle) / "config.json").read_text())
    if config.get("broken"):
        raise SystemExit("the bundle is broken: target.onnx does not match its checksum, build it again")
    while Path(args.bundle, "away").exists():
        time.sleep(0.02)
    FakeWorker(args.socket, Path(args.bundle), config.get("fragile", False)).run()
