"""The kernels of weights in blocks, compiled by themselves: for other instruction sets, sanitized, or with a bug."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.speed import kernel_calls
from redraft.plugins.library import AVX2, PLUGINS
from redraft.plugins.operators.linear.blocks import BlockWeight
from redraft.plugins.operators.linear.pack import pack_blocks
from redraft.plugins.operators.linear.reference import block_product
from tests.conftest import ROOT
from tests.plugins.operators.test_block_products import NAMES, random_rows, random_weight

FOLDER = ROOT / "tests" / "plugins" / "emulated"
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiled(folder: Path, *flags: str, plugins: Path = PLUGINS) -> Path:
    """The library of the two kernels, in `folder`."""
    library = folder / "blocks.so"
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w", *AVX2]
    options += [f"-I{plugins}", "-DREDRAFT_ISA_NAMESPACE=isa_of_test", *flags]
    subprocess.run(["g++", *options, FOLDER / "blocks.cpp", plugins / "cpu" / "pool.cpp", "-o", library], check=True)
    return library


def differing(library: str) -> list[str]:
    """The cases in which a library's results differ from the reference's in any bit."""
    rng, kernels = np.random.default_rng(7), ctypes.CDLL(library)
    cases = [[random_weight(rng, name, n, k)] for name in NAMES for n, k in ((111, 111), (33, 288))]
    cases.append(
        [random_weight(rng, name, n, 512) for name, n in (("q4_k", 48), ("q6_k", 16), ("i8g96", 32), ("q5_0", 15))]
    )
    return [segments[0].form.name for segments in cases if not _same(kernels, segments, rng)]


def differing_when_sanitized(library: Path) -> subprocess.CompletedProcess[str]:
    """The same in a process that loads the sanitizers first."""
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    variables = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    code = f"from tests.plugins.block_kernels import differing; print(differing({str(library)!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, cwd=ROOT
    )


def _same(kernels: ctypes.CDLL, segments: list[BlockWeight], rng: np.random.Generator) -> bool:
    packed, k = pack_blocks(segments), segments[0].shape[1]
    n, x = sum(segment.shape[0] for segment in segments), random_rows(rng, 7, k)
    with kernel_calls.Recording() as recording:
        outs = [
            kernel_calls.linear(x, packed, n),
            kernel_calls.embedding(np.arange(n, dtype=np.int32), packed, k, n),
        ]
    for out, kernel, (_, arguments) in zip(outs, ("linear", "embedding"), recording.calls, strict=True):
        out.fill(np.nan)
        getattr(kernels, kernel)(*arguments)
    expected = np.concatenate([block_product(x, segment) for segment in segments], axis=1)
    table = np.concatenate([segment.dequantized() for segment in segments])
    return np.array_equal(outs[0], expected) and np.array_equal(outs[1], table)
