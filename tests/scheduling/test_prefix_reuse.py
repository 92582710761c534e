"""Sequences that begin after rows of earlier ones: same answers, fewer rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from redraft.batch import DraftBatch, TargetBatch
from redraft.bundle.method import MethodConfig
from redraft.decoding.verification import VERIFIERS
from redraft.pairs import Pairs
from redraft.request_state import RequestState
from redraft.scheduling import slots
from redraft.scheduling.scheduler import Limits, Scheduler
from redraft.scheduling.slots import COPY_ROWS, PENDING_PAIRS, SKIPPED_PAIRS, Slot, Slots
from tests.mutants import Mutant, planted
from tests.scheduling.reuse import FEW_ROWS, converse
from tests.scheduling.test_scheduler import make, run
from tests.toy_engine import ToyEngine, _mix

LIMITS = Limits(slots=3, max_len=120, max_tree=14, prefill_chunk=11, max_queue=99)
CONSTRUCTIONS = {"plain": "beam", "context": "best_first", "text": "beam"}
PLANS = {
    name: MethodConfig(construction=construction, ngram=name == "plain", tree_budget=13)
    for name, construction in CONSTRUCTIONS.items()
}
WINDOWS = replace(LIMITS, window=9, window_rows=32)
SYSTEM = list(range(1, 41))


class ContextDrafter:
    """A drafter that keeps pairs by slot, as a context cache does: at every draft a slot's pairs must be those of one
    text, each once, from its first token or a later one on."""

    reads_context = True

    def __init__(self, engine: ToyEngine, reads_text: bool):
        self.reads_text, self._engine = reads_text, engine
        self.pairs = np.full((*engine.cache.shape[:2], 2), -1, dtype=np.int64)

    def draft(self, batch: DraftBatch, noise: Any = None) -> Any:
        for b, slot in enumerate(batch.slots.tolist()):
            start, rows = int(batch.cache_lengths[b]), slice(*batch.row_offsets[b : b + 2].tolist())
            high, low = batch.features[rows].astype(np.int64).T
            end = start + len(high)
            self.pairs[slot, start:end] = np.stack([high << 16 | low, batch.tokens[rows]], axis=1)
            kept = self.pairs[slot, :end].tolist()
            if self.reads_text and len(kept) > 1 and _mix(*kept[0]) != kept[1][0]:
                kept[0][0] = self._engine.seed
            for (state, token), (after, _) in pairwise(kept):
                assert after == _mix(state, token), f"the pairs of slot {slot} are not those of one text"
        last = batch.row_offsets[1:] - 1
        return self._engine.draft(DraftBatch.of_roots(batch.features[last], batch.tokens[last]))


class ReusedEngine(ToyEngine):
    """A toy engine with a drafter without a context, one with, and one whose context begins with the text."""

    def __init__(self, **options: Any):
        super().__init__(slots=LIMITS.slots, max_len=LIMITS.max_len, max_tree=LIMITS.max_tree, **options)
        self.contexts = {"context": ContextDrafter(self, False), "text": ContextDrafter(self, True)}
        self.copies: list[tuple[int, int, int]] = []

    @property
    def drafters(self) -> dict[str, Any]:
        return {"plain": self, **self.contexts}

    def copy(self, source: int, target: int, rows: int) -> None:
        super().copy(source, target, rows)
        self.copies.append((source, target, rows))
        for context in self.contexts.values():
            context.pairs[target, : rows + 1] = context.pairs[source, : rows + 1]


class WindowedEngine(ReusedEngine):
    """The same with a layer that has a window and keeps the last rows only: what its rows see must be there."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.last = np.full((LIMITS.slots, WINDOWS.window_rows, 2), -1, dtype=np.int64)

    def _sequence(self, batch: TargetBatch, b: int) -> list[int]:
        states = super()._sequence(batch, b)
        whole, last = (cache[batch.slots[b]] for cache in (self.cache, self.last))
        commit = batch.commit_src[slice(*batch.commit_offsets[b : b + 2])]
        length, rows = int(batch.cache_lengths[b]), int(np.diff(batch.row_offsets)[b])
        for place, source in enumerate((length - len(commit) + commit).tolist(), length - len(commit)):
            last[place % len(last)] = last[source % len(last)]
        places, seen = np.arange(length, length + rows), np.arange(max(0, length + 1 - WINDOWS.window), length + rows)
        last[places % len(last)] = whole[places]
        assert (last[seen % len(last)] == whole[seen]).all(), f"slot {batch.slots[b]} has lost rows of a window"
        return states

    def copy(self, source: int, target: int, rows: int) -> None:
        super().copy(source, target, rows)
        self.last[target, :rows] = self.last[source, :rows]


