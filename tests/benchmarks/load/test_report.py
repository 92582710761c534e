"""The report page: every section that has results, pictures inside."""

import json

import pytest

from benchmarks.command import execute
from benchmarks.load import comparison, report
from redraft.loadtest.metrics import Timeline, summarize
from redraft.loadtest.results import Run, load_runs, save_run, write_json
from redraft.prompts import Prompt


def contender(speed, depths):
    return {
        "tokens": 10, "tokens_per_s": speed, "decode_tokens_per_s": speed, "speedup": speed / 100, "steps": 5,
        "acceptance_length": 2.0, "rows_per_step": 9.0, "drafting_share": 0.1,
        "host_overhead": 0.04, "drafted": 40, "wasted": 30, "reused": 0, "identical_answers": 3,
        "conditional_acceptance": depths, "depth_counts": [[round(100 * depth), 100] for depth in depths],
        "speedup_interval": [speed / 100 - 0.1, speed / 100 + 0.1], "acceptance_interval": [2.0, 2.0],
        "categories": {"math": {"speedup": 1.5, "acceptance_length": 2.0}},
    }  # fmt: skip


SINGLE = {
    "contenders": {"auto-regressive": contender(100, []), "spec": contender(150, [0.6, 0.5])}, "prompts": 3,
}  # fmt: skip
LEVEL = {
    "streams": 8,
    "contenders": {
        name: {"tokens_per_s": 300.0, "speedup": 1.1, "acceptance_length": 1.5} for name in ("auto-regressive", "spec")
    },
}
RESULTS = {
    "single_stream": {
        "single": {"0": SINGLE, "1": SINGLE}, "concurrent": {"0": [LEVEL], "1": []}, "max_tokens": 128,
        "auto_regressive": "ar",
    },
    "lossless": {
        "prompts": 3, "max_tokens": 8, "margin": 0.5, "divergences": [],
        "rates": [{"output": "speculative", "beyond_margin": 1, "tokens": 200}],
        "settings": [{"setting": "greedy <b>", "method": "best", "concurrency": 1, "tokens": 24,
                      "acceptance_length": 2.0, "near_ties": 0, "failures": 0}],
    },
}  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    for name in ("ar", "spec"):
        for run in (1, 2):
            timelines = [Timeline("1", "c", 5, 0, 0.0, 0.0, [0.1, 0.1 + 0.1 * run], 0.1 + 0.1 * run, 4)]
            save_run(tmp_path / name, Run(name, 1.0, {"runs": 2}, summarize(timelines), run=run), timelines)
    for name, content in RESULTS.items():
        write_json(tmp_path / "results" / f"{name}.json", content)
    return tmp_path


def test_page_with_everything(folders):
    output = folders / "out" / "report.html"
    loads = ["--load", str(folders / "ar"), str(folders / "spec")]
    assert execute(report.main, [*loads, "--results", str(folders / "results"), "--output", str(output)]) == 0
    page = output.read_text()
    for title in ("Load test", "Without a server", "Speculation changes nothing"):
        assert f"<h2>{title}" in page
    assert page.count("data:image/png;base64,") == 2
    assert "0.500%" in page
    assert "greedy &lt;b&gt;" in page
    assert "ar: the whole run, ramp and tail included (short: 2 of 3 runs)" in page
    assert "62.50 ± 158.83 (1.00x ± 0.00)" in page, "0.2 s and 0.3 s for 4 tokens: Student's interval of two runs"
    assert {path.name for path in (folders / "out" / "plots").iterdir()} == {"load_test.png", "single_stream.png"}


def test_page_with_one_result(folders):
    for name in ("lossless",):
        (folders / "results" / f"{name}.json").unlink()
    output = folders / "report.html"
    assert execute(report.main, ["--results", str(folders / "results"), "--output", str(output)]) == 0
    assert output.read_text().count("<h2>") == 1


def test_runs_of_an_older_form_are_read(folders):
    """They had one run per rate, no steady window, and times from sending on."""
    content = json.loads((folders / "ar" / "rate-1-run-1.json").read_text())
    del content["run"]
    content["setting"] = {"num_prompts": 4}
    content["requests"][0]["scheduled"] = content["requests"][0].pop("due")
    (folders / "old").mkdir()
    (folders / "old" / "rate-1.json").write_text(json.dumps(content))
    (run,) = load_runs(folders / "old")
    assert (run.run, run.figures["ms_per_token"]) == (1, pytest.approx(50))
    loads = ["--load", str(folders / "old"), "--results", str(folders / "none")]
    assert execute(report.main, [*loads, "--output", str(folders / "report.html")]) == 0


def test_nothing_to_report(tmp_path, capsys):
    assert execute(report.main, ["--results", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 2
    assert "run a benchmark first" in capsys.readouterr().err
    assert execute(report.main, ["--load", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 2
    assert "rate-*.json" in capsys.readouterr().err


def test_results_are_json_all_the_way(folders):
    json.loads((folders / "ar" / "rate-1-run-1.json").read_text())


def test_mt_bench_is_one_kind_among_others():
    mt_bench, other = [[Prompt(kind, kind, ("a",)) for kind in kinds] for kinds in (("math", "stem"), ("qa", "rag"))]
    assert comparison.kinds_of(mt_bench) == ["math", "stem"]
    assert comparison.kinds_of(mt_bench + other) == ["mt_bench", "mt_bench", "qa", "rag"]
