"""Where a step's time goes: microseconds of each kernel in a replay of the step's CUDA graph.

    python -m benchmarks.gpu.profile --shape llama-3.1-8b --batches 1 32 --rows 1 16

The target has random weights; a step ends with the greedy choice, as in `llama_7b`. Kernels are summed by name over the
replays, so that what a fused kernel would save can be read off. On the CPU the operators of torch are listed instead.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures.tables import Table
from benchmarks.gpu.llama_7b import SHAPES, TargetSteps, random_target
from benchmarks.gpu.machine import add_device, describe, device_of, milliseconds, write_report

WIDEST_NAME = 90
"""Characters of a kernel's name in the table: template arguments can take pages."""
console = Console()


def kernels_of(steps: TargetSteps, batch: int, rows: int, replays: int) -> dict[str, Any]:
    """A step of `batch` sequences with `rows` rows each: its milliseconds, and of each kernel the calls and
    microseconds per step, the longest first."""
    on_gpu = steps.device.type == "cuda"
    call = steps.call(batch, rows)
    step_ms = milliseconds(call, replays)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(replays):
            call()
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if on_gpu and event.device_type == DeviceType.CUDA:
            spent[event.name].append(event.self_device_time_total)
        elif not on_gpu:
            spent[event.name].append(event.self_cpu_time_total)
    kernels = [
        {"kernel": name, "calls": len(times) / replays, "microseconds": sum(times) / replays}
        for name, times in sorted(spent.items(), key=lambda entry: -sum(entry[1]))
    ]
    total = sum(sum(times) for times in spent.values()) / replays
    return {"batch": batch, "rows": rows, "milliseconds": step_ms, "kernel_microseconds": total, "kernels": kernels}


def table(step: dict[str, Any], most: int) -> Table:
    """The kernels that take the longest, and their shares of all kernels' time."""
    title = f"{step['batch']} x {step['rows']} rows: {step['milliseconds']:.2f} ms a step"
    shown = Table(
        f"{title}, {step['kernel_microseconds'] / 1e3:.2f} ms of it in kernels", ["kernel", "calls", "us", "share"]
    )
    for kernel in step["kernels"][:most]:
        share = kernel["microseconds"] / max(step["kernel_microseconds"], 1e-9)
        cells = [f"{kernel['calls']:g}", f"{kernel['microseconds']:.1f}", f"{share:.1%}"]
        shown.rows.append([kernel["kernel"][:WIDEST_NAME], *cells])
    return shown


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of each sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="of each sequence")
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--most", type=int, default=20, help="kernels of a step that are shown; all are written")
    args = parser.parse_args(argv)
    device = device_of(parser, args, kernels=True)
    torch.manual_seed(0)
    target = random_target(SHAPES[args.shape], device)
    steps = TargetSteps(target, args.context, max(args.batches), max(args.rows))
    report: dict[str, Any] = {"machine": describe(device), "shape": args.shape, "context": args.context, "steps": []}
    for batch in args.batches:
        for rows in args.rows:
            report["steps"].append(kernels_of(steps, batch, rows, args.replays))
            table(report["steps"][-1], args.most).show(console)
    console.print(f"written to {write_report(args, report)}")


if __name__ == "__main__":
    main()
