"""N-gram retrieval against a search through everything that was read."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.decoding.defaults import RETRIEVAL_ESCAPES
from redraft.decoding.retrieval import EVERYBODY, LONGEST, OCCURRENCES, Retrieval, RetrievalText, retrieved_trees

Log = list[tuple[tuple[int, ...], int]]
"""What was read, in order: the text before a token, whole, and the token."""

READS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=7)), max_size=30)
"""Which of three texts is given which tokens."""


def read(retrieval: Retrieval, reads: list[tuple[int, list[int]]]) -> tuple[list[RetrievalText], list[list[int]], Log]:
    """Three texts that are read in turns."""
    texts, whole, log = [RetrievalText(retrieval) for _ in range(3)], [list[int]() for _ in range(3)], Log()
    for which, tokens in reads:
        texts[which].extend(tokens)
        texts[which].read()
        for token in tokens:
            log.append((tuple(whole[which]), token))
            whole[which].append(token)
    return texts, whole, log


def searched(log: Log, capacity: int, tail: tuple[int, ...]) -> dict[int, float]:
    """What may follow `tail`, by the definition: from the shortest match up."""
    chances: dict[int, float] = {}
    for length in sorted(RETRIEVAL_ESCAPES):
        if length > len(tail):
            continue
        match = tail[-length:]
        found = [token for before, token in log[-capacity:] if before[-length:] == match]
        found = found[-OCCURRENCES:]
        if found:
            escape = RETRIEVAL_ESCAPES[length]
            chances = {
                token: (found.count(token) + escape * chances.get(token, 0.0)) / (len(found) + escape)
                for token in {*found, *chances}
            }
    return chances


@given(READS, st.integers(1, 60), st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_estimates_are_those_of_a_search(reads, capacity, tail):
    """Texts read in turns do not mix, a text's first tokens follow nothing, what was forgotten does not count."""
    retrieval = Retrieval(capacity)
    _, whole, log = read(retrieval, reads)
    assert len(retrieval) == min(len(log), capacity)
    for end in (tuple(tail), *(tuple(text[-LONGEST:]) for text in whole if text)):
        assert retrieval.after(EVERYBODY, end) == pytest.approx(searched(log, capacity, end))
        assert retrieval.after(2, end) == {}


def test_memory_is_bounded():
    """By the texts that are remembered, however much was read."""
    retrieval, rng = Retrieval(40), np.random.default_rng(0)
    sizes = []
    for _ in range(30):
        read(retrieval, [(0, rng.integers(0, 1000, 50).tolist())])
        sizes.append(len(pickle.dumps(retrieval)))
    assert max(sizes) < 1.1 * sizes[1]


def paths(log: Log, capacity: int, tail: tuple[int, ...], depth: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every path of up to `depth` tokens below a text's end, with its log-probability."""
    if depth:
        for token, chance in searched(log, capacity, tail[-LONGEST:]).items():
            yield (token,), math.log(chance)
            for path, score in paths(log, capacity, (*tail, token), depth - 1):
                yield (token, *path), math.log(chance) + score


@given(READS, st.integers(5, 50), st.integers(0, 9), st.integers(0, 3))
def test_trees_hold_the_likeliest_paths(reads, capacity, budget, depth):
    retrieval = Retrieval(capacity)
    texts, whole, log = read(retrieval, reads)
    for text, tokens in zip(texts, whole, strict=True):
        if not tokens:
            continue
        nodes = text.draft(budget, depth)
        known = dict(paths(log, capacity, tuple(tokens), depth))
        assert nodes[0] == (tokens[-1], -1, 0.0)
        assert len(nodes) - 1 == min(budget, len(known))
        drafted: list[tuple[int, ...]] = [()]
        for token, parent, score in nodes[1:]:
            drafted.append((*drafted[parent], token))
            assert score == pytest.approx(known[drafted[-1]])
        assert len(set(drafted)) == len(drafted)
        best = sorted(known.values(), reverse=True)[: len(nodes) - 1]
        assert sorted((score for *_, score in nodes[1:]), reverse=True) == pytest.approx(best)


def test_longer_matches_come_first_and_branches_follow_their_counts():
    retrieval = Retrieval()
    RetrievalText(retrieval, [1, 2, 3, 4, 50] + [9, 4, 60] * 3 + [8, 4, 70]).read()
    text = RetrievalText(retrieval, [1, 2, 3, 4])
    first = [token for token, parent, _ in text.draft(3, 1)[1:]]
    assert first == [50, 60, 70]


def test_what_one_request_was_served_is_drafted_for_the_next():
    retrieval = Retrieval()
    served = RetrievalText(retrieval, [5, 6, 7])
    served.extend([8, 9])
    served.read()
    nodes = RetrievalText(retrieval, [5, 6, 7]).draft(2, 8)
    assert [node[:2] for node in nodes] == [(7, -1), (8, 0), (9, 1)]


def test_trees_of_a_batch():
    retrieval = Retrieval()
    texts = [RetrievalText(retrieval, [3, 4, 5, 3]), RetrievalText(retrieval, [7])]
    trees = retrieved_trees(texts, [2, 2], 4, [-math.inf] * 2, [1.0, 1.0])
    assert trees.tokens.tolist() == [3, 4, 5, 7]
    assert trees.sizes.tolist() == [3, 1]
    assert trees.scores[2] < trees.scores[1] < 0


@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_odds_of_every_known_token_are_multiplied(own_first, factor):
    """3 and 5 followed 1, 2; the text's own match is 3 only."""
    retrieval = Retrieval.of([[1, 2, 5], [1, 2, 3]])
    text = RetrievalText(retrieval, [8, 1, 2, 3, 1, 2], own_first)
    assert list(text.after()) == ([3] if own_first else [3, 5])
    before, after = text.draft(9, 1), text.draft(9, 1, odds=factor)
    assert [node[:2] for node in after] == [node[:2] for node in before]
    old, new = (np.exp([score for *_, score in nodes[1:]]) for nodes in (before, after))
    np.testing.assert_allclose(new / (1 - new), factor * old / (1 - old))
    trees = retrieved_trees([text, text], [9, 9], 1, [-math.inf] * 2, [1.0, factor])
    assert trees.nodes[0] == before
    assert trees.nodes[1] == after


def test_a_texts_own_matches_go_before_others_of_the_same_length():
    retrieval = Retrieval()
    RetrievalText(retrieval, [1, 2, 3, 40] + [9, 2, 50] * 5).read()
    text = RetrievalText(retrieval, [8, 2, 60, 7, 2], own_first=True)
    assert [token for token, parent, _ in text.draft(9, 1)[1:]] == [60], "2 was followed by 60 here"
    text.extend([60, 1, 2, 3])
    assert [token for token, parent, _ in text.draft(1, 1)[1:]] == [40], "1, 2, 3 occurred elsewhere only"


def test_unlikely_nodes_are_not_drafted():
    retrieval = Retrieval()
    text = RetrievalText(retrieval, [1, 2, 3] * 3 + [1, 2, 4] + [1, 2])
    nodes = text.draft(9, 3)
    least = sorted(score for _, _, score in nodes)[2]
    assert text.draft(9, 3, least) == [node for node in nodes if node[2] >= least]
    assert len(nodes) > len(text.draft(9, 3, least)) > 1


def test_texts_that_are_never_drafted_from_take_no_time():
    retrieval = Retrieval()
    text = RetrievalText(retrieval, range(100))
    text.extend(range(100))
    assert len(retrieval) == 0
