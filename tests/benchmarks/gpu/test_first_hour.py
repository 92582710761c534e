"""The first half hour: rows run within their time, one after the other whatever comes of them, and go on later."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import build_engines
from benchmarks.gpu import first_hour
from benchmarks.gpu.first_hour import ROOT, Command, Row, Setting
from tests.benchmarks.gpu.conftest import bare_environment
from tests.benchmarks.gpu.test_torch_backend import Parsed, parsed_by_typer, raise_parsed
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


def test_rows_that_ran_out_of_time_go_on_after_all_others(hour):
    entries = {"0": "timed out", "1": "ok", "2": "skipped", "3": "failed"}
    state = {"rows": {number: {"verdict": verdict} for number, verdict in entries.items()}}
    assert first_hour.pending(state, range(5), []) == [2, 4, 0]
    assert first_hour.pending(state, range(5), [1]) == [1, 2, 4, 0]


def test_no_command_begins_when_the_time_is_over(hour, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    after = python(f"open({str(begun)!r}, 'w')")
    monkeypatch.setattr(
        first_hour, "ROWS", (Row("two", 1, lambda _: [*python("import time; time.sleep(600)"), *after]),)
    )
    monkeypatch.setattr(Row, "limit", lambda *_: 0.01)
    _, rows = hour("--rows", "0")
    assert (rows["0"]["verdict"], len(rows["0"]["commands"]), begun.exists()) == ("timed out", 1, False)


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


def test_rows_that_do_not_fit_come_later(hour, monkeypatch, capsys):
    monkeypatch.setattr(first_hour, "ROWS", (replace(first_hour.ROWS[0], minutes=2), *first_hour.ROWS[1:]))
    status, rows = hour("--minutes", "1.5", "--rows", "0", "1")
    assert (status, verdicts(rows)) == (1, {"1": "failed"})
    assert "rows 0: not begun" in capsys.readouterr().out
    status, rows = hour("--minutes", "3", "--rows", "0", "1")
    assert (status, verdicts(rows)) == (0, {"1": "failed", "0": "ok"})


def test_a_row_that_was_left_out_is_tried_again(hour, tmp_path, monkeypatch):
    model = tmp_path / "model"
    rows = (Row("needs a model", 1, lambda _: python("pass"), model=True),)
    monkeypatch.setattr(first_hour, "ROWS", rows)
    status, found = hour("--rows", "0", "--model", str(model))
    assert (status, found["0"]["verdict"]) == (0, "skipped")
    assert "run build/fetch_model.py" in found["0"]["reason"]
    model.mkdir()
    (model / "source.json").write_text("{}")
    assert verdicts(hour("--rows", "0", "--model", str(model))[1]) == {"0": "ok"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "was not written by this script"),
        ('{"rows": {"0": 1}}', "was not written by this script"),
        ('{"machine": {"device": "cuda", "name": "H"}, "rows": {}}', "is of H, this is cpu"),
    ],
)
def test_a_state_that_is_not_this_machines_is_refused(content, message, hour, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/first_hour.json").write_text(content)
    with pytest.raises(SystemExit):
        hour()
    assert message in capsys.readouterr().err


def test_any_machine_lists_what_a_gpu_answered(hour, tmp_path, capsys):
    path = tmp_path / "out/first_hour.json"
    path.parent.mkdir()
    rows = {"1": {"verdict": "failed", "seconds": 7.0}}
    path.write_text(json.dumps({"machine": {"device": "cuda", "name": "H"}, "rows": rows}))
    assert first_hour.main(["--list", "--output", str(path.parent)]) == 0
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capability", "missing", "message"),
    [
        (None, [], "no CUDA device that torch can use"),
        ((7, 5), [], "an old GPU has compute capability 7.5: the CUDA kernels need 8.0 or later; take a newer GPU"),
        ((9, 0), ["pydantic"], "not installed here: pydantic. python -m benchmarks.gpu.kit makes wheels to carry"),
    ],
)
def test_what_is_missing_is_said_before_anything_begins(capability, missing, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an old GPU")
    monkeypatch.setattr("benchmarks.gpu.machine.absent", lambda packages: missing)
    with pytest.raises(SystemExit):
        first_hour.main(["--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("profilers", [True, False])
def test_every_script_takes_its_arguments(profilers, tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "tool", lambda name: f"/usr/bin/{name}")
    setting = Setting("cuda", False, tmp_path, tmp_path / "model", profilers, "sm_90")
    scripts = []
    for row in first_hour.ROWS:
        for command in row.commands(setting):
            if "build/build_engines.py" in command.arguments:
                given = parsed_by_typer(build_engines.main, list(command.arguments[2:]))
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


@pytest.mark.slow
def test_the_rows_on_a_bare_machine_without_a_gpu(tmp_path):
    """At the sizes of a CPU: compiling, tests, step times and scheduler; the others are tested with their scripts. It
    would catch a row that needs what is not packed."""
    folders = ["--output", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--model", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu.first_hour", "--device", "cpu", "--tiny", *folders]
    environment = {**os.environ, **bare_environment(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    rows = ["--rows", "0", "2", "3", "5", "6", "7", "8", "--minutes", "600"]
    done = subprocess.run([*command, *rows], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/first_hour.json").read_text())["rows"]
    assert verdicts(found) == dict.fromkeys("0235", "ok") | dict.fromkeys("678", "skipped")
    assert " skipped" in found["2"]["commands"][0]["output"]
    steps = found["3"]["commands"][0]["result"]["steps"]
    assert [(step["batch"], step["rows"]) for step in steps] == [(1, 1), (1, 5), (2, 1), (2, 5)]
    served = found["5"]["commands"][0]["result"]["rows"]
    assert len(served) == 4
    assert all(row["tokens_per_s"] > 0 and row["host_ms"] > 0 for row in served)
    assert {row["draft_ms"] > 0 for row in served if row["method"] == "trees"} == {True}
