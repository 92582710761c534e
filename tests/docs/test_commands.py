"""Commands that the repository spells name programs, options and values that exist: on the pages, in scripts and the
files of containers, and in the source: messages, hints, help, comments, and the lists that start a process."""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.cli import COMMANDS
from tests.programs import ROOT, Option, Program, programs

FILES = [
    Path(name)
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    if not name.startswith("tests/")
    and name != "CHANGELOG.md"  # it names what there was
    and re.search(r"(\.(py|md|sh|yaml|toml|html)|file|run)$", name)
]
SCRIPT = re.compile(r"\b((?:build|deploy|tests|benchmarks|studies)/[\w./-]*\w\.(?:py|toml|jsonl|yaml))\b")
TARGET = re.compile(r"(?:^|`|&& )make (?:-f (studies/Makefile) )?([a-z][a-z-]*)", re.MULTILINE)
TARGETS = {
    file: set(re.findall(r"^([a-z][a-z-]*):", (ROOT / (file or "Makefile")).read_text(), re.MULTILINE))
    for file in ("", "studies/Makefile")
}
MODULES = r"(?:benchmarks|studies|redraft|plugins)(?:\.[a-z_0-9]+)+"
START = re.compile(rf"(?<![\w./-])(?:(redraft) (?=[a-z-])|python -m (?={MODULES}(?![\w.]))|(?=deploy/launch\.py[\s`]))")
VERBS = {"is", "makes", "says", "asks", "in", "authors", "worker", "import", "redraft"}
"""Words after the product's name that are no commands"""
SPELLINGS = [
    (re.compile(r"\\\n\s*"), " "),
    (re.compile(r"\$\(on \w+ ([^()]*)\)"), r"\1"),  # benchmarks/gpu/calls/lib.sh: words for one kind of machine
    (re.compile(r"(?:python_row|row) \w+ \d+ (?=benchmarks\.)"), "python -m "),
    (re.compile(r"\$\((?:PY|REDRAFT)\)"), lambda match: {"PY": "python", "REDRAFT": "redraft"}[match[0][2:-1]]),
    (re.compile(r"\$\([^()]*\)"), "$VALUE"),
    (re.compile(r"(?:\.venv/bin/|CLIENTS/bin/)?python3? -m"), "python -m"),
    (re.compile(r"python -m redraft(?=\s)"), "redraft"),
    (re.compile(r"\.venv/bin/redraft\b"), "redraft"),
    (re.compile(r"(?:python3? )?build/(\w+)\.py"), lambda match: _stub(match[1])),
    (re.compile(r"\b(?:re)?buil[dt](?: it| one| again| the bundle)* with (?=--)"), "redraft build "),
    (re.compile(r"python3? (?=deploy/launch\.py)"), ""),
]
"""The ways to spell a command, and the one that is checked"""
END = re.compile(r"\n|&&|[|;`)>─]|\[/| \.\.|\.(?: |$)| #|:(?: |$)|, |$")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_/.]*|.*[{}$].*")


def _stub(name: str) -> str:
    """The command that a script of build/ runs."""
    command = re.search(r'main\("(\w+)"', (ROOT / "build" / f"{name}.py").read_text())
    return f"redraft {command[1]}" if command else f"build/{name}.py"


def commands(text: str) -> Iterator[str]:
    """The commands in a text, each from its program's name to where it ends."""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    for start in START.finditer(text):
        following = START.search(text, start.end() + 1)
        rest = text[start.start() : following.start() if following else len(text)]
        yield re.sub(r"(?<=\w)\{\}", " {}", rest[: END.search(rest).start()]).strip()


def problems(command: str, whole: bool) -> list[str]:
    """What is wrong with a command. Where it is `whole`, nothing that it needs is missing; else it is part of a
    sentence, where words stand between its options."""
    words = shlex.split(command) if whole else command.split()
    if words[0] == "redraft" and (words[1].rstrip(":") in VERBS or words[1].startswith("--")):
        return []
    words = [word.rstrip(":") for word in words]
    known = programs()
    name = next((name for count in (4, 3, 2, 1) if (name := " ".join(words[:count])) in known), None)
    if name is None:
        # A group of commands, such as `redraft export`
        size = 3 if words[0] == "python" else 2
        is_group = any(other.startswith(" ".join(words[:size]) + " ") for other in known)
        if is_group:
            no_name = len(words) == size or words[size].startswith("-") or (not whole and words[0] == "redraft")
            return [] if no_name else [f"no such program: {command}"]
        file = ROOT.joinpath(*words[2].split(".")).with_suffix(".py") if words[0] == "python" else None
        is_module = file is not None and file.is_file() and "__main__" in file.read_text()
        return [] if is_module else [f"no such program: {command}"]
    return list(_wrong_words(known[name], words[len(name.split()) :], whole))


