"""The first half hour: rows run within their time, one after the other whatever comes of them, and go on later."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import first_hour
from benchmarks.gpu.first_hour import ROOT, Command, Row, Setting
from redraft.cli import build
from tests.benchmarks.gpu.conftest import Parsed, parsed_by_typer, raise_parsed
from tests.conftest import wait_until

HANGING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", child.pid, flush=True)
time.sleep(600)
"""


def python(code: str, result: Path | None = None) -> list[Command]:
    return [Command((sys.executable, "-c", code), result)]


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """Calls of the script, with three rows: one that writes a result, one that fails, one that hangs."""
    result = tmp_path / "result.json"

    class Impatient(subprocess.Popen):
        """The third row's time is over when its child runs."""

        def wait(self, timeout=None):
            if timeout and timeout > 1 and HANGING in self.args:
                while not (tmp_path / "work/row-2.log").read_bytes():
                    time.sleep(0.02)
                timeout = 0
            return super().wait(timeout)

    monkeypatch.setattr(first_hour.subprocess, "Popen", Impatient)
    rows = (
        Row("first", 1, lambda _: python(f"print('said'); open({str(result)!r}, 'w').write('[1]')", result)),
        Row("second", 1, lambda _: python("print('why'); raise SystemExit(3)")),
        Row("third", 1, lambda _: python(HANGING)),
    )
    monkeypatch.setattr(first_hour, "ROWS", rows)
    monkeypatch.setattr(first_hour, "GRACE_S", 0.2)
    monkeypatch.setattr(first_hour.signal, "signal", lambda *_: None)

    def call(*arguments: str) -> tuple[int, dict]:
        folders = ["--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        chosen = [] if "--rows" in arguments else ["--rows", "0", "1", "2"]
        status = first_hour.main(["--device", "cpu", *folders, *chosen, *arguments])
        return status, json.loads((tmp_path / "out/first_hour.json").read_text())["rows"]

    return call


def verdicts(rows: dict) -> dict[str, str]:
    return {number: entry["verdict"] for number, entry in rows.items()}


def test_rows_go_on_after_a_failure_and_end_at_their_limit(hour):
    status, rows = hour()
    assert status == 1
    assert verdicts(rows) == {"0": "ok", "1": "failed", "2": "timed out"}
    (first,), (second,), (third,) = (rows[number]["commands"] for number in "012")
    assert (first["exit_status"], first["output"], first["result"]) == (0, "said\n", [1])
    assert (second["exit_status"], second["output"]) == (3, "why\n")
    assert third["exit_status"] is None
    begun, pid = third["output"].split()
    assert begun == "begun"
    wait_until(lambda: not running(int(pid)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_what_is_answered_is_not_asked_again(hour):
    hour("--rows", "0", "1")
    before = hour("--rows", "0", "1")
    assert before[0] == 0, "nothing ran"
    status, rows = hour("--rows", "0", "1", "--again", "1")
    assert (status, rows["0"]) == (1, before[1]["0"])
    assert rows["1"]["begun"] > before[1]["1"]["begun"]


def test_a_command_ends_with_the_script_that_is_killed(tmp_path):
    log = tmp_path / "log"
    code = f"""
import sys
from benchmarks.gpu.first_hour import Command, Path, run
said = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
run(Command((sys.executable, "-c", said)), Path({str(log)!r}), 600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: log.exists() and log.read_text().strip())
    process.kill()
    process.wait()
    wait_until(lambda: not running(int(log.read_text())))


@pytest.mark.parametrize("profilers", [True, False])
def test_every_script_takes_its_arguments(profilers, tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "tool", lambda name: f"/usr/bin/{name}")
    setting = Setting("cuda", False, tmp_path, tmp_path / "model", profilers, "sm_90")
    scripts = []
    for row in first_hour.ROWS:
        for command in row.commands(setting):
            if "redraft.cli" in command.arguments:
                given = parsed_by_typer(build.main, list(command.arguments[4:]))
                assert (given["backend"].name, command.environment) == ("tensorrt_rtx", {"REDRAFT_ANY_GPU": "1"})
                continue
            _, _, command_line = " ".join(command.arguments).partition("-m benchmarks.gpu.")
            name, *arguments = command_line.split() or [""]
            if name:
                script = importlib.import_module(f"benchmarks.gpu.{name}")
                monkeypatch.setattr(script, "device_of", lambda *_, **__: raise_parsed())
                with pytest.raises(Parsed):
                    script.main(arguments)
                scripts.append((name, command.arguments[0]))
    (compiling,) = first_hour.compiling(setting)
    assert compiling.arguments[1:] == ("-m", "redraft.plugins.cuda.compile", "sm_90"), "no other GPU's"
    assert scripts.count(("kernels", "/usr/bin/ncu")) == (3 if profilers else 0)
    assert sum(row.limit(setting) for row in first_hour.ROWS if profilers or not row.profilers) <= 30
    assert {name for name, _ in scripts} == {"kernels", "llama_7b", "scheduling", "torch_backend", "engines"}
    sanitized = [row.question for row in first_hour.ROWS if row.left_out(setting) and row.profilers]
    assert len(sanitized) == (0 if profilers else 1)
