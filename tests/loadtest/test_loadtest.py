"""The load test's command line, from flags to files, against a stand-in server."""

import json
import socket
from pathlib import Path

import pytest

from benchmarks.command import execute
from redraft.cli import application
from redraft.console import progress
from redraft.loadtest import loadtest, options
from redraft.loadtest.results import circumstances, load_runs
from redraft.loadtest.workload import Passages


@pytest.fixture
def client(fake_client, monkeypatch):
    fake = fake_client()

    async def client_of(args):
        return fake

    monkeypatch.setattr(loadtest, "client_of", client_of)
    return fake


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Labels of the plots that would be drawn."""
    labels = []
    monkeypatch.setattr(loadtest.plots, "load_test", lambda runs, folder: labels.append([one[0].label for one in runs]))
    return labels


@pytest.fixture
def command(tokenizer_folder, tmp_path):
    def call(*flags, folder="out"):
        fixed = ["--bundle", str(tokenizer_folder), "--url", "127.0.0.1:9", "--num-prompts", "6"]
        fixed += ["--output", str(tmp_path / folder)]
        fixed += ["--seconds", "0", "--ramp", "0", "--runs", "1", "--metrics-url", ""]
        return execute(application("loadtest"), ["loadtest", *fixed, *map(str, flags)])

    return call


def test_writes_every_rate_and_the_table(client, command, tmp_path, capsys, drawn):
    assert command("--request-rate", 50, "inf", "--goodput", "ttft:1000", "--label", "spec", "--warm-up", 2) == 0
    assert len(client.seen) == 2 + 6 + 6
    assert client.closed
    runs = load_runs(tmp_path / "out")
    assert [run.request_rate for run in runs] == [50, float("inf")]
    for run in runs:
        assert run.summary["completed"] == 6
        assert run.summary["output_tokens"] == 48
        assert run.summary["acceptance_length"] == 2
        assert run.summary["acceptance_rate"] == 0.25
        assert run.summary["goodput"] > 0
        assert run.setting["num_prompts"] == 6
    content = json.loads((tmp_path / "out" / "rate-50-run-1.json").read_text())
    assert len(content["requests"]) == 6
    assert content["summary"]["steady"]["duration_s"] == pytest.approx(0.1, abs=1e-6)
    assert runs[1].summary["steady"] is None
    assert content["summary"]["generator_cores"] > 0
    assert drawn == [["spec"]]
    output = capsys.readouterr().out
    assert "spec: the steady window (short: 6 of 200 requests, 0 of 60 s, 1 of 3 runs)" in output
    assert "spec: the whole run, ramp and tail included" in output
    assert "TTFT p99, ms" in output


def test_a_folder_never_mixes_two_load_tests(client, command, tmp_path):
    command("--request-rate", 100, 200)
    command("--request-rate", 300)
    assert [run.request_rate for run in load_runs(tmp_path / "out")] == [300]


def test_requests_are_seeded_and_templated(client, command):
    command("--temperature", 1, "--top-p", 0.9, "--seed", 7, "--warm-up", 1, "--request-rate", "inf")
    measured = client.seen[1:]
    assert [request.sampling["seed"] for request in measured] == list(range(8, 14)), "after the warm-up's"
    assert all(request.sampling["top_p"] == 0.9 and "top_k" not in request.sampling for request in measured)
    assert all(request.text.startswith("user ") and request.text.endswith(" assistant") for request in measured)


def test_no_prompt_is_sent_twice_while_there_are_others(client, command, tmp_path):
    """A server that drafts from what it served would know the answers."""
    command("--runs", 3, "--request-rate", 50, 100, "--warm-up", 2)
    sent = [request.text for request in client.seen]
    assert len(sent) == 2 + 6 * 6
    assert len({*sent}) == len(sent)
    assert {run.setting["repeated_prompts"] for run in load_runs(tmp_path / "out")} == {0}


def test_a_service_that_has_answered_before_is_known(client, command, tmp_path):
    """It may know the answers to this test's prompts, which are those of the test before."""
    both = ("--baseline-url", "127.0.0.1:1", "--baseline", tmp_path / "ar", "--warm-up", 10)
    for served in (False, True):
        command("--request-rate", 50, *both)
        assert {run.setting["served_before"] for run in load_runs(tmp_path / "out")} == {served}


