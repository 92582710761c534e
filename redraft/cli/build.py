"""`redraft build`: a target and its drafters to an engine bundle."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape

from redraft import errors
from redraft.bundle.backends import BACKENDS, OPENVINO, Backend, Form, Precision, check_precision
from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.bundle.manifest import check_cpu
from redraft.bundle.method import MethodFields
from redraft.cli.bundles import as_arguments, complete, needs_build, say_built
from redraft.cli.options import BACKEND_NAMES, ModelOption, backend_named
from redraft.compiler.built_from import built_from
from redraft.compiler.bundle import (
    build,
    check,
    check_head_size,
    load_target,
    require_gpu,
    require_memory,
    shard_infos,
    target_info,
    unknown_tokens,
    weight_bytes,
    with_usual_context,
)
from redraft.compiler.feature_scales import calibration_texts
from redraft.compiler.methods import (
    NGRAM,
    SOURCES,
    MethodSettings,
    drafter_kind,
    read_methods,
)
from redraft.console.interrupt import interruptible
from redraft.console.output import err
from redraft.console.progress import step
from redraft.engines.memory import (
    is_out_of_memory,
    what_builds,
)
from redraft.errors import BundleError
from redraft.home import DEFAULT_MODEL
from redraft.model_defs.drafters.eagle3 import parse_layers
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.request import describe

USUAL_MAX_LEN = 2048
"""Tokens of a sequence where a longer context is not known to fit"""


def by_backend(value: Callable[[Backend], object]) -> str:
    """The backends' values, for help: bf16 (openvino, torch, tensorrt), fp16 (tensorrt_rtx)."""
    names_of: dict[object, list[str]] = {}
    for name, backend in BACKENDS.items():
        names_of.setdefault(value(backend), []).append(name)
    return ", ".join(f"{usual} ({', '.join(names)})" for usual, names in names_of.items() if usual is not None)


def with_method_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of a method's settings. It gets those that were given as `given`."""
    more = [name for name in MethodSettings.model_fields if name not in MethodFields.model_fields]

    @wraps(command)
    def run(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in (*more, *MethodFields.model_fields)}
        command(**arguments, given={name: value for name, value in flags.items() if value is not None})

    signature = inspect.signature(command, eval_str=True)
    before = [parameter for name, parameter in signature.parameters.items() if name != "given"]
    parameters = [*before, *map(method_flag, (*more, *MethodFields.model_fields))]
    # typer reads a command's options off its signature and annotations
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def method_flag(name: str) -> inspect.Parameter:
    """The option of a field of a method's settings. Not given, it leaves the field's default."""
    field = MethodSettings.model_fields[name]
    kind, text = field.annotation, field.description or ""
    usual = "" if field.default is None or "efault" in text else f" [default: {field.default}]"
    names = [f"--{name}/--no-{name}"] if kind is bool else []
    metavar = "FOLDER" if kind == Path | None else None
    option = typer.Option(*names, metavar=metavar, help=f"{text}{usual}", show_default=False)
    value: Any = str if name == "levels" else kind
    annotation: Any = Annotated[value | None, option]  # type: ignore[operator]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@with_method_flags
