"""The container's files agree with the product: paths, flags, ports, probes and versions."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

import launch
from redraft.cli import application
from redraft.serving.settings import API_KEY_VARIABLE, OPTIONS, PREFIX, read
from tests.deploy.kustomize import kustomize

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BASE = DEPLOY / "kubernetes/base"
SERVICE, REPLICAS = yaml.safe_load_all((BASE / "service.yaml").read_text())
DEPLOYMENT = yaml.safe_load((BASE / "deployment.yaml").read_text())
PAGE = (ROOT / "docs" / "guides" / "deployment.md").read_text()
PORTS = {name: OPTIONS[f"{name}_port"].default for name in ("http", "grpc", "metrics", "openai")}
ALLOW_HOST_VARIABLE = PREFIX + "ALLOW_HOST"
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


def instruction(name: str) -> list[str]:
    return [rest for kind, rest in INSTRUCTIONS if kind == name]


def container_command() -> list[str]:
    return json.loads(instruction("CMD")[-1])


def flags() -> dict[str, str]:
    command = container_command()
    assert command[:2] == ["redraft", "serve"]
    assert command[2] == "--foreground"
    return dict(zip(command[3::2], command[4::2], strict=True))


def test_what_the_dockerfile_copies_is_there_and_is_all_that_runs():
    copied = [path for rest in instruction("COPY") for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    rooms = {"build", "benchmarks", "model_defs", "plugins", "redraft", "triton_repo"}
    assert rooms | {"requirements.txt", "requirements-gpu.txt", "requirements-triton.txt", "pyproject.toml"} < set(
        copied
    )
    assert instruction("WORKDIR") == [str(launch.IN_IMAGE)]
    packages = re.search(r"packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert set(re.findall(r'"(\w+)"', packages)) <= set(copied)


def test_only_what_is_copied_is_sent_to_docker():
    """Not artifacts, environments and history, which are gigabytes."""
    copied = [path for rest in instruction("COPY") for path in rest.split()[:-1] if path != "./"]
    first, *others = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*"
    assert [name[1:] for name in others if name.startswith("!")] == copied
    assert "**/__pycache__" in others


def test_the_containers_command_is_one_of_redrafts():
    command = get_command(application("serve"))
    serve = command.get_command(None, "serve")
    context = serve.make_context("serve", container_command()[2:])
    assert context.params["foreground"]
    assert (context.params["address"], str(context.params["bundle"])) == ("0.0.0.0", "/bundle")
    assert {name: context.params[f"{name}_port"] for name in PORTS} == PORTS


def test_ports_are_the_services_own():
    assert launch.PORTS == PORTS
    assert instruction("EXPOSE") == [" ".join(map(str, PORTS.values()))]
    published = [entry.rsplit(":", 1) for entry in COMPOSE["services"]["redraft"]["ports"]]
    assert [int(inside) for _, inside in published] == list(PORTS.values())
    defaults = [re.findall(r":-(\d+)\}", outside) for outside, _ in published]
    assert defaults == [[str(port)] for port in PORTS.values()]
    assert {port["name"]: port["port"] for port in SERVICE["spec"]["ports"]} == PORTS
    (container,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == PORTS
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORTS["openai"]), "the engine's metrics, which the dashboard draws"


def test_bundles_and_shared_memory_are_mounted_where_they_are_looked_for():
    bundle = flags()["--bundle"]
    service = COMPOSE["services"]["redraft"]
    learned = flags()["--learned-dir"]
    mount, kept = service["volumes"]
    assert kept.split(":") == [*COMPOSE["volumes"], learned]
    assert (mount["type"], mount["target"], mount["read_only"]) == ("bind", bundle, True)
    assert "${BUNDLE:?" in mount["source"]
    assert service["stop_grace_period"] == f"{launch.STOP_S}s"
    assert service["shm_size"] == launch.SHARED_MEMORY + "b" == "2gb"
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    before_stop = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == before_stop + launch.STOP_S
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert {path: mount.get("readOnly", False) for path, mount in mounts.items()} == {
        bundle: True, learned: False, "/dev/shm": False
    }  # fmt: skip
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in mounts.values()}


def test_the_key_and_the_names_of_v1_reach_the_container(monkeypatch):
    """A client inside a cluster sends the service's name as Host."""
    assert (launch.API_KEY, launch.ALLOW_HOST) == (API_KEY_VARIABLE, ALLOW_HOST_VARIABLE)
    assert COMPOSE["services"]["redraft"]["environment"] == [API_KEY_VARIABLE, ALLOW_HOST_VARIABLE]
    (container,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    names, key = container["env"]
    assert names == {"name": ALLOW_HOST_VARIABLE, "value": SERVICE["metadata"]["name"]}
    assert key["name"] == API_KEY_VARIABLE
    monkeypatch.setenv(ALLOW_HOST_VARIABLE, "a.example b.example")
    assert read({}).allow_host == ["a.example", "b.example"]


@pytest.mark.parametrize("where", ["dockerfile", "compose", "kubernetes", "page"])
def test_one_release_everywhere(where):
    release = instruction("ARG")[0].removeprefix("TRITON=")
    assert f"redraft:{release}" == launch.IMAGE
    texts = {
        "dockerfile": DOCKERFILE,
        "compose": COMPOSE["services"]["redraft"]["image"],
        "kubernetes": DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]["image"],
        "page": PAGE,
    }
    assert set(re.findall(r"redraft:(\d\d\.\d\d)", texts[where])) == {release}


