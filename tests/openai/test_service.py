"""`/v1` as a part of a service: started, watched and stopped by the supervisor.

Slow, as each starts Triton too. They would catch a front end that stays away after it died, a service that is called
ready without it, and an answer of the default model that the command line's differs from.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys

import httpx
import openai
import psutil
import pytest

from redraft.openai import server
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.settings import SETTINGS_VARIABLE, ServeSettings, environment_of, toml
from tests.cli.commands import run_command
from tests.conftest import ROOT, wait_until
from tests.openai.serving import MODEL
from tests.serving.client_side import HTTP, free_ports, start
from tests.serving.lifecycle.starting import assert_nothing_is_left, redraft

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]
HELLO = [{"role": "user", "content": "Hello"}]
KEY = "sk-service"


def example(port: int, guide: str) -> str:
    """A guide's program for the openai package."""
    page = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    block = next(block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "import OpenAI" in block)
    return block.replace(":8003/", f":{port}/")


def health(port: int) -> int:
    try:
        return HTTP.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code
    except httpx.HTTPError:
        return 0


def test_the_options_reach_the_service(tmp_path, monkeypatch):
    """The key by the environment only: settings.json and arguments are for others to read."""
    asked = []

    def serve_nothing(wanted: ServeSettings, *_: object) -> None:
        asked.append((wanted, os.environ["REDRAFT_API_KEY"]))
        raise ServingError("enough")

    monkeypatch.setenv("REDRAFT_API_KEY", "")
    monkeypatch.setattr(launcher, "serve", serve_nothing)
    options = ["--api-key", KEY, "--allow-host", "a.example", "--allow-host", "b.example", "--model-name", "mine"]
    run_command(["serve", "--bundle", str(tmp_path), "--openai-port", "9000", *options])
    ((wanted, key),) = asked
    assert (wanted.openai_port, wanted.model_name, wanted.allow_host) == (9000, "mine", ["a.example", "b.example"])
    assert key == KEY
    assert KEY not in wanted.model_dump_json()
    assert KEY not in environment_of(wanted)[SETTINGS_VARIABLE] + toml(wanted)


def test_a_log_that_is_full_begins_anew(tmp_path, monkeypatch):
    """Otherwise the limit on the process's files ends it, and nobody is told. A crash is written there too."""
    monkeypatch.setattr(server, "MAX_LOG_BYTES", 40)
    outputs = []
    monkeypatch.setattr(os, "dup2", lambda source, to: outputs.append((os.readlink(f"/proc/self/fd/{source}"), to)))
    log = server.Log(tmp_path / "openai.log")
    for text in ("first line", "second line"):
        log.emit(logging.makeLogRecord({"msg": text}))
    log.close()
    assert [(tmp_path / name).read_text() for name in ("openai.log.1", "openai.log")] == [
        "first line\n",
        "second line\n",
    ]
    assert outputs == 2 * [(str(tmp_path / "openai.log"), descriptor) for descriptor in (1, 2)]


@pytest.mark.slow
def test_a_front_end_that_ends_or_is_stopped_comes_back(tmp_path, bundle, monkeypatch):
    monkeypatch.setenv("REDRAFT_API_KEY", KEY)
    (port,) = free_ports(1)
    service = start(tmp_path, bundle, worker_command=TOY_WORKER, openai_port=port)
    try:
        assert health(port) == 200
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        commands = [psutil.Process(pid).cmdline() for pid in (service.state.openai_pid, service.state.supervisor_pid)]
        assert KEY not in str(commands) + service.run_dir.settings_file.read_text()
        status = redraft("status", "--run-dir", str(tmp_path))
        assert f"OpenAI   pid {service.state.openai_pid}, restarts 0" in status.communicate(timeout=60)[0]

        for number, kill in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            os.kill(service.state.openai_pid, kill)
            wait_until(lambda number=number: (service.state.openai_restarts, service.state.phase) == (number, "ready"))
            assert health(port) == 200
        assert (service.state.worker_restarts, service.state.triton_restarts) == (0, 0)

        os.kill(service.state.worker_pid, signal.SIGKILL)
        wait_until(lambda: health(port) == 503)
        wait_until(lambda: health(port) == 200)
        assert service.state.openai_restarts == 2, "a worker that is away is no reason to restart it"
    finally:
        launcher.stop(tmp_path)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_the_default_model(tmp_path, smollm2_bundle):
    ports = free_ports(4)
    options = [f"--{name}-port" for name in ("http", "grpc", "metrics", "openai")]
    arguments = [word for option, port in zip(options, ports, strict=True) for word in (option, str(port))]
    run_dir = ["--run-dir", str(tmp_path)]
    serving = redraft("serve", "--bundle", str(smollm2_bundle), *arguments, *run_dir)
    try:
        assert f"OpenAI   http://127.0.0.1:{ports[3]}/v1" in serving.communicate(timeout=300)[0]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{ports[3]}/v1", api_key="none")
        (model,) = client.models.list()
        options = {"model": model.id, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = client.chat.completions.create(**options, temperature=0)
        text = answer.choices[0].message.content
        assert "Paris" in text
        assert answer.choices[0].finish_reason == "stop", "the model ended it: the template's end is an end token"
        assert answer.metrics["speculative_decoding"]["mean_acceptance_length"] >= 1  # 1 where no drafts pay
        asked = redraft("generate", options["messages"][0]["content"], *run_dir)
        assert asked.communicate(timeout=120)[0].startswith(text)
        parts = client.chat.completions.create(**options, temperature=0, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
        for guide, said in (("openai", text), ("tools", "")):
            program = example(ports[3], guide)
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
            assert (done.returncode, said in done.stdout) == (0, True), done.stderr
    finally:
        launcher.stop(tmp_path)
