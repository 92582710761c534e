"""The options of the load test: its command line, and what of it is checked before anything is sent."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from redraft.home import HOME, PROMPTS
from redraft.loadtest.clients.connect import MODEL, PORTS
from redraft.loadtest.intervals import T95
from redraft.loadtest.metrics import METRICS, parse_slo
from redraft.loadtest.results import FULL
from redraft.loadtest.workload import ARRIVALS, arrival_times
from redraft.request import AUTO_REGRESSIVE

TABLE2_RATES, TABLE2_TEMPERATURE = [0.1, 0.5, 1.0], 1.0
TABLE2_PLANS = ({"construction": "beam", "beam_width": 6, "beam_length": 5}, {"levels": [6] * 5})
"""Beams as in the paper, and random draws of the same width and length, whose rejection is lossless."""
AT_LEAST = {"num_prompts": 1, "max_tokens": 1, "max_concurrency": 1, "runs": 1, "seconds": 0, "ramp": 0}
AT_LEAST |= {"shared_prefix": 0, "prompt_tokens": 0}


@dataclass
class Options:
    """What is asked of a load test; the annotations are its command line."""

    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Engine bundle, or a model's folder, for tokenizer and chat template; default: the served bundle.",
        ),
    ] = None
    protocol: Annotated[str, typer.Option(help=f"Triton's gRPC or HTTP, or /v1: {', '.join(PORTS)}.")] = "grpc"
    url: Annotated[str | None, typer.Option(help="Address of the server; default: the running service.")] = None
    metrics_url: Annotated[
        str | None,
        typer.Option(help="Metrics page of the server, for acceptance; '': none. Default: the running service's."),
    ] = None
    model_name: Annotated[
        str | None, typer.Option(help=f"Name of the model at --url; default: {MODEL}, over openai the first one.")
    ] = None
    worker: Annotated[
        str | None, typer.Option(metavar="SOCKET", help="Measure the engine worker at this socket; default: a server.")
    ] = None
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A method of the bundle, or auto_regressive; default: its first."),
    ] = None

    request_rate: Annotated[
        list[float], typer.Option(help="Requests per second; inf: all at once, or as --max-concurrency lets them.")
    ] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    num_prompts: Annotated[int, typer.Option(help="Requests per rate, at least.")] = FULL["num_prompts"]
    seconds: Annotated[float, typer.Option(help="Seconds per rate, at least.")] = FULL["seconds"]
    ramp: Annotated[float, typer.Option(help="Seconds before the steady window, whose requests come on top.")] = 5.0
    runs: Annotated[int, typer.Option(help="Runs per rate, each with a seed of its own.")] = FULL["runs"]
    find_saturation: Annotated[
        bool, typer.Option("--find-saturation", help="Raise the rate until the answers no longer follow it, then end.")
    ] = False
    of_saturation: Annotated[
        list[float],
        typer.Option(help="Shares of the rate at which --baseline-url saturates; default: --request-rate."),
    ] = field(default_factory=list)
    arrival: Annotated[str, typer.Option(help=f"How requests arrive: {', '.join(ARRIVALS)}.")] = "poisson"
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps' gamma distribution; 1 is Poisson.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(help="Conversations in flight at most; default: no limit.")] = (
        None
    )
    warm_up: Annotated[int, typer.Option(help="Requests before the first rate, which are not counted.")] = 3

    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Prompts: JSON, text lines, CSV or Parquet; default: some that come with redraft.",
            show_default=False,
        ),
    ] = PROMPTS
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Field or column of --prompts that holds them; default: a usual one, such as `prompt`."
        ),
    ] = None
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template, or send prompts as they are.")] = True
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="Send all turns of each prompt, each after the answer before it.")
    ] = False
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens of a system prompt that all requests begin with; 0: none.")
    ] = 0
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens that each first prompt is lengthened to; 0: as they are.")
    ] = 0
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy decoding.")] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(help="Probability that the sampled tokens add up to, with --temperature; default: 1, all."),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Tokens to sample from, the most likely ones, with --temperature; default: all.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the arrivals, the prompts' order and the sampling.")] = 0
    table2: Annotated[
        bool, typer.Option("--table2", help="ReDrafter's Table 2: rates 0.1 0.5 1, temperature 1, draft 6 x 5.")
    ] = False

    percentile_metrics: Annotated[str, typer.Option(help="Metrics whose percentiles the table shows.")] = (
        "ttft,tpot,itl,e2el"
    )
    goodput: Annotated[
        list[str],
        typer.Option(
            metavar="METRIC:MS", help="Limits on ttft, tpot, e2el, in ms, for goodput; default: it is not counted."
        ),
    ] = field(default_factory=list)
    label: Annotated[str, typer.Option(help="Name of this run in tables and plots.")] = "run"
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the results; earlier ones in it are removed. Default: REDRAFT_HOME/loadtest/NAME, of the "
            "bundle or model.",
        ),
    ] = None
    baseline: Annotated[
        Path | None, typer.Option(help="Results of an auto-regressive run to compare with; default: none.")
    ] = None
    baseline_url: Annotated[
        str | None,
        typer.Option(
            help="Server, maybe the same, to measure auto-regressive decoding at, into --baseline; default: none."
        ),
    ] = None
    baseline_metrics_url: Annotated[str, typer.Option(help="Metrics page of --baseline-url; default: none.")] = ""

    plan: Any = field(default=None, init=False)
    """The method's plan, where --bundle is one."""
    served_before: bool = field(default=False, init=False)

    @property
    def folder(self) -> Path:
        """Engine bundle or model with the tokenizer. Raises ValueError without --bundle."""
        if self.bundle is None:
            raise ValueError(
                "--url and --worker need --bundle: the folder of the bundle that is served there, or of its model"
            )
        return self.bundle

    @property
    def results(self) -> Path:
        """Folder of the results: --output, or one of the bundle's name, so that another bundle's results stay."""
        return self.output or HOME / "loadtest" / self.folder.resolve().name

    @property
    def metrics(self) -> list[str]:
        """The metrics whose percentiles the table shows."""
        return [name for name in self.percentile_metrics.split(",") if name]


