"""Print what an engine bundle is: its model, limits, drafting plan, networks, and whether it can be loaded here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

from redraft.budget import FILE_NAME
from redraft.bundle import Bundle, BundleError

out = Console(highlight=False, soft_wrap=True)


def main(bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")]) -> None:
    """Verify a bundle and print what it is."""
    try:
        loaded = Bundle.load(bundle)
    except BundleError as error:
        out.print(f"[red]inspect_bundle:[/red] {error}")
        raise typer.Exit(1) from None
    table = Table(title=str(bundle), show_header=False, title_justify="left")
    for name, value in rows(loaded):
        table.add_row(name, value)
    out.print(table)


def rows(bundle: Bundle) -> list[tuple[str, str]]:
    """Names and values, in the order to print them in."""
    config, manifest = bundle.config, bundle.manifest
    target, limits, drafting = config.target, config.limits, config.drafting
    cache = 2 * target.num_layers * target.num_kv_heads * target.head_size * (4 if config.precision == "fp32" else 2)
    tokens = limits.slots * (limits.max_len + limits.max_tree)
    plan = "none: auto-regressive"
    if drafting:
        network = "no drafter"
        if drafting.drafter:
            network = f"{drafting.drafter}, {drafting.construction}, " + (
                f"{', '.join(map(str, drafting.levels))} draws per level from {drafting.support} tokens"
                if drafting.levels
                else f"beam width {drafting.beam_width}, "
                f"beam length {drafting.beam_length}, {drafting.candidates} candidates"
            )
            if context := drafting.context:
                rows = limits.slots * (limits.max_len + context.draft_rows)
                network += f", context cache {rows * context.layers * cache / target.num_layers / 1e6:.0f} MB"
            if drafting.resample_above is not None:
                network += f", drafted again where more than {drafting.resample_above} steps are left"
            if drafting.skip_above is not None:
                network += f" (alone where more than {drafting.skip_above} are)"
        plan = f"{network}; tree budget {drafting.tree_budget}, n-gram branch {'on' if drafting.ngram else 'off'}, "
        plan += f"verification {drafting.verification}; {'' if (bundle.path / FILE_NAME).exists() else 'not '}tuned"
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
            f"prefill chunks of {limits.prefill_chunk}; KV cache {tokens * cache / 1e6:.0f} MB",
        ),
        ("drafting", plan),
        *[(file.name, network_summary(file)) for file in sorted(bundle.path.glob("*.onnx"))],
        ("files", ", ".join(f"{name} ({entry.size / 1e6:.1f} MB)" for name, entry in manifest.files.items())),
        ("CPU needs", ", ".join(manifest.cpu_features) or "nothing particular"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("command", manifest.command),
    ]


def network_summary(file: Path) -> str:
    """How many nodes of which operators a network has; a `Program` counts as its steps."""
    counts: Counter[str] = Counter()
    for node in ir.load(file).graph:
        steps = node.attributes.get_string("steps") if node.op_type == "Program" else None
        names = [line.split("\t", 1)[0] for line in steps.splitlines()] if steps else [node.op_type]
        counts.update(name for name in names if name != "constant")
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


if __name__ == "__main__":
    typer.run(main)
