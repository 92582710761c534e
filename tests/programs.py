"""Every command line of the repository, with the options that it takes: `redraft`'s commands, the scripts of benchmarks
and studies, the launcher of containers, and the processes that are started by hand."""

from __future__ import annotations

import argparse
import enum
import importlib
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from benchmarks.command import app_of
from redraft.cli import COMMANDS, application

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ("redraft.worker.server", "redraft.openai.server", "redraft.serving.guard.server", "deploy.launch")
"""Modules whose parser is argparse's"""
MAIN = re.compile(r'^if __name__ == "__main__":\n    (?:run|run_script|typer\.run)\((main|app)\)', re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """An option, or an argument, which has no names."""

    names: tuple[str, ...]
    type: Any
    metavar: str
    help: str
    is_flag: bool
    repeats: bool
    required: bool
    default: Any = field(default=None, hash=False)
    """What it is where it is not given"""
    shows_default: bool = False
    """Whether --help adds the default to the help's text"""
    count: int = 1
    """Values that it takes at a time"""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes; none where it takes any."""
        if isinstance(self.type, type) and issubclass(self.type, enum.Enum):
            return tuple(str(member.value) for member in self.type)
        if typing.get_origin(self.type) is typing.Literal:
            return tuple(map(str, typing.get_args(self.type)))
        if re.fullmatch(r"\[[\w|]+\]", self.metavar):
            return tuple(self.metavar[1:-1].split("|"))
        return ()


@dataclass(frozen=True)
class Program:
    """A command line."""

    name: str
    """As it is typed: `redraft build`, `python -m benchmarks.speed.kernels`"""
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Option, ...]

    def option(self, name: str) -> Option | None:
        """The option of a name."""
        return next((option for option in self.options if name in option.names), None)


@cache
def programs() -> dict[str, Program]:
    """All programs by name."""
    return {program.name: program for program in _programs()}


def _programs() -> Iterator[Program]:
    for name in COMMANDS:
        yield from _of_typer(f"redraft {name}", typer.main.get_command(application(name)).commands[name])
    for file in sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "studies").rglob("*.py")]):
        if main := MAIN.search(file.read_text()):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            target = getattr(importlib.import_module(module), main[1])
            app = target if isinstance(target, typer.Typer) else app_of(target)
            yield from _of_typer(f"python -m {module}", typer.main.get_command(app))
    for module in PROCESSES:
        yield _of_argparse(module)


def _of_typer(name: str, command: Any) -> Iterator[Program]:
    if commands := getattr(command, "commands", None):
        for word, subcommand in commands.items():
            yield from _of_typer(f"{name} {word}", subcommand)
        return
    options, arguments = [], []
    for param in command.params:
        is_option = param.param_type_name == "option"
        annotation = param.type_descriptor.annotation
        option = Option(
            names=(*param.opts, *param.secondary_opts) if is_option else (),
            type=annotation,
            metavar=param.metavar or "",
            help=param.help or "",
            is_flag=is_option and param.is_flag,
            repeats=param.nargs == -1 or bool(getattr(param, "multiple", False)),
            required=param.required,
            default=param.default,
            shows_default=bool(param.show_default),
            count=max(param.nargs, 1),
        )
        (options if is_option else arguments).append(option)
    yield Program(name, command.help or "", tuple(options), tuple(arguments))


class _Parser(Exception):
    """Carries the parser out of a program that would use it."""


def _of_argparse(module: str) -> Program:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(parser)

    with patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            importlib.import_module(module).main([])
        except _Parser as stopped:
            (parser,) = stopped.args
    options = tuple(
        Option(
            names=tuple(action.option_strings),
            type=action.type or str,
            metavar="",
            help=action.help or "",
            is_flag=action.nargs == 0,
            repeats=False,
            required=action.required,
            default=action.default,
        )
        for action in parser._actions
    )
    name = "deploy/launch.py" if module == "deploy.launch" else f"python -m {module}"
    return Program(name, parser.description or "", options, ())
