"""What grammar libraries cost on draft trees: llguidance, which redraft uses, and xgrammar where it is installed.

    python -m benchmarks.speed.grammar_libraries --model artifacts/models/SmolLM2-135M-Instruct

For each schema of --schemas a text that meets it is written token by token, as masks of llguidance allow it (seeded).
Measured are the time to compile the schema; the time of a mask at each place of that text; that of a copy of the
state, with which each path of a draft tree begins; and that of the forced tokens. Times are medians and 99th
percentiles over all places.
Last come microseconds a row of what a GPU that chooses tokens is given: the bits of all rows of trees of --rows rows,
whose masks are made or, as the tree was grown with them, only packed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.verify.structured import HERE, load_schemas
from redraft.batch import TargetBatch
from redraft.decoding.token_tree import Node, TokenTree, mask_words
from redraft.engines.cuda.masks import row_masks
from redraft.grammar.compiler import Grammars
from redraft.grammar.json_schema.rules import ONE_LINE
from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.grammar.state import Grammar, GrammarState
from redraft.request import Guide
from redraft.text import TextCodec

MOST_TOKENS = 120
console = Console()


@dataclass(frozen=True)
class Matcher:
    """A library's state in one text: what may come next, one token on, a state of its own, and what must come next."""

    mask: Callable[[], Any]
    take: Callable[[int], Any]
    copy: Callable[[], Any]
    forced: Callable[[], Any]


class LLGuidance:
    """llguidance: the automaton grows as it is used."""

    def __init__(self, codec: TextCodec, vocab_size: int):
        self._tokens = grammar_tokens(codec, vocab_size)

    def compile(self, schema: str) -> Matcher:
        matcher: Any = compiled(self._tokens, library_grammar(Guide(kind="json_schema", text=schema)))
        return Matcher(
            matcher.compute_bitmask, matcher.consume_token, matcher.deep_copy, matcher.compute_ff_tokens,
        )  # fmt: skip


