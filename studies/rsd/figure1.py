"""RSD's figure 1: how often one of two draft tokens is accepted, Ber(p) drafting for Ber(q).

Computed by enumerating all draws under the shipped verification rules, beside the optimum for independent draws.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.command import console, run
from benchmarks.plots import save
from redraft.decoding.rejection import Rule, k_seq, multi_round, recursive_rejection
from redraft.decoding.token_tree import NodeDraws
from redraft.loadtest.plots import COLORS, new_figure
from redraft.loadtest.tables import Table

TARGETS = (0.5, 0.7, 0.9)
DRAFTS = np.linspace(0.01, 0.99, 99)


def acceptance(rule: Rule, p: float, q: float, replacement: bool) -> float:
    """Chance that one of two draws from Ber(p), 0 < p < 1, is accepted for the target Ber(q) under a rule."""
    draft, target = np.array([1 - p, p]), np.array([1 - q, q])
    total = 0.0
    for first, second in product((0, 1), repeat=2):
        chance = draft[first] * (draft[second] if replacement else float(first != second))
        total += chance * (1 - _all_rejected(rule, target, draft, [first, second]))
    return float(total)


def _all_rejected(rule: Rule, target: np.ndarray, draft: np.ndarray, indices: list[int]) -> float:
    chances: list[float] = []

    def reject(chance: float) -> bool:
        chances.append(chance)
        return False

    rule(target, NodeDraws(indices, indices, np.arange(2, dtype=np.int32), np.log(draft)), reject)
    return float(np.prod(1 - np.array(chances)))


def optimal_transport(p: float, q: float) -> float:
    """The most that any verification of two independent draws can accept (SpecTr, optimal transport with membership
    costs): what falls short is the largest excess, over sets of tokens, of P(both draws in it) over the target's."""
    return 1 - max(0.0, p**2 - q, (1 - p) ** 2 - (1 - q))


METHODS = {
    "Multi-round": lambda p, q: acceptance(multi_round, p, q, replacement=True),
    "K-SEQ": lambda p, q: acceptance(k_seq, p, q, replacement=True),
    "Optimal transport": optimal_transport,
    "Recursive rejection": lambda p, q: acceptance(recursive_rejection, p, q, replacement=False),
}


def main(
    output: Annotated[Path, typer.Option(help="Where to write the plot.")] = Path("artifacts/reports/rsd_figure1.png"),
) -> None:
    """Draw RSD's figure 1 and print some of its values."""
    table().show(console)
    console.print(f"plot: {plot(output)}")


def table() -> Table:
    """Acceptance rates at a few drafts for every target."""
    result = Table("Acceptance rate of two draft tokens, Bernoulli distributions", ["target q", "draft p", *METHODS])
    for q, p in product(TARGETS, (0.1, 0.3, 0.5, 0.7, 0.9)):
        result.rows.append([f"{q}", f"{p}", *(f"{rate(p, q):.3f}" for rate in METHODS.values())])
    return result


def plot(path: Path) -> Path:
    """One panel per target, acceptance rate over the draft's p."""
    figure, axes = new_figure(len(TARGETS), width=3.4, height=3.4)
    for axis, q in zip(axes, TARGETS, strict=True):
        for (name, rate), color, style in zip(METHODS.items(), COLORS, ("-", "--", "-.", "-"), strict=False):
            axis.plot(DRAFTS, [rate(p, q) for p in DRAFTS], style, color=color, label=name)
        axis.axvline(q, color="#9ca3af", linewidth=0.8, linestyle=":")
        axis.set_title(f"target Ber({q})", loc="left")
        axis.set_xlabel("draft Ber(p): p")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1.04)
    axes[0].set_ylabel("acceptance rate, K = 2")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(handles), frameon=False)
    return save(figure, path)


if __name__ == "__main__":
    run(main)
