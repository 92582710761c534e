"""Declarations against nvcc's PTX, and as plugins of TensorRT's own Python layer."""

import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from redraft.plugins.cuda import compile, quick_plugin
from redraft.plugins.cuda.declaration import ALIAS, POINTER, Argument, Entry, Kernel, entries, entry_ptx
from redraft.plugins.library import BuildError
from redraft.plugins.operators.add_norm.cuda import ADD_NORM, ADD_NORM_QUANTIZED
from redraft.plugins.operators.beam_step.cuda import BEAM_STEP
from redraft.plugins.operators.draft_rows.cuda import DRAFT_ROWS
from redraft.plugins.operators.fp8_linear.cuda import QUANTIZE_ROWS
from redraft.plugins.operators.perturbed_topk.cuda import PERTURBED_TOPK
from redraft.plugins.operators.sampling.cuda import FILTER, RACE
from redraft.plugins.operators.silu_product.cuda import SILU_PRODUCT, SILU_PRODUCT_QUANTIZED
from redraft.plugins.operators.top_log_probs.cuda import TOP_LOG_PROBS
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_KERNELS, HEAD_SIZES, SPLIT, WRITE, eps_bits
from redraft.plugins.operators.tree_attention.cuda_kernels import KERNELS as ATTENTION
from tests.conftest import OF_TESTS, one_process, run_script
from tests.plugins import fake_tensorrt

KERNELS = (*ATTENTION, *FP32_KERNELS)
OTHERS = (
    *(FILTER, RACE, PERTURBED_TOPK, BEAM_STEP, DRAFT_ROWS, TOP_LOG_PROBS),
    *(QUANTIZE_ROWS, ADD_NORM, ADD_NORM_QUANTIZED, SILU_PRODUCT, SILU_PRODUCT_QUANTIZED),
)
"""Those that are no plugins of TensorRT"""
SHAPES = {
    "TreeAttentionWrite": [
        (93, 576 + 384),
        (93,),
        (6,),
        (5,),
        (5,),
        (5,),
        (8,),
        (6,),
        (512, 64),
        *[(64,)] * 2,
        *[(5, 3, 600, 64)] * 2,
    ],
    "TreeAttentionSplit": [(93, 576), (6,), (5,), (5,), (5,), (93, 2), *[(5, 3, 600, 64)] * 2],
    "TreeAttentionCombine": [(35520, 64), (35520, 2), (93, 3), (6,)],
}
SHAPES |= {f"{kernel.name}Fp32": SHAPES[kernel.name] for kernel in ATTENTION}
SHAPES["TreeAttentionCombineFp32"] = [(2511, 64), (2511, 2), (93,), (6,), (5, 3, 600, 64)]
Q = replace(SPLIT.inputs[0], in_place_of="q")
ATTRIBUTES = {"heads": 9, "kv_heads": 3, "head_size": 64, "window": 0, "norm_eps": eps_bits(1e-6)}
OLDEST = "10.16.1.11"
"""The oldest TensorRT that is taken, whose bindings are fetched."""


def test_a_wheels_ptx_needs_no_nvcc(monkeypatch, tmp_path):
    """The newest that the GPU runs; $NVCC chooses otherwise. It would catch a GPU that gets PTX of a later one."""

    def missing() -> None:
        raise BuildError("nvcc not found")

    for architecture in compile.ARCHITECTURES:
        (tmp_path / f"sampling-kernel-{architecture}.ptx").write_text(architecture)
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(compile, "COMPILED", tmp_path)
    monkeypatch.setattr(compile, "nvcc", missing)
    wanted = {"sm_80": "sm_80", "sm_89": "sm_80", "sm_90": "sm_90", "sm_103": "sm_100", "sm_121": "sm_100"}
    assert {architecture: compile.ptx(RACE.source, architecture) for architecture in wanted} == wanted
    for source, architecture in ((RACE.source, "sm_75"), (WRITE.source, "sm_90")):
        with pytest.raises(BuildError, match="nvcc not found"):
            compile.ptx(source, architecture)
    monkeypatch.setenv("NVCC", "chosen")
    with pytest.raises(BuildError, match="nvcc not found"):
        compile.ptx(RACE.source, "sm_90")


def test_a_wheels_machine_code_runs_on_its_major_architecture(monkeypatch, tmp_path):
    """Others get PTX, which the driver compiles."""
    for architecture in compile.ARCHITECTURES:
        for kind in ("ptx", "cubin"):
            (tmp_path / f"sampling-kernel-{architecture}.{kind}").write_text(f"{architecture} {kind}")
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(compile, "COMPILED", tmp_path)
    wanted = {"sm_80": "sm_80 cubin", "sm_89": "sm_80 cubin", "sm_90": "sm_90 cubin", "sm_103": "sm_100 cubin"}
    wanted |= {"sm_120": "sm_100 ptx", "sm_121": "sm_100 ptx"}
    assert {architecture: compile.image(RACE.source, architecture).decode() for architecture in wanted} == wanted
    (tmp_path / "sampling-kernel-sm_90.cubin").unlink()
    assert compile.image(RACE.source, "sm_90") == b"sm_90 ptx"


