"""Shape buckets that steps are padded to, with a CUDA graph each, and the optimization profiles of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redraft.bundle.config import LimitsInfo

Leading = tuple[int, ...]
"""The leading sizes of an input's shape; the others are fixed in the network."""
USUAL_ROWS = 8
"""Rows of a sequence for which kernels are selected, where one profile spans all steps."""
RANGES, RATIO = 4, 4
"""Number of profiles that divide the steps by rows, and the ratio of their sizes: kernels are selected at 1/64, 1/16,
1/4 and all of the largest step's rows."""


@dataclass(frozen=True)
class Bucket:
    """A number of sequences and rows: in plugin form rows of all sequences together, in native form of each."""

    sequences: int
    rows: int
    logits: int = 0
    """Logit rows of a target. In steps all rows have logits."""

    @property
    def all_rows(self) -> int:
        """Rows of all sequences of a step."""
        return self.logits or self.sequences * self.rows


@dataclass(frozen=True)
class Buckets:
    """A network's shape buckets, and with them its engine's optimization profiles in order. With `by_rows` up to RANGES
    profiles divide the `steps` by their rows, else one spans them all; a last one is for prefill, if there is any, from
    the smallest over the usual to the largest bucket."""

    steps: Sequence[Bucket]
    prefill: tuple[Bucket, Bucket, Bucket] | None
    by_rows: bool = True

    @property
    def profiles(self) -> list[tuple[Bucket, Bucket, Bucket]]:
        """Smallest, usual and largest bucket of every profile. Kernels are selected for the usual one."""
        profiles = [self._profile(group) for group in self._groups]
        return [*profiles, *([self.prefill] if self.prefill else [])]

    def profile_of(self, step: int) -> int:
        """The index of a step's profile."""
        return next(number for number, group in enumerate(self._groups) if self.steps[step] in group)

    @property
    def _groups(self) -> list[list[Bucket]]:
        """The steps of each profile."""
        if not self.by_rows:
            return [list(self.steps)]
        most, groups = max(step.all_rows for step in self.steps), dict[int, list[Bucket]]()
        for step in sorted(self.steps, key=lambda step: step.all_rows):
            larger = next(n for n in range(RANGES - 1, -1, -1) if n == 0 or step.all_rows * RATIO**n <= most)
            groups.setdefault(larger, []).append(step)
        return list(groups.values())

    def _profile(self, steps: Sequence[Bucket]) -> tuple[Bucket, Bucket, Bucket]:
        low, high = (
            Bucket(*(bound(getattr(step, name) for step in steps) for name in ("sequences", "rows", "logits")))
            for bound in (min, max)
        )
        if self.by_rows:
            return low, max(steps, key=lambda step: step.all_rows), high
        usual = self.fitting(high.sequences, min(USUAL_ROWS, high.rows)) or 0
        return low, self.steps[usual], high

    def fitting(self, sequences: int, rows: int) -> int | None:
        """The index of the step that holds so many with the fewest rows in all; None where no step does."""
        fit = [i for i, step in enumerate(self.steps) if step.sequences >= sequences and step.rows >= rows]
        return min(fit, key=lambda i: (self.steps[i].rows, self.steps[i].sequences), default=None)


def plugin_target(limits: LimitsInfo) -> Buckets:
    """Buckets of ragged rows: batches of 1, 2, 4, ... sequences by trees of up to a quarter, half and all of
    `max_tree`."""
    steps = [Bucket(b, b * n, b * n) for b in _doubling(limits.slots) for n in _budgets(limits.max_tree)]
    most = limits.slots * limits.max_tree + limits.prefill_chunk
    usual = min(most, limits.prefill_chunk)
    return Buckets(steps, (Bucket(1, 1, 1), Bucket(limits.slots, usual, 1), Bucket(limits.slots, most, most)))


def native_target(limits: LimitsInfo, by_rows: bool) -> Buckets:
    """Buckets of padded rows of the first slots; prefill is of one sequence."""
    steps = [Bucket(b, n, b * n) for b in _doubling(limits.slots) for n in _budgets(limits.max_tree)]
    chunk = _longest_chunk(limits)
    return Buckets(steps, (Bucket(1, 1, 1), Bucket(1, chunk, 1), Bucket(1, chunk, chunk)), by_rows)


def drafter(limits: LimitsInfo, reads_context: bool, by_rows: bool) -> Buckets:
    """Buckets of one row per sequence; for a drafter with a context, of padded pairs of the first slots."""
    if not reads_context:
        return Buckets([Bucket(b, 1) for b in _doubling(limits.slots)], None, by_rows)
    steps = [Bucket(b, n) for b in _doubling(limits.slots) for n in sorted({min(8, limits.max_tree), limits.max_tree})]
    chunk = _longest_chunk(limits)
    return Buckets(steps, (Bucket(1, 1), Bucket(1, chunk), Bucket(1, chunk)), by_rows)


Shapes = Callable[[Bucket], dict[str, Leading]]
"""The leading sizes of a network's inputs by name; an input that is not named has the number of sequences."""


def plugin_target_shapes(limits: LimitsInfo) -> Shapes:
    """See `export_target_plugin`."""

    def shapes(bucket: Bucket) -> dict[str, Leading]:
        rows, bounds = (bucket.rows,), (bucket.sequences + 1,)
        return {
            **dict.fromkeys(("input_ids", "positions", "tree_mask"), rows),
            **dict.fromkeys(("row_offsets", "commit_offsets"), bounds),
            "commit_src": (bucket.sequences * limits.max_tree,),
            "logit_rows": (bucket.logits,),
            "caches": (limits.slots,),
        }

    return shapes


def native_target_shapes(bucket: Bucket) -> dict[str, Leading]:
    """See `export_target_native`."""
    rows = (bucket.sequences, bucket.rows)
    return {"input_ids": rows, "positions": rows, "mask": (rows[0], 1, rows[1]), "logit_rows": (bucket.logits,)}


def drafter_shapes(reads_context: bool) -> Shapes:
    """See `export_drafter_native`."""

    def shapes(bucket: Bucket) -> dict[str, Leading]:
        rows = (bucket.sequences, bucket.rows) if reads_context else (bucket.sequences,)
        return {"features": rows, "tokens": rows}

    return shapes


def shape_of(name: str, shape: Sequence[int], leading: dict[str, Leading], bucket: Bucket) -> tuple[int, ...]:
    """An input's whole shape, from the network's shape, in which variable sizes are negative."""
    cache = name.startswith(("k_cache.", "v_cache."))
    first = leading.get("caches" if cache else name, (bucket.sequences,))
    return *first, *shape[len(first) :]


Range = tuple[tuple[int, ...], ...]
"""Smallest, usual and largest shape of an input."""


def profile_ranges(inputs: Mapping[str, Sequence[int]], buckets: Buckets, shapes: Shapes) -> Iterator[dict[str, Range]]:
    """Yield each profile's shapes of all inputs, from the shapes in the network."""
    for profile in buckets.profiles:
        leading = [shapes(bucket) for bucket in profile]
        yield {
            name: tuple(shape_of(name, own, sizes, bucket) for sizes, bucket in zip(leading, profile, strict=True))
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
