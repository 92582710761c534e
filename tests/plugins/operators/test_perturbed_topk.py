"""The operator against its definition in numpy, and against its torch form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding.draws import filter_log_probs
from redraft.decoding.noise import race
from redraft.plugins import kernels
from redraft.plugins.operators.perturbed_topk import cuda
from redraft.plugins.operators.perturbed_topk.reference import perturbed_topk

Arrays = list[np.ndarray]
INPUTS = ("values", "ids", "seeds", "positions", "temperature", "top_k", "top_p", "sharpness")
NOISE_FROM = 2
"""Place of the first of the sequences' inputs."""


def make_case(seed: int, batch: int = 3, nodes: int = 2, most: int = 5, **given) -> Arrays:
    """The operator's inputs: descending values, some -inf; the sequences' filters are given, or drawn."""
    rng = np.random.default_rng(seed)
    scores = 3 * rng.standard_normal((batch * nodes, most)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.15] = -np.inf
    ids = np.stack([rng.permutation(50_000)[:most] for _ in scores]).astype(np.int32)
    seeds = rng.integers(0, 2**64, batch, np.uint64).view(np.int32).reshape(batch, 2)
    drawn = {
        "temperature": rng.choice([0.0, 0.01, 0.7, 1.0, 2.0], batch),
        "top_k": rng.choice([0, 0, 1, 2, 9], batch),
        "top_p": rng.choice([1.0, 0.97, 0.53, 1e-6], batch),
        "sharpness": rng.choice([0.5, 0.8, 1.0, 1.3], batch),
    }
    filters = {name: np.full(batch, given[name]) if name in given else array for name, array in drawn.items()}
    positions = rng.integers(0, 1000, batch).astype(np.int32)
    dtypes = {"top_k": np.int32}
    rest = [array.astype(dtypes.get(name, np.float32)) for name, array in filters.items()]
    return [-np.sort(-scores, axis=-1), ids, seeds, positions, *rest]


def on_cpu(*case: np.ndarray, level: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores float32 and ids int32 [N, k] by the CPU kernel, of the operator's inputs."""
    inputs = dict(zip(INPUTS, case, strict=True))
    rows, most = inputs["values"].shape
    scores, ids = np.empty((rows, k), np.float32), np.empty((rows, k), np.int32)
    sizes = {"rows": rows, "m": most, "sequences": len(inputs["seeds"]), "level": level, "k": k}
    kernels.call("perturbed_topk", **inputs, **sizes, next_values=scores, next_ids=ids)
    return scores, ids


def defined(case: Arrays, level: int) -> np.ndarray:
    """Scores float64 [N, m] by the definition; of greedy sequences the values themselves."""
    values, ids, seeds, positions, temperature, top_k, top_p, sharpness = case
    batch, most = len(seeds), values.shape[1]
    values, ids = values.reshape(batch, -1, most), ids.reshape(batch, -1, most)
    keys = np.ascontiguousarray(seeds).view(np.uint64).reshape(batch, 1, 1)
    p = filter_log_probs(values, temperature, top_k, top_p).astype(np.float64)
    gumbels = -np.log(race(keys, positions.reshape(batch, 1, 1) + level, ids).astype(np.float64))
    scores = sharpness[:, None, None].astype(np.float64) * (p + gumbels)
    with np.errstate(invalid="ignore"):
        scores = scores - scores.max(-1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    scores[np.isneginf(values[..., 0])] = -np.inf
    return np.where((temperature == 0)[:, None, None], values, scores).reshape(-1, most)


def check(case: Arrays, level: int, k: int) -> None:
    scores, ids = on_cpu(*case, level=level, k=k)
    expected = defined(case, level)
    best = -np.sort(-expected, axis=1)[:, :k]
    np.testing.assert_allclose(scores, best, rtol=2e-5, atol=2e-5)
    for row in range(len(ids)):
        assert len(set(ids[row].tolist())) == k
        score_of = dict(zip(case[1][row].tolist(), expected[row].tolist(), strict=True))
        np.testing.assert_allclose([score_of[token] for token in ids[row].tolist()], scores[row], rtol=2e-5, atol=2e-5)
        kept = int(np.isfinite(scores[row]).sum())
        places = [case[1][row].tolist().index(token) for token in ids[row, kept:].tolist()]
        assert places == sorted(places), "what was filtered out comes last, the more likely token first"


@given(st.data())
@settings(max_examples=150)
def test_is_what_it_says(data):
    most = data.draw(st.integers(1, 40))
    sizes = {"batch": data.draw(st.integers(1, 4)), "nodes": data.draw(st.integers(1, 4)), "most": most}
    case = make_case(data.draw(st.integers(0, 2**32)), **sizes)
    check(case, data.draw(st.integers(0, 9)), data.draw(st.integers(1, most)))


@pytest.mark.parametrize("most", [7, 16, 128, 333])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0])
def test_instruction_sets_agree(isa, most, temperature):
    check(make_case(3, most=most, temperature=temperature), 2, 7)


