"""What a sequence gives out, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft import request_state as module
from redraft.decoding.log_probs import LogProbs
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.verification import Verdict
from redraft.output import Output
from redraft.pairs import Pairs
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.text import TextStream
from tests.toy_engine import toy_codec

CODEC = toy_codec()
PROMPT = [1, 2, 3]
ROWS = 9
NODES = [(1, node - 1, 0.0) for node in range(ROWS)]


@pytest.fixture
def clock(monkeypatch):
    """The time that sequences see, in seconds: an item that a test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def begun(first: str, **fields) -> RequestState:
    """A stream with an interval of 40 ms, after its first token."""
    request = GenerateRequest(id="r", input_ids=PROMPT, **{"max_tokens": 20, "stream": True, **fields})
    sequence = RequestState("r", request, PROMPT, CODEC, frozenset({0}), stream_interval_s=0.04)
    sequence.prefill(len(PROMPT), None)
    sequence.begin(verdict(first))
    return sequence


@pytest.mark.parametrize(("end_id", "kept"), [(None, {0, 5}), (5, {0, 5}), (7, {7}), (-1, set())])
def test_an_end_id_of_the_models_keeps_all_of_them(end_id, kept):
    """Clients of TensorRT-LLM send the tokenizer's end token; a chat model has one more."""
    request = GenerateRequest(id="r", input_ids=PROMPT, max_tokens=20, end_id=end_id)
    assert RequestState("r", request, PROMPT, CODEC, frozenset({0, 5})).end_ids == kept


def verdict(text: str) -> Verdict:
    tokens = CODEC.encode(text)
    none = np.empty((len(tokens), 0))
    return Verdict(list(range(len(tokens))), tokens, LogProbs(np.full(len(tokens), -0.5), none, none))


def step(sequence: RequestState, text: str) -> None:
    gained = verdict(text)
    sequence.step(gained, None, len(gained.tokens), False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_words": ["x", "cd"]}, "cd"),
        ({"stop_words": ["<end>"]}, None),
        ({"stop_words": ["<end>"], "end_id": -1}, "<end>"),
        ({"stop_token_ids": CODEC.encode("d")}, CODEC.encode("d")[0]),
        ({"stop_token_ids": [0]}, None),
        ({"stop_word_ids": [CODEC.encode("cd")]}, None),
        ({"max_tokens": 2}, None),
    ],
)
def test_what_ended_the_text_beside_the_models_end_tokens(fields, reason):
    sequence = begun("ab", **fields)
    if sequence.finish_reason is None:
        step(sequence, "cd<end>")
    assert sequence.finish_reason
    output = sequence.take_output()
    assert output is not None
    assert output.stop_reason == reason


def test_the_first_text_comes_at_once_and_the_rest_is_gathered(clock):
    sequence = begun("a", return_log_probs=True)
    assert sequence.take_output().text == "a"
    for passed, text in ((0.015, "bc"), (0.03, "d"), (0.039, "ef")):
        clock[0] = 100 + passed
        step(sequence, text)
        assert sequence.take_output() is None, passed
    clock[0] = 100.0401
    step(sequence, "g")
    gathered = sequence.take_output()
    assert gathered.text == "bcdefg"
    assert gathered.token_ids == CODEC.encode("bcdefg")
    assert gathered.log_probs == [-0.5] * 6
    clock[0] = 100.07
    step(sequence, "h")
    assert sequence.take_output() is None, "the next interval starts with the last piece"


def test_the_last_text_comes_at_once(clock):
    sequence = begun("a", max_tokens=3)
    sequence.take_output()
    step(sequence, "bc")
    last = sequence.take_output()
    assert (last.text, last.finish_reason) == ("bc", "length")
    cancelled = begun("a")
    cancelled.take_output()
    cancelled.finish("cancelled")
    assert cancelled.take_output().finish_reason == "cancelled"


def test_text_that_was_held_back_does_not_wait_for_the_interval(clock):
    """The first piece that a client can show is the first with text."""
    sequence = begun("S", stop_words=["STOP"])
    assert sequence.take_output().text == ""
    step(sequence, "ea")
    assert sequence.take_output().text == "Sea"


@pytest.mark.parametrize(("word", "accepted"), [("STOP", 3), ("<end>", 3), ("none", 6)])
def test_nothing_counts_behind_the_end_of_the_text(word, accepted):
    """Neither as accepted nor for the n-grams."""
    sequence = begun("a", stop_words=[word])
    sequence.memory = NgramIndex([*PROMPT, *CODEC.encode("a")])
    word_tokens = [0] if word == "<end>" else CODEC.encode("P")
    tokens = [*CODEC.encode("STO"), *word_tokens, *CODEC.encode("xyz")]
    sequence.step(Verdict(list(range(7)), tokens), None, ROWS, False)
    assert sequence.stats.accepted == accepted
    assert sum(sequence.stats.accepted_by_depth) == accepted
    assert len(sequence.stats.offered_by_depth) == min(accepted + 1, 6)
    assert len(sequence.memory.unread) == len(PROMPT) + 1 + accepted + 1


def test_a_stop_word_of_token_ids_ends_the_text(clock):
    """Also one that is complete only over two outputs; tokens after it are not taken."""
    words = [CODEC.encode(word) for word in ("xyz", "cde", "dx")]
    sequence = begun("a", stop_word_ids=words)
    step(sequence, "bc")
    assert sequence.take_output().text == "abc"
    step(sequence, "def")
    last = sequence.take_output()
    assert (last.text, last.token_ids, last.finish_reason) == ("de", CODEC.encode("de"), "stop")
    assert last.prompt_tokens == len(PROMPT)


