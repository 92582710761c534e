"""Flags that are made from the fields of `ServeSettings`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import typer
from pydantic.fields import FieldInfo

from redraft.console.output import fail
from redraft.serving.settings import OPTIONS, SettingsError, read

_TYPES = (Enum, bool, int, float, Path)
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML file of settings, as `status --config` prints it; default: none."
    ),
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter, `settings`, is made of flags, one for each field, and of `--config`."""
    others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    def run(context: typer.Context, config: Path | None, **values: Any) -> None:
        options = {name: values.pop(name) for name in OPTIONS}
        flags = {name: value for name, value in options.items() if _is_given(context, name)}
        try:
            settings = read(flags, config)
        except SettingsError as error:
            fail(f"redraft {command.__name__}: {error}", code=2)
        command(settings, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        *(_parameter(name, field) for name, field in OPTIONS.items()),
        inspect.Parameter("config", keyword, default=None, annotation=ConfigOption),
        *(parameter.replace(kind=keyword) for parameter in others),
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a flag is on the command line; a default must not go before a variable or a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A field as typer takes it. What typer has no type for comes as text, which the field reads."""
    kind: Any = field.annotation
    default = field.default
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is not list and not (isinstance(kind, type) and issubclass(kind, _TYPES)):
        kind, default = str, default or None
    bounds = {type(bound): bound for bound in field.metadata}
    metavar = field.json_schema_extra["metavar"] if isinstance(field.json_schema_extra, dict) else None
    make = typer.Argument if name == "source" else typer.Option
    info = make(
        help=field.description,
        metavar=metavar if isinstance(metavar, str) else None,
        min=getattr(bounds.get(annotated_types.Ge), "ge", None),
        max=getattr(bounds.get(annotated_types.Le), "le", None),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, info]
    )
