"""What clients say about tools: functions that the model may call, and whether it must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, field_validator

from redraft.openai.errors import not_served
from redraft.request import shown

MAX_TOOLS = 128
Mode = Literal["none", "auto", "required"]


class Function(BaseModel):
    """A function that the model may call. The chat template reads it, so that fields of other names are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None or {}: the function takes nothing."""
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        types = (schema or {}).get("type") or "object"  # clients leave the type out
        if "object" not in (types if isinstance(types, list) else [types]):
            raise ValueError(f"expected a schema of type object, got {shown(types)}")
        return schema


class ChatTool(BaseModel):
    """A tool in the form of chats."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class ResponsesTool(Function):
    """A tool in the form of responses."""

    type: Literal["function"]


def _no_hosted_tools(tools: Any) -> Any:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "function"):
            expected = "no hosted tools are served: expected function"
            raise not_served("tools", f"tools[{index}].type: {expected}, got {shown(kind)}")
    return tools


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer calls tools: `required` must, and with a `name` it must call that function, once."""

    mode: Mode
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode == "required"

    @property
    def for_responses(self) -> str | dict[str, str]:
        """The choice in the form of responses."""
        return self.mode if self.name is None else {"type": "function", "name": self.name}

    def __str__(self) -> str:
        return self.mode if self.name is None else f"the function {self.name!r}"


def _choice(value: Any) -> ToolChoice:
    """A choice in the form of chats or in that of responses."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice("required", name)
    raise ValueError(f"expected none, auto, required or a function with its name, got {shown(value)}")


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)]
ResponsesTools = Annotated[list[ResponsesTool], BeforeValidator(_no_hosted_tools), Field(max_length=MAX_TOOLS)]
AnyToolChoice = Annotated[ToolChoice, PlainValidator(_choice)]
AUTO = ToolChoice("auto")
