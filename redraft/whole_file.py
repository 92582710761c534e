"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import glob
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

STALE_S = 3600.0
"""After so long, a new name is one that a killed process has left."""
OF_SAFETENSORS = ".tmp??????"
"""The new names that safetensors itself writes to."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new name beside `path`, for the block to write to: the file takes `path`'s place when the block ends well, and
    is removed otherwise. A killed process leaves it as `.NAME.*.partial`, which a later call removes.

    Raises OSError that names `path`, or another file that the block could not use: what a full disk raises names none.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")  # no process id: containers give out the same ones
    remove_stale(path.parent, f".{glob.escape(path.name)}.*.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        number = error.errno or errno.ENOSPC  # numpy reports a write that was cut short without one
        # Of a copy the first name is the source's.
        of_this = error.filename is None or {error.filename, error.filename2} & {partial, str(partial)}
        raise OSError(number, error.strerror or str(error), str(path) if of_this else error.filename) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove the files of these names that killed processes have left STALE_S before the last change of their folder:
    a disk's own clock, as those of machines that share it may differ."""
    for path in folder.glob(pattern):
        with suppress(OSError):  # a folder that cannot be written to, or another process was faster
            if path.lstat().st_mtime < path.parent.stat().st_mtime - STALE_S:
                path.unlink()
