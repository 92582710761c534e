"""Where a step's time goes: microseconds of each kernel in a replay of the step's CUDA graph.

    python -m benchmarks.gpu.profile --shape llama-3.1-8b --batches 1 32 --rows 1 16

The target has random weights; a step ends with the greedy choice, as in `llama_7b`. Kernels are summed by name over the
replays, so that what a fused kernel would save can be read off. On the CPU the operators of torch are listed instead.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.command import console, run
from benchmarks.gpu.llama_7b import SHAPES, Batches, Context, Rows, Shape, TargetSteps, random_target
from benchmarks.gpu.machine import Device, Output, device_of, milliseconds, write_report
from redraft.loadtest.tables import Table

WIDEST_NAME = 90
"""Characters of a kernel's name in the table: template arguments can take pages."""


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
    result = Table(
        f"{title}, {step['kernel_microseconds'] / 1e3:.2f} ms of it in kernels", ["kernel", "calls", "us", "share"]
    )
    for kernel in step["kernels"][:most]:
        share = kernel["microseconds"] / max(step["kernel_microseconds"], 1e-9)
        cells = [f"{kernel['calls']:g}", f"{kernel['microseconds']:.1f}", f"{share:.1%}"]
        result.rows.append([kernel["kernel"][:WIDEST_NAME], *cells])
    return result


@torch.inference_mode()
def main(
    device: Device = "cuda",
    shape: Shape = "llama-3.1-8b",
    context: Context = 1024,
    batches: Batches = [1, 32],
    rows: Rows = [1, 16],
    replays: Annotated[int, typer.Option(help="Replays of a step.")] = 10,
    most: Annotated[int, typer.Option(help="Kernels of a step that are shown; all are written.")] = 20,
    output: Output = None,
) -> None:
    on_device = device_of(device, output, kernels=True)
    torch.manual_seed(0)
    steps = TargetSteps(random_target(SHAPES[shape], on_device), context, max(batches), max(rows))
    report: dict[str, Any] = {"shape": shape, "context": context, "steps": []}
    for batch in batches:
        for count in rows:
            report["steps"].append(kernels_of(steps, batch, count, replays))
            table(report["steps"][-1], most).show(console)
    write_report(output, __file__, on_device, report)


if __name__ == "__main__":
    run(main)
