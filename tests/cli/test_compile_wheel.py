"""The wheel: what is in it, and that a user does everything from it, in an empty folder and an empty REDRAFT_HOME."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import openvino
import pytest

from redraft import LLM
from redraft.bundle.config import BundleConfig
from redraft.model_defs.target.model import Target
from redraft.plugins.cuda import compile
from tests.conftest import ROOT, run_script
from tests.engines.tiny import random_model, tiny_target, write_model
from tests.serving.client_side import free_ports
from tests.toy_engine import toy_tokenizer

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
NAME = "nobodys-model"


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
        "drafters/Qwen2.5-Coder-0.5B-Instruct-Q4_K_M/drafter.safetensors",
        "benchmarks/prompts.jsonl",
        "openai/page/index.html",
    ):
        assert f"redraft/{file}" in names
    for source, architecture in itertools.product(compile.sources(), compile.ARCHITECTURES):
        for kind in ("ptx", "cubin"):
            assert f"redraft/plugins/compiled/{source.parent.name}-{source.stem}-{architecture}.{kind}" in names


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


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, which finds what the wheel needs in the one that runs the tests: of its
    site-packages, a folder that a .pth file names, the editable install of the clone is not followed."""
    folder = tmp_path_factory.mktemp("wheel") / "environment"
    run_script("-m", "venv", "--without-pip", folder)
    run_script("-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "openvino").symlink_to(Path(openvino.__file__).parent)  # beside it, as pip puts it
    return folder


@pytest.fixture
def redraft(environment, tmp_path) -> Iterator[Callable[..., str]]:
    """Runs a command of the wheel's in an empty folder and home; `without` are packages that cannot be imported."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDRAFT_PLUGIN_CACHE")
    }
    variables = inherited | {"HOME": str(tmp_path), "REDRAFT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    variables |= {"REDRAFT_TRITON_ENV": str(Path(sys.prefix) / "triton"), "CXX": "/no/compiler"}

    def run(*words: object, without: tuple[str, ...] = ()) -> str:
        for name in without:
            file = tmp_path / "without" / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
        python_path = {"PYTHONPATH": str(tmp_path / "without")} if without else {}
        done = subprocess.run(
            [environment / "bin" / "redraft", *map(str, words)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=variables | python_path,
            timeout=800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield run
    run("stop")


def ports() -> list[object]:
    """Options of `redraft serve` that choose free ports."""
    names = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
    return [word for pair in zip(names, free_ports(4), strict=True) for word in pair]


@pytest.mark.slow
def test_the_environment_has_the_wheels_package(environment):
    """Where the clone's was found, the tests below would say nothing of the wheel."""
    program = (
        "import redraft, redraft.plugins.library as l, torch; print(redraft.__file__, l.extension_path(), sep='\\n')"
    )
    done = subprocess.run([environment / "bin" / "python", "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(environment)) for path in done.stdout.split())


@pytest.mark.slow
def test_the_default_model_is_served_without_torch(redraft, smollm2, smollm2_bundle, tmp_path):
    """It would catch a service that imports torch or a file of the clone, and a bundle that the wheel takes for another
    one than the clone built: neither is built again."""
    for kind, folder in (("models", smollm2), ("engines", smollm2_bundle)):
        (tmp_path / "home" / kind).mkdir(parents=True)
        (tmp_path / "home" / kind / folder.name).symlink_to(folder)
    without = ("torch", "transformers")
    said = redraft("serve", "--precision", "bf16", *ports(), without=without)
    assert f"serving {smollm2_bundle.name}" in said
    assert "redraft build" not in said
    question = "Why is the sky blue?"
    answer = redraft("generate", question, "--max-tokens", 16, without=without)
    with LLM(smollm2_bundle) as llm:
        assert answer.startswith(llm.chat(question, max_tokens=16).text + "\n")
    assert "ready" in redraft("status", without=without)
    assert "stopped" in redraft("stop", without=without)


@pytest.mark.slow
def test_serving_from_it_says_how_to_add_triton(wheel, tmp_path):
    """It would catch a remedy that names a file of the clone, or comes after a build."""
    ZipFile(wheel).extractall(tmp_path)
    arguments = ["redraft", "serve", "nobodys/model", "--run-dir", "run"]
    program = (
        f"import sys; sys.prefix = {str(tmp_path)!r}; sys.argv = {arguments}; from redraft.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    pip = f"{tmp_path}/triton/bin/pip install"
    assert (
        f"{pip} -r {tmp_path}/redraft/serving/requirements-triton.txt && {pip} --no-deps nvidia-pytriton=="
        in done.stderr
    )


def odd_target() -> Target:
    """A Llama of odd sizes with a short context."""
    shape = {"hidden_size": 60, "intermediate_size": 88, "num_layers": 1, "max_position": 333}
    return random_model(dataclasses.replace(tiny_target().config, **shape, tie_embeddings=True, qkv_bias=False))


@pytest.mark.slow
def test_a_users_model_is_served_and_given_a_drafter(redraft, tmp_path):
    """It would catch a command that no longer hands the next one what it needs: fetched, served without a drafter,
    stopped, and given a drafter."""
    source = tmp_path / "source" / NAME
    write_model(odd_target(), source)
    toy_tokenizer().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    (source / "chat_template.jinja").write_text("Q{{ messages[0]['content'] }}A")
    rows = (json.dumps({"prompt": f"say {n} times {7 * n}"}) + "\n" for n in range(70))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    plain = ("--precision", "fp32")
    said = redraft("serve", tmp_path / "source" / NAME, *plain, *ports())
    ngrams = tmp_path / "home" / "engines" / f"{NAME}-ngrams-fp32"
    assert f"redraft build --model {tmp_path / 'home' / 'models' / NAME}" in said.replace("\n", "")
    (method,) = BundleConfig.read(ngrams).methods.values()
    assert (method.drafter, method.construction, method.ngram) == (None, None, True)
    assert "stopped" in redraft("stop")
    asked = ("drafter", "--model", NAME, "--prompts", "prompts.jsonl", "--hours", 0.004, *plain)
    said = redraft(*asked)
    assert "tokens of teacher data" in said
    assert "n-grams only" in said
    (method,) = BundleConfig.read(tmp_path / "home" / "engines" / f"{NAME}-redrafter-fp32").methods.values()
    assert method.drafter == "recurrent"
    drafter = tmp_path / "home" / "drafters" / NAME
    gains = json.loads((drafter / "gains.json").read_text())
    assert gains["speed"].keys() == {"n-grams", "drafter"}
    assert "redraft train --model" in (drafter / "drafter.log").read_text()
    assert "going on with" in redraft(*asked), "what was made is kept"
