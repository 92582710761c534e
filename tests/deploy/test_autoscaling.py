"""The autoscalers' query: its arithmetic, the files that ask for it, and three real replicas under a real Prometheus.

It would catch a query that counts an ended replica on, forgets who waits, or that one of the two autoscalers reads
otherwise.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

from redraft.metrics import ENGINE
from redraft.serving import launcher
from tests.conftest import ROOT, wait_until
from tests.deploy.kustomize import kustomize
from tests.serving.client_side import Service, free_ports, start

KUBERNETES = ROOT / "deploy/kubernetes"
PAGE = (ROOT / "docs/guides/replicas.md").read_text()
RULES = yaml.safe_load((KUBERNETES / "load/rule.yaml").read_text())["spec"]
RULE, ALERT = RULES["groups"][0]["rules"]
ADAPTER = yaml.safe_load((KUBERNETES / "hpa/adapter.yaml").read_text())
SCALERS = {name: yaml.safe_load((KUBERNETES / name / "autoscaler.yaml").read_text()) for name in ("hpa", "keda")}
TARGET = float(SCALERS["keda"]["spec"]["triggers"][0]["metadata"]["threshold"])
SHORTENED = {"[1m:15s]": "[10s:1s]", "15s": "1s"}
"""The rule's times, and those of the test with real replicas."""

OPERATORS = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}
"""The schemas of KEDA 2.16 and of Prometheus' operator 0.80, by kind."""

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)


def needed(load: float) -> int:
    """The full replicas for a load, as Kubernetes reckons with an average value. Autoscalers then keep their limits."""
    return math.ceil(load / TARGET)


def overlay(folder: Path, base: str, component: str) -> dict[str, dict[str, Any]]:
    """What the guide's overlay makes, with its clone beside it."""
    shutil.copytree(KUBERNETES, folder / "redraft/deploy/kubernetes")
    (text,) = re.findall(r"```\n(# kustomization\.yaml.*?)```", PAGE, re.DOTALL)
    lines = [line for line in text.splitlines() if component == "keda" or "only with keda" not in line]
    mine = "\n".join(lines).replace("kubernetes/gpu]", f"kubernetes/{base}]").replace("/keda]", f"/{component}]")
    (folder / "kustomization.yaml").write_text(mine)
    return kustomize(folder)


def read_by(operator: type[Any], document: dict[str, Any]) -> dict[str, Any]:
    """What an operator's schema keeps of a document: not the fields that it does not know."""
    return operator.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)


