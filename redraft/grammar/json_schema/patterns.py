"""Regular expressions of schemas in the library's terms: without look-around, in Rust's syntax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ANY_TEXT = r"[\s\S]*"
_LOOK_AHEAD = re.compile(r"\(\?(?P<sign>[=!])")
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_UNIT = r"\[(?P<set>(?:[^\^\[\]\\]|\\.)(?:[^\[\]\\]|\\.)*)\]|(?P<one>\\[^bB\d]|[^\\^$.|?*+()\[\]{}])"
"""One character: of a class, or this one."""
_RUN = re.compile(
    rf"(?:\.\*|\[\\s\\S\]\*)(?P<unit>{_UNIT})(?:\{{(?P<count>[1-9]\d*)(?:,\d*)?\}}|(?P<again>(?P=unit)*))(?P<end>\$?)"
)
_BEFORE_ANY = re.compile(r"(?P<start>(?:\\.|[^\\])*?)(?:\.\*|\[\\s\\S\]\*)\$?", re.DOTALL)
"""A pattern that ends with any text."""
_END = re.compile(rf"\(\?<!(?:{_UNIT})\)\$$")
_OF_A_CLASS = re.compile(r"\^?(?:\[(?P<characters>[^\^\[\]\\](?:[^\[\]\\]|\\.)*)\]|(?P<escape>\\[sdw]))[*]\$")
_ITEM = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pPu]\{[^{}]*\}|[pP][A-Za-z]|c[A-Za-z]|[\s\S])|\[\^|[\s\S]")
_ZERO = re.compile(r"\\(?:0|x00|u0000|u\{0+\})|\x00")
_NOTHING = r"[^\s\S]"
_LITERAL_BRACE = re.compile(r"(?<!\\[pPxu])\{(?!\d+(?:,\d*)?\})")
"""An opening brace that begins no repetition, property or code point."""
_LITERAL = re.compile(r"\^?(?P<text>(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])+)(?P<end>\$?)")


def split_pattern(pattern: str) -> list[str]:
    """Patterns that together match what one with look-ahead at its start, or a character that may not end it, does.
    Raises ValueError for look-around elsewhere, and for what no automaton finds: references back to groups, and ends of
    words."""
    parts = list[str]()
    if look_behind := _END.search(pattern):
        pattern = f"{pattern[: look_behind.start()]}$"
        parts.append(_ending_unlike(_characters(look_behind)))
    rest = pattern.removeprefix("^")
    if rest != pattern:
        while group := _LOOK_AHEAD.match(rest):
            end = _end_of_group(rest)
            inner, rest = rest[group.end() : end], rest[end + 1 :]
            alternatives = re.split(r"(?<!\\)[|]", inner)
            parts += [f"^(?:{inner})"] if group["sign"] == "=" else map(_unlike, alternatives)
        pattern = f"^{rest}"
    if rest or not parts:
        parts.append(pattern)
    return [_in_rust(part) for part in parts]


def all_but(texts: Iterable[str]) -> str:
    """A pattern of every text but these."""
    return f"^(?:{_other_ends(frozenset(texts))})$"


def _other_ends(ends: frozenset[str]) -> str:
    """What may follow a beginning that each of these ends would make one of the forbidden texts."""
    firsts = sorted({end[0] for end in ends if end})
    branches = [] if "" in ends else [""]
    branches.append(f"[^{''.join(map(_escaped, firsts))}]{ANY_TEXT}" if firsts else r"[\s\S]+")
    for first in firsts:
        branches.append(f"{_escaped(first)}(?:{_other_ends(frozenset(end[1:] for end in ends if end[:1] == first))})")
    return "|".join(branches)


def _unlike(inner: str) -> str:
    """A pattern of the texts that `inner` does not match at their start, for the forms that have a simple one: a
    literal, a class of characters repeated up to the end, and a run of a character anywhere. Raises ValueError for
    others."""
    if before := _BEFORE_ANY.fullmatch(inner):
        inner = before["start"]
    if repeated := _OF_A_CLASS.fullmatch(inner):
        return f"[^{repeated['characters'] or repeated['escape']}]"
    if run := _RUN.fullmatch(inner):
        characters = _characters(run)
        most = (int(run["count"]) if run["count"] else 1 + len(run["again"]) // len(run["unit"])) - 1
        if not run["end"]:
            return f"^(?:[{characters}]{{0,{most}}}[^{characters}])*[{characters}]{{0,{most}}}$"
        if not most:
            return _ending_unlike(characters)
    literal = _LITERAL.fullmatch(inner)
    if literal is None:
        raise ValueError("this look-around cannot be enforced")
    text = re.sub(r"\\(.)", r"\1", literal["text"])
    if literal["end"]:
        return all_but([text])
    stems = (f"{''.join(map(_escaped, text[:i]))}(?:[^{_escaped(text[i])}]{ANY_TEXT})?" for i in range(len(text)))
    return f"^(?:{'|'.join(stems)})$"


def _end_of_group(pattern: str) -> int:
    """Index of the parenthesis that closes the group with which a pattern begins. Raises ValueError."""
    depth = 0
    for index, item, in_class in _items(pattern):
        if not in_class:
            depth += (item == "(") - (item == ")")
            if not depth:
                return index
    raise ValueError("expected a closed group")


def _ending_unlike(characters: str) -> str:
    return rf"^(?:[\s\S]*[^{characters}])?$"


def _characters(unit: re.Match[str]) -> str:
    """What stands in a class for one character of a pattern."""
    return unit["set"] or (unit["one"] if unit["one"][0] == "\\" else _escaped(unit["one"]))


def _in_rust(pattern: str) -> str:
    """The same pattern in Rust's syntax, whose classes begin with any bracket, and which knows fewer escapes. No class
    has the character 0: the library (1.9.1) lets quotes and backslashes into one that has all control characters."""
    written = []
    opened, class_end = False, ""
    for index, item, in_class in _items(pattern):
        if not in_class and _LOOK_AROUND.match(pattern, index):
            raise ValueError("this look-around cannot be enforced")
        if not in_class and re.fullmatch(r"\\[1-9kbB]", item):
            raise ValueError(f"{item} cannot be enforced")
        if item in ("[", "[^") and not in_class:
            start, class_end = (r"[^\x00", "]") if item == "[^" else ("[[", r"]--\x00]")
            written.append(start)
        elif item == "]" and class_end:
            written.append(class_end)
            class_end = ""
        elif item[:2] in (r"\p", r"\P") and not in_class:
            written.append(rf"[{item}--\x00]")
        elif item[0] in "[&~" if in_class else _LITERAL_BRACE.match(pattern, index):
            written.append("\\" + item)
        elif opened and item == "-":
            written.append(r"\-")  # no range from the character before it
        else:
            written.append(_escape(item, in_class))
        opened = item == "[^" and not in_class
    return "".join(written)


def _escape(item: str, in_class: bool) -> str:
    """An item, where it is an escape of JavaScript's that Rust does not know in Rust's form."""
    if _ZERO.fullmatch(item):
        return r"\x00" if in_class else _NOTHING
    if item in (r"\<", r"\>"):
        return item[1:]
    if item == r"\b" and in_class:
        return r"\x08"
    return f"\\x{ord(item[2]) % 32:02x}" if re.fullmatch(r"\\c[A-Za-z]", item) else item


def _items(pattern: str) -> Iterator[tuple[int, str, bool]]:
    """A pattern's characters, escapes and beginnings of negated classes, each with its index and whether it is within a
    class."""
    in_class = False
    for match in _ITEM.finditer(pattern):
        item = match[0]
        in_class = in_class and item != "]"
        yield match.start(), item, in_class
        in_class = in_class or item in ("[", "[^")


def _escaped(character: str) -> str:
    return f"\\{character}" if character in r"\.+*?()|[]{}^$-&~#" else character
