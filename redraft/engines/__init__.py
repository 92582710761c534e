"""Engine backends: load a bundle's networks and execute them on one device, or on several ranks'."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from redraft.errors import BundleError, install

if TYPE_CHECKING:
    from redraft.bundle.backends import Backend
    from redraft.bundle.manifest import Bundle
    from redraft.engines.api import Engine


def load_engine(bundle: Bundle, threads: int | None = None) -> Engine:
    """The bundle's engine, ready to execute; `threads` None is all cores that the process may use.

    A bundle for several ranks is loaded by as many processes, started by MPI: see `redraft.engines.ranks.parallel`. On
    ranks other than 0 this serves rank 0 until its engine is closed, and then raises SystemExit.

    Raises BundleError when the bundle's backend cannot run here, ValueError for a number of threads it cannot take.
    """
    if bundle.config.tensor_parallel > 1:
        from redraft.engines.ranks.parallel import load_parallel

        return load_parallel(bundle, threads, lambda *shard: _load(bundle, *shard))
    return _load(bundle, threads)


def gpu_name(backend: Backend) -> str | None:
    """The GPU that a backend's loaded engines execute on, None where that is the CPU."""
    if "cuda" not in backend.devices:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _load(bundle: Bundle, threads: int | None, *shard: Any) -> Engine:
    """`shard`: of several ranks, whose engine it is and how logits are gathered."""
    try:
        engine: Callable[..., Engine] = resolve_name(bundle.config.backend.engine)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("redraft"):
            raise
        raise BundleError(f"{bundle.path} needs the package {error.name}: {install('train')}") from None
    return engine(bundle, threads, *shard)
