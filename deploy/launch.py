#!/usr/bin/env python3
"""Serve a bundle in the container that deploy/Dockerfile makes, after checking that this machine can. Neither the
container nor anything in it was run on a GPU.

Needs only Python 3 and Docker, no package. --dry-run prints the command, and what would stop it here, and runs nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE = "redraft:25.11"
DRIVER = 580
"""The first driver release for CUDA 13."""
CAPABILITY = (8, 0)
"""The first compute capability that the CUDA kernels are for."""
WITH_KERNELS = ("tensorrt", "torch")
RTX_CAPABILITIES = ("8.6", "8.9", "12.0", "12.1")
"""The compute capabilities that TensorRT for RTX supports."""
ANY_GPU = "REDRAFT_ANY_GPU"
"""The environment variable that lets a bundle load on any other GPU; the container gets it too."""
API_KEY, ALLOW_HOST = "REDRAFT_API_KEY", "REDRAFT_ALLOW_HOST"
"""Environment variables with the key of /v1, and with the names that clients reach it by; the container gets both."""
PRECISIONS = {"bf16": (8, 0), "fp8": (8, 9)}
"""The first compute capability with tensor cores for a precision."""
GPU_BACKENDS = ("tensorrt", "tensorrt_rtx", "torch")
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 8003}
"""Inside the container, and by default outside."""
SHARED_MEMORY = "2g"
LEARNED = "redraft-learned"
"""The volume for what services learn of how much to draft."""
STOP_S = 40
"""Within which the worker, its ranks and Triton end by themselves."""
BUILD = "docker build -f deploy/Dockerfile -t {image} ."
ROOT = Path(__file__).resolve().parents[1]
IN_IMAGE = Path("/opt/redraft")
"""Where the image has the repository, without artifacts."""


class LaunchError(Exception):
    """The bundle cannot be served; the text says why and what to do."""


@dataclass(frozen=True)
class BundleFacts:
    """What of a bundle decides where it runs."""

    path: Path
    backend: str
    precision: str
    ranks: int
    compute_capability: str | None
    command: str

    @classmethod
    def read(cls, path: Path) -> BundleFacts:
        """Raises LaunchError for a folder that is no bundle, or one whose engines are not for GPUs."""
        config, manifest = (_json(path, name) for name in ("config.json", "manifest.json"))
        facts = cls(
            path.resolve(),
            str(config.get("backend")),
            str(config.get("precision")),
            int(config.get("tensor_parallel", 1)),
            manifest.get("versions", {}).get("compute_capability"),
            str(manifest.get("command", "redraft build")),
        )
        if facts.backend not in GPU_BACKENDS:
            raise LaunchError(
                f"{path} holds {facts.backend} engines, which run on the CPU: serve it with `redraft serve --bundle "
                f"{path}`, or build one with --backend tensorrt on a machine with the GPU that is to serve it"
            )
        return facts

    @property
    def needs(self) -> list[tuple[str, tuple[int, int]]]:
        """What needs which compute capability."""
        found = [("the CUDA kernels", CAPABILITY)] if self.backend in WITH_KERNELS else []
        found += [("sums over GPUs", CAPABILITY)] if self.ranks > 1 else []
        return found + [(f"{name} engines", oldest) for name, oldest in PRECISIONS.items() if name == self.precision]

    def supports(self, gpu: Gpu) -> bool:
        """Whether the backend's library supports a GPU, or is to try it all the same."""
        listed = self.backend != "tensorrt_rtx" or gpu.compute_capability in RTX_CAPABILITIES
        return listed or bool(os.environ.get(ANY_GPU))

    def rebuild(self, gpu: Gpu, image: str) -> str:
        """The host's command that builds the bundle anew in the container, on that GPU. Its mounts make the build
        command's paths right: relative ones in the repository's artifacts, and absolute ones."""
        words = shlex.split(self.command)
        named = (Path(word.partition("=")[2] if word.startswith("--") else word) for word in words)
        outside = (path for path in named if path.is_absolute() and IN_IMAGE not in path.parents)
        folders = {path.parent if len(path.parts) > 2 else path for path in outside}
        mounts = [f"{ROOT}/artifacts:{IN_IMAGE}/artifacts", *(f"{folder}:{folder}" for folder in sorted(folders))]
        volumes = [part for mount in mounts for part in ("-v", mount)]
        run = shlex.join(["docker", "run", "--rm", "--gpus", f"device={gpu.index}", *volumes, image])
        return f"{run} {self.command}"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    compute_capability: str
    driver: str
    uuid: str

    @property
    def capability(self) -> tuple[int, ...]:
        return tuple(map(int, self.compute_capability.split(".")))


