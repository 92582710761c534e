"""Tuning on an engine whose step time is known: budgets fall to none as rows get expensive."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from redraft.bundle.budget import doubts
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.compiler.tuning.acceptance import Acceptance
from redraft.compiler.tuning.choice import Cell, StepTimes
from redraft.compiler.tuning.measure import LEAST_STEPS, Bench, TreeShape
from redraft.compiler.tuning.tuner import Grid, Tuner
from redraft.request import GenerateRequest
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import TOY, ToyEngine, only, toy_codec

LIMITS = Limits(slots=4, max_len=256, max_tree=14, prefill_chunk=64)
TEMPERATURES = ((0.0, 1), (0.7, 2))
GRID = Grid((0, 4, 8, 12), (1, 4), (TreeShape("best_first", False),), rounds=3, temperatures=TEMPERATURES)
ENOUGH = 600.0


class Priced:
    """Costs 16 ms per step up to 10 rows and 8 ms for each further one, and nothing else takes time."""

    now = 0.0

    def execute(self, batch, samplers=None):
        Priced.now += 0.016 + 0.008 * max(len(batch.input_ids) - 10, 0)
        return super().execute(batch, samplers)  # type: ignore[misc]


class PricedEngine(Priced, ToyEngine):
    pass


class PricedDrawingEngine(Priced, DrawingToyEngine):
    pass


def runtime_of(engine: ToyEngine, plan: MethodConfig) -> Runtime:
    return Runtime(engine, toy_codec(), LIMITS, engine.vocab_size, frozenset({0}), only(plan))


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("redraft.scheduling.scheduler.time", SimpleNamespace(perf_counter=lambda: Priced.now))


@pytest.fixture
def runtime():
    engine = PricedEngine(slots=4, max_tree=14, quality=0.95)
    return runtime_of(engine, MethodConfig(construction="best_first", tree_budget=8))


def bench_of(runtime: Runtime, prompts: list[str], tokens: int) -> Bench:
    return Bench(runtime, TOY, [runtime.codec.encode(prompt) for prompt in prompts], tokens)


def test_fits_take_a_quarter_of_the_time_however_slow_the_model_is(monkeypatch):
    """Seconds of real time: every fit would take all that there is."""
    now = [0.0]
    monkeypatch.setattr("redraft.compiler.tuning.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("redraft.compiler.tuning.measure.time", SimpleNamespace(monotonic=lambda: now[0]))
    spent = []

    def slow_fit(bench, *_):
        spent.append(bench.ends - now[0])
        now[0] = bench.ends

    monkeypatch.setattr(Bench, "fit", slow_fit)
    engine = PricedEngine(slots=4, max_tree=14, quality=0.95)
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
    table = Tuner(bench_of(runtime_of(engine, plan), ["hello"], 8), 1000.0, GRID).tune()
    assert sum(spent) == pytest.approx(0.25 * 0.75 * 1000)
    assert table.measured["not_timed"] == []


def test_budgets_follow_the_price_of_rows(runtime):
    said: list[str] = []
    table = Tuner(bench_of(runtime, ["hello", "world"], 24), ENOUGH, GRID, lambda tuner, what: said.append(what)).tune()
    first, last = table.entries[0], table.entries[-1]
    assert (first.running, last.running) == (1, 4)
    assert first.nodes in (4, 8)
    assert {entry.temperature for entry in table.entries} == {0.0, 0.7}
    assert not any(entry.nodes for entry in table.entries if entry.running == 4)
    assert table.measured["tried"]["1"]["0"] > 1.3
    assert sum(one["nodes"] for one in table.measured["reliability"]["0.7"]) > 50
    assert table.measured["measurements"]["done"] == table.measured["measurements"]["of"] == len(said)
    assert any("step times of 4 running" in text for text in said)
    assert BudgetTable.model_validate_json(table.model_dump_json()) == table
    assert runtime.scheduler.idle


def test_without_time_the_most_valuable_is_measured(runtime):
    """And nothing that this does not make sure is drafted."""
    grid = replace(GRID, running=(1, 2, 3, 4))
    tuner = Tuner(bench_of(runtime, ["hello", "world", "again", "and", "more"], 16), 0, grid)
    table = tuner.tune()
    assert [entry.running for entry in table.entries if not entry.temperature] == [1, 4]
    assert 0 < tuner.done < tuner.of
    tried = table.measured["tried"]
    drafted = {(str(one.running), f"{one.temperature:g}") for one in table.entries if one.nodes}
    assert drafted <= {(running, one) for running, found in tried.items() for one in found}, "only what was tried"
    left_out = {(str(n), one) for one, loads in table.measured["not_tried"].items() for n in loads}
    assert ("1", "0.7") in left_out
    assert not left_out & drafted
    assert "1 running at temperature 0.7: no time to try" in "; ".join(doubts(table))


def test_a_measurement_that_is_under_way_ends_with_its_time(runtime):
    """On a busy machine a single one may take longer than all of them should."""
    bench, found, times = bench_of(runtime, ["hello", "world", "again"], 200), Acceptance(), StepTimes()
    bench.ends = 0.0
    bench.acceptance(GRID.shapes[0], 0.0, 4, found, bench.prompts)
    assert LEAST_STEPS <= len(found.steps) < LEAST_STEPS + LIMITS.slots
    bench.step_times(GRID.shapes[0], 2, [0, 4], 3, times)
    assert [len(samples) for samples in times.samples.values()] == [1, 1]
    bench.serve(bench.prompts[:2])
    assert 2 < sum(map(len, bench.served)) < 2 * 200
    assert runtime.scheduler.idle


def test_a_shape_that_was_measured_on_a_few_steps_is_not_chosen(runtime):
    """The time ends while the second is measured."""
    first, second = GRID.shapes[0], TreeShape("beam", False)

    def say(tuner: Tuner, what: str) -> None:
        if what == f"acceptance of {second}":
            tuner.bench.ends = 0.0

    grid = replace(GRID, shapes=(first, second))
    table = Tuner(bench_of(runtime, ["hello", "world", "again"], 24), ENOUGH, grid, say).tune()
    assert list(table.measured["acceptance"]) == [str(first)]
    assert (table.construction, bool(table.ngram)) == first


def test_drafts_that_are_never_right_are_not_made():
    runtime = runtime_of(
        PricedEngine(slots=4, max_tree=14, quality=0), MethodConfig(construction=None, ngram=True, tree_budget=8)
    )
    table = Tuner(bench_of(runtime, ["hello", "world"], 24), ENOUGH, GRID).tune()
    assert not any(entry.nodes for entry in table.entries)


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [(Tuner, "_speed_up", 1.01), (Bench, "mean_step", 0.0)],
    ids=["too little gained", "nothing timed"],
)
def test_budgets_that_do_not_pay_when_they_are_tried_are_dropped(runtime, monkeypatch, owner, name, found):
    monkeypatch.setattr(owner, name, lambda *_: found)
    table = Tuner(bench_of(runtime, ["hello", "world"], 24), ENOUGH, GRID).tune()
    assert not any(entry.nodes for entry in table.entries)


def test_steps_are_timed_after_prompts_of_many_chunks(runtime):
    """Beside a sequence that decodes a prompt takes two steps per chunk; none ends before all are through."""
    runtime.limits = replace(LIMITS, prefill_chunk=16)
    bench = bench_of(runtime, ["x" * 120] * 4, 0)
    seconds = bench.mean_step(TreeShape("best_first", False), bench.prompts, 0.0, Cell(0, 0.0, 1.0), 6)
    assert seconds == pytest.approx(0.016)


def test_a_temperature_is_not_tried_where_a_higher_one_paid(runtime, monkeypatch):
    """Temperature 1 pays with 1 running, and does not with 2: there 0.7 is tried itself."""
    tried = []

    def speed_up(self, shape, running, temperature, cell):
        tried.append((running, temperature))
        return 1.5 if (running, temperature) != (2, 1.0) else 1.0

    monkeypatch.setattr(Tuner, "_speed_up", speed_up)
    monkeypatch.setattr(Tuner, "_cells", lambda self, shape: {
        temperature: {running: Cell(4, 0.0, 2.0) for running in (1, 2)} for temperature in (0.0, 1.0, 0.7, 0.3)
    })  # fmt: skip
    grid = replace(GRID, running=(1, 2), rounds=1, temperatures=((0.0, 1), (1.0, 1), (0.7, 1), (0.3, 1)))
    runtime.limits = replace(LIMITS, slots=2)
    table = Tuner(bench_of(runtime, ["hello"], 4), ENOUGH, grid).tune()
    assert sorted(tried) == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 0.7), (2, 1.0)]
    drafted = {(entry.running, entry.temperature) for entry in table.entries if entry.nodes}
    assert drafted == {(1, 0.0), (1, 0.3), (1, 0.7), (1, 1.0), (2, 0.0), (2, 0.3), (2, 0.7)}


def test_small_trees_are_predicted_from_the_large_one(runtime):
    from redraft.compiler.tuning.acceptance import Acceptance

    predicted = Acceptance()
    bench_of(runtime, [], 90).acceptance(
        TreeShape("best_first", False), 0.0, 13, predicted, bench_of(runtime, ["hello", "world"], 0).prompts
    )
    for budget in (2, 6):
        runtime.with_methods(only(MethodConfig(construction="best_first", tree_budget=budget)))
        for key, text in enumerate(["hello", "world"]):
            request = GenerateRequest(id=str(key), text=text, max_tokens=90)
            runtime.scheduler.submit(runtime.sequence(str(key), request))
        while not runtime.scheduler.idle:
            runtime.scheduler.step()
        totals = runtime.scheduler.totals
        live = 1 + totals.accepted / totals.sequence_steps
        assert predicted.expect(budget, 0.0).tokens == pytest.approx(live, rel=0.2)


def test_a_bundle_that_draws_at_random_is_tuned_on_its_own_tree():
    """Each budget with trees cut to it, in draw order."""
    grid = Grid((0, 3, 8, 12), (1, 4), rounds=3, temperatures=((0.0, 1), (1.0, 1)))
    engine = PricedDrawingEngine("gumbel_top_k", (3, 2), 12, slots=4, max_tree=14)
    plan = MethodConfig(construction="gumbel_top_k", verification="recursive_rejection", levels=(3, 2), support=12)
    table = Tuner(bench_of(runtime_of(engine, plan), ["hello", "world"], 40), ENOUGH, grid).tune()
    assert (table.construction, table.ngram) == ("gumbel_top_k", False)
    lengths = table.measured["acceptance"]["gumbel_top_k"]
    assert list(lengths["1"]) == ["0", "3", "8", "9"], "no budget beyond the nine draws"
    assert lengths["1"]["0"] == 1
    assert lengths["1"]["9"] > lengths["1"]["3"] > 1.1
    assert lengths["0"]["9"] >= lengths["0"]["3"]
    assert table.lookup(4, 1.0).nodes <= 3, "four trees of more than two rows are expensive"
    assert not any(entry.chance for entry in table.entries)


@pytest.mark.parametrize("construction", ["ngram_trie", "beam", "best_first"])
def test_a_tree_that_is_not_the_default_stays(runtime, construction):
    runtime.methods[TOY] = MethodConfig(construction=construction, tree_budget=4)
    grid = Grid((0, 4), (1,), rounds=1, temperatures=TEMPERATURES)
    table = Tuner(bench_of(runtime, ["hello"], 12), 0, grid).tune()
    assert (table.construction, table.ngram) == (construction, False)


def test_a_method_that_drafts_from_what_was_served_is_measured_when_it_has_served(runtime):
    runtime.methods[TOY] = MethodConfig(construction="ngram_trie", tree_budget=4)
    lengths = []
    for others in ([], bench_of(runtime, ["hello", "world"], 0).prompts):
        bench = bench_of(runtime, ["hello"], 24)
        bench.serve(others)
        table = Tuner(bench, ENOUGH, Grid((0, 8), (1,), rounds=2, temperatures=TEMPERATURES)).tune()
        lengths.append(table.measured["acceptance"]["ngram_trie"]["0"]["8"])
    assert lengths[0] < 1.5
    assert lengths[1] > 4, "it has answered the same prompt before"
