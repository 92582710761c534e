"""The papers' figures from docs/results/*.json: one function per plot, by the name of its file on the site."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.load.comparison import AR
from redraft.home import DEFAULT_MODEL
from redraft.loadtest.plots import COLORS, new_figure
from redraft.request import AUTO_REGRESSIVE
from studies import training
from studies.figures.contenders import Load, contenders
from studies.figures.redrafter_tables import WIDTHS
from studies.rsd import figure1
from studies.rsd import report as rsd_report
from studies.speed import beam_packing_throughput

DRAFTERS = {
    "recurrent": "ReDrafter",
    "draft_lm": "draft LM",
    "eagle": "EAGLE-style",
    "hidden_state": "Lyanna",
    "medusa": "Medusa-style",
}
"""Kinds of drafters, as the learning curves name them."""


def categories(load: Load) -> Figure:
    """Speed-up and tokens per step of the default by kind of prompt (ReDrafter, figure 5)."""
    figure, axes = new_figure(2, width=5.2)
    result = {
        f"temperature {t}": next(entry for name, entry in single["contenders"].items() if name != AR)["categories"]
        for t, single in load("single_stream")["single"].items()
    }
    kinds = list(next(iter(result.values())))
    panels = {"speedup": ("times auto-regressive", "Speed-up"), "acceptance_length": ("tokens", "Tokens per step")}
    for axis, (key, (unit, title)) in zip(axes, panels.items(), strict=True):
        series = {name: [rows[kind][key] for kind in kinds] for name, rows in result.items()}
        plots.grouped_bars(axis, kinds, series, unit, title, digits=1)
        axis.tick_params(axis="x", labelrotation=35, labelsize=8)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def load_test(load: Load) -> Figure:
    """Milliseconds per token through Triton by request rate: the default, and ReDrafter's table 2."""
    figure, axes = new_figure(2)
    parts = {"load_test": "Default, temperature 0", "redrafter_table2": "ReDrafter's table 2, temperature 1"}
    for axis, (name, title) in zip(axes, parts.items(), strict=True):
        rows = load(name)["rates"]
        series = {
            label: [row[f"{key}_ms_per_token"] for row in rows]
            for key, label in (("auto_regressive", "auto-regressive"), ("speculative", "speculative"))
        }
        plots.grouped_bars(axis, [f"{row['requests_per_s']:g}" for row in rows], series, "ms/token", title)
        axis.set_xlabel("requests/s")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def tensor_parallel(load: Load) -> Figure:
    """Speed-up by ranks, with and without AMX (ReDrafter, table 3)."""
    figure, axes = new_figure(2)
    parts = {"tensor_parallel": "Xeon with AMX", "icelake/tensor_parallel": "Ice Lake Xeon"}
    for axis, (name, title) in zip(axes, parts.items(), strict=True):
        rows = sorted(load(name)["rows"], key=lambda row: (row["ranks"], row["threads"]))
        groups = [f"{counted(row['ranks'], 'rank')},\n{counted(row['threads'], 'thread')}" for row in rows]
        series = {
            label: [row["decoding"]["0"]["contenders"][method]["speedup"] for row in rows]
            for method, label in (("redrafter", "ReDrafter, beams"), ("best", "default"))
        }
        plots.grouped_bars(axis, groups, series, "times auto-regressive", f"{title}, temperature 0", digits=2)
        axis.axhline(1, color="#9ca3af", linestyle=":", linewidth=1)
    axes[1].legend(frameon=False, fontsize=8)
    return figure


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the plural above one."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def by_batch(axis: Axes, report: Mapping[str, Any], labels: Mapping[str, str], title: str) -> None:
    """Speed-up over auto-regressive decoding by batch size, a line per method."""
    rates = {(row["method"], row["batch"]): row["tokens_per_s"] for row in report["cells"]}
    batches = sorted({batch for _, batch in rates})
    series = {
        label: {str(batch): rates[method, batch] / rates[AUTO_REGRESSIVE, batch] for batch in batches}
        for method, label in labels.items()
    }
    plots.lines(axis, series, (title, "requests at once", "times auto-regressive"))
    axis.axhline(1, color="#9ca3af", linestyle=":", linewidth=1)
    axis.legend(frameon=False, fontsize=8, ncols=2)


