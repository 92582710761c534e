"""The torch backend's sequence: once as it is, on the CPU; commands that their scripts take, what is kept of them."""

import argparse
import json
import os
import tomllib
from pathlib import Path

import pytest
import typer

import build_engines
from benchmarks.gpu import torch_backend
from benchmarks.gpu.torch_backend import ROOT
from benchmarks.speed import method_batches, step_times
from benchmarks.verify import lossless as verify_lossless
from compiler.methods import check_method, read_methods
from redraft.batch import TargetBatch
from redraft.bundle.backends import TORCH
from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.engines import load_engine
from tests.engines.tiny import tiny_drafter


def test_every_shipped_drafter_is_measured():
    measured = {settings.drafter.name for settings in read_methods(ROOT / "benchmarks/gpu/methods.toml").values()}
    assert measured == {folder.name for folder in (ROOT / "drafters").iterdir() if folder.is_dir()}


class Parsed(Exception):
    pass


def parsed_by_typer(main, arguments: list[str]) -> dict:
    app = typer.Typer()
    app.command()(main)
    return typer.main.get_command(app).make_context("script", list(arguments)).params


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


def test_a_failure_is_the_commands_own(tmp_path, ran):
    ran.failing = "equality"
    assert torch_backend.main(arguments(tmp_path)) == 1
    count = len(ran)
    assert torch_backend.main(arguments(tmp_path)) == 1, "it is remembered with the result that it left"
    assert len(ran) == count
    (tmp_path / "work" / "equality.json").unlink()
    ran.failing = ""
    assert torch_backend.main(arguments(tmp_path)) == 0
    assert torch_backend.main(arguments(tmp_path)) == 0


def test_what_is_known_is_written_after_each_command(tmp_path, ran, monkeypatch):
    def ended(command, cwd):
        if Path(command[-1]).name == "batches.json":
            raise SystemExit(143)
        return ran.run(command, cwd)

    monkeypatch.setattr(torch_backend.subprocess, "run", ended)
    with pytest.raises(SystemExit):
        torch_backend.main(arguments(tmp_path, "--parts", "build", "equality", "batches"))
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert (len(parts["build"]), parts["equality"][0]["result"]) == (4, {"of": "equality"})


def test_the_scripts_take_these_flags(tmp_path, ran, monkeypatch):
    torch_backend.main(arguments(tmp_path, "--dataset", "d.jsonl", "--batches", "1", "64"))
    build, _, plain, _, equality, steps, _, batches = ran
    assert parsed_by_typer(build_engines.main, build[2:])["slots"] == 64
    assert parsed_by_typer(build_engines.main, plain[2:])["no_drafter"]
    assert parsed_by_typer(step_times.main, steps[3:])["bundle"] == tmp_path / "work" / "methods-bf16"
    for script, command in ((verify_lossless, equality), (method_batches, batches)):
        monkeypatch.setattr(script, "load_llm", lambda parser, bundle: raise_parsed())
        with pytest.raises(Parsed):
            script.main(command[3:])


def test_methods_without_their_drafter_are_left_out(tmp_path, ran, monkeypatch, capsys):
    monkeypatch.setattr(torch_backend, "ROOT", tmp_path)
    methods = tmp_path / "methods.toml"
    methods.write_text('[here]\ndrafter = "one"\nngram = false\n\n[away]\ndrafter = "two"\n')
    with pytest.raises(SystemExit):
        torch_backend.main(arguments(tmp_path, "--methods", str(methods), "--parts", "build"))
    assert "none of its drafters is here" in capsys.readouterr().err
    (tmp_path / "one").mkdir()
    assert torch_backend.main(arguments(tmp_path, "--methods", str(methods), "--parts", "build")) == 0
    given = parsed_by_typer(build_engines.main, ran[0][2:])
    assert tomllib.loads(given["methods"].read_text()) == {"here": {"drafter": "one", "ngram": False}}
    assert "left out, as their drafters are not here: away" in capsys.readouterr().out


def test_every_method_fits_the_bundle_that_is_built(tmp_path, ran, monkeypatch):
    torch_backend.main(arguments(tmp_path, "--parts", "build"))
    given = parsed_by_typer(build_engines.main, ran[0][2:])
    given["prefill_chunk"] = given["prefill_chunk"] or TORCH.prefill_chunk
    limits = LimitsInfo(**{name: given[name] for name in LimitsInfo.model_fields if name in given})
    monkeypatch.chdir(ROOT)
    for name, settings in read_methods(given["methods"]).items():
        check_method(name, settings.info(), BundleConfig.model_construct(limits=limits))


def raise_parsed() -> None:
    raise Parsed


@pytest.mark.slow
def test_the_whole_sequence_on_the_cpu(target, model, tmp_path, bare):
    """One method of a tiny target: bundles are built, answers compared, steps and batches timed. It would catch a
    script that needs a package that is not packed."""
    tiny_drafter(target).save(tmp_path / "drafter")
    (tmp_path / "methods.toml").write_text(f'[tiny]\ndrafter = "{tmp_path}/drafter"\nngram = false\n')
    prompts = [{"turns": [f"t{i} t{i + 3} t{2 * i}"]} for i in range(5, 8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    folders = ("--model", str(model), "--methods", str(tmp_path / "methods.toml"))
    sizes = ("--batches", "1", "2", "--max-len", "320", "--num-prompts", "2", "--max-tokens", "8", "--warm-up", "1")
    given = arguments(tmp_path, *folders, *sizes, "--dataset", str(tmp_path / "prompts.jsonl"))
    assert torch_backend.main(given) == 0
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert [entry["exit_status"] for listed in parts.values() for entry in listed] == [0] * 8
    (equality,), (steps, plain), (batches,) = (
        [e["result"] for e in parts[name]] for name in ("equality", "steps", "batches")
    )
    compared = {(row["setting"], row["concurrency"]): row for row in equality["settings"]}
    assert list(compared) == [(setting, many) for setting in ("greedy", "temperature 1") for many in (1, 8)]
    assert all((row["tokens"], row["failures"]) == (16, 0) for row in compared.values())
    assert {(row["sequences"], row["rows"]) for row in steps} >= {(1, 1), (1, 64), (2, 1), (1, 0), (2, 0)}
    assert plain[0]["rows"] == 1
    assert all(row["rows"] for row in plain), "it drafts nothing"
    for precision in ("fp32", "bf16"):
        _, hidden = load_engine(Bundle.load(tmp_path / "work" / f"ar-{precision}")).execute(
            TargetBatch.causal(1, 1, 0, 1)
        )
        assert hidden is None
    assert equality["inputs"]["auto_regressive"] == str(tmp_path / "work" / "ar-fp32")
    cells = [(cell["method"], cell["batch"]) for cell in batches["cells"]]
    assert cells == [(method, batch) for batch in (1, 2) for method in ("auto_regressive", "tiny")]
