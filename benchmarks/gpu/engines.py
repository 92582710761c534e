"""Do engines that were built ahead of time load and run on this GPU, and how fast?

    make engines BACKEND=tensorrt_rtx PRECISION=fp16 METHODS=build/drafters.toml    # on any machine
    python -m benchmarks.gpu.engines BUNDLE [BUNDLE ...]

For each bundle: whether it loads, else why not; step times of 1 to 64 rows and of several sequences, and of drafting
by each method, as `benchmarks/speed/step_times.py` takes them. The question is asked of TensorRT for RTX; any backend's
bundles do. On a GPU that it does not support, such as an H100, set REDRAFT_ANY_GPU=1.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.machine import PACKAGES, add_device, describe, device_of, write_report

console = Console()


def run(path: Path, repeats: int) -> dict[str, Any]:
    """One bundle: its times, or why there are none. Whatever goes wrong is an answer here."""
    from benchmarks.speed.step_times import measure, report
    from redraft.bundle.manifest import Bundle
    from redraft.engines import load_engine

    found: dict[str, Any] = {"bundle": path.name}
    try:
        bundle = Bundle.load(path)
        found |= {"backend": bundle.config.backend.name, "precision": bundle.config.precision}
        engine = load_engine(bundle)
    except Exception as error:
        return found | {"loads": False, "error": f"{type(error).__name__}: {error}"}
    try:
        times = measure(engine, bundle, repeats)
    except Exception as error:
        return found | {"loads": True, "runs": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        engine.close()
    console.print(report(times, bundle))
    return found | {"loads": True, "runs": True, "times": [asdict(entry) for entry in times]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser, __file__)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args(argv)
    machine = describe(device_of(parser, args, PACKAGES))
    results = []
    for path in args.bundles:
        results.append(run(path, args.repeats))
        if error := results[-1].get("error"):
            console.print(f"{path}: {error}", markup=False)
    console.print(f"written to {write_report(args, {'machine': machine, 'bundles': results})}")


if __name__ == "__main__":
    main()
