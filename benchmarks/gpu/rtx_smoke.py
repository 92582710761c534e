"""Does an engine of TensorRT for RTX, built ahead of time, load and run on this GPU? Nothing of redraft is asked.

    python -m benchmarks.gpu.rtx_smoke ENGINE

`python -m benchmarks.gpu.kit` builds the engine, a network of two layers in fp16, on a machine without a GPU. Each
stage is reported: reading the engine, making a context, which compiles its kernels, and one execution, compared with
numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import console, run
from benchmarks.gpu.machine import Device, Output, device_of, write_report

ROWS, SIZE = 8, 256
X, Y = "x", "y"
TOLERANCE = 0.02


def weights() -> list[np.ndarray]:
    """The two matrices of the network y = relu(x A) B, float16 [SIZE, SIZE]."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((SIZE, SIZE)) * SIZE**-0.5).astype(np.float16) for _ in range(2)]


def given() -> np.ndarray:
    """The input that is tried: float16 [ROWS, SIZE]."""
    return np.random.default_rng(1).standard_normal((ROWS, SIZE)).astype(np.float16)


def expected(x: np.ndarray) -> np.ndarray:
    """The network's output in float32."""
    first, second = (weight.astype(np.float32) for weight in weights())
    return np.maximum(x.astype(np.float32) @ first, 0) @ second


def try_engine(path: Path, device: torch.device) -> dict[str, Any]:
    """What came of each stage: milliseconds, or the error that ended the trial."""
    import tensorrt_rtx as trt

    log = trt.Logger(trt.Logger.WARNING)
    report: dict[str, Any] = {"engine": path.name, "tensorrt_rtx": trt.__version__, "runs": False}

    def stage(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        report[f"{name}_ms"] = 1e3 * (time.perf_counter() - begun)
        if result is None or result is False:
            raise RuntimeError(f"{name}: TensorRT for RTX returned nothing; its log has the reason")
        return result

    try:
        engine = stage("load", lambda: trt.Runtime(log).deserialize_cuda_engine(path.read_bytes()))
        context = stage("context", engine.create_execution_context)
        x = torch.from_numpy(given()).to(device)
        y = torch.empty_like(x)
        context.set_tensor_address(X, x.data_ptr())
        context.set_tensor_address(Y, y.data_ptr())
        stream = torch.cuda.current_stream(device)
        stage("execute", lambda: context.execute_async_v3(stream.cuda_stream))
        stream.synchronize()
        report["largest_error"] = float(np.abs(y.float().cpu().numpy() - expected(given())).max())
        report["runs"] = report["largest_error"] < TOLERANCE
    except Exception as error:  # whatever goes wrong is the answer
        report["error"] = f"{type(error).__name__}: {error}"
    return report


def main(
    engine: Annotated[Path, typer.Argument(help="Engine that benchmarks.gpu.kit built.")],
    device: Device = "cuda",
    output: Output = None,
) -> None:
    on_device = device_of(device, output, ("tensorrt_rtx",))
    if not engine.is_file():
        raise typer.BadParameter(f"{engine} is not there: python -m benchmarks.gpu.kit builds it")
    report = try_engine(engine, on_device)
    console.print(report)
    write_report(output, __file__, on_device, report)


if __name__ == "__main__":
    run(main)
