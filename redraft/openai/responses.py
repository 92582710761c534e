"""`POST /v1/responses`: text in, text out. What was said before comes with the request, since nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from redraft.openai.body import LOG_PROBS, MAX_ITEMS, RESPONSES, VERBOSITY, Body, Unserved
from redraft.openai.errors import ApiError, not_served
from redraft.openai.model import ServedModel
from redraft.openai.schemas import Conversation, Sampled, StreamOptions
from redraft.openai.structured.formats import TextFormat
from redraft.openai.structured.tools import AUTO, Choice, ResponsesTools
from redraft.openai.structured.use import tool_use
from redraft.openai.translate import Job, job, prompt_of
from redraft.request import INT32_MAX, MOST_ALTERNATIVES, Guide, clipped, shown

Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""The values of `include`. Those after the first are of items that no answer has."""
ROLES = ("system", "developer", "user", "assistant")
"""Those that messages have. What a tool said is another kind of item."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextOptions(Body):
    """The form of the answer."""

    UNSERVED: ClassVar[Unserved] = VERBOSITY

    format: TextFormat = TextFormat(type="text")


def _text_or_items(value: Any) -> str | list[dict[str, Any]]:
    items = isinstance(value, list) and len(value) <= MAX_ITEMS and all(isinstance(item, dict) for item in value)
    if items or isinstance(value, str):
        return value
    raise ValueError(f"expected a text or a list of at most {MAX_ITEMS} items")


class ResponsesBody(Sampled, Conversation):
    """The body, named and bounded as OpenAI's."""

    UNSERVED: ClassVar[Unserved] = RESPONSES
    LONG: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Annotated[str | list[dict[str, Any]], PlainValidator(_text_or_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    include: list[Included] = Field(default=[])
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    text: TextOptions = TextOptions()
    stream_options: StreamOptions | None = None
    tools: ResponsesTools = Field(default=[])
    tool_choice: Choice = AUTO
    parallel_tool_calls: bool = True

    @property
    def log_probs(self) -> bool:
        return LOG_PROBS in self.include

    @property
    def alternatives(self) -> int:
        return self.top_logprobs if self.log_probs else 0

    def guides(self) -> Iterator[tuple[str, Guide]]:
        yield from self.text.format.guides("text.format")
        yield from super().guides()


def responses_job(body: ResponsesBody, model: ServedModel) -> Job:
    """The job of a request. Raises ApiError."""
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input)
    if not messages:
        raise ApiError(400, "input: expected at least one message, got none", "input")
    try:
        prompt = prompt_of(messages, tools, model, "input", body.writing())
    except ApiError:
        if body.instructions:
            model.encode(body.instructions, "instructions")  # raises where they are too long by themselves
        raise
    return job(body, model, [prompt], 1, body.max_output_tokens, "max_output_tokens", "input", tools=tools)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of the input as messages: calls belong to the assistant's message before them, and thoughts to what comes
    after them."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        message = _message(item, f"input[{place}]")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" == message["role"] else {}
        if last and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif last and last["content"] is None and "tool_calls" not in last and "reasoning_content" not in message:
            last["content"] = message["content"]
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item of the input as a message."""
    kind = item.get("type", "message")
    if kind == "message":
        if (role := item.get("role")) not in ROLES:
            raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, got {shown(role)}", "input")
        return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        if not isinstance(name := item.get("name"), str):
            raise ApiError(400, f"{where}.name: expected a function's name, got {shown(name)}", "input")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "reasoning":
        return {"role": "assistant", "content": None, "reasoning_content": _thoughts(item, where)}
    text = "expected message, reasoning, function_call or function_call_output"
    raise not_served("input", f"{where}.type: {text}, got {clipped(str(kind))!r}")


def _thoughts(item: dict[str, Any], where: str) -> str:
    """The thoughts of an item, or else their summary."""
    return _content(item.get("content") or [], f"{where}.content") or _content(
        item.get("summary") or [], f"{where}.summary"
    )


def _content(content: Any, where: str) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a text or a list of text parts, got {shown(content)}", "input")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise not_served(
                "input", f"{where}[{place}]: expected a part of text, got {shown(kind or part)}: text only"
            )
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}[{place}].text: expected a text, got {shown(part.get('text'))}", "input")
        texts.append(part["text"])
    return "\n".join(texts)
