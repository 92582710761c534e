"""The CUDA kernels' own source under ASAN and UBSAN, on integers that no batch has: TensorRT may run a kernel on inputs
of its own while it builds, and a wrong index must stay inside the tensors.

Slow, as sanitizers compile and run. It would catch a kernel that reads or writes outside of its tensors.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.plugins.cuda.declaration import Kernel
from redraft.plugins.cuda.launch import TORCH_DTYPES
from redraft.plugins.operators.sampling.cuda import FILTER, RACE
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_KERNELS, HEAD_SIZES, KERNELS, eps_bits

pytestmark = pytest.mark.slow

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++20", "-O0", "-g1", "-rdynamic", "-Wno-unknown-pragmas", "-x", "c++"]
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
SIZES = HEAD_SIZES[:2]
"""One whose heads fill whole vectors of a warp, and one whose do not: integers are used alike in all."""
INT, TENSOR, REPEATED = range(3)
"""Kinds of an argument in sanitized_main.cpp."""
ROWS, SEQUENCES, SLOTS, CACHE_ROWS, POSITIONS, WORDS = 70, 3, 2, 96, 50, 2
ATTRIBUTES = {"heads": 2, "kv_heads": 1, "window": 7, "norm_eps": eps_bits(1e-6)}
INTEGERS = {
    "row_offsets": [0, 3, 40, 66],
    "slots": [1, 0, 1],
    "cache_lengths": [9, 20, 5],
    "starts": [9, 20, 5],
    "commit_src": [0, 2, 5, 1, 3, 0],
    "commit_offsets": [0, 3, 5, 6],
    "positions": [row % POSITIONS for row in range(ROWS)],
    "tree_mask": [[1 << row % 31, 0] for row in range(ROWS)],
    "plan": [*[[0, 1, 0]] * 3, *[[1, 1, 3]] * 37, *[[3, 1, 40]] * 26, *[[0, 0, 0]] * 4],
}
"""A batch as it should be."""
MOST, LEAST = 2**31 - 1, -(2**31)
GARBAGE = {
    "zero": (0, 0),
    "minus one": (-1, -1),
    "INT_MAX": (MOST, MOST),
    "INT_MIN": (LEAST, LEAST),
    "anything": (LEAST, MOST),
    "near": (-3, ROWS + 3),
}
"""The smallest and the largest integer of each kind."""
ONE_AT_A_TIME = ("minus one", "INT_MAX", "INT_MIN", "near")
"""Kinds for an input whose neighbours are right, and so hide nothing."""


DRAWS = {"rows": 3, "vocabulary": 2111, "three": 3, "four": 4}
"""Sizes of draws, of which no integer is an index."""


def sizes_of(kernel: Kernel, head_size: int) -> dict[str, int]:
    heads, kv_heads = ATTRIBUTES["heads"], ATTRIBUTES["kv_heads"]
    known = {
        **{"rows": ROWS, "projections": (heads + 2 * kv_heads) * head_size, "columns": heads * head_size},
        **{"bounds": SEQUENCES + 1, "commit_bounds": SEQUENCES + 1, "sequences": SEQUENCES, "words": WORDS},
        **{"commits": len(INTEGERS["commit_src"]), "max_positions": POSITIONS, "head_size": head_size, "two": 2},
        **{"cache_slots": SLOTS, "cache_rows": CACHE_ROWS, **ATTRIBUTES},
    }
    for one in ((FP32_KERNELS if kernel.name.endswith("Fp32") else KERNELS)[1], kernel):
        shapes = [[known[size] for size in argument.shape] for argument in one.inputs]
        known |= one.sizes(shapes, ATTRIBUTES | {"head_size": head_size})
    return known


def tensor(dtype: str, shape: list[int], rng: np.random.Generator) -> torch.Tensor:
    if dtype == "int32":
        return torch.zeros(shape, dtype=torch.int32)
    return torch.from_numpy(rng.standard_normal(shape)).to(TORCH_DTYPES[dtype])


def cases(kernel: Kernel) -> Iterator[tuple[str, bytes]]:
    """What is garbage in a case, and the case in the words of sanitized_main.cpp: all integer inputs at once and, with
    the smaller head size, each of them."""
    rng = np.random.default_rng(0)
    integers = [argument.name for argument in kernel.inputs if argument.dtype == "int32"]
    for head_size in SIZES:
        known = sizes_of(kernel, head_size)
        for spoilt in ([], integers, *([name] for name in integers if head_size == SIZES[0])):
            kinds = GARBAGE if spoilt == integers else ONE_AT_A_TIME if spoilt else [""]
            for kind in kinds:
                least, most = GARBAGE.get(kind, (0, 0))
                arguments = []
                for argument in kernel.inputs:
                    shape = [known[size] for size in argument.shape]
                    given = tensor(argument.dtype, shape, rng)
                    if argument.dtype == "int32":
                        valid = np.array(INTEGERS[argument.name], np.int32).reshape(shape)
                        wrong = rng.integers(least, most, shape, np.int32, endpoint=True)
                        given = torch.from_numpy(wrong if argument.name in spoilt else valid)
                    arguments.append((TENSOR, given))
                arguments += [(INT, known[name]) for name in kernel.scalars]
                places = {argument.name: place for place, argument in enumerate(kernel.inputs)}
                for output in kernel.outputs:
                    shape = [known[size] for size in output.shape]
                    own = (TENSOR, torch.zeros(shape, dtype=TORCH_DTYPES[output.dtype]))
                    arguments.append((REPEATED, places[output.in_place_of]) if output.in_place_of else own)
                name = f"{', '.join(spoilt) or 'nothing'} {kind}, heads of {head_size}"
                yield name, packed(kernel, {"head_size": head_size}, [known[n] for n in kernel.grid], arguments)


def draws(kernel: Kernel) -> Iterator[tuple[str, bytes]]:
    """The same of a kernel that draws: all of its integers are garbage."""
    rng, known = (
        np.random.default_rng(0),
        DRAWS | kernel.sizes([[DRAWS[size] for size in argument.shape] for argument in kernel.inputs], {}),
    )
    for kind, (least, most) in GARBAGE.items():
        arguments = []
        for argument in kernel.inputs:
            shape = [known[size] for size in argument.shape]
            given = tensor(argument.dtype, shape, rng)
            if argument.dtype == "int32":
                given = torch.from_numpy(rng.integers(least, most, shape, np.int32, endpoint=True))
            arguments.append((TENSOR, given))
        arguments += [(INT, known[name]) for name in kernel.scalars]
        arguments += [
            (TENSOR, torch.zeros([known[size] for size in output.shape], dtype=TORCH_DTYPES[output.dtype]))
            for output in kernel.outputs
        ]
        yield kind, packed(kernel, {}, [known[name] for name in kernel.grid], arguments)


def packed(kernel: Kernel, attributes: dict[str, int], grid: list[int], arguments: list[tuple]) -> bytes:
    name = f"launch_{kernel.entry_for(attributes)}".encode()
    parts = [struct.pack("I", len(name)), name, struct.pack("5I", *grid, kernel.threads, len(arguments))]
    for kind, value in arguments:
        if kind == TENSOR:
            content = value.view(torch.uint8).numpy().tobytes()
            parts += [struct.pack("2I", kind, len(content)), content]
        else:
            parts.append(struct.pack("2I", kind, value))
    return b"".join(parts)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[Path, Path]:
    """By source, what launches its kernels with sanitizers. Head sizes that no case has are left out: to compile them
    would take longer than all cases."""
    found, folder = {}, tmp_path_factory.mktemp("sanitized")
    unused = re.compile(rf"^REDRAFT_\w+\((?:\w+_)?(?:{'|'.join(map(str, HEAD_SIZES[2:]))})\)$", re.MULTILINE)
    compiler, main = os.environ.get("CXX", "g++"), folder / "main.o"
    launcher = Path(__file__).parents[1] / "sanitized_main.cpp"
    subprocess.run([compiler, *SANITIZERS, *FLAGS, "-c", launcher, "-o", main], check=True)
    for source in {kernel.source for kernel in (*KERNELS, *FP32_KERNELS, FILTER, RACE)}:
        part = folder / f"{source.parent.name}_{source.name}"
        part.write_text(unused.sub("", source.read_text()))
        found[source] = part.with_suffix("")
        code = [f"-I{source.parent}", part, "-x", "none", main]
        command = [compiler, *SANITIZERS, *FLAGS, *code, "-o", found[source], "-ldl"]
        subprocess.run(command, check=True)
    return found


@pytest.mark.parametrize("kernel", [*KERNELS, *FP32_KERNELS, FILTER, RACE], ids=lambda kernel: kernel.name)
def test_no_integer_leads_outside_the_tensors(kernel, programs):
    names, given = zip(*(draws if kernel in (FILTER, RACE) else cases)(kernel), strict=True)
    environment = os.environ | OPTIONS
    done = subprocess.run([programs[kernel.source]], input=b"".join(given), capture_output=True, env=environment)
    said = done.stderr.decode(errors="replace")
    last = names[max(said.count("case ") - 1, 0)]
    assert done.returncode == 0, f"{last}:\n{said[said.rfind('case ') :][:4000]}"
    assert said.count("case ") == len(names)
