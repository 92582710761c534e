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

from redraft.bundle.backends import TENSORRT, TENSORRT_RTX, Backend
from redraft.bundle.manifest import Bundle
from redraft.engines.cuda import device as gpu
from redraft.errors import BundleError, program


@dataclass(frozen=True, kw_only=True)
class TensorRTLibrary:
    """A backend's library: its Python package, the releases and GPUs that it needs, and how it builds."""

    backend: Backend
    module_name: str
    package: str
    """Its name for pip."""
    oldest: str
    """The first release that the engines work with."""
    oldest_for_ranks: str
    """The first release that sums over several GPUs."""
    gpus: tuple[tuple[int, int], ...] | None
    """The compute capabilities that its engines run on; None: all from `gpu.OLDEST_CAPABILITY` on."""
    builds_on_gpu: bool
    """Whether kernels are selected while an engine is built, on the GPU that is to run it. Otherwise they are compiled
    when it is loaded."""

    @property
    def title(self) -> str:
        return self.backend.title

    def module(self, ranks: int = 1) -> ModuleType:
        """Import the library for a number of ranks. Raises BundleError where it is missing or too old."""
        try:
            module = importlib.import_module(self.module_name)
        except (ImportError, OSError) as error:
            raise BundleError(
                f"the backend {self.backend} needs {self.title}, which cannot be imported ({error}): "
                f"{program('pip')} install {self.package}, or choose another --backend"
            ) from None
        oldest, purpose = (self.oldest_for_ranks, f" for {ranks} ranks") if ranks > 1 else (self.oldest, "")
        if _numbers(module.__version__) < _numbers(oldest):
            raise BundleError(
                f"the backend {self.backend} needs {self.title} {oldest} or newer{purpose}, this is "
                f"{module.__version__}: {program('pip')} install -U {self.package}"
            )
        return module

    def require_gpu(self, device: torch.device) -> None:
        """Raise BundleError for a GPU that its engines do not run on."""
        if self.gpus is None:
            gpu.require_capability(device, f"engines of {self.title}")
        else:
            gpu.require_supported(device, self.title, self.gpus)


RTX_GPUS = ((8, 6), (8, 9), (12, 0), (12, 1))
"""The support matrix of TensorRT for RTX without 7.5, for which an engine has to be built separately."""
FULL_LIBRARY = TensorRTLibrary(
    backend=TENSORRT,
    module_name="tensorrt",
    package="tensorrt-cu13",
    oldest="10.16",
    oldest_for_ranks="11.0",
    gpus=None,
    builds_on_gpu=True,
)
RTX_LIBRARY = TensorRTLibrary(
    backend=TENSORRT_RTX,
    module_name="tensorrt_rtx",
    package="tensorrt-rtx-cu13",
    oldest="1.7",
    oldest_for_ranks="1.7",
    gpus=RTX_GPUS,
    builds_on_gpu=False,
)
LIBRARIES = {library.backend.name: library for library in (FULL_LIBRARY, RTX_LIBRARY)}
"""The libraries by their backend's name."""
CAPABILITY, GPU = "compute_capability", "gpu"
"""Keys of a manifest's versions: the compute capability and the name of the GPU that an engine was built for."""


class Messages:
    """The errors that a library has logged; with `warnings`, its warnings go to stderr."""

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
        """Make a `Builder` or `Runtime` with the logger. Raises BundleError where the library cannot start."""
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
        """Whether an error says that memory did not suffice."""
        words = self.text.lower().replace(" ", "").replace("_", "")
        return any(sign in words for sign in ("outofmemory", "cudaerrormemoryallocation", "insufficientmemory"))

    def require_memory(self) -> None:
        """Raise torch.OutOfMemoryError where an error says that memory did not suffice."""
        if self.out_of_memory:
            raise torch.OutOfMemoryError(self.text)


def require_fit(bundle: Bundle, library: TensorRTLibrary, version: str, device: torch.device) -> None:
    """Raise BundleError for engines of another version than this, or for another compute capability than the GPU's.
    Warns on stderr where they were built on another model of GPU, since their kernels may be slow here."""
    versions = bundle.manifest.versions
    rebuild = f"on this machine {bundle.manifest.rebuild}"
    if (built := versions.get(library.backend.name)) != version:
        raise BundleError(f"{bundle.path} was built by {library.title} {built}, this is {version}; {rebuild}")
    if (wanted := versions.get(CAPABILITY)) not in (None, actual := gpu.capability(device)):
        raise BundleError(
            f"{bundle.path} was built for a GPU of compute capability {wanted}, this one has {actual}; {rebuild}"
        )
    if (model := versions.get(GPU)) not in (None, gpu_name := torch.cuda.get_device_name(device)):
        print(f"{bundle.path} was built on {model}, this is {gpu_name}: for its best speed {rebuild}", file=sys.stderr)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
