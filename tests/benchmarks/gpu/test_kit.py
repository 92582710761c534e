"""The kit: what the calls take along arrives as it was and fits, and every command of a call is one that there is."""

import importlib
import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.command import execute
from benchmarks.gpu import kit
from redraft.cli import build, fetch
from redraft.compiler.methods import read_methods
from redraft.plugins.cuda.compile import image, ptx, sources
from tests.benchmarks.gpu.conftest import ROOT, Parsed, parsed_by_typer, raise_parsed

CALLS = ROOT / "benchmarks/gpu/calls"
COMMANDS = {"build": build, "fetch": fetch}


def run_call(call: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(folder / "out"), "SCRATCH": str(folder / "scratch"), **settings}
    command = ["bash", str(CALLS / f"{call}.sh")]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("call", [*kit.TRAVELS, "first_hour"])
def test_every_command_of_a_call_takes_its_arguments(call, device, tmp_path, monkeypatch):
    listed = run_call(call, tmp_path, DRY="1", DEVICE=device)
    assert not listed.stderr
    tried = 0
    for line in listed.stdout.splitlines():
        _, *words = shlex.split(line)
        if words[:2] == ["-m", "redraft"]:
            if "--model" in words:  # which an earlier line of the call fetches
                Path(words[words.index("--model") + 1]).mkdir(parents=True, exist_ok=True)
            assert parsed_by_typer(COMMANDS[words[2]].main, words[3:])
        elif words[:2] == ["-m", "benchmarks.gpu.kernel_resources"]:
            continue
        elif words[:1] == ["-m"] and words[1].startswith(("benchmarks.gpu.", "redraft.")):
            script = importlib.import_module(words[1])
            monkeypatch.setattr(script, "device_of", lambda *_, **__: raise_parsed())
            with pytest.raises(Parsed):
                execute(script.main, words[2:])
        elif words[:1] == ["-m"] and words[1] in ("benchmarks.speed.method_batches", "benchmarks.verify.lossless"):
            script = importlib.import_module(words[1])
            monkeypatch.setattr(script, "load_llm", lambda *_, **__: raise_parsed())
            with pytest.raises(Parsed):
                execute(script.main, words[2:])
        else:
            continue
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("call", ["a", "b", "c"])
def test_the_scripts_of_a_call_run_on_the_cpu(call, tmp_path):
    """Each script once at its tiny size, but for those that take what the kit holds. Nobody can try a call on a GPU
    before it costs GPU time."""
    listed = run_call(call, tmp_path, DRY="1", DEVICE="cpu").stdout.splitlines()
    lines = {line.split()[2]: shlex.split(line)[3:] for line in listed if " -m benchmarks.gpu." in line}
    scripts = {name: arguments for name, arguments in lines.items() if not any(".kit/" in word for word in arguments)}
    assert scripts
    for name, arguments in scripts.items():
        output = Path(arguments[arguments.index("--output") + 1])
        assert not execute(importlib.import_module(name).main, arguments)
        assert json.loads(output.read_text())["machine"]["device"] == "cpu"


@pytest.mark.parametrize("call", kit.TRAVELS)
def test_every_call_loads_the_kernels_of_the_kit(call, tmp_path):
    """Those that a call before it copied into the tree may be gone: the tree is sent anew."""
    listed = run_call(call, tmp_path, DRY="1", DEVICE="cuda").stdout.splitlines()
    copied = [number for number, line in enumerate(listed) if "common'/*.{ptx,cubin} plugins/compiled/" in line]
    first = min(number for number, line in enumerate(listed) if line.startswith("python3") and "-m pip" not in line)
    assert len(copied) == 1
    assert copied[0] < first
    kept = any(line.startswith("cp -r") and ".kit/common" in line for line in listed)
    assert kept is (kit.COMMON in kit.TRAVELS[call])


def test_a_row_that_fails_or_hangs_is_said_and_the_next_one_runs(tmp_path):
    call = tmp_path / "x.sh"
    call.write_text(
        f'CALL=x; source "{CALLS}/lib.sh"\n'
        "row wrong 5 false\nrow slow 1 sleep 60\nrow right 5 echo it ran\nend\n"
    )  # fmt: skip
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "SCRATCH": str(tmp_path), "DEVICE": "cuda"}
    environment["TMPDIR"] = str(temporary)
    done = subprocess.run(["bash", str(call)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert not list(temporary.iterdir()), "what it notes for its end is removed"
    log = (tmp_path / "out/x.log").read_text()
    assert log.index("wrong: failed (1)") < log.index("slow: timed out") < log.index("right: ok")
    assert "it ran\n" in log


def test_a_file_in_two_halves_is_whole_again(tmp_path):
    whole = tmp_path / "library.whl"
    whole.write_bytes(bytes(range(256)) * 111)
    kit.split(whole, 12_345, tmp_path / "a", tmp_path / "b")
    first, second = (tmp_path / folder / f"library.whl.part{part}" for folder, part in (("a", 1), ("b", 2)))
    assert first.stat().st_size == 12_345
    assert first.read_bytes() + second.read_bytes() == whole.read_bytes()


def test_a_call_without_its_first_half_says_which_call_is_missing(tmp_path):
    done = run_call("b", tmp_path, DEVICE="cpu")
    assert done.returncode == 1
    assert "run the call before this one on the same machine" in done.stdout


def test_the_kernels_of_a_kit_are_the_ones_that_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.plugins.cuda.compile.ptx", lambda source, architecture: f"{source} {architecture}")
    monkeypatch.setattr(
        "redraft.plugins.cuda.compile.assemble", lambda code, *to: to[1].write_bytes(code.read_bytes()[::-1])
    )
    kit.write_kernels(tmp_path)
    monkeypatch.setattr("redraft.plugins.cuda.compile.COMPILED", tmp_path)
    monkeypatch.delenv("NVCC", raising=False)
    assert [ptx(source, "sm_90") for source in sources()] == [f"{source} sm_90" for source in sources()]
    assert [image(source, "sm_90")[::-1].decode() for source in sources()] == [
        f"{source} sm_90" for source in sources()
    ]


def test_a_load_that_is_too_large_says_what_to_leave_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kit, "ROOT", tmp_path)
    monkeypatch.setattr(kit, "tree_size", lambda _: 3 * kit.MIB)
    for call in kit.TRAVELS:
        (tmp_path / kit.KIT / call).mkdir(parents=True)
    (tmp_path / kit.KIT / "c/part").write_bytes(bytes(2 * kit.MIB))
    assert execute(kit.main, ["--sizes", "--limit-mib", "4"]) == 2
    said = capsys.readouterr().err
    assert "over 4 MiB: bash benchmarks/gpu/calls/c.sh." in said
    assert "git sparse-checkout set" in said
    assert execute(kit.main, ["--sizes", "--limit-mib", "5"]) == 0


def test_the_methods_of_the_last_call_are_of_the_drafters_that_travel():
    named = {settings.drafter.name for settings in read_methods(CALLS / "d.toml").values()}
    assert named == set(kit.DRAFTERS)
    assert tomllib.loads((CALLS / "d.toml").read_text()).keys() == {"best", "eagle"}


@pytest.mark.slow
def test_a_smoke_engine_is_built_without_a_gpu(tmp_path):
    """It would catch a network that TensorRT for RTX refuses, before a GPU machine does."""
    kit.write_smoke_engine(tmp_path / "smoke.engine")
    assert (tmp_path / "smoke.engine").stat().st_size > 2 * 256 * 256 * 2
