"""The `tensorrt_rtx` backend: serialized engines of native-form networks, built ahead of time on any machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redraft.bundle import BundleError, LimitsInfo, file_sha256

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Smallest, usual and largest shape of every input."""


@dataclass(frozen=True)
class BuildReport:
    """What was built from which file; written beside the engine as `NAME.engine.json`."""

    network_sha256: str
    weight_bytes: int
    engine_bytes: int
    layers: dict[str, int]


def compile_target(network: Path, engine: Path, limits: LimitsInfo) -> BuildReport:
    """Build the target's engine: profile 0 executes all slots with 1 to `max_tree` rows each, profile 1 prefills one
    sequence. Raises BundleError."""
    return _compile(network, engine, lambda inputs: [_target_profile(inputs, limits, prefill) for prefill in (0, 1)])


def compile_drafter(network: Path, engine: Path, limits: LimitsInfo) -> BuildReport:
    """Build the drafter's engine for 1 to `slots` sequences. Raises BundleError."""

    def profiles(inputs: dict[str, Shape]) -> list[Profile]:
        sizes = (1, limits.slots, limits.slots)
        return [{name: _shapes(shape, [{0: size} for size in sizes]) for name, shape in inputs.items()}]

    return _compile(network, engine, profiles)


def _target_profile(inputs: dict[str, Shape], limits: LimitsInfo, prefill: int) -> Profile:
    batch = 1 if prefill else limits.slots
    rows = (1, limits.prefill_chunk, limits.prefill_chunk) if prefill else (1, min(8, limits.max_tree), limits.max_tree)
    profile = {}
    for name, shape in inputs.items():
        row_axis = {"input_ids": 1, "positions": 1, "mask": 2}.get(name)
        if name == "logit_rows":
            sizes = [{0: count} for count in (1, batch, batch * rows[2])]
        else:
            sizes = [{0: batch} | ({row_axis: count} if row_axis else {}) for count in rows]
        profile[name] = _shapes(shape, sizes)
    return profile


def _shapes(shape: Shape, sizes: list[dict[int, int]]) -> tuple[Shape, Shape, Shape]:
    smallest, usual, largest = (tuple(size.get(axis, n) for axis, n in enumerate(shape)) for size in sizes)
    return smallest, usual, largest


def _compile(network: Path, engine: Path, profiles: Any) -> BuildReport:
    try:
        import tensorrt_rtx as trt
    except ImportError:
        raise BundleError("the backend tensorrt_rtx needs the package tensorrt-rtx-cu13") from None
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, logger)
    if not parser.parse_from_file(str(network)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise BundleError(f"TensorRT for RTX cannot read {network}: {errors}")
    inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
    options = builder.create_builder_config()
    for shapes in profiles({value.name: tuple(value.shape) for value in inputs}):
        profile = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in shapes.items():
            profile.set_shape(name, smallest, usual, largest)
        options.add_optimization_profile(profile)
    layers = Counter(str(definition.get_layer(i).type).split(".")[-1] for i in range(definition.num_layers))
    serialized = builder.build_serialized_network(definition, options)
    if serialized is None:
        raise BundleError(f"TensorRT for RTX cannot build {network}")
    engine.write_bytes(serialized)
    data = network.with_name(f"{network.name}.data")
    report = BuildReport(
        network_sha256=network_sha256(network),
        weight_bytes=data.stat().st_size if data.exists() else network.stat().st_size,
        engine_bytes=engine.stat().st_size,
        layers=dict(layers),
    )
    engine.with_name(f"{engine.name}.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def network_sha256(network: Path) -> str:
    """The sha256 of a network's ONNX file and of its weights' file, joined by a plus sign."""
    data = network.with_name(f"{network.name}.data")
    return "+".join(file_sha256(file) for file in (network, data) if file.exists())
