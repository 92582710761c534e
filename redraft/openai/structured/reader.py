"""An answer's text and tool calls, told apart while the answer arrives.

What a form of calls looks like is a generator over the methods of `CallReader`. Each of them yields where it needs more
text, so what is found does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from typing import TypeVar

from redraft.text import overlap

T = TypeVar("T")
Reading = Generator[None, None, T]
"""What a method returns in the end; it yields nothing where it waits for more text."""

ARGUMENTS = ("arguments", "parameters")
"""Names of a call's arguments in the objects that models write."""
BESIDE = ("id", "type")
"""What else such an object may say."""
FENCE, FENCE_END = "```json", "```"
LONGEST_HEAD = 200
"""Most characters before the arguments of a call `name[ARGS]{...}`."""
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")


@dataclass(frozen=True)
class CallPart:
    """A piece of a call's arguments. The first piece of a call, which is empty, has its id and the function's name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = str | CallPart


class NotACall(Exception):
    """The text goes on in another way than a call would."""


class _Enough(Exception):
    """No more calls are wanted."""


class CallReader:
    """The pieces of one answer: text, and calls of tools. `calls` counts those begun so far.

    White space around calls is dropped. With `most` the answer ends after so many calls.
    """

    def __init__(
        self,
        read: Callable[[CallReader], Reading[None]],
        tools: Collection[str],
        new_id: Callable[[], str],
        most: int | None = None,
    ):
        """`read` is a form's; `tools` are the names that bare objects must have to be calls."""
        self.calls = 0
        self._tools, self._new_id, self._most = tools, new_id, most
        self._text = ""
        self._mark = 0
        """Where what is not decided yet begins: text, or a call."""
        self._at = 0
        self._space = ""
        """White space that is dropped if a call follows."""
        self.enough = False
        """Whether as many calls are whole as the answer may have. What comes then is dropped."""
        self._ended = False
        self._found: list[Delta] = []
        self._reading = read(self)

    def push(self, text: str) -> list[Delta]:
        """The pieces that are certain with this text after the text before."""
        if self.enough:
            return []
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0
        try:
            next(self._reading, None)
        except _Enough:
            self._text, self._mark, self._at = "", 0, 0
            self.enough = not self._ended
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Delta]:
        """The last pieces: no more text comes."""
        self._ended = True
        found = self.push("")
        return [*found, self._space] if self._space and not self.calls else found

    # -- what forms are made of ----------------------------------------------------------------------------

    def text_until(self, marker: str) -> Reading[bool]:
        """Pass text on up to a marker, which is read; False at the text's end."""
        while True:
            place = self._text.find(marker, self._at)
            if place >= 0:
                end, after = place, place + len(marker)
            else:
                end = len(self._text) - (0 if self._ended else overlap(self._text[self._at :], marker))
                after = end
            self._give(self._text[self._at : end])
            self._mark, self._at = end, after
            if place >= 0 or self._ended:
                return place >= 0
            yield

    def skip(self, literal: str) -> Reading[bool]:
        """Read a literal and the white space before it, if they follow."""
        undecided = self._at > self._mark
        found = yield from self._literal(literal)
        if found and not undecided:
            self._mark = self._at
        return found

    def call(self, bare: bool = False) -> Reading[bool]:
        """Read a call, an object with a name and arguments, if it follows; what is none is text. A `bare` object, which
        no marker says to be a call, must have arguments and the name of a tool. It may be fenced, as in Markdown."""
        return (yield from self._one_call(self._object(bare)))

    def named_call(self) -> Reading[bool]:
        """Read a call `name[ARGS]{...}`, if it follows; what is none is text."""
        return (yield from self._one_call(self._headed()))

    # -- calls ---------------------------------------------------------------------------------------------

    def _one_call(self, reading: Reading[None]) -> Reading[bool]:
        before = self.calls
        try:
            yield from reading
        except NotACall:
            if self.calls == before:
                self._give(self._text[self._mark : self._at])
            else:
                self._at = self._mark  # what follows its arguments is text, or other calls
        self._mark = self._at
        if self.calls > before and self.calls == self._most:
            raise _Enough
        return self.calls > before

    def _object(self, bare: bool) -> Reading[None]:
        before, name, arguments = self.calls, "", None
        fenced = bare and (yield from self._literal(FENCE))
        yield from self._expect("{")
        while (yield from self._peek()) != "}":
            key = yield from self._string()
            yield from self._expect(":")
            if key == "name" and not name:
                name = yield from self._string()
                if not name or (bare and name not in self._tools):
                    raise NotACall
            elif key in ARGUMENTS and arguments is None and self.calls == before:
                if name:
                    self._begin(name)
                    yield from self._stream_arguments()
                else:
                    arguments = yield from self._collect()
            elif (bare or self.calls > before) and key not in BESIDE:
                raise NotACall
            else:
                yield from self._collect()
            if (yield from self._peek()) == ",":
                self._at += 1
        if not name or (bare and arguments is None and self.calls == before):
            raise NotACall
        self._at += 1
        if self.calls == before:
            self._begin(name)
            self._argue(_written(arguments or "{}"))
        if fenced:
            yield from self._literal(FENCE_END)

    def _headed(self) -> Reading[None]:
        while (place := self._text.find("{", self._at)) < 0:
            if self._ended or len(self._text) - self._at > LONGEST_HEAD:
                raise NotACall
            yield
        head = _HEAD.fullmatch(self._text, self._at, place)
        if head is None or place - self._at > LONGEST_HEAD:
            raise NotACall
        self._at = place
        self._begin(head[1])
        yield from self._stream_arguments()

    def _begin(self, name: str) -> None:
        self._space = ""
        self._found.append(CallPart(self.calls, id=self._new_id(), name=name))
        self.calls += 1
        self._mark = self._at

    def _argue(self, text: str) -> None:
        self._mark = self._at
        last = self._found[-1] if self._found else None
        if isinstance(last, CallPart) and last.name is None:
            self._found[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._found.append(CallPart(self.calls - 1, text))

    def _stream_arguments(self) -> Reading[None]:
        if (yield from self._peek()) in ("{", "["):
            yield from self._value(self._argue)
        else:
            self._argue(_written((yield from self._collect())))

    def _literal(self, literal: str) -> Reading[bool]:
        start = self._at - self._mark
        yield from self._peek()
        while not self._ended and len(rest := self._text[self._at :]) < len(literal) and literal.startswith(rest):
            yield
        found = self._text.startswith(literal, self._at)
        self._at = self._at + len(literal) if found else self._mark + start
        return found

    # -- JSON ----------------------------------------------------------------------------------------------

    def _peek(self) -> Reading[str]:
        """The next character that is no white space, which is read; nothing at the text's end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            yield

    def _expect(self, character: str) -> Reading[None]:
        if (yield from self._peek()) != character:
            raise NotACall
        self._at += 1

    def _string(self) -> Reading[str]:
        if (yield from self._peek()) != '"':
            raise NotACall
        text = yield from self._collect()
        try:
            return _unquoted(text)
        except ValueError:
            raise NotACall from None

    def _collect(self) -> Reading[str]:
        """The text of a JSON value."""
        parts: list[str] = []
        yield from self._peek()
        yield from self._value(parts.append)
        if not any(parts):
            raise NotACall
        return "".join(parts)

    def _value(self, write: Callable[[str], None]) -> Reading[None]:
        """Write a JSON value's text as it arrives. Only its brackets and quotes are looked at."""
        depth, quoted, escaped, closed = 0, False, False, False
        while True:
            start = self._at
            while not closed and self._at < len(self._text):
                character = self._text[self._at]
                if quoted:
                    quoted = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                    closed = not quoted and depth == 0
                elif depth == 0 and (character in ",:}]" or character.isspace()):
                    break
                elif character in "}]":
                    depth -= 1
                    closed = depth == 0
                elif character in "{[":
                    depth += 1
                else:
                    quoted = character == '"'
                self._at += 1
            write(self._text[start : self._at])
            if closed or self._at < len(self._text):
                return
            if self._ended:
                raise NotACall
            yield

    # -- text ----------------------------------------------------------------------------------------------

    def _give(self, text: str) -> None:
        """Pass text on; white space at its end waits for what follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept and self._found and isinstance(self._found[-1], str):
            self._found[-1] += kept
        elif kept:
            self._found.append(kept)


def _unquoted(text: str) -> str:
    """The text that a JSON string stands for. Raises ValueError where it is none, or no Unicode."""
    value = str(json.loads(text, strict=False))
    value.encode()
    return value


def _written(arguments: str) -> str:
    """Arguments as a JSON text: models write them as a quoted text too, and null for none."""
    if arguments.startswith('"'):
        try:
            return _unquoted(arguments)
        except ValueError:
            return arguments
    return "{}" if arguments == "null" else arguments
