"""Regular expressions of schemas in the library's terms: without look-around, in Rust's syntax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ANY_TEXT = r"[\s\S]*"
_LOOK_AHEAD = re.compile(r"\(\?(?P<sign>[=!])")
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_OF_A_CLASS = re.compile(r"\^?(?:\[(?P<characters>[^\^\[\]\\](?:[^\[\]\\]|\\.)*)\]|(?P<escape>\\[sdw]))[*]\$")
_LITERAL_BRACE = re.compile(r"(?<!\\[pPxu])\{(?!\d+(?:,\d*)?\})")
"""An opening brace that begins no repetition, property or code point."""
_LITERAL = re.compile(r"\^?(?P<text>(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])+)(?P<end>\$?)")


def split_pattern(pattern: str) -> list[str]:
    """Patterns that together match what one with look-ahead at its start does. Raises ValueError for look-around
    elsewhere, and for what no automaton finds: references back to groups, and ends of words."""
    parts, rest = list[str](), pattern.removeprefix("^")
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
    """A pattern of the texts that `inner` does not match at their start, for the two forms that have a simple one: a
    literal, and a class of characters repeated up to the end. Raises ValueError for others."""
    if repeated := _OF_A_CLASS.fullmatch(inner):
        return f"[^{repeated['characters'] or repeated['escape']}]"
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


def _in_rust(pattern: str) -> str:
    """The same pattern, where an opening bracket within a class is a character like any other, and so are a brace
    that begins nothing, and escaped angle brackets."""
    written = []
    for index, item, in_class in _items(pattern):
        if not in_class and _LOOK_AROUND.match(pattern, index):
            raise ValueError("this look-around cannot be enforced")
        if not in_class and re.fullmatch(r"\\[1-9kbB]", item):
            raise ValueError(f"{item} cannot be enforced")
        is_plain = item in "[&~" if in_class else _LITERAL_BRACE.match(pattern, index)
        written.append("\\" + item if is_plain else item[1:] if item in (r"\<", r"\>") else item)
    return "".join(written)


def _items(pattern: str) -> Iterator[tuple[int, str, bool]]:
    """A pattern's characters and escapes, each with its index and whether it is within a class."""
    in_class = False
    for match in re.finditer(r"\\?[\s\S]", pattern):
        item = match[0]
        in_class = in_class and item != "]"
        yield match.start(), item, in_class
        in_class = in_class or item == "["


def _escaped(character: str) -> str:
    return f"\\{character}" if character in r"\.+*?()|[]{}^$-&~#" else character
