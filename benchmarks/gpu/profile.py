"""Where the time of a CUDA graph's replay goes, by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from redraft.loadtest.tables import Table

REPLAYS = 5
WIDEST_NAME = 90
"""Characters of a kernel's name in the table: template arguments can take pages."""
MOST = 15
"""Kernels of a step that are shown; a report has all."""


def kernels_of(call: Callable[[], object], on_gpu: bool) -> list[dict[str, Any]]:
    """The kernels of a call by name, summed, the longest first: how many, and their microseconds. On the CPU the
    operators of torch instead."""
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(REPLAYS):
            call()
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if on_gpu and event.device_type == DeviceType.CUDA:
            spent[event.name].append(event.self_device_time_total)
        elif not on_gpu:
            spent[event.name].append(event.self_cpu_time_total)
    return [
        {"kernel": name, "calls": len(times) / REPLAYS, "microseconds": sum(times) / REPLAYS}
        for name, times in sorted(spent.items(), key=lambda entry: -sum(entry[1]))
    ]


def table(title: str, milliseconds: float, kernels: list[dict[str, Any]]) -> Table:
    """The kernels that take the longest, and their shares of all kernels' time."""
    total, count = (sum(kernel[name] for kernel in kernels) for name in ("microseconds", "calls"))
    result = Table(
        f"{title}: {milliseconds:.2f} ms, {total / 1e3:.2f} of it in {count:g} kernels",
        ["kernel", "calls", "us", "share"],
    )
    for kernel in kernels[:MOST]:
        cells = [
            f"{kernel['calls']:g}",
            f"{kernel['microseconds']:.1f}",
            f"{kernel['microseconds'] / max(total, 1e-9):.1%}",
        ]
        result.rows.append([kernel["kernel"][:WIDEST_NAME], *cells])
    return result
