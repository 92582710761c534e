"""The front end on the toy engine: its processes, as a client sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo
from redraft.bundle.method import MethodConfig
from redraft.request import GenerateRequest, SamplingConfig
from redraft.serving.settings import ServeSettings, environment_of
from redraft.worker.client import WorkerClient
from redraft.worker.protocol import Chunk
from tests.conftest import ROOT, wait_until
from tests.serving.client_side import HTTP, free_ports
from tests.toy_engine import TOY, toy_tokenizer
from tests.worker.toy_worker import LIMITS

MODEL = "toy-model"
KEYS = "sk-0123456789", "sk-abcdefghij"
"""Of the server that asks for one."""
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}{% if tools %}[{{ tools | tojson }}]{# <tool_call> #}{% endif %}<assistant>"
)
"""The comment shows whose form of tool calls it is: Hermes'."""


def toy_bundle(
    folder: Path, template: str | None = TEMPLATE, vocab_size: int = 111, max_len: int = LIMITS.max_len
) -> Path:
    """A bundle's folder without networks: what the front end reads of it."""
    config = BundleConfig(
        name=MODEL,
        backend="openvino",
        precision="fp32",
        target=TargetInfo(
            num_layers=1,
            hidden_size=2,
            feature_size=2,
            num_heads=1,
            num_kv_heads=1,
            head_size=2,
            vocab_size=vocab_size,
            eos_token_ids=(0,),
            max_position=max_len,
        ),
        limits=LimitsInfo(
            slots=LIMITS.slots,
            max_len=max_len,
            max_tree=LIMITS.max_tree,
            prefill_chunk=LIMITS.prefill_chunk,
        ),
        methods={
            TOY: MethodConfig(
                drafter=None,
                construction="best_first",
                beam_width=4,
                beam_length=4,
                candidates=6,
                tree_budget=8,
                ngram=True,
                verification="sampled_walk",
            )
        },
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    toy_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


class FrontEnd:
    """A worker and the front end before it."""

    def __init__(
        self, folder: Path, bundle: Path, delay: float, key: str | None, worker: str, settings: Mapping[str, Any]
    ):
        self.worker_script = worker
        self.socket, self.log_file = folder / "worker.sock", folder / "openai.log"
        (self.port,) = free_ports(1)
        self.delay, self.key = delay, key
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "redraft.openai.server", "--bundle", bundle, "--socket", self.socket]
        wanted = ServeSettings(openai_port=self.port, **settings)
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command)],
                cwd=ROOT,
                env=environment_of(wanted) | ({"REDRAFT_API_KEY": key} if key else {}),
                stdout=log,
                stderr=log,
            )
        self.start_worker()

    def start_worker(self) -> None:
        command = [sys.executable, self.worker_script, str(self.socket), str(self.delay)]
        self.worker = subprocess.Popen(command, cwd=ROOT)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def health(self) -> int:
        try:
            return HTTP.get(f"{self.url}/health", timeout=600).status_code
        except httpx.ConnectError:
            assert self.process.poll() is None, self.log
            return 0

    def metric(self, name: str) -> float:
        text = HTTP.get(f"{self.url}/metrics", timeout=600).text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))

    def client(self, **options: Any) -> OpenAI:
        key = (self.key or "none").split()[0]
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=HTTP, **options)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json"} | (headers or {})
        return HTTP.post(f"{self.url}{path}", content=content, headers=named, timeout=600)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of a stream's events but the last, which ends it."""
        with HTTP.stream("POST", f"{self.url}{path}", json=body | {"stream": True}, timeout=600) as response:
            assert response.status_code == 200, response.read()
            data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(one) for one in data]

    def stop(self) -> None:
        for process in (self.process, self.worker):
            process.kill()
            process.wait()


@contextmanager
def front_end(
    folder: Path,
    bundle: Path,
    delay: float = 0.0,
    key: str | None = None,
    worker: str = "tests/worker/toy_worker.py",
    **settings: Any,
) -> Iterator[FrontEnd]:
    """The front end, ready, with these settings; stopped at the end."""
    running = FrontEnd(folder, bundle, delay, key, worker, settings)
    try:
        wait_until(lambda: running.health() == 200)
        yield running
    finally:
        running.stop()


def directly(server: FrontEnd, prompt: str | list[int], max_tokens: int, **fields: Any) -> Chunk:
    """What the worker itself answers."""
    with WorkerClient(server.socket) as client:
        assert client.wait_connected(60)
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        sampling = SamplingConfig(**fields.pop("sampling", {}))
        return client.complete(
            GenerateRequest(id=client.new_id(), max_tokens=max_tokens, sampling=sampling, **given, **fields),
            timeout=600,
        )
