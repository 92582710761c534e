"""Packing and unpacking: everything arrives as it was, limits hold, and what is missing, damaged or too large is said
in a line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import pack, unpack

FILES = {
    "code.py": b"print('code')\n",
    "docs/results/big.json": b"x" * 500_000,
    "docs/results/methods.json": b"{}",
    "drafters/one/drafter.safetensors": b"1" * 300_000,
    "drafters/two/drafter.safetensors": b"2" * 6_000_000,
    "build/fetch_model.py": b"import sys\nopen('made', 'w').write(' '.join(sys.argv[1:]))\n",
}
WHEEL = "dummy-1.0-py3-none-any.whl"


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A clone with two drafters, a model's file and no package index."""
    root = tmp_path / "repository"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "linked").symlink_to("docs")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 10_000)

    def download(requirements: list[str], python: str, folder: Path) -> list[Path]:
        (folder / WHEEL).write_bytes(b"wheel")
        return [folder / WHEEL]

    monkeypatch.setattr(pack, "ROOT", root)
    monkeypatch.setattr(pack, "download", download)
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def installed(monkeypatch) -> list[list[str]]:
    """pip's commands on the GPU machine, none of which runs."""
    commands: list[list[str]] = []
    run = unpack.run

    def record(command: list[str], folder: Path) -> None:
        if "pip" in command:
            commands.append(command)
            (folder / unpack.SITE).mkdir(parents=True, exist_ok=True)
        else:
            run(command, folder)

    monkeypatch.setattr(unpack, "run", record)
    return commands


def loads(limit: float | None, *more: str) -> int | str:
    limits = [] if limit is None else ["--limit-mib", str(limit)]
    return pack.main([*limits, "--model", "model.gguf", "--drafters", "one", *more])


def sizes(output: Path) -> list[int]:
    return [sum(file.stat().st_size for file in load.iterdir()) for load in sorted(output.glob("load-*"))]


@pytest.mark.parametrize("limit", [1.0, None])
def test_what_is_packed_arrives(limit, repository, tmp_path, installed):
    assert loads(limit) == 0
    output = tmp_path / "artifacts/gpu/pack"
    if limit:
        assert len(sizes(output)) == 3
        assert max(sizes(output)) <= limit * pack.MIB
    there = tmp_path / "there"
    there.mkdir()
    assert unpack.unpack(output, there) == []
    arrived = {name for name in FILES if (there / name).is_file()}
    assert arrived == set(FILES) - {"docs/results/big.json", "drafters/two/drafter.safetensors"}
    assert (there / "code.py").read_bytes() == FILES["code.py"]
    assert (there / "linked").readlink() == Path("docs"), "as the operators' package is a link to their folder"
    assert (there / "artifacts/cache/model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert (there / "made").read_text() == "artifacts/cache/model.gguf --name model"
    assert [command[-1] for command in installed] == [f"{unpack.WHEELS}/{WHEEL}"]
    unpack.unpack(output, there)
    assert len(installed) == 1, "nothing is installed again"


def test_loads_arrive_one_after_the_other(repository, tmp_path, installed):
    assert loads(1.0) == 0
    output, pieces, there = tmp_path / "artifacts/gpu/pack", tmp_path / "pieces", tmp_path / "there"
    there.mkdir()
    shutil.copytree(output / "load-1", pieces / "load-1")
    assert unpack.unpack(pieces, there) == ["load-2", "load-3"]
    assert (there / "code.py").is_file()
    assert not (there / "made").exists()
    script = [sys.executable, "-S", str(pieces / "load-1/unpack.py"), "--into", str(there)]
    (there / unpack.SITE / ".installed").write_text(json.dumps([f"{unpack.WHEELS}/{WHEEL}"]))
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "load-2, load-3 not here: carry it beside" in done.stderr
    assert subprocess.run([*script, "--partial"], capture_output=True).returncode == 0
    for load in ("load-2", "load-3"):
        shutil.copytree(output / load, pieces / load)
    assert unpack.unpack(pieces, there) == []
    assert (there / "made").exists()


def test_a_damaged_part_is_named(repository, tmp_path, installed):
    assert loads(1.0) == 0
    output = tmp_path / "artifacts/gpu/pack"
    part = output / "load-3/model.gguf.part3"
    part.write_bytes(b"?" + part.read_bytes()[1:])
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(unpack.PackError, match=r"model.gguf is damaged .*load-3/model.gguf.part3 again"):
        unpack.unpack(output, there)
    assert not (there / "artifacts/cache/model.gguf").exists()


def test_loads_of_two_packs_are_refused(repository, tmp_path, installed):
    assert loads(1.0) == 0
    output = tmp_path / "artifacts/gpu/pack"
    contents = json.loads((output / "load-2/contents.json").read_text())
    (output / "load-2/contents.json").write_text(json.dumps(contents | {"after": []}))
    with pytest.raises(unpack.PackError, match="another pack"):
        unpack.unpack(output, tmp_path)


def test_too_many_loads_are_refused_with_what_is_largest(repository, tmp_path):
    said = loads(1.0, "--loads", "2")
    assert "--loads 2: 3 loads are needed" in str(said)
    assert "The largest are artifacts/cache/model.gguf (2.4 MiB)" in str(said)
    assert not (tmp_path / "artifacts").exists()


def test_a_tree_that_travels_beside_counts(repository, tmp_path):
    """It says what can be left out of the working tree, and that works."""
    said = str(loads(8.0, "--tree", "beside"))
    assert (
        "the working tree takes 6.5 MiB of every load; leave out drafters/two (5.7 MiB), docs/results (0.5 MiB)" in said
    )
    command = said.split(": ")[-1].split(" (")[0]
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "x"], cwd=repository, check=True)
    subprocess.run(command, shell=True, cwd=repository, check=True)
    assert loads(8.0, "--tree", "beside") == 0
    names = json.loads((tmp_path / "artifacts/gpu/pack/load-1/contents.json").read_text())["files"]
    assert set(names) == {f"{unpack.WHEELS}/{WHEEL}", "artifacts/cache/model.gguf"}
    assert (repository / "docs/results/methods.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "three"], "--drafters three: expected some of one, two"),
        (["--model", "nowhere"], "--model nowhere: expected default, none, a .gguf file or a folder"),
        (["--packages", "no-such-package"], "--packages no-such-package: not installed here"),
        (["--output", "."], "--output .: holds something that is no pack"),
    ],
)
def test_what_cannot_be_packed_is_said(arguments, message, repository):
    assert message in str(loads(None, *arguments))


def test_packages_are_those_that_a_machine_lacks():
    names = {requirement.split("==")[0] for requirement in pack.lacking(None)}
    assert {"pydantic", "pydantic-core", "annotated-types", "psutil", "pytest", "pluggy"} <= names
    assert not names & {"torch", "numpy", "rich", "pyzmq", "openvino", "packaging"}
    there = {"Pydantic_Core", "msgpack", "psutil", "pytest"}
    assert "pydantic" in {requirement.split("==")[0] for requirement in pack.lacking(there)}
    assert not {r.split("==")[0] for r in pack.lacking(there)} & {"pydantic-core", "msgpack", "pluggy"}
