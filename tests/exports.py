"""Exports that a run's tests repeat are made once: most tests' time would be torch's exporter, with the same modules.

An export is known by everything that its module holds (weights, attributes, what functions close over), its inputs'
shapes and its open axes. What cannot be told by its content is exported each time.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import shutil
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from redraft.compiler.writers import torch as torch_writer
from redraft.compiler.writers.torch import save
from redraft.model_defs.export import drafter as export_drafter
from redraft.model_defs.export import target as export_target
from redraft.model_defs.export.networks import export_network
from redraft.model_defs.export.programs import export_drafter_torch, export_resampler_torch, export_target_torch

if TYPE_CHECKING:
    import onnx_ir as ir

UNTOLD = {"training", "_non_persistent_buffers_set", "_is_full_backward_hook"}
"""Attributes of every module that no export depends on; those of hooks are empty."""


class Unknown(Exception):
    """Something that only its address tells."""


def share(folder: Path) -> None:
    """From now on look for exports in `folder`, which other processes may share, and leave new ones there."""
    folder.mkdir(parents=True, exist_ok=True)
    for export in (export_target_torch, export_drafter_torch, export_resampler_torch):
        setattr(torch_writer, export.__name__, shared_program(export, folder))
    torch_writer.save = saved
    if not find_spec("onnxscript"):
        return  # nor does anything here export to ONNX
    import onnx_ir as ir
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    def shared_export(module: nn.Module, args: tuple, *others: Any) -> ir.Model:
        try:
            path = folder / f"{digest_of([module, shapes(args), *others])}.onnx"
        except Unknown:
            return export_network(module, args, *others)
        if not path.exists():
            own = path.with_suffix(f".{os.getpid()}.onnx")
            ir.save(export_network(module, args, *others), own, external_data=f"{own.name}.data")
            own.rename(path)
        return ir.external_data.load_to_model(ir.load(path))

    export_drafter.export_network = export_target.export_network = shared_export
    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))  # read anew for each export
    gc.freeze()  # else an export, which leaves much garbage, has all modules searched for it again and again


def shared_program(export: Callable[..., ExportedProgram], folder: Path) -> Callable[..., ExportedProgram | Path]:
    """A function that exports a program, once for all that its arguments hold, and gives the file that holds it."""

    def shared(*args: Any, **options: Any) -> ExportedProgram | Path:
        try:
            path = folder / f"{digest_of([export, args, options])}.pt2"
        except Unknown:
            return export(*args, **options)
        if not path.exists():
            own = path.with_suffix(f".{os.getpid()}.pt2")
            save(export(*args, **options), own)
            own.rename(path)
        return path

    return shared


def saved(program: ExportedProgram | Path, path: Path) -> None:
    """What the writer does with a program, or with the file of a shared one: to load it would take a second."""
    if isinstance(program, Path):
        shutil.copyfile(program, path)
    else:
        save(program, path)


def digest_of(value: Any) -> str:
    """A name of a value by its content. Raises Unknown."""
    digest = hashlib.sha256()
    for piece in contents(value, {}):
        digest.update(piece)
    return digest.hexdigest()


def shapes(args: Any) -> Any:
    """Of example inputs, whose numbers do not matter."""
    if isinstance(args, torch.Tensor):
        return str(args.dtype), tuple(args.shape)
    return [shapes(part) for part in args] if isinstance(args, list | tuple) else args


def contents(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """What tells a value from others, in pieces. `seen` holds what came before by its address, and so keeps it. Raises
    Unknown."""
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.device}".encode()
        yield memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, str | int | float | bool | None | torch.dtype | torch.Size | bytes):
        yield repr(value).encode()
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    elif id(value) in seen:
        yield b"number %d" % seen[id(value)][0]
    else:
        seen[id(value)] = len(seen), value
        for part in parts(value):
            yield from contents(part, seen)


def parts(value: Any) -> list[Any]:
    """What a value is made of. Raises Unknown."""
    if isinstance(value, nn.Module):
        return [[name, held] for name, held in vars(value).items() if name not in UNTOLD]
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, value.__code__.co_code, closed, value.__defaults__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return [list(item) for item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [[name, held] for name, held in vars(value).items()]
    raise Unknown
