"""Both TensorRT targets over a stand-in library whose engines compute: buckets, padding, buffers, results.

The slow cases would catch a family whose layers are others in plugin form.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.features import on_host
from redraft.model_defs.target.rope import RopeConfig
from tests.engines.tensorrt.bundles import BACKENDS, bundle_of, recorded_steps
from tests.engines.tiny import LAYERS, VOCAB, chain, expected, make_batch, random_tree, tiny_lm, tiny_of


@pytest.mark.parametrize(
    ("backend", "make_target", "precision", "tolerance"),
    [*((backend, *case) for backend, case in BACKENDS.items()), ("tensorrt_rtx", tiny_lm, "bf16", 0.15)],
)
def test_steps_are_those_of_the_module(backend, make_target, precision, tolerance, monkeypatch, tmp_path):
    """Prompts beyond a tree's rows, all of which have logits beside the largest trees, trees with an absent neighbour
    between them, commits; steps of the same and of other buckets."""
    target = make_target()
    engine = load_engine(bundle_of(backend, monkeypatch, tmp_path, target=make_target(), precision=precision))
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((0, 11), (1, 16), (3, 5), (4, 1))}

    def check(step: list) -> None:
        batch = make_batch(step, words=1)
        batch.logit_rows = batch.logit_rows[:: 1 if len(batch.logit_rows) % 3 else 2]
        logits, hidden = engine.execute(batch)
        for found, want in zip((logits, on_host(hidden)), expected(target, step), strict=True):
            want = want[batch.logit_rows] if found is logits else want
            assert found.dtype == np.float32
            error = np.abs(found - want) / np.abs(want).max()
            assert error.max() < tolerance
            assert np.sqrt(np.square(error).mean()) < tolerance / 5

    check([chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()])
    trees = [random_tree(rng, slot, context, 8 - (slot == 0)) for slot, context in contexts.items()]
    check([*trees, chain(2, [], rng.integers(0, VOCAB, 16).tolist(), causal=True)])
    first = random_tree(rng, 1, contexts[1], 8)
    check([random_tree(rng, 3, contexts[3], 3), first, chain(0, contexts[0], [7])])
    path = first.ancestors(7)[::-1]
    accepted = contexts[1] + [first.tokens[row] for row in path]
    for _ in range(2):  # the second time it is the same bucket, and the committed rows stay
        step = dataclasses.replace(random_tree(rng, 1, accepted, 4), commit=path)
        check([step, chain(4, contexts[4], [3, 4], causal=True)])
        accepted, path = accepted + step.tokens[:1], [0]
    check([chain(2, [], rng.integers(0, VOCAB, 16).tolist(), causal=True), random_tree(rng, 1, accepted[:-1], 5)])
    check([random_tree(rng, 3, contexts[3], 8)])


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["gemma3", "mixtral", "opt", "phi4"])
def test_any_familys_layers_in_plugin_form(layers, monkeypatch, tmp_path):
    """Trees of contexts before and beyond a window's edge."""
    changes, rope = {"head_size": 64}, LAYERS[layers].get("rope", RopeConfig())
    if rope.short_divisors:
        divisors = {name: getattr(rope, name) * 2 for name in ("short_divisors", "long_divisors")}
        changes["rope"] = dataclasses.replace(rope, **divisors)
    target = tiny_of(layers, **changes)
    engine = load_engine(bundle_of("tensorrt", monkeypatch, tmp_path, target=tiny_of(layers, **changes), drafts=False))
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((0, 4), (3, 15))}
    engine.execute(make_batch([chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()], words=1))
    step = [random_tree(rng, slot, context, 8) for slot, context in contexts.items()]
    found, want = engine.execute(make_batch(step, words=1))[0], expected(target, step)[0]
    error = np.abs(found - want) / np.abs(want).max()
    assert error.max() < 0.2
    assert np.sqrt(np.square(error).mean()) < 0.03


def test_a_step_is_padded_to_the_bucket_that_wastes_least(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False))
    with recorded_steps() as chosen:
        for rows in ([1], [2], [8], [1, 1, 1], [8, 8]):
            engine.execute(make_batch([chain(slot, [], [5] * n, causal=True) for slot, n in enumerate(rows)], words=1))
    assert [(len(step.inputs["slots"]), len(step.inputs["input_ids"])) for _, step in chosen] == [
        *[(1, 1), (1, 2), (1, 8)],
        *[(4, 4), (2, 16)],
    ]


def test_batches_beyond_the_limits_are_refused(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path))
    with pytest.raises(ValueError, match="slots is 5: expected 0 to 4"):
        engine.execute(make_batch([chain(5, [], [1])], words=1))
    with pytest.raises(ValueError, match=r"input_ids has shape \(1, 17\), which is beyond the shapes"):
        engine.execute(make_batch([chain(1, [], [1] * 17, causal=True)], words=1))
