"""Do engines that were built ahead of time load and run on this GPU, and how fast?

    redraft build --backend tensorrt_rtx --methods build/drafters.toml    # on any machine
    python -m benchmarks.gpu.engines BUNDLE [BUNDLE ...]

For each bundle: whether it loads, else why not; step times of 1 to 64 rows and of several sequences, and of drafting
by each method, as `benchmarks/speed/step_times.py` takes them. The question is asked of TensorRT for RTX; any backend's
bundles do. On a GPU that it does not support, such as an H100, set REDRAFT_ANY_GPU=1.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Repeats, console, run
from benchmarks.gpu.machine import PACKAGES, Device, Output, device_of, write_report


def judge(path: Path, repeats: int) -> dict[str, Any]:
    """One bundle: its times, or why there are none. Whatever goes wrong is an answer here."""
    from benchmarks.speed.step_times import measure, table
    from redraft.bundle.manifest import Bundle
    from redraft.engines import load_engine

    result: dict[str, Any] = {"bundle": path.name}
    try:
        bundle = Bundle.load(path)
        result |= {"backend": bundle.config.backend.name, "precision": bundle.config.precision}
        engine = load_engine(bundle)
    except Exception as error:
        return result | {"loads": False, "error": f"{type(error).__name__}: {error}"}
    try:
        times = measure(engine, bundle, repeats)
    except Exception as error:
        return result | {"loads": True, "runs": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        engine.close()
    table(times, bundle).show(console)
    return result | {"loads": True, "runs": True, "times": [asdict(entry) for entry in times]}


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Folders of bundles.")],
    device: Device = "cuda",
    repeats: Repeats = 60,
    output: Output = None,
) -> None:
    on_device = device_of(device, output, PACKAGES)
    results = []
    for path in bundles:
        results.append(judge(path, repeats))
        if error := results[-1].get("error"):
            console.print(f"{path}: {error}", markup=False)
    write_report(output, __file__, on_device, {"bundles": results})


if __name__ == "__main__":
    run(main)
