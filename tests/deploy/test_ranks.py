"""The files for ranks over several nodes: LeaderWorkerSet's own fields, its pods by Kubernetes' schema, and the hosts
that the first pod writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.conftest import ROOT

DOCUMENTS = {
    document["kind"]: document
    for document in yaml.safe_load_all(
        subprocess.run(
            ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes/ranks")], capture_output=True, text=True, check=True
        ).stdout
    )
}
GROUP = DOCUMENTS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
PODS = {"leader": GROUP["leaderTemplate"], "worker": GROUP["workerTemplate"]}


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "Service"])
def test_a_cluster_takes_what_is_its_own(kind):
    kubernetes_validate.validate(DOCUMENTS[kind], "1.32", strict=True)


@pytest.mark.parametrize("name", PODS)
def test_a_cluster_takes_the_pods(name):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **PODS[name]["metadata"]}}
    kubernetes_validate.validate(pod | {"spec": PODS[name]["spec"]}, "1.32", strict=True)
    labels = PODS[name]["metadata"]["labels"]
    assert DOCUMENTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert labels.items() <= DOCUMENTS["Service"]["spec"]["selector"].items()


def test_the_group_has_the_fields_of_a_leaderworkerset():
    """Those of `leaderworkerset.x-k8s.io/v1`, as its definition of custom resources has them."""
    assert DOCUMENTS["LeaderWorkerSet"]["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(DOCUMENTS["LeaderWorkerSet"]["spec"]) == {"replicas", "leaderWorkerTemplate"}
    assert set(GROUP) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert GROUP["restartPolicy"] in ("RecreateGroupOnPodRestart", "None")


def test_ranks_have_the_same_bundle_and_key():
    (leader,), (worker,) = (pod["spec"]["containers"] for pod in PODS.values())
    assert leader["image"] == worker["image"]
    mounted = {mount["mountPath"]: mount for mount in leader["volumeMounts"]}
    assert all(mounted[mount["mountPath"]] == mount for mount in worker["volumeMounts"])
    configuration = DOCUMENTS["ConfigMap"]["data"]["ssh.conf"]
    for text in (worker["command"][-1], configuration):
        assert "2222" in text
        assert "/ssh/ssh-privatekey" in text


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_pod_names_all_hosts_and_serves(tmp_path: Path, size):
    """Run by a shell; programs that are not there say what they were asked."""
    for program in ("ssh", "redraft"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    script = PODS["leader"]["spec"]["containers"][0]["command"][-1].replace("/tmp/", f"{tmp_path}/")
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
