"""The load test's command line, from flags to files, against a stand-in server."""

import json
import socket

import pytest

from benchmarks.figures.results import load_runs
from benchmarks.load import loadtest
from redraft.console import progress


@pytest.fixture
def backend(fake_backend, monkeypatch):
    fake = fake_backend()

    async def connect(args):
        return fake

    monkeypatch.setattr(loadtest, "connect", connect)
    return fake


@pytest.fixture
def command(tokenizer_folder, tmp_path):
    def call(*flags, folder="out"):
        fixed = ["--tokenizer", str(tokenizer_folder), "--result-dir", str(tmp_path / folder), "--num-prompts", "6"]
        return loadtest.main([*fixed, *map(str, flags)])

    return call


def test_writes_every_rate_and_the_table(backend, command, tmp_path, capsys):
    assert command("--request-rate", 50, "inf", "--goodput", "ttft:1000", "--label", "spec", "--warmup", 2) == 0
    assert len(backend.seen) == 2 + 6 + 6
    assert backend.closed
    runs = load_runs(tmp_path / "out")
    assert [run.request_rate for run in runs] == [50, float("inf")]
    for run in runs:
        assert run.summary["completed"] == 6
        assert run.summary["output_tokens"] == 48
        assert run.summary["acceptance_length"] == 2
        assert run.summary["acceptance_rate"] == 0.25
        assert run.summary["goodput"] > 0
        assert run.setting["num_prompts"] == 6
    content = json.loads((tmp_path / "out" / "rate-50.json").read_text())
    assert len(content["requests"]) == 6
    assert (tmp_path / "out" / "load_test.png").stat().st_size > 10_000
    output = capsys.readouterr().out
    assert "spec: load test" in output
    assert "TTFT p99, ms" in output


def test_a_folder_never_mixes_two_load_tests(backend, command, tmp_path):
    command("--request-rate", 100, 200)
    command("--request-rate", 300)
    assert [run.request_rate for run in load_runs(tmp_path / "out")] == [300]


def test_requests_are_seeded_and_templated(backend, command):
    command("--temperature", 1, "--top-p", 0.9, "--seed", 7, "--warmup", 1, "--request-rate", "inf")
    measured = backend.seen[1:]
    assert [request.sampling["seed"] for request in measured] == list(range(7, 13))
    assert all(request.sampling["top_p"] == 0.9 and "top_k" not in request.sampling for request in measured)
    assert all(request.text.startswith("user ") and request.text.endswith(" assistant") for request in measured)


def test_percentiles_of_chosen_metrics_only(backend, command, capsys):
    command("--percentile-metrics", "tpot", "--request-rate", "inf")
    output = capsys.readouterr().out
    assert "TPOT p90, ms" in output
    assert "TTFT p90, ms" not in output


def test_compares_with_a_baseline(backend, command, tmp_path, capsys):
    command("--request-rate", "inf", "--label", "auto-regressive", folder="ar")
    backend.words = 4
    assert command("--request-rate", "inf", "--label", "speculative", "--baseline", tmp_path / "ar") == 0
    assert "ms/token (speed-up over auto-regressive)" in capsys.readouterr().out


def test_two_servers_take_turns_at_every_rate(fake_backend, command, tmp_path, capsys, monkeypatch):
    servers = {"ar:1": fake_backend(delay=0), "spec:2": fake_backend(delay=0)}
    turns = []
    for url, server in servers.items():
        monkeypatch.setattr(server, "stream", lambda g, url=url, stream=server.stream: turns.append(url) or stream(g))

    async def connect(args):
        return servers[args.url]

    monkeypatch.setattr(loadtest, "connect", connect)
    assert command("--url", "spec:2", "--baseline-url", "ar:1", "--warmup", 1, "--request-rate", 100, "inf") == 2
    flags = ["--url", "spec:2", "--baseline-url", "ar:1", "--baseline", tmp_path / "ar", "--warmup", 1]
    assert command(*flags, "--request-rate", 100, "inf") == 0
    assert turns == ["ar:1", "spec:2"] + 2 * (6 * ["ar:1"] + 6 * ["spec:2"])
    assert [run.label for run in load_runs(tmp_path / "ar")] == 2 * ["auto-regressive"]
    assert [run.label for run in load_runs(tmp_path / "out")] == 2 * ["run"]
    assert "speed-up over auto-regressive" in capsys.readouterr().out
    assert all(server.closed for server in servers.values())


def test_failures_are_counted_and_reported(backend, command, tmp_path, capsys):
    backend.fail_every = 4
    assert command("--request-rate", "inf", "--warmup", 1) == 1
    assert load_runs(tmp_path / "out")[0].summary["errors"] == 1
    assert "1 failed: overloaded" in capsys.readouterr().out


def test_a_dead_server_is_reported_at_once(backend, command, capsys):
    backend.fail_every = 1
    assert command() == 2
    assert "warm-up request failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", 0], "--num-prompts"),
        (["--max-concurrency", 0], "--max-concurrency"),
        (["--percentile-metrics", "speed"], "--percentile-metrics"),
        (["--goodput", "itl:5"], "goodput"),
        (["--request-rate", "inf", -1], "request rate"),
        (["--burstiness", 0], "burstiness"),
        (["--result-dir", __file__], "test_loadtest"),
        (["--dataset", "/nowhere.jsonl"], "nowhere"),
    ],
)
def test_wrong_flags(backend, command, capsys, flags, message):
    assert command(*flags) == 2
    assert message in capsys.readouterr().err
    assert not backend.seen, "no request before all flags are checked"


def test_no_server_is_reported_at_once(command, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
    assert command("--url", url) == 2
    assert url in capsys.readouterr().err


def test_slow_warm_up_requests_are_seen(backend, command, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    backend.delay = 0.1
    command("--request-rate", "inf", "--warmup", 2)
    assert "1 of 2 answers" in capsys.readouterr().out


def test_table2_setting(backend, command, tokenizer_folder, tmp_path, capsys):
    args = loadtest.parser().parse_args(["--tokenizer", str(tokenizer_folder), "--table2"])
    loadtest.check(args)
    assert (args.request_rate, args.temperature) == ([0.1, 0.5, 1.0], 1.0)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(
        json.dumps({"name": "b", "precision": "bf16", "methods": {"four": {"beam_width": 4}}})
    )
    args = loadtest.parser().parse_args(["--tokenizer", str(bundle), "--table2"])
    with pytest.raises(ValueError, match="--table2 needs"):
        loadtest.check(args)
    args.method = "auto_regressive"
    loadtest.check(args)
    args.method = "five"
    with pytest.raises(ValueError, match="--method: expected one of four, auto_regressive, got 'five'"):
        loadtest.check(args)