def beam_widths(load: Load) -> Figure:
    """Speed-up by batch size for each beam width, and by the tuned trees (ReDrafter, table 5)."""
    figure, (axis,) = new_figure(1, width=5.6, height=4.0)
    report = load("zen4/beam_widths")
    widths = {f"width_{width}": counted(width, "beam") for width in WIDTHS}
    by_batch(axis, report, widths | {"tuned": "tuned tree"}, "Beam width and batch size")
    return figure


def method_batches(load: Load) -> Figure:
    """Speed-up by batch size of methods with tuned budgets (Lyanna, figures 8 to 11)."""
    figure, axes = new_figure(3, height=3.8, columns=2)
    labels = {
        "best": "default",
        "redrafter_best_first": "ReDrafter, tree",
        "lyanna": "Lyanna",
        "eagle": "EAGLE-style",
        "sps": "draft LM, chain",
    }
    parts = {
        "method_batches": "Shipped drafters, Xeon",
        "zen4/method_batches": "Shipped drafters, Zen 4",
        "method_batches_equal": "Drafters of equal data, Xeon",
    }
    for axis, (name, title) in zip(axes, parts.items(), strict=True):
        by_batch(axis, load(name), labels, title)
        axis.set_ylim(0.8, 1.75)
    return figure


def drafting_latency(load: Load) -> Figure:
    """Milliseconds of the LM head token by token and in one pass, and of whole drafts (Lyanna, figure 13)."""
    figure, (heads, drafts) = new_figure(2)
    rows = {
        (row["columns"], row["width"], row["way"]): row["milliseconds"]["all"]
        for row in load("drafting_heads")["drafts"]
    }
    sizes = sorted({(columns, width) for columns, width, _ in rows})
    series = {way: [rows[columns, width, way] for columns, width in sizes] for way in ("token by token", "one pass")}
    groups = [f"{columns:,} rows,\n{counted(width, 'node')}" for columns, width in sizes]
    plots.grouped_bars(heads, groups, series, "ms", "Head of a draft of 5 levels", digits=1)
    heads.tick_params(axis="x", labelsize=8)
    heads.legend(frameon=False, fontsize=8, loc="upper left")
    times = load("drafting_latency")["milliseconds"]
    whole = {label: [times[f"{name}_{head}"] for head in ("hot", "full")]
             for name, label in (("eagle", "EAGLE-style"), ("lyanna", "Lyanna"))}  # fmt: skip
    plots.grouped_bars(drafts, ["hot head", "full head"], whole, "ms", "Whole draft, trees 4 wide", digits=1)
    drafts.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def step_times(load: Load) -> Figure:
    """Time of a step by rows over that of one row, by machine."""
    machines = {"Xeon with AMX": "", "Zen 5": "zen5/", "Zen 4": "zen4/", "Ice Lake": "icelake/"}
    figure, (axis,) = new_figure(1, width=5.6)
    series = {}
    for machine, folder in machines.items():
        rows = [row for row in load(f"{folder}step_times")["rows"] if row["sequences"] == 1 and row["context"] == 256]
        series[machine] = {str(row["rows"]): row["median_ms"] / rows[0]["median_ms"] for row in rows}
    plots.lines(axis, series, ("What rows cost", "rows in a step", "times one row"))
    return figure