def test_a_stop_word_of_token_ids_is_not_looked_for_in_the_prompt():
    sequence = begun("a", stop_word_ids=[[PROMPT[-1], *CODEC.encode("a")]])
    assert sequence.finish_reason is None


@pytest.mark.parametrize(("word", "taken"), [("STOP", 4), ("<end>", 4), ("none", 7)])
def test_what_is_left_in_the_cache_ends_with_the_text(word, taken):
    """The rows to move, the pairs to ingest, and the tokens whose rows are then in place: not the last one's."""
    sequence = begun("a", stop_words=[word])
    sequence.pairs = Pairs(ingested=len(PROMPT))
    tokens = [*CODEC.encode("STO"), *([0] if word == "<end>" else CODEC.encode("P")), *CODEC.encode("xyz")]
    path = [0, 1, 3, 4, 6, 7, 8]
    sequence.step(Verdict(path, tokens), np.arange(7.0)[:, None], ROWS, False)
    assert sequence.cached_tokens.tolist() == [*PROMPT, *CODEC.encode("a"), *tokens[: taken - 1]]
    assert sequence.commit == path[:taken]
    assert sequence.pairs.rows == sequence.cache_length
    assert sequence.pairs.take()[1] == tokens[:taken]


def test_the_first_pairs_are_those_of_the_first_rows():
    """Ingested ones first; features are views."""
    parts = [np.arange(3.0)[:, None], np.arange(3.0, 7.0)[:, None]]
    for from_text in (False, True):
        pairs = Pairs(from_text, ingested=2, features=parts, tokens=[10, 11, 12, 13, 14, 15])
        for rows in range(1, pairs.rows + 1):
            first = pairs.first(rows)
            count = max(rows + from_text - 2, 0)
            assert (first.rows, first.ingested) == (rows, min(2, rows + from_text))
            assert first.tokens == [10, 11, 12, 13, 14, 15][:count]
            assert [value for part in first.features for value in part[:, 0]] == list(range(count))
    assert pairs.rows == 7
    assert np.shares_memory(parts[0], first.features[0])
    later = Pairs(ingested=2, features=parts, tokens=[10, 11, 12, 13, 14, 15], skipped=5)
    assert (later.rows, later.first(8).tokens, later.first(6).ingested, later.first(6).rows) == (13, [10], 1, 6)
    assert later.first(4) == Pairs(skipped=4)


WHOLE = toy_codec(257)
"""Its tokens are bytes: characters of several tokens, and bytes that are no text."""


@st.composite
def served(draw) -> tuple[dict, frozenset[int], list[tuple[Verdict, bool, bool]]]:
    """A request's fields, the model's end tokens, and steps: a verdict, whether its tree goes on, and whether the
    output is taken after it."""
    fields = {
        "max_tokens": draw(st.integers(1, 9)),
        "stop_token_ids": draw(st.lists(st.integers(0, 9), max_size=1)),
        "return_log_probs": draw(st.booleans()),
        "draft_trees": draw(st.booleans()),
        "stream": draw(st.booleans()),
    }
    fields["top_log_probs"] = 2 * (fields["return_log_probs"] and draw(st.booleans()))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 9) | st.integers(0, 256), min_size=1, max_size=6))
        best = np.array([[token, 0] for token in tokens])
        scores = LogProbs(-np.arange(1.0, len(tokens) + 1), best, -best - 0.5)
        path = sorted(
            draw(st.lists(st.integers(1, 8), min_size=len(tokens) - 1, max_size=len(tokens) - 1, unique=True))
        )
        steps.append((Verdict([0, *path], tokens, scores), draw(st.booleans()), draw(st.booleans())))
    return fields, draw(st.frozensets(st.integers(0, 9), max_size=3)), steps


def answer(fields: dict, end_ids: frozenset[int], steps: list[tuple[Verdict, bool, bool]]) -> list:
    """All that a request's client and its scheduler see of it."""
    request = GenerateRequest(id="r", input_ids=PROMPT, **fields)
    sequence = RequestState("r", request, PROMPT, WHOLE, end_ids)
    sequence.memory = learned = []
    sequence.prefill(len(PROMPT), None)
    (first, _, _), *others = steps
    sequence.begin(Verdict([0], first.tokens[:1], first.log_probs))
    seen = [sequence.take_output()]
    for gained, goes_on, take in others:
        if sequence.finish_reason:
            break
        sequence.step(gained, None, ROWS, goes_on, NODES)
        if take or sequence.finish_reason:
            seen.append(sequence.take_output())
    stats = replace(sequence.stats, queue_ms=0, prefill_ms=0, decode_ms=0)
    seen += [learned, sequence.root, sequence.commit, sequence.cache_length, sequence.cached_tokens.tolist(), stats]
    for output in seen:
        if isinstance(output, Output) and output.stats is not None:
            output.stats = None
    return seen


@settings(max_examples=80, deadline=None)
@given(case=served())
def test_tokens_that_are_taken_at_once_are_those_that_are_taken_one_by_one(case):
    """A word of a token that never comes asks for each token."""
    fields, end_ids, steps = case
    assert answer(fields, end_ids, steps) == answer(fields | {"stop_word_ids": [[300]]}, end_ids, steps)


@settings(max_examples=80, deadline=None)
@given(case=served())
def test_text_that_is_read_when_it_is_taken_is_that_of_each_token(case):
    fields, end_ids, steps = case
    text = TextStream(WHOLE, PROMPT)
    for output in answer(fields, end_ids, steps):
        if isinstance(output, Output):
            for token in output.token_ids:
                text.push(token)
            if output.finish_reason:
                text.finish()
            assert output.text == text.take()
