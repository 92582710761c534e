"""An answer's text and tool calls, told apart while the answer arrives.

What a form of calls looks like is a generator over the methods of `CallReader`. Each of them yields where it needs more
text, so what is found does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic_core import from_json

from redraft.loose_json import find_outside_texts, finite, may_go_on, mended, strict, value_end
from redraft.openai.structured.values import (
    braced_json,
    closing_bracket,
    escaped,
    is_text_only,
    keyword_arguments,
    typed_value,
)
from redraft.text import overlap

T = TypeVar("T")
Reading = Generator[None, None, T]
"""What a method returns in the end; it yields nothing where it waits for more text."""
Schema = Mapping[str, Any]

ARGUMENTS = ("arguments", "parameters")
"""Names of a call's arguments in the objects that models write."""
_FIELDS = {"name", *ARGUMENTS, "id", "type"}
"""What such an object may say where no mark says that it is a call."""
FENCE, FENCE_END = "```json", "```"
LONGEST_HEAD = 200
"""Most characters of what has a call's name, or follows its arguments."""
PARSE_SHARE = 64
"""JSON is parsed again when it has grown by this share of its length: parsing each piece's whole text anew would take
quadratic time."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:')
"""How nearly all calls begin. Arguments are passed on as they arrive after it; other objects are read when whole."""
_PLAIN = re.compile(r'[^"\\{}\[\],<\x00-\x1f]*[^"\\{}\[\],<\s]')
"""A piece of arguments that says the same within and without a text, and ends neither them nor with white space."""
_REST = re.compile(r'(?:\s*,\s*"(?:id|type)"\s*:\s*"[^"]*")*\s*')
_PYTHON_HEAD = re.compile(r"[\[,]\s*([A-Za-z_][\w.]*)\s*")
_BRACED_HEAD = re.compile(r"\s*call:([\w.-]+)\s*")


@dataclass(frozen=True)
class CallPart:
    """A piece of a call's arguments. The first piece of a call, which is empty, has its id and the function's name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = str | CallPart


