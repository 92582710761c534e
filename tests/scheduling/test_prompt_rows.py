"""How prompts share the rows of a step: short ones first, none for ever behind others."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.batch import step_rows
from redraft.scheduling.prompt_rows import FIRST_PART, SCORED_ROW, share_rows


@dataclass(eq=False)
class Prompt:
    """`short` ones come without end in some tests."""

    arrived: float
    to_prefill: int
    has_slot: bool = False
    scored: bool = False
    short: bool = False


PROMPTS = st.lists(
    st.builds(Prompt, st.integers(0, 5).map(float), st.integers(1, 300), st.booleans()), min_size=1, max_size=20
)


def step(prompts: list[Prompt], slots: int, rows: int) -> None:
    """One step: what is given is prefilled, and prompts that are through leave their slots."""
    for prompt, count in share_rows(prompts, slots - sum(prompt.has_slot for prompt in prompts), rows):
        prompt.has_slot = True
        prompt.to_prefill -= count
    prompts[:] = [prompt for prompt in prompts if prompt.to_prefill]


@given(PROMPTS, st.integers(0, 4), st.integers(1, 200))
def test_no_row_is_given_twice_nor_left_while_a_prompt_can_take_it(prompts, free_slots, rows):
    chunks = share_rows(prompts, free_slots, rows)
    assert len({id(prompt) for prompt, _ in chunks}) == len(chunks)
    assert all(1 <= count <= prompt.to_prefill for prompt, count in chunks)
    admitted = sum(not prompt.has_slot for prompt, _ in chunks)
    assert admitted <= free_slots
    able = sum(prompt.to_prefill for prompt in prompts if prompt.has_slot)
    if admitted < free_slots:
        able += sum(prompt.to_prefill for prompt in prompts if not prompt.has_slot)
    given_rows = sum(count for _, count in chunks)
    assert min(rows, able) <= given_rows <= rows


def test_a_prompt_goes_as_early_as_the_shortest_that_waits_for_its_rows():
    first, leader, other = (Prompt(float(place), rows) for place, rows in enumerate((500, 400, 200)))
    prompts = [first, leader, other]
    assert [prompt for prompt, _ in share_rows(prompts, 3, 100)] == [first, other]
    assert [prompt for prompt, _ in share_rows(prompts, 3, 100, followers={leader: 50})] == [first, leader]


@given(PROMPTS, st.integers(4, 200))
def test_the_shortest_goes_first(prompts, rows):
    """All but the earliest prompt's part."""
    chunks = {id(prompt): count for prompt, count in share_rows(prompts, len(prompts), rows)}
    shortest = min(prompts, key=lambda prompt: (prompt.to_prefill, prompt.arrived))
    assert chunks.get(id(shortest), 0) >= min(shortest.to_prefill, rows - -(-rows // FIRST_PART))
    unserved = [prompt.to_prefill for prompt in prompts if id(prompt) not in chunks]
    earliest = min(prompts, key=lambda prompt: prompt.arrived).arrived
    served = [prompt.to_prefill for prompt in prompts if id(prompt) in chunks and prompt.arrived > earliest]
    assert not unserved or max(served, default=0) <= min(unserved)


@given(PROMPTS, st.integers(1, 8), st.integers(4, 64), st.integers(1, 64))
@settings(max_examples=50)
def test_none_starves_under_short_ones_without_end(prompts, slots, rows, length):
    """All are through after the steps that the earliest prompt's part takes for them, and for short ones in slots."""
    for prompt in prompts:
        prompt.has_slot = False
    part = -(-rows // FIRST_PART)
    most = sum(-(-prompt.to_prefill // part) for prompt in prompts) + len(prompts) * -(-length // part)
    waiting = list(prompts)
    for now in range(most):
        outnumbering = len(prompts) + slots + rows // length + 1
        waiting += [Prompt(6.0 + now, length, short=True) for _ in range(outnumbering - len(waiting))]
        step(waiting, slots, rows)
        if all(prompt.short for prompt in waiting):
            return
    raise AssertionError(f"{sum(not prompt.short for prompt in waiting)} prompts still wait after {most} steps")


def test_long_prompts_that_wait_hold_no_slot():
    """A short one that comes later gets one at once."""
    prompts = [Prompt(place, 2000) for place in range(8)]
    for _ in range(3):
        step(prompts, 4, 128)
    assert [prompt.has_slot for prompt in prompts] == [True] + [False] * 7
    prompts.append(Prompt(9, 90))
    step(prompts, 4, 128)
    assert len(prompts) == 8, "the short one is through"


@given(PROMPTS, st.integers(1, 200))
def test_scored_prompts_take_few_rows_beside_streams_only(prompts, rows):
    """Together, not each; and at least one, so that they get on in the smallest chunks."""
    for prompt in prompts:
        prompt.scored = True
    chunks = share_rows(prompts, len(prompts), rows, decoding=1)
    assert 1 <= sum(count for _, count in chunks) <= -(-rows // SCORED_ROW)
    alone = share_rows(prompts, len(prompts), rows)
    assert sum(count for _, count in alone) == min(rows, sum(prompt.to_prefill for prompt in prompts))


def test_a_step_takes_fewer_rows_beside_streams():
    assert step_rows(128, 0) == 128
    assert step_rows(128, 1) == 64
    assert step_rows(1, 3) == 1
    assert step_rows(2048, 0) == 2048
    assert step_rows(2048, 1) == 256
