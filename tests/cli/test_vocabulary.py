"""One vocabulary: an option of a name means the same in every command, and what it means has one name."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from redraft.bundle.backends import Backend, Precision
from redraft.cli.train import KINDS
from tests.programs import Option, programs

OPTIONS = [
    (name, option)
    for name, program in programs().items()
    for option in program.options
    if not name.startswith(("deploy/", "python -m redraft."))  # argparse knows few types
]
KNOWN = {
    "--model": (Path, "FOLDER"),
    "--drafter": (Path, "FOLDER"),
    "--bundle": (Path, "FOLDER"),
    "--prompts": (Path, "FILE"),
    "--column": (str, "NAME"),
    "--method": (str, "NAME"),
    "--methods": (Path, "FILE"),
    "--kind": (str, f"[{'|'.join(KINDS)}]"),
    "--backend": (Backend, "[openvino|torch|tensorrt|tensorrt_rtx]"),
    "--precision": (Precision, ""),
    "--tp": (int, ""),
    "--threads": (int, ""),
    "--concurrency": (int, ""),
    "--max-tokens": (int, ""),
}
"""Types and placeholders of what many commands take"""
SYNONYMS = {
    "--bundle": ["--engine-dir", "--engine", "--engines", "--speculative", "--tokenizer"],
    "--drafter": ["--drafters", "--draft-model", "--speculator"],
    "--prompts": ["--dataset", "--input", "--input-file", "--prompt-file"],
    "--output": ["--out", "--output-dir", "--result-dir", "--save", "--folder"],
    "--tp": ["--tensor-parallel", "--tensor-parallel-size", "--tp-size", "--ranks"],
    "--precision": ["--dtype", "--quantization"],
    "--concurrency": ["--streams", "--clients", "--num-clients", "--parallel"],
    "--max-tokens": ["--max-new-tokens", "--tokens", "--output-len"],
    "--num-prompts": ["--prompts-count", "--num-requests", "--requests-count"],
    "--warm-up": ["--warmup", "--num-warmups"],
    "--tree-budget": ["--nodes", "--budget"],
    "--replace": ["--force", "--overwrite"],
    "--no-chat": ["--no-chat-template"],
    "--prompt-tokens": ["--prompt", "--input-len"],
}
"""What is called by the first name only"""
REASONS = {
    ("redraft distill", "--engine"): "a choice, whether a bundle generates or the model in torch",
    ("redraft distill", "--tokens"): "of all teacher data, not of an answer",
    ("redraft export trtllm", "--dtype"): "TensorRT-LLM's name and values, as of its other limits",
    ("python -m studies.figures.site", "--drafters"): "the folder that holds the drafters which ship",
    ("redraft status", "--config"): "prints what `redraft serve --config FILE` takes",
    ("redraft serve", "--backend"): "the settings check its value, from a file and a variable too",
    ("redraft serve", "--precision"): "",
}
"""Why an option may deviate"""
ODD_WORDS = re.compile(r"\b(so (many|much|long)|likeliest|alone|behind|in place of|dear)\b", re.IGNORECASE)


def base_type(annotation: Any) -> Any:
    """The type of one value: of list[Path] | None, Path."""
    parts = [part for part in typing.get_args(annotation) if part is not NoneType]
    if parts and typing.get_origin(annotation) is not typing.Literal:
        return base_type(parts[0])
    return str if annotation is None else annotation


def is_excused(program: str, option: Option) -> bool:
    return any((program, name) in REASONS for name in option.names)


@pytest.mark.parametrize("name", KNOWN)
def test_an_option_that_many_commands_have_is_one_thing(name):
    seen = {
        program: (base_type(option.type), option.metavar)
        for program, option in OPTIONS
        if name in option.names and not is_excused(program, option)
    }
    assert {program: found for program, found in seen.items() if found != KNOWN[name]} == {}


def test_an_option_has_one_type():
    types: dict[str, dict[Any, str]] = {}
    for program, option in OPTIONS:
        if not is_excused(program, option):
            for name in option.names:
                kind = bool if option.is_flag else base_type(option.type)
                types.setdefault(name, {}).setdefault(kind, program)
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


def test_a_thing_has_one_name():
    others = {other: name for name, names in SYNONYMS.items() for other in names}
    found = [
        f"{program} {name}: is {others[name]}"
        for program, option in OPTIONS
        for name in option.names
        if name in others and not is_excused(program, option)
    ]
    assert found == []


def test_no_reason_is_left_of_an_option_that_is_gone():
    named = {(program, name) for program, option in OPTIONS for name in option.names}
    assert set(REASONS) <= named


@pytest.mark.parametrize("program", programs())
def test_each_option_says_what_it_is_in_plain_words(program):
    for option in (*programs()[program].options, *programs()[program].arguments):
        if "--help" in option.names:
            continue
        assert option.help[:1].isupper() or option.help[:1] in "`'0/", f"{option.names}: {option.help!r}"
        assert not ODD_WORDS.search(option.help), f"{option.names}: {option.help}"
    assert not ODD_WORDS.search(programs()[program].help), programs()[program].help


@pytest.mark.parametrize("program", programs())
def test_each_option_says_what_it_is_without_it(program):
    """Typer adds a default to the help where there is one and it is not hidden."""
    silent = []
    for option in programs()[program].options:
        added = option.shows_default and option.default not in (None, "", [])
        is_off = "--help" in option.names or (option.is_flag and not option.default)
        if not (option.required or added or is_off or "default" in option.help.lower()):
            silent.append((option.names, option.help))
    assert silent == []


@pytest.mark.parametrize("program", programs())
def test_a_number_says_of_what_it_is(program):
    """Its help begins with what is counted, or the unit."""
    numbers = [option for option in programs()[program].options if base_type(option.type) in (int, float)]
    assert [option.names for option in numbers if re.match(r"(Of|How|From|Only)\b", option.help)] == []


def test_no_default_is_a_value_that_a_user_may_mean():
    """`.` is a folder: an option that was not given is None."""
    assert [(program, option.names) for program, option in OPTIONS if option.default == Path()] == []
