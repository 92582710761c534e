"""Tuning on an engine whose step time is known: budgets fall to none as rows get dear."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import time

import psutil
import pytest
import typer

import tune
from redraft.bundle.budget import BudgetFile, BudgetTable
from redraft.bundle.config import LimitsInfo
from redraft.method import MethodPlan
from redraft.runtime import Runtime
from redraft.scheduler import Limits
from tests.build.test_makefile import dry_run
from tests.conftest import ROOT
from tests.engines.tiny import METHOD, random_model, tiny_bundle, tiny_target
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import TOY, ToyEngine, only, toy_codec, toy_tokenizer

LIMITS = Limits(slots=4, max_len=256, max_tree=14, prefill_chunk=64)


class Priced:
    """Costs 16 ms per step up to 10 rows and 8 ms for each further one: far more than a busy machine adds."""

    def execute(self, batch, samplers=None):
        started = time.perf_counter()
        result = super().execute(batch, samplers)  # type: ignore[misc]
        cost = 0.016 + 0.008 * max(len(batch.input_ids) - 10, 0)
        time.sleep(max(cost - (time.perf_counter() - started), 0))
        return result


class PricedEngine(Priced, ToyEngine):
    pass


class PricedDrawingEngine(Priced, DrawingToyEngine):
    pass


@pytest.fixture
def runtime():
    engine = PricedEngine(slots=4, max_tree=14, quality=0.95)
    plan = MethodPlan("best_first", budget=BudgetTable.constant(8))
    return Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), only(plan))


def test_budgets_follow_the_price_of_rows(runtime, monkeypatch):
    monkeypatch.setattr(tune, "BUDGETS", (0, 4, 8, 12))
    monkeypatch.setattr(tune, "RUNNING", (1, 4))
    monkeypatch.setattr(tune, "SHAPES", (("best_first", False),))
    monkeypatch.setattr(tune, "ROUNDS", 3)
    said: list[str] = []
    table = tune.tune(runtime, TOY, ["hello", "world"], 24, lambda rows, note: said.append(note))
    first, last = table.entries[0], table.entries[-1]
    assert (first.running, last.running) == (1, 4)
    assert first.greedy in (4, 8)
    assert last.greedy == last.sampled == 0
    assert table.measured["speed_up"]["1"]["greedy"] > 1.3
    assert any("step times, 4 running" in text for text in said)
    assert BudgetTable.model_validate_json(table.model_dump_json()) == table
    assert runtime.scheduler.idle


def test_rows_of_a_batch_are_weighed_as_steps_share_them():
    """Two sequences a step, of which one is sure and right, and the other guesses wrong."""
    sure, guessing = ([-0.1, -0.2, -0.3], [-0.1, -0.2, -0.3]), ([-2.0, -3.0], [])
    acceptance = tune.Acceptance([sure, guessing] * 3)
    assert [acceptance.length(budget, 2) for budget in (0, 1, 2)] == [1, 2, 2.5]
    assert [acceptance.length(budget, 1) for budget in (0, 1, 2)] == [1, 1.5, 2]


def test_small_trees_are_predicted_from_the_large_one(runtime):
    predicted = tune.measure_acceptance(
        runtime, TOY, ("best_first", False), ["hello", "world"], 90, {}, lambda *_: None
    )
    for budget in (2, 6):
        runtime.with_plans(only(MethodPlan("best_first", budget=BudgetTable.constant(budget))))
        for key, text in enumerate(["hello", "world"]):
            request = tune.GenerateRequest(id=str(key), text=text, max_tokens=90)
            runtime.scheduler.submit(runtime.sequence(str(key), request))
        while not runtime.scheduler.idle:
            runtime.scheduler.step()
        totals = runtime.scheduler.totals
        assert predicted.length(budget) == pytest.approx(1 + totals.accepted / totals.sequence_steps, rel=0.2)


def test_a_bundle_that_draws_at_random_is_tuned_on_its_own_tree(monkeypatch):
    """Each budget with trees cut to it, in draw order; the sampled ones at temperature 1."""
    monkeypatch.setattr(tune, "BUDGETS", (0, 3, 8, 12))
    monkeypatch.setattr(tune, "RUNNING", (1, 4))
    monkeypatch.setattr(tune, "ROUNDS", 3)
    levels = (3, 2)
    engine = PricedDrawingEngine("gumbel_top_k", levels, 12, slots=4, max_tree=14)
    plan = MethodPlan("gumbel_top_k", "recursive_rejection", levels=levels, support=12)
    runtime = Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), only(plan))
    table = tune.tune(runtime, TOY, ["hello", "world"], 40, lambda *_: None)
    assert (table.construction, table.ngram) == ("gumbel_top_k", False)
    lengths = table.measured["acceptance"]["gumbel_top_k"]
    assert list(lengths["sampled"]) == ["0", "3", "8", "9"], "no budget beyond the nine draws"
    assert lengths["sampled"]["0"] == 1
    assert lengths["sampled"]["9"] > lengths["sampled"]["3"] > 1.1
    assert lengths["greedy"]["9"] >= lengths["greedy"]["3"]
    assert table.entries[0].sampled > 0
    assert table.entries[-1].sampled <= 3, "four trees of more than two rows are dear"


@pytest.mark.parametrize("construction", ["ngram_trie", "beam", "best_first"])
def test_a_tree_that_is_not_the_default_stays(runtime, monkeypatch, construction):
    monkeypatch.setattr(tune, "BUDGETS", (0, 4))
    monkeypatch.setattr(tune, "RUNNING", (1,))
    monkeypatch.setattr(tune, "ROUNDS", 1)
    runtime.plans[TOY] = MethodPlan(construction, budget=BudgetTable.constant(4))
    table = tune.tune(runtime, TOY, ["hello"], 12, lambda *_: None)
    assert (table.construction, table.ngram) == (construction, False)


def test_a_method_that_drafts_from_what_was_served_is_measured_when_it_has_served(runtime, monkeypatch):
    monkeypatch.setattr(tune, "BUDGETS", (0, 8))
    monkeypatch.setattr(tune, "RUNNING", (1,))
    monkeypatch.setattr(tune, "ROUNDS", 2)
    runtime.plans[TOY] = MethodPlan("ngram_trie", budget=BudgetTable.constant(4))
    cold, warm = (
        tune.tune(runtime, TOY, ["hello"], 24, lambda *_: None, others) for others in ([], ["hello", "world"])
    )
    lengths = [table.measured["acceptance"]["ngram_trie"]["greedy"]["8"] for table in (cold, warm)]
    assert lengths[0] < 1.5
    assert lengths[1] > 4, "it has answered the same prompt before"


def test_other_prompts_of_the_file_are_served_first(tmp_path, monkeypatch):
    tokenizer, limits = toy_tokenizer().to_str(), LimitsInfo(slots=2, max_len=64, max_tree=6, prefill_chunk=16)
    bundle = tiny_bundle(tmp_path, tiny_target(), "torch", tokenizer=tokenizer, limits=limits).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (bundle / "budget.json").write_text('{"methods": {"of another build": ')
    words = ["one", "two", "three", "four"]
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{word}"}}\n' for word in words))
    given = []

    def tuned(runtime, name, prompts, tokens, say, others):
        given.extend([prompts, others])
        return BudgetTable.constant(0)

    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.setattr(tune, "show", lambda *_: None)
    tune.main(bundle, tmp_path / "prompts.jsonl", None, 2, 4, 1)
    assert given == [["one", "three"], ["two", "four"]]
    assert list(BudgetFile.load(bundle).methods) == [METHOD], "tables that cannot be used are forgotten"


def test_a_prompt_that_does_not_fit_is_said(tmp_path, capsys):
    limits = LimitsInfo(slots=2, max_len=32, max_tree=6, prefill_chunk=16)
    bundle = tiny_bundle(tmp_path, tiny_target(), "torch", tokenizer=toy_tokenizer().to_str(), limits=limits).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a long story"}')
    with pytest.raises(typer.Exit):
        tune.main(bundle, tmp_path / "prompts.jsonl", None, 1, 64, 1)
    assert "32" in capsys.readouterr().err


def test_two_ranks_are_tuned_as_make_starts_them(tmp_path):
    """Rank 0 writes the table and shows it whole; both ranks end."""
    config = dataclasses.replace(tiny_target().config, num_heads=6, num_kv_heads=3, intermediate_size=201)
    limits = LimitsInfo(slots=2, max_len=64, max_tree=6, prefill_chunk=16)
    tokenizer = toy_tokenizer().to_str()
    bundle = tiny_bundle(tmp_path, random_model(config), tensor_parallel=2, tokenizer=tokenizer, limits=limits).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "world"}\n')
    (line,) = (line for line in dry_run("tune", "TP=2").splitlines() if "build/tune.py" in line)
    started = line.partition(" || ")[2].partition(" --bundle ")[0]
    asked = f"--bundle {bundle} --prompts {tmp_path}/prompts.jsonl --num-prompts 2 --tokens 4"
    command = ["env", f"PYTHONPATH={ROOT}", *shlex.split(f"{started} {asked}")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = BudgetFile.load(bundle).methods
    assert list(tables) == [METHOD]
    assert [entry.running for entry in tables[METHOD].entries] == [1, 2]
    assert list(tables[METHOD].measured["step_ms"]["2"]) == ["0", "1", "2", "3", "4"]
    shown = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("| ")]
    assert shown == ["running", "1", "2"], done.stderr
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(str(bundle) in command for command in commands)


@pytest.mark.parametrize("construction", ["best_first", "ngram_trie", "gumbel_top_k"])
def test_the_rows_said_are_the_rows_planned(runtime, monkeypatch, construction):
    """So that n comes to m."""
    monkeypatch.setattr(tune, "BUDGETS", (0, 4))
    monkeypatch.setattr(tune, "RUNNING", (1,))
    monkeypatch.setattr(tune, "ROUNDS", 1)
    if construction == "gumbel_top_k":
        engine = DrawingToyEngine(construction, (3, 2), 12, slots=4, max_tree=14)
        plan = MethodPlan(construction, "recursive_rejection", levels=(3, 2), support=12)
        runtime = Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), only(plan))
    else:
        runtime.plans[TOY] = MethodPlan(construction, budget=BudgetTable.constant(4))
    said: list[int] = []
    prompts, others = ["hello", "world"], ["one", "two", "three"]
    tune.tune(runtime, TOY, prompts, 12, lambda rows, note: said.append(rows), others)
    planned = tune.Measurements.of(runtime, TOY, others).rows(len(prompts), 12, runtime.limits.slots)
    assert sum(said) == planned
    assert min(said) >= 0


def test_tuning_that_was_stopped_goes_on_with_the_methods_without_a_table(tmp_path, monkeypatch, capsys):
    tokenizer, limits = toy_tokenizer().to_str(), LimitsInfo(slots=2, max_len=64, max_tree=6, prefill_chunk=16)
    bundle = tiny_bundle(tmp_path, tiny_target(), "torch", tokenizer=tokenizer, limits=limits).path
    (bundle / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    load, names = Runtime.load, []

    def two_methods(*arguments) -> Runtime:
        runtime = load(*arguments)
        runtime.plans["second"] = MethodPlan("ngram_trie", budget=BudgetTable.constant(4))
        return runtime

    def tuned(runtime, name, *_):
        names.append(name)
        if name == "second" and len(names) == 2:
            raise KeyboardInterrupt
        return BudgetTable.constant(0)

    monkeypatch.setattr(Runtime, "load", two_methods)
    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.setattr(tune, "show", lambda *_: None)
    command = (bundle, tmp_path / "prompts.jsonl", None, 1, 4, 1)
    with pytest.raises(SystemExit):
        tune.main(*command)
    assert re.search(rf"tune: {METHOD}, second: about \d+ s, .* of memory", capsys.readouterr().err)
    assert list(BudgetFile.load(bundle).methods) == [METHOD]
    tune.main(*command)
    tune.main(*command)
    assert names == [METHOD, "second", "second", METHOD, "second"]