def beam_packing(load: Load) -> Figure:
    """Rows with and without packing, and the compression ratio, over beam width (ReDrafter, figure 6, left)."""
    results = load("beam_packing")["widths"]
    figure, (rows, ratio) = new_figure(2)
    width = [row["width"] for row in results]
    gray, blue = COLORS[:2]
    rows.plot(width, [row["unpacked"] for row in results], "o-", color=gray, label="without packing", ms=4)
    rows.plot(width, [row["packed"] for row in results], "o-", color=blue, label="with packing, mean", ms=4)
    low, high = ([row[key] for row in results] for key in ("p1", "p99"))
    rows.fill_between(width, low, high, color=blue, alpha=0.15, linewidth=0, label="1st to 99th percentile")
    rows.set_title("Draft rows per step", loc="left")
    ratio.plot(width, [row["compression"] for row in results], "o-", color=blue, ms=4)
    low, high = ([row["unpacked"] / row[key] for row in results] for key in ("p99", "p1"))
    ratio.fill_between(width, low, high, color=blue, alpha=0.15, linewidth=0)
    ratio.set_title("Compression ratio", loc="left")
    for axis in (rows, ratio):
        axis.set_xlabel("beam width")
        axis.set_ylim(bottom=0)
    rows.legend(frameon=False, fontsize=8)
    return figure


def beam_shapes(load: Load) -> Figure:
    """Tokens per step by beam width, a line per length (ReDrafter, figure 7)."""
    figure, (axis,) = new_figure(1, width=5.0)
    result = contenders(load("zen4/beam_shapes_live"), "0")
    series = {
        f"length {length}": {str(width): result[f"w{width}l{length}"]["acceptance_length"] for width in range(1, 5)}
        for length in range(2, 6)
    }
    plots.lines(axis, series, ("Beam width and length", "beam width", "tokens per step"))
    axis.set_ylim(1, 2.2)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    return figure


def rsd_experiment(load: Load, name: str) -> Figure:
    """Block efficiency and tokens/s by draft length or target budget (RSD, figures 4 and 5)."""
    return rsd_report.plot(rsd_report.parts_of(load("rsd/experiments"), name))


def drafts_that_learn(load: Load) -> Figure:
    """Tokens per step of a chain on held-out answers of two domains, while a drafter is trained on served ones."""
    result = load("learning_curve")
    figure, (axis,) = new_figure(1, width=5.2)
    minutes, lengths = zip(*((row["minutes"], row["chain_acceptance_length"]) for row in result["curve"]), strict=True)
    axis.plot(minutes, lengths, "o-", color=COLORS[1], ms=4)
    second = next(row["minutes"] for row in reversed(result["curve"]) if row["generation"] == 1)
    axis.axvline(second, color="0.7", lw=0.8)
    axis.text(second, 1.1, " second generation", fontsize=8)
    axis.set_title("Learning from what is served", loc="left")
    axis.set_xlabel("minutes of training")
    axis.set_ylabel("tokens per step, one chain")
    axis.set_ylim(bottom=1)
    return figure


def learning_curves(drafters: Path, path: Path) -> Path:
    """Training of the default model's drafters, from their own logs (Lyanna, figure 5)."""
    logs = {}
    for file in sorted(drafters.glob(f"{DEFAULT_MODEL}*/training.jsonl")):
        kind = json.loads(file.with_name("config.json").read_text())["drafter"]
        logs[DRAFTERS[kind]] = training.read_log(file)
    return training.plot(logs, 2, path)


DRAWN: dict[str, Callable[[Load], Figure]] = {
    "categories": categories,
    "load_test": load_test,
    "tensor_parallel": tensor_parallel,
    "beam_widths": beam_widths,
    "method_batches": method_batches,
    "drafting_latency": drafting_latency,
    "step_times": step_times,
    "beam_packing": beam_packing,
    "beam_shapes": beam_shapes,
    "drafts_that_learn": drafts_that_learn,
    "rsd_experiment1": lambda load: rsd_experiment(load, "exp1"),
    "rsd_experiment2": lambda load: rsd_experiment(load, "exp2"),
}
"""Plots that only the site has."""


def write(load: Load, drafters: Path, folder: Path) -> list[Path]:
    """Every plot of the results page, as SVG."""
    written = [plots.save(draw(load), folder / f"{name}.svg") for name, draw in DRAWN.items()]
    cells = {(row["method"], row["batch"]): row for row in load("beam_packing_throughput")["cells"]}
    return [
        *written,
        beam_packing_throughput.plot(cells, folder / "beam_packing_throughput.svg"),
        figure1.plot(folder / "rsd_figure1.svg"),
        learning_curves(drafters, folder / "learning_curve.svg"),
    ]
