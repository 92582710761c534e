"""What the reference page of errors says of all codes, and what messages tell to do."""

import ast
import re

import pytest

from redraft.errors import Code
from tests.conftest import ROOT

SOURCES = [file for folder in ("redraft", "benchmarks", "studies") for file in (ROOT / folder).rglob("*.py")]
SOURCES += [file for folder in ("plugins", "model_defs") for file in (ROOT / folder).rglob("*.py")]
BARE_PIP = re.compile(r"(?<![/\w])pip (un)?install")


def test_the_type_follows_from_the_status_as_the_page_says():
    for code in Code:
        type_ = (
            "server_error" if code.http >= 500 else "rate_limit_error" if code.http == 429 else "invalid_request_error"
        )
        assert code.type == type_


def messages(source: str) -> list[str]:
    """The texts of a module, without docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text.value for text in texts if id(text) not in docstrings]


@pytest.mark.parametrize("source", ["f'{package}: pip install {package}'", "x = 'run pip uninstall -y torch'"])
def test_a_bare_pip_is_seen(source):
    assert any(BARE_PIP.search(text) for text in messages(source))


def test_messages_name_the_pip_of_the_environment_that_runs():
    """A bare `pip` may be another Python's: `redraft.errors.install` and `program` know the path."""
    bare = {
        (file.relative_to(ROOT).as_posix(), text)
        for file in SOURCES
        for text in messages(file.read_text())
        if BARE_PIP.search(text)
    }
    assert bare == set()
