"""An engine bundle from a target and drafters: what is checked first, how they are loaded, and what is written."""

from __future__ import annotations

import platform
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import numpy as np
import torch
from torch import nn

from redraft.bundle.backends import TORCH, Backend, Precision
from redraft.bundle.config import BundleConfig, LimitsInfo, ShardInfo, TargetInfo
from redraft.bundle.manifest import BuiltFrom
from redraft.bundle.writer import copy_tokenizer, finish_bundle, new_bundle
from redraft.compiler.calibration import Calibration
from redraft.compiler.draft_model import read_vocabulary
from redraft.compiler.feature_scales import scale_features
from redraft.compiler.methods import MethodSettings, Source, check_method, drafting_loop, load_draft_source
from redraft.compiler.writers.shared import CALIBRATION, Loops, shape_of
from redraft.console.output import err
from redraft.console.progress import duration, progress, size, step
from redraft.console.resources import host_bytes, most_bytes
from redraft.engines.cuda import device as gpu
from redraft.engines.memory import WIDTH, cache_bytes, needed_to_build, unaligned_caches, what_builds
from redraft.errors import BundleError
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.hub.readers import made_for
from redraft.model_defs.drafters.token_info import TokenInfoFactors, TokenInfoTable
from redraft.model_defs.export.drafter import Drafting
from redraft.model_defs.files import read_json
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import FeatureReader, Target, give_layers
from redraft.model_defs.target.shards import shards_of
from redraft.model_defs.weights.float8 import row_scales
from redraft.model_defs.weights.folder import count_numbers, files_with_weights
from redraft.runtime import BIGRAMS_FILE_NAME

RING_SPARE, RING_STEP = 256, 64
"""A ring has at least this many rows more than a window, and a multiple of this many: see the README of
`TreeAttention`."""
CACHE_SHARE, CONTEXT_STEP = 0.25, 1024
"""The part of the memory that caches may take where --max-len is not given, and the step of contexts then"""
BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1.1, "fp8": 1.1, "int4": 0.65, "source": 0.65}
"""What a bundle stores of a number; with `source` of a drafter's"""


def require_memory(model: Path, backend: Backend, precision: Precision, say: Callable[[str], None]) -> None:
    """Say what a build takes. Raises MemoryError where this machine has less memory, since Linux ends such a process
    without a word; where other programs hold too much of it, says so. Raises ValueError for a damaged file."""
    weights = weight_bytes(model, precision)
    needed, most = needed_to_build(weights, backend, precision), most_bytes()
    if needed > most:
        raise MemoryError(f"foreseen, with {most / 1e9:.2f} GB in all")
    time = f"about {duration(backend.build_seconds * weights)} of a core, " if backend.build_seconds else ""
    disk = weights if precision == Precision.source else weights * BYTES_PER_WEIGHT[precision] / 2
    say(f"{time}{size(needed)} of memory and {size(disk)} of disk at least")
    if needed > host_bytes():
        say(f"if it is killed, memory ran out: {what_builds(weights, backend, precision)}")


def require_gpu(backend: Backend, precision: Precision, say: Callable[[str], None]) -> None:
    """Refuse FP8 on `torch` where this machine's GPU is too old for it; without a GPU, say what it takes. Raises
    BundleError."""
    if backend != TORCH or precision != Precision.fp8:
        return
    if torch.cuda.is_available():
        remedy = "build with --precision bf16, or for another machine with an empty CUDA_VISIBLE_DEVICES"
        gpu.require_precision(gpu.device(), precision, remedy)
    else:
        oldest = ".".join(map(str, gpu.OLDEST_FOR[precision]))
        say(f"{precision} takes a GPU of compute capability {oldest} or later; on a CPU it is slow")


def load_target(model: Path, backend: Backend, precision: Precision, drafts: bool, ranks: int = 1) -> Target:
    """A model folder's target: in float32 where the backend or the precision needs it, else as it is stored, in half
    the memory; for `source` without what is stored in blocks. Embedding and head are in float32 too where there is a
    drafter, since drafters share them and are in float32. For several `ranks` matrices in FP8 are rounded again."""
    if precision == Precision.source:
        target = Target.from_folder(model, in_blocks=True, float_ends=drafts)
        if target.blocks and (widened := target.blocks.widened):
            say_some(widened, "no operator takes it as it is, so it is stored in bf16")
        return target
    if backend.loads_fp32 or precision == Precision.fp32:
        return Target.from_folder(model)
    target = Target.from_folder(model, None, beside_blocks=precision == Precision.int4)
    if backend == TORCH and precision == Precision.fp8:
        target.row_scales, rounded, floats = row_scales(model, target.config, ranks)
        for kinds, what in ((rounded, "rounded to E4M3 with a scale for each row"), (floats, "stays in bf16")):
            if kinds:
                say_some(kinds, what)
    if drafts:
        target.embedding.float()
        target.lm_head.float()
    return target


