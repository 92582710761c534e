"""Builds serialized engines from networks: with full TensorRT, on the GPU that is to run them; with TensorRT for RTX,
on any machine. For want of its libraries, full TensorRT has built nothing; engines of neither were run on a GPU."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from redraft.bundle.config import BundleConfig
from redraft.bundle.manifest import file_sha256
from redraft.engines import memory
from redraft.engines.cuda import device as gpu
from redraft.engines.tensorrt import profiles
from redraft.engines.tensorrt.library import CAPABILITY, GPU, LIBRARIES, Messages, TensorRTLibrary
from redraft.engines.tensorrt.profiles import Buckets, Shapes
from redraft.errors import BundleError
from redraft.plugins.cuda.compile import ptx
from redraft.plugins.cuda.declaration import NAMESPACE
from redraft.plugins.cuda.quick_plugin import register
from redraft.plugins.library import CACHE, BuildError
from redraft.plugins.operators.tree_attention.cuda_kernels import HEAD_SIZES, KERNELS


@dataclass(frozen=True)
class BuildReport:
    """A report of one build, written beside the engine as `NAME.engine.json`. Inputs and outputs are those of the
    network that TensorRT read: type and shape by name, such as `HALF [-1, 3, 128, 64]`, where -1 is open."""

    network_sha256: str
    weight_bytes: int
    engine_bytes: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    layers: dict[str, int]
    profiles: int


class EngineBuilder:
    """The library of a bundle's backend and what it builds for. Raises BundleError where library, GPU, driver or nvcc
    is missing, the GPU too old, or the target's heads are not the plugins'."""

    def __init__(self, config: BundleConfig):
        self._config = config
        self.library: TensorRTLibrary = LIBRARIES[config.backend.name]
        if config.plugin_form and (size := config.target.head_size) not in HEAD_SIZES:
            raise BundleError(
                f"heads of size {size}, and {self.library.title}'s plugins take {', '.join(map(str, HEAD_SIZES))}; "
                "--form native takes any"
            )
        self._device = gpu.device() if self.library.builds_on_gpu else None
        self._trt = self.library.module(config.tensor_parallel)
        if self.library.gpus and torch.cuda.is_available():
            try:
                self.library.require_gpu(gpu.device())
            except BundleError as error:
                print(f"these engines are for another machine: {error}", file=sys.stderr)
        if self._device:
            gpu.require_capability(self._device)
            gpu.require_precision(self._device, config.precision)
        if config.plugin_form:
            try:
                self._register_plugins()
            except BuildError as error:
                raise BundleError(str(error)) from None

    @property
    def versions(self) -> dict[str, str]:
        """Versions for the manifest: the library, and the GPU that the engines are for."""
        result = {self.library.backend.name: str(self._trt.__version__)}
        if self._device is None:
            return result
        return result | {CAPABILITY: gpu.capability(self._device), GPU: torch.cuda.get_device_name(self._device)}

    def build_target(self, network: Path, rank: int = 0) -> BuildReport:
        """NAME.engine of the network of a rank's target. Raises BundleError; MemoryError without a
        GPU."""
        limits = self._config.limits
        if self._config.plugin_form:
            return self._build(network, profiles.plugin_target(limits), profiles.plugin_target_shapes(limits), rank)
        buckets = profiles.native_target(limits, self.library.builds_on_gpu)
        return self._build(network, buckets, profiles.native_target_shapes, rank)

    def build_drafter(self, network: Path, reads_context: bool) -> BuildReport:
        """NAME.engine of a drafter's network, or of one that re-samples, without context. Raises as `build_target`."""
        buckets = profiles.drafter(self._config.limits, reads_context, self.library.builds_on_gpu)
        return self._build(network, buckets, profiles.drafter_shapes(reads_context))

    def _build(self, network: Path, buckets: Buckets, shapes: Shapes, rank: int = 0) -> BuildReport:
        trt, messages = self._trt, Messages(self._trt)
        flags = [trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED]
        if self._config.plugin_form:
            flags.append(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)
        builder = messages.given_to(trt.Builder)
        definition = builder.create_network(sum(1 << int(flag) for flag in flags))
        parser = trt.OnnxParser(definition, messages.logger)
        if not parser.parse_from_file(str(network)):
            errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise BundleError(f"{self.library.title} cannot read {network}: {errors}")
        options = builder.create_builder_config()
        inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
        outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
        input_shapes = {tensor.name: tuple(tensor.shape) for tensor in inputs}
        for ranges in profiles.profile_ranges(input_shapes, buckets, shapes):
            profile = builder.create_optimization_profile()
            for name, sizes in ranges.items():
                profile.set_shape(name, *sizes)
            options.add_optimization_profile(profile)
        if self._config.alias:
            options.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        if self.library.builds_on_gpu:  # so that loading can see whether a layer copies a cache
            options.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        else:  # without it no step can be captured in a CUDA graph
            options.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        timings = self._timing_cache(options)
        layers = [definition.get_layer(i) for i in range(definition.num_layers)]
        for layer in layers:
            if str(layer.type).endswith("ATTENTION_INPUT"):
                layer.__class__ = trt.IAttentionInputLayer
                layer.attention.decomposable = True  # else what has no kernel of its own, such as fp32, is refused
        serialized = builder.build_serialized_network(definition, options)
        if serialized is None:
            raise self._failure(network, messages, rank)
        engine = network.with_suffix(".engine")
        engine.write_bytes(serialized)
        measured = options.get_timing_cache() if timings else None
        if timings and measured is not None:
            timings.parent.mkdir(parents=True, exist_ok=True)
            partial = timings.with_name(f"{timings.name}.{os.getpid()}")
            partial.write_bytes(measured.serialize())
            partial.replace(timings)
        report = BuildReport(
            network_sha256=network_sha256(network),
            weight_bytes=weight_bytes(network),
            engine_bytes=engine.stat().st_size,
            inputs=_described(inputs),
            outputs=_described(outputs),
            layers=dict(Counter(str(layer.type).split(".")[-1] for layer in layers)),
            profiles=options.num_optimization_profiles,
        )
        engine.with_name(f"{engine.name}.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
        return report

    def _register_plugins(self) -> None:
        registry, architecture = self._trt.get_plugin_registry(), f"sm_{self.versions[CAPABILITY].replace('.', '')}"
        for kernel in KERNELS:
            ptx(kernel.source, architecture)
            if registry.get_creator(kernel.name, "1", NAMESPACE) is None:
                register(kernel, architecture)

    def _timing_cache(self, options: Any) -> Path | None:
        """Give TensorRT what earlier builds measured on such a GPU, unless it refuses that; the file for this build's
        measurements."""
        if not self.library.builds_on_gpu:
            return None
        name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(self.versions.values()))
        path = CACHE / f"tensorrt-{name}.timings"
        content = path.read_bytes() if path.exists() else b""
        if not options.set_timing_cache(options.create_timing_cache(content), False):
            options.set_timing_cache(options.create_timing_cache(b""), False)
        return path

    def _failure(self, network: Path, messages: Messages, rank: int) -> Exception:
        if not messages.out_of_memory:
            return BundleError(f"{self.library.title} cannot build {network}: {messages.text}")
        if self._device is None:
            return MemoryError(f"{self.library.title}, building {network}")
        free = gpu.free_bytes(self._device)
        needed = memory.of_rank(self._config, rank)
        fits = memory.what_fits(needed, weight_bytes(network), free, memory.COPIES_WHILE_BUILDING)
        return BundleError(f"{self.library.title} ran out of memory building {network}: {fits}")


def network_sha256(network: Path) -> str:
    """The sha256 of a network's ONNX file and of its weights' file, joined by a plus sign."""
    return "+".join(file_sha256(file) for file in (network, _data(network)) if file.exists())


def weight_bytes(network: Path) -> int:
    """The size of a network's weights."""
    return (_data(network) if _data(network).exists() else network).stat().st_size


def _data(network: Path) -> Path:
    return network.with_name(f"{network.name}.data")


def _described(tensors: list[Any]) -> dict[str, str]:
    return {tensor.name: f"{tensor.dtype.name} {list(tensor.shape)}" for tensor in tensors}
