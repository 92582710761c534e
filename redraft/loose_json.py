"""JSON as models write it: with line feeds within texts, commas before a closing bracket, or cut off."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn

from pydantic_core import from_json

_LOOSE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|,(?=\s*[}\]])', re.DOTALL)
"""A text, which may be cut off, or a comma before a closing bracket."""
_PARTS = re.compile(r'[^"]++|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""What stands between texts, or a text."""
_FIRST_NONCHARACTER = 0xFDD0
_STAND_INS = {code: _FIRST_NONCHARACTER + code for code in range(0x20)}
"""Unicode has as many characters that no text may have as there are control characters."""
_ESCAPES = {stand_in: json.dumps(chr(code))[1:-1] for code, stand_in in _STAND_INS.items()}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)
"""It only looks for a value's end: numbers of any length stay texts."""


def mended(text: str) -> str:
    """JSON of the same length without what only models write: a control character within a text has a stand-in, which
    `strict` writes as JSON does, and a comma before a closing bracket is a space."""
    return _LOOSE.sub(lambda match: match[0].translate(_STAND_INS) if match[0][0] == '"' else " ", text)


def strict(text: str) -> str:
    """`mended` text as JSON."""
    return text.translate(_ESCAPES)


def value_end(text: str) -> int | None:
    """Where the value ends that a `mended` text begins with, which `read` can read; None where there is none."""
    try:
        end = _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None
    return end if may_go_on(text[:end]) else None


def find_outside_texts(text: str, mark: str) -> int:
    """Index of the first mark that is not within a text of the JSON; -1 where there is none."""
    for part in _PARTS.finditer(text):
        if part[0][0] != '"' and (index := part[0].find(mark)) >= 0:
            return part.start() + index
    return -1


def may_go_on(text: str) -> bool:
    """Whether a `mended` text may be the beginning of a JSON value. The library overlooks what is wrong after a value,
    until it goes on."""
    try:
        from_json(f"[{text}", allow_partial=True)  # in a list, since nothing else begins a value for the library
    except ValueError:
        return False
    return True


def read(text: str) -> Any:
    """The value of JSON as models write it, of what is cut off as far as it goes. Raises ValueError where it is none.
    It is at most 200 levels deep."""
    return finite(from_json(strict(mended(text)), allow_partial="trailing-strings"))


def finite(value: Any) -> Any:
    """A JSON value whose numbers JSON can write: those beyond the largest float become that one, and NaN null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(sys.float_info.max, value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
