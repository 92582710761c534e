"""RSD's experiments: what is measured, kept and gone on with, and the figures, tables and plots of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from benchmarks.rsd import experiments as rsd_experiments
from benchmarks.rsd import figures as rsd_figures
from benchmarks.rsd import report as rsd_report
from benchmarks.rsd.experiments import Setting, measure, measure_rates, parameters, pick_prompts, seed
from benchmarks.rsd.figures import Figures
from benchmarks.rsd.shapes import ALGORITHMS, BUDGETS, EXPERIMENTS, LENGTHS, RSD_C, RSD_S, SD, SPECTR, Shape, shapes_of
from benchmarks.rsd.store import Row, Store
from redraft.llm import Answer
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, SequenceStats

COLD = Setting(0.3, None, ("translation",))
WARM = Setting(1.0, 0.95, ("translation",))
PROMPTS = [Prompt(str(place), "translation", ("a",), (("ein Text",),)) for place in range(3)]
BY_SETTING = {"0.3": PROMPTS, "1": PROMPTS[:2]}
METHODS = [AUTO_REGRESSIVE, "sd_2", "rsd_s_2x2"]
CELLS = [(setting, method) for method in METHODS for setting in (COLD, WARM)]
SETUP = {"target_parameters": 1000, "draft_parameters": 100, "max_tokens": 9}
PARTS = {"0.3": {"sampling": {"temperature": 0.3}, "prompts": ["0", "1", "2"]},
         "1": {"sampling": {"temperature": 1.0, "top_p": 0.95}, "prompts": ["0", "1"]}}  # fmt: skip


class Echo:
    """Answers with what was asked; dies at the request `last`."""

    def __init__(self, last=None):
        self.asked, self.last = [], last

    def run(self, requests, concurrency=1):
        self.asked += requests
        if self.last is not None and len(self.asked) > self.last:
            raise KeyboardInterrupt
        stats = SequenceStats(steps=4, accepted=5, accepted_by_depth=[4, 1], offered_by_depth=[4, 2], decode_ms=80.0)
        return [Answer(list(range(wanted.max_tokens)), wanted.text, "length", stats=stats) for wanted in requests]


def asked(setting, method, prompt, round_):
    text = f"{method} {prompt.question_id} {round_}"
    return GenerateRequest(id="r", text=text, max_tokens=9, sampling=setting.sampling)


def store(tmp_path) -> Store:
    return Store.open(tmp_path / "results.json", SETUP, PARTS)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measure(Echo(last=25), store(tmp_path), CELLS, BY_SETTING, asked, 2)
    again, kept = Echo(), store(tmp_path)
    assert [kept.has(setting.name, method) for setting, method in CELLS] == [True] * 4 + [False] * 2
    measure(again, kept, CELLS, BY_SETTING, asked, 2)
    assert {wanted.text.split()[0] for wanted in again.asked} == {"rsd_s_2x2"}
    assert len(store(tmp_path).rows["0.3"][AUTO_REGRESSIVE]) == 3 * rsd_experiments.BASELINE_ROUNDS
    assert store(tmp_path).rows["1"]["sd_2"] == [
        Row(str(place), "translation", f"sd_2 {place} 0", 9, 4, 5, [4, 1], [4, 2]) for place in range(2)
    ]


def test_rates_take_turns_and_go_on(tmp_path):
    llm, kept = Echo(), store(tmp_path)
    measure_rates(llm, kept, CELLS, BY_SETTING, asked)
    texts = [wanted.text for wanted in llm.asked if wanted.sampling.temperature == 0.3 and wanted.max_tokens == 9]
    orders = [METHODS, METHODS[::-1], METHODS]
    assert texts == [f"{method} {place} 0" for place, order in enumerate(orders) for method in order]
    assert kept.timing["1"]["sd_2"] == {"0": (8, 0.08), "1": (8, 0.08)}
    again = Echo()
    measure_rates(again, store(tmp_path), CELLS, BY_SETTING, asked)
    assert not again.asked


def test_results_of_other_settings_are_not_mixed(tmp_path):
    kept = store(tmp_path)
    kept.add("0.3", "sd_2", [])
    with pytest.raises(ValueError, match=r"max_tokens: 9, now 10.*choose another --output"):
        Store.open(kept.path, SETUP | {"max_tokens": 10}, PARTS)
    with pytest.raises(ValueError, match=r"temperature 0.3: .*now .*'7'"):
        Store.open(kept.path, SETUP, {"0.3": PARTS["0.3"] | {"prompts": ["7"]}})
    assert set(Store.open(kept.path, SETUP, {"2": PARTS["1"]}).settings) == {"0.3", "1", "2"}
    for text in ("{", "[]", '{"rows": {"0.3": {"sd_2": [{"steps": 1}]}}}', '{"rows": {}}'):
        kept.path.write_text(text)
        with pytest.raises(ValueError, match="holds no results"):
            store(tmp_path)


def test_seeds_differ_by_method_prompt_and_round():
    every = {seed(method, prompt, round_) for method in METHODS for prompt in PROMPTS for round_ in range(4)}
    assert len(every) == 36
    assert all(0 <= number < 2**32 for number in every)


def test_prompts_are_spread_over_the_tasks(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"category": kind, "turns": [kind]} for kind in ["writing"] * 9 + ["coding"] * 9 + ["translation"] * 9]
    file.write_text("\n".join(map(json.dumps, rows)))
    chosen = pick_prompts(file, Setting(1.0, None, ("translation", "mt_bench")), 5)
    assert [prompt.category for prompt in chosen] == ["translation"] * 2 + ["writing"] * 2 + ["coding"]
    with pytest.raises(ValueError, match=r"no prompts of the task rag"):
        pick_prompts(file, Setting(1.0, None, ("translation", "rag")), 4)


@pytest.mark.parametrize(("own_head", "draft"), [(False, 21 + 5 * 7), (True, 21 + 35)])
def test_sizes_are_what_a_pass_reads(tmp_path, own_head, draft):
    """Of the drafter: its weights, not its lists of tokens, and the LM head's hot rows where it has none of its own."""
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    model.mkdir()
    drafter.mkdir()
    for part in range(2):
        save_file({"a": np.zeros((3, 11), np.float32)}, model / f"{part}.safetensors")
    weights = {"w": np.zeros((3, 7), np.float16), "hot_ids": np.zeros(5, np.int32)}
    save_file(weights | ({"own_head.weight": np.zeros((5, 7), np.float16)} if own_head else {}),
              drafter / "drafter.safetensors")  # fmt: skip
    (drafter / "config.json").write_text('{"hot_vocabulary": 5, "hidden_size": 7}')
    assert parameters(model, drafter) == (66, draft)
    with pytest.raises(ValueError, match="--drafter"):
        parameters(model, model)
    (model / "config.json").write_text('{"model_type": "opt"}')
    save_file({"model.decoder.embed_tokens.weight": np.zeros((2, 3), np.float32)}, model / "2.safetensors")
    assert parameters(model, model) == (72, 72)


