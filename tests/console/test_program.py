"""Programs end with one line where an option or an input is wrong."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer

from redraft.console.program import run


def command(count: Annotated[int, typer.Option(min=1)] = 1) -> None:
    if count == 2:
        raise typer.BadParameter(f"{'prompts ' * 20}are in no known form")
    if count == 3:
        raise typer.Exit(3)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 0, ""),
        (["--count", "2"], 2, f"program: {'prompts ' * 20}are in no known form\n"),
        (["--count", "3"], 3, ""),
        (["--count", "0"], 2, "program: Invalid value for '--count': "),
        (["--cuont", "1"], 2, "program: No such option: --cuont"),
    ],
)
@pytest.mark.parametrize("as_app", [False, True])
def test_what_is_wrong_takes_one_line(monkeypatch, capsys, arguments, status, said, as_app):
    app = typer.Typer()
    app.command()(command)
    monkeypatch.setattr("sys.argv", ["program.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run("program", app if as_app else command)
    assert ended.value.code == status
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert shown.count("\n") == bool(said)
