"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new name beside `path`, for the block to write to: the file takes `path`'s place when the block ends well, and
    is removed otherwise. A killed process leaves it as `.NAME.*.partial`.

    Raises OSError that names `path`, or another file that the block could not use: what a full disk raises names none.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")  # no process id: containers give out the same ones
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        number = error.errno or errno.ENOSPC  # numpy reports a write that was cut short without one
        of_this = error.filename in (None, partial, str(partial))
        raise OSError(number, error.strerror or str(error), str(path) if of_this else error.filename) from None
    finally:
        with suppress(OSError):
            partial.unlink()
