"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os

import pytest

from redraft.whole_file import remove_stale, whole_file


def test_a_file_appears_when_it_is_whole(tmp_path):
    file = tmp_path / "file"
    for text in ("first", "second"):
        with whole_file(file) as partial:
            partial.write_text(text)
            assert (file.read_text() if file.exists() else "") != text
        assert file.read_text() == text
    assert [*tmp_path.iterdir()] == [file]


def test_of_what_fails_nothing_stays_and_a_full_disk_names_the_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")

    def write(error: Exception | None) -> None:
        with whole_file(file) as partial:
            if error:
                partial.write_text("half")
                raise error
            partial.symlink_to("/dev/full")
            partial.write_text("new")

    with pytest.raises(FileNotFoundError, match="missing"):
        write(FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "missing")))
    with pytest.raises(KeyError):
        write(KeyError())
    for error in (None, OSError("4 requested and 0 written")):  # the latter as numpy says it
        with pytest.raises(OSError, match=r"^\[Errno 28\] .*/file'$") as full:
            write(error)
        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(file))
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_what_killed_processes_have_left_is_removed(tmp_path):
    """But no file that another process may write to, and no other file's."""
    killed, at_work, of_another = (tmp_path / f".{name}.partial" for name in ("a[1].0", "a[1].1", "a.json.0"))
    for partial in (killed, at_work, of_another):
        partial.touch()
    for partial in (killed, of_another):
        os.utime(partial, (0, 0))
    with whole_file(tmp_path / "a[1]") as new:
        new.touch()
    assert {*tmp_path.iterdir()} == {tmp_path / "a[1]", at_work, of_another}
    (tmp_path / ".a[1].2.partial").symlink_to("nowhere")
    remove_stale(tmp_path, ".a*.partial")
    assert {path.name for path in tmp_path.iterdir()} == {"a[1]", at_work.name, ".a[1].2.partial"}


def test_a_copy_to_a_full_disk_names_the_copy(tmp_path):
    (tmp_path / "source").touch()

    def copy() -> None:
        with whole_file(tmp_path / "copy") as partial:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "source"), None, str(partial))

    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: '.*/copy'$"):
        copy()