def test_prompts_that_come_again_are_counted(client, command, tmp_path, capsys):
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "word {"word " * n}"}}\n' for n in range(8)))
    command("--runs", 2, "--request-rate", 50, "--warm-up", 1, "--prompts", tmp_path / "few.jsonl")
    first, second = load_runs(tmp_path / "out")
    assert (first.setting["repeated_prompts"], second.setting["repeated_prompts"]) == (0, 5)
    assert "sent before" not in capsys.readouterr().out
    first.setting["plan"] = {"name": "b", "precision": "bf16", "plan": {"ngram": True}}
    assert "5 prompts were sent before, and this method may draft from" in circumstances([first, second])


def test_percentiles_of_chosen_metrics_only(client, command, capsys):
    command("--percentile-metrics", "tpot", "--request-rate", "inf")
    output = capsys.readouterr().out
    assert "TPOT p90, ms" in output
    assert "TTFT p90, ms" not in output


def test_compares_with_a_baseline(client, command, tmp_path, capsys):
    command("--request-rate", "inf", "--label", "auto-regressive", folder="ar")
    client.words = 4
    assert command("--request-rate", "inf", "--label", "speculative", "--baseline", tmp_path / "ar") == 0
    assert "ms/token (speed-up over auto-regressive)" in capsys.readouterr().out


def test_two_servers_take_turns_at_every_rate(fake_client, command, tmp_path, capsys, monkeypatch):
    servers = {"ar:1": fake_client(delay=0), "spec:2": fake_client(delay=0)}
    turns = []
    for url, server in servers.items():
        monkeypatch.setattr(server, "stream", lambda g, url=url, stream=server.stream: turns.append(url) or stream(g))

    async def client_of(args):
        return servers[args.url]

    monkeypatch.setattr(loadtest, "client_of", client_of)
    assert command("--url", "spec:2", "--baseline-url", "ar:1", "--warm-up", 1, "--request-rate", 100, "inf") == 2
    flags = ["--url", "spec:2", "--baseline-url", "ar:1", "--baseline", tmp_path / "ar", "--warm-up", 1]
    assert command(*flags, "--request-rate", 100, "inf") == 0
    assert turns == ["ar:1", "spec:2"] + 2 * (6 * ["ar:1"] + 6 * ["spec:2"])
    turns.clear()
    assert command(*flags, "--request-rate", "inf", "--runs", 2) == 0
    assert turns == ["ar:1", "spec:2", *6 * ["ar:1"], *12 * ["spec:2"], *6 * ["ar:1"]]
    assert [(run.label, run.run) for run in load_runs(tmp_path / "ar")] == [
        ("auto-regressive", 1),
        ("auto-regressive", 2),
    ]
    assert [run.label for run in load_runs(tmp_path / "out")] == 2 * ["run"]
    assert "speed-up over auto-regressive" in capsys.readouterr().out
    assert all(server.closed for server in servers.values())


def test_failures_are_counted_and_reported(client, command, tmp_path, capsys):
    client.fail_every = 4
    assert command("--request-rate", "inf", "--warm-up", 1) == 1
    assert load_runs(tmp_path / "out")[0].summary["errors"] == 1
    assert "1 failed: overloaded" in capsys.readouterr().out