def _json(folder: Path, name: str) -> dict[str, Any]:
    build = "build one with redraft build"
    if not folder.is_dir():
        raise LaunchError(f"{folder} does not exist: expected the folder of an engine bundle; {build}")
    try:
        value = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise LaunchError(f"{folder} is not an engine bundle: it has no {name}; {build}") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{folder / name} cannot be read ({error}); {build}") from None
    if not isinstance(value, dict):
        raise LaunchError(f"{folder / name} is no JSON object; {build}")
    return value


def _output(command: Sequence[str]) -> str | None:
    """What a command prints, None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def gpus() -> list[Gpu]:
    """This machine's GPUs. Raises LaunchError where nvidia-smi finds none."""
    listed = _output(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,uuid", "--format=csv,noheader"])
    rows = [[field.strip() for field in line.split(",")] for line in (listed or "").splitlines() if line.strip()]
    if not rows or any(len(row) != 4 for row in rows):
        raise LaunchError(
            f"no NVIDIA GPU: nvidia-smi is missing or finds none. Install a driver of release {DRIVER} or later, or "
            "serve an openvino bundle on the CPU with `redraft serve`"
        )
    return [Gpu(index, *row) for index, row in enumerate(rows)]


def taken(asked: str, here: list[Gpu]) -> list[Gpu | None]:
    """The GPUs that Docker gives for `--gpus`; None for one that nvidia-smi does not list, such as a part of one (MIG).
    Raises LaunchError for one that is not there."""
    parts = [part.partition("=") for part in next(csv.reader([asked]))]
    fields = dict((key, value) if equals else ("count", key) for key, equals, value in parts)
    count, devices = fields.get("count"), fields.get("device")
    if devices and not count:
        names = list(dict.fromkeys(devices.split(",")))
    elif not devices and count == "all":
        return [*here]
    elif not devices and (count or "1").isdecimal():
        names = [str(index) for index in range(int(count or 1))]
    else:
        raise LaunchError(f"--gpus {asked}: expected a number, all, or indices or UUIDs such as '\"device=2,3\"'")
    known = {name: gpu for gpu in here for name in (str(gpu.index), gpu.uuid)}
    if missing := [name for name in names if name.isdecimal() and name not in known]:
        listed = ", ".join(str(gpu.index) for gpu in here)
        raise LaunchError(f"--gpus {asked}: this machine has no GPU {missing[0]}: name some of {listed}")
    return [known.get(name) for name in names]


def problems(bundle: BundleFacts, image: str, asked: str | None = None) -> list[str]:
    """What keeps this machine from serving the bundle on the GPUs that `--gpus` asks for, each with its remedy."""
    found = []
    try:
        here = gpus()
        if int(here[0].driver.split(".")[0]) < DRIVER:
            found.append(f"the driver is {here[0].driver}: CUDA 13 needs release {DRIVER} or later; install one")
        if len(here) < bundle.ranks:
            found.append(
                f"{bundle.path} has {bundle.ranks} tensor-parallel ranks, this machine has {len(here)} GPUs: build it "
                f"with --tp {len(here)}"
            )
        given = taken(asked, here) if asked else here[: bundle.ranks]
        if len(given) < bundle.ranks <= len(here):
            found.append(
                f"{bundle.path} has {bundle.ranks} tensor-parallel ranks, --gpus {asked} gives them {len(given)} of "
                f"this machine's {len(here)} GPUs: name {bundle.ranks}"
            )
        judged = [gpu for gpu in given if gpu]
        old = [(gpu, what, oldest) for gpu in judged for what, oldest in bundle.needs if gpu.capability < oldest]
        wanted = bundle.compute_capability
        if other := next((gpu for gpu in judged if not bundle.supports(gpu)), None):
            found.append(
                f"this machine's {other.name} has compute capability {other.compute_capability}: TensorRT for RTX "
                f"supports {', '.join(RTX_CAPABILITIES)}; serve on one of these (--gpus chooses), build with --backend "
                f"tensorrt or torch for this one, or set {ANY_GPU}=1 to try it"
            )
        elif old:
            gpu, what, oldest = old[0]
            found.append(
                f"this machine's {gpu.name} has compute capability {gpu.compute_capability}: {what} need "
                f"{'.'.join(map(str, oldest))} or later; serve on a newer GPU (--gpus chooses), or an openvino "
                "bundle on the CPU with `redraft serve`"
            )
        elif other := next((gpu for gpu in judged if wanted not in (None, gpu.compute_capability)), None):
            found.append(
                f"{bundle.path} was built for a GPU of compute capability {wanted}, this machine's {other.name} has "
                f"{other.compute_capability}: rebuild it here with: {bundle.rebuild(other, image)}"
            )
    except LaunchError as error:
        found.append(str(error))
    if _output(["docker", "--version"]) is None:
        found.append("docker is missing: install Docker and NVIDIA's container toolkit (nvidia-ctk runtime configure)")
    elif _output(["docker", "info"]) is None:
        found.append("Docker's daemon does not answer: start it (systemctl start docker), or join the group docker")
    elif _output(["docker", "image", "inspect", image]) is None:
        found.append(f"there is no image {image}: build it with: {BUILD.format(image=image)}")
    return found


def docker_command(bundle: BundleFacts, options: argparse.Namespace) -> list[str]:
    """The command line that serves the bundle."""
    published = {name: getattr(options, f"{name}_port") for name in PORTS}
    return [
        *("docker", "run", "--detach", "--init", "--name", options.name, "--restart", "unless-stopped"),
        *("--stop-timeout", str(STOP_S)),
        *("--gpus", options.gpus or str(bundle.ranks)),
        *("--shm-size", SHARED_MEMORY, "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--mount", f"type=bind,source={bundle.path},target=/bundle,readonly"),
        *("--mount", f"type=volume,source={LEARNED},target=/learned"),
        *(part for name in (ANY_GPU, API_KEY) if os.environ.get(name) for part in ("--env", name)),
        *(("--env", f"{ALLOW_HOST}={' '.join(options.allow_host)}") if options.allow_host else ()),
        *(part for name, port in published.items() for part in ("-p", f"{options.address}:{port}:{PORTS[name]}")),
        options.image,
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a bundle in a container, on this machine's GPUs.")
    parser.add_argument("--bundle", type=Path, required=True, help="Folder of an engine bundle")
    parser.add_argument("--image", default=IMAGE, help=f"Made by `{BUILD.format(image='IMAGE')}`; default: %(default)s")
    parser.add_argument("--name", default="redraft", help="The container's name; default: %(default)s")
    parser.add_argument("--address", default="127.0.0.1", help="Where the ports are published; default: %(default)s")
    for name, port in PORTS.items():
        parser.add_argument(
            f"--{name}-port",
            type=int,
            default=port,
            help=f"Port of {name} outside of the container; default: %(default)s",
        )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=os.environ.get(ALLOW_HOST, "").split(),
        help="Another name by which clients may reach /v1; '*': any. Repeatable; default: none",
    )
    parser.add_argument("--gpus", help="As Docker takes it, such as '\"device=2,3\"'; default: one for each rank")
    parser.add_argument("--dry-run", action="store_true", help="Print the command and what would stop it here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    try:
        bundle = BundleFacts.read(options.bundle)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    command, found = docker_command(bundle, options), problems(bundle, options.image, options.gpus)
    for problem in found:
        print(f"launch: {problem}", file=sys.stderr)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    return 1 if found else subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
