"""Options of the commands that are numbers."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from redraft.cli import application, distill, drafter, service, train, tune


def app_of(command) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


TUNE = ["--bundle", "b", "--prompts", "p"]
TRAIN = ["--model", ".", "--data", "d", "--output", "o"]


@pytest.mark.parametrize(
    ("app", "arguments", "option"),
    [
        (app_of(tune.main), TUNE, "--minutes"),
        (app_of(drafter.main), ["--model", "."], "--hours"),
        (app_of(distill.main), ["--model", ".", "--output", "o"], "--self-written"),
        (app_of(train.main), TRAIN, "--peak-rate"),
        (app_of(train.main), TRAIN, "--hidden-weight"),
        (app_of(service.serve), ["--bundle", "b"], "--start-timeout-s"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_what_is_no_number_is_refused(app, arguments, option, value):
    done = CliRunner().invoke(app, [*arguments, option, value])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("command", ["build", "chat", "doctor", "serve", "swap", "stop", "status", "generate"])
def test_every_option_is_readable_in_a_narrow_terminal(command):
    app = application(command)
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert done.exit_code == 0
    options = [name for param in get_command(app).commands[command].params for name in param.opts]
    assert [name for name in options if name.startswith("--") and name not in done.output] == []
    assert "…" not in done.output
