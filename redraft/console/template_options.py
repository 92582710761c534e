"""A chat template's own options on a command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

_OPTIONS = TypeAdapter(dict[str, Any])


def template_options(text: str) -> dict[str, Any]:
    """Options from a JSON object. Raises BadParameter for another text."""
    try:
        return _OPTIONS.validate_json(text)
    except ValidationError:
        raise typer.BadParameter(f"expected a JSON object, got {text!r:.60}") from None


TemplateOptions = Annotated[
    dict | None,
    typer.Option(
        "--chat-template-kwargs",
        parser=template_options,
        metavar="JSON",
        help="Options of the model's chat template, such as '{\"enable_thinking\": false}'; default: none.",
    ),
]
