"""The files for ranks over several nodes: the pods by Kubernetes' schema, names that must agree or differ, and the
hosts that the first pod writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

import launch
from redraft.serving.settings import PREFIX
from tests.conftest import ROOT
from tests.deploy.kustomize import kustomize


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """By kind."""
    return {document["kind"]: document for document in kustomize(ROOT / "deploy/kubernetes/ranks").values()}


@pytest.fixture(scope="module")
def pods(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The templates of the first pod and of the others."""
    group = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "Service"])
def test_a_cluster_takes_what_is_its_own(documents, kind):
    kubernetes_validate.validate(documents[kind], "1.32", strict=True)


@pytest.mark.parametrize("name", ["leader", "worker"])
def test_a_cluster_takes_the_pods(documents, pods, name):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **pods[name]["metadata"]}}
    kubernetes_validate.validate(pod | {"spec": pods[name]["spec"]}, "1.32", strict=True)
    labels = pods[name]["metadata"]["labels"]
    assert documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert labels.items() <= documents["Service"]["spec"]["selector"].items()


def test_no_service_has_the_name_of_the_set(documents):
    """The controller makes a headless one with that name where none exists, by which the pods' names resolve."""
    name = documents["Service"]["metadata"]["name"]
    assert name != documents["LeaderWorkerSet"]["metadata"]["name"]


def test_the_service_is_a_name_that_v1_accepts(documents, pods):
    (container,) = pods["leader"]["spec"]["containers"]
    allowed = {variable["name"]: variable.get("value") for variable in container["env"]}[PREFIX + "ALLOW_HOST"]
    assert allowed == documents["Service"]["metadata"]["name"]


def test_ranks_have_the_same_bundle_and_key(documents, pods):
    (leader,), (worker,) = (pod["spec"]["containers"] for pod in pods.values())
    assert leader["image"] == worker["image"] == launch.IMAGE
    mounted = {mount["mountPath"]: mount for mount in leader["volumeMounts"]}
    assert all(mounted[mount["mountPath"]] == mount for mount in worker["volumeMounts"])
    configuration = documents["ConfigMap"]["data"]["ssh.conf"]
    for text in (worker["command"][-1], configuration):
        assert "2222" in text
        assert "/ssh/ssh-privatekey" in text


def stand_in(folder: Path, **programs: str) -> None:
    """Programs that do these lines of shell instead."""
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_pod_names_all_hosts_and_serves(tmp_path: Path, pods, size):
    """Run by a shell; programs that are not there say what they were asked."""
    stand_in(tmp_path, ssh='echo ssh "$@"', redraft='echo redraft "$@"')
    script = pods["leader"]["spec"]["containers"][0]["command"][-1].replace("/tmp/", f"{tmp_path}/")
    environment = {"LWS_LEADER_ADDRESS": "redraft-ranks-0.redraft-ranks.space", "LWS_GROUP_SIZE": str(size)}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-ec", script], env=environment, capture_output=True, text=True)
    *asked, served = done.stdout.splitlines()
    others = [f"redraft-ranks-0-{i}.redraft-ranks.space" for i in range(1, size)]
    assert asked == [f"ssh {other} true" for other in others]
    assert served.startswith("redraft serve --foreground --address 0.0.0.0 --bundle /bundle ")
    assert served.endswith(f" --hostfile {tmp_path}/hosts")
    hosts = (tmp_path / "hosts").read_text().splitlines()
    assert hosts == [f"{host}:1" for host in ("redraft-ranks-0.redraft-ranks.space", *others)]


def test_slurm_starts_a_rank_for_each_task(tmp_path: Path):
    stand_in(
        tmp_path,
        scontrol='test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
        redraft='echo "$HYDRA_LAUNCHER" "$@"; while [ "$1" != --hostfile ]; do shift; done; cat "$2"',
    )
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "3", "SLURM_JOB_ID": "7"}
    environment = job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(ROOT / "deploy/slurm/serve.sbatch"), "--bundle", "six ranks"]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    served, *hosts = done.stdout.splitlines()
    assert served == "slurm serve --foreground --hostfile redraft-7.hosts --bundle six ranks"
    assert hosts == ["n1:3", "n2:3"]
