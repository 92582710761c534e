"""Prompt files, read as they are: JSON lines and arrays, plain text, CSV and Parquet.

A row has its prompt in `turns` (MT-bench, Spec-Bench, SPEED-Bench), `prompt`, `messages` (OpenAI), `conversations`
(ShareGPT), or in a column that the caller names. Its value is a text, a list of user turns, or a list of messages.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redraft.errors import install

T = TypeVar("T")
Rows = Iterator[tuple[str, Any]]
"""Rows of a file, each with its place in it: "line 3"."""

FIELDS = ("turns", "prompt", "messages", "conversations")
OTHER_FIELDS = ("question_id", "category", "source", "response", "reference")
USER, ASSISTANT = ("user", "human"), ("assistant", "gpt")
"""Names of the two roles, in OpenAI's messages and in ShareGPT's."""
EXAMPLE = 'lines such as {"prompt": "Why is the sky blue?"}'
TO_BE_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How SPEED-Bench marks turns whose texts its own script fetches from other data sets."""
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
CSV_SUFFIXES = (".csv", ".tsv")


@dataclass(frozen=True)
class Prompt:
    """One conversation's user turns, at least one."""

    question_id: str
    category: str
    """Its kind, or the data set that it is from: the field `category` or `source`"""
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...] = ()
    """Texts that answer each turn as it should be, any of them; empty where none are known."""
    response: str | None = None
    """The file's own answer to the first turn: the field `response`, or the assistant's message after it."""


@dataclass(frozen=True)
class PromptFile:
    """A file's prompts, and what the file was taken for."""

    path: Path
    prompts: list[Prompt]
    format: str
    fields: tuple[str, ...]
    """Where the user turns are from; empty for plain text"""
    left_out: int
    """Rows without a user turn"""
    to_be_fetched: int = 0
    """Rows left out because their texts are elsewhere: see TO_BE_FETCHED"""

    def __str__(self) -> str:
        """One line: format, number of prompts, where they are from."""
        fields = f" from {' and '.join(f'`{field}`' for field in self.fields)}" if self.fields else ""
        left_out = f"; {_count(self.left_out, 'row')} without a user turn left out" if self.left_out else ""
        if self.to_be_fetched:
            left_out += f"; {_count(self.to_be_fetched, 'row')} left out, whose texts SPEED-Bench's own script fetches"
        return f"{self.path}: {self.format}, {_count(len(self.prompts), 'prompt')}{fields}{left_out}"

    @property
    def several_turns(self) -> int:
        """Prompts with more than one user turn."""
        return sum(len(prompt.turns) > 1 for prompt in self.prompts)


def load_prompts(path: str | Path, column: str | None = None, all_turns: bool = False) -> list[Prompt]:
    """The prompts of a file, for a command that uses the first user turn of each, or all turns. Prints what the file
    was taken for.

    Raises as `read_prompts` does.
    """
    file = read_prompts(Path(path), column)
    more = file.several_turns and not all_turns
    several = f"; the first user turn of each is used, {file.several_turns:,} have more" if more else ""
    print(f"prompts: {file}{several}", file=sys.stderr, flush=True)
    return file.prompts


def read_prompts(path: Path, column: str | None = None) -> PromptFile:
    """Prompts of a file in any format that this module's docstring names, from the field `column` if it is given.

    `reference`, where given, has a text or a list of texts for each turn; empty ones are left out.
    Raises ValueError naming the file, the place and what is wrong with it.
    """
    prompts, fields, left_out, to_be_fetched = list[Prompt](), Counter[str](), 0, 0
    kind, rows = _open(path, column)
    for number, (where, row) in enumerate(rows, 1):
        try:
            field = _field(row, column)
            prompt = _parse(row, field, number)
        except ValueError as error:
            raise ValueError(f"{path}, {where}: {error}") from None
        if prompt is None:
            left_out += 1
            continue
        if any(TO_BE_FETCHED in turn for turn in prompt.turns):
            to_be_fetched += 1
            continue
        prompts.append(prompt)
        if field:
            fields[field] += 1
    if to_be_fetched and not prompts:
        raise ValueError(
            f"{path}: the texts of all {to_be_fetched} rows are to be fetched with SPEED-Bench's own script"
        )
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected {EXAMPLE}, or plain text")
    return PromptFile(path, prompts, kind, tuple(fields), left_out, to_be_fetched)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


# -- formats -----------------------------------------------------------------------------------------------


