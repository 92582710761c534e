"""Conversations whose messages are text only: control tokens that they spell stay text, the template's are tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redraft.chat import ChatTemplate
from redraft.text import TextCodec

BEGIN, END = "\ufdd1", "\ufdd2"
"""Stand around a control token that a message spells. Unicode has them for private use; messages lose theirs."""
BEGIN_FORMS, END_FORMS = r"(?:\ufdd1|\\ufdd1)", r"(?:\ufdd2|\\ufdd2)"
"""Also as a template may write them, where it writes JSON in ASCII."""


class ControlTokens:
    """The control tokens of a model: its special tokens, and what else of its added tokens its template writes."""

    def __init__(self, codec: TextCodec, template: ChatTemplate):
        contents = sorted(
            (text for text, special in codec.added_tokens.items() if special or template.writes(text)),
            key=len,
            reverse=True,
        )
        token = "|".join(map(re.escape, contents)) or "(?!)"
        self._token = re.compile(token)
        self._marked = re.compile(f"{BEGIN_FORMS}({token}){END_FORMS}|{BEGIN_FORMS}|{END_FORMS}|({token})")
        # The tokenizer spells them in a way that no message does, so that one pass encodes the whole prompt.
        self._codec = codec.respelled({text: f"{BEGIN}{text}{END}" for text in contents})

    def mark(self, value: Any) -> Any:
        """Messages, tools or other values of JSON with marks around the control tokens in their texts."""
        if isinstance(value, str):
            return self._token.sub(f"{BEGIN}\\g<0>{END}", value.replace(BEGIN, "").replace(END, ""))
        if isinstance(value, Mapping):
            return {name: self.mark(item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that was written from marked values."""

        def respell(match: re.Match[str]) -> str:
            plain, control = match.groups()
            return f"{BEGIN}{control}{END}" if control else plain or ""

        return self._codec.encode(self._marked.sub(respell, text), add_special_tokens)
