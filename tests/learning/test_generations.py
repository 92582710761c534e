"""What a generation's file says, that a damaged one says nothing, and which one a folder notes as served."""

from __future__ import annotations

from redraft.learning.generations import FILE, Generation, generation_folder, note_served, served_generation


def test_a_generation_is_read_as_it_was_written(tmp_path):
    assert Generation.of(tmp_path) is None
    Generation(number=3).write(tmp_path)
    assert Generation.of(tmp_path) == Generation(number=3)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    (tmp_path / FILE).write_text('{"number": "three"}')
    assert Generation.of(tmp_path) is None


def test_the_generation_that_is_served_is_noted_until_another_drafter_is(tmp_path):
    learned, bundle = tmp_path / "learned", tmp_path / "bundle"
    bundle.mkdir()
    for number in (1, 2):
        folder = generation_folder(learned, number)
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        Generation(number=number).write(folder)
    assert served_generation(learned) is None
    for number in (2, 1):
        Generation(number=number).write(bundle)
        note_served(learned, bundle)
        assert served_generation(learned) == generation_folder(learned, number)
    (generation_folder(learned, 1) / "config.json").unlink()
    assert served_generation(learned) is None, "it is gone"
    Generation(number=2, positions=5).write(bundle)
    note_served(learned, bundle)
    assert served_generation(learned) is None, "it is of another folder"
    (bundle / FILE).unlink()
    note_served(learned, bundle)
    assert not (learned / "served").is_symlink()
