from __future__ import annotations

import ctypes
import dataclasses
import statistics
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from redraft.batch import DraftBatch, DraftCandidates
from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.openvino import OpenVINOEngine
from redraft.errors import BundleError
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.target.model import Target
from tests.engines.scheduling import generate, scores
from tests.engines.tiny import (
    METHOD,
    VOCAB,
    Rows,
    chain,
    expected,
    make_batch,
    random_tree,
    scores_of,
    tiny_bundle,
    tiny_drafter,
    tiny_of,
)
from tests.model_defs.weights.folders import EXPERT_TYPES, EXPERTS, write_folder
from tests.model_defs.weights.test_checkpoint import FORMATS
from tests.model_defs.weights.test_checkpoint import write_folder as write_checkpoint


@pytest.fixture(scope="module")
def engine(fp32_bundle):
    engine = load_engine(fp32_bundle)
    yield engine
    engine.close()


def prefill(engine, slot: int, context: list[int]) -> None:
    if context:
        engine.execute(make_batch([chain(slot, [], context, causal=True)]))


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_agree_with_the_module(engine, target, sequences, seed):
    rng = np.random.default_rng(seed)
    batch = []
    for slot in rng.permutation(9)[:sequences].tolist():
        context = tokens(rng, int(rng.integers(1, 30)))
        prefill(engine, slot, context)
        kind = rng.integers(3)
        if kind == 0:
            batch.append(chain(slot, context, tokens(rng, int(rng.integers(1, 6)))))
        elif kind == 1:
            batch.append(random_tree(rng, slot, context, int(rng.integers(1, 39))))
        else:
            batch.append(chain(slot, context, tokens(rng, 16), causal=True))
    logits, hidden = engine.execute(make_batch(batch))
    want_logits, want_hidden = expected(target, batch)
    np.testing.assert_allclose(logits, want_logits, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(hidden, want_hidden, atol=1e-4, rtol=1e-5)


def test_prompts_are_scored_as_the_module_says(engine, target):
    text, values = scores(engine)
    assert values == pytest.approx(scores_of(target, text), abs=1e-4)


def test_committed_paths_continue_as_the_module_says(engine, target):
    rng = np.random.default_rng(7)
    context = tokens(rng, 10)
    prefill(engine, 2, context)
    tree = random_tree(rng, 2, context, 12)
    engine.execute(make_batch([tree]))
    path = tree.ancestors(11)[::-1]
    accepted = context + [tree.tokens[row] for row in path]
    following = dataclasses.replace(random_tree(rng, 2, accepted, 5), commit=path)
    logits, _ = engine.execute(make_batch([following]))
    np.testing.assert_allclose(logits, expected(target, [following])[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_tree_row_has_the_bits_of_the_token_decoded_alone(target, tmp_path, precision):
    engine = load_engine(tiny_bundle(tmp_path, target, precision=precision, drafts=False))
    rng = np.random.default_rng(3)
    context = tokens(rng, 21)
    prefill(engine, 0, context)
    tree = random_tree(rng, 0, context, 15)
    others = [random_tree(rng, slot, [], 4) for slot in (1, 5)]
    in_tree = engine.execute(make_batch([others[0], tree, others[1]]))[0][4:19].copy()
    path = tree.ancestors(14)[::-1]
    prefill(engine, 3, context)
    for i, row in enumerate(path):
        done = context + [tree.tokens[r] for r in path[:i]]
        alone, hidden = engine.execute(make_batch([chain(3, done, [tree.tokens[row]])]))
        assert hidden is None
        np.testing.assert_array_equal(alone[0], in_tree[row])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The folder of a model with blocks of every type."""
    return write_folder(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def quantized_experts(tmp_path_factory):
    """The folder of a mixture of experts in blocks."""
    return write_folder(tmp_path_factory.mktemp("experts"), EXPERT_TYPES, **EXPERTS)


@pytest.mark.parametrize(
    ("precision", "layers"), [("int4", "qwen2"), ("int4", "mixtral"), ("source", "qwen2"), ("source", "mixtral")]
)
def test_drafts_change_no_text_in_blocks(target, quantized, quantized_experts, tmp_path, precision, layers):
    """Greedy and seeded requests together, cancelled ones too."""
    if precision == "source":
        target = Target.from_folder(quantized_experts if layers == "mixtral" else quantized, in_blocks=True)
    elif layers == "mixtral":
        target = tiny_of(layers)
    plain, _ = generate(load_engine(tiny_bundle(tmp_path / "plain", target, precision=precision, drafts=False)), None)
    drafting = load_engine(tiny_bundle(tmp_path / "drafting", target, precision=precision))
    tokens, scheduler = generate(drafting, MethodConfig(construction="beam", ngram=True, tree_budget=12), (1, 2))
    assert scheduler.totals.drafted > scheduler.totals.accepted > 0
    assert len(tokens) >= 5
    for key, ids in tokens.items():
        assert ids == plain[key], key


@pytest.mark.parametrize("folder", ["quantized", "quantized_experts"])
def test_an_engine_of_blocks_computes_their_numbers(request, folder, tmp_path):
    """As the module of the dequantized weights does, but for rows that are rounded to 8 bits."""
    quantized = request.getfixturevalue(folder)
    target = Target.from_folder(quantized, in_blocks=True, float_ends=False)
    engine = load_engine(tiny_bundle(tmp_path, target, precision="source", drafts=False))
    text = [chain(3, [], [5, 9, 2, 77, 31, 8, 44])]
    (logits, _), (want, _) = engine.execute(make_batch(text)), expected(Target.from_folder(quantized), text)
    assert np.abs(logits - want).max() < 0.1 * want.std()


@pytest.mark.parametrize("name", ["awq", "act-order", "int8"])
def test_an_engine_of_other_formats_computes_their_numbers(tmp_path, name):
    settings, write, _ = FORMATS[name]
    write_checkpoint(tmp_path / "model", settings, write, 192)
    target = Target.from_folder(tmp_path / "model", in_blocks=True, float_ends=False)
    engine = load_engine(tiny_bundle(tmp_path / "bundle", target, precision="source", drafts=False))
    text = [chain(3, [], [5, 9, 2, 77, 31, 8, 44])]
    (logits, _), (want, _) = engine.execute(make_batch(text)), expected(Target.from_folder(tmp_path / "model"), text)
    assert (logits - want).std() < 0.05 * want.std()


def test_the_drafter_agrees_with_its_module(engine, target):
    hidden, roots = draft_inputs(target)
    drafted = engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, roots))
    module = BeamSearch(tiny_drafter_as_stored(target), 3, 3, 5)
    candidates, log_probs, parents = (x.numpy() for x in module([torch.from_numpy(hidden), torch.from_numpy(roots)]))
    np.testing.assert_array_equal(drafted.parents, parents, strict=True)
    np.testing.assert_array_equal(drafted.candidates, candidates, strict=True)
    np.testing.assert_allclose(drafted.log_probs, log_probs, atol=1e-4, strict=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_draft_has_the_bits_of_the_one_alone(target, tmp_path, precision):
    engine = load_engine(tiny_bundle(tmp_path, target, precision=precision))
    hidden, roots = draft_inputs(target)
    together = [array.copy() for array in arrays_of(engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, roots)))]
    for rows in ([1], [2, 0], [0, 0, 1, 2, 1]):
        some = engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden[rows], roots[rows]))
        for array, whole in zip(arrays_of(some), together, strict=True):
            np.testing.assert_array_equal(array, whole[rows])


def test_a_draft_that_fails_is_noticed(engine, target):
    """Also where the batch grew: then its outputs lie in memory that holds anything."""
    hidden, roots = draft_inputs(target)
    beyond = np.array([5, VOCAB, 110], np.int32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the drafter's network failed: token id 111: expected 0 to 110"):
            engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, beyond))
        engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden[:1], roots[:1]))
    engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, roots))


def test_a_draft_for_too_many_or_unequal_inputs_is_refused(engine, target):
    hidden, roots = draft_inputs(target)
    for rows, tokens in ((hidden[:2], roots), (hidden[:0], roots[:0]), (np.tile(hidden, (4, 1)), np.tile(roots, 4))):
        count = len(tokens)
        message = f"{len(rows)} rows of features, {count} tokens, {count} slots: expected one of each for 1 to 9"
        with pytest.raises(ValueError, match=message):
            engine.drafters[METHOD].draft(DraftBatch.of_roots(rows, tokens))


def arrays_of(drafted: DraftCandidates) -> list[np.ndarray]:
    return [drafted.candidates, drafted.log_probs, drafted.parents]


def draft_inputs(target):
    hidden = np.random.default_rng(5).standard_normal((3, target.config.hidden_size), dtype=np.float32)
    return hidden, np.array([5, 0, 110], np.int32)


def tiny_drafter_as_stored(target):
    drafter = tiny_drafter(target)
    for weight in drafter.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return drafter


def test_the_cache_is_updated_in_place(engine, target):
    before = {name: cache.copy() for name, cache in engine.caches.items()}
    engine.execute(make_batch([chain(4, [1] * 20, [7, 8])]))
    for name, cache in engine.caches.items():
        changed = np.argwhere((cache != before[name]).any(axis=(1, 3))).tolist()
        assert changed == [[4, 20], [4, 21]]


def test_an_engine_that_copies_the_cache_is_refused(fp32_bundle, monkeypatch):
    import redraft.engines.openvino as backend

    monkeypatch.setattr(backend, "_shared", lambda cache: backend.ov.Tensor(cache.copy(), shared_memory=False))
    with pytest.raises(BundleError, match=r"does not update [kv]_cache\.\d in place"):
        OpenVINOEngine(fp32_bundle)


def test_a_bundle_for_other_operators_is_refused(fp32_bundle):
    versions = fp32_bundle.manifest.versions | {"operators": "0123"}
    stale = dataclasses.replace(fp32_bundle, manifest=fp32_bundle.manifest.model_copy(update={"versions": versions}))
    with pytest.raises(BundleError, match=r"built for other CPU operators \(0123\) than these .*rebuild it with"):
        OpenVINOEngine(stale)


def test_memory_does_not_grow_with_steps(engine):
    """A leak grows in most windows of steps, or again and again; an allocator that rearranges what other tests left
    does it once or twice."""
    rng = np.random.default_rng(9)

    def memory() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # Else a leak hides in what was free already.
        return psutil.Process().memory_info().rss

    def growth(steps: int) -> int:
        before = memory()
        for _ in range(steps):
            engine.execute(make_batch([random_tree(rng, 0, [1] * 20, int(rng.integers(1, 39)))]))
            engine.drafters[METHOD].draft(DraftBatch.of_roots(np.zeros((2, 96), np.float32), np.zeros(2, np.int32)))
        return memory() - before

    growths = [growth(200) for _ in range(9)]
    assert statistics.median(growths) < 200_000, growths
    assert sum(sorted(growths)[:-2]) < 2_000_000, growths


def test_rows_without_logits(engine):
    batch = dataclasses.replace(make_batch([chain(0, [], [1, 2, 3], causal=True)]), logit_rows=np.zeros(0, np.int32))
    logits, hidden = engine.execute(batch)
    assert logits.shape == (0, VOCAB)
    assert hidden.shape == (3, 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_offsets": [0, 2]}, "end of row_offsets is 2: expected 1, the number of rows"),
        ({"tree_mask": [[0, 0, 0]]}, r"shape of tree_mask is \(1, 3\): expected \(1, 2\)"),
        ({"input_ids": [111]}, "input_ids is 111: expected 0 to 110"),
        ({"slots": [9]}, "slots is 9: expected 0 to 8"),
        ({"cache_lengths": [120]}, "cache_lengths with rows is 120: expected 0 to 119"),
        ({"positions": [-1]}, "positions is -1: expected 0 to 119"),
        ({"logit_rows": [1]}, "logit_rows is 1: expected 0 to 0"),
        ({"commit_src": [1, 2], "commit_offsets": [0, 2]}, "cache_lengths after commits is -1"),
    ],
)
def test_a_batch_outside_of_the_limits_is_refused(engine, change, message):
    arrays = {name: np.array(values, np.int32) for name, values in change.items()}
    with pytest.raises(ValueError, match=message):
        engine.execute(dataclasses.replace(make_batch([Rows(0, [1], [2], [-1])]), **arrays))


def test_an_operator_that_fails_is_noticed(engine):
    batch = make_batch([chain(0, [1] * 5, [2])])
    descending = {"commit_src": np.array([3, 1], np.int32), "commit_offsets": np.array([0, 2], np.int32)}
    engine.execute(batch)
    with pytest.raises(RuntimeError, match="the target's network failed: commit_src 1: expected ascending rows"):
        engine.execute(dataclasses.replace(batch, **descending))


def test_the_number_of_threads_changes_no_bit(fp32_bundle, engine):
    batch = make_batch([random_tree(np.random.default_rng(1), 0, [], 30)])
    one = load_engine(fp32_bundle, threads=1).execute(batch)[0].copy()
    two = load_engine(fp32_bundle, threads=2).execute(batch)[0]
    np.testing.assert_array_equal(one, two)


def test_a_worker_does_without_torch():
    """It takes 2 s and 180 MB to import, on every rank."""
    program = "import sys, redraft.engines.openvino, redraft.worker.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
