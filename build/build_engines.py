"""Export a target and its drafters, and compile them into an engine bundle."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pydantic import ValidationError
from rich.markup import escape

from compiler.calibration import Calibration
from compiler.methods import (
    NGRAM,
    SOURCES,
    MethodSettings,
    check_method,
    drafting_loop,
    kind_of,
    load_draft_source,
    read_methods,
)
from compiler.writers.shared import CALIBRATION, Loops, shape_of
from ensure_bundle import built_from
from model_defs.drafters.base import Drafter
from model_defs.drafters.token_info import InfoForm, TokenInfoFactors, TokenInfoTable
from model_defs.export.drafter import Drafting
from model_defs.files import count_numbers
from model_defs.target.config import TargetConfig
from model_defs.target.errors import UnsupportedModelError
from model_defs.target.fingerprint import target_fingerprint
from model_defs.target.model import Target
from model_defs.target.shards import plan_shards
from redraft.bundle.backends import BACKENDS, OPENVINO, TORCH, Backend, Form, Precision, backend_of
from redraft.bundle.config import BundleConfig, LimitsInfo, ShardInfo, TargetInfo
from redraft.bundle.manifest import BuiltFrom
from redraft.bundle.writer import copy_tokenizer, finish_bundle, new_bundle
from redraft.console.output import err
from redraft.console.progress import duration, size, step
from redraft.console.resources import host_bytes, most_bytes
from redraft.decoding.retrieval import NGRAM_TRIE
from redraft.engines.memory import (
    WIDTH,
    is_out_of_memory,
    needed_to_build,
    unaligned_caches,
    what_builds,
)
from redraft.errors import BundleError
from redraft.request import describe
from redraft.runtime import BIGRAMS_FILE_NAME

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1.1, "fp8": 1.1}


def backend_named(name: object) -> Backend:
    """The value of --backend."""
    try:
        return backend_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def by_backend(value: Callable[[Backend], object]) -> str:
    """The backends' values, for help: bf16 (openvino, torch, tensorrt), fp16 (tensorrt_rtx)."""
    found: dict[object, list[str]] = {}
    for name, backend in BACKENDS.items():
        found.setdefault(value(backend), []).append(name)
    return ", ".join(f"{given} ({', '.join(names)})" for given, names in found.items() if given is not None)


def setting(name: str, *flags: str) -> Any:
    """The flag of a method's setting. Without it, the setting's default."""
    field = MethodSettings.model_fields[name]
    default = f" [default: {field.default}]" if field.default is not None else ""
    return typer.Option(*flags, help=f"{field.description}{default}", show_default=False)