def command(run: Callable[..., int]) -> Callable[..., None]:
    """A function for typer with a parameter for each option, and those of `run` after its first, which takes them."""
    hints = get_type_hints(Options, include_extras=True)
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default if option.default_factory is MISSING else option.default_factory(),
            annotation=hints[option.name],
        )
        for option in fields(Options)
        if option.init
    ]
    names = {parameter.name for parameter in parameters}
    more = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

    def main(**values: Any) -> None:
        options = Options(**{name: values.pop(name) for name in names})
        if status := run(options, **values):
            raise typer.Exit(status)

    signature = inspect.Signature([*parameters, *(each.replace(kind=each.KEYWORD_ONLY) for each in more)])
    main.__signature__ = signature  # type: ignore[attr-defined]
    main.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    main.__doc__ = run.__doc__
    return main


def check(args: Options) -> dict[str, float]:
    """Settle presets and check the others; the service level objective. Raises ValueError."""
    if args.table2:
        args.request_rate, args.temperature = TABLE2_RATES, TABLE2_TEMPERATURE
        plan = bundle_plan(args.folder, args.method).get("plan")
        if plan and not any(wanted.items() <= plan.items() for wanted in TABLE2_PLANS):
            either = " or ".join(map(str, TABLE2_PLANS))
            raise ValueError(f"--table2 needs a method with {either}, or none, got {plan}")
    if args.protocol not in PORTS:
        raise ValueError(f"--protocol {args.protocol}: expected one of {', '.join(PORTS)}")
    if args.arrival not in ARRIVALS:
        raise ValueError(f"--arrival {args.arrival}: expected one of {', '.join(ARRIVALS)}")
    for name in ("metrics_url", "baseline_metrics_url"):
        if (page := getattr(args, name)) and not page.startswith(("http://", "https://")):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: expected a page's address such as http://127.0.0.1:8002/metrics, got {page}")
    if args.baseline_url and not args.baseline:
        raise ValueError("--baseline-url needs --baseline: the folder for that server's results")
    if args.of_saturation and not args.baseline_url:
        raise ValueError(
            "--of-saturation needs --baseline-url and --baseline: its shares are of that server's saturation"
        )
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
    if args.runs > len(T95) + 1:
        raise ValueError(f"--runs: expected at most {len(T95) + 1}, got {args.runs}")
    if any(not 0 < share < float("inf") for share in args.of_saturation):
        raise ValueError(f"--of-saturation: expected numbers above 0, got {args.of_saturation}")
    if args.find_saturation and not args.request_rate[0] < float("inf"):
        raise ValueError("--find-saturation: expected a finite first --request-rate to begin with, got inf")
    for rate in args.request_rate:
        arrival_times(rate, 1, args.arrival, args.burstiness)
    if not args.chat and (args.multi_turn or args.shared_prefix or args.prompt_tokens):
        raise ValueError(
            "--multi-turn, --shared-prefix and --prompt-tokens need the chat template: leave --no-chat out"
        )
    if unknown := set(args.metrics) - set(METRICS):
        raise ValueError(f"--percentile-metrics: expected some of {', '.join(METRICS)}, got {', '.join(unknown)}")
    _check_lengths(args)
    return parse_slo(args.goodput)


def _check_lengths(args: Options) -> None:
    """Prompts and answers must have room in the bundle's context, where the folder says how long that is."""
    if args.prompt_tokens and args.shared_prefix >= args.prompt_tokens:
        raise ValueError(
            f"--shared-prefix: expected less than --prompt-tokens {args.prompt_tokens}, got {args.shared_prefix}"
        )
    context = _config(args.folder).get("limits", {}).get("max_len")
    name, tokens = max(
        ("--shared-prefix", args.shared_prefix), ("--prompt-tokens", args.prompt_tokens), key=lambda f: f[1]
    )
    if context is not None and tokens and tokens + args.max_tokens > context:
        raise ValueError(
            f"{name}: expected at most {context - args.max_tokens}, got {tokens}: {args.folder} holds {context} "
            f"tokens of a sequence and --max-tokens is {args.max_tokens}; a larger --max-len holds more"
        )


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of an engine bundle; empty for a mere model folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config if "precision" in config else {}


def bundle_plan(folder: Path, method: str | None) -> dict[str, Any]:
    """Name and precision of an engine bundle, and the plan of one of its methods (None: its first); empty for a mere
    model folder. Raises ValueError for a method that the bundle lacks."""
    config = _config(folder)
    if not config:
        return {}
    methods = config["methods"]
    name = method or next(iter(methods), AUTO_REGRESSIVE)
    if name not in (*methods, AUTO_REGRESSIVE):
        raise ValueError(f"--method: expected one of {', '.join((*methods, AUTO_REGRESSIVE))}, got {name!r}")
    return {key: config[key] for key in ("name", "precision")} | {"method": name, "plan": methods.get(name)}