def test_a_dead_server_is_reported_at_once(client, command, capsys):
    client.fail_every = 1
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
        (["--runs", 11], "--runs: expected at most 10"),
        (["--seconds", "nan"], "--seconds"),
        (["--of-saturation", 1], "--of-saturation needs --baseline-url"),
        (["--find-saturation", "--request-rate", "inf"], "--find-saturation"),
        (["--multi-turn", "--no-chat"], "--multi-turn"),
        (["--prompt-tokens", 40, "--shared-prefix", 40], "--shared-prefix: expected less than --prompt-tokens 40"),
        (["--prompt-tokens", 4], "prompt tokens: expected more"),
        (["--burstiness", 0], "burstiness"),
        (["--output", __file__], "test_loadtest"),
        (["--prompts", "/nowhere.jsonl"], "nowhere"),
    ],
)
def test_wrong_flags(client, command, capsys, flags, message):
    assert command(*flags) == 2
    assert message in capsys.readouterr().err
    assert not client.seen, "no request before all flags are checked"


def test_results_lie_in_a_folder_of_their_bundle(tokenizer_folder, monkeypatch):
    """A test of another bundle leaves them."""
    monkeypatch.setattr(options, "HOME", Path("home"))
    assert options.Options(bundle=tokenizer_folder).results == Path("home", "loadtest", tokenizer_folder.name)


def test_the_folder_where_one_stands_is_a_folder_like_another(client, tokenizer_folder, monkeypatch):
    """As tokenizer and as place of the results; `.` is not taken for an option that was not given."""
    monkeypatch.chdir(tokenizer_folder)
    flags = ["--url", "127.0.0.1:9", "--num-prompts", "2", "--seconds", "0", "--ramp", "0", "--runs", "1"]
    flags += ["--request-rate", "inf", "--warm-up", "1", "--metrics-url", ""]
    assert execute(application("loadtest"), ["loadtest", "--bundle", ".", "--output", ".", *flags]) == 0
    assert len(load_runs(tokenizer_folder)) == 1


def test_a_server_elsewhere_needs_its_tokenizer(capsys):
    for flag in ("--url", "--worker"):
        assert execute(application("loadtest"), ["loadtest", flag, "127.0.0.1:9"]) == 2
        assert "need --bundle" in capsys.readouterr().err


def test_a_prompt_unfit_for_a_later_run_ends_the_test_before_it_begins(client, command, capsys, monkeypatch):
    lengthened, calls = Passages.lengthened, iter(range(100))

    def once_unfit(*args):
        if next(calls) == 8:
            raise ValueError("expected a shorter prompt")
        return lengthened(*args)

    monkeypatch.setattr(Passages, "lengthened", once_unfit)
    assert command("--prompt-tokens", 600, "--runs", 2, "--request-rate", "inf") == 2
    assert "expected a shorter prompt" in capsys.readouterr().err
    assert not client.seen


@pytest.mark.parametrize("protocol", ["grpc", "http", "openai"])
def test_no_server_is_reported_at_once(command, capsys, protocol):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
    assert command("--protocol", protocol, "--url", url) == 2
    assert url in capsys.readouterr().err