def test_greedy_sequences_keep_what_came():
    case = make_case(4, batch=5, nodes=3, most=33, temperature=0.0, top_k=2, top_p=0.1)
    scores, ids = on_cpu(*case, level=1, k=9)
    np.testing.assert_array_equal(scores, case[0][:, :9])
    np.testing.assert_array_equal(ids, case[1][:, :9])


def test_a_node_has_the_bits_that_it_has_alone():
    case = make_case(6, batch=5, nodes=3, most=33)
    together = on_cpu(*case, level=2, k=6)
    try:
        kernels.set_threads(1)
        for row in range(15):
            own = [array[row : row + 1].copy() for array in case[:NOISE_FROM]]
            noise = [array[row // 3 : row // 3 + 1].copy() for array in case[NOISE_FROM:]]
            for one, whole in zip(on_cpu(*own, *noise, level=2, k=6), together, strict=True):
                np.testing.assert_array_equal(one[0], whole[row])
    finally:
        kernels.set_threads(2)


def test_all_nodes_of_a_level_share_the_noise_of_their_position():
    """The same tokens at another level, from as many positions before, and at another node; but not at another level
    from the same position."""
    case = make_case(7, batch=1, nodes=1, most=20, temperature=1.0, top_k=0, top_p=1.0)
    case[0][:] = 0
    first = on_cpu(*case, level=3, k=20)
    case[3] += 3
    np.testing.assert_array_equal(on_cpu(*case, level=0, k=20), first)
    assert (on_cpu(*case, level=1, k=20)[1] != first[1]).any()
    both = [np.concatenate([array, array[:, ::-1]]) for array in case[:NOISE_FROM]]
    _, ids = on_cpu(*both, *case[NOISE_FROM:], level=0, k=20)
    np.testing.assert_array_equal(ids[0], ids[1])


def test_the_first_is_drawn_with_its_probability():
    """Over 20,000 seeds the first token is p's, so a target of the same p draws it always."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    values = np.log(p).astype(np.float32)[None].repeat(count, axis=0)
    ids = np.array([[7, 1, 40_000, 2]], np.int32).repeat(count, axis=0)
    seeds = np.arange(count, dtype=np.uint64).view(np.int32).reshape(count, 2)
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.int32)
    _, first = on_cpu(values, ids, seeds, zeros, ones, zeros, ones, ones, level=0, k=1)
    found = np.array([(first == token).mean() for token in ids[0]])
    assert np.abs(found - p).max() < 4 * 0.5 / count**0.5


@pytest.mark.parametrize("seed", range(8))
def test_torch_agrees(seed):
    case = make_case(seed, nodes=1 + seed % 3, most=7 + 4 * seed)
    ours = on_cpu(*case, level=seed, k=5)
    scores, ids = perturbed_topk(*map(torch.from_numpy, case), level=seed, k=5)
    np.testing.assert_allclose(scores.numpy(), ours[0], rtol=2e-5, atol=2e-5, strict=True)
    there = np.isfinite(ours[0])
    np.testing.assert_array_equal(ids.numpy()[there], ours[1][there])
    assert ids.dtype == torch.int32


@pytest.mark.parametrize("seed", range(6))
def test_the_cuda_kernel_agrees(seed, run_kernel, monkeypatch):
    monkeypatch.setattr(cuda, "run", run_kernel)
    case = [torch.from_numpy(array) for array in make_case(seed, nodes=1 + seed % 3, most=(5, 128, 333)[seed % 3])]
    scores, ids = cuda.perturbed_topk(*case, level=seed, k=5)
    expected, chosen = perturbed_topk(*case, level=seed, k=5)
    torch.testing.assert_close(scores, expected, rtol=2e-5, atol=2e-5)
    there = expected.isfinite()
    assert torch.equal(ids[there], chosen[there])
    assert ids.dtype == torch.int32


def test_the_cuda_kernel_refuses_what_does_not_fit():
    case = [torch.from_numpy(array) for array in make_case(1, most=1025)]
    with pytest.raises(ValueError, match="the 3 best of 1025 tokens: expected 1 or more of at most 1024"):
        cuda.perturbed_topk(*case, level=0, k=3)


def test_numbers_that_are_none_leave_nothing():
    case = make_case(3, temperature=1.0)
    case[0][:] = np.nan
    scores, ids = on_cpu(*case, level=0, k=3)
    assert np.isneginf(scores).all()
    np.testing.assert_array_equal(ids, case[1][:, :3])


def test_bad_arguments_are_named():
    case = make_case(1)
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"k {k}: expected 1 to the number of tokens of a node"):
            on_cpu(*case, level=0, k=k)
    with pytest.raises(ValueError, match="rows of values 5: expected as many for every sequence"):
        on_cpu(case[0][:5], case[1][:5], *case[NOISE_FROM:], level=0, k=2)
    with pytest.raises(ValueError, match="level -1: expected 0 or more"):
        on_cpu(*case, level=-1, k=2)