def say_some(kinds: Mapping[str, str], what: str) -> None:
    """Say what becomes of weights, of which `kinds` says how they are quantized; one is named."""
    name, kind = next(iter(kinds.items()))
    more = f" and {len(kinds) - 1} more" if len(kinds) > 1 else ""
    err.print(f"  {name}{more}, {kind}: {what}", markup=False)


def weight_bytes(model: Path, precision: Precision) -> int:
    """Size of a target's weights: for `source` that of its files, unless they are not all in blocks; else at 16 bits a
    number. Raises FileNotFoundError, or ValueError for a damaged file."""
    if precision == Precision.source and "quantization_config" in read_json(model / "config.json"):
        return sum(file.stat().st_size for file in files_with_weights(model))
    return 2 * count_numbers(model)


def stored_bytes(target: Target, precision: Precision, ranks: int) -> float:
    """Bytes of a target's weights in a bundle. What is in no block of its source is in bf16 beside those that are, and
    so are the embedding, experts and what the source spares beside products in FP8."""
    blocks = target.blocks if precision == Precision.source else None

    def size_of(name: str, numbers: int) -> float:
        if blocks and name in blocks:
            return blocks.nbytes(name)
        spared = name.startswith("embedding") or ".experts." in name or target.row_scales.get(name, 0) is None
        widened = blocks or (precision == Precision.fp8 and spared)
        return numbers * BYTES_PER_WEIGHT[Precision.bf16 if widened else precision]

    sizes = {name: size_of(name, weight.numel()) for name, weight in target.named_parameters()}
    copies = ranks - 1 + target.config.tie_embeddings if ranks > 1 else 0  # a rank's LM head is not its embedding
    return sum(sizes.values()) + copies * sizes["embedding.weight"]


def target_info(target: Target, unknown_tokens: tuple[tuple[int, int], ...] = ()) -> TargetInfo:
    """What the run time needs to know of a target."""
    names = TargetInfo.model_fields.keys() - {"feature_size", "unknown_tokens"}
    of_config = {name: getattr(target.config, name) for name in names}
    return TargetInfo(feature_size=target.feature_size, unknown_tokens=unknown_tokens, **of_config)


def unknown_tokens(model: Path, target: Target) -> tuple[tuple[int, int], ...]:
    """The ids below the target's vocabulary size that a model folder's tokenizer does not know, as ranges [first, end).
    An end token is not among them: a text could never end. Raises BundleError where there is no tokenizer."""
    ids = {*read_vocabulary(model).values(), *target.config.eos_token_ids}
    bounds = [-1, *sorted(token for token in ids if token < target.config.vocab_size), target.config.vocab_size]
    return tuple((before + 1, after) for before, after in pairwise(bounds) if before + 1 < after)


