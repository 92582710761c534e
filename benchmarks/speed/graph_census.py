"""The CUDA graphs that the torch backend captures for given limits, and the memory that they keep. No GPU is needed.

    python -m benchmarks.speed.graph_census --slots 32 --max-tree 16

The default shape is Llama-3.1-8B's. Results are a step's logits and hidden states. Not counted is what CUDA keeps of a
graph itself.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.figures.tables import Table
from redraft.bundle.backends import TORCH, Precision
from redraft.bundle.config import BundleConfig, LimitsInfo, MethodConfig, TargetInfo
from redraft.engines.cuda.buckets import draft_buckets, step_buckets
from redraft.engines.memory import WIDTH, output_bytes, working_bytes

METHOD = MethodConfig(
    drafter="recurrent",
    construction="best_first",
    beam_width=1,
    beam_length=1,
    candidates=1,
    tree_budget=1,
    ngram=False,
    verification="sampled_walk",
)
console = Console()


def config_of(args: argparse.Namespace) -> BundleConfig:
    """A torch bundle with a drafter, and Llama-3.1-8B's heads. Layers do not matter here."""
    target = TargetInfo(
        num_layers=1,
        hidden_size=args.hidden_size,
        feature_size=args.hidden_size,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        vocab_size=args.vocabulary,
        eos_token_ids=(0,),
        max_position=args.max_len,
    )
    limits = LimitsInfo(
        slots=args.slots, max_len=args.max_len, max_tree=args.max_tree, prefill_chunk=args.prefill_chunk
    )
    return BundleConfig(
        name="census",
        backend=TORCH,
        precision=Precision(args.precision),
        target=target,
        limits=limits,
        methods={"drafter": METHOD},
        tensor_parallel=1,
    )


def tables(config: BundleConfig) -> list[Table]:
    """The target's buckets, then what is kept."""
    limits, target = config.limits, config.target
    steps, title = step_buckets(limits), "The target's graphs, in the order of their capture"
    numbers = [bucket.logits * target.vocab_size + bucket.rows * target.feature_size for bucket in steps]
    first = Table(title, ["sequences", "rows", "logit rows", "MB of results"])
    for bucket, count in zip(steps, numbers, strict=True):
        sizes = (bucket.sequences, bucket.rows, bucket.logits)
        first.rows.append([*map(str, sizes), _mb(count * WIDTH[config.precision])])
    second = Table("Kept", ["", "graphs", "MB"])
    second.rows += [
        ["results of the target's graphs, shared", str(len(steps)), _mb(output_bytes(config))],
        ["a drafter's graphs", str(len(draft_buckets(limits, False))), ""],
        ["those of a drafter with a context", str(len(draft_buckets(limits, True))), ""],
        ["working memory: the graphs' pool, and a step without a graph", "", _mb(working_bytes(config))],
        ["results, if each graph kept its own in float32", str(len(steps)), _mb(4 * sum(numbers))],
    ]
    return [first, second]


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-tree", type=int, default=16, help="rows of a tree")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    for table in tables(config_of(parser.parse_args(argv))):
        table.show(console)


if __name__ == "__main__":
    main()
