"""Parts of a bundle that all writers write alike: one target for each rank, and each drafting loop once."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redraft.bundle.config import BundleConfig, target_folder
from redraft.model_defs.export.drafter import Drafting
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.chains import Resampler
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.shards import shard_target, shards_of

Loops = dict[str, Drafting]
"""The drafting loops of a bundle's methods by name; methods with the same network share one object."""
SUFFIXES = (".onnx", ".pt2", ".engine", ".engine.json")
"""The suffixes of a network's files. Copies of a network name the first one's data."""
CALIBRATION = "calibration.json"
"""The file in which an fp8 bundle keeps its calibration."""


def shape_of(loop: Drafting) -> tuple[object, ...]:
    """The settings that a drafting loop is unrolled for: loops of one drafter that differ in them are different
    networks."""
    if isinstance(loop, BeamSearch):
        return loop.width, loop.length, loop.candidates, loop.support
    return loop.rule, loop.levels, loop.support


def distinct(loops: Loops, folder: Path) -> Iterator[tuple[str, str, Drafting]]:
    """Yield each loop once: the method under whose name to write its networks, the names of all its methods, and the
    loop. The files written under the first name are then copied for the others."""
    methods: dict[int, list[str]] = {}
    for name, loop in loops.items():
        methods.setdefault(id(loop), []).append(name)
    for names in methods.values():
        first, *others = names
        yield first, ", ".join(names), loops[first]
        for kind, suffix in itertools.product(("drafter", "resampler"), SUFFIXES):
            if (written := folder / f"{kind}.{first}{suffix}").exists():
                for other in others:
                    shutil.copy2(written, folder / f"{kind}.{other}{suffix}")


def resampling_loop(config: BundleConfig, name: str, loop: Drafting) -> BeamSearch | None:
    """The loop that drafts again from the rest of a chain, for a method whose drafter leaves one."""
    levels = config.methods[name].chain_levels
    if not levels or not isinstance(loop, BeamSearch):
        return None
    return BeamSearch(Resampler(loop.drafter, levels), loop.width, levels, loop.candidates, loop.support)


@dataclass(frozen=True)
class TargetPart:
    """The part of a target that one rank executes, and the folder for its networks."""

    rank: int
    name: str
    target: Target
    folder: Path


def target_parts(config: BundleConfig, target: Target, folder: Path) -> Iterator[TargetPart]:
    """Yield a part for each rank, and make its folder; a single rank's part is the whole target."""
    if config.tensor_parallel == 1:
        yield TargetPart(0, "the target", target, folder)
        return
    for rank, shard in enumerate(shards_of(target, config.tensor_parallel)):
        rank_folder = target_folder(folder, rank, config.tensor_parallel)
        rank_folder.mkdir()
        yield TargetPart(rank, f"the target of rank {rank}", shard_target(target, shard), rank_folder)


def cache_shape(config: BundleConfig) -> CacheShape:
    """The shape of the cache under a bundle's limits."""
    limits = config.limits
    return CacheShape(limits.slots, limits.max_len, limits.max_tree, limits.window_rows)
