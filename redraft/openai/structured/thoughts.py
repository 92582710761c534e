"""What a reasoning model thinks before it answers, told apart from the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from redraft.openai.structured.forms import terminal
from redraft.text import TextCodec, overlap


@dataclass(frozen=True)
class ThoughtMarks:
    """The texts, or special tokens, between which a family of models thinks."""

    begin: str
    end: str


THINK = ThoughtMarks("<think>", "</think>")
MARKS = {
    "think": THINK,
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "seed_oss": ThoughtMarks("<seed:think>", "</seed:think>"),
    "gemma4": ThoughtMarks("<|channel>thought", "<channel|>"),
}
"""By the names that `--reasoning-parser` takes."""

NO_THOUGHTS = "none"
"""The value of `--reasoning-parser` that leaves thoughts in the text."""


def marks_of(template: str, codec: TextCodec) -> ThoughtMarks | None:
    """The marks that a chat template has, or else a vocabulary; None where neither does."""
    used = (marks for marks in MARKS.values() if marks.end in template)
    tokens = (marks for marks in MARKS.values() if len(codec.encode_part(marks.end)) == 1)
    return next(used, None) or next(tokens, None)


@dataclass(frozen=True)
class Thought:
    """A piece of the thoughts."""

    text: str


@dataclass(frozen=True)
class Thinking:
    """How the answer to one prompt may begin."""

    codec: TextCodec
    marks: ThoughtMarks
    begun: bool
    """Whether the prompt ends with the mark with which thoughts begin."""
    expected: bool
    """Whether the model is known to think, so that a format begins after its thoughts."""

    def grammar(self) -> str:
        """Rules in Lark, of which `before` is the thoughts before a guided text."""
        begin, end = (terminal(mark, self.codec) for mark in (self.marks.begin, self.marks.end))
        return "\n".join(
            (
                "before: thoughts WS?" if self.begun else f"before: (WS? {begin} thoughts)? WS?",
                f"thoughts: TEXT? {end}" if self.special else f"thoughts[lazy]: /(?s:.*){_escaped(self.marks.end)}/",
                "TEXT: /(?s:.+)/",
                r"WS: /[ \t\r\n]{1,8}/",
            )
        )

    @property
    def special(self) -> bool:
        """Whether the marks are special tokens, which the text must have then."""
        return self.codec.special_id(self.marks.end) is not None

    def tokens(self, thoughts: str) -> int:
        """About how many tokens thoughts are."""
        return len(self.codec.encode_part(thoughts))


def thinking_after(
    prompt: str, codec: TextCodec, marks: ThoughtMarks, expected: bool, continued: str = ""
) -> Thinking | None:
    """How the answer to a prompt may begin; None where the prompt has ended the thoughts itself. `continued` is the
    message within which it ends, if it does: its thoughts may go on, and none begin after them."""
    prompt = prompt.rstrip()
    begun = prompt.endswith(marks.begin) or continued.rfind(marks.begin) > continued.rfind(marks.end)
    if prompt.endswith(marks.end) or (continued.strip() and not begun):
        return None
    return Thinking(codec, marks, begun, expected or begun)


class ThoughtReader:
    """The thoughts of one answer, and what comes after them, while the answer arrives. White space around the marks
    belongs to neither."""

    def __init__(self, thinking: Thinking):
        self._marks, self._begun = thinking.marks, thinking.begun
        self._text = ""
        self._state = "before"
        self._stripping = True
        """Whether white space that comes now is dropped."""

    def push(self, text: str, ended: bool = False) -> tuple[str, str]:
        """The thoughts, and the answer, that are certain with this text; all where it has `ended`."""
        self._text += text
        thoughts = ""
        if self._state == "before":
            self._begin(ended)
        if self._state == "within":
            thoughts = self._think(ended)
        if self._state != "after":
            return thoughts, ""
        answer = self._text.lstrip() if self._stripping else self._text
        self._stripping = self._stripping and not answer
        self._text = ""
        return thoughts, answer

    def _begin(self, ended: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(self._marks.begin):  # some models repeat the mark that the prompt ends with
            self._state, self._text = "within", text.removeprefix(self._marks.begin)
        elif ended or not self._marks.begin.startswith(text):
            self._state, self._stripping = ("within" if self._begun else "after"), self._begun

    def _think(self, ended: bool) -> str:
        index = self._text.find(self._marks.end)
        certain = self._text[:index] if index >= 0 else self._text
        if index < 0 and not ended:
            certain = certain[: len(certain) - overlap(certain, self._marks.end)]
        certain = certain.rstrip()
        thoughts = certain.lstrip() if self._stripping else certain
        self._stripping = self._stripping and not thoughts
        if index >= 0:
            self._state, self._stripping = "after", True
            self._text = self._text[index + len(self._marks.end) :]
        else:
            self._text = self._text[len(certain) :]
        return thoughts


def _escaped(mark: str) -> str:
    """A mark within a regular expression of Lark."""
    return re.sub(r"([][/|])", r"\\\1", mark)
