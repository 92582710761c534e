"""Conversations as the text that the model continues: the chat template of a bundle or model folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redraft import loose_json

Message = Mapping[str, Any]
"""`role` (user, assistant, system, developer, tool, ...) and `content`: a text, a list of parts such as
`{"type": "text", "text": "Hello"}`, or None for an assistant that only calls tools. Other fields reach the template as
they are."""


class TextOnly(ValueError):
    """A message has a part that is no text."""


class ChatTemplate:
    """How a model writes a conversation. Raises TemplateError for a source that is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens or {})
        self._knows_developers = "developer" in source
        self.source = source
        self.takes_tools = "tools" in source
        """Whether it has a place for the tools that a model may call."""

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The template of a folder. Raises FileNotFoundError if it holds none."""
        source, config = _source(folder)
        if source is None:
            raise FileNotFoundError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
        return cls(source, {n: config[n] for n in ("bos_token", "eos_token") if isinstance(config.get(n), str)})

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt for the next turn. Raises ValueError for messages of another form or that the template cannot
        write, and TemplateError where it refuses them."""
        given = turns(messages)
        for turn in given:
            if turn["role"] == "developer" and not self._knows_developers:
                turn["role"] = "system"
        for conversation in (given, _with_argument_texts(given)):  # most templates take values, DeepSeek's take texts
            try:
                return self._template.render(
                    messages=conversation,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=True,
                    **self._special_tokens,
                )
            except TemplateError:
                raise
            except Exception as error:  # a template is a program: it may do anything with fields it does not expect
                failure = type(error).__name__
        raise ValueError(f"the chat template cannot write these messages: {failure}")


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as templates expect it, which stays as it is if it is given again. Raises ValueError for messages
    of another form."""
    if not messages:
        raise ValueError("expected at least one message, got none")
    return [_turn(message, place) for place, message in enumerate(messages)]


def render_chat(folder: Path, messages: str | Sequence[Message]) -> str:
    """The prompt for the next turn of a conversation, or for one user turn given as a text.

    Raises FileNotFoundError if the folder holds no chat template, ValueError for messages of another form, and
    TemplateError where the template refuses them.
    """
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return ChatTemplate.load(folder).render(given)


def user_prompt(folder: Path, user: str) -> str:
    """One user turn as the model continues it: by the chat template, or as it is where the folder has none."""
    try:
        return render_chat(folder, user)
    except FileNotFoundError:
        return user


def template_digest(folder: Path) -> str | None:
    """sha256 of a folder's chat template; None where it has none."""
    source, _ = _source(folder)
    return hashlib.sha256(source.encode()).hexdigest() if source is not None else None


def _turn(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: its content one text, the arguments of its tool calls JSON values, and nothing
    that is None: templates ask whether a field is there."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{place}]: expected a map with the texts role and content, got {message!r:.60}")
    content = _text(message.get("content"), message["role"], f"messages[{place}].content")
    turn = {name: value for name, value in message.items() if value is not None} | {"content": content}
    if "reasoning" in turn:  # vLLM's name of it, which templates do not know
        turn.setdefault("reasoning_content", turn.pop("reasoning"))
    if calls := turn.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise ValueError(f"messages[{place}].tool_calls: expected a list of calls, got {calls!r:.60}")
        turn["tool_calls"] = [_call(call, f"messages[{place}].tool_calls") for call in calls]
    return turn


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: expected a text or a list of text parts, got {content!r:.60}")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise TextOnly(f"{where}[{place}]: expected a part of type text, got {kind or part!r:.60}: text only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{place}].text: expected a text, got {part.get('text')!r:.60}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments, a JSON text in OpenAI's API, are the object that templates write."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected function.name and function.arguments, got {call!r:.60}")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(value: Any) -> Mapping[str, Any]:
    """A call's arguments as an object, which all templates can write. What the model wrote wrongly, or was cut off, is
    read as far as it goes: clients send back what the answer had."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # it stays a text
            value = loose_json.read(value or "{}")
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else {"arguments": value}


def _with_argument_texts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose calls have their arguments as JSON texts."""

    def with_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}

    return [
        {**turn, "tool_calls": [with_text(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else {**turn}
        for turn in turns
    ]


def _source(folder: Path) -> tuple[str | None, dict]:
    """A folder's chat template, and its tokenizer's configuration."""
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    return (source if isinstance(source, str) else None), config


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes what HTML would not take."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _now(form: str) -> str:
    """Today's date, as templates of Llama 3 and Mistral write it."""
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