@pytest.mark.parametrize("base", ["cpu", "gpu"])
@pytest.mark.parametrize("component", ["hpa", "keda"])
def test_an_overlay_takes_each_autoscaler(tmp_path, base, component):
    documents = overlay(tmp_path, base, component)
    for document in documents.values():
        if operator := OPERATORS.get(document["kind"]):
            assert read_by(operator, document) == document
        else:
            kubernetes_validate.validate(document, "1.32", strict=True)
    assert ("HorizontalPodAutoscaler redraft" in documents) is (component == "hpa")
    assert ("ScaledObject redraft" in documents) is (component == "keda")
    assert {document["metadata"]["namespace"] for document in documents.values()} == {"chat"}
    if component == "keda":
        (trigger,) = documents["ScaledObject redraft"]["spec"]["triggers"]
        assert trigger["metadata"]["query"] == 'redraft:load{namespace="chat",job="redraft"}'
    for kind in ("PodMonitor", "PrometheusRule"):  # only those with its release's label concern kube-prometheus-stack
        assert documents[f"{kind} redraft"]["metadata"]["labels"] == {"release": "kube-prometheus-stack"}
    assert documents["PrometheusRule redraft"]["spec"] == RULES
    assert "replicas" not in documents["Deployment redraft"]["spec"], "applied again, it would undo the autoscaler"
    inside, prometheus = documents["NetworkPolicy redraft"]["spec"]["ingress"]
    assert inside["ports"] == prometheus["ports"] == [{"port": "openai"}]
    assert prometheus["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_prometheus_scrapes_the_pods_once():
    """`job` is the value of the label that `jobLabel` names; Triton's port has the engine's metrics too."""
    monitor = yaml.safe_load((KUBERNETES / "load/monitor.yaml").read_text())["spec"]
    deployment = yaml.safe_load((KUBERNETES / "base/deployment.yaml").read_text())["spec"]["template"]
    assert monitor["selector"]["matchLabels"] == deployment["metadata"]["labels"]
    assert deployment["metadata"]["labels"][monitor["jobLabel"]] == "redraft"
    assert [(one["port"], one["path"]) for one in monitor["podMetricsEndpoints"]] == [("openai", "/metrics")]


def test_both_autoscalers_ask_for_the_same():
    hpa, keda = SCALERS["hpa"]["spec"], SCALERS["keda"]["spec"]
    (metric,), (trigger,), (rule,) = hpa["metrics"], keda["triggers"], ADAPTER["rules"]["external"]
    assert rule["seriesQuery"] == RULE["record"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    labels = {"namespace": "default", **metric["external"]["metric"]["selector"]["matchLabels"]}
    assert "namespace" in rule["resources"]["overrides"], "the adapter adds the autoscaler's namespace to its query"
    selector = ",".join(f'{name}="{value}"' for name, value in labels.items())
    assert trigger["metadata"]["query"] == f"{RULE['record']}{{{selector}}}"
    assert metric["external"]["target"] == {"type": trigger["metricType"], "averageValue": f"{1000 * TARGET:.0f}m"}
    assert hpa["scaleTargetRef"] == keda["scaleTargetRef"]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert trigger["metadata"]["serverAddress"] == "{url}:{port}".format(**ADAPTER["prometheus"])


def test_the_query_asks_for_metrics_that_exist():
    asked = set(re.findall(r"\bredraft_\w+", RULE["expr"] + ALERT["expr"]))
    assert len(asked) == 4
    assert asked <= {entry.series for entry in ENGINE}


def series(name: str, replica: int, values: str) -> dict[str, str]:
    return {"series": f'{name}{{namespace="n",job="redraft",instance="{replica}"}}', "values": values}


CASES = {
    "none": ([("0x20", "0x20", "16x20")], 0, 0),
    "all slots of one": ([("16x20", "0x20", "16x20")], 1, 1),
    "as many wait": ([("16x20", "16x20", "16x20")], 2, 2),
    "evenly": ([("12x20", "0x20", "16x20")] * 3, 2.25, 2.25),
    "one ended 30 s ago": ([("8x20", "0x20", "16x20"), ("16x17 stale", "0x17 stale", "16x17 stale")], 0.75, 0.9),
    "a worker restarts for 30 s": (
        [("16x16 stale _ 16x2", "0x16 stale _ 0x2", "16x16 stale _ 16x2"), ("8x20", "0x20", "16x20")],
        *(1.0, 1.1),
    ),
    "a peak of 15 s": ([("0x17 16 0x2", "0x20", "16x20")], 0.19, 0.26),
}
"""By name: running, waiting, and slots of each replica every 15 s; the load after five minutes is between the numbers.
A minute has four moments or, before Prometheus 3, five."""


@needs_prometheus
@pytest.mark.parametrize("name", CASES)
def test_the_load(tmp_path, name):
    """By promtool, which runs the rule as Prometheus does."""
    replicas, low, high = CASES[name]
    names = [f"redraft_num_{name}" for name in ("requests_running", "requests_waiting", "slots")]
    inputs = [
        series(metric, number, values)
        for number, replica in enumerate(replicas)
        for metric, values in zip(names, replica, strict=True)
    ]
    within = f"count({RULE['record']} >= {low} <= {high})"
    expected = [{"expr": within, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 1}]}]
    check_rules(tmp_path, inputs, promql_expr_test=expected)


