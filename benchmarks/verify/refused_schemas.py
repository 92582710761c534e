"""How many of the JSON schemas that wheels hold are refused, and by which keywords.

    pip download --no-deps ansible-lint==26.10.1 cfn-lint==1.58.0 check-jsonschema==0.39.0 \\
      validate-pyproject-schema-store==2026.10.23
    python -m benchmarks.verify.refused_schemas *.whl

A schema is a JSON file with keywords of one, of no more characters than a guide may have. It is compiled as a request's
guide is, for any text of bytes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from pydantic import ValidationError
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.figures.tables import Table
from redraft.grammar.compiler import Grammars
from redraft.request import Guide, InvalidRequest
from redraft.text import TextCodec

KEYWORDS = {"$ref", "allOf", "anyOf", "oneOf", "properties", "type"}
PREFIX = "guide.text: the json_schema cannot be used: "
console = Console()


def guides(wheel: Path) -> Iterator[Guide]:
    """The schemas of a wheel."""
    with ZipFile(wheel) as files:
        for name in sorted(name for name in files.namelist() if name.endswith(".json")):
            text = files.read(name).decode()
            schema = json.loads(text)
            if isinstance(schema, dict) and schema.keys() & KEYWORDS:
                try:
                    yield Guide(kind="json_schema", text=text)
                except ValidationError:
                    continue


def byte_grammars() -> Grammars:
    """A compiler of guides for tokens of one byte each."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Grammars(TextCodec(tokenizer), len(vocabulary))


def keyword_of(error: str) -> str:
    """The keyword that an error names by its path; the library's words where it names none."""
    path, separator, _ = error.removeprefix(PREFIX).partition(": ")
    return path.rsplit(".", 1)[-1].partition("[")[0] if separator else path


def main(argv: list[str] | None = None) -> None:
    """Print the counts of each wheel, and of the keywords."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    args = parser.parse_args(argv)
    grammars, keywords = byte_grammars(), Counter[str]()
    counts = Table("Schemas", ["wheel", "schemas", "refused"])
    for wheel in args.wheels:
        schemas = refused = 0
        for guide in guides(wheel):
            schemas += 1
            try:
                grammars.compile(guide)
            except InvalidRequest as error:
                refused += 1
                keywords[keyword_of(str(error))] += 1
        counts.rows.append([wheel.name.partition("-")[0], str(schemas), str(refused)])
    counts.show(console)
    rows = [[keyword, str(count)] for keyword, count in keywords.most_common(12)]
    Table("Refused by their first keyword", ["keyword", "schemas"], rows).show(console)


if __name__ == "__main__":
    main()