def test_envoy_takes_the_proxys_configuration():
    """And its first replica is where `redraft serve` listens."""
    folder = DEPLOY / "replicas"
    command = [str(Path(sys.executable).with_name("envoy")), "--mode", "validate", "--config-path", "envoy.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    clusters = yaml.safe_load((folder / "envoy.yaml").read_text())["static_resources"]["clusters"]
    for cluster in clusters:
        first, *_ = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        assert first["endpoint"]["address"]["socket_address"]["port_value"] == PORTS[cluster["name"]]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_cluster_takes_each_overlay(name):
    documents = kustomize(DEPLOY / "kubernetes" / name)
    for document in documents.values():
        kubernetes_validate.validate(document, "1.32", strict=True)
    pods = DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert REPLICAS["spec"]["clusterIP"] == "None"
    for service in ("redraft", "redraft-replicas"):
        assert documents[f"Service {service}"]["spec"]["selector"] == pods
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        spec = documents[f"{kind} redraft"]["spec"]
        assert (spec.get("selector") or spec["podSelector"])["matchLabels"] == pods
    (container,) = documents["Deployment redraft"]["spec"]["template"]["spec"]["containers"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) is (name == "gpu")


def test_only_v1_is_open_in_a_cluster():
    policy = yaml.safe_load((BASE / "network.yaml").read_text())
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": "openai"}]


@pytest.mark.parametrize("command", ["distill", "train"])
def test_a_cluster_takes_the_jobs_of_ranks(command):
    """As many machines as torchrun expects, which meet at the first pod's name; options that the command has."""
    folder = DEPLOY / "kubernetes/training"
    job, service = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in (command, "service"))
    for document in (job, service):
        kubernetes_validate.validate(document, "1.32", strict=True)
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == launch.IMAGE
    words = shlex.split(container["args"][0])
    assert words[words.index("-m") :][:3] == ["-m", "redraft", command]
    launched = dict(zip(words[2::2], words[3::2], strict=False))
    assert int(launched["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert launched["--node-rank"] == "$JOB_COMPLETION_INDEX"
    assert launched["--master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(launched["--master-port"]) == service["spec"]["ports"][0]["port"]
    known = get_command(application(command)).commands[command].params
    options = {word for word in words[words.index("redraft") :] if word.startswith("--")}
    assert options <= {option for parameter in known for option in parameter.opts}


def test_service_ranks_and_training_share_a_namespace():
    """No document of one replaces another's, and no label of one's pods is that of another's."""
    folder = DEPLOY / "kubernetes"
    files = [yaml.safe_load((folder / f"training/{name}.yaml").read_text()) for name in ("service", "distill", "train")]
    training = {f"{document['kind']} {document['metadata']['name']}": document for document in files}
    installations = [kustomize(folder / "cpu"), kustomize(folder / "ranks"), training]
    names = [name for documents in installations for name in documents]
    assert len(names) == len(set(names))
    apps = [set(re.findall(r"'app': '([\w-]+)'", str(documents))) for documents in installations]
    assert apps == [{"redraft"}, {"redraft-ranks"}, {"redraft-training"}]


def test_the_status_page_names_each_file():
    """By its own name or that of its folder."""
    named = set(re.findall("`([^`]+)`", (ROOT / "docs/status.md").read_text()))
    tracked = subprocess.check_output(["git", "ls-files", "deploy"], cwd=ROOT, text=True).splitlines()
    assert not [name for name in tracked if not named & {name, str(Path(name).parent)}]