def _wrong_words(program: Program, words: list[str], whole: bool) -> Iterator[str]:
    given: set[Option] = set()
    arguments, option, left = 0, None, 0
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.rstrip(".,:?'\"").partition("=")
            option = program.option(name)
            if option is None:
                if name != "--help":
                    yield f"{program.name} has no option {name}"
                left = 1
                continue
            given.add(option)
            left = 0 if option.is_flag else len(words) if option.repeats else option.count
            if equals:
                yield from _wrong_value(program, option, value)
                left = 0
        elif left:
            left -= 1
            if whole and option:
                yield from _wrong_value(program, option, word)
        else:
            arguments += 1
    if whole and "--help" not in words and not any("$" in word for word in words):
        for needed in program.options:
            if needed.required and needed not in given:
                yield f"{program.name} needs {needed.names[0]}"
        needed = sum(argument.required for argument in program.arguments)
        most = len(words) if any(argument.repeats for argument in program.arguments) else len(program.arguments)
        if not needed <= arguments <= most:
            yield f"{program.name} takes {needed} to {most} arguments, got {arguments}: {' '.join(words)}"


def _wrong_value(program: Program, option: Option, value: str) -> Iterator[str]:
    value = value.strip("\"'")
    if not value or PLACEHOLDER.fullmatch(value):
        return
    if option.choices and value not in option.choices:
        yield f"{program.name} {option.names[0]} {value}: expected one of {', '.join(option.choices)}"
    number = {int: r"-?[\d_]+", float: r"-?[\d.e+-]+|inf"}.get(option.type)
    if number and not re.fullmatch(number, value):
        yield f"{program.name} {option.names[0]} {value}: expected a number"