def _open(path: Path, column: str | None) -> tuple[str, Rows]:
    """A file's format and its rows: texts, lists or objects."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file of prompts")
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        raise ValueError(f"prompts {path}: {error.strerror}; give a file of {EXAMPLE}, or of plain text") from None
    if begins == b"PAR1":
        return "Parquet", _parquet(path, column)
    text, name = _text(path), path.name.lower().removesuffix(".gz")
    if name.endswith(CSV_SUFFIXES):
        return "CSV", _csv(path, text, column)
    first = text.lstrip()[:1]
    if first == "[" and (array := _array(text)) is not None:
        return "JSON array", ((f"entry {number}", row) for number, row in enumerate(array, 1))
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if name.endswith(JSON_SUFFIXES) or (first == "{" and _is_json(lines[0][1])):
        return "JSON lines", _json_lines(path, lines)
    return "plain text lines", ((where, line.strip()) for where, line in lines)


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if b"\0" in content[:4096]:
            raise ValueError("it has zero bytes")
        return content.decode("utf-8-sig")
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: neither UTF-8 text nor Parquet ({error}); expected {EXAMPLE}") from None


def _array(text: str) -> list[Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _json_lines(path: Path, lines: Iterable[tuple[str, str]]) -> Rows:
    for where, line in lines:
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, {where}: not JSON ({error}); expected {EXAMPLE}") from None


def _csv(path: Path, text: str, column: str | None) -> Rows:
    header = text.lstrip("\n").split("\n")[0]
    delimiter = max(",;\t", key=header.count)
    if delimiter not in header:  # one column, whose texts may hold commas
        delimiter = "\x1f"
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the whole process's
    _check_columns(path, list(reader.fieldnames or ()), column)
    try:
        for row in reader:
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path, column: str | None) -> Rows:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow (55 MB): {install('parquet')}, or save it as CSV or JSON lines"
        ) from None
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(path, names, column)
            wanted = [name for name in names if name in (column, *FIELDS, *OTHER_FIELDS)]
            rows = (row for batch in file.iter_batches(columns=wanted) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"row {number}", row
    except ArrowException as error:
        raise ValueError(f"{path}: not Parquet, or damaged ({error})") from None


def _check_columns(path: Path, names: Sequence[str], column: str | None) -> None:
    try:
        _field(dict.fromkeys(names, ""), column)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# -- rows --------------------------------------------------------------------------------------------------


def _field(row: Any, column: str | None) -> str | None:
    """The field that a row's user turns are in; None for a row that is the text or the list itself."""
    if isinstance(row, str | list) and column is None:
        return None
    names = list(row) if isinstance(row, dict) else []
    if column is not None and column not in names:
        raise ValueError(f"there is no field {column!r}: --column takes one of {', '.join(map(repr, names)) or 'none'}")
    known = sorted((field for field in FIELDS if field in names), key=lambda field: row[field] is None)
    if name := column or next(iter(known), None):
        return name
    if not names:
        raise ValueError(f"{row!r:.60} is no prompt; expected {EXAMPLE}")
    raise ValueError(
        f"no {', '.join(FIELDS[:-1])} or {FIELDS[-1]} among {', '.join(map(repr, names))}: name the field with "
        f"--column, or write {EXAMPLE}"
    )


def _parse(row: Any, field: str | None, number: int) -> Prompt | None:
    """A row's prompt; None where it has no user turn."""
    value = row if field is None else row[field]
    turns, response = _conversation(value, field)
    others = row if isinstance(row, dict) else {}
    answer = others.get("response") if isinstance(others.get("response"), str) else None
    if not turns:
        return None
    response = answer if answer is not None else response
    for text in (*turns, response or ""):
        text.encode()
    category = others.get("category") or others.get("source") or "all"
    references = _references(others.get("reference"), len(turns))
    return Prompt(str(others.get("question_id", number)), str(category), turns, references, response)


def _conversation(value: Any, field: str | None) -> tuple[tuple[str, ...], str | None]:
    """The user turns of a text, a list of user turns or a list of messages, and the answer to the first, if any."""
    if value is None:
        return (), None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(turn, str) for turn in value):
        return tuple(turn for turn in value if turn.strip()), None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        name = f"`{field}` is " if field else ""
        raise ValueError(f"{name}{value!r:.60}, expected a text, a list of texts, or a list of messages")
    texts = [(_role(message), _content(message)) for message in value]
    messages = [(role, text) for role, text in texts if text.strip()]
    users = [index for index, (role, _) in enumerate(messages) if role in USER]
    after = messages[users[0] + 1 :][:1] if users else []
    response = after[0][1] if after and after[0][0] in ASSISTANT else None
    return tuple(messages[index][1] for index in users), response


def _role(message: dict[str, Any]) -> str:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise ValueError(f"{message!r:.60} has no `role` (or, in ShareGPT's form, `from`)")
    return role


def _content(message: dict[str, Any]) -> str:
    """A message's text. OpenAI's form may divide it into parts, and a message that calls a tool has none."""
    content = message.get("content", message.get("value"))
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"a message's content is {content!r:.60}, expected a text")


def _references(value: Any, turns: int) -> tuple[tuple[str, ...], ...]:
    if isinstance(value, str):
        return ((value,),) if turns == 1 and value.strip() else ()
    if not isinstance(value, list) or value == []:
        return ()
    answers = [[turn] if isinstance(turn, str) else turn for turn in value]
    known = all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in answers)
    if len(answers) != turns or not known:
        raise ValueError(
            f"expected 'reference' to have a text or a list of texts for each of {turns} turns, got {value!r:.60}"
        )
    return tuple(tuple(text for text in texts if text.strip()) for texts in answers)


def spread(items: list[T], count: int | None) -> list[T]:
    """`count` prompts evenly spaced over a file that is sorted by kind, or as many of other items; all of them for None
    or more than there are."""
    if count is None or count >= len(items):
        return items
    return [items[index * len(items) // count] for index in range(count)]
