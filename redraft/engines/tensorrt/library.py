"""The two TensorRTs: full TensorRT, whose engines hold our kernels, and TensorRT for RTX, which has none of its own.
On a GPU neither was run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from redraft.bundle.manifest import Bundle
from redraft.engines.cuda import device as gpu
from redraft.errors import BundleError


@dataclass(frozen=True)
class Flavour:
    """What a backend's library is called, and what it can do."""

    backend: str
    title: str
    module_name: str
    package: str
    oldest: str
    oldest_for_ranks: str
    """The first release that sums over several GPUs."""
    gpus: tuple[tuple[int, int], ...] | None
    """The compute capabilities that its engines run on; None: all from `gpu.OLDEST_CAPABILITY` on."""
    builds_on_gpu: bool
    """Whether kernels are chosen while an engine is built, on the GPU that is to run it. Otherwise they are compiled
    when it is loaded."""

    def module(self, ranks: int = 1) -> ModuleType:
        """The library, for so many ranks. Raises BundleError where it is missing or too old."""
        try:
            module = importlib.import_module(self.module_name)
        except (ImportError, OSError) as error:
            raise BundleError(
                f"the backend {self.backend} needs {self.title}, which cannot be imported ({error}): "
                f"pip install {self.package}, or choose another --backend"
            ) from None
        oldest, purpose = (self.oldest_for_ranks, f" for {ranks} ranks") if ranks > 1 else (self.oldest, "")
        if _numbers(module.__version__) < _numbers(oldest):
            raise BundleError(
                f"the backend {self.backend} needs {self.title} {oldest} or newer{purpose}, this is "
                f"{module.__version__}: pip install -U {self.package}"
            )
        return module

    def require_gpu(self, device: torch.device) -> None:
        """Raises BundleError for a GPU that its engines do not run on."""
        if self.gpus is None:
            gpu.require_capability(device, f"engines of {self.title}")
        else:
            gpu.require_supported(device, self.title, self.gpus)


RTX_GPUS = ((8, 6), (8, 9), (12, 0), (12, 1))
"""The support matrix of TensorRT for RTX without 7.5, for which an engine has to be built separately."""
TENSORRT = Flavour("tensorrt", "TensorRT", "tensorrt", "tensorrt-cu13", "10.16", "11.0", None, True)
TENSORRT_RTX = Flavour(
    "tensorrt_rtx", "TensorRT for RTX", "tensorrt_rtx", "tensorrt-rtx-cu13", "1.7", "1.7", RTX_GPUS, False
)
FLAVOURS = {flavour.backend: flavour for flavour in (TENSORRT, TENSORRT_RTX)}
CAPABILITY, GPU = "compute_capability", "gpu"
"""The manifest's names for what an engine was built for: the GPU's compute capability, and which GPU it is."""


class Messages:
    """The errors that a library has logged. With `warnings` these go to stderr."""

    def __init__(self, module: Any, warnings: bool = False):
        self.errors: list[str] = []
        severe, errors = (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR), self.errors
        self._library = library = module.__name__
        warning = module.ILogger.WARNING

        class Logger(module.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in severe:
                    errors.append(message)
                elif severity == warning and warnings:
                    print(f"{library}: {message}", file=sys.stderr, flush=True)

        self.logger = Logger()

    def given_to(self, maker: Callable[[Any], Any]) -> Any:
        """What a library's `Builder` or `Runtime` makes of the logger. Raises BundleError where it cannot start."""
        try:
            return maker(self.logger)
        except TypeError as error:  # as Python's layer says that nothing was made
            raise BundleError(
                f"{self._library} cannot start: {'; '.join(self.errors) or error}; see that nvidia-smi works and shows "
                "free memory"
            ) from None

    @property
    def text(self) -> str:
        return "; ".join(self.errors) or "it gave no reason"

    @property
    def out_of_memory(self) -> bool:
        """Whether one of them says so."""
        words = self.text.lower().replace(" ", "").replace("_", "")
        return any(sign in words for sign in ("outofmemory", "cudaerrormemoryallocation", "insufficientmemory"))

    def require_memory(self) -> None:
        """Raise torch.OutOfMemoryError where one of them says that memory did not suffice."""
        if self.out_of_memory:
            raise torch.OutOfMemoryError(self.text)


def require_fit(bundle: Bundle, flavour: Flavour, version: str, device: torch.device) -> None:
    """Raise BundleError where engines were built by another version than this, or for another compute capability than
    the GPU's. Says on stderr that they were built for another model of GPU, whose kernels may be slow here."""
    versions = bundle.manifest.versions
    rebuild = f"on this machine rebuild it with: {bundle.manifest.command}"
    if (built := versions.get(flavour.backend)) != version:
        raise BundleError(f"{bundle.path} was built by {flavour.title} {built}, this is {version}; {rebuild}")
    if (wanted := versions.get(CAPABILITY)) not in (None, found := gpu.capability(device)):
        raise BundleError(
            f"{bundle.path} was built for a GPU of compute capability {wanted}, this one has {found}; {rebuild}"
        )
    if (model := versions.get(GPU)) not in (None, own := torch.cuda.get_device_name(device)):
        print(f"{bundle.path} was built on {model}, this is {own}: for its best speed {rebuild}", file=sys.stderr)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