def window_limits(target: Target, config: BundleConfig) -> LimitsInfo:
    """The limits with `window` and `window_rows`, where that saves anything; TensorRT's native form has no rings.

    A slot's rows hold the longest window or a committed path before a step's first row, and the step's rows: nothing is
    written over that the step, or its commit, still reads.
    """
    limits = config.limits
    windows = [window for layer in target.config.windowed_layers if (window := target.config.window_of(layer))]
    if not windows or (config.backend.forms and not config.plugin_form):
        return limits
    before, step_rows = max(*windows, limits.max_tree), max(limits.prefill_chunk, limits.max_tree, RING_SPARE)
    rows = -(-(before + step_rows) // RING_STEP) * RING_STEP
    if rows >= limits.max_len + limits.max_tree:
        return limits
    return limits.model_copy(update={"window": max(windows), "window_rows": rows})


def with_usual_context(config: BundleConfig, target: Target, say: Callable[[str], None]) -> BundleConfig:
    """The configuration for the target's whole context, or for as much of it as CACHE_SHARE of the memory holds in all
    slots, which is said. One for a GPU that may not be here stays as it is."""
    if config.backend.needs_gpu:
        return config
    on_gpu = config.backend == TORCH and torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[1] if on_gpu else most_bytes()
    longest = target.config.max_position
    lengths = [*range(config.limits.max_len, longest, CONTEXT_STEP), longest]

    def of_length(length: int) -> BundleConfig:
        return config.model_copy(update={"limits": config.limits.model_copy(update={"max_len": length})})

    def bytes_of(length: int) -> int:
        sized = of_length(length)
        return cache_bytes(sized.model_copy(update={"limits": window_limits(target, sized)}))

    room = int(memory * CACHE_SHARE)
    length = lengths[max(bisect_right(lengths, room, key=bytes_of) - 1, 0)]
    part = "the target's" if length == longest else f"of the target's {longest:,}"
    cost = f"caches of {config.limits.slots} slots take up to {size(bytes_of(length))} of {size(memory)} of memory"
    say(f"contexts of {length:,} tokens, {part}: {cost}; --max-len chooses another")
    rope = target.config.rope
    if rope.type == "longrope" and length > rope.original_max_position:
        say(
            f"LongRoPE: all texts have the factors for long contexts; --max-len {rope.original_max_position} or less "
            "takes those for short ones"
        )
    return of_length(length)


def shard_infos(target: Target, ranks: int) -> tuple[ShardInfo, ...]:
    """What the run time needs to know of each of several ranks. Raises ValueError for more than KV groups, and where
    the source's blocks cannot be split so."""
    if ranks == 1:
        return ()
    plan = shards_of(target, ranks)
    return tuple(ShardInfo(num_kv_heads=len(s.kv_heads), vocab_size=len(s.vocabulary)) for s in plan)


def check(config: BundleConfig, target: Target) -> None:
    """Refuse limits and methods that cannot work. Raises BundleError or ValueError."""
    if config.limits.max_len > target.config.max_position:
        raise BundleError(
            f"--max-len {config.limits.max_len}: the target's context has {target.config.max_position} positions"
        )
    for name, method in config.methods.items():
        with naming(name, config):
            check_method(name, method, config)


@contextmanager
def naming(name: str, config: BundleConfig) -> Iterator[None]:
    """Where there are several methods, raises a BundleError with this one's name for a BundleError or ValueError."""
    try:
        yield
    except (BundleError, ValueError) as error:
        if len(config.methods) == 1:
            raise
        raise BundleError(f"{name}: {error}") from None


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
    command: str = "",
    layers: tuple[int, ...] = (),
    texts: Sequence[list[int]] = (),
) -> None:
    """Write the bundle of methods with these settings. The target gives features where there is a drafter, and
    with `features`; of a bundle without one they are the hidden states and, after them, what enters `layers`. With
    `texts` (token ids) its products are scaled by what their features are in these. The manifest says what it was built
    from and by which command. Raises BundleError, FileNotFoundError or ValueError."""
    fingerprint = target_fingerprint(target)
    if calibration:
        Calibration.load(calibration).check(target, fingerprint, calibration)
    loops: Loops = {}
    shared: dict[tuple[object, ...], Drafting] = {}
    drafters: dict[Source, Drafter] = {}
    methods = dict(config.methods)
    drafting = {name: settings for name, settings in chosen.items() if settings.drafter}
    most = config.limits.max_len
    with step("load the drafters"):
        for name, settings in drafting.items():
            settings.check_backend(config.backend)
            if (source := settings.source) not in drafters:
                drafters[source] = load_draft_source(*source, target, model, fingerprint)
                if form := methods[name].form:
                    err.print(f"  {settings.drafter}: {form}, drafts as {methods[name].drafter!r}")
                    if settings.drafter and (said := made_for(settings.drafter)):
                        err.print(f"  its config.json says that it was made for {said}")
        attach_features(target, list(drafters.values()), features, layers)
        for name, settings in drafting.items():
            drafter = drafters[settings.source]
            with naming(name, config):
                if (fitted := settings.fitted(methods[name], drafter.most_steps)) != methods[name]:
                    err.print(f"  {name}: drafts are {drafter.most_steps} deep, as deep as this drafter goes")
                methods[name], loop = drafting_loop(drafter, fitted, config, settings.token_info)
            if methods[name].context and (seen := cast(CacheTables, loop.drafter.tables).config.max_position) < most:
                err.print(f"  {name}: its drafter is made for contexts of {seen} positions, and --max-len is {most}:")
                err.print("  it may draft worse in longer ones, whose text stays right")
            network = *settings.source, settings.token_info, methods[name].chain_levels, *shape_of(loop)
            loops[name] = shared.setdefault(network, loop)
    bigram_files = [path for path in (drafter / BIGRAMS_FILE_NAME for drafter, *_ in drafters) if path.is_file()]
    successors = bigrams or next(iter(bigram_files), None)
    if successors:
        check_successors(successors, target.config.vocab_size)
    target_info = config.target.model_copy(update={"feature_size": target.feature_size})
    limits = window_limits(target, config)
    config, token_info = config.model_copy(update={"methods": methods, "target": target_info, "limits": limits}), 0
    for name, loop in loops.items():
        if info := getattr(loop.drafter, "info", None):
            size = info_bytes(info, config)
            token_info += size * (2 if methods[name].chain_levels and not config.backend.shares_weights else 1)
            err.print(f"  token info of {name}: {size / 1e6:.1f} MB, {loop.drafter.info_form}")
    check_caches(config)
    if config.backend.devices == ("cpu",):
        foresee_caches(config)
    for name, method in methods.items():
        if method.context:
            check_head_size(name, method.context.head_size, config.backend)
    drafter_weights = sum(weight.numel() for drafter in drafters.values() for weight in drafter.parameters())
    each = BYTES_PER_WEIGHT[config.precision]
    of_drafters = max(each, 2) if config.backend.native_drafters else each
    stored = stored_bytes(target, config.precision, config.tensor_parallel) + drafter_weights * of_drafters + token_info
    with new_bundle(output, int(stored * config.backend.disk_copies) + 20_000_000) as folder:
        if calibration:
            shutil.copy2(calibration, folder / CALIBRATION)
        if texts:
            with progress("  scale features", target.config.num_layers, "layers") as bar:
                scale_features(target, texts, bar.advance)
        write = resolve_name(config.backend.writer)
        versions = write(config, target, loops, folder, features or bool(loops))
        with step("write the manifest"):
            copy_tokenizer(model, folder)
            if successors:
                shutil.copy2(successors, folder / BIGRAMS_FILE_NAME)
            versions |= {"torch": torch.__version__, "python": platform.python_version()}
            finish_bundle(folder, config, versions, fingerprint, command, inputs)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    err.print(f"[green]{output}[/green]: {config.backend} {config.precision}, {size / 1e6:.0f} MB")