def rows(efficiencies: list[float], text: str = "ein Text von hier") -> list[Row]:
    """Answers of 100 steps each to as many prompts, of the given block efficiencies."""
    return [
        Row(str(place), "translation", text, 64, 100, round(100 * value) - 100, [50], [100])
        for place, value in enumerate(efficiencies)
    ]


def test_figures_by_hand(tmp_path):
    """RSD-S is half a token ahead of SpecTr on every prompt, whose own efficiencies differ by far more."""
    kept = store(tmp_path)
    kept.rows["0.3"] = {
        AUTO_REGRESSIVE: rows([1.0, 1.0, 1.0]),
        "sd_2": rows([1.1, 1.2, 1.3]),
        "spectr_2x2": rows([1.5, 2.0, 2.5]),
        "spectr_3x2": rows([1.4, 1.9, 2.3]),
        "rsd_s_2x2": rows([2.0, 2.5, 3.0]),
        "best_first_2x2": rows([3.0, 3.0, 3.0]),
    }
    kept.timing["0.3"] = {AUTO_REGRESSIVE: {"0": (10, 1.0), "1": (10, 3.0)}, "sd_2": {"1": (30, 3.0)}}
    figures = Figures(kept, "0.3", LENGTHS)
    assert figures.best(2)[SPECTR] == Shape(SPECTR, (2, 2))
    assert RSD_C not in figures.best(2)
    assert figures.efficiency[Shape(RSD_S, (2, 2))].value == pytest.approx(2.5)
    assert figures.memory_bound(Shape(RSD_S, (2, 2))).value == pytest.approx(2.5 / 1.2)
    assert figures.rate("sd_2").value == pytest.approx(10)
    assert figures.speedup("sd_2").value == pytest.approx(3)
    assert figures.speedup("rsd_s_2x2") is None
    (line,) = rsd_report.best_shapes([figures.json()]).rows
    best = ["1.20 (2)", "2.00 (2x2)", "-", "2.50 (2x2)", "3.00 (2x2)"]
    assert line == ["0.3", "2", *best, "+0.50 (+0.50 to +0.50)"]
    details = rsd_report.all_shapes(figures.json())
    row = dict(zip(details.columns, details.rows[0], strict=True))
    assert (row["method"], row["block efficiency"]) == (SD, "1.20 (1.10 to 1.30)")
    assert (row["depth 1"], row["MBSU"], row["speed-up"]) == ("0.50", "1.00 (0.92 to 1.08)", "3.00 (3.00 to 3.00)")
    assert not Figures(kept, "1", BUDGETS).efficiency


