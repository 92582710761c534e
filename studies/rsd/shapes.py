"""The methods of RSD's experiments: which trees each algorithm tries in each cell (RSD, appendix D.3), as a bundle's
methods."""

from __future__ import annotations

from dataclasses import dataclass

SD, SPECTR, RSD_C, RSD_S, BEST_FIRST = "SD", "SpecTr", "RSD-C", "RSD-S", "best-first"
ALGORITHMS = (SD, SPECTR, RSD_C, RSD_S, BEST_FIRST)
PUBLISHED = (SD, SPECTR, RSD_C, RSD_S)
"""What the paper compares; the other is this product's default: the most likely tokens and a sampled walk."""

_PLANS = {
    SD: ("random_chain", "rejection"),
    SPECTR: ("independent", "k_seq"),
    RSD_C: ("gumbel_top_k", "recursive_rejection"),
    RSD_S: ("stochastic_beam", "recursive_rejection"),
}
_LEAST_CANDIDATES = 8


@dataclass(frozen=True)
class Shape:
    """An algorithm with its tree. `levels` are the draws of each level: of every node for RSD-C, in all for the others.

    The best-first tree of K x L has the K L most likely nodes of beams of width K and length L.
    """

    algorithm: str
    levels: tuple[int, ...]

    @property
    def length(self) -> int:
        """L, the longest draft."""
        return len(self.levels)

    @property
    def nodes(self) -> int:
        """Draft tokens that the target processes in a step, at most."""
        if self.algorithm != RSD_C:
            return sum(self.levels)
        total, width = 0, 1
        for count in self.levels:
            width *= count
            total += width
        return total

    @property
    def spec(self) -> str:
        """The shape as the paper's tables write it: "4", "3x2", "2-2-1"."""
        if self.algorithm == SD:
            return str(self.length)
        return "-".join(map(str, self.levels)) if self.algorithm == RSD_C else f"{self.levels[0]}x{self.length}"

    @property
    def method(self) -> str:
        """Its name in a bundle."""
        return f"{self.algorithm}_{self.spec}".lower().replace("-", "_")

    def settings(self, support: int) -> dict[str, str | int]:
        """What redraft build needs to know of it."""
        if self.algorithm == BEST_FIRST:
            width = self.levels[0]
            return {
                "construction": "best_first",
                "verification": "sampled_walk",
                "beam_width": width,
                "beam_length": self.length,
                "candidates": max(width, _LEAST_CANDIDATES),
                "tree_budget": self.nodes,
            }
        construction, verification = _PLANS[self.algorithm]
        levels = ",".join(map(str, self.levels))
        return {"construction": construction, "verification": verification, "levels": levels, "support": support}


@dataclass(frozen=True)
class Experiment:
    """One of the two experiments: the shapes of each of its cells, by draft length or by budget."""

    name: str
    title: str
    axis: str
    cells: dict[int, tuple[Shape, ...]]


def _cell(draft: int, beams: list[tuple[int, int]], branching: list[tuple[int, ...]]) -> tuple[Shape, ...]:
    """The shapes of a cell from SD's draft length, the (K, L) of SpecTr and RSD-S, and RSD-C's branching factors."""
    paths = [(width,) * length for width, length in beams]
    return (
        Shape(SD, (1,) * draft),
        *(Shape(SPECTR, levels) for levels in paths),
        *(Shape(RSD_C, levels) for levels in branching),
        *(Shape(RSD_S, levels) for levels in paths),
        *(Shape(BEST_FIRST, levels) for levels in paths),
    )


def _wide(first: int, length: int) -> tuple[int, ...]:
    return (first, *[1] * (length - 1))


LENGTHS = Experiment(
    "exp1",
    "Exp. 1: fixed draft length",
    "draft length",
    {
        2: _cell(2, [(2, 2), (3, 2)], [(2, 2), _wide(2, 2), _wide(3, 2)]),
        3: _cell(3, [(3, 3), (4, 3)], [(2, 2, 2), _wide(3, 3), _wide(4, 3)]),
        4: _cell(4, [(5, 4), (7, 4)], [(2, 2, 2, 2), _wide(5, 4), _wide(7, 4)]),
        5: _cell(5, [(6, 5), (12, 5)], [(2, 2, 2, 2, 2), _wide(6, 5), _wide(12, 5)]),
    },
)
BUDGETS = Experiment(
    "exp2",
    "Exp. 2: fixed target budget",
    "target budget",
    {
        6: _cell(6, [(2, 3), (3, 2)], [_wide(2, 3), (2, 2), _wide(3, 2)]),
        10: _cell(10, [(2, 5), (5, 2)], [_wide(2, 5), (2, 2, 1), _wide(5, 2)]),
        14: _cell(14, [(2, 7), (7, 2)], [_wide(2, 7), (2, 2, 2), _wide(7, 2)]),
        21: _cell(21, [(3, 7), (7, 3)], [_wide(3, 7), (3, 2, 2), _wide(7, 3)]),
        30: _cell(30, [(5, 6), (6, 5)], [(2, 2, 2, 2), _wide(5, 6), _wide(6, 5)]),
    },
)
"""Each of its trees but SD's has the budget's number of nodes; so the long branches of RSD-C are one level longer than
the appendix prints them in three cells."""
EXPERIMENTS = {experiment.name: experiment for experiment in (LENGTHS, BUDGETS)}


def shapes_of(experiments: list[Experiment], cells: list[int] | None = None) -> list[Shape]:
    """The shapes of some experiments' cells (None: all), each once, in their order."""
    chosen = (
        shape
        for experiment in experiments
        for cell, shapes in experiment.cells.items()
        if cells is None or cell in cells
        for shape in shapes
    )
    return list(dict.fromkeys(chosen))


def methods_toml(shapes: list[Shape], drafter: str, support: int) -> str:
    """The methods file of redraft build with the shapes over one drafter's folder."""
    tables = []
    for shape in shapes:
        settings = {"drafter": drafter, **shape.settings(support), "ngram": False}
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        tables.append("\n".join([f'["{shape.method}"]', *lines]))
    return "\n\n".join(tables) + "\n"


def _toml(value: str | int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
