"""Lyanna's figure 13: which operators run in which order, and what their times add up to."""

from __future__ import annotations

import json
import tomllib
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.speed import drafting_latency
from benchmarks.speed.drafting_latency import ALL, HEAD, SAMPLING, WAYS, Head, milliseconds
from model_defs.drafters.registry import load_drafter
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from redraft.batch import DraftBatch
from redraft.bundle.budget import BudgetTable
from redraft.bundle.manifest import Bundle
from redraft.llm import LLM
from redraft.method import MethodPlan
from redraft.plugins import kernels
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import only, toy_codec


@pytest.mark.parametrize(
    ("way", "head_rows", "sampled"),
    [
        ("token by token", [1, 3, 3, 3, 3], [(1, 1, 0)] + [(3, 1, 0)] * 4),
        ("one pass", [5], [(1, 5, 0), (3, 5, 1), (3, 5, 2), (3, 5, 3), (3, 5, 4)]),
        ("token by token, fused", [], []),
    ],
)
def test_rows_of_each_way(monkeypatch, way, head_rows, sampled):
    """The head runs once for a whole chain, once a level otherwise; a chain's level is what its nodes read."""
    projected, drawn = [], []
    linear, topk = kernels.linear, kernels.token_info_topk

    def counted_linear(x, *rest, **options):
        projected.append(len(x))
        return linear(x, *rest, **options)

    def counted_topk(logits, sequences, *rest, level, levels, **options):
        drawn.append((len(sequences), levels, level))
        return topk(logits, sequences, *rest, level=level, levels=levels, **options)

    monkeypatch.setattr(kernels, "linear", counted_linear)
    monkeypatch.setattr(kernels, "token_info_topk", counted_topk)
    head = Head(columns=111, hidden=32, dtype="fp32", width=3, k=2)
    with kernels.Recording() as recording:
        parts = WAYS[way](head)
    assert len(parts) == len(recording.calls)
    assert (projected, drawn) == (head_rows, sampled)


def test_parts_add_up(monkeypatch):
    monkeypatch.setattr(drafting_latency, "CACHE_BYTES", 800)
    times = milliseconds(Head(111, 32, "fp32", 3, 2), Head.one_pass, repeats=1)
    assert times[ALL] == pytest.approx(times[HEAD] + times[SAMPLING])


def test_table_of_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(drafting_latency, "CACHE_BYTES", 800)
    output = tmp_path / "r.json"
    arguments = ["--hidden", "32", "--columns", "111", "--widths", "1", "--widths", "3", "--k", "2", "--repeats", "2"]
    result = CliRunner().invoke(drafting_latency.app, ["heads", *arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    drafts = json.loads(output.read_text())["drafts"]
    assert [(row["width"], row["way"]) for row in drafts] == [(width, way) for width in (1, 3) for way in WAYS]
    assert "figure 13a" in result.output


def test_verification_is_timed_in_full_steps(tmp_path, monkeypatch):
    """Of 6 requests the last one decodes alone; the trees have 4 nodes in 2 levels."""
    limits = Limits(slots=4, max_len=256, max_tree=32, prefill_chunk=32)
    plan = MethodPlan(
        "stochastic_beam", "recursive_rejection", budget=BudgetTable.constant(4), levels=(2, 2), support=5
    )
    toy = DrawingToyEngine("stochastic_beam", (2, 2), 5)
    llm = LLM(Runtime(toy, toy_codec(), limits, toy.vocab_size, frozenset([0]), only(plan), prefix_reuse=False))
    monkeypatch.setattr(drafting_latency, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr(drafting_latency, "ChatTokenizer", lambda _: SimpleNamespace(chat=str))
    monkeypatch.setattr(Bundle, "load", lambda _: SimpleNamespace(config=SimpleNamespace(precision="fp32")))
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "r.json"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt {i}"]}) + "\n" for i in range(6)))
    options = ["--bundle", tmp_path, "--dataset", prompts, "--method", next(iter(llm.runtime.plans))]
    options += ["--sequences", 1, "--sequences", 3, "--num-prompts", 6, "--max-tokens", 9, "--output", output]
    result = CliRunner().invoke(drafting_latency.app, ["rejection", *map(str, options)])
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert (report["precision"], report["dataset"]) == ("fp32", "prompts.jsonl")
    alone, together = report["sequences"].values()
    assert alone["steps"] > together["steps"] > 0
    for found in (alone, together):
        assert 0 < found["verification_ms"] < found["step_ms"]
        assert 1 < found["nodes"] < 3


def test_untrained_drafters_and_their_methods(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = TargetConfig(111, 24, 40, 1, 6, 2, 4, 1e-5, RopeConfig(), 64, True, False, (2,))
    target = Target(config).eval().requires_grad_(False)
    monkeypatch.setattr(Target, "from_folder", lambda folder: target)
    monkeypatch.setattr(drafting_latency, "HEADS", heads := {"hot": 53, "full": None, "bare": 9})
    result = CliRunner().invoke(drafting_latency.app, ["untrained", "--model", "m", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    methods = tomllib.loads((tmp_path / "methods.toml").read_text())
    assert list(methods) == [f"{variant}_{head}" for variant in ("lyanna", "eagle") for head in heads]
    for name, method in methods.items():
        drafter = load_drafter(tmp_path / name, target)
        assert method["drafter"] == str(tmp_path / name)
        assert len(drafter.hot_ids) == (heads[name.partition("_")[2]] or 111)
        assert drafter.name == ("eagle" if "eagle" in name else "hidden_state")


def test_drafts_of_every_method_are_timed(tmp_path, monkeypatch):
    """Drafters with a context get their pairs behind it, the others one pair."""
    seen: dict[str, list[DraftBatch]] = {"lyanna": [], "plain": []}

    class Timed:
        def __init__(self, name: str, reads_context: bool):
            self.name, self.reads_context = name, reads_context

        def draft(self, batch: DraftBatch) -> None:
            seen[self.name].append(batch)

    engine = SimpleNamespace(drafters={"lyanna": Timed("lyanna", True), "plain": Timed("plain", False)})
    engine.close = lambda: None
    methods = {name: SimpleNamespace(drafter=name) for name in seen}
    config = SimpleNamespace(target=SimpleNamespace(feature_size=24), methods=methods, precision="bf16")
    monkeypatch.setattr(drafting_latency.Bundle, "load", lambda path: SimpleNamespace(config=config))
    monkeypatch.setattr(drafting_latency, "load_engine", lambda bundle: engine)
    monkeypatch.setattr(drafting_latency, "CACHE_BYTES", 800)
    output = tmp_path / "r.json"
    arguments = ["drafters", "--bundle", "b", "--context", "77", "--pairs", "3", "--repeats", "4"]
    result = CliRunner().invoke(drafting_latency.app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert [len(batches) for batches in seen.values()] == [6, 6]
    (ingesting, alone) = (seen[name][0] for name in seen)
    assert (ingesting.features.shape, ingesting.cache_lengths.tolist(), ingesting.row_offsets.tolist()) == (
        (3, 24),
        [77],
        [0, 3],
    )
    assert (alone.features.shape, alone.cache_lengths.tolist()) == ((1, 24), [0])
    assert set(json.loads(output.read_text())["milliseconds"]) == set(seen)
