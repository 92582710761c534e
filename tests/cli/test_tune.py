"""The command that tunes a bundle."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys

import psutil
import pytest
import typer

from redraft.bundle.config import LimitsInfo
from redraft.bundle.method import MethodConfig
from redraft.bundle.scores import ScoresFile
from redraft.cli import tune
from redraft.compiler.tuning.bundle import TEMPERATURES
from redraft.compiler.tuning.measure import Bench
from redraft.console import progress
from redraft.runtime import Runtime
from redraft.serving.ranks import launch_command
from tests.conftest import ROOT, wait_until
from tests.engines.tiny import METHOD, random_model, tiny_bundle, tiny_target
from tests.toy_engine import toy_tokenizer

LIMITS = LimitsInfo(slots=2, max_len=64, max_tree=6, prefill_chunk=16)


def tiny(folder, texts, limits=LIMITS, **plan):
    """A bundle of a tiny model, and a file of prompts."""
    bundle = tiny_bundle(folder, tiny_target(), "torch", tokenizer=toy_tokenizer().to_str(), limits=limits, **plan).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return bundle, folder / "prompts.jsonl"


def test_scores_that_cannot_be_used_are_forgotten(tmp_path, monkeypatch):
    bundle, prompts = tiny(tmp_path, ["one", "two", "three", "four"])
    (bundle / "scores.json").write_text('{"methods": {"of another build": ')
    given = []
    monkeypatch.setattr("redraft.compiler.tuning.bundle.fits", lambda _: True)
    monkeypatch.setattr(Bench, "fit", lambda bench, _: given.append(bench))
    tune.main(bundle, prompts=prompts, minutes=1, num_prompts=2, max_tokens=4, threads=1)
    codec = given[0].runtime.codec
    assert given[0].prompts == [codec.encode(text) for text in ("one", "three")]
    assert list(ScoresFile.load(bundle).methods) == [METHOD]


def test_prompts_that_do_not_fit_are_left_out(tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr("redraft.compiler.tuning.bundle.fits", lambda _: True)
    monkeypatch.setattr(Bench, "fit", lambda bench, _: given.append(bench))
    bundle, prompts = tiny(tmp_path, ["x" * 29, "x" * 28, "one"], LIMITS.model_copy(update={"max_len": 32}))
    tune.main(bundle, prompts=prompts, minutes=1, num_prompts=3, max_tokens=4, threads=1)
    assert given[0].prompts == [given[0].runtime.codec.encode(text) for text in ("x" * 28, "one")]
    assert "1 of 3 prompts do not fit" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        tune.main(bundle, prompts=prompts, minutes=1, num_prompts=3, max_tokens=32, threads=1)
    assert "no prompt leaves room for 32 tokens in the bundle's context of 32" in capsys.readouterr().err


def test_two_ranks_are_tuned(tmp_path):
    """Rank 0 writes the scores and shows them; both ranks end."""
    config = dataclasses.replace(tiny_target().config, num_heads=6, num_kv_heads=3, intermediate_size=201)
    tokenizer = toy_tokenizer().to_str()
    bundle = tiny_bundle(tmp_path, random_model(config), tensor_parallel=2, tokenizer=tokenizer, limits=LIMITS).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "world"}\n')
    asked = f"--bundle {bundle} --prompts {tmp_path}/prompts.jsonl --num-prompts 2 --max-tokens 4"
    command = launch_command([sys.executable, "-m", "redraft", "tune", *shlex.split(asked)], 2)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = ScoresFile.load(bundle).methods
    assert list(tables) == [METHOD]
    assert tables[METHOD].nodes[0].temperature == 0
    assert "scores of drafted nodes" in done.stderr
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(str(bundle) in command for command in commands)


def test_tuning_that_was_stopped_goes_on_with_the_methods_without_scores(tmp_path, monkeypatch, capsys):
    bundle, prompts = tiny(tmp_path, ["one"])
    load, names = Runtime.load, []

    def two_methods(*arguments, **options) -> Runtime:
        runtime = load(*arguments, **options)
        runtime.methods["second"] = MethodConfig(construction=None, ngram=True, tree_budget=4)
        return runtime

    def fit(bench, temperature):
        if temperature == TEMPERATURES[0]:
            names.append(bench.method)
            if names == [METHOD, "second"]:
                raise KeyboardInterrupt

    monkeypatch.setattr(Runtime, "load", two_methods)
    monkeypatch.setattr("redraft.compiler.tuning.bundle.fits", lambda _: True)
    monkeypatch.setattr(Bench, "fit", fit)
    options = {"prompts": prompts, "minutes": 1, "num_prompts": 1, "max_tokens": 4, "threads": 1}
    with pytest.raises(SystemExit):
        tune.main(bundle, **options)
    assert re.search(rf"tune: {METHOD}, second: at most about 2 min, .* of memory", capsys.readouterr().err)
    assert list(ScoresFile.load(bundle).methods) == [METHOD]
    tune.main(bundle, **options)
    tune.main(bundle, **options)
    assert names == [METHOD, "second", "second", METHOD, "second"]


def test_a_bundle_that_loads_slowly_is_seen_in_a_log(tmp_path, monkeypatch, capsys):
    def slow(*_, **__) -> Runtime:
        for _ in range(2):
            wait_until(lambda: "still loading" in capsys.readouterr().err)
        raise ValueError("enough")

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    monkeypatch.setattr(progress, "LINE_S", 0.1)
    monkeypatch.setattr(Runtime, "load", slow)
    with pytest.raises(typer.Exit):
        tune.main(tmp_path, prompts=tmp_path / "prompts.jsonl")
