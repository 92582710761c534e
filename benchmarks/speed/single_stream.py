"""Speculative against auto-regressive decoding without a server: one stream, then several at once.

    python -m benchmarks.speed.single_stream --auto-regressive AR_BUNDLE --bundle BUNDLE [BUNDLE ...]
    python -m benchmarks.speed.single_stream --bundle BUNDLE --method all

Compares bundles by their first method, or methods of one bundle, some or all. Without a bundle of its own,
auto-regressive decoding is that of the first bundle. All are loaded side by side and take turns prompt by prompt, so
that a busy machine slows all alike; seconds are medians over the repeats. Before each comparison all answer the first
prompt to warm up. Nothing is drafted from what was served to others. Intervals are 95%, over prompts.

llama.cpp takes its turn at one stream, with an interpreter that has llama-cpp-python and one or more GGUF files:

    python -m benchmarks.speed.single_stream --bundle BUNDLE --llama-cpp llama/bin/python --llama-model Q4_0.gguf
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import (
    PROMPTS_FILE,
    BundleFolders,
    FixedBudget,
    LlamaModels,
    LlamaPython,
    MaxTokens,
    NumPrompts,
    PlainBundle,
    PromptsFile,
    Repeats,
    Report,
    Threads,
    console,
    require_llama,
    run,
)
from benchmarks.load.comparison import AR, Decoder, LLMDecoder, compare, compare_concurrent, report_single
from benchmarks.load.llama_cpp import LlamaCpp, LlamaDecoder
from benchmarks.speed.acceptance import conditional_acceptance
from benchmarks.speed.inprocess import load_llm, methods_of, require_fit, write_caches
from redraft.console.progress import progress
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table, number
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest


@dataclass(frozen=True)
class Race:
    """What the contenders are asked."""

    prompts: Path
    num_prompts: int | None
    max_tokens: int
    temperatures: list[float]
    top_p: float | None
    streams: list[int]
    repeats: int

    def run(
        self, decoders: dict[str, LLMDecoder], tokenizer: ChatTokenizer, peers: Mapping[str, Decoder]
    ) -> dict[str, Any]:
        """Measure all, peers at one stream only, or what there is time for before Ctrl-C. Raises typer.BadParameter
        where a prompt and its answer do not fit a bundle."""
        chosen = spread(load_prompts(self.prompts), self.num_prompts)
        texts = [prompt.turns[0] for prompt in chosen]

        def requests(texts: list[str], temperature: float, count: int) -> list[GenerateRequest]:
            filters = {"top_p": self.top_p} if self.top_p and temperature else {}
            return [
                tokenizer.request(text, self.max_tokens, temperature=temperature, seed=index, **filters)
                for index, text in enumerate(islice(cycle(texts), count))
            ]

        for llm in {id(decoder.llm): decoder.llm for decoder in decoders.values()}.values():
            require_fit(llm, requests(texts, 0, len(texts)), self.prompts)
        report: dict[str, Any] = {"max_tokens": self.max_tokens, "top_p": self.top_p, "repeats": self.repeats}
        report |= {"single": {}, "concurrent": {}}
        try:
            for temperature in self.temperatures:
                rounds = (len(decoders) + len(peers)) * len(texts) * self.repeats
                asked = requests(texts, temperature, len(texts))
                with progress(f"one stream, temperature {temperature:g}", rounds, "answers", console=console) as bar:
                    players = compare({**decoders, **peers}, asked, self.repeats, bar.advance)
                report["single"][f"{temperature:g}"] = report_single(players, chosen)
                levels = report["concurrent"].setdefault(f"{temperature:g}", [])
                for level in self.streams:
                    many, turns = requests(texts, temperature, max(2 * level, len(texts))), len(decoders) * self.repeats
                    with progress(f"{level} streams", turns, "rounds", console=console) as bar:
                        levels.append(compare_concurrent(decoders, many, level, self.repeats, bar.advance))
        except KeyboardInterrupt:
            console.print("[yellow]interrupted: what was measured is written")
        return report


def tables(report: dict[str, Any]) -> list[Table]:
    """The report as tables: one stream and its kinds of prompts per temperature, then several streams at once."""
    result = []
    for temperature, single in report["single"].items():
        columns = ["", "tokens/s", "decoding", "speed-up", "accepted", "rows", "drafting", "host", "identical"]
        if "fastest_peer" in single:
            columns.append(f"over {single['fastest_peer']}")
        title = f"One stream, temperature {temperature}, {report['max_tokens']} tokens, {single['prompts']} prompts"
        result.append(Table(title, columns))
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
            if "over_peer" in entry:
                cells.append(_with_interval(entry, "over_peer"))
            result[-1].rows.append([name, *cells, *[""] * (len(columns) - 1 - len(cells))])
        speculative = speculative_entries(single)
        counted = ["", "drafted", "accepted", "wasted", "re-used"]
        result.append(Table(f"Draft tokens, temperature {temperature}", counted))
        for name, entry in speculative.items():
            counts = (entry["drafted"], entry["drafted"] - entry["wasted"], entry["wasted"], entry["reused"])
            result[-1].rows.append([name, *(f"{count:,}" for count in counts)])
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
            result.append(Table(f"{title}, temperature {temperature}", columns_by_depth))
            for name, counts in counts_of.items():
                shares = [f"{ours / base:.2f} ({ours}/{base})" if base else "" for ours, base in counts]
                result[-1].rows.append([name, *shares, *[""] * (depths - len(shares))])
        kinds = list(next(iter(speculative.values()))["categories"])
        result.append(
            Table(f"Speed-up and acceptance length by kind of prompt, temperature {temperature}", ["", *kinds])
        )
        for name, entry in speculative.items():
            result[-1].rows.append([name, *(_pair(entry["categories"][kind]) for kind in kinds)])
    for temperature, levels in report["concurrent"].items():
        if levels:
            title = f"Tokens/s of several streams at once (speed-up, acceptance length), temperature {temperature}"
            result.append(Table(title, ["", *(str(level["streams"]) for level in levels)]))
            for name in levels[0]["contenders"]:
                entries = [level["contenders"][name] for level in levels]
                result[-1].rows.append([name, *map(_of_streams, entries)])
    return result


def speculative_entries(single: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The contenders of ours that draft, by name."""
    return {name: entry for name, entry in single["contenders"].items() if name != AR and "steps" in entry}


