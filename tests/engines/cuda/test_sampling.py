"""Tokens chosen on the device are the host's: over odd vocabularies, all settings, ties, and mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from redraft.decoding.sampling import Sampler
from redraft.engines.cuda import sampling
from redraft.engines.cuda.sampling import draws_on, sample
from redraft.engines.cuda.transfer import Results
from redraft.plugins.library import BuildError
from redraft.plugins.operators.sampling.cuda import PART
from redraft.request import SamplingConfig
from tests.engines.tiny import chain, make_batch, random_tree
from tests.grammar.tokens import VOCAB, grammar

SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.01},
    "cold, filtered": {"temperature": 0.01, "top_k": 50, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of all": {"temperature": 1.0, "top_k": 2000},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-p of one": {"temperature": 1.0, "top_p": 1e-6},
    "both": {"temperature": 1.3, "top_k": 40, "top_p": 0.95},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "min-p of one": {"temperature": 1.0, "min_p": 1.0},
    "all three": {"temperature": 1.3, "min_p": 0.02, "top_k": 40, "top_p": 0.9},
}
CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def sampler(setting: dict, seed: int, position: int) -> Sampler:
    made = Sampler(SamplingConfig(**setting, seed=seed), [1, 2])
    made.position = position
    return made


def steps_of(rng: np.random.Generator, count: int):
    """Trees and, last, the end of a prompt of which only the last row has logits; what each row's depth is."""
    trees = [random_tree(rng, slot, [1] * int(rng.integers(1, 30)), int(rng.integers(1, 9))) for slot in range(count)]
    batch = make_batch([*trees, chain(count, [3] * 5, [4] * 6, causal=True)])
    batch.logit_rows = np.append(batch.logit_rows[:-6], batch.logit_rows[-1:])
    depths = [[len(tree.path(row)) - len(tree.context) - 1 for row in range(len(tree.tokens))] for tree in trees]
    return batch, [*depths, [0]]


def on_host(logits: np.ndarray, sampler: Sampler, depth: int) -> int:
    position, sampler.position = sampler.position, sampler.position + depth
    token = sampler.choose(logits)
    sampler.position = position
    return token


@pytest.mark.parametrize("vocab_size", [2, 111, 1031])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_row_has_the_token_that_its_sampler_would_choose(device, vocab_size, tied, monkeypatch):
    """Sequences of all settings in one step; rows are drawn from a few at a time."""
    monkeypatch.setattr(sampling, "AT_ONCE", 5 * vocab_size + 1)
    rng = np.random.default_rng(vocab_size)
    for first in range(0, 40 if device == "cpu" else 200, 20):
        batch, depths = steps_of(rng, len(SETTINGS))
        settings = [*SETTINGS.values(), {"temperature": 1.0}]
        samplers = [sampler(s, 2**64 - 1 - first - b, int(rng.integers(0, 99))) for b, s in enumerate(settings)]
        samplers[-1].position = 0
        logits = (3 * rng.standard_normal((len(batch.logit_rows), vocab_size))).astype(np.float32)
        logits[:, 1] = -np.inf
        if tied:
            logits = np.round(logits)
        given = torch.from_numpy(logits).to(device)
        rows, start = sample(given, batch, samplers, Results(given.device), draws=True), 0
        for made, of_rows in zip(samplers, depths, strict=True):
            found = rows[start : start + len(of_rows)]
            expected = [on_host(logits[start + row], made, depth) for row, depth in enumerate(of_rows)]
            np.testing.assert_array_equal(found, np.array(expected, np.int32), strict=True)
            start += len(of_rows)


def test_sequences_without_a_sampler_have_their_logits():
    rng = np.random.default_rng(1)
    batch, depths = steps_of(rng, 4)
    samplers = [None, sampler({}, 0, 3), sampler({"top_p": 0.5}, 1, 3), None, None]
    logits = rng.standard_normal((len(batch.logit_rows), 111)).astype(np.float32)
    rows, start = sample(torch.from_numpy(logits).bfloat16(), batch, samplers, Results(CPU), draws=True), 0
    rounded = torch.from_numpy(logits).bfloat16().float().numpy()
    for made, of_rows in zip(samplers, depths, strict=True):
        found, own = rows[start : start + len(of_rows)], rounded[start : start + len(of_rows)]
        if made is None:
            np.testing.assert_array_equal(found, own, strict=True)
        else:
            assert found.tolist() == [on_host(own[row], made, depth) for row, depth in enumerate(of_rows)]
        start += len(of_rows)
    everything = sample(torch.from_numpy(logits), batch, None, Results(CPU), draws=True)
    np.testing.assert_array_equal(everything, logits, strict=True)


