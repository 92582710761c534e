"""Extents of the networks' inputs: the few that steps are padded to, for which engines are built and CUDA graphs
captured, and those of prefill, which vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redraft.bundle.config import LimitsInfo

Leading = tuple[int, ...]
"""The first sizes of an input's shape; the others are the network's own."""
USUAL_ROWS = 8
"""Rows of a sequence, where one profile is for all steps."""
RANGES, RATIO = 4, 4
"""Profiles that share out the steps by their rows, and how far apart their largest are: kernels are chosen at 1/64,
1/16, 1/4 and all of the most rows."""


@dataclass(frozen=True)
class Extent:
    """So many sequences and rows: in plugin form of all sequences together, in native form of each."""

    sequences: int
    rows: int
    logits: int = 0
    """Rows of logits, of a target. In steps all rows have them."""

    @property
    def all_rows(self) -> int:
        """Rows of all sequences of a step."""
        return self.logits or self.sequences * self.rows


@dataclass(frozen=True)
class Extents:
    """A network's step shapes, and the optimization profiles of its engine, in this order: up to RANGES for steps of
    few to many rows or, where they are not `by_rows`, one for all steps; then one for prefill, if there is any, from
    the smallest over the usual to the largest extent."""

    steps: Sequence[Extent]
    prefill: tuple[Extent, Extent, Extent] | None
    by_rows: bool = True

    @property
    def profiles(self) -> list[tuple[Extent, Extent, Extent]]:
        """Smallest, usual and largest extent of every profile. Kernels are chosen for the usual one."""
        found = [self._profile(group) for group in self._groups]
        return [*found, *([self.prefill] if self.prefill else [])]

    def profile_of(self, step: int) -> int:
        """Which profile a step has."""
        return next(number for number, group in enumerate(self._groups) if self.steps[step] in group)

    @property
    def _groups(self) -> list[list[Extent]]:
        """The steps of each profile."""
        if not self.by_rows:
            return [list(self.steps)]
        most, groups = max(step.all_rows for step in self.steps), dict[int, list[Extent]]()
        for step in sorted(self.steps, key=lambda step: step.all_rows):
            larger = next(n for n in range(RANGES - 1, -1, -1) if n == 0 or step.all_rows * RATIO**n <= most)
            groups.setdefault(larger, []).append(step)
        return list(groups.values())

    def _profile(self, steps: Sequence[Extent]) -> tuple[Extent, Extent, Extent]:
        low, high = (
            Extent(*(bound(getattr(step, name) for step in steps) for name in ("sequences", "rows", "logits")))
            for bound in (min, max)
        )
        if self.by_rows:
            return low, max(steps, key=lambda step: step.all_rows), high
        usual = self.fitting(high.sequences, min(USUAL_ROWS, high.rows)) or 0
        return low, self.steps[usual], high

    def fitting(self, sequences: int, rows: int) -> int | None:
        """Which of `steps` holds so many with the fewest rows in all; None where they are too many."""
        fit = [i for i, step in enumerate(self.steps) if step.sequences >= sequences and step.rows >= rows]
        return min(fit, key=lambda i: (self.steps[i].rows, self.steps[i].sequences), default=None)


def plugin_target(limits: LimitsInfo) -> Extents:
    """Ragged rows: batches of 1, 2, 4, ... sequences by trees of up to a quarter, half and all of `max_tree`."""
    steps = [Extent(b, b * n, b * n) for b in _doubling(limits.slots) for n in _budgets(limits.max_tree)]
    most, trees = limits.slots * limits.max_tree + limits.prefill_chunk, limits.slots * limits.max_tree + limits.slots
    usual = min(most, limits.prefill_chunk)
    return Extents(steps, (Extent(1, 1, 1), Extent(limits.slots, usual, 1), Extent(limits.slots, most, trees)))


def native_target(limits: LimitsInfo, by_rows: bool) -> Extents:
    """Padded rows of the first so many slots; prefill is of one sequence."""
    steps = [Extent(b, n, b * n) for b in _doubling(limits.slots) for n in _budgets(limits.max_tree)]
    chunk = _longest_chunk(limits)
    return Extents(steps, (Extent(1, 1, 1), Extent(1, chunk, 1), Extent(1, chunk, chunk)), by_rows)


def drafter(limits: LimitsInfo, reads_context: bool, by_rows: bool) -> Extents:
    """One row per sequence; of a drafter with a context, padded pairs of the first so many slots."""
    if not reads_context:
        return Extents([Extent(b, 1) for b in _doubling(limits.slots)], None, by_rows)
    steps = [Extent(b, n) for b in _doubling(limits.slots) for n in sorted({min(8, limits.max_tree), limits.max_tree})]
    chunk = _longest_chunk(limits)
    return Extents(steps, (Extent(1, 1), Extent(1, chunk), Extent(1, chunk)), by_rows)


Shapes = Callable[[Extent], dict[str, Leading]]
"""The leading sizes of a network's inputs by name; of those that are not named, the number of sequences."""


def plugin_target_shapes(limits: LimitsInfo) -> Shapes:
    """See `export_target_plugin`."""

    def shapes(extent: Extent) -> dict[str, Leading]:
        rows, bounds = (extent.rows,), (extent.sequences + 1,)
        return {
            **dict.fromkeys(("input_ids", "positions", "tree_mask"), rows),
            **dict.fromkeys(("row_offsets", "commit_offsets"), bounds),
            "commit_src": (extent.sequences * limits.max_tree,),
            "logit_rows": (extent.logits,),
            "caches": (limits.slots,),
        }

    return shapes


def native_target_shapes(extent: Extent) -> dict[str, Leading]:
    """See `export_target_native`."""
    rows = (extent.sequences, extent.rows)
    return {"input_ids": rows, "positions": rows, "mask": (rows[0], 1, rows[1]), "logit_rows": (extent.logits,)}


def drafter_shapes(reads_context: bool) -> Shapes:
    """See `export_drafter_native`."""

    def shapes(extent: Extent) -> dict[str, Leading]:
        rows = (extent.sequences, extent.rows) if reads_context else (extent.sequences,)
        return {"hidden": rows, "tokens": rows}

    return shapes


def shape_of(name: str, own: Sequence[int], leading: dict[str, Leading], extent: Extent) -> tuple[int, ...]:
    """An input's whole shape, from the network's own, in which variable sizes are negative."""
    cache = name.startswith(("k_cache.", "v_cache."))
    first = leading.get("caches" if cache else name, (extent.sequences,))
    return *first, *own[len(first) :]


Range = tuple[tuple[int, ...], ...]
"""Smallest, usual and largest shape of an input."""


def profile_ranges(
    inputs: Mapping[str, Sequence[int]], made_for: Extents, shapes: Shapes
) -> Iterator[dict[str, Range]]:
    """Each profile's shapes of all inputs, from the network's own."""
    for profile in made_for.profiles:
        leading = [shapes(extent) for extent in profile]
        yield {
            name: tuple(shape_of(name, own, sizes, extent) for sizes, extent in zip(leading, profile, strict=True))
            for name, own in inputs.items()
        }


def _longest_chunk(limits: LimitsInfo) -> int:
    """Prompt rows of a sequence in one step."""
    return min(limits.prefill_chunk, limits.max_len)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({1 << power for power in range(most.bit_length()) if 1 << power < most} | {most})


def _budgets(max_tree: int) -> list[int]:
    return sorted({1, *(-(-max_tree // part) for part in (4, 2, 1))})
