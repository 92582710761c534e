"""One stream by every method of a bundle for several ranks (ReDrafter, table 3).

    python -m studies.speed.tensor_parallel measure --auto-regressive AR --bundle BUNDLE --output one.json
    python -m studies.speed.tensor_parallel measure --auto-regressive AR_2 --bundle BUNDLE_2 --output two.json
    python -m studies.speed.tensor_parallel report one.json two.json --output tensor_parallel.json

`measure` takes a bundle of benchmarks/methods/tensor_parallel.toml and one without drafter, for as many ranks, which
it starts. As the paper does, it decodes one stream: by every method of the first and by the other, which take turns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, PromptsFile, Repeats, Report, Threads, run
from benchmarks.load.comparison import AR, compare, report_single
from redraft.bundle.manifest import Bundle
from redraft.console.program import Rows
from redraft.errors import BundleError
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table, number
from redraft.loadtest.workload import ChatTokenizer
from redraft.plugins import kernels
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE
from studies.speed.served import Served, worker_of

app = typer.Typer(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=Rows)
def measure(
    bundle: BundleFolder,
    auto_regressive: Annotated[Path, typer.Option(help="Bundle without drafter, for as many ranks.")],
    threads: Threads = None,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: Annotated[int, typer.Option(help="Prompts, spread evenly over the file.")] = 16,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[list[float], typer.Option(help="Sampling temperatures of the requests.")] = [0.0, 1.0],
    repeats: Repeats = 3,
    output: Report = Path("artifacts/reports/tensor_parallel_part.json"),
) -> None:
    """Measure a bundle."""
    try:
        config, base = Bundle.load(bundle).config, Bundle.load(auto_regressive).config
    except BundleError as error:
        raise typer.BadParameter(str(error)) from None
    for name in ("backend", "precision", "tensor_parallel"):
        if getattr(base, name) != (expected := getattr(config, name)):
            raise typer.BadParameter(f"--auto-regressive {auto_regressive}: expected {name} {expected} as of {bundle}")
    tokenizer, chosen = ChatTokenizer(bundle), spread(load_prompts(prompts), num_prompts)
    decoding = {}
    with worker_of(auto_regressive, threads) as plain, worker_of(bundle, threads) as drafting:
        decoders = {AR: Served(plain, AUTO_REGRESSIVE)} | {name: Served(drafting, name) for name in config.methods}
        for degree in temperature:
            options = {"temperature": degree}
            asked = [tokenizer.request(p.turns[0], max_tokens, seed=i, **options) for i, p in enumerate(chosen)]
            players = compare(decoders, asked, repeats, lambda: None)
            decoding[f"{degree:g}"] = report_single(players, chosen)
    row = {"ranks": config.tensor_parallel, "threads": threads or kernels.threads(), "decoding": decoding}
    finish(output, row, *tables([row]))


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Table 3 for each temperature."""
    result = []
    for temperature, first in rows[0]["decoding"].items():
        title = f"Tokens/s of one stream, temperature {temperature}: speed-up, acceptance length, drafting share"
        result.append(Table(title, ["ranks x threads", *first["contenders"]]))
        for row in rows:
            contenders = row["decoding"][temperature]["contenders"]
            cells = [_cell(name, contenders[name]) for name in first["contenders"]]
            result[-1].rows.append([f"{row['ranks']} x {row['threads']}", *cells])
    return result


def _cell(name: str, entry: dict[str, Any]) -> str:
    speed = number(entry["tokens_per_s"])
    if name == AR:
        return speed
    return f"{speed} ({entry['speedup']:.2f}x, {entry['acceptance_length']:.2f}, {entry['drafting_share']:.0%})"


@app.command()
def report(
    reports: Annotated[list[Path], typer.Argument(help="Files of measure.")],
    output: Report = Path("artifacts/reports/tensor_parallel.json"),
) -> None:
    """Put the reports of several bundles side by side."""
    keys = ("ranks", "threads", "decoding")
    rows = [{key: part[key] for key in keys} for part in (json.loads(path.read_bytes()) for path in reports)]
    finish(output, {"rows": rows}, *tables(rows))


if __name__ == "__main__":
    run(app)
