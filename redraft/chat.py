"""Conversations as the text that the model continues: the chat template of a bundle or model folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from redraft import loose_json
from redraft.templates.renderer import RENDERER, CannotWrite, TemplateError
from redraft.text import TextCodec

ChatMessage = Mapping[str, Any]
"""`role` (user, assistant, system, developer, tool, ...) and `content`: a text, a list of parts such as
`{"type": "text", "text": "Hello"}`, or None for an assistant that only calls tools. Other fields reach the template as
they are."""


DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates of a model that has several: the usual one, and that of conversations with tools."""
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
"""The default template, and the folder of those that have other names."""
FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables of templates that are no options of theirs."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a reasoning model is to think; `none`: not at all."""
OPEN_END = "\ufdd0open end "
"""Follows the message that is to be continued while the template writes it. The space tells whether it cuts those."""


class TextOnly(ValueError):
    """A message has a part that is no text."""


def effort_options(effort: str | None) -> dict[str, Any]:
    """The variables with which an effort of reasoning reaches chat templates; none for None.

    Some templates read the effort, most only whether to think at all: as `enable_thinking`, or DeepSeek's and Granite's
    as `thinking`. Raises ValueError for an effort that does not exist.
    """
    if effort is None:
        return {}
    if effort not in get_args(Effort):
        raise ValueError(f"reasoning_effort: expected one of {', '.join(get_args(Effort))}, got {effort!r:.60}")
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


@dataclass(frozen=True)
class Writing:
    """How a conversation becomes a prompt. Raises ValueError for what does not go together."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's own variables, such as `enable_thinking`."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """What a template for retrieval quotes from."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the answer continues."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer; None: unless a message is continued."""
    sanitize_control_tokens: bool | None = None
    """Whether control tokens that messages spell stay text when the prompt is encoded; None: the server's choice."""

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: expected add_generation_prompt false beside it, got true")
        if taken := next((name for name in FIELDS if name in self.options), None):
            raise ValueError(f"chat_template_kwargs: expected {taken} as a field of its own, not in it")

    def variables(self) -> dict[str, Any]:
        """What a template is given beside messages, tools and special tokens."""
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        documents = None if self.documents is None else list(self.documents)
        return {**self.options, "documents": documents, "add_generation_prompt": opens}


NEXT_TURN = Writing()
"""The prompt for the next turn."""


class ChatTemplate:
    """How a model writes a conversation: its templates by name."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, Any] | None = None):
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens or {})
        self.source = self._sources.get(TOOL_USE) or self._sources.get(DEFAULT, "")
        """The one for conversations with tools."""
        self.takes_tools = "tools" in self.source
        """Whether it has a place for the tools that a model may call."""

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The templates of a folder. Raises FileNotFoundError if it holds none."""
        sources, config = _sources(folder)
        if not sources:
            raise FileNotFoundError(f"{folder}: no {TEMPLATE_FILE} and no chat_template in tokenizer_config.json")
        return cls(sources, special_tokens(config))

    def writes(self, text: str) -> bool:
        """Whether one of the templates spells a text."""
        return any(text in source for source in self._sources.values())

    def check(self) -> None:
        """Raises TemplateError for a template that cannot be read, and where none is the default."""
        for source in self._sources.values():
            RENDERER.check(source)
        self._chosen(tools=False)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        writing: Writing = NEXT_TURN,
    ) -> str:
        """A conversation as the prompt that the model continues. Raises ValueError for messages of another form, and
        TemplateError where the template cannot write them or refuses them."""
        source, written = self._chosen(bool(tools)), turns(messages)
        for turn in written:
            if turn["role"] == "developer" and "developer" not in source:
                turn["role"] = "system"
        if writing.continue_final_message:
            written[-1]["content"] += OPEN_END
        values = {**self._special_tokens, **writing.variables(), "tools": list(tools) if tools else None}
        try:
            text = RENDERER.render(source, {**values, "messages": written})
        except CannotWrite:
            # Most templates take the arguments of calls as values, DeepSeek's take texts.
            text = RENDERER.render(source, {**values, "messages": _with_argument_texts(written)})
        return _cut(text) if writing.continue_final_message else text

    def _chosen(self, tools: bool) -> str:
        """The template of a conversation with tools, or without."""
        if tools and TOOL_USE in self._sources:
            return self._sources[TOOL_USE]
        if DEFAULT not in self._sources:
            named = ", ".join(sorted(self._sources))
            raise TemplateError(f"the model has the chat templates {named}, none of which is the default")
        return self._sources[DEFAULT]