def check_rules(folder: Path, inputs: list[dict[str, str]], **tests: Any) -> None:
    (folder / "rules.yaml").write_text(json.dumps(RULES))
    test = {"interval": "15s", "input_series": inputs, **tests}
    (folder / "test.yaml").write_text(json.dumps({"rule_files": ["rules.yaml"], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def builds(*of_replicas: str, job: str = "redraft") -> list[dict[str, str]]:
    """Replicas of one bundle, each of a build, for 20 minutes."""
    labels = f'namespace="n",job="{job}"'
    return [
        {"series": f'redraft_bundle_info{{{labels},instance="{job}{i}",bundle="b",build="{build}"}}', "values": "1x80"}
        for i, build in enumerate(of_replicas)
    ]


@needs_prometheus
def test_replicas_of_different_builds_are_named(tmp_path):
    """Those of another job may be of another build."""
    inputs = builds("one", "two", "one") + builds("three", "three", job="other")
    service = {"namespace": "n", "job": "redraft", "bundle": "b"}
    alerts = [
        {
            "exp_labels": service | {"instance": f"redraft{i}", "build": build},
            "exp_annotations": {"summary": f"redraft{i} serves b, build {build}: not all replicas of n/redraft do"},
        }
        for i, build in enumerate(("one", "two", "one"))
    ]
    after = {"eval_time": "16m", "alertname": ALERT["alert"], "exp_alerts": alerts}
    during_an_upgrade = {"eval_time": "10m", "alertname": ALERT["alert"], "exp_alerts": []}
    check_rules(tmp_path, inputs, alert_rule_test=[after, during_an_upgrade])


@pytest.fixture(scope="module")
def replicas(smollm2_bundle: Path) -> Iterator[list[Service]]:
    """Three replicas of one thread each."""
    with tempfile.TemporaryDirectory(prefix="redraft-test-") as folder:
        ports = free_ports(3)
        try:
            with ThreadPoolExecutor(2) as pool:
                yield list(
                    pool.map(
                        lambda port: start(Path(folder, str(port)), smollm2_bundle, openai_port=port, threads=1), ports
                    )
                )
        finally:
            for port in ports:
                launcher.stop(Path(folder, str(port)))


@pytest.fixture
def load(replicas: list[Service], tmp_path: Path) -> Iterator[Any]:
    """Asks a Prometheus, which scrapes the replicas, for the load that its rule has recorded last."""
    targets = [f"127.0.0.1:{replica.settings.openai_port}" for replica in replicas]
    scrape = {"job_name": "redraft", "static_configs": [{"targets": targets, "labels": {"namespace": "default"}}]}
    rules, configuration = json.dumps(RULES), {"scrape_configs": [scrape], "rule_files": ["rules.yaml"]}
    for old, new in SHORTENED.items():
        assert old in rules
        rules = rules.replace(old, new)
    configuration["global"] = {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"}
    (tmp_path / "rules.yaml").write_text(rules)
    (tmp_path / "prometheus.yaml").write_text(json.dumps(configuration))
    (port,) = free_ports(1)
    command = ["prometheus", "--config.file=prometheus.yaml", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=tmp_path, stdout=log, stderr=log)

    def query() -> float | None:
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        with suppress(httpx.TransportError):
            parameters = {"query": SCALERS["keda"]["spec"]["triggers"][0]["metadata"]["query"]}
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params=parameters)
            if answer.status_code == 503:  # it listens, and is not ready
                return None
            for sample in answer.json().get("data", {}).get("result", ()):
                return float(sample["value"][1])
        return None

    try:
        yield query
    finally:
        process.terminate()
        process.wait()


@contextmanager
def requests(replicas: list[Service], count: int) -> Iterator[None]:
    """So many requests in flight meanwhile, spread evenly."""
    over = threading.Event()

    def ask(number: int) -> None:
        url = f"http://127.0.0.1:{replicas[number % len(replicas)].settings.openai_port}/v1/completions"
        body = {"prompt": f"{number}: once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", url, json=body, timeout=120) as answer:
                assert answer.status_code == 200
                for _ in answer.iter_lines():
                    if over.is_set():
                        break

    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            over.set()
        for client in clients:
            client.result()


@pytest.mark.slow
@needs_prometheus
def test_three_replicas_need_one_two_and_three_and_none_again(replicas, load):
    """The files' own rule and query, with its minute shortened."""
    slots = 16

    def wait_for(value: float) -> float:
        samples = [math.nan]

        def near() -> bool:
            if (sample := load()) is not None:
                samples.append(sample)
            return samples[-1] == pytest.approx(value, rel=0.15)

        wait_until(near, 60)
        return samples[-1]

    for count, replicas_needed in ((6, 1), (20, 2), (32, 3)):
        with requests(replicas, count):
            assert needed(wait_for(count / slots)) == replicas_needed
    assert needed(wait_for(0)) == 0
