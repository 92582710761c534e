"""Print what an engine bundle is: its model, limits, methods, networks. One that is damaged, or for another
CPU, is refused; whether its GPU and library are here, only loading tells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.bundle.scores import ScoresFile
from redraft.engines.memory import target_cache_bytes
from redraft.errors import BundleError

out = Console(highlight=False, soft_wrap=True)


def main(bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")]) -> None:
    """Verify a bundle and print what it is."""
    table = Table(title=str(bundle), show_header=False, title_justify="left")
    try:
        for name, value in rows(Bundle.load(bundle)):
            table.add_row(name, value)
    except (BundleError, ValueError) as error:
        out.print(f"[red]redraft inspect:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    out.print(table)


def rows(bundle: Bundle) -> list[tuple[str, str]]:
    """Names and values, in the order to print them in."""
    config, manifest = bundle.config, bundle.manifest
    target, limits = config.target, config.limits
    width = 4 if config.precision == "fp32" else 2
    fitted, layers = ScoresFile.load(bundle.path).methods, len(target.windowed_layers)
    rings = f", {limits.window_rows} rows in each of {layers} layers with a window" if limits.window_rows else ""
    methods = [
        (f"method {name}", describe_method(method, limits, width, name in fitted))
        for name, method in config.methods.items()
    ]
    return [
        ("engine", f"{config.backend}, {config.precision} weights"),
        (
            "target",
            f"{target.num_layers} layers, hidden size {target.hidden_size}, {target.num_heads} heads "
            f"({target.num_kv_heads} KV) of {target.head_size}, vocabulary {target.vocab_size}",
        ),
        ("fingerprint", manifest.target_fingerprint),
        (
            "limits",
            f"{limits.slots} slots of {limits.max_len} tokens, trees of {limits.max_tree} rows, "
            f"prefill chunks of {limits.prefill_chunk}; KV cache {target_cache_bytes(config) / 1e6:.0f} MB{rings}",
        ),
        *[
            (f"rank {rank}", f"{shard.num_kv_heads} KV heads, {shard.vocab_size} of the vocabulary's logits")
            for rank, shard in enumerate(config.shards)
        ],
        *(methods or [("methods", "none: auto-regressive")]),
        *[(str(file.relative_to(bundle.path)), network_summary(file)) for file in sorted(bundle.path.rglob("*.onnx"))],
        ("files", ", ".join(f"{name} ({entry.size / 1e6:.1f} MB)" for name, entry in manifest.files.items())),
        ("CPU needs", ", ".join(manifest.cpu_features) or "nothing particular"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("command", manifest.command),
    ]


def describe_method(method: MethodConfig, limits: LimitsInfo, width: int, fitted: bool) -> str:
    """A method in words; `width` bytes of a number in a cache."""
    network = "no drafter"
    if method.drafter:
        drafter = f"{method.drafter} (read from {method.form})" if method.form else method.drafter
        network = f"{drafter}, {method.construction}, " + (
            f"{', '.join(map(str, method.levels))} draws per level from {method.support} tokens"
            if method.levels
            else f"beam width {method.beam_width}, beam length {method.beam_length}, {method.candidates} candidates"
            + (f" of {method.support} by the target's noise" if method.shares_noise else "")
        )
    if context := method.context:
        rows = limits.slots * (limits.max_len + context.draft_rows) * context.layers
        network += f", context cache {rows * 2 * context.num_kv_heads * context.head_size * width / 1e6:.0f} MB"
    if method.resample_above is not None:
        network += f", drafted again where more than {method.resample_above} steps are left, "
        network += f"{method.resample_budget} nodes beside a new draft"
    if method.skip_above is not None:
        network += f" (instead of it where more than {method.skip_above} are left)"
    return (
        f"{network}; trees of up to {method.tree_budget} nodes, n-gram branch {'on' if method.ngram else 'off'}, "
        f"verification {method.verification}, scores {'fitted' if fitted else 'of the defaults'}"
    )


def network_summary(file: Path) -> str:
    """How many nodes of which operators a network has; a `Program` counts as its steps."""
    counts: Counter[str] = Counter()
    for node in ir.load(file).graph:
        steps = node.attributes.get_string("steps") if node.op_type == "Program" else None
        names = [line.split("\t", 1)[0] for line in steps.splitlines()] if steps else [node.op_type]
        counts.update(name for name in names if name != "constant")
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
