"""The operator level by level against the numpy functions of redraft.decoding.draws, and against its torch form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.speed import kernel_calls
from redraft.decoding.draws import Beam, filter_log_probs, gumbel_noise, gumbel_top_k, independent, stochastic_beam
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.plugins.operators.draw_step import RULES
from redraft.plugins.operators.draw_step.reference import draw_step

TEMPERATURES = (0.0, 1e-4, 0.01, 0.3, 1.0, 2.0)


@dataclass
class Case:
    """Values, ids and filters of a draft of several levels."""

    rule: str
    counts: tuple[int, ...]
    values: list[np.ndarray]
    ids: list[np.ndarray]
    noise: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray

    def steps(self, step, wrap=lambda array: array) -> list[list[np.ndarray]]:
        """The results of `step` at every level."""
        filters = [wrap(x) for x in (self.noise, self.temperature, self.top_k, self.top_p)]
        results: list = []
        for values, ids, count in zip(self.values, self.ids, self.counts, strict=True):
            draft = results[-1][:-3] if results else ()
            results.append(step(wrap(values), wrap(ids), *filters, self.rule, count, *draft))
        return [[np.asarray(array) for array in result] for result in results]

    def of(self, sequence: int) -> Case:
        """One sequence's."""
        batch = len(self.temperature)
        split = [array.reshape(batch, -1, array.shape[-1])[sequence] for array in (*self.values, *self.ids)]
        rest = [array[sequence : sequence + 1].copy() for array in
                (self.noise, self.temperature, self.top_k, self.top_p)]  # fmt: skip
        return Case(self.rule, self.counts, split[: len(self.counts)], split[len(self.counts) :], *rest)


def make_case(rule, levels, seed, batch=3, support=5, ties=False, temperature=None, top_k=None, top_p=None) -> Case:
    """Descending values, some -inf; coarse ones where `ties`. A sequence's filters are given, or drawn."""
    rng = np.random.default_rng(seed)
    shape = RANDOM_CONSTRUCTIONS[rule].shape(levels)
    values, ids = [], []
    for nodes in (1, *shape.widths[:-1]):
        scores = rng.normal(size=(batch * nodes, support)) * 3
        scores = (np.round(scores) if ties else scores).astype(np.float32)
        scores[rng.random(scores.shape) < 0.15] = -np.inf
        values.append(-np.sort(-scores, axis=-1))
        ids.append(np.stack([rng.permutation(111)[:support] for _ in scores]).astype(np.int32))
    rows = sum(shape.noise_rows)
    noise = np.stack([gumbel_noise(seed, b, rows, support) for b in range(batch)])
    chosen = [
        rng.choice(TEMPERATURES, batch) if temperature is None else [temperature] * batch,
        rng.choice([0, 0, 1, 2, 9], batch) if top_k is None else [top_k] * batch,
        rng.choice([1.0, 0.97, 0.53, 1e-6], batch) if top_p is None else [top_p] * batch,
    ]
    dtypes = np.float32, np.int32, np.float32
    filters = [np.array(x, dtype) for x, dtype in zip(chosen, dtypes, strict=True)]
    return Case(rule, levels, values, ids, np.round(noise) if ties else noise, *filters)


