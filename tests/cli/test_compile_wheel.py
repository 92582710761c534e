"""The wheel: what is in it, and that it runs with its own dependencies only; and what extras and pins say."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import openvino
import pytest
from packaging.requirements import Requirement

from redraft.plugins.cuda import compile
from tests.conftest import ROOT, run_script

OTHER_EXTRAS = ("torch", "transformers", "onnx", "zmq", "msgpack", "mpi4py")
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({missing}))
import redraft, redraft.doctor
assert redraft.__file__.startswith({site!r})
with redraft.LLM({bundle!r}) as llm:
    print(llm.generate("Once upon a time", max_tokens=8).stats)
sys.argv = ["redraft", "chat", {bundle!r}, "--max-tokens", "8"]
from redraft.cli import main
main()
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"runtime": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
FILES = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_script("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    return next(folder.glob("redraft-*.whl"))


def test_a_source_archive_holds_the_operators(tmp_path):
    run_script("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    with tarfile.open(next(tmp_path.glob("redraft-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    plugins = {"redraft/plugins/kernels.py", "redraft/plugins/cpu/pool.cpp", "build/compile_wheel.py"}
    assert plugins | {"redraft/openai/page/page.js"} <= names


@pytest.mark.slow
def test_only_redraft_is_in_the_wheel(wheel):
    """It would catch a wheel that lacks a file, or installs a package called plugins."""
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"redraft", f"redraft-{PROJECT['version']}.dist-info"}
    assert re.search(r"manylinux_2_\d+_x86_64\.whl$", wheel.name)
    for file in (
        "serving/triton_repo/ensemble/config.pbtxt",
        "serving/requirements-triton.txt",
        "plugins/kernels.py",
        "model_defs/target/model.py",
        "drafters/SmolLM2-135M-Instruct/drafter.safetensors",
        "benchmarks/prompts.jsonl",
        "openai/page/index.html",
    ):
        assert f"redraft/{file}" in names
    for source, architecture in itertools.product(compile.sources(), compile.ARCHITECTURES):
        assert f"redraft/plugins/compiled/{source.parent.name}-{source.stem}-{architecture}.ptx" in names


@pytest.mark.slow
def test_it_runs_without_a_clone_a_compiler_or_other_extras(wheel, smollm2_bundle, tmp_path):
    """It would catch an import of another extra, or of a file of the clone, at run time."""
    site = tmp_path / "site"
    ZipFile(wheel).extractall(site)
    (site / "openvino").symlink_to(Path(openvino.__file__).parent)  # beside it, as in site-packages
    program = PROGRAM.format(missing=OTHER_EXTRAS, site=str(site), bundle=str(smollm2_bundle))
    environment = {"PYTHONPATH": str(site), "CXX": "/no/compiler", "HOME": "/no/home", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="Hi\n/stats\n",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 tokens in ") == 2


@pytest.mark.slow
def test_serving_from_it_says_what_is_missing(wheel, tmp_path):
    """It would catch a traceback instead of the package to install."""
    ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    arguments = ["serve", "--bundle", ".", "--run-dir", "run"]

    def serve(start: str) -> str:
        program = f"import sys; {start}; sys.argv = {['redraft', *arguments]}; from redraft.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        return done.stderr

    assert "pip install 'redraft[serve]'" in serve("sys.modules['zmq'] = None")
    message = serve(f"sys.prefix = {str(tmp_path)!r}")
    assert f"{tmp_path}/triton/bin/pip install -r {tmp_path}/redraft/serving/requirements-triton.txt" in message
    assert "nvidia-pytriton==" in message


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_extras_and_pins_agree(file):
    lines = file.read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("-r ")]
    wanted = [Requirement(text) for text in EXTRAS[file.stem]]
    included = {f"-r {extra}.txt" for one in wanted if one.name == "redraft" for extra in one.extras}
    assert included == {line for line in lines if line.startswith("-r ")}
    by_name = {one.name: one for one in wanted if one.name != "redraft"}
    assert by_name.keys() == {pin.name for pin in pins}
    for pin in pins:
        (version,) = pin.specifier
        assert version.operator == "=="
        assert by_name[pin.name].specifier.contains(version.version)
        assert by_name[pin.name].extras == pin.extras


def test_requirements_are_all_of_them_each_with_one_version():
    text = (ROOT / "requirements.txt").read_text()
    assert sorted(re.findall(r"^-r (.+)$", text, re.MULTILINE)) == [f"requirements/{file.name}" for file in FILES]
    pins = [line for file in FILES for line in file.read_text().splitlines() if not line.startswith("-r ")]
    assert len(set(pins)) == len({pin.split("==")[0] for pin in pins})


def test_triton_server_has_one_version():
    from redraft.serving.tritonserver import PYTRITON

    assert PYTRITON in (ROOT / "Makefile").read_text()
