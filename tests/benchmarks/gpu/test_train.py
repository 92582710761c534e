"""Distilling and training in pieces: once as it is, on the CPU; commands, their order and time, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from benchmarks.gpu import train
from benchmarks.verify import held_out
from redraft.cli import distill
from redraft.cli.train import main as train_command
from redraft.model_defs.drafters.registry import DRAFTERS
from tests.benchmarks.gpu.conftest import parsed_by_typer
from tests.conftest import wait_until


def test_a_command_is_interrupted_when_its_time_is_over(tmp_path, monkeypatch):
    script, started = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(
        "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\ntry:\n    (folder / 'begun').touch()\n"
        "    time.sleep(60)\nexcept KeyboardInterrupt:\n    (folder / 'kept').write_text('kept')\n"
    )

    class Begun(subprocess.Popen):
        """Its time begins when it has."""

        def wait(self, timeout=None):
            wait_until(started.exists)
            return super().wait(timeout)

    monkeypatch.setattr(train.subprocess, "Popen", Begun)
    begun, before = time.monotonic(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert train.run_until([sys.executable, str(script), str(tmp_path)], 0.2) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 50
    assert (tmp_path / "kept").read_text() == "kept"
    assert train.run_until([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3


class Commands:
    """Commands that take so many seconds each, by their folder's name, and 1 where they have ended before; they write
    shards, a log and what is judged."""

    def __init__(self, tmp_path, monkeypatch, **taken: float):
        self.folder, self.taken, self.clock = tmp_path / "out", taken, 0.0
        self.ran: list[tuple[list[str], float]] = []
        monkeypatch.setattr(train, "run_until", self.run_until)
        monkeypatch.setattr(train.time, "monotonic", lambda: self.clock)

    def run_until(self, command: list[str], seconds: float) -> int | None:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the CPU was asked for"
        self.ran.append((command, seconds))
        output = Path(command[command.index("--output") + 1])
        left = self.taken.get(output.stem, 1.0)
        ended = left <= seconds
        self.clock += min(left, seconds)
        self.taken[output.stem] = 1.0 if ended else left - seconds
        if output.suffix:
            output.write_text('{"rows": ["judged"]}')
            return 0 if ended else None
        output.mkdir(parents=True, exist_ok=True)
        (output / "shard-00000.safetensors").write_bytes(b"x" * 10)
        asked = int(command[command.index("--positions") + 1]) if "--positions" in command else 0
        (output / "log.jsonl").write_text(f'{{"positions": 1}}\n{{"positions": {asked if ended else 2}}}\n')
        return 0 if ended else None

    def names(self) -> list[str]:
        """Of the folders, and clears what ran."""
        found = [Path(command[command.index("--output") + 1]).stem for command, _ in self.ran]
        self.ran.clear()
        return found

    def piece(self, *more: str) -> dict:
        folders = ["--model", "m", "--prompts", "p", "--output", str(self.folder)]
        assert train.main(["--device", "cpu", *folders, "--minutes", "10", *more]) == 0
        return json.loads((self.folder / "report.json").read_text())


def test_pieces_do_one_thing_after_the_other(tmp_path, monkeypatch):
    """Teacher data first, all; then each drafter once, with all the time that is left; then they are judged."""
    commands = Commands(tmp_path, monkeypatch, data=800.0, recurrent=700.0, eagle=50.0)
    kinds = ("--kinds", "recurrent", "eagle")
    first = commands.piece(*kinds)
    assert [seconds for _, seconds in commands.ran] == [600.0, 599.0]
    assert commands.names() == ["held-out", "data"]
    assert first["distil"]["data"] == {"exit_status": None, "shards": 1, "bytes": 10}
    assert (first["drafters"], first["judged"], first["done"]) == ({}, None, False)
    second = commands.piece(*kinds)
    assert commands.names() == ["held-out", "data", "recurrent"]
    assert second["drafters"] == {"recurrent": {"exit_status": None, "last": {"positions": 2}}}
    last = commands.piece(*kinds)
    assert commands.names() == ["held-out", "data", "recurrent", "eagle", "judged"]
    assert [entry["exit_status"] for entry in last["drafters"].values()] == [0, 0]
    assert (last["judged"], last["done"]) == ({"exit_status": 0, "drafters": ["judged"]}, True)
    assert commands.piece(*kinds) == last
    assert commands.names() == ["held-out", "data", "judged"], "what is trained is not trained again"


def test_all_that_ship_are_trained_with_ten_times_the_scale(tmp_path, monkeypatch):
    commands = Commands(tmp_path, monkeypatch)
    report = commands.piece()
    shipped = tomllib.loads((train.ROOT / "build/drafters.toml").read_text())
    assert list(report["drafters"]) == list(shipped)
    assert set(shipped) == set(DRAFTERS) - {"eagle3", "parallel_eagle3", "block"}, "of which none ships"
    _, (distilling, _), *trainings, (judging, _) = commands.ran
    assert int(distilling[distilling.index("--tokens") + 1]) >= 10 * 8_540_000, "eagle's, which had the most"
    for kind, (command, _) in zip(shipped, trainings, strict=True):
        folder = train.ROOT / shipped[kind]["drafter"]
        assert json.loads((folder / "config.json").read_text())["drafter"] == kind
        assert command[command.index("--kind") + 1] == kind
        seen = json.loads((folder / "training.jsonl").read_text().splitlines()[-1])["positions"]
        assert int(command[command.index("--positions") + 1]) >= 10 * seen
        assert judging.index(str(folder)) + 1 == judging.index(str(tmp_path / "out" / kind))


def test_the_scripts_take_these_flags(tmp_path, monkeypatch):
    commands = Commands(tmp_path, monkeypatch)
    commands.piece("--shares", "a=1", "--window", "8", "--kinds", "recurrent", "eagle")
    given = [command[2:] for command, _ in commands.ran]
    kept, teaching = (parsed_by_typer(distill.main, arguments) for arguments in given[:2])
    assert (kept["self_written"], teaching["slots"]) == (1.0, 1024)
    assert kept["seed"] > teaching["seed"] + 10_000, "shard k has the seed + k"
    recurrent, eagle = (parsed_by_typer(train_command, arguments) for arguments in given[2:4])
    assert (recurrent["batch"], eagle["kind"]) == (128, "eagle")
    judging = parsed_by_typer(held_out.main, given[4][1:])
    assert [folder.name for folder in judging["data"]] == ["held-out", "data"]
    assert (judging["held_out"], len(judging["drafters"])) == (1, 4)
