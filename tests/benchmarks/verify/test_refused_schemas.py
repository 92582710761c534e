"""Refusals of a wheel's schemas, counted by keyword."""

from __future__ import annotations

import json
from zipfile import ZipFile

from benchmarks.verify.refused_schemas import main


def test_refusals_are_counted_by_keyword(tmp_path, capsys):
    schemas = [
        {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}},
        {"type": "string", "format": "path"},
        {"allOf": [{"$ref": "https://example.com/other"}]},
    ]
    with ZipFile(tmp_path / "real-1.0-py3-none-any.whl", "w") as files:
        for index, schema in enumerate([*schemas, {"no": "schema"}]):
            files.writestr(f"real/{index}.json", json.dumps(schema))
        files.writestr("real/readme.txt", "no schema")
    main([str(tmp_path / "real-1.0-py3-none-any.whl")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["real", "3", "2"] in [[word for word in line if word.isalnum()] for line in lines]
    words = {word for line in lines for word in line}
    assert {"uniqueItems", "$ref"} <= words
