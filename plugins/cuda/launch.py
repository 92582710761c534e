"""Runs declared kernels on torch tensors: on a GPU through the CUDA driver, on the CPU as g++ compiles
them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redraft.plugins.cuda.compile import headers, image
from redraft.plugins.cuda.declaration import Kernel
from redraft.plugins.library import CACHE, FLAGS, BuildError

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "float32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}
UNSUPPORTED_PTX_VERSION = 222
"""CUDA_ERROR_UNSUPPORTED_PTX_VERSION of cuda.h."""
HOST_FLAGS = [*FLAGS, "-shared", "-Wno-unknown-pragmas", "-x", "c++"]


def run(
    kernel: Kernel, inputs: Sequence[Tensor], attributes: Mapping[str, int], *, descending: bool = False
) -> list[Tensor]:
    """The kernel's outputs; an in-place output is its input. Tensors are contiguous and on one device.

    descending: on the CPU, run blocks and threads in descending order. Raises ValueError for a tensor that does not
    fit.
    """
    for argument, tensor in zip(kernel.inputs, inputs, strict=True):
        if tensor.dtype != TORCH_DTYPES[argument.dtype] or not tensor.is_contiguous():
            raise ValueError(f"{kernel.name}: {argument.name} is {tensor.dtype}: expected contiguous {argument.dtype}")
    sizes = kernel.sizes([tensor.shape for tensor in inputs], attributes)
    names = [argument.name for argument in kernel.inputs]
    outputs = [
        inputs[names.index(output.in_place_of)]
        if output.in_place_of
        else torch.empty([sizes[n] for n in output.shape], dtype=TORCH_DTYPES[output.dtype], device=inputs[0].device)
        for output in kernel.outputs
    ]
    grid = [sizes[name] for name in kernel.grid]
    values: list[ctypes.c_void_p | ctypes.c_int32] = [
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs),
        *(ctypes.c_int32(sizes[name]) for name in kernel.scalars),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in outputs),
    ]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    if not all(grid):
        return outputs
    if inputs[0].is_cuda:
        function = _cuda_function(kernel.source, kernel.entry_for(attributes), inputs[0].device.index or 0)
        stream = ctypes.c_void_p(torch.cuda.current_stream(inputs[0].device).cuda_stream)
        block = (kernel.threads, 1, 1)
        _check(_driver().cuLaunchKernel(function, *grid, *block, 0, stream, arguments, None), "cuLaunchKernel")
    else:
        launch = getattr(_host_library(kernel.source), f"launch_{kernel.entry_for(attributes)}")
        launch((ctypes.c_uint32 * 3)(*grid), ctypes.c_uint32(kernel.threads), int(descending), arguments)
    return outputs


@cache
def _host_library(source: Path) -> ctypes.CDLL:
    digest = hashlib.sha256(f"{HOST_FLAGS}".encode())
    for path in (source, *headers(source)):
        digest.update(path.read_bytes())
    path = CACHE / f"{source.parent.name}-{source.stem}-host-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        compiler, partial = os.environ.get("CXX", "g++"), path.with_suffix(f".{os.getpid()}.partial")
        if not shutil.which(compiler):
            raise BuildError(f"{compiler} not found: it compiles the CUDA kernels for the CPU; install g++ 12 or newer")
        build = subprocess.run([compiler, *HOST_FLAGS, str(source), "-o", str(partial)], capture_output=True, text=True)
        if build.returncode:
            raise BuildError(f"{compiler} failed on {source}:\n{build.stderr[-4000:]}")
        partial.rename(path)
    return ctypes.CDLL(str(path))


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError("libcuda.so.1 not found: CUDA tensors need NVIDIA's driver (nvidia-smi shows it)") from error


@cache
def _cuda_function(source: Path, entry: str, device: int) -> ctypes.c_void_p:
    """The kernel in the device's context, compiled for the device's architecture."""
    torch.cuda.synchronize(device)  # the context is torch's
    major, minor = torch.cuda.get_device_capability(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        code = image(source, f"sm_{major}{minor}")
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {source.name}")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), entry)
    return function


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        said = f"{what}: {(text.value or b'unknown error').decode()} ({status})"
        if status == UNSUPPORTED_PTX_VERSION:
            said += ": nvcc was newer than the driver; update the driver, or name an older nvcc by NVCC"
        raise RuntimeError(said)
