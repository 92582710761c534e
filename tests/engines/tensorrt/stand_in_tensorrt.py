"""A stand-in for TensorRT's library, and for that of TensorRT for RTX: it records what is built, and its engines
compute, on the CPU, what the network's file says. Plugins are the kernels' own code, as g++ compiles it."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from redraft.compiler.passes.tensorrt_all_reduce import COLLECTIVE, DOMAIN
from redraft.engines.cuda import device as gpu
from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.tree_attention.cuda_kernels import KERNELS
from tests.plugins import fake_tensorrt

VERSION = "11.4.0.106"
FREE = 1_000_000
"""Bytes of the GPU's memory."""
DTYPES = {
    onnx.TensorProto.FLOAT: ("FLOAT", np.float32),
    onnx.TensorProto.FLOAT16: ("HALF", np.float16),
    onnx.TensorProto.BFLOAT16: ("BF16", ml_dtypes.bfloat16),
    onnx.TensorProto.INT32: ("INT32", np.int32),
    onnx.TensorProto.INT64: ("INT64", np.int64),
}


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO = "internal error", "error", "warning", "info"


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1
    PREFER_AOT_PYTHON_PLUGINS = 3


class Parser:
    """Reads a file whole; a plugin's node must name a registered plugin, as NVIDIA's parser looks it up."""

    def __init__(self, definition, logger):
        self.definition, self.errors, self.num_errors = definition, [], 0

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path)
        for node in model.graph.node:
            if node.domain and node.op_type != COLLECTIVE and not self._known(node):
                self.errors.append(SimpleNamespace(desc=lambda op=node.op_type: f"no plugin {op}"))
        self.num_errors = len(self.errors)
        self.definition.read(model)
        return not self.errors

    def _known(self, node: onnx.NodeProto) -> bool:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        names = [given.get(name, b"").decode() for name in ("plugin_version", "plugin_namespace")]
        creator = self.definition.trt.get_plugin_registry().get_creator(node.op_type, *names)
        return creator is not None and given.get("aot") == 1 and self.definition.prefers_aot

    def get_error(self, i: int):
        return self.errors[i]


class Definition:
    def __init__(self, trt, flags: int):
        self.trt, self.flags = trt, flags
        self.prefers_aot = bool(flags >> NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS & 1)

    def read(self, model: onnx.ModelProto) -> None:
        self.model = model
        graph = model.graph
        self.num_inputs, self.num_outputs, self.num_layers = len(graph.input), len(graph.output), len(graph.node)

    def get_input(self, i: int):
        return self._tensor(self.model.graph.input[i])

    def get_output(self, i: int):
        return self._tensor(self.model.graph.output[i])

    def _tensor(self, value: onnx.ValueInfoProto):
        tensor = value.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        return SimpleNamespace(name=value.name, shape=sizes, dtype=SimpleNamespace(name=DTYPES[tensor.elem_type][0]))

    def get_layer(self, i: int):
        return SimpleNamespace(type=f"LayerType.{self.model.graph.node[i].op_type}")


class Profile(dict):
    def set_shape(self, name, *sizes):
        self[name] = [list(size) for size in sizes]


class Options:
    """Takes timings of its own alone."""

    def __init__(self) -> None:
        self.profiles: list[Profile] = []
        self.preview: list[str] = []
        self.flags: list[str] = []
        self.cache = None

    num_optimization_profiles = property(lambda self: len(self.profiles))

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)

    def set_flag(self, flag):
        self.flags.append(flag)

    def set_preview_feature(self, feature, on):
        self.preview += [feature] * on

    def create_timing_cache(self, known: bytes):
        return SimpleNamespace(known=known, serialize=lambda: known + b"measured ")

    def set_timing_cache(self, cache, ignore_mismatch):
        accepted = not cache.known.replace(b"measured ", b"")
        if accepted:
            self.cache = cache
        return accepted

    def get_timing_cache(self):
        return self.cache


