"""Resources of compiled kernels, the occupancy they allow on sm_90 (H100, H200), and the limits of `make kernels`.

    python -m benchmarks.gpu.kernel_resources [sm_90 ...]

compiles every kernel, reports its registers, spills, occupancy and instructions, and fails beyond the limits.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from redraft.errors import program
from redraft.plugins.cuda import compile
from redraft.plugins.library import BuildError

DISASSEMBLER = "nvidia-cuda-nvdisasm"
ASSERTED = "sm_90"
"""The architecture of LIMITS and of the sizes below."""
THREADS = 128
"""Threads of a block, in every kernel whose limits name no others."""
REGISTERS, WARPS, BLOCKS, SHARED = 65536, 64, 32, 228 << 10
"""Limits of a multiprocessor: registers, resident warps and blocks, bytes of shared memory ("CUDA C++ Programming
Guide", compute capability 9.0)."""
PARTITIONS = 4
"""Schedulers of a multiprocessor; each has a quarter of the registers and of the warps."""
REGISTER_UNIT, SHARED_UNIT, SHARED_RESERVED = 256, 128, 1024
"""Registers of a warp and bytes of a block come in multiples of these; CUDA keeps the last for itself."""
WIDE_LOAD, PRODUCT, LOCAL = (
    re.compile(r"LDG(?:STS)?\.(?:\w+\.)*128\b"),
    re.compile(r"HMMA\."),
    re.compile(r"(?:LDL|STL)\b"),
)


class Resources(NamedTuple):
    """Resources of a kernel by ptxas: registers, bytes of stack and spills per thread; shared bytes per block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        """Whether anything lies in local memory, which a stack is too."""
        return bool(self.stack or self.spill_stores or self.spill_loads)

    def resident(self, threads: int = THREADS) -> int:
        """Blocks of so many threads that a multiprocessor of sm_90 holds at a time."""
        in_registers = PARTITIONS * (REGISTERS // PARTITIONS // _multiple(32 * self.registers, REGISTER_UNIT))
        in_shared = SHARED // _multiple(self.shared + SHARED_RESERVED, SHARED_UNIT)
        return min(in_registers // (threads // 32), in_shared, WARPS // (threads // 32), BLOCKS)

    def occupancy(self, threads: int = THREADS) -> float:
        """The share of a multiprocessor's warps that can be resident."""
        return self.resident(threads) * (threads // 32) / WARPS


class Instructions(NamedTuple):
    """Counts of the instructions that decide a kernel's speed."""

    wide_loads: int
    """Loads of 16 bytes from global memory, also those that go to shared memory by themselves."""
    products: int
    """Instructions of the tensor cores, m16n8k16."""
    local: int
    """Loads and stores of local memory."""


@dataclass(frozen=True)
class Limits:
    """`registers` at most, `resident` blocks of `threads` at least, `wide_loads` at least, `products` exactly."""

    registers: int
    resident: int
    wide_loads: int = 0
    products: int = 0
    threads: int = THREADS


LIMITS = {
    # Wide loads: 8 of a stage of keys and values, at three places. Products: of a stage's keys, and of half of them.
    "tree_attention_split_64": Limits(registers=152, resident=3, wide_loads=24, products=96),
    "tree_attention_split_96": Limits(registers=168, resident=3, wide_loads=24, products=72),
    "tree_attention_split_128": Limits(registers=200, resident=2, wide_loads=24, products=96),
    # Products: scores of 16 keys, and half the columns of their values.
    "tree_attention_split_256": Limits(registers=208, resident=2, wide_loads=24, products=48),
    # Wide loads: a query's piece, and keys unrolled by 4. Bits that are a row's own forbid tensor cores.
    **{
        f"tree_attention_split_fp32_{size}": Limits(registers=80, resident=6, wide_loads=5)
        for size in (64, 96, 128, 256)
    },
    # Wide loads: a committed piece, both halves of a new one and of its norm, and the head that the norm sums. Norms
    # are float32 beside bf16 heads too, which takes registers.
    **{
        f"tree_attention_commit_write_{size}": Limits(registers=56, resident=9, wide_loads=8)
        for size in (64, 96, 128, 256)
    },
    **{
        f"tree_attention_commit_write_fp32_{size}": Limits(registers=48, resident=10, wide_loads=6)
        for size in (64, 96, 128, 256)
    },
    # Shared memory for the values of 16 splits: with few rows their latency counts, not the warps.
    **{f"tree_attention_combine_{size}": Limits(registers=40, resident=12) for size in (64, "fp32_64")},
    **{
        f"tree_attention_combine_{size}": Limits(registers=56, resident=6)
        for size in (96, 128, 256, "fp32_96", "fp32_128", "fp32_256")
    },
    # A row may begin anywhere, so its logits are loaded one by one.
    "token_race": Limits(registers=64, resident=8),
    "token_filter": Limits(registers=64, resident=2, threads=512),
    "perturbed_topk": Limits(registers=64, resident=8),
    # Wide loads: a piece for the row's largest number, and the two that a thread quantizes.
    "quantize_rows": Limits(registers=40, resident=12, wide_loads=3),
    # Wide loads: both parts of a sum; the sum again and the weight.
    "add_norm": Limits(registers=40, resident=12, wide_loads=4),
    "silu_product": Limits(registers=40, resident=12, wide_loads=2),
    # The same, normed twice: once for the row's largest number, once for its codes.
    "add_norm_quantized": Limits(registers=48, resident=10, wide_loads=8),
    "silu_product_quantized": Limits(registers=64, resident=2, wide_loads=6, threads=512),
    # Wide loads: a thread's four pieces in each of the places that visit a row.
    "top_log_probs": Limits(registers=64, resident=2, wide_loads=8, threads=512),
    "beam_step": Limits(registers=48, resident=10),
    "draft_rows": Limits(registers=40, resident=12),
}
"""Limits by entry. A change that makes a kernel faster may need other limits: whoever makes it changes them here."""


def threads_of(name: str) -> int:
    """Threads of a block of this entry."""
    return LIMITS[name].threads if name in LIMITS else THREADS


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources of each kernel, from the output of `ptxas -v`."""
    blocks = re.findall(
        r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"\s+ptxas info\s*: Used (\d+) registers(.*)",
        log,
    )
    result = {}
    for name, stack, stores, loads, registers, rest in blocks:
        shared = re.search(r"(\d+) bytes smem", rest)
        result[name] = Resources(int(registers), int(stack), int(stores), int(loads), int(shared[1]) if shared else 0)
    return result


def parse_instructions(listing: str) -> dict[str, Instructions]:
    """Instructions of each kernel, from the output of `nvdisasm -c`: a label `.text.NAME:`, then lines of an address, a
    predicate or none, and an instruction."""
    names = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)
    result = {}
    for name, code in zip(names[1::2], names[2::2], strict=True):
        written = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
        counts = Counter(written)
        result[name] = Instructions(
            *(sum(n for opcode, n in counts.items() if kind.match(opcode)) for kind in (WIDE_LOAD, PRODUCT, LOCAL))
        )
    return result


def problems(name: str, used: Resources, instructions: Instructions | None) -> list[str]:
    """Excesses over the limits of a kernel that was compiled for sm_90."""
    if name not in LIMITS:
        return [f"{name}: expected its limits in benchmarks/gpu/kernel_resources.py"]
    limits, result = LIMITS[name], []
    if used.registers > limits.registers:
        result.append(f"{used.registers} registers: expected at most {limits.registers}")
    if (resident := used.resident(limits.threads)) < limits.resident:
        result.append(f"{resident} resident blocks: expected at least {limits.resident}")
    if instructions and instructions.wide_loads < limits.wide_loads:
        result.append(f"{instructions.wide_loads} loads of 16 bytes: expected at least {limits.wide_loads}")
    if instructions and instructions.products != limits.products:
        result.append(f"{instructions.products} products of tensor cores: expected {limits.products}")
    if instructions and instructions.local:
        result.append(f"{instructions.local} loads and stores of local memory: expected none")
    return [f"{name}: {problem}" for problem in result]


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def resources(source: Path, architecture: str) -> dict[str, tuple[Resources, Instructions | None]]:
    """Each kernel's resources and, on the architecture that has limits, its instructions: None without nvdisasm.
    Compiled once per source text. Raises BuildError.
    """
    disassembler = nvdisasm() if architecture == ASSERTED else None

    def compiled() -> str:
        with tempfile.TemporaryDirectory() as folder:
            cubin = f"{folder}/kernel.cubin"
            log = compile.run_nvcc([str(source), "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", cubin])
            return log + (compile.run_tool([str(disassembler), "-c", cubin]) if disassembler else "")

    report = compile.once(source, architecture, "sass" if disassembler else "log", compiled)
    written = parse_instructions(report)
    return {name: (own, written.get(name)) for name, own in parse_resources(report).items()}


@cache
def nvdisasm() -> Path | None:
    """The disassembler: pip's, or the one in PATH or of CUDA's toolkit. None where there is none."""
    return next(iter(compile.find_program("nvdisasm")), None)


COLUMNS = (
    "registers",
    "stack",
    "spill stores",
    "spill loads",
    "shared",
    "blocks",
    "occupancy",
    "LDG.128",
    "HMMA",
    "local",
)


def main(architectures: Sequence[str] = ()) -> str | None:
    """Report every kernel on every architecture, or on these. Returns what is wrong: limits that are exceeded, or no
    nvcc."""
    wrong = []
    print(f"{'kernel':<38}{'architecture'}", *COLUMNS, sep="  ")
    try:
        for source in compile.sources():
            for architecture in architectures or compile.ARCHITECTURES:
                for name, (used, instructions) in resources(source, architecture).items():
                    cells = [*map(str, used)]
                    if architecture == ASSERTED:
                        blocks, occupancy = used.resident(threads_of(name)), used.occupancy(threads_of(name))
                        cells += [str(blocks), f"{occupancy:.0%}", *map(str, instructions or ())]
                        wrong += problems(name, used, instructions)
                    wrong += [f"{name}: registers spill to local memory on {architecture}"] if used.spills else []
                    shown = (f"{cell:>{len(column)}}" for cell, column in zip(cells, COLUMNS, strict=False))
                    print(f"{name:<38}{architecture:<12}", *shown, sep="  ")
    except BuildError as error:
        return str(error)
    if nvdisasm() is None:
        print(
            f"nvdisasm not found: instructions are not counted. Install it with {program('pip')} install {DISASSEMBLER}"
        )
    return "\n".join(wrong) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