@interruptible("redraft build", "nothing was written")
def main(
    context: typer.Context,
    model: ModelOption = Path(DEFAULT_MODEL),
    output: Annotated[
        Path | None,
        typer.Option(
            help="The bundle's folder; default: one under REDRAFT_HOME/engines that is named after the model, its "
            "drafter and the precision."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a bundle of other settings in a folder named by --output.")
    ] = False,
    no_drafter: Annotated[
        bool,
        typer.Option("--no-drafter", help="No drafter: an auto-regressive bundle, or one with the n-gram branch only."),
    ] = False,
    methods: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with a table for each of several methods: the settings that are options from --drafter on. "
            "Default: one method, of these options.",
        ),
    ] = None,
    method_name: Annotated[
        str | None,
        typer.Option(
            help="What requests call the method that the flags describe; default: its drafter's kind.",
            show_default=False,
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Output features without a drafter too, as redraft distill needs.")
    ] = False,
    target_layers: Annotated[
        str | None,
        typer.Option(
            help="With --features: what enters these layers of the target too, numbers with + between them or `usual`, "
            "for teacher data of drafters eagle3. Default: none.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Backend,
        typer.Option(parser=backend_named, metavar=BACKEND_NAMES, help="What executes the networks."),
    ] = OPENVINO,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Stored weights; default: source (openvino) where the model is quantized, fp8 (torch) where it is in "
            "fp8, else "
            f"{by_backend(lambda backend: backend.usual_precision)}.",
            show_default=False,
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
        Path | None,
        typer.Option(
            help="What redraft calibrate wrote for the target, for --precision fp8 of TensorRT; default: its usual "
            "file."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 16,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a sequence; default: the target's context, or what memory holds; for a GPU, 2048."
        ),
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
    tp: Annotated[int, typer.Option(min=1, help="Ranks that execute the target together, each a part of it.")] = 1,
    bigrams: Annotated[
        Path | None,
        typer.Option(help="A .npy file of each token's successor, for the n-gram branch; default: the drafter's own."),
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Export a target and its drafters, and compile them into an engine bundle.

    A bundle that was built from the same options, files and code is kept. Without --drafter, --methods and --no-drafter
    the model's own drafter is used, or else n-grams. The bundle is written to a temporary folder
    and renamed: a failure leaves nothing, and an old bundle in place.
    """
    try:
        options = complete(given_options(context))
        # What was left out, and follows from the rest.
        given |= {"drafter": options["--drafter"]} if "--drafter" in options else {}
        given |= {"ngram": True} if "--ngram" in options else {}
        folder, no_drafter = Path(options["--output"]), "--no-drafter" in options
        precision = Precision(options["--precision"])
        calibration = Path(options["--calibration"]) if "--calibration" in options else None
        check_precision(backend, precision)
        check_cpu(backend)
        if form and form not in backend.forms:
            takes = ", ".join(backend.forms) or "none: only the TensorRT backends have one"
            raise BundleError(f"--form {form}: {backend} takes {takes}")
        form = form or next(iter(backend.forms), None)
        if alias and form != Form.plugin:
            raise BundleError("--alias: only plugins declare aliases: expected --backend tensorrt and --form plugin")
        if (calibration is not None) != (precision in backend.calibrated):
            wrong = f"--calibration {calibration}: expected only with --precision fp8 of TensorRT"
            needed = f"--precision {precision} needs --calibration, from redraft calibrate"
            raise BundleError(wrong if calibration else needed)
        if methods and (given or no_drafter or method_name):
            others = ["--no-drafter"] * no_drafter + ["--method-name"] * bool(method_name)
            named = [*others, *(f"--{name.replace('_', '-')}" for name in given)]
            raise BundleError(f"--methods describes all methods: expected it without {', '.join(named)}")
        chosen = read_methods(methods) if methods else method_of_flags(given, no_drafter, method_name)
        if target_layers and (chosen or not features):
            raise BundleError(f"--target-layers {target_layers}: expected with --features, and without a drafter")
        if bigrams and not any(settings.config().ngram for settings in chosen.values()):
            raise BundleError(f"--bigrams {bigrams}: no method here has an n-gram branch that would read them")
        if not needs_build(options, named=output is not None and not replace):
            say_built(options)
            return
        target_config = TargetConfig.load(model)
        check_head_size("the target", target_config.head_size, backend)
        require_gpu(backend, precision, say)
        require_memory(model, backend, precision, say)
        inputs = built_from(options)
        texts = calibration_texts(model, target_config) if precision in backend.scaled else []
        with step("load the target"):
            drafts = any(settings.drafter for settings in chosen.values())
            target = load_target(model, backend, precision, drafts, tp)
        layers = parse_layers(target_layers, target.config.num_layers) if target_layers else ()
        length = max_len or min(USUAL_MAX_LEN, target.config.max_position)
        config = BundleConfig(
            name=folder.name,
            backend=backend,
            precision=precision,
            target=target_info(target, unknown_tokens(model, target)),
            limits=LimitsInfo(
                slots=slots,
                max_len=length,
                max_tree=max_tree,
                prefill_chunk=prefill_chunk or min(backend.prefill_chunk, length),
            ),
            methods={name: settings.config() for name, settings in chosen.items()},
            tensor_parallel=tp,
            shards=shard_infos(target, tp),
            form=form,
            alias=alias,
        )
        if max_len is None:
            config = with_usual_context(config, target, say)
        check(config, target)
        command = shlex.join(["redraft", "build", *as_arguments(options)])
        build(config, target, model, chosen, folder, features, bigrams, calibration, inputs, command, layers, texts)
    except (BundleError, UnsupportedModelError, OSError, KeyError, ValueError) as error:
        err.print(f"[red]redraft build:[/red] {escape(reason(error))}")
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        built = precision or backend.usual_precision
        needs = what_builds(weight_bytes(model, built), backend, built)
        err.print(f"[red]redraft build:[/red] out of memory ({escape(first_line(error))}): {needs}")
        raise typer.Exit(1) from None


def given_options(context: typer.Context) -> dict[str, str]:
    """The options that differ from their defaults, by name; "" for flags."""
    options = {}
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if value is True:
            options[param.opts[0]] = ""
        elif value is False and param.secondary_opts:
            options[param.secondary_opts[0]] = ""
        elif value is not None and value is not False and value != param.default:
            options[param.opts[0]] = str(value)
    return options


def say(text: str) -> None:
    err.print(f"redraft build: {text}", markup=False)


def method_of_flags(given: dict[str, Any], no_drafter: bool, name: str | None) -> dict[str, MethodSettings]:
    """The one method that flags describe, or none. Raises BundleError or ValueError."""
    if ("drafter" in given) == no_drafter:
        raise BundleError("give one of --drafter FOLDER, --methods FILE and --no-drafter")
    settings = MethodSettings(**given)
    if settings.way is None:
        if name:
            raise BundleError(f"--method-name {name}: expected {SOURCES} too")
        return {}
    usual = drafter_kind(settings.drafter) if settings.drafter else NGRAM
    return {name or usual: settings}


def reason(error: Exception) -> str:
    """What is wrong, in a line."""
    if isinstance(error, ValidationError):
        return describe(error)
    return str(error.args[0]) if isinstance(error, KeyError) else errors.reason(error)


def first_line(error: Exception) -> str:
    """The first line of its message, or else its name."""
    return next(iter(str(error).splitlines()), type(error).__name__)
