"""What RSD's experiments have measured, on disk: answers by sampling setting and method, saved as they come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from redraft.llm import Answer
from redraft.loadtest.results import write_json
from redraft.prompts import Prompt


@dataclass(frozen=True)
class Row:
    """One answer: the text, and what its steps gained."""

    question_id: str
    category: str
    text: str
    tokens: int
    steps: int
    accepted: int
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Prompt, answer: Answer) -> Row:
        """What is kept of an answer."""
        counted = {
            name: getattr(answer.stats, name) for name in cls.__dataclass_fields__ if hasattr(answer.stats, name)
        }
        return cls(prompt.question_id, prompt.category, answer.text, len(answer.token_ids), **counted)


@dataclass
class Store:
    """Answers `rows[setting][method]`, and tokens and seconds of a single stream after its first token,
    `timing[setting][method][question_id]`. They depend on `setup`, and on their part of `settings`, by name."""

    path: Path
    setup: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    timing: dict[str, dict[str, dict[str, tuple[int, float]]]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, setup: dict[str, Any], settings: dict[str, dict[str, Any]]) -> Store:
        """Go on with a file, or start one. Raises ValueError where it was measured otherwise, or cannot be read."""
        if not path.is_file():
            return cls(path, setup, settings)
        old = cls.read(path)
        now, before = (
            setup | {f"temperature {name}": part for name, part in settings.items() if name in old.settings},
            old.setup | {f"temperature {name}": part for name, part in old.settings.items()},
        )
        changed = [
            f"{name}: {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value
        ]
        if changed:
            raise ValueError(f"{path} was measured otherwise ({'; '.join(changed)}); choose another --output")
        old.settings |= settings
        return old

    @classmethod
    def read(cls, path: Path) -> Store:
        """Raises ValueError, naming the file, where it is not what `save` writes."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for methods in content["rows"].values():
                for method, rows in methods.items():
                    methods[method] = [Row(**row) for row in rows]
            return cls(path, **content)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no results of this benchmark ({error!r}); choose another --output"
            ) from None

    def save(self) -> None:
        """Write the file as a whole."""
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_json(self.path, content)

    def add(self, setting: str, method: str, rows: list[Row]) -> None:
        """Keep a method's answers at a setting."""
        self.rows.setdefault(setting, {})[method] = rows
        self.save()

    def has(self, setting: str, method: str) -> bool:
        """Whether the method's answers at the setting are there."""
        return method in self.rows.get(setting, {})


def sums(rows: list[Row], prompts: list[str], *names: str) -> np.ndarray:
    """Totals float64 [prompts, names] of the rows' numbers, by prompt."""
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    totals = np.zeros((len(prompts), len(names)))
    for row in rows:
        totals[index_of[row.question_id]] += [getattr(row, name) for name in names]
    return totals
