"""The bundle as the front end sees it: name, tokenizer, chat template, methods and limits; no weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from redraft.bundle.config import BundleConfig
from redraft.bundle.generation import GenerationConfig
from redraft.chat import NEXT_TURN, ChatTemplate, TextOnly, Writing, turns
from redraft.control_tokens import ControlTokens
from redraft.errors import Code
from redraft.openai.errors import ApiError, in_client_terms, not_served
from redraft.openai.structured.forms import FORMS, HERMES, tool_form, written_out
from redraft.openai.structured.thoughts import MARKS, NO_THOUGHTS, THINK, Thinking, marks_of, thinking_after
from redraft.request import AUTO_REGRESSIVE, InvalidRequest, shown
from redraft.serving.settings import Defaults, ServeSettings
from redraft.templates.renderer import TemplateError
from redraft.text import TextCodec

log = logging.getLogger("redraft.openai")


class ServedModel:
    """What requests are checked against and answers are written with. Raises BundleError, or OSError, for a folder
    that is no bundle. It may be used from any thread. Where `bundle` is a link, it may lead to another bundle later;
    requests may then name the `former` ones too, since not all clients change at once."""

    def __init__(self, bundle: Path, settings: ServeSettings | None = None, former: frozenset[str] = frozenset()):
        self._link, self._former = bundle, former
        self._settings = settings = settings or ServeSettings()
        self._folder = bundle = bundle.resolve()
        config = BundleConfig.read(bundle)
        self.name = settings.model_name or config.name
        self.created = int(time.time())
        self.defaults = (
            GenerationConfig.read(bundle) if settings.generation_config == Defaults.auto else GenerationConfig()
        )
        self.codec = TextCodec.load(bundle / "tokenizer.json")
        self.max_len = config.limits.max_len
        self.vocab_size = config.target.vocab_size
        self.methods = tuple(dict.fromkeys((*config.methods, AUTO_REGRESSIVE)))
        self._limits = self.codec.limits(self.max_len)
        try:
            self._template: ChatTemplate | None = ChatTemplate.load(bundle)
            self._template.check()
        except FileNotFoundError:
            self._template = None
        except TemplateError as error:
            log.warning("chats are refused, completions are served: %s", error)
        shown_marks = marks_of(self._template.source, self.codec) if self._template else None
        reasoning_parser, tool_parser = settings.reasoning_parser, settings.tool_parser
        named_marks = None if reasoning_parser in (None, NO_THOUGHTS) else MARKS[reasoning_parser]
        self._marks = None if reasoning_parser == NO_THOUGHTS else named_marks or shown_marks or THINK
        self._thinks = named_marks is not None or shown_marks is not None
        """Whether it is known to think. Answers of others may begin with thoughts too, but no format waits for them."""
        takes_tools = self._template is not None and self._template.takes_tools
        shown_form = tool_form(self._template.source) if self._template and takes_tools else None
        self.tool_form = FORMS[tool_parser] if tool_parser else shown_form or HERMES
        """How its text calls tools."""
        self._lists_tools = not takes_tools or (shown_form is None and tool_parser is None)
        """Whether a system message lists them, with the form that calls have: the template has no place for them, or
        asks for a form that is not known."""

    @property
    def replaced(self) -> bool:
        """Whether the link leads to another bundle now."""
        return self._link.resolve() != self._folder

    def successor(self) -> ServedModel:
        """The model of the bundle to which the link leads now."""
        return ServedModel(self._link, self._settings, self._former | {self.name})

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not this one; None is this one."""
        if name not in (None, self.name, *self._former):
            raise ApiError(
                f"the model {shown(name)} does not exist: this server has {self.name!r}, and no adapters of it; "
                "`redraft serve --model-name` names it otherwise",
                "model",
                Code.MODEL_NOT_FOUND,
            )

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]],
        param: str = "messages",
        writing: Writing = NEXT_TURN,
    ) -> str:
        """The prompt of a conversation, the field `param`. Raises ApiError where the template refuses it."""
        if self._template is None:
            raise not_served(param, "this model has no chat template; /v1/completions continues a text as it is")
        writing = replace(writing, options={**self._settings.default_chat_template_kwargs, **writing.options})
        if self._sanitized(writing):
            mark = self._control_tokens.mark
            messages, tools = mark(messages), mark(tools)
            writing = replace(writing, options=mark(writing.options), documents=mark(writing.documents))
        try:
            if self._lists_tools:
                text = self._template.render(written_out(turns(messages), tools), writing=writing)
            else:
                text = self._template.render(messages, tools, writing)
        except TextOnly as error:
            raise not_served(param, str(error)) from None
        except ValueError as error:
            raise ApiError(str(error), param) from None
        return text

    def thinking_after(self, prompt: str, continued: str = "") -> Thinking | None:
        """How thoughts may begin the answer to a prompt, which ends with a `continued` message; None where they may
        not."""
        return thinking_after(prompt, self.codec, self._marks, self._thinks, continued) if self._marks else None

    def check_unicode(self, text: str, param: str) -> None:
        """Raises ApiError for a text that no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(f"{param}: expected Unicode text, got a lone surrogate", param) from None

    def encoder(self, writing: Writing) -> TextCodec | ControlTokens:
        """What encodes the text of `chat_text`."""
        return self._control_tokens if self._sanitized(writing) else self.codec

    def _sanitized(self, writing: Writing) -> bool:
        wanted = writing.sanitize_control_tokens
        return self._template is not None and (self._settings.sanitize_control_tokens if wanted is None else wanted)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        assert self._template is not None
        return ControlTokens(self.codec, self._template)

    def encode(
        self,
        text: str,
        param: str,
        encoder: TextCodec | ControlTokens | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text. Raises ApiError where it is empty, is no Unicode, or cannot fit the context."""
        self.check_unicode(text, param)
        try:
            self._limits.check_text(len(text.encode()))
        except InvalidRequest as error:
            raise in_client_terms(error, {"text": param}) from None
        return self.check_ids((encoder or self.codec).encode(text, add_special_tokens), param)

    @property
    def text_bytes(self) -> int:
        """Bytes that a text in the context may have at most."""
        return self._limits.text_bytes

    def check_ids(self, ids: list[int], param: str) -> list[int]:
        """The token ids of a prompt, as they are. Raises ApiError where they cannot be a prompt of this model."""
        if not ids:
            raise ApiError(f"{param}: expected at least one token, got none", param)
        try:
            self._limits.check_tokens(len(ids))
        except InvalidRequest as error:
            raise ApiError(error.message, param, error.code) from None
        if max(ids) >= self.vocab_size:
            raise ApiError(f"{param}: expected token ids below {self.vocab_size}, got {max(ids)}", param)
        return ids

    def check_method(self, method: str | None) -> None:
        """Raises ApiError for a drafting method that the bundle does not have."""
        if method is not None and method not in self.methods:
            known = ", ".join(self.methods)
            raise ApiError(f"drafting_method: expected one of {known}, got {shown(method)}", "drafting_method")

    def token_text(self, token_id: int) -> str:
        """One token as text; one that is no whole characters as `bytes:` and `\\xe2` for each of its bytes."""
        data = self.codec.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