class Builder:
    def __init__(self, logger, trt):
        self.logger, self.trt = logger, trt

    def create_network(self, flags):
        return Definition(self.trt, flags)

    def create_builder_config(self):
        return Options()

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, definition, options):
        if self.trt.fails_with:
            self.logger.log(ILogger.ERROR, self.trt.fails_with)
            return None
        head = {"flags": definition.flags, "profiles": options.profiles, "preview": options.preview}
        head["builder_flags"] = options.flags
        return json.dumps(head).encode() + b"\n" + definition.model.SerializeToString()


def plugin(kernel) -> type[OpRun]:
    """An operator that runs a kernel's host build; outputs in place of inputs are these."""

    def compute(self, *arrays, aot=None, plugin_namespace=None, plugin_version=None, alias=None, **attributes):
        tensors = [_tensor(array) for array in arrays]
        outputs = run(kernel, tensors, attributes)
        return tuple(
            arrays[[a.name for a in kernel.inputs].index(out.in_place_of)] if out.in_place_of else _array(found)
            for out, found in zip(kernel.outputs, outputs, strict=True)
        )

    return type(kernel.name, (OpRun,), {"op_domain": "redraft", "_run": compute})


def collective(engine: Engine) -> type[OpRun]:
    """An operator that gathers from the ranks of the executing context's communicator."""

    def compute(self, x, collective_operation=None, reduce_op=None, root=None, group_size=None, nb_rank=None):
        assert (collective_operation, reduce_op, root, group_size) == ("all_gather", "none", -1, 0)
        assert engine.executing is not None, "set_communicator comes before, in every context"
        assert engine.executing.size == nb_rank
        return (np.concatenate(engine.executing.allgather(x)),)

    return type(COLLECTIVE, (OpRun,), {"op_domain": DOMAIN, "_run": compute})


class GatherElements(OpRun):
    """The evaluator's own takes at most 64 rows."""

    def _run(self, data, indices, axis=0):
        return (np.take_along_axis(data, indices, axis),)


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = array if array.flags.writeable else array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class Engine:
    def __init__(self, blob: bytes, logger: ILogger):
        self.logger = logger
        head, _, network = blob.partition(b"\n")
        self.head, self.model = json.loads(head), onnx.load_from_string(network)
        self.values = {value.name: value for value in (*self.model.graph.input, *self.model.graph.output)}
        self.executing = None
        self.layers: list[Any] = [{"Name": node.name, "LayerType": "PluginV3"} for node in self.model.graph.node]
        operators = [GatherElements, collective(self), *(plugin(kernel) for kernel in KERNELS)]
        self.evaluator = ReferenceEvaluator(self.model, new_ops=operators)
        self.num_optimization_profiles, self.num_io_tensors = len(self.head["profiles"]), len(self.values)

    def get_tensor_name(self, i):
        return list(self.values)[i]

    def get_tensor_mode(self, name):
        return name in [value.name for value in self.model.graph.input]

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=DTYPES[self.values[name].type.tensor_type.elem_type][0])

    def get_tensor_shape(self, name):
        dims = self.values[name].type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else -1 for d in dims]

    def get_tensor_profile_shape(self, name, profile):
        return self.head["profiles"][profile][name]

    def get_device_memory_size_for_profile_v2(self, i):
        return 1000 + i

    def create_engine_inspector(self):
        return SimpleNamespace(get_engine_information=lambda format: json.dumps({"Layers": self.layers}))

    def create_runtime_config(self):
        return RuntimeConfig()

    def create_execution_context(self, chosen):
        if "require user allocation" in self.head["builder_flags"]:
            chosen = chosen.strategy
        assert chosen == "user managed"
        return Context(self)


class RuntimeConfig:
    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy


class Context:
    """Refuses what a profile does not hold, and to execute before everything is bound."""

    def __init__(self, engine: Engine):
        self.engine, self.shapes, self.addresses = engine, {}, {}
        self.profile, self.communicator = None, None

    def set_device_memory(self, address, size):
        assert size >= max(1000 + i for i in range(self.engine.num_optimization_profiles))

    def set_communicator(self, communicator):
        assert self.communicator is None
        assert COLLECTIVE in [node.op_type for node in self.engine.model.graph.node]
        communicator.barrier()
        self.communicator = communicator
        return True

    def set_optimization_profile_async(self, number, stream):
        self.profile = self.engine.head["profiles"][number]
        return True

    def set_input_shape(self, name, shape):
        smallest, _, largest = self.profile[name]
        fits = all(low <= n <= high for low, n, high in zip(smallest, shape, largest, strict=True))
        if fits:
            self.shapes[name] = tuple(shape)
        return fits

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        sizes = {}
        for given, shape in self.shapes.items():
            for dim, size in zip(self.engine.values[given].type.tensor_type.shape.dim, shape, strict=True):
                if dim.HasField("dim_param"):
                    assert sizes.setdefault(dim.dim_param, size) == size, f"{given} has {dim.dim_param} {size}"
        dims = self.engine.values[name].type.tensor_type.shape.dim
        return tuple(d.dim_value if d.HasField("dim_value") else eval(d.dim_param, {}, sizes) for d in dims)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def is_stream_capturable(self, stream):
        return "require user allocation" in self.engine.head["builder_flags"]

    def execute_async_v3(self, stream):
        inputs = {value.name: self._memory(value.name) for value in self.engine.model.graph.input}
        outputs = [value.name for value in self.engine.model.graph.output]
        self.engine.executing = self.communicator
        for name, found in zip(outputs, self.engine.evaluator.run(outputs, inputs), strict=True):
            memory = self._memory(name)
            assert (found.shape, found.dtype) == (memory.shape, memory.dtype), name
            np.copyto(memory, found)
        return True

    def _memory(self, name: str) -> np.ndarray:
        dtype = np.dtype(DTYPES[self.engine.values[name].type.tensor_type.elem_type][1])
        shape = self.get_tensor_shape(name)
        size = dtype.itemsize * int(np.prod(shape))
        memory = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


class Runtime:
    def __init__(self, logger):
        self.logger = logger

    def deserialize_cuda_engine(self, mapped: mmap.mmap):
        assert isinstance(mapped, mmap.mmap), "a copy of the file would be as large as the target"
        blob = bytes(mapped)
        if not blob.startswith(b"{"):
            self.logger.log(ILogger.ERROR, "magic tag does not match")
            return None
        return Engine(blob, self.logger)


CAPABILITIES = {"tensorrt": "9.0", "tensorrt_rtx": "12.0"}
"""Of the GPU that a library finds, unless a test names another."""


def install(monkeypatch, name: str, capability: str | None = None) -> ModuleType:
    """Put the library `name` into sys.modules, and let its GPU be the CPU."""
    capability = capability or CAPABILITIES[name]
    monkeypatch.setattr(gpu, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "capability", lambda _: capability)
    monkeypatch.setattr(gpu, "free_bytes", lambda _: FREE)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "the GPU")
    return install_library(monkeypatch, name)


def install_library(monkeypatch, name: str) -> ModuleType:
    """Put the library alone there."""
    trt: Any = fake_tensorrt.install(monkeypatch) if name == "tensorrt" else ModuleType(name)
    trt.__version__ = VERSION if name == "tensorrt" else "1.7.1.116"
    trt.__spec__ = ModuleSpec(name, None)
    trt.fails_with = None
    trt.ILogger, trt.OnnxParser, trt.Runtime = ILogger, Parser, Runtime
    trt.Builder = lambda logger: Builder(logger, trt)
    trt.NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
    trt.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased plugin I/O")
    trt.BuilderFlag = SimpleNamespace(REQUIRE_USER_ALLOCATION="require user allocation")
    trt.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", LAZY="lazy")
    trt.LayerInformationFormat = SimpleNamespace(JSON="json")
    trt.ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")
    trt.TensorIOMode = SimpleNamespace(INPUT=True)
    trt.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
    monkeypatch.setitem(sys.modules, name, trt)
    return trt