def test_long_answers_count_for_their_steps():
    answers = [Row("0", "qa", "", 9, 100, 50), Row("1", "qa", "", 9, 250, 400), Row("1", "qa", "", 9, 50, 50)]
    efficiency = rsd_figures.block_efficiency(answers, ["0", "1"])
    assert efficiency.value == pytest.approx(1 + 500 / 400)
    assert efficiency.samples.min() == pytest.approx(1.5)
    assert efficiency.samples.max() == pytest.approx(2.5)


def test_quality_is_compared_with_auto_regressive_sampling(tmp_path):
    kept = store(tmp_path)
    same, other = rows([1.0] * 3, "das ist ein Text von hier"), rows([1.0] * 3, "das war kein Text von hier")
    kept.rows["0.3"] = {AUTO_REGRESSIVE: same, "sd_2": same, "sd_3": same, "rsd_s_2x2": other}
    references = {str(place): ("das ist ein Text von hier",) for place in range(2)}
    base, sd, rsd = rsd_report.quality(rsd_figures.quality(kept, "0.3", references)).rows
    assert base == ["auto-regressive", "2", "100.0 (100.0 to 100.0)", ""]
    assert (sd[0], sd[1], sd[3]) == (SD, "4", "+0.0 (+0.0 to +0.0)")
    assert (rsd[0], float(rsd[3].split()[0]) < -30) == (RSD_S, True)
    assert rsd_figures.quality(kept, "0.3", {}) is None


def test_tables_and_plots_are_written(tmp_path):
    kept, rng = store(tmp_path), np.random.default_rng(0)
    for setting, count in (("0.3", 3), ("1", 2)):
        for method in [AUTO_REGRESSIVE, *(shape.method for shape in shapes_of(list(EXPERIMENTS.values())))]:
            kept.rows.setdefault(setting, {})[method] = rows(list(1 + rng.random(count)))
            kept.timing.setdefault(setting, {})[method] = {"0": (10, 0.1)}
    references = {prompt.question_id: prompt.references[0] for prompt in PROMPTS}
    written = rsd_report.write(kept, list(EXPERIMENTS.values()), references, tmp_path, Console(quiet=True))
    assert {path.name for path in written} == {"results.json", "experiments.json", "exp1.png", "exp2.png"}
    content = json.loads((tmp_path / "experiments.json").read_text())
    assert [(part["experiment"], part["sampling"]["temperature"]) for part in content["experiments"]] == [
        ("exp1", 0.3), ("exp2", 0.3), ("exp1", 1.0), ("exp2", 1.0)
    ]  # fmt: skip
    assert len(content["quality"]) == 2
    assert all(set(best) == set(ALGORITHMS) for part in content["experiments"] for best in part["best"].values())


