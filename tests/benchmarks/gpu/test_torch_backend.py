"""The torch backend's sequence: once as it is, on the CPU; commands that their scripts take, what is kept of them."""

import argparse
import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu import torch_backend
from benchmarks.gpu.torch_backend import ROOT
from benchmarks.speed import method_batches, step_times
from benchmarks.verify import lossless as verify_lossless
from redraft.bundle.backends import TORCH
from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.cli import build
from redraft.compiler.methods import check_method, read_methods
from tests.benchmarks.gpu.conftest import Parsed, parsed_by_typer, raise_parsed


def test_every_shipped_drafter_is_measured():
    measured = {settings.drafter.name for settings in read_methods(ROOT / "benchmarks/gpu/methods.toml").values()}
    assert measured == {folder.name for folder in (ROOT / "drafters").iterdir() if folder.is_dir()}


class Commands(list[list[str]]):
    """Commands that were to run; each writes its output."""

    failing = ""

    def run(self, command: list[str], cwd: Path) -> argparse.Namespace:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the CPU was asked for"
        self.append(command)
        output = Path(command[-1])
        if output.suffix == ".json":
            output.write_text(json.dumps({"of": output.stem}))
        else:
            output.mkdir()
        return argparse.Namespace(returncode=int(output.stem == self.failing))


@pytest.fixture
def ran(monkeypatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(torch_backend.subprocess, "run", commands.run)
    return commands


def arguments(tmp_path, *more: str) -> list[str]:
    given = ["--device", "cpu", "--model", "m", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "r.json")]
    return [*given, *more]


def test_parts_run_in_order_and_what_is_there_is_kept(tmp_path, ran):
    assert torch_backend.main(arguments(tmp_path, "--parts", "build", "steps")) == 0
    built = ["methods-fp32", "methods-bf16", "ar-fp32", "ar-bf16"]
    assert [Path(command[-1]).name for command in ran] == [*built, "steps.json", "steps-ar.json"]
    count = len(ran)
    assert torch_backend.main(arguments(tmp_path, "--batches", "1", "8")) == 0
    assert [Path(command[-1]).name for command in ran[count:]] == ["equality.json", "batches.json"]
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert list(parts) == ["build", "equality", "steps", "batches"]
    assert parts["steps"][0]["result"] == {"of": "steps"}
    assert "exit_status" not in parts["steps"][0]


def test_the_scripts_take_these_flags(tmp_path, ran, monkeypatch):
    torch_backend.main(arguments(tmp_path, "--dataset", "d.jsonl", "--batches", "1", "64"))
    build, _, plain, _, equality, steps, _, batches = ran
    assert parsed_by_typer(build.main, build[2:])["slots"] == 64
    assert parsed_by_typer(build.main, plain[2:])["no_drafter"]
    assert parsed_by_typer(step_times.main, steps[3:])["bundle"] == tmp_path / "work" / "methods-bf16"
    for script, command in ((verify_lossless, equality), (method_batches, batches)):
        monkeypatch.setattr(script, "load_llm", lambda parser, bundle: raise_parsed())
        with pytest.raises(Parsed):
            script.main(command[3:])


def test_every_method_fits_the_bundle_that_is_built(tmp_path, ran, monkeypatch):
    torch_backend.main(arguments(tmp_path, "--parts", "build"))
    given = parsed_by_typer(build.main, ran[0][2:])
    given["prefill_chunk"] = given["prefill_chunk"] or TORCH.prefill_chunk
    limits = LimitsInfo(**{name: given[name] for name in LimitsInfo.model_fields if name in given})
    monkeypatch.chdir(ROOT)
    for name, settings in read_methods(given["methods"]).items():
        check_method(name, settings.info(), BundleConfig.model_construct(limits=limits))
