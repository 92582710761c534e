"""The container's files agree with the product: paths, flags, ports and mounts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from typer.main import get_command

import launch
from redraft.cli import application
from redraft.serving.settings import API_KEY_VARIABLE, OPTIONS, PREFIX, read

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redraft"]
SERVICE, DEPLOYMENT = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
PORTS = {name: OPTIONS[f"{name}_port"].default for name in ("http", "grpc", "metrics", "openai")}
ALLOW_HOST_VARIABLE = PREFIX + "ALLOW_HOST"
LINES = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip() and not line.startswith("#")]


def instruction(name: str) -> list[str]:
    return [rest for kind, rest in INSTRUCTIONS if kind == name]


def test_the_dockerfile_copies_all_that_runs_and_only_that_is_sent_to_docker():
    copied = [path for rest in instruction("COPY") for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    packages = re.search(r"packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert {*re.findall(r'"(\w+)"', packages), "triton_repo", "requirements.txt", "requirements-triton.txt"} <= {
        *copied
    }
    first, *others = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*", "not artifacts, environments and history, which are gigabytes"
    sent = [path for rest in instruction("COPY") for path in rest.split()[:-1] if path != "./"]
    assert [name[1:] for name in others if name.startswith("!")] == sent
    assert instruction("WORKDIR") == [str(launch.IN_IMAGE)]


def test_versions_and_paths_of_triton_are_the_products():
    (version,) = [rest.removeprefix("TENSORRT=tensorrt-cu13==") for rest in instruction("ARG") if "TENSORRT" in rest]
    assert f"tensorrt-cu13-bindings=={version}\n" in (ROOT / "requirements" / "build.txt").read_text()
    (environment,) = instruction("ENV")
    assert dict(part.split("=", 1) for part in environment.split())[SERVER_VARIABLE] == str(CONTAINER_SERVER)
    image = f"redraft:{instruction('ARG')[0].removeprefix('TRITON=')}"
    assert COMPOSE["image"] == f"${{IMAGE:-{image}}}"
    assert launch.IMAGE == POD["containers"][0]["image"] == image


def test_the_containers_command_and_ports_are_those_of_serve(monkeypatch):
    """A client inside a cluster sends the service's name as Host, which comes in a variable."""
    monkeypatch.setenv(ALLOW_HOST_VARIABLE, "a.example b.example")
    _, name, *arguments = json.loads(instruction("CMD")[-1])
    with get_command(application("serve")).get_command(None, name).make_context(name, arguments) as context:
        options = context.params
    assert (options["foreground"], options["address"], str(options["bundle"])) == (True, "0.0.0.0", "/bundle")
    assert read({}).allow_host == ["a.example", "b.example"]
    assert launch.PORTS == PORTS
    assert instruction("EXPOSE") == [" ".join(map(str, PORTS.values()))]
    published = [re.fullmatch(r"\S*:-(\d+)\}:(\d+)", entry).groups() for entry in COMPOSE["ports"]]
    assert published == [(str(port), str(port)) for port in PORTS.values()]
    assert {port["name"]: port["port"] for port in SERVICE["spec"]["ports"]} == PORTS
    assert {port["name"]: port["containerPort"] for port in POD["containers"][0]["ports"]} == PORTS
    assert (launch.API_KEY, launch.ALLOW_HOST) == (API_KEY_VARIABLE, ALLOW_HOST_VARIABLE)
    assert COMPOSE["environment"] == [API_KEY_VARIABLE, ALLOW_HOST_VARIABLE]
    assert POD["containers"][0]["env"] == [{"name": ALLOW_HOST_VARIABLE, "value": SERVICE["metadata"]["name"]}]


def test_bundles_and_shared_memory_are_mounted_where_they_are_looked_for():
    (mount,) = COMPOSE["volumes"]
    assert (mount["type"], mount["target"], mount["read_only"]) == ("bind", "/bundle", True)
    assert COMPOSE["stop_grace_period"] == f"{launch.STOP_S}s"
    assert COMPOSE["shm_size"] == launch.SHARED_MEMORY + "b" == "2gb"
    assert POD["terminationGracePeriodSeconds"] == launch.STOP_S
    mounts = {mount["name"]: mount["mountPath"] for mount in POD["containers"][0]["volumeMounts"]}
    assert mounts == {"bundles": "/bundle", "shared-memory": "/dev/shm"}
    assert {volume["name"] for volume in POD["volumes"]} == {*mounts}
