"""Functions of the leaderboard as JSON Schema."""

from __future__ import annotations

import json
from zipfile import ZipFile

from benchmarks.verify.function_schemas import FILES, main
from benchmarks.verify.structured import load_schemas

PARAMETERS = {
    "type": "dict",
    "required": ["place"],
    "properties": {
        "place": {"type": "tuple", "items": {"type": "float"}, "optional": True},
        "notes": {"type": "array", "items": {"type": "dict", "properties": {"type": {"type": "any", "default": 1}}}},
    },
}


def entry(name: str, parameters: dict) -> str:
    question = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"ask {name}"}]]
    return json.dumps({"id": name, "question": question, "function": [{"name": "f", "parameters": parameters}]})


def test_each_schema_once_in_json_schemas_terms(tmp_path):
    with ZipFile(tmp_path / "suite.whl", "w") as files:
        files.writestr(FILES[0], "\n".join([entry("a", PARAMETERS), entry("b", PARAMETERS)]))
        files.writestr(FILES[1], entry("c", {"type": "dict", "properties": {}}))
    main([str(tmp_path / "suite.whl"), "--output", str(tmp_path / "schemas.jsonl")])
    first, second = load_schemas(tmp_path / "schemas.jsonl")
    assert (first.name, first.prompt, second.name) == ("a", "ask a", "c")
    note = {"type": "object", "properties": {"type": {}}, "additionalProperties": False}
    assert first.schema == {
        "type": "object",
        "required": ["place"],
        "properties": {
            "place": {"type": "array", "items": {"type": "number"}},
            "notes": {"type": "array", "items": note},
        },
        "additionalProperties": False,
    }
    assert second.schema == {"type": "object", "properties": {}, "additionalProperties": False}
