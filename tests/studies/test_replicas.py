"""The simulated replicas: a slot's cache by hand, conservation of tokens, and what a proxy changes."""

import pytest

from studies.speed.replicas import Chats, Machine, Request, StepTimes, simulate

STEPS = [{"rows": 1, "median_ms": 2.0}, {"rows": 3, "median_ms": 4.0}, {"rows": 7, "median_ms": 12.0}, {"sequences": 2}]


def test_a_steps_time_lies_on_the_lines_of_the_measured_ones():
    times = StepTimes(STEPS)
    assert [times(rows) for rows in (1, 2, 3, 5, 7, 9)] == [2, 3, 4, 8, 12, 16]


def test_a_slot_keeps_a_chat_until_another_needs_it():
    machine, answers = Machine(slots=2), 2

    def serve(chat, prompt):
        machine.waiting.append(Request(chat, prompt, arrived=0.0))
        hits = machine.admit()
        while machine.running:
            machine.step(answers)
        return hits

    assert [serve(1, 10), serve(2, 10), serve(1, 20)] == [0, 0, 12]
    assert [serve(3, 10), serve(2, 20), serve(3, 20)] == [0, 0, 12], "chat 2 was the least recently used"
    assert serve(3, 5) == 4, "a prompt's last token is always executed"


def test_a_step_takes_the_shortest_prompt_first_and_half_a_chunk_beside_others():
    machine = Machine(slots=3)
    machine.waiting += [Request(1, 200, 0.0), Request(2, 30, 0.0)]
    machine.admit()
    decoding, prompts, first, ended = machine.step(answer=3)
    assert (decoding, prompts, [one.chat for one in first], ended) == (0, 128, [2], [])
    decoding, prompts, *_ = machine.step(answer=3)
    assert (decoding, prompts) == (1, 64)
    *_, ended = machine.step(answer=3)
    assert [one.chat for one in ended] == [2]


@pytest.mark.parametrize("machines", [1, 3])
def test_all_that_is_no_hit_is_executed(machines):
    chats = Chats(users=3, turns=3, question=20, answer=11, pause_s=0.1)
    by_chat = simulate(machines, True, 5, StepTimes(STEPS), chats, 60.0)
    in_turn = simulate(machines, False, 5, StepTimes(STEPS), chats, 60.0)
    for one in (by_chat, in_turn):
        prompts_per_answer = one.prompt_rows_per_s / one.tokens_per_s * chats.answer
        mean_prompt = 20 + 31
        assert prompts_per_answer == pytest.approx(mean_prompt * (1 - one.hit_rate), rel=0.1)
    if machines == 1:
        assert by_chat.hit_rate == in_turn.hit_rate
    else:
        assert by_chat.hit_rate > in_turn.hit_rate + 0.2
