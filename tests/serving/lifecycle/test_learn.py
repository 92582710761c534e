"""A service that learns, from the first answer that it stores until it is turned off again, with the real commands.

Slow, as the default model is served, trained on and built. It would catch a command that no longer hands the next one
what it needs, a learned drafter that changes a text, and a service that stores or runs on when it was told not to.
"""

from __future__ import annotations

import os

import pytest

from redraft.serving import launcher
from tests.conftest import wait_until
from tests.serving.client_side import Service, start
from tests.serving.lifecycle.starting import assert_nothing_is_left, redraft

pytestmark = pytest.mark.slow

ANSWERS, TOKENS = 40, 24
GENERATION, STORED = "redraft_drafter_generation", 'redraft_answers_to_learn_total{outcome="stored"}'


def answers(service: Service, count: int) -> list[str]:
    """What it answers to so many different prompts."""
    fields = {"max_tokens": TOKENS, "min_length": TOKENS, "exclude_input_in_output": True}
    return [service.generate({"text_input": f"Question {i}: ", **fields})["text_output"] for i in range(count)]


def test_it_stores_learns_swaps_goes_back_and_is_turned_off(smollm2_bundle, tmp_path, run_folder):
    home, folder = os.environ | {"REDRAFT_HOME": str(tmp_path / "home")}, tmp_path / "answers"

    def run(*words: str) -> None:
        with redraft(*words, "--run-dir", str(run_folder), env=home) as process:
            try:
                said, _ = process.communicate(timeout=1800)  # at the lowest priority
            finally:
                process.kill()
        assert process.returncode == 0, said

    service = start(run_folder, smollm2_bundle, learn=folder)
    texts = answers(service, ANSWERS)
    wait_until(lambda: service.metrics().get(STORED) == ANSWERS, 120)  # a file holds the answers of a minute
    run("learn", str(folder), "--positions", "64", "--no-swap")
    assert service.metrics()[GENERATION] == 0
    run("swap", "--drafter", str(folder / "generations/1"))
    assert service.metrics()[GENERATION] == 1
    assert answers(service, 4) == texts[:4]
    run("swap", "--back")
    assert service.metrics()[GENERATION] == 0
    launcher.stop(run_folder)
    assert_nothing_is_left(run_folder)
    service = start(run_folder, smollm2_bundle)
    assert answers(service, 1) == texts[:1]
    assert not any(name.startswith("redraft_answers_to_learn_total{") for name in service.metrics())
