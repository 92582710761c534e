"""What a generation's file says, and that a damaged one says nothing."""

from __future__ import annotations

from redraft.learning.generations import FILE, Generation


def test_a_generation_is_read_as_it_was_written(tmp_path):
    assert Generation.of(tmp_path) is None
    Generation(number=3).write(tmp_path)
    assert Generation.of(tmp_path) == Generation(number=3)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    (tmp_path / FILE).write_text('{"number": "three"}')
    assert Generation.of(tmp_path) is None