def test_wrong_flags_are_named(tmp_path, capsys):
    for flags, said in ((["--cells", "4", "7"], "--cells 7"), (["--num-prompts", "0"], "--num-prompts 0")):
        with pytest.raises(SystemExit):
            rsd_experiments.main(["--dataset", str(tmp_path / "none"), *flags])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rsd_experiments.main(["--dataset", str(tmp_path / "none")])
    assert "none" in capsys.readouterr().err


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command's flags on six translations, with engines that are not there replaced."""
    dataset, llm = tmp_path / "prompts.jsonl", Echo()
    rows = [{"category": "translation", "turns": [f"{place}"], "reference": ["ein Text"]} for place in range(6)]
    dataset.write_text("\n".join(map(json.dumps, rows)))

    class Chat:
        def __init__(self, folder):
            assert folder == tmp_path / "bundle"

        def chat(self, user):
            return f"chat {user}"

    known = SimpleNamespace(config=SimpleNamespace(methods={"sd_2": None, "spectr_2x2": None}))
    monkeypatch.setattr(rsd_experiments, "parameters", lambda model, drafter: (1000, 100))

    def load(parser, folder, threads, prefix_reuse):
        llm.prefix_reuse = prefix_reuse
        return llm

    monkeypatch.setattr(rsd_experiments, "load_llm", load)
    monkeypatch.setattr(rsd_experiments, "ChatTokenizer", Chat)
    monkeypatch.setattr(rsd_experiments.Bundle, "load", lambda folder: known)
    flags = ["--dataset", str(dataset), "--bundle", str(tmp_path / "bundle"), "--tasks", "translation"]
    flags += ["--num-prompts", "3", "--max-tokens", "7", "--cells", "2", "--output", str(tmp_path / "out")]
    return flags, llm


def test_the_command_asks_each_method_as_the_paper_samples(command, tmp_path):
    flags, llm = command
    assert rsd_experiments.main([*flags, "--algorithms", "SD"]) == 0
    assert [wanted.method for wanted in llm.asked] == ([AUTO_REGRESSIVE] * 12 + ["sd_2"] * 3) * 2
    cold, warm = llm.asked[12:15], llm.asked[27:]
    assert {(w.sampling.temperature, w.sampling.top_p, w.max_tokens) for w in cold} == {(0.3, None, 7)}
    assert {(w.sampling.temperature, w.sampling.top_p) for w in warm} == {(1.0, 0.95)}
    assert [wanted.text for wanted in warm] == ["chat 0", "chat 2", "chat 4"]
    assert len({wanted.sampling.seed for wanted in llm.asked[:12]}) == 12
    assert llm.prefix_reuse
    before = (tmp_path / "out" / "experiments.json").read_text()
    assert rsd_experiments.main([*flags, "--algorithms", "SD", "--report-only"]) == 0
    assert len(llm.asked) == 30
    assert (tmp_path / "out" / "experiments.json").read_text() == before
    assert rsd_experiments.main([*flags, "--algorithms", "SD", "--timing", "--timing-prompts", "1"]) == 0
    assert len(llm.asked) == 30 + 2 * 2 * 2
    assert not llm.prefix_reuse
    timed = json.loads((tmp_path / "out" / "experiments.json").read_text())["experiments"]
    assert all(shape["speedup"]["value"] > 0 for part in timed for shape in part["shapes"])


def test_a_bundle_without_the_methods_is_refused(command, capsys):
    flags, llm = command
    with pytest.raises(SystemExit):
        rsd_experiments.main([*flags, "--algorithms", "SD", "SpecTr"])
    said = capsys.readouterr().err
    assert "lacks the methods spectr_3x2;" in said
    assert "--max-tree 7" in said
    assert not llm.asked


def test_the_bundle_is_built_with_every_method(command, tmp_path, monkeypatch):
    flags, _ = command
    commands = []
    monkeypatch.setattr(
        rsd_experiments.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=1)
    )
    at = flags.index("--bundle")
    flags[at : at + 2] = ["--engines", str(tmp_path / "engines"), "--drafter", "some/drafter"]
    with pytest.raises(SystemExit):
        rsd_experiments.main(flags)
    ((*_, slots, _, tree),) = commands
    assert (slots, tree) == (str(3 + 8), str(1 + 62))
    methods = tmp_path / "out" / "methods.toml"
    assert {"--methods", str(methods), str(tmp_path / "engines" / "rsd-drafter-bf16")} < set(commands[0])
    assert methods.read_text().count("[") == 79
