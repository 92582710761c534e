"""Both TensorRT backends over a stand-in library whose engines compute: generations, ranks and caches.

The slow cases would catch a backend or a precision that gives other logits or tokens on two ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.tensorrt.session import Session
from tests.engines import tiny
from tests.engines.ranks.mpi import run_ranks
from tests.engines.ranks.parallel_ranks import answers
from tests.engines.scheduling import generate
from tests.engines.tensorrt.bundles import BACKENDS, LIMITS, bundle_of, recorded_steps
from tests.engines.tensorrt.ranks import steps
from tests.engines.tiny import chain, expected, grouped_target, make_batch, tiny_drafter_of, tiny_lm

RANKS_SCRIPT = Path(__file__).with_name("ranks.py")


def test_the_scheduler_speculates_to_the_same_text(monkeypatch, tmp_path):
    target, *_ = BACKENDS["tensorrt_rtx"]
    options = {"trained": tiny_drafter_of(target(), "eagle"), "limits": tiny.LIMITS}
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, **options))
    plan = MethodConfig(construction="best_first", tree_budget=5)
    tokens, scheduler = generate(engine, plan)
    assert scheduler.totals.drafted > scheduler.totals.accepted
    assert tokens == generate(engine, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make_target", "limits", "precision", "tolerance"),
    [
        ("tensorrt", tiny_lm, LIMITS, "bf16", 0.1),
        ("tensorrt_rtx", grouped_target, tiny.LIMITS, "fp32", 1e-5),
    ],
)
def test_two_ranks_give_what_one_gives(backend, make_target, limits, precision, tolerance, monkeypatch, tmp_path):
    """Two KV groups as 1 + 1, three as 2 + 1. In float32 the tokens are the same too."""
    target = make_target()
    options = {"target": target, "trained": tiny_drafter_of(target, "medusa"), "limits": limits, "precision": precision}
    two = bundle_of(backend, monkeypatch, tmp_path / "2", tensor_parallel=2, **options)
    assert not list((two.path / "rank1").glob("drafter.*"))
    plans = {"best first": {"construction": "best_first"}} if precision == "fp32" else {}
    output = tmp_path / "report.npz"
    done = run_ranks(2, RANKS_SCRIPT, two.path, json.dumps(plans), output)
    assert done.returncode == 0, done.stdout + done.stderr
    report = np.load(output)
    for number, step in enumerate(steps()):
        for name, want in zip(("logits", "features"), expected(make_target(), step), strict=True):
            error = np.abs(report[f"{name}{number}"] - want) / np.abs(want).max()
            assert error.max() < tolerance, (name, number)
    np.testing.assert_array_equal(report["chosen"], report["logits0"].argmax(1))
    if plans:
        one = load_engine(bundle_of(backend, monkeypatch, tmp_path / "1", **options))
        assert json.loads(str(report["answers"])) == answers(one, plans)


def test_caches_are_the_same_with_and_without_aliases(monkeypatch, tmp_path):
    """The compiler is told of aliases only where the bundle asks for it. Both names have one address in any case."""
    found = []
    for alias in (False, True):
        bundle = bundle_of("tensorrt", monkeypatch, tmp_path / str(alias), drafts=False, alias=alias)
        head = json.loads((bundle.path / "target.engine").read_bytes().partition(b"\n")[0])
        assert head["preview"] == ["aliased plugin I/O"] * alias
        with recorded_steps() as prepared:
            engine = load_engine(bundle)
        assert prepared
        for _, step in prepared:
            assert step.inputs["k_cache.0"].data_ptr() == step.outputs["k_cache.0.updated"].data_ptr()
        found.append([engine.execute(make_batch(steps()[0], words=1))[0], engine.caches])
    (logits, caches), (same_logits, same_caches) = found
    np.testing.assert_array_equal(logits, same_logits)
    for cache, same in zip(caches, same_caches, strict=True):
        assert torch.equal(cache, same)
        assert bool(cache.any())


def test_layers_with_a_window_have_rings_in_plugin_form(monkeypatch, tmp_path):
    """A text that goes on over a ring's end; then a tree, which is committed. The native form holds all rows."""
    make_target = partial(tiny.tiny_of, "gemma3", head_size=64, max_position=700)
    limits = LIMITS.model_copy(update={"max_len": 500, "prefill_chunk": 250})
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path / "a", target=make_target(), limits=limits, drafts=False)
    engine = load_engine(bundle)
    assert [cache.shape[2] for cache in engine.caches] == 2 * [320, 508]
    rng = np.random.default_rng(5)
    text = rng.integers(0, tiny.VOCAB, 318).tolist()
    for start in range(0, len(text), 250):
        engine.execute(make_batch([chain(3, text[:start], text[start : start + 250], causal=True)], words=1))
    tree = tiny.random_tree(rng, 3, text, 8)
    path = tree.ancestors(7)[::-1]
    after = replace(chain(3, text + [tree.tokens[row] for row in path], [5, 6]), commit=path)
    for step in (tree, after):
        found, want = engine.execute(make_batch([step], words=1))[0], expected(make_target(), [step])[0]
        np.testing.assert_allclose(found, want, atol=0.1 * np.abs(want).max(), rtol=0)
    native = bundle_of(
        "tensorrt, native", monkeypatch, tmp_path / "b", target=make_target(), limits=limits, drafts=False
    )
    assert {native.config.cache_rows(layer) for layer in range(2)} == {508}


def test_a_copied_prefix_goes_on_as_in_its_own_slot(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False))
    assert engine.reuse_refusal is None
    prompt = list(range(1, 12))
    engine.execute(make_batch([chain(1, [], prompt, causal=True)], words=1))
    engine.copy(1, 4, len(prompt))
    found = [engine.execute(make_batch([chain(slot, prompt, [7, 8])], words=1))[0][:2].copy() for slot in (1, 4)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("backend", "drafter", "reason"),
    [
        ("tensorrt", "eagle", "a draft with a context"),
        ("tensorrt, native", None, "native form"),
        ("tensorrt_rtx", None, "native form"),
    ],
)
def test_engines_that_cannot_copy_all_caches_reuse_no_rows(backend, drafter, reason, monkeypatch, tmp_path):
    trained = drafter and tiny_drafter_of(tiny_lm(), drafter)
    options = {"trained": trained, "drafts": bool(drafter), "limits": tiny.LIMITS}
    engine = load_engine(bundle_of(backend, monkeypatch, tmp_path, **options))
    assert reason in engine.reuse_refusal
    if not drafter:
        assert generate(engine, None)[1].totals.prefix_cache_queries == 0


def test_the_prefill_profile_is_executed_at_load(monkeypatch, tmp_path):
    """Not first by a prompt."""
    buckets = []

    def prefill(session, bucket, *slot, usual=Session.prefill):
        buckets.append(bucket)
        return usual(session, bucket, *slot)

    monkeypatch.setattr(Session, "prefill", prefill)
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    assert bundle.config.plugin_form
    load_engine(bundle)
    assert [bucket.sequences for bucket in buckets] == [1]
