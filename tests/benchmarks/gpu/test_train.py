"""Distilling and training inside a time: once as it is, on the CPU; commands, shares of the time, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time

import torch

import distill
import train_drafter
from benchmarks.gpu import train
from tests.benchmarks.gpu.test_torch_backend import parsed_by_typer


def test_a_command_is_interrupted_when_its_time_is_over(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\ntry:\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    open(sys.argv[1], 'w').write('kept')\n"
    )
    begun, before = time.monotonic(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert train.run_until([sys.executable, str(script), str(tmp_path / "kept")], 6) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 50
    assert (tmp_path / "kept").read_text() == "kept"
    assert train.run_until([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3


def run(tmp_path, monkeypatch, taken: float, *more: str) -> tuple[int, list[tuple[list[str], float]], dict]:
    """The script with commands that take so many seconds each; they write a shard and a log."""
    ran, clock = [], [0.0]

    def run_until(command, seconds):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the CPU was asked for"
        ran.append((command, seconds))
        clock[0] += min(taken, seconds)
        name = command[command.index("--output") + 1]
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shard-00000.safetensors").write_bytes(b"x" * 10)
        (folder / "log.jsonl").write_text('{"positions": 1}\n{"positions": 2}\n')
        return 0 if taken <= seconds else None

    monkeypatch.setattr(train, "run_until", run_until)
    monkeypatch.setattr(train.time, "monotonic", lambda: clock[0])
    given = ["--device", "cpu", "--model", "m", "--prompts", "p", "--output", str(tmp_path / "out"), "--minutes", "10"]
    status = train.main([*given, "--kinds", "recurrent", "eagle", *more])
    return status, ran, json.loads((tmp_path / "out" / "report.json").read_text())


def test_the_time_is_shared_out(tmp_path, monkeypatch):
    status, ran, report = run(tmp_path, monkeypatch, 1000.0)
    assert [seconds for _, seconds in ran] == [240.0, 180.0, 180.0]
    assert status == 0
    assert report["distil"] == {"exit_status": None, "shards": 1, "bytes": 10}
    assert {kind: entry["last"] for kind, entry in report["drafters"].items()} == {
        "recurrent": {"positions": 2},
        "eagle": {"positions": 2},
    }


def test_a_gpus_report_lies_beside_the_script_too(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    run(tmp_path, monkeypatch, 1.0)
    assert not (tmp_path / "train.json").exists(), "the results beside the script are a GPU's"
    monkeypatch.setattr(train, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(train, "describe", lambda device: {"device": device.type})
    _, _, report = run(tmp_path, monkeypatch, 1.0)
    assert json.loads((tmp_path / "train.json").read_text()) == report


def test_time_that_is_left_goes_to_the_next(tmp_path, monkeypatch):
    _, ran, _ = run(tmp_path, monkeypatch, 100.0)
    assert [seconds for _, seconds in ran] == [240.0, 250.0, 400.0]


def test_the_scripts_take_these_flags(tmp_path, monkeypatch):
    _, ran, _ = run(tmp_path, monkeypatch, 1.0, "--shares", "a=1", "--window", "8")
    distilling, recurrent, eagle = (command[2:] for command, _ in ran)
    assert parsed_by_typer(distill.main, distilling)["slots"] == 1024
    assert parsed_by_typer(train_drafter.main, recurrent)["batch"] == 128
    assert parsed_by_typer(train_drafter.main, eagle)["drafter"] == "eagle"


def test_the_whole_sequence_on_the_cpu(model, tmp_path, monkeypatch):
    """A tiny target teaches a drafter, whose training is interrupted and goes on where it was."""
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    log = out / "recurrent" / "log.jsonl"
    prompts.write_text("".join(json.dumps({"source": "a", "prompt": f"t{i} t{i + 9}"}) + "\n" for i in range(5, 25)))

    class Impatient(subprocess.Popen):
        """The training's time is over when it has logged something."""

        def wait(self, timeout=None):
            if timeout and timeout > 60 and "build/train_drafter.py" in self.args:
                while self.poll() is None and not log.exists():
                    time.sleep(0.05)
                timeout = 0 if impatient else timeout
            return super().wait(timeout)

    def run(positions: int) -> dict:
        data = ("--tokens", "1500", "--shard-documents", "16", "--slots", "8", "--max-new-tokens", "16")
        sizes = ("--window", "8", "--batch", "4", "--every", "5", "--held-out", "1", "--hot-vocabulary", "64")
        given = ["--device", "cpu", "--model", str(model), "--prompts", str(prompts), "--output", str(out)]
        assert train.main([*given, "--shares", "a=1", *data, *sizes, "--positions", str(positions)]) == 0
        report = json.loads((out / "report.json").read_text())
        assert report["distil"]["exit_status"] == 0
        assert report["distil"]["shards"] == len(list((out / "data").iterdir())) >= 2
        return report

    monkeypatch.setattr(train.subprocess, "Popen", Impatient)
    impatient = True
    interrupted = run(10**9)
    assert interrupted["drafters"]["recurrent"]["exit_status"] is None
    impatient = False
    reached = json.loads(log.read_text().splitlines()[-1])
    ended = run(reached["positions"] + 100)
    assert ended["distil"] == interrupted["distil"], "no more is made than was asked for"
    assert ended["drafters"]["recurrent"]["exit_status"] == 0
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert ended["drafters"]["recurrent"]["last"]["step"] == steps[-1] > reached["step"]
    assert (out / "recurrent" / "drafter.safetensors").exists()