@pytest.mark.parametrize("kernel", [*KERNELS, *OTHERS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("architecture", compile.ARCHITECTURES)
def test_declarations_fit_the_ptx(kernel: Kernel, head_size, architecture):
    kernel.check()
    kernel.check_ptx(compile.ptx(kernel.source, architecture), {"head_size": head_size})


PTX = """.visible .entry f(
    .param .u64 .ptr .align 1 f_param_0,
    .param .u32 f_param_1
)
.maxntid 128, 1, 1
.minnctapersm 2
{ }
"""


def test_ptx_entries_are_read_with_types_and_threads():
    assert entries(PTX) == {"f": Entry([POINTER, "int32"], 128)}
    assert entries(PTX.replace(".maxntid 128, 1, 1", ".reqntid 16,4"))["f"].threads == 64
    assert entries(PTX.replace(".maxntid 128, 1, 1", "")) == {"f": Entry([POINTER, "int32"], None)}


def test_nvcc_marks_pointers_for_one_architecture_at_least():
    """Where it does not, a 64-bit scalar passes for a pointer."""
    assert all(".ptr" in compile.ptx(source, "sm_100") for source in compile.sources())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".u32", ".f32", r"f takes \.f32: expected pointers and int32"),
        (".u32", ".u32 .ptr .align 1", r"f takes \.u32\.ptr: expected pointers and int32"),
    ],
)
def test_parameters_that_tensorrt_does_not_pass_are_refused(old, new, message):
    with pytest.raises(ValueError, match=message):
        entries(PTX.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "split"}, r"split is not in the PTX: expected one of \['tree_attention_combine_128', "),
        ({"threads": 64}, "64 threads: expected 128, as tree_attention_split_64 is compiled for"),
        ({"scalars": ("rows", "words")}, "tree_attention_split_64 takes .*: expected"),
        ({"outputs": SPLIT.outputs[:-1]}, "tree_attention_split_64 takes .*: expected"),
    ],
)
def test_declarations_that_do_not_fit_the_ptx_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPLIT, **change).check_ptx(compile.ptx(SPLIT.source), {"head_size": 64})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a.b"}, "expected an identifier"),
        ({"attributes": ("heads", "tactic")}, "expected other names"),
        ({"inputs": (Argument("x", "int32", ("rows",)),) * 2}, "expected other names, each once"),
        ({"inputs": ()}, "expected inputs and outputs"),
        ({"outputs": (Argument("k_cache", "bf16", ("rows",)),)}, r"outputs \['k_cache'\]: expected other names"),
        ({"scalars": ("rows", "nothing")}, r"sizes \['nothing'\]"),
        ({"inputs": (Argument("x", "float64", ("rows",)),)}, "x is float64"),
        ({"outputs": (Argument("o", "bf16", ("rows",), "q"),)}, "o in place of q"),
        (
            {"outputs": (replace(Q, name="a"), replace(Q, name="b"))},
            r"in place of \['q', 'q'\]: expected each input once",
        ),
        ({"threads": 2048}, "2048 threads: expected 1 to 1024"),
    ],
)
def test_declarations_that_break_a_rule_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPLIT, **change).check()


def fetched_bindings(version: str) -> Path:
    """The folder of this version's bindings, fetched when they are not there."""
    folder = OF_TESTS / f"tensorrt-bindings-{version}"
    with one_process():
        if not folder.exists():
            with TemporaryDirectory(dir=OF_TESTS) as partial:
                package = f"tensorrt-cu13-bindings=={version}"
                target = f"{partial}/installed"
                run_script("-m", "pip", "install", "-q", "--retries", "10", "--no-deps", "--target", target, package)
                Path(partial, "installed").rename(folder)
    return folder / "tensorrt_bindings"


