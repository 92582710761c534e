"""What is kept of served texts over restarts: what a file has, and must not have."""

from __future__ import annotations

import stat

import numpy as np
import pytest

from redraft.drafting import served
from redraft.drafting.served import ServedTexts, TextOptions
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import LIMITS, PLANS, make, run
from tests.toy_engine import ToyEngine, only

TOKENIZER, VOCABULARY = "a1" * 32, 111
KEY = "digest-of-a-key"
SECRET = [101, 102, 103, 104, 105, 106, 107, 108, 109]


def texts_of(folder, tokenizer=TOKENIZER, **options):
    options = {"by_key": True, "capacity": 2000, "folder": folder} | options
    return ServedTexts(TextOptions(**options), tokenizer, VOCABULARY)


@pytest.fixture
def warnings(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(served.log, "warning", lambda text, *values: lines.append(text % values))
    return lines


def serve(texts, key="a", **fields):
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["merged"]), texts=texts)
    run(scheduler, [make(key, **fields)])
    return scheduler


def file_in(folder):
    (path,) = folder.iterdir()
    return path


def test_texts_are_there_after_a_restart_for_their_scope_only(tmp_path):
    texts = texts_of(tmp_path / "new")
    for prompt, scope in (([1] * 9, KEY), ([2] * 30, None), (list(range(60)), KEY)):
        serve(texts, prompt=prompt, scope=scope)
    texts.close()
    again = texts_of(tmp_path / "new")
    for before, after in zip(texts.store.texts(), again.store.texts(), strict=True):
        assert before.tolist() == after.tolist()
    request = make("b", scope=KEY).request
    assert again.scopes.of(request) == texts.scopes.of(request) != texts_of(tmp_path / "other").scopes.of(request)
    assert again.store.match(again.scopes.of(request), (10, 11, 12)).token == 13
    assert again.store.match(again.scopes.of(make("b").request), (10, 11, 12)) is None


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "salt"}])
def test_what_all_shared_is_nobodys_once_keys_part_them(tmp_path, fields):
    texts = texts_of(tmp_path, by_key=False)
    serve(texts, prompt=[*range(60)], scope=KEY, **fields)
    texts.close()
    again = texts_of(tmp_path)
    for scope in (None, KEY, "another"):
        found = again.store.match(again.scopes.of(make("b", scope=scope, **fields).request), (10, 11, 12))
        assert (found is not None) == (scope == KEY and bool(fields))  # a salt had parted the keys before


def test_a_file_has_no_keys_and_no_text_that_is_not_shared(tmp_path):
    texts = texts_of(tmp_path)
    serve(texts, prompt=[*range(50, 60)], scope=KEY, cache_salt="salt-of-a-client")
    serve(texts, prompt=[*SECRET], scope=KEY, cache_prompt=False)
    texts.close()
    path = file_in(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    for word in (KEY, "salt-of-a-client"):
        assert word.encode() not in content
    assert np.array([*SECRET], np.int32).tobytes() not in content
    assert np.arange(50, 60, dtype=np.int32).tobytes() in content
    with np.load(path) as arrays:
        assert sorted(arrays) == ["ends", "salt", "scopes", "tokenizer", "tokens", "version"]


def test_a_folder_that_is_made_is_its_owners_only(tmp_path):
    texts_of(tmp_path / "a").close()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = texts_of(None)
    serve(texts)
    texts.close()
    assert not [*tmp_path.iterdir()]


def damaged(path, arrays):
    content = path.read_bytes()
    at = content.rindex(b"tokens.npy") - 36  # how the member is compressed, by the directory
    yield "another compression", lambda: path.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    yield "cut", lambda: path.write_bytes(content[: len(content) // 2])
    yield "no archive", lambda: path.write_bytes(b"tokens")
    yield "other bytes", lambda: path.write_bytes(content.replace(np.int32(51).tobytes(), np.int32(52).tobytes(), 1))
    for name, value in (
        ("version", 1),
        ("tokenizer", "b2" * 32),
        ("salt", np.zeros(3, np.uint8)),
        ("tokens", np.full(len(arrays["tokens"]), VOCABULARY, np.int32)),
        ("tokens", -1 - arrays["tokens"]),
        ("tokens", arrays["tokens"].astype(np.int64)),
        ("ends", arrays["ends"] + 1),
        ("ends", arrays["ends"][::-1]),
        ("scopes", arrays["scopes"][:-1]),
        ("scopes", np.array([None])),
    ):
        yield f"{name} {value!r:.20}", lambda name=name, value=value: np.savez(path, **arrays | {name: value})
    yield "a field is missing", lambda: np.savez(path, version=2, tokenizer=TOKENIZER)


def test_a_damaged_file_and_one_of_another_tokenizer_count_for_nothing(tmp_path, warnings):
    texts = texts_of(tmp_path)
    serve(texts, prompt=[*range(50, 60)])
    serve(texts, prompt=[*range(30, 40)])
    texts.close()
    path = file_in(tmp_path)
    with np.load(path) as loaded:
        arrays = dict(loaded)
    for what, damage in damaged(path, arrays):
        damage()
        warnings.clear()
        assert texts_of(tmp_path).store.counts[0] == 0, what
        assert str(path) in warnings[0], what
    np.savez(path, **arrays)
    assert texts_of(tmp_path).store.counts[0] > 0
    assert texts_of(tmp_path, "b2" * 32).store.counts[0] == 0


def test_the_newest_of_a_file_fit_a_smaller_store(tmp_path):
    texts = texts_of(tmp_path)
    serve(texts, prompt=[*range(1, 90)])
    texts.close()
    smaller = texts_of(tmp_path, capacity=50)
    assert smaller.store.texts()[0].tolist() == texts.store.texts()[0].tolist()[-49:]


@pytest.mark.parametrize("obstacle", ["file", "full"])
def test_a_folder_that_cannot_be_written_to_is_logged(obstacle, tmp_path, warnings, monkeypatch):
    texts = texts_of(tmp_path / "f")
    serve(texts)
    texts.close()
    before = file_in(tmp_path / "f").read_bytes()
    if obstacle == "file":
        (tmp_path / "f").rename(tmp_path / "g")
        (tmp_path / "f").write_text("")
    else:

        def full(file, **_):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)
    texts.close()
    assert "cannot keep texts" in warnings[0]
    if obstacle == "full":
        assert file_in(tmp_path / "f").read_bytes() == before
