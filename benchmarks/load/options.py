"""The command line of the load test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.figures.intervals import T95
from benchmarks.figures.results import FULL
from benchmarks.load.clients.connect import MODEL, PORTS
from benchmarks.load.metrics import METRICS, parse_slo
from benchmarks.load.workload import ARRIVALS, arrival_times
from redraft.request import AUTO_REGRESSIVE

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
TABLE2 = {"request_rate": [0.1, 0.5, 1.0], "temperature": 1.0}
TABLE2_PLANS = ({"construction": "beam", "beam_width": 6, "beam_length": 5}, {"levels": [6] * 5})
"""Beams as in the paper, and random draws of the same width and length, whose rejection is lossless."""
AT_LEAST = {"num_prompts": 1, "max_tokens": 1, "max_concurrency": 1, "runs": 1, "seconds": 0, "ramp": 0}
AT_LEAST |= {"shared_prefix": 0, "prompt_tokens": 0}


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="loadtest", description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = p.add_argument_group("server").add_argument
    add("--protocol", choices=PORTS, default="grpc", help="Triton's gRPC or HTTP streams, or /v1 (default: grpc)")
    add(
        "--url",
        help="address of the server (default: 127.0.0.1 and the port that `redraft serve` has for the protocol)",
    )
    add("--metrics-url", default="http://127.0.0.1:8002/metrics", help="its metrics page, for acceptance; '' for none")
    add("--model", help=f"model (default: {MODEL}; with openai the server's first)")
    add("--worker", metavar="SOCKET", help="talk to the engine worker at this socket instead")
    add("--method", help="one of the bundle's methods of drafting, or auto_regressive (default: its first)")
    add("--tokenizer", type=Path, required=True, help="engine bundle or model folder: tokenizer and chat template")

    add = p.add_argument_group("load").add_argument
    rates = "requests per second; inf: all at once, or as --max-concurrency lets them"
    add("--request-rate", type=float, nargs="+", default=[1.0], metavar="R", help=rates)
    add("--num-prompts", type=int, default=FULL["num_prompts"], help="requests per rate, at least (%(default)s)")
    add("--seconds", type=float, default=FULL["seconds"], help="seconds per rate, at least (%(default)s)")
    add("--ramp", type=float, default=5.0, help="seconds before the steady window, whose requests come on top (5)")
    add("--runs", type=int, default=FULL["runs"], help="runs per rate, each with a seed of its own (%(default)s)")
    add("--find-saturation", action="store_true", help="raise the rate until the answers no longer follow it, then end")
    of = "load with these shares of the rate at which --baseline-url saturates, instead of --request-rate"
    add("--of-saturation", type=float, nargs="+", default=[], metavar="SHARE", help=of)
    add("--arrival", choices=ARRIVALS, default="poisson")
    add("--burstiness", type=float, default=1.0, help="shape of the gaps' gamma distribution; 1 is Poisson")
    add("--max-concurrency", type=int, help="most conversations in flight")
    add("--warmup", type=int, default=3, help="requests before the first rate that do not count")

    add = p.add_argument_group("requests").add_argument
    add("--dataset", type=Path, default=PROMPTS, help="prompts: JSON, text lines, CSV or Parquet (default: shipped)")
    add("--column", help="field or column of --dataset that holds the prompts")
    add("--no-chat-template", action="store_true", help="send prompts as they are")
    add(
        "--multi-turn",
        action="store_true",
        help="send all turns of each prompt, each after the answer to the one before",
    )
    add(
        "--shared-prefix", type=int, default=0, metavar="TOKENS", help="begin all with one system prompt of this length"
    )
    add("--prompt-tokens", type=int, default=0, metavar="TOKENS", help="lengthen each first prompt to this length")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--seed", type=int, default=0, help="of arrivals, prompt order and (plus the request's number) sampling")
    add("--table2", action="store_true", help="ReDrafter's Table 2: rates 0.1 0.5 1, temperature 1, draft 6 x 5")

    add = p.add_argument_group("results").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics whose percentiles the table shows")
    add("--goodput", "--slo", nargs="+", default=[], metavar="METRIC:MS", help="limits on ttft, tpot, e2el")
    add("--label", default="run", help="name of this run in tables and plots")
    add("--result-dir", type=Path, default=Path("artifacts/loadtest/run"), help="earlier runs in it are replaced")
    add("--baseline", type=Path, help="result folder of an auto-regressive run to compare with")
    baseline = "address of a server (or the same): measure auto-regressive decoding there, into --baseline"
    add("--baseline-url", help=baseline)
    add("--baseline-metrics-url", default="", help="its metrics page")
    return p


def check(args: argparse.Namespace) -> dict[str, float]:
    """Settle presets and check what argparse cannot; the service level objective. Raises ValueError."""
    if args.table2:
        vars(args).update(TABLE2)
        plan = bundle_plan(args.tokenizer, args.method).get("plan")
        if plan and not any(wanted.items() <= plan.items() for wanted in TABLE2_PLANS):
            either = " or ".join(map(str, TABLE2_PLANS))
            raise ValueError(f"--table2 needs a method with {either}, or none, got {plan}")
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
    if args.no_chat_template and (args.multi_turn or args.shared_prefix or args.prompt_tokens):
        raise ValueError(
            "--multi-turn, --shared-prefix and --prompt-tokens need the chat template: no --no-chat-template"
        )
    args.percentile_metrics = [name for name in args.percentile_metrics.split(",") if name]
    if unknown := set(args.percentile_metrics) - set(METRICS):
        raise ValueError(f"--percentile-metrics: expected some of {', '.join(METRICS)}, got {', '.join(unknown)}")
    _check_lengths(args)
    return parse_slo(args.goodput)


def _check_lengths(args: argparse.Namespace) -> None:
    """Prompts and answers must have room in the bundle's context, where the folder says how long that is."""
    if args.prompt_tokens and args.shared_prefix >= args.prompt_tokens:
        raise ValueError(
            f"--shared-prefix: expected less than --prompt-tokens {args.prompt_tokens}, got {args.shared_prefix}"
        )
    context = _config(args.tokenizer).get("limits", {}).get("max_len")
    name, tokens = max(
        ("--shared-prefix", args.shared_prefix), ("--prompt-tokens", args.prompt_tokens), key=lambda f: f[1]
    )
    if context is not None and tokens and tokens + args.max_tokens > context:
        raise ValueError(
            f"{name}: expected at most {context - args.max_tokens}, got {tokens}: {args.tokenizer} holds {context} "
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
