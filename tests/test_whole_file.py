"""Files that are written whole or not at all."""

from __future__ import annotations

import errno

import pytest

from redraft.whole_file import whole_file


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
