"""The two TensorRTs: full TensorRT, whose engines hold our kernels, and TensorRT for RTX, which has none of its own.
On a GPU neither was run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from redraft.bundle import Bundle, BundleError
from redraft.engines.gpu import OLDEST_CAPABILITY


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
    oldest_gpu: tuple[int, int]
    """The first compute capability that its engines run on."""
    has_plugins: bool
    """Whether the target is in plugin form, and kernels are chosen while an engine is built: on the GPU that is to run
    it, and for every step's own shapes. Otherwise they are chosen when it is loaded."""

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


TENSORRT = Flavour("tensorrt", "TensorRT", "tensorrt", "tensorrt-cu13", "10.16", "11.0", OLDEST_CAPABILITY, True)
TENSORRT_RTX = Flavour(
    "tensorrt_rtx", "TensorRT for RTX", "tensorrt_rtx", "tensorrt-rtx-cu13", "1.7", "1.7", (7, 5), False
)
FLAVOURS = {flavour.backend: flavour for flavour in (TENSORRT, TENSORRT_RTX)}
CAPABILITY = "compute_capability"
"""The manifest's name for the GPU that an engine was built for."""


class Messages:
    """The errors that a library has logged."""

    def __init__(self, module: Any):
        self.errors: list[str] = []
        severe, errors = (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR), self.errors

        class Logger(module.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in severe:
                    errors.append(message)

        self.logger = Logger()

    @property
    def text(self) -> str:
        return "; ".join(self.errors) or "it gave no reason"

    @property
    def out_of_memory(self) -> bool:
        """Whether one of them says so."""
        words = self.text.lower().replace(" ", "").replace("_", "")
        return any(sign in words for sign in ("outofmemory", "cudaerrormemoryallocation", "insufficientmemory"))


def require_fit(bundle: Bundle, flavour: Flavour, version: str, found: str) -> None:
    """Raise BundleError where engines were built by another version than this, or for another GPU than the one found
    (its compute capability)."""
    versions = bundle.manifest.versions
    rebuild = f"on this machine rebuild it with: {bundle.manifest.command}"
    if (built := versions.get(flavour.backend)) != version:
        raise BundleError(f"{bundle.path} was built by {flavour.title} {built}, this is {version}; {rebuild}")
    if (wanted := versions.get(CAPABILITY)) not in (None, found):
        raise BundleError(
            f"{bundle.path} was built for a GPU of compute capability {wanted}, this one has {found}; {rebuild}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
