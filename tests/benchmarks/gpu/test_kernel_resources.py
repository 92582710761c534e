"""Registers, spills, occupancy and instructions of the compiled kernels, and regressions that must fail."""

import re
import shutil

import pytest

from benchmarks.gpu import kernel_resources
from benchmarks.gpu.kernel_resources import LIMITS, Instructions, Resources, parse_instructions, problems, threads_of
from redraft.plugins.cuda import compile
from redraft.plugins.cuda.declaration import PLUGINS
from redraft.plugins.operators.add_norm.cuda import ADD_NORM, ADD_NORM_QUANTIZED
from redraft.plugins.operators.beam_step.cuda import BEAM_STEP
from redraft.plugins.operators.draft_rows.cuda import DRAFT_ROWS
from redraft.plugins.operators.fp8_linear.cuda import QUANTIZE_ROWS
from redraft.plugins.operators.perturbed_topk.cuda import PERTURBED_TOPK
from redraft.plugins.operators.sampling.cuda import FILTER, RACE
from redraft.plugins.operators.silu_product.cuda import SILU_PRODUCT, SILU_PRODUCT_QUANTIZED
from redraft.plugins.operators.top_log_probs.cuda import TOP_LOG_PROBS
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_KERNELS, HEAD_SIZES, KERNELS

OTHERS = (
    *(FILTER, RACE, PERTURBED_TOPK, BEAM_STEP, DRAFT_ROWS, TOP_LOG_PROBS),
    *(QUANTIZE_ROWS, ADD_NORM, ADD_NORM_QUANTIZED, SILU_PRODUCT, SILU_PRODUCT_QUANTIZED),
)
ALL = (*KERNELS, *FP32_KERNELS, *OTHERS)
FINE = Resources(32, 0, 0, 0, 0)


def test_kernels_stay_within_their_limits():
    """On the architecture that has limits; `make kernels` compiles for all, and says what spills on any."""
    compiled = {}
    for source in compile.sources():
        found = kernel_resources.resources(source, kernel_resources.ASSERTED)
        assert set(found) == {k.entry_for({"head_size": n}) for k in ALL if k.source == source for n in HEAD_SIZES}
        compiled |= found
    for name, (used, instructions) in compiled.items():
        assert 0 < used.registers <= 255
        assert not used.spills
        assert used.shared <= 48 << 10, "TensorRT launches without opting in to more"
        assert instructions is not None
        assert problems(name, used, instructions) == []
    assert set(LIMITS) == set(compiled)


def test_the_occupancy_is_that_of_the_declared_threads():
    for kernel in ALL:
        assert kernel.threads == threads_of(kernel.entry_for({"head_size": HEAD_SIZES[0]}))


@pytest.mark.parametrize(
    ("registers", "shared", "resident"),
    [(32, 0, 16), (33, 0, 12), (65, 0, 7), (255, 0, 2), (32, 48 << 10, 4), (32, 14 << 10, 15)],
)
def test_resident_blocks_follow_registers_and_shared_memory(registers, shared, resident):
    used = Resources(registers, 0, 0, 0, shared)
    assert used.resident() == resident
    assert used.occupancy() == resident / 16


LISTING = """	.section	.text.f,"ax",@progbits
.text.f:
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR6][R2.64] ;
        /*0020*/                   LDG.E R8, desc[UR6][R2.64] ;
        /*0028*/                   LDGSTS.E.128 [R19+0x2000], desc[UR10][R16.64] ;
.L_x_1:
        /*0030*/              @P1  HMMA.16816.F32.BF16 R184, R48.reuse, R152, RZ ;
        /*0040*/                   LDL.64 R4, [R1] ;
.text.g:
        /*0000*/                   STL [R1+0x4], R4 ;
        /*0010*/              @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0020*/                   LDSM.16.M88.4 R4, [R1] ;
"""


def test_instructions_are_counted_by_kernel():
    assert parse_instructions(LISTING) == {"f": Instructions(3, 1, 1), "g": Instructions(0, 0, 1)}


@pytest.mark.parametrize(
    ("used", "instructions", "message"),
    [
        (FINE._replace(registers=201), Instructions(24, 96, 0), "201 registers: expected at most 200"),
        (FINE._replace(shared=120 << 10), Instructions(24, 96, 0), "1 resident blocks: expected at least 2"),
        (FINE, Instructions(23, 96, 0), "23 loads of 16 bytes: expected at least 24"),
        (FINE, Instructions(24, 64, 0), "64 products of tensor cores: expected 96"),
        (FINE, Instructions(24, 96, 2), "2 loads and stores of local memory: expected none"),
    ],
)
def test_each_limit_is_asserted(used, instructions, message):
    name = "tree_attention_split_128"
    assert problems(name, FINE, Instructions(24, 96, 0)) == problems(name, FINE, None) == []
    assert problems(name, used, instructions) == [f"{name}: {message}"]
    assert problems("other", FINE, None) == ["other: expected its limits in benchmarks/gpu/kernel_resources.py"]


PLANTED = """
extern "C" __global__ void tree_attention_combine_64(const float* x, const int* places, float* out) {
    float kept[256];
    for (int i = 0; i < 256; ++i) kept[i] = x[i * blockDim.x + threadIdx.x];
    out[threadIdx.x] = kept[places[threadIdx.x] % 256];
}
"""


def test_an_array_that_is_indexed_at_run_time_fails_the_command(tmp_path, monkeypatch, capsys):
    source = tmp_path / "kernel.cu"
    source.write_text(PLANTED)
    monkeypatch.setattr(compile, "sources", lambda: [source])
    monkeypatch.setattr(compile, "CACHE", tmp_path / "cache")
    said = kernel_resources.main(["sm_90"])
    monkeypatch.setattr(compile, "run_tool", None)
    assert kernel_resources.main(["sm_90"]) == said, "a source is compiled once"
    assert said is not None
    assert "tree_attention_combine_64: registers spill to local memory on sm_90" in said
    assert re.search(r"tree_attention_combine_64: \d+ loads and stores of local memory: expected none", said)
    assert "tree_attention_combine_64" in capsys.readouterr().out


def test_narrow_loads_fail_the_command(tmp_path, monkeypatch):
    """The real kernel with loads of 4 bytes."""
    for folder in ("cuda", "operators/tree_attention"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (*(PLUGINS / folder).glob("*.cuh"), *(PLUGINS / folder).glob("kernel_fp32.cu")):
            shutil.copy(path, tmp_path / folder)
    rows, source = tmp_path / "operators/tree_attention/rows.cuh", tmp_path / "operators/tree_attention/kernel_fp32.cu"
    wide = "return *reinterpret_cast<const uint4*>(from);"
    narrow = "auto* x = reinterpret_cast<const uint32_t*>(from); return {x[0], x[1], x[2], x[3]};"
    assert wide in rows.read_text()
    rows.write_text(rows.read_text().replace(wide, narrow))
    monkeypatch.setattr(compile, "sources", lambda: [source])
    monkeypatch.setattr(compile, "CACHE", tmp_path / "cache")
    said = kernel_resources.main(["sm_90"]) or ""
    for size in HEAD_SIZES:
        assert f"tree_attention_commit_write_fp32_{size}: 0 loads of 16 bytes: expected at least 6" in said