@pytest.mark.parametrize(("seed", "windows"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_answers_are_those_without_reuse(seed, windows):
    """After stops inside a path, cancellations, other methods, evictions, and beside sequences that run."""
    engine, limits = (WindowedEngine, WINDOWS) if windows else (ReusedEngine, LIMITS)
    share, copies = converse(engine(quality=0.8), limits, PLANS, seed, 60)
    assert share > (0.15 if windows else 0.25)
    assert copies > 5


def cancelled(scheduler: Scheduler, prompt: list[int], chunks: int) -> None:
    scheduler.submit(make(9, prompt=prompt, method="plain"))
    for _ in range(chunks):
        scheduler.step()
    scheduler.cancel(9)
    scheduler.step()


def begin_after_every_row() -> None:
    """Of a prompt that was cancelled, where all rows that were written are known; of another that has begun after it;
    and of an answer, whose trees may have been written behind it."""
    prompt, kept = [*range(1, 100)], WINDOWS.window_rows - WINDOWS.window + 1
    for chunks, others in ((3, 0), (5, 0), (5, 1)):
        earliest = max(FEW_ROWS, chunks * WINDOWS.prefill_chunk - kept)
        for rows in range(max(0, earliest - 9), earliest + 2):
            scheduler = Scheduler(WindowedEngine(), WINDOWS, PLANS)
            cancelled(scheduler, prompt, chunks)
            with patch.object(slots, "COPY_ROWS", FEW_ROWS):
                cancelled(scheduler, [*prompt[:40], *[100] * 30], others)
                found = served(scheduler, 1, [*prompt[: rows + 1], 100])[4].cached_tokens
            assert found == (rows if rows >= earliest else 0)
    for rows in range(47, 53):
        scheduler = Scheduler(WindowedEngine(quality=1.0), WINDOWS, PLANS)
        text = [*SYSTEM, *served(scheduler, 0, SYSTEM, max_tokens=20)[1]]
        found = served(scheduler, 1, [*text[:rows], 109], max_tokens=1)[4].cached_tokens
        assert found == (rows - 1 if rows >= 50 else 0)


def test_a_sequence_begins_after_no_rows_whose_window_is_lost():
    begin_after_every_row()


LONG_PATHS: dict[str, Any] = {"quality": 1.0, "vocab_size": 5, "candidates": 5, "sharpness": 1.0}


def go_on_from_every_end(method: str) -> None:
    """Conversations whose first answers end at every place of a path, by a limit and by a stop word, and which go on
    twice at the same time. Few tokens are likely, so that drawn ones are often on a tree's second or third path."""
    engine = ReusedEngine(**LONG_PATHS)
    scheduler, anew = (
        Scheduler(engine, LIMITS, PLANS),
        Scheduler(ReusedEngine(**LONG_PATHS), LIMITS, PLANS),
    )
    drawn = {"method": method, "sampling": {"temperature": 1.0, "seed": 4}}
    whole = served(anew, "whole", SYSTEM, **drawn, max_tokens=24)[1]
    for place in range(2, 24):
        for ends in ({"max_tokens": place}, {"max_tokens": 24, "stop_word_ids": [whole[place - 2 : place + 1]]}):
            options = drawn | {"cache_salt": f"{place} {list(ends)}"}
            answer = served(scheduler, place, SYSTEM, **options, **ends)[1]
            assert answer == whole[: len(answer)]
            prompts = [[*SYSTEM, *answer, last] for last in (98, 99)]
            options |= {"max_tokens": 5, "end_ids": frozenset()}
            found = run(scheduler, [make(key, prompt=prompt, **options) for key, prompt in enumerate(prompts)])
            for key, prompt in enumerate(prompts):
                assert found[key][:4] == served(anew, key, prompt, cache_prompt=False, **drawn)[:4], (place, ends)
            cached = len(SYSTEM) + len(answer) - 2
            assert found[0][4].cached_tokens == cached
            assert 0 <= cached - found[1][4].cached_tokens <= PLANS[method].table.entries[0].nodes


@pytest.mark.parametrize("method", PLANS)
def test_a_conversation_goes_on_from_any_place_of_a_path(method):
    go_on_from_every_end(method)


def go_on_after_another_method(method: str) -> None:
    """A drafter has the pairs of a text's beginning and lacks those of many rows after it: it does without any."""
    scheduler, prompt = Scheduler(ReusedEngine(), LIMITS, PLANS), [*SYSTEM, *range(41, 111)]
    served(scheduler, 0, SYSTEM, method=method)
    served(scheduler, 1, prompt)
    for length in (len(prompt), len(SYSTEM) + 1):
        assert served(scheduler, 2, prompt[:length], method=method)[4].cached_tokens == length - 1


MUTANTS = [
    ("a row of another token", Slot.rows_for, "sequence.prompt) - 1", "sequence.prompt) + 1"),
    ("an uncommitted path", Slots.admit, "rows, commit, known", "rows, [], known"),
    ("a path beyond what was taken", RequestState.step, "self.commit = path if", "self.commit = verdict.path if"),
    ("a commit for all of a path", Slots.admit, "[: max(rows - target.settled, 0)]", "[:]"),
    ("a path committed twice", RequestState.prefill, "+ rows, []", "+ rows, self.commit"),
    ("a copy of rows that are not in place", Slots._choose, "min(rows[slot], slot.settled)", "rows[slot]"),
    ("a pair too many", Pairs.first, "count - self.ingested", "count + 1 - self.ingested"),
    ("an ingested pair too many", Pairs.first, "min(self.ingested, count)", "min(self.ingested, count + 1)"),
    ("pairs that the drafter lacks", Slots.admit, "known.rows < rows", "False"),
    ("pairs after those that were skipped", Pairs.first, "rows < self.skipped", "False"),
    ("pairs of what was there before", Slots.admit, "if rows else {}", "if rows else target.pairs"),
    ("a row before those that are kept", Slots._earliest, "window + 1)", "window + 2)"),
    ("a row more than are kept", Slots._earliest, "< written else", "< written - 1 else"),
    ("a tree over rows of a window", Slots._written, "if user.prefilled", "if False"),
    ("a text over rows of a window", Slots.admit, "self._written(source) if rows", "0 if rows"),
    ("rows before those that are kept", Slots._choose, "self._usable(slot, slot.rows", "max(0, slot.rows"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "old", "new"), MUTANTS, ids=[name for name, *_ in MUTANTS])
def test_a_mutant_changes_an_answer(name, function, old, new):
    def check() -> None:
        begin_after_every_row()
        go_on_from_every_end("plain")
        go_on_from_every_end("context")
        go_on_after_another_method("context")
        for seed in range(3, 6):
            converse(ReusedEngine(quality=0.8), LIMITS, PLANS, seed, 40)

    with planted(Mutant(name, function, old, new, case="")), pytest.raises((AssertionError, ValueError)):
        check()


def served(scheduler, key, prompt, **options):
    """The statistics of one request."""
    options = {"max_tokens": 5, "end_ids": frozenset(), "method": "plain"} | options
    return run(scheduler, [make(key, prompt=prompt, **options)])[key]


@pytest.mark.parametrize("method", ["context", "text"])
def test_an_idle_slot_keeps_few_pairs_that_were_never_ingested(scheduler, method):
    """The request ends before it drafts. The next one begins after the pairs that were kept."""
    prompt = list(range(1, 101))
    first = served(scheduler, 0, prompt, method=method, max_tokens=1)
    (pairs,) = (slot.pairs[method] for slot in scheduler._slots._slots if slot.pairs)
    assert len(pairs.tokens) == sum(map(len, pairs.features)) == PENDING_PAIRS
    assert all(features.base is None for features in pairs.features), "a slice keeps the whole array"
    second = served(scheduler, 1, prompt, method=method, max_tokens=9)
    assert second[1][:1] == first[1]
    assert second[4].cached_tokens == PENDING_PAIRS - (method == "text")


@pytest.mark.parametrize("method", ["context", "text"])
def test_a_drafter_does_without_the_pairs_of_many_rows(scheduler, method, monkeypatch):
    """Those of another method's answers. The conversation goes on with what it has, and few rows run again."""
    go_on_after_another_method(method)
    prompt, options = list(range(1, 101)), {"method": method, "max_tokens": 6}
    served(scheduler, 0, prompt)
    first = served(scheduler, 1, prompt, **options)
    assert first[4].cached_tokens == len(prompt) - 1 >= SKIPPED_PAIRS
    second = served(scheduler, 2, [*prompt, *first[1], 7], **options)
    assert second[4].cached_tokens == len(prompt) + 6 - 2
    short = prompt[:SKIPPED_PAIRS]
    served(scheduler, 3, short, cache_salt="a")
    assert served(scheduler, 4, short, cache_salt="a", **options)[4].cached_tokens == 0
    drafting = scheduler._sources[method]
    monkeypatch.setattr(drafting, "_verifier", replace(VERIFIERS["sampled_walk"], merges=False))
    served(scheduler, 5, prompt, cache_salt="b")
    whole = served(scheduler, 6, prompt, cache_salt="b", **options)
    assert whole[4].cached_tokens == 0, "drafts may decide the answer"
    assert whole[:4] == first[:4]


@pytest.fixture
def engine():
    return ReusedEngine()


@pytest.fixture
def scheduler(engine):
    return Scheduler(engine, LIMITS, PLANS)


@pytest.mark.parametrize("method", ["plain", "context", "text"])
def test_a_conversation_goes_on_in_its_slot(scheduler, engine, method):
    """Only the last token that both have and those after it are prefilled."""
    first = served(scheduler, 0, SYSTEM, method=method)
    prompt = SYSTEM + first[1]
    again = served(scheduler, 1, [*prompt, 7, 8], method=method)
    assert again[4].cached_tokens == len(prompt) - 2, "the last token's row was never made"
    assert again[4].rows_executed == 4 + again[4].steps + again[4].drafted
    assert engine.copies == []


def test_a_prompt_that_is_there_runs_its_last_token_again(scheduler):
    served(scheduler, 0, SYSTEM)
    assert served(scheduler, 1, SYSTEM)[4].cached_tokens == len(SYSTEM) - 1


def test_an_opening_is_copied_to_the_least_recently_used_slot(scheduler, engine):
    """The conversations that have it stay."""
    tails = [[50 + key] * 45 for key in range(3)]
    found = [served(scheduler, key, SYSTEM + tail)[4].cached_tokens for key, tail in enumerate(tails)]
    assert found == [0, len(SYSTEM) - 1, len(SYSTEM) - 1]
    assert [(target, rows) for _, target, rows in engine.copies] == [(1, 39), (2, 39)]
    assert served(scheduler, 3, SYSTEM + tails[0])[4].cached_tokens == 84
    served(scheduler, 4, SYSTEM + [90] * 45)
    assert len(engine.copies) == 2, "the second conversation was used least recently, and begins with it too"
    for tail, kept in ((tails[0], 84), (tails[2], 84), (tails[1], 39)):
        assert served(scheduler, 5, SYSTEM + tail)[4].cached_tokens == kept


def test_choices_of_one_prompt_wait_for_the_first(scheduler, engine):
    """They copy its rows as soon as they are there; another prompt does not wait."""
    sequences = [make(key, prompt=SYSTEM, method="context", max_tokens=9) for key in range(2)]
    sequences.append(make(2, prompt=[99, 98], method="context", max_tokens=9))
    run(scheduler, sequences)
    rows = sum(sequence.stats.rows_executed - sequence.stats.steps - sequence.stats.drafted for sequence in sequences)
    assert rows <= len(SYSTEM) + COPY_ROWS + 2
    assert engine.copies[0][0] == sequences[0].slot


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(scheduler):
    """The long one goes as early as the short one would, until their common rows are there."""
    prompts = [*SYSTEM, *[50] * 40], [99] * 45, [*SYSTEM, 98]
    long, between, short = (make(key, prompt=prompt, max_tokens=2) for key, prompt in enumerate(prompts))
    scheduler.submit(long)
    scheduler.step()
    for sequence in (between, short):
        scheduler.submit(sequence)
    while not short.prefilled:
        scheduler.step()
    assert short.stats.cached_tokens >= len(SYSTEM) - COPY_ROWS
    assert not between.prefilled
    assert not long.prefilled


@pytest.mark.parametrize("leaves_rows", [False, True])
def test_what_a_waiting_prompt_can_reuse_is_counted_again_when_the_slots_have_changed(
    scheduler, monkeypatch, leaves_rows
):
    choose, asked = Slots._choose, list[Any]()
    monkeypatch.setattr(Slots, "_choose", lambda self, one: asked.append(one.key) or choose(self, one))
    scheduler.submit(make(0, prompt=SYSTEM, max_tokens=2, cache_prompt=leaves_rows))
    scheduler.step()
    waiting = make(1, prompt=[*SYSTEM, *SYSTEM], max_tokens=2)
    scheduler.submit(waiting)
    scheduler.step()
    scheduler.step()
    assert not waiting.has_slot
    assert asked.count(1) == 1 + leaves_rows
    assert waiting.reusable == (2 * LIMITS.prefill_chunk - 1) * leaves_rows


def test_a_waiting_prompt_goes_on_when_the_first_is_cancelled(scheduler):
    first, second = (make(key, prompt=SYSTEM, max_tokens=3) for key in range(2))
    for sequence in (first, second):
        scheduler.submit(sequence)
    scheduler.step()
    scheduler.cancel(0)
    scheduler.step()
    assert second.has_slot
    assert second.stats.cached_tokens == LIMITS.prefill_chunk - 1
    assert run(scheduler, [])[1][3] == "length"


@pytest.mark.parametrize("options", [{"cache_prompt": False}, {"cache_salt": "mine"}, {"prompt_log_probs": True}])
@pytest.mark.parametrize("who", ["asks", "has asked"])
def test_a_request_can_keep_to_itself(scheduler, options, who):
    """Scores need all rows, which others may have."""
    first, second = (options, {}) if who == "has asked" else ({}, options)
    served(scheduler, 0, SYSTEM, **first)
    shared = who == "has asked" and "prompt_log_probs" in options
    assert served(scheduler, 1, SYSTEM, **second)[4].cached_tokens == (39 if shared else 0)
    served(scheduler, 2, SYSTEM, **second)
    together = 39 if "cache_salt" in options or who == "has asked" else 0
    assert served(scheduler, 3, SYSTEM, **second)[4].cached_tokens == together


def test_nothing_is_reused_where_it_is_off_or_the_engine_refuses(engine):
    for refusal, on in ((None, False), ("its caches are elsewhere", True)):
        engine.reuse_refusal = refusal
        scheduler = Scheduler(engine, LIMITS, PLANS, prefix_reuse=on)
        assert [served(scheduler, key, SYSTEM)[4].cached_tokens for key in range(2)] == [0, 0]
        assert scheduler.totals.prefix_cache_queries == 0
        assert scheduler._slots.free[0].number == 0


def test_nothing_is_reused_after_a_step_that_failed(scheduler):
    served(scheduler, 0, SYSTEM)
    scheduler.drop_all()
    assert served(scheduler, 1, SYSTEM)[4].cached_tokens == 0


def test_counts(scheduler):
    served(scheduler, 0, SYSTEM)
    served(scheduler, 1, [*SYSTEM, 9])
    served(scheduler, 2, SYSTEM, cache_prompt=False)
    totals = dict(scheduler.totals)
    assert (totals["prefix_cache_queries"], totals["prefix_cache_hits"]) == (81, 39)
    assert totals["prompt_tokens"] == 121


def test_one_slot(engine):
    """What it holds is all there is to begin with."""
    scheduler = Scheduler(engine, replace(LIMITS, slots=1), PLANS)
    assert [served(scheduler, key, SYSTEM[:length])[4].cached_tokens for key, length in enumerate((30, 40, 20))] == [
        0, 29, 19,
    ]  # fmt: skip
