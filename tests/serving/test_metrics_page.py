"""The page that both metrics ports have."""

from __future__ import annotations

import json

import pytest

from redraft.learning.generations import Generation
from redraft.metrics import read
from redraft.serving.metrics_page import BUNDLE, STATE, metrics_page


@pytest.mark.parametrize(
    ("state", "restarts", "failures"),
    [
        (None, 0, None),
        ("{", 0, None),
        ({"worker_restarts": 3}, 3, None),
        ({"worker_restarts": 2, "rank_failures": {"0": 1, "-1": 4}}, 2, 5),
    ],
)
def test_the_supervisors_counts_are_there_as_far_as_its_file_has_them(tmp_path, state, restarts, failures):
    if state is not None:
        (tmp_path / STATE).write_text(state if isinstance(state, str) else json.dumps(state))
    values = read(metrics_page(tmp_path / "worker.sock", None).decode())
    assert (values["worker_restarts"], values.get("rank_failures"), values["worker_up"]) == (restarts, failures, 0)


def test_the_engines_metrics_are_there_while_it_answers(tmp_path):
    page = metrics_page(tmp_path / "worker.sock", "# TYPE redraft_x gauge\nredraft_x 4.0\n")
    assert read(page.decode()) == {"worker_up": 1, "worker_restarts": 0, "drafter_generation": 0, "x": 4}


def test_the_generation_is_that_of_the_bundle_which_is_served(tmp_path):
    for number in (1, 2):
        (tmp_path / f"bundle-{number}").mkdir()
        Generation(number=number).write(tmp_path / f"bundle-{number}")
        (tmp_path / BUNDLE).unlink(missing_ok=True)
        (tmp_path / BUNDLE).symlink_to(f"bundle-{number}")
        assert read(metrics_page(tmp_path / "worker.sock", "").decode())["drafter_generation"] == number
