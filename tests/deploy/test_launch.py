"""The launch script beside stand-ins for docker and nvidia-smi."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

import launch
from redraft.bundle.backends import BACKENDS
from redraft.engines.cuda.device import ANY_GPU, OLDEST_CAPABILITY, OLDEST_DRIVER, OLDEST_FOR
from redraft.engines.tensorrt.library import RTX_LIBRARY


@pytest.fixture
def bundle(tmp_path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A PATH with one H200 and a Docker that has the image; what docker ran is in `ran`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    smi(folder, "NVIDIA H200, 9.0, 580.95.05")
    script(folder, "docker", f'if [ "$1" = run ]; then printf "%s\\n" "$@" > {tmp_path}/ran; fi')
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_bundle(folder: Path, backend="tensorrt", capability: str | None = "9.0", ranks=1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"backend": backend, "tensor_parallel": ranks}))
    versions = {"compute_capability": capability} if capability else {}
    (folder / "manifest.json").write_text(json.dumps({"versions": versions, "command": "redraft build -x"}))
    return folder


def smi(folder: Path, *gpus: str) -> None:
    """An nvidia-smi with these names, compute capabilities and drivers."""
    script(folder, "nvidia-smi", "\n".join(f"echo '{gpu}, GPU-{index}'" for index, gpu in enumerate(gpus)))


def script(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    os.chmod(folder / name, 0o755)


def test_what_docker_is_asked_to_run(bundle, machine, tmp_path, capsys):
    expected = shlex.split(
        f"run --detach --init --name redraft --restart unless-stopped --stop-timeout 40 --gpus 1 --shm-size 2g "
        f"--ulimit memlock=-1 --ulimit stack=67108864 --mount type=bind,source={bundle},target=/bundle,readonly "
        "--mount type=volume,source=redraft-learned,target=/learned "
        "-p 127.0.0.1:8000:8000 -p 127.0.0.1:8001:8001 -p 127.0.0.1:8002:8002 -p 127.0.0.1:8003:8003 redraft:25.11"
    )
    assert launch.main(["--bundle", str(bundle), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert shlex.split(printed.out) == ["docker", *expected]
    assert printed.err == ""
    assert not (tmp_path / "ran").exists(), "a dry run runs nothing"
    assert launch.main(["--bundle", str(bundle)]) == 0
    assert (tmp_path / "ran").read_text().splitlines() == expected


def test_flags_reach_docker(tmp_path, machine, monkeypatch, capsys):
    monkeypatch.setenv(launch.API_KEY, "sk-secret")
    smi(machine, *["NVIDIA H200, 9.0, 590.44"] * 4)
    folder = write_bundle(tmp_path / "two", ranks=2)
    hosts = ["--allow-host", "a.example", "--allow-host", "b.example"]
    options = [*hosts, "--http-port", "9000", "--address", "0.0.0.0", "--image", "here/redraft:1"]
    assert launch.main(["--bundle", str(folder), "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    assert "--gpus 2 " in out
    assert "-p 0.0.0.0:9000:8000 -p 0.0.0.0:8001:8001" in out
    assert f"--env {launch.API_KEY} --env '{launch.ALLOW_HOST}=a.example b.example' " in out
    assert "sk-secret" not in out, "other users can read arguments"
    assert out.endswith("here/redraft:1\n")
    assert launch.main(["--bundle", str(folder), "--dry-run", "--gpus", '"device=2,3"']) == 0
    assert """--gpus '"device=2,3"' """ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("rm", "does not exist: expected the folder of an engine bundle; build one with redraft build"),
        ("json", "config.json cannot be read"),
        ("cpu", "holds openvino engines, which run on the CPU: serve it with `redraft serve --bundle"),
    ],
)
def test_a_bundle_that_cannot_be_served_is_refused_even_in_a_dry_run(tmp_path, machine, broken, message, capsys):
    folder = tmp_path / "b"
    if broken != "rm":
        write_bundle(folder, "openvino" if broken == "cpu" else "tensorrt")
    if broken == "json":
        (folder / "config.json").write_text("{")
    assert launch.main(["--bundle", str(folder), "--dry-run"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("nvidia-smi", None, "no NVIDIA GPU: nvidia-smi is missing or finds none. Install a driver of release 580"),
        (
            "nvidia-smi",
            "echo 'NVIDIA L4, 8.9, 580.1, GPU-0'",
            "of compute capability 9.0, this machine's NVIDIA L4 has 8.9: ",
        ),
        (
            "nvidia-smi",
            "echo 'Tesla T4, 7.5, 580.1, GPU-0'",
            "machine's Tesla T4 has compute capability 7.5: the CUDA kernels",
        ),
        (
            "nvidia-smi",
            "echo 'NVIDIA H200, 9.0, 575.57.08, GPU-0'",
            "the driver is 575.57.08: CUDA 13 needs release 580",
        ),
        ("docker", None, "docker is missing: install Docker and NVIDIA's container toolkit"),
        ("docker", 'test "$1" != info', "Docker's daemon does not answer: start it"),
    ],
)
def test_a_machine_that_cannot_serve_is_told_why(bundle, machine, tmp_path, name, body, message, capsys):
    (machine / name).unlink()
    if body:
        script(machine, name, body)
    assert launch.main(["--bundle", str(bundle)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert launch.main(["--bundle", str(bundle), "--dry-run"]) == 0, "a dry run prints the command all the same"
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out.startswith("docker run ")


TOO_OLD = "this machine's Tesla T4 has compute capability 7.5: the CUDA kernels need 8.0 or later; serve on a newer GPU"


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ('"device=1"', ""),
        ('"device=0"', TOO_OLD),
        ("1", TOO_OLD),
        ('"device=2"', '--gpus "device=2": this machine has no GPU 2: name some of 0, 1'),
        ("two", "--gpus two: expected a number, all, or indices or UUIDs such as '\"device=2,3\"'"),
    ],
)
def test_the_gpus_that_are_named_are_judged(bundle, machine, gpus, message, capsys):
    smi(machine, "Tesla T4, 7.5, 580.1", "NVIDIA H200, 9.0, 580.1")
    assert launch.main(["--bundle", str(bundle), "--gpus", gpus]) == bool(message)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("launch: ") == bool(message)


@pytest.mark.parametrize(
    ("flags", "mounts"),
    [
        ("--model artifacts/models/M --drafter drafters/M --output artifacts/engines/M", ()),
        (
            "--model=/data/models/M --drafter /opt/redraft/drafters/M --output '/my data/M'",
            ("/data/models", "/my data"),
        ),
    ],
)
def test_engines_of_another_gpu_are_rebuilt_by_a_command_of_the_host(bundle, machine, flags, mounts, capsys):
    """On the GPU that would serve them, which is not the first."""
    built = f"redraft build {flags}"
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"command": built}))
    smi(machine, "NVIDIA H200, 9.0, 580.1", "NVIDIA L4, 8.9, 580.1")
    assert launch.main(["--bundle", str(bundle), "--gpus", '"device=1"', "--image", "i:1"]) == 1
    said = capsys.readouterr().err
    volumes = [f"{launch.ROOT}/artifacts:/opt/redraft/artifacts", *(f"{folder}:{folder}" for folder in mounts)]
    assert shlex.split(said.partition("rebuild it here with: ")[2]) == [
        *("docker", "run", "--rm", "--gpus", "device=1"),
        *(part for volume in volumes for part in ("-v", volume)),
        "i:1",
        *shlex.split(built),
    ]


def test_the_engines_ask_for_the_same_driver_and_gpu():
    assert launch.DRIVER == OLDEST_DRIVER
    assert launch.CAPABILITY == OLDEST_CAPABILITY
    assert [f"{major}.{minor}" for major, minor in RTX_LIBRARY.gpus] == [*launch.RTX_CAPABILITIES]
    assert launch.ANY_GPU == ANY_GPU
    assert {*launch.GPU_BACKENDS} == {name for name, backend in BACKENDS.items() if "cuda" in backend.devices}
    assert launch.PRECISIONS == OLDEST_FOR