def check_successors(path: Path, count: int) -> None:
    """Raises BundleError unless a file holds a successor of each of so many tokens."""
    try:
        shape = np.load(path, mmap_mode="r").shape
    except (OSError, ValueError, EOFError):
        raise BundleError(f"{path} is not a .npy file of bigrams, or damaged") from None
    if shape != (count,):
        raise BundleError(f"{path} has shape {shape}, expected a successor of each of {count}")


def foresee_caches(config: BundleConfig) -> None:
    """Say so where the caches, which fill as requests come, are more than this machine's memory: Linux ends such a
    process without a word."""
    if (caches := cache_bytes(config)) > (most := most_bytes()):
        need = f"the caches take up to {size(caches)}, and this machine has {size(most)} of memory"
        err.print(f"  {need}; build with fewer --slots or a smaller --max-len to serve it here")


def attach_features(target: Target, drafters: Sequence[Drafter], features: bool, layers: tuple[int, ...] = ()) -> None:
    """Have the target give what the drafters read, side by side, and tell each its columns. Hidden states come first,
    where a drafter reads them or `features` asks for them. `layers` are asked for only without a drafter."""
    target.feature_readers = nn.ModuleList()
    if layers:
        give_layers(target, layers)
        return
    deep = [drafter for drafter in drafters if drafter.feature_layers]
    if not deep:
        return
    size, hidden = target.config.hidden_size, features or len(deep) < len(drafters)
    readers = [*([FeatureReader(size)] if hidden else []), *(drafter.feature_reader() for drafter in deep)]
    for index, drafter in enumerate(deep, int(hidden)):
        drafter.feature_at = index * size
    for drafter in drafters:
        drafter.feature_size = len(readers) * size
    target.feature_readers = nn.ModuleList(readers).to(target.norm.weight.dtype).requires_grad_(False)


def info_bytes(info: TokenInfoTable | TokenInfoFactors, config: BundleConfig) -> int:
    """Bytes of token info in a drafter's network, where factors are weights like others."""
    if config.backend.native_drafters:
        width = WIDTH.get(config.precision, 2)
        return sum(x.numel() * (width if x.is_floating_point() else x.element_size()) for x in info.buffers())
    if isinstance(info, TokenInfoTable):
        return info.nbytes
    width = WIDTH.get(config.precision, 2) if config.backend == TORCH else 4 if config.precision == "fp32" else 1
    return sum(factor.numel() * width for factor in info.buffers())
