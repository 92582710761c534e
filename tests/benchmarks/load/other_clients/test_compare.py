"""Other clients beside our load test: what they are given, what is read of their reports, and those that fail. The
clients are stand-ins that write reports of the shape that AIPerf 0.13 and GuideLLM 0.8 write."""

import json
import sys

import pytest

from benchmarks.load.other_clients import compare
from benchmarks.load.other_clients.compare import OURS, Figures

ANSWERS = [
    {"sent": 0.0, "pieces": [0.1, 0.3], "finished": 0.5, "tokens": 5, "text": "a b"},
    {"sent": 0.5, "pieces": [0.7], "finished": 1.0, "tokens": 1, "text": "c"},
]
AIPERF = {
    "request_count": {"avg": 2.0},
    "request_throughput": {"avg": 3.0},
    "output_token_throughput": {"avg": 4.0},
    "time_to_first_token": {"avg": 5.0},
    "inter_token_latency": {"avg": 6.0},
}
GUIDELLM = {
    "request_totals": {"successful": 2},
    "requests_per_second": {"successful": {"mean": 7.0}},
    "output_tokens_per_second": {"successful": {"mean": 8.0}},
    "time_to_first_token_ms": {"successful": {"mean": 9.0}},
    "inter_token_latency_ms": {"successful": {"mean": 10.0}},
}
PROGRAMS = {
    "pip": "print(json.dumps([{'name': 'litellm', 'version': '9.9'}]))",
    "python": f"asked.append(sys.stdin.read()); print(json.dumps({ANSWERS}))",
    "aiperf": "folder = pathlib.Path(after('--output-artifact-dir')); folder.mkdir(); "
    f"(folder / 'profile_export_aiperf.json').write_text(json.dumps({AIPERF}))",
    "guidellm": "pathlib.Path(after('--output').removeprefix('kind=json,path=')).write_text("
    f"json.dumps({{'benchmarks': [{{'metrics': {GUIDELLM}}}]}}))",
}
HEAD = """#!{python} -S
import json, pathlib, sys
asked = sys.argv[1:]
after = lambda flag: sys.argv[sys.argv.index(flag) + 1]
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The clients' environment; each program leaves its arguments and input in a file of its name."""
    folder = tmp_path / "clients" / "bin"
    folder.mkdir(parents=True)
    for name, body in PROGRAMS.items():
        left = f"\npathlib.Path({str(tmp_path / name)!r}).write_text(json.dumps(asked))\n"
        (folder / name).write_text(HEAD.format(python=sys.executable) + body + left)
        (folder / name).chmod(0o755)

    async def model_name(url):
        return "toy"

    monkeypatch.setattr(compare, "model_name", model_name)
    monkeypatch.setitem(compare.CLIENTS, OURS, lambda setting, folder: Figures(2, 1.0, 1.0, 1.0, 1.0))
    return folder.parent


@pytest.fixture
def run(environment, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    flags = [
        "--environment",
        environment,
        "--bundle",
        tmp_path,
        "--dataset",
        prompts,
        "--output",
        tmp_path / "out.json",
    ]

    def call():
        status = compare.main([str(flag) for flag in flags])
        return status, json.loads((tmp_path / "out.json").read_text())

    return call


def test_each_clients_own_numbers(run, tmp_path, capsys):
    status, report = run()
    assert (status, report["failed"]) == (0, {})
    _, litellm, langchain, aiperf, guidellm = report["clients"].values()
    assert list(aiperf.values()) == [2, 3, 4, 5, 6]
    assert list(guidellm.values()) == [2, 7, 8, 9, 10]
    assert (
        litellm
        == langchain
        == {
            "requests": 2,
            "requests_per_s": 2.0,
            "tokens_per_s": 6.0,
            "ttft_ms": pytest.approx(150),
            "tpot_ms": pytest.approx(100),
        }
    )
    given = {name: json.loads((tmp_path / name).read_text()) for name in PROGRAMS}
    assert given["python"][1:] == ["langchain", "http://127.0.0.1:8003", "toy", "64", "2", '["one", "two"]']
    assert f"kind=huggingface_auto,model={tmp_path}" in given["guidellm"]
    assert {"toy", "max_tokens:64", "temperature:0", str(tmp_path)} <= set(given["aiperf"])
    output = capsys.readouterr().out
    assert "LiteLLM 9.9" in output
    assert "the same 2 prompts, 2 at a time, at most 64 tokens" in output


def test_a_client_that_fails_or_answers_too_few_is_said(run, environment, monkeypatch, capsys):
    (environment / "bin" / "aiperf").write_text("#!/bin/sh\necho no tokenizer; exit 3\n")
    (environment / "bin" / "guidellm").unlink()
    monkeypatch.setitem(compare.CLIENTS, OURS, lambda setting, folder: Figures(1, 1.0, 1.0, 1.0, 1.0))
    status, report = run()
    assert status == 1
    assert report["failed"].keys() == {OURS, "AIPerf", "GuideLLM"}
    assert report["failed"]["AIPerf"] == "aiperf: status 3: no tokenizer"
    assert report["failed"][OURS] == "1 of 2 requests ended"
    assert "AIPerf failed: aiperf: status 3" in capsys.readouterr().out


def test_a_service_that_is_away_is_said_at_once(tmp_path, capsys):
    assert compare.main(["--bundle", str(tmp_path), "--url", "127.0.0.1:1"]) == 2
    assert "no server at http://127.0.0.1:1" in capsys.readouterr().err
