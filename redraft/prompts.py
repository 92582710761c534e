"""Prompt files: JSON lines in the formats of MT-bench and Spec-Bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One conversation's user turns, at least one."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...] = ()
    """Texts that answer each turn as it should be, any of them; empty where none are known."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSON-lines file: `turns` with `question_id` and `category` (MT-bench, Spec-Bench), or `prompt`.

    `reference`, where given, has a text or a list of texts for each turn; empty ones are left out.
    Raises ValueError naming the file, the line and what is wrong with it.
    """
    prompts = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    prompts.append(_parse(json.loads(line), number))
                except (json.JSONDecodeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _parse(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {row!r:.60}")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"expected 'turns' (a list of texts) or 'prompt' (a text), got {turns!r:.60}")
    references = _references(row.get("reference"), len(turns))
    return Prompt(str(row.get("question_id", number)), str(row.get("category", "all")), tuple(turns), references)


def _references(given: Any, turns: int) -> tuple[tuple[str, ...], ...]:
    if given is None or given == []:
        return ()
    answers = [[turn] if isinstance(turn, str) else turn for turn in given] if isinstance(given, list) else []
    known = all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in answers)
    if len(answers) != turns or not known:
        raise ValueError(
            f"expected 'reference' to have a text or a list of texts for each of {turns} turns, got {given!r:.60}"
        )
    return tuple(tuple(text for text in texts if text.strip()) for texts in answers)


def spread(items: list[T], count: int | None) -> list[T]:
    """`count` prompts evenly spaced over a file that is sorted by kind, or as many of other items; all of them for None
    or more than there are."""
    if count is None or count >= len(items):
        return items
    return [items[index * len(items) // count] for index in range(count)]