def of_page(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a page: those in a block are whole."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        is_drawing = "─" in block
        yield from ((command, not is_drawing) for command in commands(re.sub(r"(?m)  +#.*$", "", block)))
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", rest):
        yield from ((command, False) for command in commands(span))


def of_source(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a module: those of its texts and comments, and lists of words that begin with a program."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from ((command, False) for command in commands(token.string))
    tree = ast.parse(text)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.right) for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    for node in ast.walk(tree):
        words = _words(node)
        for command in commands(" ".join(words)) if words else ():
            yield command, False
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in inner:
            # A sentence goes on in the next line; a docstring's example of a command does not.
            message = re.sub(r"(?<![\n\\])\n(?!\n| *(?:python|redraft))", " ", _text(node))
            yield from ((command, False) for command in commands(message))


def _text(node: ast.AST) -> str:
    """The text that an expression makes, with {} for what is known only when it runs."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return "{}"


def _words(node: ast.AST) -> list[str]:
    """The words of a list that starts a program, and of a call that runs a command or a module."""
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            words = [_word(element) for element in elements]
        case ast.Call(func=ast.Attribute(attr="run"), args=[ast.Constant(value=str(name)), *more]) if name in COMMANDS:
            words = ["redraft", name, *map(_word, more)]
        case ast.Call(func=ast.Name(id="run"), args=[ast.Constant(value=str(name)), *more]):
            words = ["python", "-m", name, *map(_word, more)]
        case ast.Call(func=ast.Name(id="main"), args=[ast.Constant(value=str(name)), *more]) if name in COMMANDS:
            words = ["redraft", name]
        case _:
            return []
    if "-m" in words[:-1]:
        return ["python", *words[words.index("-m") :]]
    return words if words[:1] == ["redraft"] and len(words) > 1 and words[1] in COMMANDS else []


def _word(node: ast.AST) -> str:
    match node:
        case ast.Starred(value=ast.Tuple(elts=elements)):
            return " ".join(map(_word, elements))
        case ast.Call(func=ast.Name(id="program"), args=[ast.Constant(value=str(name))]):
            return name
    return _text(node)


def of_script(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a script, or of a file of a container, which has them as lists of texts too."""
    listed = re.sub(r'",\s*"', " ", text)
    for command in commands(re.sub(r"(?m)^(\s*)@?\[?\"?(?=redraft)", r"\1", listed)):
        yield command.rstrip('"]'), False


READERS = {".md": of_page, ".py": of_source}
OPTION = re.compile(r"(?<![\w<!-])--[a-z][a-z-]+(?![\w{-])")
FOREIGN = re.compile(
    "--(allow-[cg]pu-metrics|backend-(config|directory)|disable-auto-complete-config|exit-timeout-secs|grpc-address"
    "|grpc-infer-allocation-pool-size|http-address|load-model|metrics-address|model-control-mode|model-repository"
    "|detach|env|init|mount|restart|rm|shm-size|stop-timeout|ulimit"
    "|dest|extra-index-url|from-file|from-literal|local-dir|merge|no-deps|only-binary|qformat|return-context-logits|tokenizer|workers|help|version"
    "|worker-niceness|other)"
    r"|--(master-addr|master-port|max-restarts|nnodes|node-rank|nproc-per-node)"
    r"|--(array|batch|cpus-per-task|for|gpus-per-node|nodes|ntasks-per-node|signal|timeout)"
    r"|--(disable-circuit-breaker|health-check-interval-secs|health-failure-threshold|policy|worker-urls)"
)
"""Options of other programs that messages and pages name: Triton's, Docker's, torchrun's, and others'"""


VARIABLE = re.compile(r"(?<![\w${])([A-Z][A-Z_]+)=(?![=A-Z])")
SMG = "smg launch --host 127.0.0.1"
"""It has an option that redraft has by another name."""
OTHERS_VARIABLES = re.compile(r"studies/Makefile|docker|Compose|DEVICE=cpu")
"""Lines with variables of other programs, that are named like options"""


def wrong(file: Path, text: str) -> list[str]:
    """What is wrong with the commands that a file spells, and the options that it names without one."""
    found = [
        problem for command, whole in READERS.get(file.suffix, of_script)(text) for problem in problems(command, whole)
    ]
    if file.suffix in READERS and file.parts[0] in (
        "redraft",
        "model_defs",
        "plugins",
        "docs",
        "README.md",
        "drafters",
    ):
        known = {name for program in programs().values() for option in program.options for name in option.names}
        named = {name for name in OPTION.findall(text.replace(SMG, "")) if not FOREIGN.fullmatch(name)}
        found += [f"no program has an option {name}" for name in sorted(named - known)]
        found += [
            f"make has no variable {name}: an option is meant"
            for line in text.splitlines()
            for name in VARIABLE.findall(line)
            if f"--{name.lower().replace('_', '-')}" in known and not OTHERS_VARIABLES.search(line)
        ]
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_spells_commands_that_there_are(file):
    text = (ROOT / file).read_text()
    assert wrong(file, text) == []
    if file.suffix in READERS:
        assert [script for script in SCRIPT.findall(text) if not (ROOT / script).exists()] == []
    assert [(name, target) for name, target in TARGET.findall(text) if target not in TARGETS[name]] == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("a.md", "`redraft count` counts", "no such program: redraft count"),
        ("a.md", "`redraft train --dataset x`", "redraft train has no option --dataset"),
        ("a.md", "```\n$ .venv/bin/redraft tune \\\n  --minutes 1\n```", "redraft tune needs --bundle"),
        ("a.md", "```\nredraft generate Why is it\n```", "redraft generate takes 1 to 1 arguments, got 3: Why is it"),
        ("a.md", "```\nredraft build --precision fp7\n```", "redraft build --precision fp7: expected one of fp32"),
        ("a.md", "```\nredraft build --slots many\n```", "redraft build --slots many: expected a number"),
        ("a.md", "```\npython build/tune.py --bundle B --dataset D\n```", "redraft tune has no option --dataset"),
        ("a.md", "`python -m benchmarks.gpu.first_hour`", "no such program: python -m benchmarks.gpu.first_hour"),
        ("a.md", "`python3 deploy/launch.py --detach`", "deploy/launch.py has no option --detach"),
        ("docs/a.md", "`--tensor-parallel` is", "no program has an option --tensor-parallel"),
        ("docs/a.md", "`COLUMN=name` reads", "make has no variable COLUMN: an option is meant"),
        ("a.sh", "row x 3 benchmarks.gpu.kernels $(on cuda --no)", "python -m benchmarks.gpu.kernels has no option"),
        ("a.yaml", 'command: ["redraft", "serve", "--stay"]', "redraft serve has no option --stay"),
        ("Makefile", "x:\n\t$(PY) -m studies.training loss", "no such program: python -m studies.training loss"),
        ("a.py", '"""Do it.\n\n    python -m studies.training table --rank 1\n"""', "python -m studies.training table"),
        ("a.py", "fail(f'{x}: `redraft fetch {y} --again` does')", "redraft fetch has no option --again"),
        ("a.py", "fail('lost: redraft fetch '\n     f'--again does')", "redraft fetch has no option --again"),
        ("a.py", "x = f'{y}: re' + 'build with --max-context {z}'", "redraft build has no option --max-context"),
        ("a.py", "# redraft count says it", "no such program: redraft count says it"),
        ("a.py", "x = ['redraft', 'stop', *more, '--now']", "redraft stop has no option --now"),
        ("a.py", "steps.run('train', '--drafter', kind)", "redraft train has no option --drafter"),
        ("a.py", "[python, '-m', 'redraft.worker.server', '--threads']", "python -m redraft.worker.server has"),
        ("redraft/a.py", "x = 'a larger --tensor-parallel fits'", "no program has an option --tensor-parallel"),
    ],
)  # fmt: skip
def test_a_stale_command_is_found(file, text, problem):
    assert any(found.startswith(problem) for found in wrong(Path(file), text)), wrong(Path(file), text)