def _with_interval(entry: dict[str, Any], kind: str) -> str:
    value = entry["acceptance_length" if kind == "acceptance" else kind]
    low, high = entry[f"{kind}_interval"]
    return f"{number(value, 2)} ({low:.2f} to {high:.2f})" if low < high else number(value, 2)


def _of_streams(entry: dict[str, Any]) -> str:
    """Tokens/s of several streams, and in brackets the speed-up with its interval, and the acceptance length."""
    low, high = entry.get("speedup_interval", (0, 0))
    over = f", {low:.2f} to {high:.2f}" if low < high else ""
    return f"{number(entry['tokens_per_s'])} ({entry['speedup']:.2f}x{over}; {number(entry['acceptance_length'], 2)})"


def _pair(entry: dict[str, Any]) -> str:
    return f"{entry['speedup']:.2f}x, {number(entry['acceptance_length'], 2)}"


def load_decoders(
    folders: list[Path], methods: list[str] | None, auto_regressive: Path | None, threads: int | None
) -> dict[str, LLMDecoder]:
    """Load what is compared, by name, auto-regressive decoding first. Raises typer.BadParameter."""
    bundles = {bundle.name: bundle for bundle in folders}
    if len(bundles) < len(folders) or AR in bundles:
        raise typer.BadParameter(f"--bundle: the folders' names must differ, and be other than {AR!r}")
    if methods and len(bundles) > 1:
        raise typer.BadParameter("--method: expected one bundle")
    llms = {name: load_llm(bundle, threads) for name, bundle in bundles.items()}
    first = next(iter(llms.values()))
    if methods and not first.runtime.methods:
        raise typer.BadParameter(f"--method: {folders[0]} has no drafter: nothing to compare")
    base = load_llm(auto_regressive, threads) if auto_regressive else first
    for llm in {base, *llms.values()}:
        write_caches(llm)
    if methods:
        drafting = {name: LLMDecoder(first, name) for name in methods_of(first, methods)}
    else:
        drafting = {name: LLMDecoder(llm) for name, llm in llms.items()}
    return {AR: LLMDecoder(base, AUTO_REGRESSIVE)} | drafting


@contextmanager
def open_peers(
    python: Path | None, models: list[Path], lookups: list[int], decoder: LLMDecoder, threads: int | None
) -> Iterator[dict[str, LlamaDecoder]]:
    """llama.cpp over each GGUF file, with each number of looked-up tokens, by name. Raises typer.BadParameter."""
    runtime = decoder.llm.runtime
    with ExitStack() as stack:
        peers: dict[str, LlamaDecoder] = {}
        for model, lookup in product(models, lookups):
            assert python is not None
            try:
                process = stack.enter_context(closing(LlamaCpp(python, model, runtime.limits.max_len, lookup, threads)))
            except RuntimeError as error:
                raise typer.BadParameter(f"--llama-cpp: {error}") from None
            peers[f"llama.cpp {model.stem}" + f" lookup {lookup}" * bool(lookup)] = LlamaDecoder(process, runtime)
        yield peers


def main(
    bundles: BundleFolders,
    auto_regressive: PlainBundle = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", metavar="NAME", help="Methods of one bundle, or `all` of them; default: each bundle's first."
        ),
    ] = None,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[list[float], typer.Option(help="Sampling temperatures of the requests.")] = [0.0, 1.0],
    top_p: Annotated[
        float | None,
        typer.Option(help="Probability that the sampled tokens add up to, above temperature 0; default: 1."),
    ] = None,
    streams: Annotated[
        list[int], typer.Option("--concurrency", help="Requests at a time, after one at a time; 0: only that.")
    ] = [2, 4, 8, 16],
    repeats: Repeats = 3,
    fixed: FixedBudget = None,
    threads: Threads = None,
    llama_cpp: LlamaPython = None,
    llama_models: LlamaModels = [],
    llama_lookups: Annotated[
        list[int],
        typer.Option(
            "--llama-lookup", help="Tokens that llama.cpp drafts by prompt lookup, one run for each; 0: none."
        ),
    ] = [0],
    output: Report = Path("artifacts/reports/single_stream.json"),
) -> None:
    require_llama(llama_cpp, llama_models)
    decoders = load_decoders(bundles, methods, auto_regressive, threads)
    for decoder in decoders.values() if fixed else ():
        decoder.llm.runtime.fix_budget(methods=methods_of(decoder.llm, fixed or []))
    levels = [level for level in streams if level]
    race = Race(prompts, num_prompts, max_tokens, temperature, top_p, levels, repeats)
    with open_peers(llama_cpp, llama_models, llama_lookups, decoders[AR], threads) as peers:
        report = race.run(decoders, ChatTokenizer(bundles[0]), peers)
        report["peers"] = {name: f"llama-cpp-python {peer.process.version}" for name, peer in peers.items()}
    finish(output, report | {"auto_regressive": (auto_regressive or bundles[0]).name}, *tables(report))


if __name__ == "__main__":
    run(main)