def guided(setting: dict, guide: str, seed: int) -> Sampler:
    made = sampler(setting, seed, 7)
    made.grammar = grammar(guide).start([0])
    return made


def guided_tree(rng: np.random.Generator, slot: int, made: Sampler, count: int):
    """A random tree of tokens that the sampler's grammar allows, none of which ends the text."""
    tree = random_tree(rng, slot, [1] * 5, count)
    for row in range(1, len(tree.tokens)):
        path = tuple(tree.path(tree.parents[row])[len(tree.context) + 1 :])
        allowed = np.flatnonzero(made.grammar.mask(path))
        tree.tokens[row] = int(rng.choice(allowed[allowed != 0]))
    return tree


@pytest.mark.parametrize("at_once", [3, 1000])
@pytest.mark.parametrize("device", DEVICES)
def test_guided_rows_are_masked_by_their_own_paths(device, at_once, monkeypatch):
    """Beside plain sequences and those without a sampler, whose logits stay as they are."""
    monkeypatch.setattr(sampling, "AT_ONCE", at_once * VOCAB)
    rng = np.random.default_rng(at_once)
    samplers = [guided(setting, "regex", seed) for seed, setting in enumerate(SETTINGS.values())]
    trees = [guided_tree(rng, slot, made, 7) for slot, made in enumerate(samplers)]
    others = [sampler({"temperature": 0.8}, 9, 4), None]
    trees[3:3], samplers[3:3] = [random_tree(rng, 20 + place, [1] * 4, 5) for place in range(2)], others
    samplers.append(guided({"top_k": 3, "temperature": 1.0}, "schema", 5))
    batch = make_batch([*trees, chain(30, [3] * 5, [4] * 6, causal=True)])
    batch.logit_rows = np.append(batch.logit_rows[:-6], batch.logit_rows[-1:])
    logits = (3 * rng.standard_normal((len(batch.logit_rows), VOCAB))).astype(np.float32)
    given = torch.from_numpy(logits.copy()).to(device)
    rows, start, forced = sample(given, batch, samplers, Results(given.device), draws=True), 0, 0
    for made, tree in zip(samplers, [*trees, None], strict=True):
        paths = [tree.path(row)[len(tree.context) + 1 :] for row in range(len(tree.tokens))] if tree else [[]]
        found, own = rows[start : start + len(paths)], logits[start : start + len(paths)]
        start += len(paths)
        if made is None:
            np.testing.assert_array_equal(found, own, strict=True)
            continue
        compiled = None if made.grammar is None else grammar("regex" if tree else "schema")
        for row, path in enumerate(paths):
            if compiled is not None:
                made.grammar = compiled.start([0])
                for token in path:
                    made.grammar.advance(token)
                forced += np.count_nonzero(made.grammar.mask()) == 1
            assert found[row] == on_host(own[row], made, len(path))
    assert forced > 5


@pytest.mark.parametrize("draws", [False, True])
def test_guided_sequences_that_the_device_does_not_choose_for_have_their_logits(draws):
    """Where the device draws, those whose grammar has grown past its limits."""
    batch = make_batch([chain(slot, [3], [4, 0], causal=False) for slot in range(2)])
    samplers = [guided({}, "regex", 0), guided({}, "choice", 1)]
    samplers[0].grammar._grammar.failed = True
    logits = np.random.default_rng(0).standard_normal((4, VOCAB)).astype(np.float32)
    rows = sample(torch.from_numpy(logits.copy()), batch, samplers, Results(CPU), draws)
    np.testing.assert_array_equal(rows[0:2], logits[0:2], strict=True)
    assert rows[2:4].ndim == (1 if draws else 2)


