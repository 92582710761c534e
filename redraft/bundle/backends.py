"""The engine backends: one record for each, which the command line, the compiler and the run time read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from redraft.errors import BundleError


class Precision(StrEnum):
    """The stored form of a target's weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    source = "source"
    """Quantized weights in the blocks of their source"""
    fp16 = "fp16"
    fp8 = "fp8"


class Form(StrEnum):
    """A target for TensorRT: with our attention kernels as plugins, or of TensorRT's own layers only."""

    plugin = "plugin"
    native = "native"


SOURCE_COPIES = 1
"""Copies of a quantized source that a build with `source` holds in memory at most: its embedding and head in float32
beside a drafter. Without one it holds a matrix: 0.3 GB more than for a tiny target, measured with 7B in Q4_K_M"""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """An engine backend: how its bundles are built, and what executes them."""

    name: str
    title: str
    engine: str
    """Its `Engine`, as module:class; imported when a bundle is loaded."""
    writer: str
    """The compiler's function that writes its networks, as module:function; imported when a bundle is built."""
    devices: tuple[str, ...]
    """The devices that execute it, of cpu and cuda."""
    cpu_features: tuple[str, ...] = ()
    """CPU features that its engine needs, as Linux names them."""
    precisions: tuple[Precision, ...]
    usual_precision: Precision = Precision.bf16
    calibrated: tuple[Precision, ...] = ()
    """Those whose scales of activations `redraft calibrate` finds"""
    scaled: tuple[Precision, ...] = ()
    """Those before whose rounding a build scales the target's features"""
    forms: tuple[Form, ...] = ()
    """The target's forms to choose from, the usual one first."""
    native_drafters: bool = False
    """Whether drafters are of standard operators only, and in 16 bits or more in every precision."""
    token_info: tuple[str, ...]
    """The forms in which a drafter's network can hold token info (`InfoForm`), the usual one first."""
    shares_weights: bool = True
    """Whether the networks of a bundle share their weights."""
    head_step: int = 2
    """Attention heads have a size that is a multiple of this."""
    cache_alignment: int = 1
    """A cache slot has a size in bytes that is a multiple of this."""
    prefill_chunk: int = 512
    """Usual prompt rows of a step. On a CPU each row delays the running streams; a GPU has spare arithmetic up to about
    300 rows: the arithmetic over the bandwidth of an H100 in bf16."""
    loads_fp32: bool = False
    """Whether a build loads the target in float32, not as it is stored."""
    build_copies: float
    """Copies of a target's weights, at 16 bits a number, that a build holds in memory at once at least: as loaded,
    exported and compiled. Measured less what a build of a tiny target takes: `torch` and `tensorrt` (up to its export)
    with 311M random weights in bfloat16, the others with SmolLM2."""
    build_seconds: float | None = None
    """Time of a core to export and compile, per byte of a target at 16 bits a number; None where it is not known."""
    disk_copies: float = 1.3
    """Copies of the stored weights that a build holds on disk at most."""

    def copies_to_build(self, precision: Precision) -> float:
        """`build_copies`, or those of the source's files where a build reads them as they are."""
        return SOURCE_COPIES if precision == Precision.source else self.build_copies

    @property
    def needs_gpu(self) -> bool:
        return self.devices == ("cuda",)

    def __str__(self) -> str:
        return self.name


OPENVINO = Backend(
    name="openvino",
    title="OpenVINO",
    engine="redraft.engines.openvino:OpenVINOEngine",
    writer="redraft.compiler.writers.openvino:write",
    devices=("cpu",),
    cpu_features=("avx2", "fma", "f16c"),
    precisions=(Precision.fp32, Precision.bf16, Precision.int8, Precision.int4, Precision.source),
    scaled=(Precision.int4,),
    token_info=("int8", "bf16", "low_rank"),
    head_step=32,
    prefill_chunk=128,
    loads_fp32=True,
    build_copies=4,
    build_seconds=30e-9,  # measured with 0.6B numbers
)
TORCH = Backend(
    name="torch",
    title="torch",
    engine="redraft.engines.torch:TorchEngine",
    writer="redraft.compiler.writers.torch:write",
    devices=("cuda", "cpu"),
    precisions=(Precision.fp32, Precision.bf16, Precision.fp8),
    token_info=("int8", "fp8", "bf16", "low_rank"),
    build_copies=1.7,
)
TENSORRT = Backend(
    name="tensorrt",
    title="TensorRT",
    engine="redraft.engines.tensorrt.engine:TensorRTEngine",
    writer="redraft.compiler.writers.tensorrt:write",
    devices=("cuda",),
    precisions=(Precision.bf16, Precision.int8, Precision.int4, Precision.fp8),
    calibrated=(Precision.fp8,),
    forms=(Form.plugin, Form.native),
    native_drafters=True,
    token_info=("bf16", "low_rank"),  # it would widen a table of 8-bit numbers as a whole at each execution
    shares_weights=False,
    cache_alignment=256,
    build_copies=1.3,
    disk_copies=3,
)
TENSORRT_RTX = replace(
    TENSORRT,
    name="tensorrt_rtx",
    title="TensorRT for RTX",
    precisions=(Precision.fp16, Precision.bf16, Precision.fp32, Precision.int8, Precision.int4, Precision.fp8),
    usual_precision=Precision.fp16,
    forms=(Form.native,),
    build_copies=3.5,
)
BACKENDS = {backend.name: backend for backend in (OPENVINO, TORCH, TENSORRT, TENSORRT_RTX)}


def backend_of(name: object) -> Backend:
    """The backend of a name, or of its record. Raises ValueError that lists the known ones."""
    if str(name) not in BACKENDS:
        raise ValueError(f"unknown backend {str(name)!r}; known are {', '.join(BACKENDS)}")
    return BACKENDS[str(name)]


def check_precision(backend: Backend, precision: Precision) -> None:
    """Raise BundleError for a precision that a backend does not store weights in."""
    if precision not in backend.precisions:
        raise BundleError(f"--precision {precision}: {backend} takes {', '.join(backend.precisions)}")
