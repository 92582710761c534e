"""Speculative against auto-regressive decoding without a server: one stream, then several at once.

    python -m benchmarks.speed.single_stream --auto-regressive AR_BUNDLE --speculative BUNDLE [BUNDLE ...]
    python -m benchmarks.speed.single_stream --speculative BUNDLE --methods [METHOD ...]

Compares bundles by their first method, or methods of one bundle, some or all. Without a bundle of its own,
auto-regressive decoding is that of the first bundle. All are loaded side by side and take turns prompt by prompt, so
that a busy machine slows all alike; seconds are medians over the repeats. Before each comparison a method that drafts
from what was served answers --warm-up other prompts of the file, and any other method one of them. Intervals are
95%, over prompts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table, number
from benchmarks.load.comparison import AR, WARM_UP, LLMDecoder, compare, compare_concurrent, report_single
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.acceptance import conditional_acceptance
from benchmarks.speed.inprocess import load_llm, require_fit
from redraft.console.progress import progress
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, InvalidRequest, request

console = Console()


def measure(decoders: dict[str, LLMDecoder], args: argparse.Namespace, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Everything the command line asks for; what was measured before Ctrl-C. Raises InvalidRequest where a prompt and
    its answer do not fit a bundle."""
    everything = load_prompts(args.dataset)
    prompts = spread(everything, args.num_prompts)
    texts = [tokenizer.chat(prompt.turns[0]) for prompt in prompts]
    others = spread([prompt for prompt in everything if prompt not in prompts], args.warm_up)
    warm_up_texts = [tokenizer.chat(prompt.turns[0]) for prompt in others] or [tokenizer.chat(WARM_UP)]
    for llm in {id(decoder.llm): decoder.llm for decoder in decoders.values()}.values():
        require_fit(llm, [*texts, *warm_up_texts], args.max_tokens)
    report: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "top_p": args.top_p,
        "repeats": args.repeats,
        "warm_up": len(others),
        "single": {},
        "concurrent": {},
    }

    def requests(texts: list[str], temperature: float, count: int) -> list[GenerateRequest]:
        pick = [(texts * (count // len(texts) + 1))[i] for i in range(count)]
        filters = {"top_p": args.top_p} if args.top_p and temperature else {}
        return [
            request(text, args.max_tokens, temperature=temperature, seed=i, **filters) for i, text in enumerate(pick)
        ]

    try:
        for temperature in args.temperature:
            warm_up = requests(warm_up_texts, temperature, len(warm_up_texts))
            rounds = len(decoders) * len(texts) * args.repeats
            asked = requests(texts, temperature, len(texts))
            with progress(f"one stream, temperature {temperature:g}", rounds, "answers", console=console) as shown:
                players = compare(decoders, asked, warm_up, args.repeats, shown.advance)
            report["single"][f"{temperature:g}"] = report_single(players, prompts)
            levels = report["concurrent"].setdefault(f"{temperature:g}", [])
            for level in args.streams:
                many = requests(texts, temperature, max(2 * level, 8))
                with progress(f"{level} streams", len(decoders) * args.repeats, "rounds", console=console) as shown:
                    levels.append(compare_concurrent(decoders, many, warm_up, level, args.repeats, shown.advance))
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what was measured is written")
    return report


def tables(report: dict[str, Any]) -> list[Table]:
    """The report as tables: one stream and its kinds of prompts per temperature, then several streams at once."""
    found = []
    columns = ["", "tokens/s", "decoding", "speed-up", "accepted", "rows", "drafting", "host", "identical"]
    for temperature, single in report["single"].items():
        title = f"One stream, temperature {temperature}, {report['max_tokens']} tokens, {single['prompts']} prompts"
        found.append(Table(title, columns))
        for name, entry in single["contenders"].items():
            cells = [
                number(entry["tokens_per_s"]),
                number(entry["decode_tokens_per_s"]),
                _with_interval(entry, "speedup"),
            ]
            if "steps" in entry:
                cells.append(_with_interval(entry, "acceptance"))
                cells.append(number(entry["rows_per_step"], 2))
                cells += [f"{entry[key]:.1%}" for key in ("drafting_share", "host_overhead")]
                cells.append(f"{entry['identical_answers']} of {single['prompts']}")
            found[-1].rows.append([name, *cells, *[""] * (len(columns) - 1 - len(cells))])
        speculative = speculative_entries(single)
        counted = ["", "drafted", "accepted", "wasted", "re-used"]
        found.append(Table(f"Draft tokens, temperature {temperature}", counted))
        for name, entry in speculative.items():
            counts = (entry["drafted"], entry["drafted"] - entry["wasted"], entry["wasted"], entry["reused"])
            found[-1].rows.append([name, *(f"{count:,}" for count in counts)])
        depths = max(len(entry["depth_counts"]) for entry in speculative.values())
        columns_by_depth = ["", *(str(depth + 1) for depth in range(depths))]
        given = {
            "Conditional acceptance by depth (accepted at it over accepted at the one before)": {
                name: conditional_acceptance(entry["steps"], (ours for ours, _ in entry["depth_counts"]))
                for name, entry in speculative.items()
            },
            "The same where the tree has the depth (accepted over offered)": {
                name: entry["depth_counts"] for name, entry in speculative.items()
            },
        }
        for title, counts_of in given.items():
            found.append(Table(f"{title}, temperature {temperature}", columns_by_depth))
            for name, counts in counts_of.items():
                shares = [f"{ours / base:.2f} ({ours}/{base})" if base else "" for ours, base in counts]
                found[-1].rows.append([name, *shares, *[""] * (depths - len(shares))])
        kinds = list(next(iter(speculative.values()))["categories"])
        found.append(
            Table(f"Speed-up and acceptance length by kind of prompt, temperature {temperature}", ["", *kinds])
        )
        for name, entry in speculative.items():
            found[-1].rows.append([name, *(_pair(entry["categories"][kind]) for kind in kinds)])
    for temperature, levels in report["concurrent"].items():
        if levels:
            title = f"Tokens/s of several streams at once (speed-up, acceptance length), temperature {temperature}"
            found.append(Table(title, ["", *(str(level["streams"]) for level in levels)]))
            for name in levels[0]["contenders"]:
                entries = [level["contenders"][name] for level in levels]
                found[-1].rows.append([name, *(f"{number(e['tokens_per_s'])} ({_pair(e)})" for e in entries)])
    return found


def speculative_entries(single: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The contenders that draft, by name."""
    return {name: entry for name, entry in single["contenders"].items() if name != AR}


def _with_interval(entry: dict[str, Any], kind: str) -> str:
    value = entry["speedup" if kind == "speedup" else "acceptance_length"]
    low, high = entry[f"{kind}_interval"]
    return f"{number(value, 2)} ({low:.2f} to {high:.2f})" if low < high else number(value, 2)


def _pair(entry: dict[str, Any]) -> str:
    return f"{entry['speedup']:.2f}x, {number(entry['acceptance_length'], 2)}"


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    for table in tables(report):
        table.show(console)


def load_decoders(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, LLMDecoder]:
    """What is compared, by name, auto-regressive decoding first; what cannot be ends the command with the reason."""
    bundles = {bundle.name: bundle for bundle in args.speculative}
    if len(bundles) < len(args.speculative) or AR in bundles:
        parser.error(f"--speculative: the folders' names must differ, and be other than {AR!r}")
    if args.methods is not None and len(bundles) > 1:
        parser.error("--methods: expected one bundle")
    llms = {name: load_llm(parser, bundle, args.threads) for name, bundle in bundles.items()}
    first = next(iter(llms.values()))
    known = list(first.runtime.plans)
    if args.methods is not None and not known:
        parser.error(f"--methods: {next(iter(bundles.values()))} has no drafter: nothing to compare")
    if unknown := set(args.methods or ()) - set(known):
        parser.error(f"--methods: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    base = load_llm(parser, args.auto_regressive, args.threads) if args.auto_regressive else first
    if args.methods is None:
        drafting = {name: LLMDecoder(llm) for name, llm in llms.items()}
    else:
        drafting = {name: LLMDecoder(first, name) for name in args.methods or known}
    return {AR: LLMDecoder(base, AUTO_REGRESSIVE)} | drafting


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--auto-regressive", type=Path, help="bundle without drafter")
    add("--speculative", type=Path, nargs="+", required=True, help="bundles that draft, named by their folders")
    add("--methods", nargs="*", metavar="METHOD", help="compare these methods of the one bundle, or all")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--top-p", type=float, help="of requests above temperature 0")
    add("--streams", type=int, nargs="*", default=[2, 4, 8, 16], help="numbers of streams at once")
    add("--warm-up", type=int, default=32, help="other prompts of the file to warm up with")
    add("--repeats", type=int, default=3)
    add("--threads", type=int)
    add("--output", type=Path, default=Path("artifacts/reports/single_stream.json"))
    args = parser.parse_args(argv)
    decoders = load_decoders(parser, args)
    try:
        report = measure(decoders, args, ChatTokenizer(args.speculative[0]))
    except InvalidRequest as error:
        parser.error(f"{args.dataset}: {error}")
    report["auto_regressive"] = (args.auto_regressive or args.speculative[0]).name
    save_report(args.output, report)
    show(report)
    console.print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
