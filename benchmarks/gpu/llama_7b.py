"""What a Llama-shaped target with random weights allows on this GPU.

    python -m benchmarks.gpu.llama_7b

Step time against rows and batch (the greedy choice made on the device), drafting time of a ReDrafter for such a
target (beam width 6, length 5) and of Lyanna's drafter (its paper's 3 steps, 4 wide, trees of 12 drafted nodes, and
the 4 steps and 16 nodes with which ours was measured) and of an EAGLE-3 drafter as the hub's pairs have it (5 levels,
4 wide, trees of 15 nodes, a head of 32,000 tokens), and the time that the host takes to make the target's rows from a
draft: to pack ReDrafter's beams, or to choose the nodes of the others' trees. From these the speed-up that an
acceptance length would give, for the acceptance lengths measured with our own drafters (of another target, SmolLM2;
Lyanna's without re-sampling, whose time is not taken here; none for EAGLE-3), and the acceptance length that the
paper's speed-ups would need here. Nothing is generated: these are bounds from step times, not speed-ups.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.figures.tables import Table
from benchmarks.gpu.machine import add_device, describe, device_of, milliseconds, write_report
from redraft.batch import DraftCandidates, TargetBatch
from redraft.decoding.construction import beam, best_first
from redraft.decoding.token_tree import TokenTree, mask_width, mask_words, prune_tree, shared_budgets
from redraft.engines.cuda.graphs import CudaGraphCache, Inputs, available_graphs
from redraft.engines.cuda.transfer import Results
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.eagle3 import Eagle3Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.export.programs import TorchTarget
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig

LLAMA_2_7B = TargetConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_size=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position=4096,
    tie_embeddings=False,
    qkv_bias=False,
    eos_token_ids=(2,),
)
LLAMA_3_1_8B = replace(
    LLAMA_2_7B, vocab_size=128256, intermediate_size=14336, num_kv_heads=8, max_position=131072,
    rope=RopeConfig(theta=500000.0, type="llama3", factor=8.0),
)  # fmt: skip
TINY = replace(
    LLAMA_2_7B, vocab_size=111, hidden_size=128, intermediate_size=160, num_layers=6, num_heads=2, num_kv_heads=2,
    head_size=64,
)  # fmt: skip
SMOLLM2_135M = replace(
    LLAMA_2_7B, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_size=64, max_position=8192, rope=RopeConfig(theta=100000.0), tie_embeddings=True,
)  # fmt: skip
SHAPES = {
    "llama-2-7b": LLAMA_2_7B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "smollm2-135m": SMOLLM2_135M,
    "tiny": TINY,
}
REDRAFTER = (6, 5, 6)
"""Beam width and length, and children of an expanded node."""
LYANNA = {"lyanna, 3 x 4": ((4, 3, 8), 12), "lyanna": ((4, 4, 8), 16)}
"""The same, and the drafted nodes of a tree, on average over a batch: the paper's (its experiments' setting), and those
of an untuned bundle of the usual limits, of which the acceptance length was measured."""
EAGLE3 = {"eagle3": ((4, 5, 8), 15)}
"""The same of an EAGLE-3 drafter, whose levels are five, and a tree that makes 16 rows with its root."""
EAGLE3_HEAD = 32000
"""Tokens that the head of a published EAGLE-3 drafter can draft."""
MAX_TREE = 32
"""Rows of a tree at most."""
CONTENDERS = {"redrafter": "redrafter", "lyanna": "lyanna_no_resampling"}
"""Whose measured acceptance lengths a system has."""
PAIRS = 3
"""What a drafter with a context ingests before a draft: the tokens of a step."""
PAPER = {"TensorRT-LLM, low load": (2.09, 2.56), "TensorRT-LLM, TP 1": (2.19, 2.51)}
"""ReDrafter, tables 2 and 3: Vicuna 7B to 33B, on H100."""
MEASURED = Path(__file__).parents[2] / "docs/results/methods.json"
console = Console()


def random_target(config: TargetConfig, device: torch.device) -> Target:
    """bf16, on the device from the start."""
    with torch.device("meta"):
        target = Target(config).to(torch.bfloat16)
    target = target.to_empty(device=device).eval().requires_grad_(False)
    for weight in target.parameters():
        weight.normal_(0, 0.02) if weight.ndim == 2 else weight.fill_(1)
    return target


def random_drafter(drafter: Drafter, device: torch.device, cache_rows: int, levels: int) -> Drafter:
    """The same in bf16 on the device, ready to draft; the rope table stays float32, as the kernels take it."""
    drafter = drafter.to(device, torch.float32).eval().requires_grad_(False)
    drafter.prepare(cache_rows, levels)
    ropes = copy.deepcopy(cast(CacheTables, drafter.tables).ropes) if drafter.reads_context else None
    drafter = drafter.to(torch.bfloat16)
    if ropes is not None:
        cast(CacheTables, drafter.tables).ropes = ropes
    return drafter


def graphs(
    function: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    device: torch.device,
    captured: bool = True,
    **options: Any,
) -> Callable[[Inputs], list[np.ndarray]]:
    """Calls of a function, each of which waits for its results: by CUDA graphs, or not `captured`."""
    calls, results = CudaGraphCache(function, device, available_graphs(device), **options), Results(device)
    return lambda inputs: results.fetch(calls(inputs, {}) if captured else calls.eager(inputs))


class TargetSteps:
    """Steps of a target over `context` cached tokens a sequence, each with the greedy choice made on the device."""

    def __init__(self, target: Target, context: int, slots: int, most_rows: int):
        """`slots` sequences with `most_rows` rows each at most."""
        config, self.device = target.config, target.embedding.weight.device
        self._vocab_size, self._context, self._shape = config.vocab_size, context, CacheShape(slots, context, most_rows)
        self._module = TorchTarget(target, self._shape, features_output=True).to(self.device)
        size = (slots, config.num_kv_heads, self._shape.rows, config.head_size)
        self._caches = [
            [torch.zeros(size, dtype=torch.bfloat16, device=self.device) for _ in range(config.num_layers)]
            for _ in "kv"
        ]

    def _step(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        input_ids, *others, logit_rows = inputs.values()
        logits, _ = self._module(input_ids, others, logit_rows, *self._caches)
        return [logits.argmax(-1).int()]

    def call(self, batch: int, rows: int, captured: bool = True) -> Callable[[], list[np.ndarray]]:
        """A step of `batch` sequences with `rows` rows each, which waits for its choices; on a GPU a CUDA graph, unless
        not `captured`."""
        inputs = vars(TargetBatch.causal(batch, rows, self._context, self._shape.mask_words))
        inputs["input_ids"] = inputs["input_ids"] % self._vocab_size
        return partial(graphs(self._step, self.device, captured), inputs)


def time_target(
    target: Target, context: int, batches: list[int], rows: list[int], repeats: int, eager: bool = False
) -> list[dict[str, Any]]:
    """Milliseconds of a step of every batch and number of rows, over `context` cached tokens; `eager`: also without a
    CUDA graph."""
    steps = TargetSteps(target, context, max(batches), max(rows))
    ways = {"milliseconds": True} | ({"eager_milliseconds": False} if eager else {})
    return [
        {"batch": batch, "rows": count}
        | {name: milliseconds(steps.call(batch, count, captured), repeats) for name, captured in ways.items()}
        for batch in batches
        for count in rows
    ]


def time_drafting(
    drafter: Drafter, shape: tuple[int, int, int], context: int, batches: list[int], repeats: int
) -> tuple[list[dict[str, Any]], list[DraftCandidates]]:
    """Milliseconds of a draft of every batch, and what was drafted."""
    loop, device = BeamSearch(drafter, *shape), drafter.embedding.device
    caches: list[Tensor] = []
    if drafter.reads_context:
        tables = cast(CacheTables, drafter.tables)
        size = (max(batches) + 1, tables.config.num_kv_heads, tables.rows, tables.config.head_size)
        caches = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2 * drafter.context_layers)]

    def draft(inputs: dict[str, Tensor]) -> list[Tensor]:
        features, *others = inputs.values()
        candidates, log_probs, parents = loop([features.to(torch.bfloat16), *others, *caches])[:3]
        return [candidates, log_probs.float(), parents]

    found, drafts = [], []
    for batch in batches:
        pairs = batch * (PAIRS if drafter.reads_context else 1)
        inputs: dict[str, np.ndarray | Tensor] = {
            "features": torch.randn(pairs, drafter.feature_size, device=device),
            "tokens": np.arange(pairs, dtype=np.int32) % drafter.config.vocab_size,
        }
        if drafter.reads_context:
            inputs |= {
                "row_offsets": np.arange(0, pairs + 1, PAIRS, dtype=np.int32),
                "slots": np.arange(batch, dtype=np.int32),
                "cache_lengths": np.full(batch, context, np.int32),
            }
        calls = graphs(draft, device, padding={"slots": max(batches)}, idle={"row_offsets": np.array([0, 1], np.int32)})
        taken = milliseconds(partial(calls, inputs), repeats)
        found.append({"batch": batch, "milliseconds": taken})
        drafts.append(DraftCandidates(*(array[:batch].copy() for array in calls(inputs))))
    return found, drafts


def best_first_tree(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """The most likely nodes of each draft, `budget` nodes a sequence shared out between the trees, by the scheduler's
    functions."""
    batch, length, *_ = drafts.candidates.shape
    most, deepest = MAX_TREE - 1, [length] * batch
    tree, budgets = best_first(drafts, roots, min(batch * budget, most)), [budget] * batch
    if batch > 1:
        tree = prune_tree(tree, [most] * batch, deepest)
        budgets = shared_budgets(tree, batch * budget)
    return prune_tree(tree, budgets, deepest)


def target_rows(tree: TokenTree) -> tuple[list[int], list[int], list[int]]:
    """Tokens, depths and mask words of all rows, as the scheduler makes them."""
    paths = [path for paths in tree.ancestors for path in paths]
    tokens = [token for nodes in tree.nodes for token, _, _ in nodes]
    return tokens, [path.bit_count() - 1 for path in paths], mask_words(paths, mask_width(MAX_TREE))


def time_trees(
    drafts: list[DraftCandidates], build: Callable[[DraftCandidates, np.ndarray, int], TokenTree], budget: int,
    repeats: int,
) -> dict[int, float]:  # fmt: skip
    """Milliseconds that the host takes from each batch of drafts to the target's rows, by batch."""

    def make(drafted: DraftCandidates) -> None:
        target_rows(build(drafted, np.zeros(len(drafted.candidates), np.int32), budget))

    return {len(drafted.candidates): milliseconds(partial(make, drafted), repeats) for drafted in drafts}