@pytest.fixture(params=["installed", OLDEST])
def tensorrt(request, monkeypatch):
    """The Python layers are those of the version that requirements.txt names, and of the oldest that is taken."""
    bindings = fake_tensorrt.installed_bindings() if request.param == "installed" else fetched_bindings(request.param)
    trt = fake_tensorrt.install(monkeypatch, bindings)
    for kernel in KERNELS:
        quick_plugin.register(kernel)
    return trt


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("alias", [False, True])
def test_tensorrt_plugins_are_what_the_declarations_say(tensorrt, kernel: Kernel, alias):
    """An engine build's questions in order: types, aliases, shapes, formats, then kernel, grid and scalars."""
    trt, shapes = tensorrt, SHAPES[kernel.name]
    inputs = [trt.ITensor() for _ in shapes]
    attributes = {name: ATTRIBUTES[name] for name in kernel.attributes}
    in_place = any(output.in_place_of for output in kernel.outputs)
    declared = attributes | ({ALIAS: int(alias)} if in_place else {})
    create = getattr(trt.plugin.op.redraft, kernel.name)(*inputs, **declared)
    plugin = create(trt.QuickPluginCreationRequest.PREFER_AOT)[2]
    dtypes = {"bf16": trt.DataType.BF16, "int32": trt.DataType.INT32, "float32": trt.DataType.FLOAT}
    types = [dtypes[argument.dtype] for argument in kernel.inputs]
    found = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    assert found == [dtypes[output.dtype] for output in kernel.outputs]
    names = [argument.name for argument in kernel.inputs]
    for i, output in enumerate(kernel.outputs):
        expected = names.index(output.in_place_of) if output.in_place_of and alias else -1
        assert plugin.get_aliased_input(i) == expected

    builder = fake_tensorrt.ExprBuilder()
    expressions = [[builder.constant(size) for size in shape] for shape in shapes]
    sizes = kernel.sizes(shapes, attributes)
    out_shapes = [[dim.value for dim in dims] for dims in plugin.get_output_shapes(expressions, [], builder)]
    assert out_shapes == [[sizes[name] for name in output.shape] for output in kernel.outputs]

    assert plugin.autotune_function is None, "with one TensorRT would run the kernel on inputs of its own"
    layout = trt.TensorFormat.LINEAR
    dims = [*shapes, *out_shapes]
    in_out = [
        fake_tensorrt.DynamicPluginTensorDesc(list(d), t, layout) for d, t in zip(dims, [*types, *found], strict=True)
    ]
    supported = plugin.get_supported_format_combinations(in_out, len(shapes))
    assert [desc.type for desc in supported] == [*types, *found]
    descs = [desc.desc for desc in in_out]
    plugin.set_tactic(0)
    launch, scalars = SimpleNamespace(), Scalars()
    plugin.get_launch_params(expressions, in_out, len(shapes), launch, scalars, builder)
    assert [launch.grid_x.expr.value, launch.grid_y.expr.value, launch.grid_z.expr.value] == [
        sizes[name] for name in kernel.grid
    ]
    assert (launch.block_x.expr.value, launch.shared_mem.expr.value) == (kernel.threads, 0)
    assert [scalar.expr.value for scalar in scalars.values()] == [sizes[name] for name in kernel.scalars]
    assert all(scalar.dtype == trt.PluginArgDataType.INT32 for scalar in scalars.values())
    entry, ptx = plugin.get_kernel(descs[: len(shapes)], descs[len(shapes) :])
    assert {name: found.parameters for name, found in entries(ptx.decode()).items()} == {entry: kernel.parameters()}


@pytest.mark.parametrize("source", compile.sources(), ids=lambda source: source.stem)
def test_each_entry_can_be_assembled_without_the_others(source, tmp_path):
    """So that each of a network's nodes holds the PTX of its own kernel only."""
    text = compile.ptx(source)
    for name in entries(text):
        (tmp_path / f"{name}.ptx").write_text(entry_ptx(text, name))
        assembler = [compile.nvcc().with_name("ptxas"), "-arch=sm_90", tmp_path / f"{name}.ptx"]
        subprocess.run([*assembler, "-o", tmp_path / f"{name}.cubin"], check=True)
    with pytest.raises(ValueError, match="nothing is not in the PTX: expected one of "):
        entry_ptx(text, "nothing")


class Scalars(dict):
    nbSymExprs = 0


def test_blocks_fill_the_gpu_beside_the_tiles_of_all_rows():
    """`find_item` in kernel.cu shares them out."""

    def items(rows: int, sequences: int, heads: int, kv_heads: int, size: int = 128) -> int:
        shapes = [
            *[(rows, heads * size), (sequences + 1,), *[(sequences,)] * 3],
            *[(rows, 1), *[(sequences, kv_heads, 4096, size)] * 2],
        ]
        sizes = SPLIT.sizes(shapes, {"heads": heads, "kv_heads": kv_heads, "head_size": size})
        return sizes["items"]

    assert items(16, 1, 32, 8) == 2 + 66
    assert items(512, 32, 32, 8) == 64 + 66
    assert items(1, 1, 32, 32) == 1 + 16
    assert items(1, 1, 4, 1, 256) == 1 + 528, "tiles of 32 queries"


@pytest.mark.parametrize("kernels", [ATTENTION, FP32_KERNELS], ids=["bf16", "fp32"])
def test_the_cpu_form_and_the_kernels_agree_on_inputs(kernels):
    """The plugins take what the one CPU operator takes, `starts` and norms included (README.md)."""
    cpu = ["qkv", "positions", "row_offsets", "slots", "cache_lengths", "tree_mask", "commit_src", "commit_offsets"]
    cpu += ["rope_table", "k_cache", "v_cache", "starts", "q_norm", "k_norm"]
    made = {output.name for kernel in kernels for output in kernel.outputs}
    taken = {argument.name for kernel in kernels for argument in kernel.inputs} - made
    assert taken == set(cpu)