def main(
    model: Annotated[Path, typer.Option(help="Target: a folder made by build/fetch_model.py.")],
    output: Annotated[Path, typer.Option(help="The bundle's folder; replaced when the build succeeds.")],
    no_drafter: Annotated[
        bool, typer.Option("--no-drafter", help="No drafter: an auto-regressive bundle, or the n-gram branch alone.")
    ] = False,
    methods: Annotated[
        Path | None,
        typer.Option(help="TOML file with a table for each of several methods, of the settings from --drafter on."),
    ] = None,
    method_name: Annotated[
        str | None,
        typer.Option(
            help="What requests call the method that the flags describe; default: its drafter's kind.",
            show_default=False,
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Output features without a drafter too, as distill.py needs.")
    ] = False,
    backend: Annotated[
        Backend,
        typer.Option(parser=backend_named, metavar=f"[{'|'.join(BACKENDS)}]", help="What executes the networks."),
    ] = OPENVINO,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help=f"Stored weights; default: {by_backend(lambda backend: backend.usual_precision)}.", show_default=False
        ),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            help="The target with our kernels as plugins, or of TensorRT's own layers; default: "
            f"{by_backend(lambda backend: next(iter(backend.forms), None))}.",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        bool,
        typer.Option("--alias", help="Declare to TensorRT that plugins update caches in place; it may copy for it."),
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="What build/calibrate.py wrote for the target, for --precision fp8.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    max_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; default: 2048 or the target's.")
    ] = None,
    max_tree: Annotated[int, typer.Option(min=1, help="Rows of a draft tree, root included.")] = 32,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Prompt rows in one step; default: {by_backend(lambda backend: backend.prefill_chunk)}, at most "
            "--max-len.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks that execute the target together, each a part of it.")
    ] = 1,
    bigrams: Annotated[
        Path | None,
        typer.Option(help="Token successors for the n-gram branch, from count_tokens.py; default: the drafter's own."),
    ] = None,
    drafter: Annotated[Path | None, setting("drafter")] = None,
    hot_vocabulary: Annotated[Path | None, setting("hot_vocabulary")] = None,
    construction: Annotated[str | None, setting("construction")] = None,
    beam_width: Annotated[int | None, setting("beam_width")] = None,
    beam_length: Annotated[int | None, setting("beam_length")] = None,
    candidates: Annotated[int | None, setting("candidates")] = None,
    levels: Annotated[str | None, setting("levels")] = None,
    support: Annotated[int | None, setting("support")] = None,
    tree_budget: Annotated[int | None, setting("tree_budget")] = None,
    ngram: Annotated[bool | None, setting("ngram", "--ngram/--no-ngram")] = None,
    verification: Annotated[str | None, setting("verification")] = None,
    token_info: Annotated[InfoForm | None, setting("token_info")] = None,
    resample_above: Annotated[int | None, setting("resample_above")] = None,
    skip_above: Annotated[int | None, setting("skip_above")] = None,
) -> None:
    """Export a target and its drafters, and compile them into an engine bundle.

    The bundle is written to a temporary folder and renamed: a failure leaves nothing, and an old bundle in place.
    """
    flags = {name: value for name, value in locals().items() if name in MethodSettings.model_fields}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        precision = precision or backend.usual_precision
        if precision not in backend.precisions:
            raise BundleError(f"--precision {precision}: {backend} takes {', '.join(backend.precisions)}")
        if form and form not in backend.forms:
            takes = ", ".join(backend.forms) or "none: only the TensorRT backends have one"
            raise BundleError(f"--form {form}: {backend} takes {takes}")
        form = form or next(iter(backend.forms), None)
        if alias and form != Form.plugin:
            raise BundleError("--alias: only plugins declare aliases: expected --backend tensorrt and --form plugin")
        if (calibration is not None) != (precision == Precision.fp8):
            wrong = f"--calibration {calibration}: expected only with --precision fp8, got {precision}"
            raise BundleError(wrong if calibration else "--precision fp8 needs --calibration, from build/calibrate.py")
        if methods and (given or no_drafter or method_name):
            others = ["--no-drafter"] * no_drafter + ["--method-name"] * bool(method_name)
            named = [*others, *(f"--{name.replace('_', '-')}" for name in given)]
            raise BundleError(f"--methods describes all methods: expected it without {', '.join(named)}")
        chosen = read_methods(methods) if methods else method_of_flags(given, no_drafter, method_name)
        if bigrams and not any(settings.info().ngram for settings in chosen.values()):
            raise BundleError(f"--bigrams {bigrams}: no method here has an n-gram branch that would read them")
        check_head_size("the target", TargetConfig.load(model).head_size, backend)
        require_memory(model, backend)
        inputs = built_from(sys.argv[1:])
        with step("load the target"):
            target = load_target(model, backend, any(settings.drafter for settings in chosen.values()))
        max_len = max_len or min(2048, target.config.max_position)
        config = BundleConfig(
            name=output.name,
            backend=backend,
            precision=precision,
            target=target_info(target),
            limits=LimitsInfo(
                slots=slots,
                max_len=max_len,
                max_tree=max_tree,
                prefill_chunk=prefill_chunk or min(backend.prefill_chunk, max_len),
            ),
            methods={name: settings.info() for name, settings in chosen.items()},
            tensor_parallel=tensor_parallel,
            shards=shard_infos(target, tensor_parallel),
            form=form,
            alias=alias,
        )
        check(config, target)
        build(config, target, model, chosen, output, features, bigrams, calibration, inputs)
    except (BundleError, UnsupportedModelError, FileNotFoundError, KeyError, ValueError) as error:
        err.print(f"[red]build_engines:[/red] {escape(reason(error))}")
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        needs = what_builds(weight_bytes(model), backend)
        err.print(f"[red]build_engines:[/red] out of memory ({escape(first_line(error))}): {needs}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        err.print("build_engines: interrupted, nothing was written")
        raise typer.Exit(130) from None


def require_memory(model: Path, backend: Backend) -> None:
    """Say what a build takes. Raises MemoryError where this machine has less memory, since Linux ends such a process
    without a word; where other programs hold too much of it, says so. Raises ValueError for a damaged file."""
    weights = weight_bytes(model)
    needed, most = needed_to_build(weights, backend), most_bytes()
    if needed > most:
        raise MemoryError(f"foreseen, with {most / 1e9:.2f} GB in all")
    time = f"about {duration(backend.build_seconds * weights)} of a core, " if backend.build_seconds else ""
    err.print(f"build_engines: {time}{size(needed)} of memory and {size(1.1 * weights)} of disk at least")
    if needed > host_bytes():
        err.print(f"build_engines: if it is killed, memory ran out: {what_builds(weights, backend)}")


def load_target(model: Path, backend: Backend, drafts: bool) -> Target:
    """A model folder's target: in float32 where the backend needs it, else as it is stored, in half the memory.
    Embedding and head are in float32 too where there is a drafter, since drafters share them and are in float32."""
    if backend.loads_fp32:
        return Target.from_folder(model)
    target = Target.from_folder(model, None)
    if drafts:
        target.embedding.float()
        target.lm_head.float()
    return target


def weight_bytes(model: Path) -> int:
    """Size of a target's weights, at 16 bits a number. Raises ValueError for a damaged file."""
    return 2 * count_numbers(model)


def method_of_flags(given: dict[str, Any], no_drafter: bool, name: str | None) -> dict[str, MethodSettings]:
    """The one method that flags describe, or none. Raises BundleError or ValueError."""
    if ("drafter" in given) == no_drafter:
        raise BundleError("give one of --drafter FOLDER, --methods FILE and --no-drafter")
    settings = MethodSettings(**given)
    if settings.way is None:
        if name:
            raise BundleError(f"--method-name {name}: expected {SOURCES} too")
        return {}
    usual = kind_of(settings.drafter) if settings.drafter else NGRAM_TRIE if settings.retrieves else NGRAM
    return {name or usual: settings}


def reason(error: Exception) -> str:
    """What is wrong, in a line."""
    if isinstance(error, ValidationError):
        return describe(error)
    return str(error.args[0] if isinstance(error, KeyError) else error)


def first_line(error: Exception) -> str:
    """The first line of its message, or else its name."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def target_info(target: Target) -> TargetInfo:
    """What the run time needs to know of a target."""
    fields = {name: getattr(target.config, name) for name in TargetInfo.model_fields}
    return TargetInfo(**fields)


def shard_infos(target: Target, ranks: int) -> tuple[ShardInfo, ...]:
    """What the run time needs to know of each of several ranks. Raises ValueError for more than KV groups."""
    if ranks == 1:
        return ()
    plan = plan_shards(target.config, ranks)
    return tuple(ShardInfo(num_kv_heads=len(s.kv_heads), vocab_size=len(s.vocabulary)) for s in plan)


def check(config: BundleConfig, target: Target) -> None:
    """Refuse limits and methods that cannot work. Raises BundleError or ValueError."""
    if config.limits.max_len > target.config.max_position:
        raise BundleError(
            f"--max-len {config.limits.max_len}: the target's context has {target.config.max_position} positions"
        )
    for name, method in config.methods.items():
        try:
            check_method(name, method, config)
        except (BundleError, ValueError) as error:
            raise BundleError(f"{name}: {error}" if len(config.methods) > 1 else str(error)) from None


def check_head_size(whose: str, size: int, backend: Backend) -> None:
    """Refuse heads that the backend's operators do not take. Raises BundleError."""
    if size % (step := backend.head_step):
        raise BundleError(
            f"{whose} has heads of size {size}, {backend} takes multiples of {step} ({step}, {2 * step}, "
            f"{3 * step}, ...); --backend {TORCH} takes any even size on the CPU"
        )


def check_caches(config: BundleConfig) -> None:
    """Refuse caches whose slots would break the backend's alignment. Raises BundleError."""
    limits = config.limits
    if sizes := unaligned_caches(config, limits.max_len):
        lengths = range(limits.max_len - 1, 1, -1)
        fitting = next((length for length in lengths if not unaligned_caches(config, length)), None)
        remedy = f"--max-len {fitting} is the nearest smaller that works" if fitting else "choose another --max-tree"
        raise BundleError(
            f"--max-len {limits.max_len}: a slot's cache would take {sizes[0]} bytes, and {config.backend} needs a "
            f"multiple of {config.backend.cache_alignment}; {remedy}"
        )


def build(
    config: BundleConfig,
    target: Target,
    model: Path,
    chosen: dict[str, MethodSettings],
    output: Path,
    features: bool = False,
    bigrams: Path | None = None,
    calibration: Path | None = None,
    inputs: BuiltFrom | None = None,
) -> None:
    """Write the bundle of methods with these settings. The target gives features where there is a drafter, and
    with `features`. The manifest says what it was built from. Raises BundleError, FileNotFoundError or ValueError."""
    fingerprint = target_fingerprint(target)
    if calibration:
        Calibration.load(calibration).check(target, fingerprint, calibration)
    loops: Loops = {}
    shared: dict[tuple[object, ...], Drafting] = {}
    drafters: dict[tuple[Path, Path | None], Drafter] = {}
    methods = dict(config.methods)
    with step("load the drafters"):
        for name, settings in chosen.items():
            if settings.drafter:
                source = settings.drafter, settings.hot_vocabulary
                if source not in drafters:
                    drafters[source] = load_draft_source(*source, target, model, fingerprint)
                methods[name], loop = drafting_loop(drafters[source], methods[name], config, settings.token_info)
                network = *source, settings.token_info, methods[name].chain_levels, *shape_of(loop)
                loops[name] = shared.setdefault(network, loop)
    own = [path for path in (drafter / BIGRAMS_FILE_NAME for drafter, _ in drafters) if path.is_file()]
    successors = bigrams or next(iter(own), None)
    if successors and (shape := np.load(successors, mmap_mode="r").shape) != (target.config.vocab_size,):
        raise BundleError(f"{successors} has shape {shape}, expected a successor of each of {target.config.vocab_size}")
    config, token_info = config.model_copy(update={"methods": methods}), 0
    for name, loop in loops.items():
        if info := getattr(loop.drafter, "info", None):
            size = info_bytes(info, config)
            token_info += size * (2 if methods[name].chain_levels and not config.backend.shares_weights else 1)
            err.print(f"  token info of {name}: {size / 1e6:.1f} MB, {loop.drafter.info_form}")
    check_caches(config)
    for name, method in methods.items():
        if method.context:
            check_head_size(name, method.context.head_size, config.backend)
    drafter_weights = sum(weight.numel() for drafter in drafters.values() for weight in drafter.parameters())
    target_weights = sum(weight.numel() for weight in target.parameters())
    if config.tensor_parallel > 1:
        target_weights += config.tensor_parallel * target.embedding.weight.numel()
    each = BYTES_PER_WEIGHT[config.precision]
    of_drafters = max(each, 2) if config.backend.native_drafters else each
    stored = target_weights * each + drafter_weights * of_drafters + token_info
    with new_bundle(output, int(stored * config.backend.disk_copies) + 20_000_000) as folder:
        if calibration:
            shutil.copy2(calibration, folder / CALIBRATION)
        write = resolve_name(config.backend.writer)
        versions = write(config, target, loops, folder, features or bool(loops))
        with step("write the manifest"):
            copy_tokenizer(model, folder)
            if successors:
                shutil.copy2(successors, folder / BIGRAMS_FILE_NAME)
            versions |= {"torch": torch.__version__, "python": platform.python_version()}
            command = shlex.join(["python", "build/build_engines.py", *sys.argv[1:]])
            finish_bundle(folder, config, versions, fingerprint, command, inputs)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    err.print(f"[green]{output}[/green]: {config.backend} {config.precision}, {size / 1e6:.0f} MB")


def info_bytes(info: TokenInfoTable | TokenInfoFactors, config: BundleConfig) -> int:
    """Bytes of token info in a drafter's network, where factors are weights like others."""
    if config.backend.native_drafters:
        width = WIDTH.get(config.precision, 2)
        return sum(x.numel() * (width if x.is_floating_point() else x.element_size()) for x in info.buffers())
    if isinstance(info, TokenInfoTable):
        return info.nbytes
    width = WIDTH[config.precision] if config.backend == TORCH else 4 if config.precision == "fp32" else 1
    return sum(factor.numel() * width for factor in info.buffers())


if __name__ == "__main__":
    typer.run(main)
