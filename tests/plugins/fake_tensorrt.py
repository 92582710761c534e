"""`tensorrt.plugin` without TensorRT: the Python layer of NVIDIA's bindings over stand-ins for its library.

Shape expressions are integers, so what a plugin declares symbolically can be computed.
"""

import importlib.util
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "MAX": max,
    "MIN": min,
    "EQUAL": lambda a, b: int(a == b),
    "LESS": lambda a, b: int(a < b),
}


class DimensionExpr:
    def __init__(self, value: int):
        self.value = value

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class ExprBuilder:
    def constant(self, value: int) -> DimensionExpr:
        return DimensionExpr(value)

    def operation(self, operation: str, a: DimensionExpr, b: DimensionExpr) -> DimensionExpr:
        return DimensionExpr(OPERATIONS[operation](a.value, b.value))


class Registry:
    def __init__(self) -> None:
        self.creators: dict[str, object] = {}

    def register_creator(self, creator, namespace: str) -> None:
        self.creators[f"{namespace}::{creator.name}"] = creator

    def get_creator(self, name: str, version: str, namespace: str):
        return self.creators.get(f"{namespace}::{name}")


class _Listed(list):
    """trt.DimsExprs and trt.PluginFieldCollection: a list, or a length."""

    def __init__(self, items=()):
        super().__init__([None] * items if isinstance(items, int) else items)


class DynamicPluginTensorDesc:
    def __init__(self, dims: list[int], dtype, layout):
        self.desc = SimpleNamespace(dims=dims, type=dtype, format=layout, scale=1.0)


def installed_bindings() -> Path:
    """The folder of the bindings that requirements.txt names."""
    bindings = importlib.util.find_spec("tensorrt_bindings")
    return Path(bindings.submodule_search_locations[0])


def install(monkeypatch, bindings: Path | None = None) -> ModuleType:
    """Put a stand-in `tensorrt` and the bindings' `tensorrt.plugin` into sys.modules; return the first. `bindings`
    default to the installed ones."""
    trt = ModuleType("tensorrt")
    for name in (
        *("IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime", "IPluginV3QuickAOTBuild"),
        *("IPluginCreatorV3Quick", "ISymExpr", "IPluginV3OneBuild", "ITensor", "IExprBuilder", "PluginTensorDesc"),
    ):
        setattr(trt, name, type(name, (), {}))
    for name, members in {
        "DataType": "FLOAT HALF BF16 INT32 INT8 INT64 FP8 INT4",
        "TensorFormat": "LINEAR",
        "PluginFieldType": "UNKNOWN CHAR INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64",
        "PluginArgType": "INT",
        "PluginArgDataType": "INT8 INT16 INT32",
        "TensorRTPhase": "BUILD RUNTIME",
        "QuickPluginCreationRequest": "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT",
    }.items():
        setattr(trt, name, Enum(name, members))
    trt.int32, trt.float32, trt.float16 = trt.DataType.INT32, trt.DataType.FLOAT, trt.DataType.HALF
    trt.DimensionOperation = SimpleNamespace(**{name: name for name in OPERATIONS})
    trt.IDimensionExpr, trt.DynamicPluginTensorDesc = DimensionExpr, DynamicPluginTensorDesc
    trt.DimsExprs = trt.PluginFieldCollection = _Listed
    trt.Dims = type("Dims", (_Listed,), {"MAX_DIMS": 8})
    trt.PluginField = lambda name, data, kind=None: SimpleNamespace(name=name, data=data, type=kind)
    trt.Logger = type("Logger", (), {"WARNING": 0, "log": lambda *_: None})
    registry = Registry()
    trt.get_plugin_registry = lambda: registry

    folder = (bindings or installed_bindings()) / "plugin"
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    trt.plugin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", trt.plugin)
    spec.loader.exec_module(trt.plugin)
    for name in [name for name in sys.modules if name.startswith("tensorrt.plugin.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return trt