@dataclass(frozen=True)
class Tags:
    """The tags of a call whose arguments stand between tags."""

    head: re.Pattern[str]
    """Up to `head_end`, the function's name as its group."""
    head_end: str
    """"" where the name ends before the first of the other tags, each of which begins with the same character."""
    key: str
    key_end: str
    value: str
    """What begins a value after its key's end; "" where nothing does."""
    value_end: str
    end: str
    own_lines: bool
    """Whether a line feed before and after a value is no part of it."""


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
        tools: Mapping[str, Schema],
        new_id: Callable[[], str],
        most: int | None = None,
        only_calls: bool = False,
    ):
        """`read` is a form's; `tools` has each tool's parameters by its name: a bare object must have such a name to be
        a call, and values between tags are read by their schemas. With `only_calls` the answer is known to have no
        text: what looks like it is a call that was cut off."""
        self.calls = 0
        self._whole_calls = 0
        self._tools, self._new_id, self._most, self._only_calls = tools, new_id, most, only_calls
        self._text = ""
        self._mark = 0
        """Where what is not decided yet begins: text, or a call."""
        self._at = 0
        self._space = ""
        """White space that is dropped if a call follows."""
        self.enough = False
        """Whether as many calls are whole as the answer may have. What comes then is dropped."""
        self._ended = False
        self._deltas: list[Delta] = []
        self._reading = read(self)

    @property
    def whole(self) -> bool:
        """Whether all calls begun so far have all of their arguments."""
        return self.calls == self._whole_calls

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
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """The last pieces: no more text comes."""
        self._ended = True
        deltas = self.push("")
        return [*deltas, self._space] if self._space and not self.calls and not self._only_calls else deltas

    # -- what forms are made of ----------------------------------------------------------------------------

    def text_until(self, *marks: str) -> Reading[str]:
        """Pass text on up to the first of the marks, which is read, and returned; "" at the text's end. What has been
        read of something else is text."""
        while True:
            starts = [(index, mark) for mark in marks if (index := self._text.find(mark, self._at)) >= 0]
            if starts:
                end, mark = min(starts)
            else:
                mark, rest = "", self._text[self._at :]
                end = len(self._text) - (0 if self._ended else max(overlap(rest, mark) for mark in marks))
            self._give(self._text[self._mark : end])
            self._mark, self._at = end, end + len(mark)
            if mark or self._ended:
                return mark
            yield

    def skip(self, literal: str) -> Reading[bool]:
        """Read a literal and the white space before it, if they follow."""
        undecided = self._at > self._mark
        follows = yield from self._literal(literal)
        if follows and not undecided:
            self._mark = self._at
        return follows

    def peek(self) -> Reading[str]:
        """The next character that is no white space, up to which is read; nothing at the text's end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            yield

    def call(self, end: str = "", bare: bool = False) -> Reading[bool]:
        """Read a call, an object with a name and arguments, if it follows; what is none is text. Arguments that are no
        JSON go on to the mark `end`. A `bare` object, which no mark says to be a call, must have arguments and the name
        of a tool. It may be fenced, as in Markdown."""
        return (yield from self._one_call(self._object(end, bare)))

    def named_call(self, head: re.Pattern[str], end: str = "") -> Reading[bool]:
        """Read a call whose JSON arguments follow a `head`, which has the name as its group."""
        return (yield from self._one_call(self._headed(head, end)))

    def tagged_call(self, tags: Tags) -> Reading[bool]:
        """Read a call whose arguments stand between tags."""
        return (yield from self._one_call(self._tagged(tags)))

    def python_call(self, before: str) -> Reading[bool]:
        """Read a call in Python of one of the tools, with named arguments, after the character `before`."""
        return (yield from self._one_call(self._python(before)))

    def braced_call(self, quote: str, end: str) -> Reading[bool]:
        """Read a call `call:NAME{key:value}` up to the mark `end`, with texts between `quote`."""
        return (yield from self._one_call(self._braced(quote, end)))

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

    def _object(self, end: str, bare: bool) -> Reading[None]:
        fenced = bare and (yield from self._literal(FENCE))
        if (yield from self.peek()) != "{":
            raise NotACall
        parsed = 0
        while True:
            text = self._text[self._at :]
            if head := _HEAD.match(text):
                self._begin(self._name(head[1], bare), self._at + head.end())
                is_object = (yield from self.peek()) == "{"
                yield from (self._arguments(end) if is_object else self._other_value())
                if (self.whole or not is_object) and not (yield from self._literal("}")):
                    yield from self._matching(_REST, "}")
                break
            if self._is_time(len(text), parsed):
                parsed = len(text)
                if (stop := value_end(mended(text))) is not None:
                    self._whole_object(strict(mended(text)[:stop]), self._at + stop, bare)
                    break
                if self._ended or not self._may_be_a_call(text, bare):
                    raise NotACall
            yield
        if fenced:
            yield from self._literal(FENCE_END)

    def _name(self, quoted: str, bare: bool) -> str:
        try:
            name = str(from_json(quoted))
        except ValueError:
            raise NotACall from None
        if not name or (bare and name not in self._tools):
            raise NotACall
        return name

    def _may_be_a_call(self, text: str, bare: bool) -> bool:
        """Whether an object may become a call, as far as it has come."""
        try:
            fields = from_json(strict(mended(text)), allow_partial="trailing-strings")
        except ValueError:
            return False
        named = "name" in fields and list(fields)[-1] != "name"  # else the name may go on
        return not bare or (fields.keys() <= _FIELDS and (self._is_tool(fields) or not named))

    def _is_tool(self, fields: Mapping[str, Any]) -> bool:
        name = fields.get("name")
        return isinstance(name, str) and name in self._tools

    def _whole_object(self, text: str, after: int, bare: bool) -> None:
        fields = from_json(text)
        name, arguments = fields.get("name"), [fields[key] for key in ARGUMENTS if key in fields]
        called = isinstance(name, str) and name
        if not called or (bare and not (arguments and self._is_tool(fields) and fields.keys() <= _FIELDS)):
            raise NotACall
        self._begin(name, after)
        self._argue_value(arguments[0] if arguments else None)

    def _headed(self, head: re.Pattern[str], end: str) -> Reading[None]:
        match = yield from self._matching(head, "{")
        self._begin(match[1], self._at - 1)
        yield from self._arguments(end)

    def _tagged(self, tags: Tags) -> Reading[None]:
        head = yield from self._matching(tags.head, tags.head_end or tags.key[0])
        self._at -= not tags.head_end
        name, before, opening = head[1], self.calls, "{"
        while True:
            if (yield from self._literal(tags.key)):
                if self.calls == before:
                    self._begin(name, self._at)
                key = yield from self._collect(tags.key_end)
                if key is None or not (yield from self._tagged_value(opening, name, key.strip(), tags)):
                    self._at = len(self._text)  # cut off
                    return
                opening = ", "
            elif (yield from self._literal(tags.end)):
                if self.calls == before:
                    self._begin(name, self._at)
                self._argue("{}" if opening == "{" else "}")
                self._whole_calls += 1
                return
            else:
                rest = self._text[self._at :].lstrip()
                ending = self._ended and (tags.key.startswith(rest) or tags.end.startswith(rest))
                if self.calls > before and ending:
                    self._at = len(self._text)  # cut off
                    return
                raise NotACall

    def _tagged_value(self, opening: str, name: str, argument: str, tags: Tags) -> Reading[bool]:
        """Pass on an argument; False at the text's end."""
        if tags.value and not (yield from self._literal(tags.value)):
            if self._ended:
                return False
            raise NotACall
        parameters = self._tools.get(name, {})
        key = f"{opening}{json.dumps(argument, ensure_ascii=False)}: "
        if is_text_only(parameters, argument):
            self._argue(key + '"')
            if (yield from self._tagged_text(tags)):
                self._argue('"')
                return True
            return False
        text = yield from self._collect(tags.value_end)
        if text is None:
            return False
        if tags.own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._argue(key + json.dumps(typed_value(text, parameters, argument), ensure_ascii=False))
        return True

    def _tagged_text(self, tags: Tags) -> Reading[bool]:
        """Pass on a text as it arrives; False at the answer's end."""
        begun = not tags.own_lines
        while True:
            index = self._text.find(tags.value_end, self._at)
            end = index
            if index < 0:
                end = len(self._text) - (0 if self._ended else overlap(self._text[self._at :], tags.value_end))
            if not begun and end > self._at:
                self._at += self._text.startswith("\n", self._at)
                begun = True
            if tags.own_lines and end > self._at and self._text[end - 1] == "\n":
                end -= 1
            piece, self._at = self._text[self._at : end], end
            self._argue(escaped(piece))
            if index >= 0:
                self._at = self._mark = index + len(tags.value_end)
                return True
            if self._ended:
                return False
            yield

    def _python(self, before: str) -> Reading[None]:
        if (yield from self.peek()) != before:
            raise NotACall
        head = yield from self._matching(_PYTHON_HEAD, "(")
        if head[1] not in self._tools:
            raise NotACall
        parsed = 0
        while True:
            source = self._text[self._at :]
            if self._is_time(len(source), parsed):
                parsed = len(source)
                if (end := closing_bracket(source)) is not None:
                    if (arguments := keyword_arguments(source[:end])) is None:
                        raise NotACall
                    self._begin(head[1], self._at + end + 1)
                    self._argue(json.dumps(arguments, ensure_ascii=False))
                    self._whole_calls += 1
                    return
                if self._ended:
                    if ")" in source:
                        raise NotACall
                    self._begin(head[1], len(self._text))  # cut off
                    return
            yield

    def _braced(self, quote: str, end: str) -> Reading[None]:
        head = yield from self._matching(_BRACED_HEAD, "{")
        text = yield from self._collect(end)
        is_cut = text is None
        written = mended(braced_json("{" + (self._text[self._at :] if text is None else text), quote))
        stop = value_end(written)
        if stop is None if not is_cut else not may_go_on(written):
            raise NotACall
        self._begin(head[1], len(self._text) if is_cut else self._at)
        self._argue(strict(written[:stop]))
        self._whole_calls += stop is not None

    def _begin(self, name: str, after: int) -> None:
        """Begin a call, whose arguments come `after` there."""
        self._space = ""
        self._deltas.append(CallPart(self.calls, id=self._new_id(), name=name))
        self.calls += 1
        self._mark = self._at = after

    def _argue(self, text: str) -> None:
        self._mark = self._at
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, CallPart) and last.name is None:
            self._deltas[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._deltas.append(CallPart(self.calls - 1, text))

    def _argue_value(self, arguments: Any) -> None:
        """Pass on a whole call's arguments: models write them as a quoted text too, and null or no text for none."""
        if isinstance(arguments, str):
            text = mended(arguments).strip() or "{}"
        else:
            text = json.dumps({} if arguments is None else finite(arguments), ensure_ascii=False)
        self._argue(strict(text))
        self._whole_calls += value_end(text) == len(text)

    def _arguments(self, end: str) -> Reading[None]:
        """Pass on the object that begins here as it arrives. Where it is no JSON it goes on to the mark `end` or the
        text's end: what has been passed on cannot be taken back."""
        text, passed, parsed = "", 0, 0
        while True:
            piece = self._text[self._at :]
            self._at = self._mark = len(self._text)
            if passed == len(text) > 0 and _PLAIN.fullmatch(piece):
                self._argue(piece)
                passed += len(piece)
            text += piece
            if self._is_time(len(text), parsed):
                parsed = len(text)
                source = mended(text)
                stop = value_end(source)
                self._whole_calls += stop is not None
                if stop is None:
                    mark = find_outside_texts(source, end) if end else -1
                    stop = mark if mark >= 0 else None
                certain = source if self._ended else source[: len(source) - overlap(source, end)]
                certain = certain[:stop].rstrip(", \t\r\n")  # a comma may turn out to be one before a bracket
                self._argue(strict(certain[passed:]))
                passed = max(passed, len(certain))
                if stop is not None:
                    self._text, self._at, self._mark = text[stop:], 0, 0
                    return
            if self._ended:
                return
            yield

    def _other_value(self) -> Reading[None]:
        """Pass on arguments that are no object, when they are whole."""
        parsed = 0
        while True:
            text = self._text[self._at :]
            if self._is_time(len(text), parsed):
                parsed, source = len(text), mended(text)
                stop = value_end(source)
                if stop is not None and (self._ended or stop < len(text)):  # a number may go on
                    self._at += stop
                    self._argue_value(from_json(strict(source[:stop])))
                    return
                if self._ended or not may_go_on(source):
                    raise NotACall
            yield

    def _is_time(self, length: int, parsed: int) -> bool:
        """Whether JSON that was parsed at one length is parsed again at another."""
        return self._ended or (length - parsed) * PARSE_SHARE >= length

    # -- text ----------------------------------------------------------------------------------------------

    def _literal(self, literal: str) -> Reading[bool]:
        start = self._at - self._mark
        yield from self.peek()
        while not self._ended and len(rest := self._text[self._at :]) < len(literal) and literal.startswith(rest):
            yield
        follows = self._text.startswith(literal, self._at)
        self._at = self._at + len(literal) if follows else self._mark + start
        return follows

    def _matching(self, pattern: re.Pattern[str], end: str) -> Reading[re.Match[str]]:
        """Read what matches a pattern up to an `end`, and the end."""
        while (index := self._text.find(end, self._at)) < 0:
            if self._ended or len(self._text) - self._at > LONGEST_HEAD:
                raise NotACall
            yield
        match = pattern.fullmatch(self._text, self._at, index)
        if match is None or index - self._at > LONGEST_HEAD:
            raise NotACall
        self._at = index + len(end)
        return match

    def _collect(self, end: str) -> Reading[str | None]:
        """Read the text up to an `end`, and the end; None where the text ends before."""
        searched = 0
        while (index := self._text.find(end, self._at + searched)) < 0:
            searched = max(0, len(self._text) - self._at - len(end))
            if self._ended:
                return None
            yield
        text = self._text[self._at : index]
        self._at = index + len(end)
        return text

    def _give(self, text: str) -> None:
        """Pass text on; white space at its end waits for what follows."""
        if self._only_calls:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept and self._deltas and isinstance(self._deltas[-1], str):
            self._deltas[-1] += kept
        elif kept:
            self._deltas.append(kept)