class XGrammar:
    """xgrammar: masks are prepared when a grammar is compiled."""

    def __init__(self, codec: TextCodec, vocab_size: int):
        import xgrammar

        self._library, self._vocab_size = xgrammar, vocab_size
        words = [codec.token_bytes(token) for token in range(vocab_size)]
        info = xgrammar.TokenizerInfo(
            words, vocab_type=xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[2]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Matcher:
        form = {"any_whitespace": False, "separators": (ONE_LINE["item_separator"], ONE_LINE["key_separator"])}
        grammar = self._compiler.compile_json_schema(schema, **form)
        matcher = self._library.GrammarMatcher(grammar)
        bits = self._library.allocate_token_bitmask(1, self._vocab_size)
        return Matcher(
            lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token, matcher.fork,
            matcher.find_jump_forward_string,
        )  # fmt: skip


@dataclass
class Times:
    """Seconds of each kind of call."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    forced: list[float] = field(default_factory=list)


def text_of(codec: TextCodec, vocab_size: int, schema: str, rng: np.random.Generator) -> list[int]:
    """Tokens of a text that meets a schema: forced ones where there are, else one of the mask."""
    state = compiled(grammar_tokens(codec, vocab_size), library_grammar(Guide(kind="json_schema", text=schema)))
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS and not state.is_stopped():
        chosen = state.compute_ff_tokens()
        if not chosen:
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))
            if not len(allowed):
                break
            chosen = [int(rng.choice(allowed))]
        for token in chosen:
            state.consume_token(token)
        tokens += chosen
    return tokens


def measure(library: LLGuidance | XGrammar, schema: str, text: list[int], times: Times) -> None:
    """Add the times of a library at all places of a text. Raises ValueError where it does not take the text."""

    def timed(seconds: list[float], call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
        return result

    matcher = timed(times.compile, lambda: library.compile(schema))
    for place, token in enumerate(text[:-1]):
        timed(times.mask, matcher.mask)
        timed(times.copy, matcher.copy)
        timed(times.forced, matcher.forced)
        if not matcher.take(token):
            raise ValueError(f"token {place} of its text is refused")


def tree_at(state: GrammarState, text: list[int], rows: int) -> TargetBatch:
    """A batch of one tree along a text, with a second allowed token beside each of it where there is one."""
    nodes: list[Node] = [(0, -1, 0.0)]
    path: tuple[int, ...] = ()
    above = 0
    for token in text:
        others = np.flatnonzero(state.mask(path))
        beside = [int(other) for other in others[:2] if other != token][:1]
        nodes += [(one, above, 0.0) for one in (token, *beside)]
        above, path = len(nodes) - 1 - len(beside), (*path, token)
    nodes = nodes[:rows]
    words = -(-rows // 32)
    batch = TargetBatch.causal(1, len(nodes), 0, words)
    batch.input_ids = np.array([token for token, _, _ in nodes], np.int32)
    paths = mask_words(TokenTree.from_nodes([nodes]).ancestors[0], words)
    batch.tree_mask = np.array(paths, np.uint32).view(np.int32).reshape(-1, words)
    return batch


def measure_rows(grammar: Grammar, text: list[int], rows: int) -> list[tuple[float, float]]:
    """Microseconds a row of the bits of trees' rows along a text, when their masks are made and when they are there."""
    state, draft, times = grammar.start(), grammar.start(), list[tuple[float, float]]()
    for place in range(0, len(text), rows):
        batch = tree_at(draft, text[place : place + rows], rows)
        started = time.perf_counter()
        row_masks(batch, 0, state)
        made = time.perf_counter()
        row_masks(batch, 0, state)
        spent = np.array([made - started, time.perf_counter() - made]) / len(batch.input_ids)
        times.append((1e6 * spent[0], 1e6 * spent[1]))
        for token in text[place : place + rows]:
            state.advance(token)
            draft.advance(token)
    return times


def percentiles(times: Times) -> dict[str, list[float]]:
    """Median and 99th percentile in milliseconds of each kind that was timed."""
    return {kind: (1e3 * np.percentile(seconds, (50, 99))).tolist() for kind, seconds in vars(times).items() if seconds}


def table(report: dict[str, Any]) -> Table:
    """A report's times."""
    kinds = list(vars(Times()))
    shown = Table("Milliseconds, median and 99th percentile", ["library", "schemas", *kinds])
    for name, found in report["libraries"].items():
        cells = [" ".join(f"{value:.3f}" for value in found["ms"][kind]) for kind in kinds]
        shown.rows.append([name, str(found["schemas"]), *cells])
    return shown


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--schemas", type=Path, default=HERE / "schemas.jsonl")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("artifacts/reports/grammar_libraries.json"))
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    codec, vocab_size = TextCodec(tokenizer), tokenizer.get_vocab_size()
    libraries: dict[str, LLGuidance | XGrammar] = {"llguidance": LLGuidance(codec, vocab_size)}
    if importlib.util.find_spec("xgrammar"):
        libraries["xgrammar"] = XGrammar(codec, vocab_size)
    found = {name: Times() for name in libraries}
    refused: list[str] = []
    grammars, rows = Grammars(codec, vocab_size), list[tuple[float, float]]()
    for case in load_schemas(args.schemas):
        schema = json.dumps(case.schema, ensure_ascii=False)
        try:
            text = text_of(codec, vocab_size, schema, np.random.default_rng(0))
        except ValueError as error:
            refused.append(f"llguidance, {case.name}: {str(error)[:200]}")
            continue
        rows += measure_rows(grammars.compile(Guide(kind="json_schema", text=schema)), text, args.rows)
        for name, library in libraries.items():
            try:
                measure(library, schema, text, found[name])
            except (RuntimeError, ValueError) as error:
                refused.append(f"{name}, {case.name}: {str(error)[:200]}")
    measured = {name: {"schemas": len(times.compile), "ms": percentiles(times)} for name, times in found.items()}
    per_row = dict(zip(("made", "packed"), np.percentile(rows, (50, 99), axis=0).T.tolist(), strict=True))
    report = {"schemas": args.schemas.name, "libraries": measured, "refused": refused}
    report |= {"rows": args.rows, "us_per_row": per_row}
    write_json(args.output, report)
    table(report).show(console)
    for kind, (median, high) in per_row.items():
        console.print(f"bits of trees of {args.rows} rows, masks {kind}: {median:.1f} {high:.1f} microseconds a row")
    console.print("\n".join(refused), markup=False)


if __name__ == "__main__":
    main()