def test_slow_warm_up_requests_are_seen(client, command, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    client.delay = 0.1
    command("--request-rate", "inf", "--warm-up", 2)
    assert "1 of 2 answers" in capsys.readouterr().out


def test_table2_setting(client, command, tokenizer_folder, tmp_path, capsys):
    args = options.Options(bundle=tokenizer_folder, table2=True)
    options.check(args)
    assert (args.request_rate, args.temperature) == ([0.1, 0.5, 1.0], 1.0)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(
        json.dumps(
            {
                "name": "b",
                "precision": "bf16",
                "methods": {"four": {"beam_width": 4}, "draws": {"construction": "independent", "levels": [6] * 5}},
                "limits": {"max_len": 2048},
            }
        )
    )
    args = options.Options(bundle=bundle, table2=True)
    with pytest.raises(ValueError, match="--table2 needs"):
        options.check(args)
    for method in ("auto_regressive", "draws"):
        options.check(options.Options(bundle=bundle, table2=True, method=method))
    args.method = "five"
    with pytest.raises(ValueError, match="--method: expected one of four, draws, auto_regressive, got 'five'"):
        options.check(args)
    args = options.Options(bundle=bundle, baseline_metrics_url="127.0.0.1:8002")
    with pytest.raises(ValueError, match=r"--baseline-metrics-url: expected .* http://.*, got 127.0.0.1:8002"):
        options.check(args)
    args = options.Options(bundle=bundle, prompt_tokens=4096)
    with pytest.raises(ValueError, match=r"--prompt-tokens: expected at most 1920, got 4096: .* holds 2048 tokens"):
        options.check(args)


def test_every_rate_runs_as_long_and_as_often_as_asked(client, command, tmp_path, capsys):
    assert command("--request-rate", 50, "--seconds", 0.2, "--ramp", 0.1, "--runs", 3) == 0
    runs = load_runs(tmp_path / "out")
    assert [run.run for run in runs] == [1, 2, 3]
    assert [run.summary["requests"] for run in runs] == [5 + 10] * 3
    prompts = [[t["question_id"] for t in json.loads(f.read_text())["requests"]] for f in (tmp_path / "out").glob("r*")]
    assert len(set(map(tuple, prompts))) == 3, "each run has a seed of its own"
    assert "±" in capsys.readouterr().out


def test_conversations_prefixes_and_lengths(client, command, tmp_path, capsys):
    flags = "--multi-turn", "--shared-prefix", 20, "--prompt-tokens", 600, "--request-rate", 100, "--warm-up", 1
    dataset = tmp_path / "talks.jsonl"
    dataset.write_text("".join(json.dumps({"turns": [f"a {n}", "b", "c"]}) + "\n" for n in range(9)))
    assert command(*flags, "--prompts", dataset) == 0
    assert "first user turn" not in capsys.readouterr().err
    (run,) = load_runs(tmp_path / "out")
    assert run.summary["completed"] == 6, "two conversations of three turns"
    requests = json.loads((tmp_path / "out" / "rate-100-run-1.json").read_text())["requests"]
    assert sorted(request["turn"] for request in requests) == [0, 0, 1, 1, 2, 2]
    assert all(594 <= request["prompt_tokens"] <= 600 for request in requests if request["turn"] == 0)
    measured = client.seen[1:]
    assert len({request.messages[0]["content"] for request in measured}) == 1
    first = [request.messages[1]["content"] for request in measured]
    assert len(set(first)) == 2, "passages of their own"
    assert sorted(len(request.messages) for request in measured) == [2, 2, 4, 4, 6, 6]


def test_saturation_is_searched_and_loaded_in_shares(client, command, tmp_path, capsys):
    client.chunks, client.delay, client.capacity = 1, 0, 400
    search = "--find-saturation", "--request-rate", 100, "--num-prompts", 60, "--warm-up", 1, "--arrival", "constant"
    assert command(*search) == 0
    found = json.loads((tmp_path / "out" / "saturation.json").read_text())
    assert found["throughput"] == max(probe["completed"] for probe in found["probes"])
    assert {probe["follows"] for probe in found["probes"]} == {True, False}
    assert capsys.readouterr().out.count("run: probe at") == len(found["probes"])
    flags = *search[1:], "--baseline-url", "ar", "--baseline", tmp_path / "ar", "--of-saturation", 0.5, 2
    assert command(*flags) == 0
    most = json.loads((tmp_path / "ar" / "saturation.json").read_text())["throughput"]
    for folder in ("ar", "out"):
        rates = [run.request_rate for run in load_runs(tmp_path / folder)]
        assert rates == pytest.approx([0.5 * most, 2 * most], rel=0.01)
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["of_saturation"] for row in report["rates"]] == pytest.approx([0.5, 2], rel=0.01)
    assert report["rates"][1]["speculative"][0]["request_throughput"] < client.capacity * 1.1
    assert "throughput" in capsys.readouterr().out
