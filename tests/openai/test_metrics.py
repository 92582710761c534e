"""`/metrics` of the front end against the answers' own statistics, and the dashboard against `/metrics`."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT, wait_until
from tests.openai.serving import front_end
from tests.serving.client_side import HTTP
from tests.toy_engine import TOY

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "seed": 7}
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "redraft.json").read_text())
HISTOGRAMS = (
    "request_queue_time_seconds", "time_to_first_token_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
)  # fmt: skip


def samples(server) -> dict[tuple[str, ...], float]:
    """Values by name and label values."""
    found = {}
    for family in text_string_to_metric_families(HTTP.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            found[sample.name.removeprefix("redraft_"), *sample.labels.values()] = sample.value
    return found


@pytest.fixture(scope="module")
def server(bundle):
    """Its steps take so long that a stream is cancelled before it ends by itself."""
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, delay=0.03) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def served(server):
    """Three requests of known ends, one of them without drafts, and one that is cancelled."""
    bodies = [
        HELLO | {"max_tokens": 40},
        HELLO | {"max_tokens": 12, "speculative": False},
        HELLO | {"max_tokens": 100, "logit_bias": {"0": 100}},
    ]
    answers = [server.post(CHAT, body).json() for body in bodies]
    endless = HELLO | {"stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{server.url}{CHAT}", json=endless, timeout=60) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data:"))
        for _ in range(10):
            next(events)
    wait_until(lambda: samples(server)["request_success_total", "cancelled"] == 1)
    return answers, samples(server)


def test_requests_count_by_how_they_ended(served):
    answers, found = served
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length", "length", "stop"]
    reasons = {labels[1]: value for labels, value in found.items() if labels[0] == "request_success_total"}
    assert reasons == {"stop": 1, "length": 2, "cancelled": 1, "timeout": 0, "error": 0}
    assert found["generation_tokens_total",] > sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert found["openai_answers_total", CHAT, "200"] == 4
    assert (found["worker_up",], found["num_requests_running",], found["num_requests_waiting",]) == (1, 0, 0)


def test_times_are_observed_once_a_request(served):
    answers, found = served
    assert found["request_queue_time_seconds_count",] == 4
    for name in HISTOGRAMS[1:]:
        assert 2 <= found[f"{name}_count",] <= 3, name  # the end token alone is no first token
        buckets = [value for labels, value in found.items() if labels[0] == f"{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"{name}_count",]
    steps = sum((answer["metrics"]["speculative_decoding"] or {}).get("num_spec_steps", 0) for answer in answers)
    assert found["inter_token_latency_seconds_count",] > steps


def test_drafts_count_by_method(server):
    """As the answer's own statistics do; plain decoding drafts nothing, and has no series."""
    before = samples(server)
    answer = server.post(CHAT, HELLO | {"max_tokens": 50, "temperature": 0}).json()
    server.post(CHAT, HELLO | {"max_tokens": 5, "speculative": False})
    after, stats = samples(server), answer["metrics"]["speculative_decoding"]

    def gain(name, *labels):
        return after.get((f"spec_decode_num_{name}_total", *labels), 0) - before.get(
            (f"spec_decode_num_{name}_total", *labels), 0
        )

    assert 0 < gain("drafts", TOY) <= stats["num_spec_steps"]
    assert gain("draft_tokens", TOY) == stats["num_draft_tokens"]
    assert gain("accepted_tokens", TOY) == stats["num_accepted_draft_tokens"] > 0
    assert gain("reused_tokens", TOY) == 0
    depths = range(len(stats["accepted_by_depth"]))
    assert [gain("accepted_tokens_per_pos", TOY, str(depth)) for depth in depths] == stats["accepted_by_depth"]
    assert not [labels for labels in after if labels[-1] == "auto_regressive"]


def test_prompt_tokens_count_by_what_was_cached(server):
    """As the answers say, and not for those who want nothing from the cache."""
    before = samples(server)
    body = {"messages": [{"role": "user", "content": "Count what was there"}], "max_tokens": 3}
    usages = [server.post(CHAT, body | more).json()["usage"] for more in ({}, {}, {"cache_prompt": False})]
    usages.append(server.post(CHAT, body | {"n": 3}).json()["usage"])
    after, prompt = samples(server), usages[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[1:3] == [prompt - 1, 0]
    assert prompt - 2 <= cached[3] < prompt, "a choice may begin while the first runs its last token again"
    gains = [after[name,] - before[name,] for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")]
    assert gains[0] == 5 * prompt
    assert 0 <= cached[0] + 4 * (prompt - 1) - gains[1] <= 2


def test_the_dashboard_asks_for_metrics_that_exist(served):
    _, found = served
    names = {labels[0] for labels in found}
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for one in expressions for name in re.findall(r"\bredraft_(\w+)", one)}
    assert asked - names == set()
    assert len(asked) > 12
    labels = {
        label for one in expressions for group in re.findall(r"\bby \(([\w, ]+)\)", one) for label in group.split(", ")
    }
    assert labels <= {"le", "method", "position", "finished_reason", "status"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
