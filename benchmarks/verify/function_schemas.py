"""Schemas of a public suite for benchmarks.verify.structured: functions of the Berkeley Function Calling Leaderboard.

    pip download --no-deps bfcl-eval==2026.3.23
    python -m benchmarks.verify.function_schemas bfcl_eval-2026.3.23-py3-none-any.whl --output schemas.jsonl

Each of its questions that offer one function gives a case: the question, and the arguments of a call as an object that
has no other keys. `simple_python` are short signatures. `live_simple` are interfaces that users have sent in, with
nested objects and lists. A schema that came before is left out. The file stays out of this repository.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

FILES = ("bfcl_eval/data/BFCL_v4_simple_python.json", "bfcl_eval/data/BFCL_v4_live_simple.json")
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""What the leaderboard calls types of JSON Schema; `any` is every type."""


def cases(wheel: Path) -> Iterator[dict[str, Any]]:
    """Name, prompt and schema of each question whose schema is new."""
    known = set[str]()
    with ZipFile(wheel) as files:
        lines = [line for name in FILES for line in files.read(name).decode().splitlines()]
    for entry in map(json.loads, lines):
        (function,) = entry["function"]
        schema = as_json_schema(function["parameters"])
        if (text := json.dumps(schema)) not in known:
            known.add(text)
            yield {"name": entry["id"], "prompt": entry["question"][0][-1]["content"], "schema": schema}


def as_json_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """A function's parameters, or one of them, as JSON Schema writes them; an object that names its keys has no
    others."""
    schema = {name: value for name, value in parameters.items() if name not in ("default", "optional")}
    schema["type"] = TYPES.get(schema["type"], schema["type"])
    if schema["type"] == "any":
        del schema["type"]
    if isinstance(items := schema.get("items"), dict):
        schema["items"] = as_json_schema(items)
    if "properties" in schema:
        schema["properties"] = {name: as_json_schema(one) for name, one in schema["properties"].items()}
        schema["additionalProperties"] = False
    return schema


def main(argv: list[str] | None = None) -> None:
    """Write the cases, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    found = [json.dumps(case, ensure_ascii=False) for case in cases(args.wheel)]
    args.output.write_text("\n".join(found) + "\n", encoding="utf-8")
    print(f"{len(found)} schemas in {args.output}")


if __name__ == "__main__":
    main()
