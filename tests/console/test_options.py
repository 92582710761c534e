"""Options of the commands that are numbers."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

import distill
import drafter
import train_drafter
import tune
from redraft.serving import commands


def app_of(command) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


TUNE = ["--bundle", "b", "--prompts", "p"]
TRAIN = ["--model", "m", "--data", "d", "--output", "o"]
PLAN = ["plan", "p", "--model", "m", "--engine", "e", "--teacher", "t"]


@pytest.mark.parametrize(
    ("app", "arguments", "option"),
    [
        (app_of(tune.main), TUNE, "--minutes"),
        (drafter.app, PLAN, "--hours"),
        (app_of(distill.main), ["--model", "m", "--output", "o"], "--self-written"),
        (app_of(train_drafter.main), TRAIN, "--peak-rate"),
        (app_of(train_drafter.main), TRAIN, "--hidden-weight"),
        (app_of(commands.serve), ["--bundle", "b"], "--start-timeout-s"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_what_is_no_number_is_refused(app, arguments, option, value):
    done = CliRunner().invoke(app, [*arguments, option, value])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}'" in done.output