def special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a `tokenizer_config.json` by the names that templates know: `bos_token` and all others that
    end like it, and a list of those without a name."""
    named = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    tokens: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(extra := config.get(key), list):
            tokens["additional_special_tokens"] = [text for text in map(_token_text, extra) if text is not None]
        elif isinstance(extra, Mapping):
            tokens |= {name: text for name, value in extra.items() if (text := _token_text(value)) is not None}
    return tokens


def _token_text(value: Any) -> str | None:
    """A special token's text, which files have as it is or with the token's settings."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _cut(text: str) -> str:
    """A prompt up to the end of its last message."""
    end = text.rfind(OPEN_END.rstrip())
    if end < 0:
        raise ValueError("continue_final_message: the chat template leaves the last message out")
    return text[:end] if text.startswith(OPEN_END, end) else text[:end].rstrip()


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as templates expect it, which stays as it is if it is given again. Raises ValueError for messages
    of another form."""
    if not messages:
        raise ValueError("expected at least one message, got none")
    return [_turn(message, index) for index, message in enumerate(messages)]


def render_chat(folder: Path, messages: str | Sequence[ChatMessage], writing: Writing = NEXT_TURN) -> str:
    """A conversation, or one user turn given as a text, as the prompt that the model continues.

    Raises FileNotFoundError if the folder holds no chat template, ValueError for messages of another form, and
    TemplateError where the template cannot be read or refuses them.
    """
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return ChatTemplate.load(folder).render(given, writing=writing)


def encode_user_turn(folder: Path, codec: TextCodec, user: str) -> list[int]:
    """Token ids of one user turn as the model continues it: by the chat template, or as plain text where the folder has
    none that can be read."""
    try:
        text = render_chat(folder, user)
    except (FileNotFoundError, TemplateError):
        return codec.encode(user)
    return codec.encode(text, add_special_tokens=False)


def template_digest(folder: Path) -> str | None:
    """sha256 of a folder's default chat template; None where it has none that can be read."""
    try:
        source = _sources(folder)[0].get(DEFAULT)
    except TemplateError:
        return None
    return hashlib.sha256(source.encode()).hexdigest() if source is not None else None


def _turn(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates expect it: its content one text, the arguments of its tool calls JSON values, and nothing
    that is None: templates ask whether a field is there."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}]: expected a map with the texts role and content, got {message!r:.60}")
    content = _text(message.get("content"), message["role"], f"messages[{index}].content")
    turn = {name: value for name, value in message.items() if value is not None} | {"content": content}
    if "reasoning" in turn:  # vLLM's name of it, which templates do not know
        turn.setdefault("reasoning_content", turn.pop("reasoning"))
    if calls := turn.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise ValueError(f"messages[{index}].tool_calls: expected a list of calls, got {calls!r:.60}")
        turn["tool_calls"] = [_call(call, f"messages[{index}].tool_calls") for call in calls]
    return turn


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: expected a text or a list of text parts, got {content!r:.60}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise TextOnly(f"{where}[{index}]: expected a part of type text, got {kind or part!r:.60}: text only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{index}].text: expected a text, got {part.get('text')!r:.60}")
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
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**turn, "tool_calls": [with_text(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else {**turn}
        for turn in turns
    ]


def _named(value: Any) -> dict[str, str]:
    """The `chat_template` of a `tokenizer_config.json`, a text or a list of templates with names, by name. Raises
    TemplateError for what is neither."""
    if value is None or isinstance(value, str):
        return {} if value is None else {DEFAULT: value}
    try:
        sources = {entry["name"]: entry["template"] for entry in value}
    except (KeyError, TypeError):
        sources = {"": value}
    if not all(isinstance(text, str) for text in (*sources, *sources.values())):
        raise TemplateError(f"chat_template: expected a text or a list of name and template, got {value!r:.60}")
    return sources


def _sources(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """A folder's chat templates by name, and its tokenizer's configuration."""
    config_file, template_file = folder / "tokenizer_config.json", folder / TEMPLATE_FILE
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    sources = _named(config.get("chat_template"))
    if template_file.is_file():
        sources[DEFAULT] = template_file.read_text(encoding="utf-8")
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    return sources, config
