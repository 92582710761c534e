"""The items of a response's output: thoughts, messages and calls of functions, each as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, dict[str, Any]]
"""What follows `response.` in an event's type, and its data but for the item's place."""


@dataclass
class MessageItem:
    """A message of one text."""

    id: str
    text: str = ""
    log_probs: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> list[Event]:
        """The events before its first piece."""
        location = {"item_id": self.id, "content_index": 0}
        item = self.whole("in_progress") | {"content": []}
        return [("output_item.added", {"item": item}), ("content_part.added", {**location, "part": self._part()})]

    def add(self, text: str, log_probs: list[dict[str, Any]]) -> Event:
        """The event of a piece."""
        self.text += text
        self.log_probs += log_probs
        location = {"item_id": self.id, "content_index": 0}
        return "output_text.delta", {**location, "delta": text, "logprobs": log_probs}

    def end(self) -> list[Event]:
        """The events after its last piece."""
        location = {"item_id": self.id, "content_index": 0}
        text = {"text": self.text, "logprobs": self.log_probs}
        return [("output_text.done", location | text), ("content_part.done", {**location, "part": self._part()})]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it is."""
        content = [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.log_probs}


@dataclass
class ReasoningItem:
    """What the model thought before the rest."""

    id: str
    text: str = ""

    def begin(self) -> list[Event]:
        """The events before its first piece."""
        location = {"item_id": self.id, "content_index": 0}
        item = self.whole("in_progress") | {"content": []}
        return [("output_item.added", {"item": item}), ("content_part.added", {**location, "part": self._part()})]

    def add(self, text: str) -> Event:
        """The event of a piece."""
        self.text += text
        return "reasoning_text.delta", {"item_id": self.id, "content_index": 0, "delta": text}

    def end(self) -> list[Event]:
        """The events after its last piece."""
        location = {"item_id": self.id, "content_index": 0}
        return [
            ("reasoning_text.done", {**location, "text": self.text}),
            ("content_part.done", {**location, "part": self._part()}),
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it is."""
        return {"id": self.id, "type": "reasoning", "summary": [], "content": [self._part()], "status": status}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


@dataclass
class CallItem:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str = ""

    def begin(self) -> list[Event]:
        """The events before its first piece."""
        return [("output_item.added", {"item": self.whole("in_progress")})]

    def add(self, arguments: str) -> Event:
        """The event of a piece."""
        self.arguments += arguments
        return "function_call_arguments.delta", {"item_id": self.id, "delta": arguments}

    def end(self) -> list[Event]:
        """The events after its last piece."""
        done = {"item_id": self.id, "name": self.name, "arguments": self.arguments}
        return [("function_call_arguments.done", done)]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it is."""
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function_call", "status": status, **call}