def allowed(
    steps: list[dict[str, Any]], drafting: list[dict[str, Any]], trees: dict[int, float], rows: int,
    lengths: dict[str, float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Per batch, what drafting costs in steps of one row, the speed-ups that acceptance lengths would give, and the
    lengths that the paper's speed-ups would need: acceptance length x t(1) / (t(rows) + drafting + trees)."""
    times = {(step["batch"], step["rows"]): step["milliseconds"] for step in steps}
    found = []
    for entry in drafting:
        batch = entry["batch"]
        cost = (times[batch, rows] + entry["milliseconds"] + trees[batch]) / times[batch, 1]
        found.append(
            {
                "batch": batch,
                "rows": rows,
                "cost_in_steps": cost,
                "speedup_allowed": {name: length / cost for name, length in lengths.items()},
                "acceptance_length_needed": {
                    f"{speedup:g}x": cost * speedup for pair in PAPER.values() for speedup in pair
                },
            }
        )
    return found


def measured_lengths(system: str) -> dict[str, float]:
    """Acceptance lengths that our drafters of SmolLM2 reached on MT-bench, by temperature; none where none was
    measured."""
    if system not in CONTENDERS:
        return {}
    report = json.loads(MEASURED.read_bytes())["single"]
    return {
        f"SmolLM2, temperature {temperature}": entry["contenders"][CONTENDERS[system]]["acceptance_length"]
        for temperature, entry in report.items()
    }


def tables(report: dict[str, Any]) -> list[Table]:
    """Step times, then what they allow."""
    batches = list(dict.fromkeys(step["batch"] for step in report["steps"]))
    first = Table(f"{report['shape']}: milliseconds of a step, by rows and batch", ["rows", *map(str, batches)])
    for rows in dict.fromkeys(step["rows"] for step in report["steps"]):
        cells = [step["milliseconds"] for step in report["steps"] if step["rows"] == rows]
        first.rows.append([str(rows), *(f"{cell:.2f}" for cell in cells)])
    second = Table("Projection: speed-up that the step times allow, by batch (not measured)", ["", *map(str, batches)])
    for name, system in report["systems"].items():
        second.rows.append([f"{name}: drafting, ms", *(f"{x['milliseconds']:.2f}" for x in system["drafting"])])
        second.rows.append([f"{name}: trees, ms", *(f"{x['milliseconds']:.2f}" for x in system["trees"])])
        for length in system["acceptance_lengths"]:
            cells = [entry["speedup_allowed"][length] for entry in system["allowed"]]
            second.rows.append([f"{name}, {length}", *(f"{cell:.2f}x" for cell in cells)])
        for paper, pair in PAPER.items():
            needed = [[entry["acceptance_length_needed"][f"{x:g}x"] for x in pair] for entry in system["allowed"]]
            label = f"{name}, accepted tokens for {pair[0]}x to {pair[1]}x (the paper's, {paper})"
            second.rows.append([label, *(f"{low:.2f} to {high:.2f}" for low, high in needed)])
    return [first, second] if report["systems"] else [first]


def drafter_of(system: str, target: Target) -> tuple[Drafter, tuple[int, int, int]]:
    """A system's drafter for a target, and its beam width, length and children of an expanded node."""
    config = target.config
    if system == "redrafter":
        size, vocabulary = config.hidden_size, config.vocab_size
        recurrent = RecurrentConfig(size, vocabulary, exit_dim=2 * size, num_blocks=2, head="own")
        return RecurrentDrafter(recurrent, target), REDRAFTER
    if system in EAGLE3:
        eagle3 = Eagle3Drafter.configure(target, min(EAGLE3_HEAD, config.vocab_size))
        return Eagle3Drafter(eagle3, target), EAGLE3[system][0]
    return HiddenStateDrafter(HiddenStateDrafter.configure(target), target), LYANNA[system][0]


@torch.inference_mode()
def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Everything; best-first trees have all of their nodes, packed ReDrafter beams about `--packed-rows`."""
    torch.manual_seed(0)
    config, context = SHAPES[args.shape], args.context
    target = random_target(config, device)
    nodes = {"redrafter": args.packed_rows} | {name: 1 + budget for name, (_, budget) in (LYANNA | EAGLE3).items()}
    rows = sorted({1, *args.rows, *([] if args.no_drafters else nodes.values())})
    report: dict[str, Any] = {"machine": describe(device), "shape": args.shape, "context": context, "paper": PAPER}
    report["steps"] = time_target(target, context, args.batches, rows, args.repeats, args.eager)
    report["systems"] = {}
    if args.no_drafters:
        return report
    for name, budget_rows in nodes.items():
        drafter, shape = drafter_of(name, target)
        ready = random_drafter(drafter, device, context + PAIRS + shape[0] * shape[1], shape[1])
        drafting, drafts = time_drafting(ready, shape, context, args.batches, args.repeats)
        if name == "redrafter":
            trees = time_trees(drafts, beam, args.packed_rows, args.repeats)
        else:
            trees = time_trees(drafts, best_first_tree, budget_rows - 1, args.repeats)
        lengths = measured_lengths(name)
        report["systems"][name] = {
            "parameters": sum(weight.numel() for weight in drafter.parameters()),
            "drafting": drafting,
            "trees": [{"batch": batch, "milliseconds": taken} for batch, taken in trees.items()],
            "acceptance_lengths": lengths,
            "allowed": allowed(report["steps"], drafting, trees, budget_rows, lengths),
        }
    return report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--context", type=int, default=512, help="cached tokens of each sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of each sequence")
    parser.add_argument("--no-drafters", action="store_true", help="step times of the target only")
    parser.add_argument("--eager", action="store_true", help="time the target's steps without CUDA graphs too")
    parser.add_argument("--packed-rows", type=int, default=19, help="rows of 6 x 5 beams with the root, packed by 40%%")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args(argv)
    report = measure(args, device_of(parser, args, kernels=True))
    for table in tables(report):
        table.show(console)
    console.print(f"written to {write_report(args, report)}")


if __name__ == "__main__":
    main()
