"""Engine backends: load a bundle's networks and execute them on one device."""

from __future__ import annotations

from redraft.bundle import Bundle
from redraft.engines.interface import Engine


def load_engine(bundle: Bundle, threads: int | None = None) -> Engine:
    """The bundle's engine, ready to execute; `threads` None is all cores that the process may use.

    Raises BundleError when the bundle's backend cannot run here, ValueError for a number of threads it cannot take.
    """
    if bundle.config.backend == "openvino":
        from redraft.engines.openvino import OpenVINOEngine

        return OpenVINOEngine(bundle, threads)
    if bundle.config.backend == "torch":
        from redraft.engines.torch import TorchEngine

        return TorchEngine(bundle, threads)
    from redraft.engines.tensorrt import TensorRTEngine

    return TensorRTEngine(bundle, threads)
