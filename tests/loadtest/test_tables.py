"""Comparison maths and the shape of tables and plots."""

import pytest
from matplotlib.image import imread

from redraft.loadtest import plots
from redraft.loadtest.results import Run, circumstances, load_runs, save_run
from redraft.loadtest.tables import Table, common_rates, number, run_tables, speedup_table


def run(label, rate, ms, **setting):
    figures = {"mean": ms, "std": 0.0, "p50": ms, "p90": 2 * ms, "p99": 3 * ms}
    summary = {"ms_per_token": ms, "output_token_throughput": 1e3 / ms}
    return Run(label, rate, setting, summary | {f"{name}_ms": figures for name in ("ttft", "tpot", "itl", "e2el")})


@pytest.fixture
def auto_regressive():
    return [run("AR", rate, ms) for rate, ms in ((0.1, 10.0), (0.5, 12.0), (float("inf"), 50.0))]


@pytest.fixture
def speculative():
    return [run("ReDrafter", rate, ms) for rate, ms in ((0.1, 5.0), (0.5, 8.0), (2.0, 9.0))]


def test_speedups_in_the_shape_of_table_2(auto_regressive, speculative):
    table = speedup_table(auto_regressive, [speculative])
    assert table.columns == ["Model", "QPS=0.1", "QPS=0.5"]
    ours = ["ReDrafter", "5.00 (2.00x, one run)", "8.00 (1.50x, one run)"]
    assert table.rows == [["AR", "10.00 (1.00x)", "12.00 (1.00x)"], ours]


def test_other_figures_compare_too(auto_regressive, speculative):
    assert speedup_table(auto_regressive, [speculative], "ttft").rows[1][1] == "5.00 (2.00x, one run)"
    slow = [run("slow", 0.1, 35_000.0)]
    assert speedup_table(auto_regressive, [slow], "ttft").rows[1][1] == "35.0 s (0.00x, one run)"


def test_a_gain_without_accepted_drafts_or_within_its_interval_is_noise():
    def pair(gains: list[float], length: float) -> str:
        plain = [run("AR", 1.0, 10.0) for _ in gains]
        ours = [run("ours", 1.0, 10.0 / gain) for gain in gains]
        for index, both in enumerate(zip(plain, ours, strict=True), 1):
            for one in both:
                one.run = index
        for one in ours:  # a steady window has no acceptance: counters are read before and after a run
            one.summary |= {"steady": dict(one.summary), "acceptance_length": length}
        return speedup_table(plain, [ours]).rows[1][1]

    assert pair([1.32], 1.0).endswith("(1.32x, noise: no draft was accepted)")
    assert pair([1.32], 2.0).endswith("(1.32x, one run)")
    assert "within noise" in pair([0.9, 1.3, 1.0], 2.0)
    assert "noise" not in pair([1.9, 2.0, 2.1], 2.0)


def test_titles_say_what_was_measured_where_and_when():
    plan = {"name": "tiny", "precision": "bf16", "method": "a", "plan": None}
    setting = {"plan": plan, "temperature": 0.0, "client": "a CPU, 2 cores", "date": "2026-01-02"}
    (table,) = run_tables([run("spec", 1.0, 12_345.0, **setting)], ["ttft"])
    assert table.title.endswith("; tiny (bf16); temperature 0; a CPU, 2 cores; 2026-01-02")
    assert ["TTFT p90, ms", "24.7 s"] in table.rows


def test_prompts_that_a_method_may_have_learned_are_said_of_all_runs():
    plan = {"name": "tiny", "precision": "bf16", "method": "a", "plan": {"ngram": True}}
    runs = [run("a", rate, 1.0, plan=plan, repeated_prompts=count) for rate, count in ((1.0, 0), (2.0, 5), (3.0, 6))]
    assert "; 11 prompts were sent before, and this method may draft from" in run_tables(runs, [])[0].title
    runs[0].setting["served_before"] = True
    assert "the service had answered others before" in run_tables(runs, [])[0].title
    plan["plan"]["ngram"] = False
    assert circumstances(runs) == "tiny (bf16)"


def test_a_run_without_success_shows_a_dash(auto_regressive, speculative):
    speculative[0].summary["ms_per_token"] = None
    assert speedup_table(auto_regressive, [speculative]).rows[1][1] == "-"


def test_runs_without_a_common_rate(auto_regressive):
    with pytest.raises(ValueError, match="no request rate"):
        common_rates([auto_regressive, [run("x", 7.0, 1.0)]])


def test_runs_of_other_settings_are_not_compared():
    with pytest.raises(ValueError, match="max_tokens is 64"):
        common_rates([[run("a", 1.0, 1.0, max_tokens=64)], [run("b", 1.0, 1.0, max_tokens=128)]])
    same = [[run("a", 1.0, 1.0, plan={}, seed=1)], [run("b", 1.0, 1.0, plan={"drafting": {}}, seed=1)]]
    assert common_rates(same) == [1.0]


def test_runs_come_back_from_disk_in_order(tmp_path, auto_regressive):
    for item in reversed(auto_regressive):
        save_run(tmp_path, item, [])
    assert load_runs(tmp_path) == auto_regressive
    with pytest.raises(FileNotFoundError, match=r"rate-\*\.json"):
        load_runs(tmp_path / "other")


def test_markdown():
    table = Table("t", ["a|b", "c"], [["x", "1"]])
    assert table.markdown() == "| a\\|b | c |\n| --- | ---: |\n| x | 1 |"
    assert number(1234.56) == "1,234.6"
    assert number(None) == "-"


def test_a_plot_says_what_each_label_measured_and_long_times_in_seconds(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, path: figures.append(figure))
    plan = {"name": "tiny", "precision": "bf16"}
    slow = [run("ours", rate, 35_000.0, plan=plan, temperature=1.0, date="2026-01-02") for rate in (1.0, 2.0)]
    plots.load_test([[run("AR", 1.0, 5.0, temperature=1.0)], slow], tmp_path)
    (figure,) = figures
    assert figure.get_suptitle() == "AR: temperature 1\nours: tiny (bf16); temperature 1; 2026-01-02"
    assert [axis.get_ylabel() for axis in figure.axes] == ["s", "s", "tokens/s"]
    assert figure.axes[0].yaxis.get_major_formatter()(35_000.0) == "35"


def test_plot_is_a_picture(tmp_path, auto_regressive, speculative):
    picture = imread(plots.load_test([auto_regressive, speculative], tmp_path))
    assert picture.shape[1] > 1000
    assert picture.std() > 0.01