@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_a_drafted_end_leaves_the_choice_to_the_device(setting):
    """The row after it, which no walk reaches, is like one without a grammar. So is one after a forbidden token."""
    batch = make_batch([chain(slot, [3], [4, 0], causal=False) for slot in range(2)])
    samplers = [guided(setting, "regex", 5), sampler(setting, 5, 7)]
    logits = np.random.default_rng(0).standard_normal((2, VOCAB)).astype(np.float32)
    rows = sample(torch.from_numpy(np.tile(logits, (2, 1))), batch, samplers, Results(CPU), draws=True)
    assert rows[0:1][0] == on_host(logits[0], guided(setting, "regex", 5), 0)
    assert rows[1:2][0] == rows[3:4][0] == on_host(logits[1], samplers[1], 1)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_in_bf16_give_the_tokens_of_their_float32_copy(device):
    """Each bf16 number is a float32 number, and of equals the first is taken: rounding makes many equals."""
    rng = np.random.default_rng(3)
    batch, depths = steps_of(rng, len(SETTINGS))
    samplers = [sampler(setting, 5, 1) for setting in (*SETTINGS.values(), {})]
    logits = torch.from_numpy(rng.standard_normal((len(batch.logit_rows), 1031)).astype(np.float32) + 40).bfloat16()
    largest = logits.float().amax(1, keepdim=True)
    assert ((logits.float() == largest).sum(1) > 1).any()
    given = logits.to(device)
    found, expected = (sample(x, batch, samplers, Results(given.device), draws=True) for x in (given, given.float()))
    start = 0
    for of_rows in depths:
        rows = slice(start, start + len(of_rows))
        np.testing.assert_array_equal(found[rows].copy(), expected[rows], strict=True)
        start += len(of_rows)


@pytest.mark.parametrize("setting", [{"top_p": 0.6}, {"top_p": 1e-50}, {"top_k": 7, "top_p": 0.3}])
@pytest.mark.parametrize("device", DEVICES)
def test_equal_logits_are_cut_where_the_host_cuts_them(device, setting):
    """Ten equal logits: six hold 0.6 of the weight, and seven hold 0.6 as float32. It would catch a rounded top-p."""
    rows = 60
    batch = make_batch([chain(0, [3], [4] * rows)])
    made, logits = sampler(setting, 1, 2), np.zeros((rows, 10), np.float32)
    given = torch.from_numpy(logits).to(device)
    found = sample(given, batch, [made], Results(given.device), draws=True)[0:rows]
    assert found.tolist() == [on_host(logits[row], made, row) for row in range(rows)]


@pytest.mark.parametrize("setting", [{"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("largest", [np.inf, -np.inf])
@pytest.mark.parametrize("device", DEVICES)
def test_infinite_logits_give_the_hosts_tokens(device, largest, setting):
    """It would catch a row without weights that gives its first token."""
    logits = np.full((4, 2 * PART + 3), -np.inf, np.float32)
    logits[:, 5:9], logits[0, 7:], logits[1, PART + 2 :], logits[2, -1] = 0, largest, largest, largest
    logits[3] = largest
    batch, made = make_batch([chain(0, [3], [4] * 4)]), sampler(setting, 1, 2)
    given = torch.from_numpy(logits).to(device)
    found = sample(given, batch, [made], Results(given.device), draws=True)[0:4]
    assert found.tolist() == [on_host(row, made, depth) for depth, row in enumerate(logits)]


@pytest.mark.parametrize("error", [BuildError("no nvcc"), RuntimeError("PTX that is newer than the driver")])
def test_where_the_first_draw_fails_the_host_draws(error, monkeypatch, capsys):
    """It would catch a kernel that is compiled at load and refused by the driver in a step."""

    def failing(*_):
        raise error

    monkeypatch.setattr(sampling, "race", failing)
    with FakeTensorMode():
        assert not draws_on(torch.device("cuda"))
    assert capsys.readouterr().err.endswith(f": {error}\n")


@pytest.mark.parametrize("sampler", [None, sampler({}, 0, 0), sampler({"top_p": 0.5}, 0, 0)])
def test_a_step_may_have_no_logit_rows(sampler):
    batch = make_batch([chain(0, [], [4, 5], causal=True)])
    batch.logit_rows = batch.logit_rows[:0]
    sample(torch.zeros(0, 111), batch, [sampler], Results(CPU), draws=True)
