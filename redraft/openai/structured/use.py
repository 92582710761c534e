"""The tools of one request: which there are, whether one must be called, and how the answer is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redraft.loose_json import finite
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.structured.forms import CallGrammar, ToolForm
from redraft.openai.structured.reader import CallReader
from redraft.openai.structured.tools import Function, ToolChoice
from redraft.request import Guide
from redraft.text import TextCodec

OPENAI_FORMATS = ("response_format", "text.format")


@dataclass(frozen=True)
class ToolUse:
    """What an answer may call."""

    functions: Sequence[Function]
    called: Sequence[Function]
    """Those that it may call."""
    form: ToolForm
    forced: bool
    """Whether it must call."""
    several: bool
    codec: TextCodec

    @cached_property
    def grammar(self) -> CallGrammar:
        """The grammar of the calls. Raises ApiError where arguments cannot be kept to their schema: calls that the
        model chooses freely need none."""
        return self.form.grammar(self.called, self.several, self.codec)

    @property
    def special(self) -> bool:
        """Whether special tokens mark the calls, which the text must have then."""
        return any(self.codec.special_id(mark) is not None for mark in self.form.marks)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The functions as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    name: finite(value)
                    for name, value in function.model_dump(exclude_unset=True).items()
                    if value is not None and name != "type"
                },
            }
            for function in self.functions
        ]

    @property
    def opening(self) -> str:
        """What a forced call begins with, which the prompt ends with unless the answer may begin with thoughts."""
        return "".join(self.grammar.opening) if self.forced else ""

    def guide(self, field: str, wanted: Guide | None, thinks: bool) -> Guide | None:
        """The guide of the answer, where the request's field wants a format of an answer without calls. Raises ApiError
        where the two do not go together. OpenAI's fields are about an answer's text; a forced call has none."""
        if wanted is None or (self.forced and field in OPENAI_FORMATS):
            if not self.forced:
                return None
            return self.grammar.with_opening(self.codec) if thinks else self.grammar.after_opening()
        if self.forced:
            text = f"tool_choice and {field}: a call has another format: expected tool_choice none or auto"
            raise ApiError(text, "tool_choice")
        if wanted.kind not in ("json", "json_schema"):
            raise ApiError(f"tools and {field}: expected JSON as the format beside tools", "tools")
        return self.grammar.or_json(field, wanted, self.codec)

    def reader(self, thinks: bool) -> CallReader:
        """The reader of one answer."""
        tools = {function.name: function.parameters or {} for function in self.functions}
        reader = CallReader(self.form.read, tools, self.form.new_id, None if self.several else 1, self.forced)
        reader.push("" if thinks else self.opening)
        return reader


def tool_use(functions: Sequence[Function], choice: ToolChoice, several: bool, model: ServedModel) -> ToolUse | None:
    """The tools of a request; None where it has none to call. Raises ApiError."""
    if choice.forced and not functions:
        raise ApiError(f"tool_choice: expected tools beside it, got {choice} without any", "tool_choice")
    names = Counter(function.name for function in functions)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ApiError(f"tools: expected a name once, got {twice!r} {names[twice]} times", "tools")
    if choice.name is not None and choice.name not in names:
        known = ", ".join(names)
        raise ApiError(f"tool_choice: expected one of the tools {known}, got {choice.name!r}", "tool_choice")
    if not functions or choice.mode == "none":
        return None
    several = several and choice.name is None
    called = [function for function in functions if choice.name in (None, function.name)]
    return ToolUse(functions, called, model.tool_form, choice.forced, several, model.codec)