def check(case: Case, results: list[list[np.ndarray]]) -> None:
    """Every level's results against numpy, given the log-probabilities and the beam of the results themselves."""
    batch, support = len(case.temperature), case.noise.shape[-1]
    greedy = case.temperature == 0
    row, expanded, there = 0, 0, np.ones((batch, 1), bool)
    beam = Beam.of_roots(batch)
    for level, (ids, log_probs, draws, *state, tokens, origins, sequences) in enumerate(results):
        nodes, count = there.shape[1], case.counts[level]
        values, given_ids = (x[level].reshape(batch, nodes, support) for x in (case.values, case.ids))
        absent = ~there[..., None]
        p = filter_log_probs(np.where(absent, -np.inf, values), case.temperature, case.top_k, case.top_p)
        got = log_probs[:, expanded:]
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(p))
        np.testing.assert_allclose(got, p, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(ids[:, expanded:], np.where(absent, 0, given_ids))

        rows = count if case.rule == "independent" else nodes
        noise = case.noise[:, row : row + rows]
        if case.rule == "stochastic_beam":
            flat, beam = stochastic_beam(got, noise, beam, count, greedy)
            np.testing.assert_array_equal(state[0], beam.totals)
            np.testing.assert_allclose(state[1], beam.gumbels, rtol=1e-6)
            beam = Beam(*state)
        else:
            flat = (gumbel_top_k if case.rule == "gumbel_top_k" else independent)(got, noise, count, greedy)
        there = flat >= 0
        size = flat.shape[1]
        np.testing.assert_array_equal(draws[:, -size:], np.where(there, flat + expanded * support, -1))
        taken = np.take_along_axis(given_ids.reshape(batch, -1), np.maximum(flat, 0), axis=1)
        np.testing.assert_array_equal(tokens, np.where(there, taken, 0).ravel())
        np.testing.assert_array_equal(
            origins, (np.arange(batch)[:, None] * nodes + np.where(there, flat // support, 0)).ravel()
        )
        np.testing.assert_array_equal(sequences, np.repeat(np.arange(batch), size))
        if level:
            for before, now in zip(results[level - 1][:3], (ids, log_probs, draws), strict=True):
                np.testing.assert_array_equal(now[:, : before.shape[1]], before)
        row, expanded = row + rows, expanded + nodes


SHAPES = {"gumbel_top_k": [(3, 2, 1), (7,)], "stochastic_beam": [(3, 5, 2), (1, 9)], "independent": [(3, 3, 3), (1, 1)]}


@pytest.mark.parametrize("rule", RULES)
@given(st.data())
@settings(max_examples=60)
def test_levels_are_those_of_numpy(rule, data):
    levels = data.draw(st.sampled_from(SHAPES[rule]))
    sizes = {"batch": data.draw(st.sampled_from([1, 3])), "support": data.draw(st.integers(1, 7))}
    case = make_case(rule, levels, data.draw(st.integers(0, 2**32)), ties=data.draw(st.booleans()), **sizes)
    check(case, case.steps(kernel_calls.draw_step))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_instruction_sets_agree(isa, rule, temperature):
    case = make_case(rule, SHAPES[rule][0], 5, support=111, temperature=temperature)
    check(case, case.steps(kernel_calls.draw_step))


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_has_the_bits_that_it_has_alone(rule):
    case = make_case(rule, SHAPES[rule][0], 6, batch=5, support=33)
    together = case.steps(kernel_calls.draw_step)
    for sequence in range(5):
        alone = case.of(sequence).steps(kernel_calls.draw_step)
        for level, results in enumerate(alone):
            for one, all_of_them in zip(results[:-3], together[level][:-3], strict=True):
                np.testing.assert_array_equal(one[0], all_of_them[sequence])
            size, nodes = len(results[-1]), len(case.values[level]) // 5
            mine = slice(sequence * size, (sequence + 1) * size)
            np.testing.assert_array_equal(results[-3], together[level][-3][mine])
            np.testing.assert_array_equal(results[-2], together[level][-2][mine] - sequence * nodes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_torch_agrees(rule, seed):
    case = make_case(rule, SHAPES[rule][seed % 2], seed, support=7 + 4 * seed)
    for ours, theirs in zip(case.steps(kernel_calls.draw_step), case.steps(draw_step, torch.from_numpy), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            if mine.dtype == np.float32:
                np.testing.assert_allclose(other, mine, rtol=1e-5, atol=2e-5, strict=True)
            else:
                np.testing.assert_array_equal(other, mine, strict=True)


def test_numbers_that_are_none_draw_nothing():
    for rule in RULES:
        case = make_case(rule, SHAPES[rule][0], 3, temperature=1.0, top_k=0, top_p=1.0)
        for values in case.values:
            values[:, 0] = np.nan
        for results in case.steps(kernel_calls.draw_step):
            assert (results[2] == -1).all()


def test_bad_arguments_are_named():
    case = make_case("independent", (3, 3), 1)
    filters = case.noise, case.temperature, case.top_k, case.top_p
    with pytest.raises(ValueError, match="count 0: expected at least 1"):
        kernel_calls.draw_step(case.values[0], case.ids[0], *filters, "independent", 0)
    with pytest.raises(ValueError, match="rows of values 2: expected those of every sequence's nodes"):
        kernel_calls.draw_step(case.values[0][:2], case.ids[0][:2], *filters, "independent", 3)
    with pytest.raises(ValueError, match="rows of noise 6: expected a row for each"):
        kernel_calls.draw_step(case.values[0], case.ids[0], *filters, "independent", 7)
    *draft, _, _, _ = kernel_calls.draw_step(case.values[0], case.ids[0], *filters, "independent", 3)
    with pytest.raises(ValueError, match="nodes of independent sequences 3: expected 1, or one for each draw"):
        kernel_calls.draw_step(case.values[1], case.ids[1], *filters, "independent", 2, *draft)
