"""The answers that are stored: what a shard holds and what it must not, and what becomes of the others."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from redraft.bundle.method import MethodConfig
from redraft.learning import answers as module
from redraft.learning import recording
from redraft.learning.answers import Answer, AnswerStore, remove_old
from redraft.learning.policy import Policy, pattern
from redraft.learning.recording import Recording
from redraft.learning.shard_file import SHARDS, add_shard, bfloat16_bits, prompt_hash, shard_bytes
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.settings import ServeSettings
from tests.conftest import wait_until
from tests.toy_engine import ToyEngine, only, toy_codec

CODEC = toy_codec()
LIMITS = Limits(slots=3, max_len=256, max_tree=24, prefill_chunk=16, max_queue=64)
PLAN = MethodConfig(construction="best_first", tree_budget=9)
HIDDEN = 2


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "learn"


class Stores:
    """Stores of a folder, whose counts add up."""

    def __init__(self, folder: Path):
        self.folder, self.counts = folder, Counter[str]()

    def open(self, hidden_size: int = HIDDEN, **policy) -> AnswerStore:
        store = AnswerStore(Policy(self.folder, **policy), hidden_size, "f", CODEC.decode, "toy")
        store.count = lambda outcome: self.counts.update([outcome])
        return store


@pytest.fixture
def stores(folder) -> Stores:
    return Stores(folder)


def answer(tokens: list[int]) -> Answer:
    recorded = Recording(HIDDEN)
    recorded.add(np.arange(HIDDEN * (len(tokens) - 1), dtype=np.float32).reshape(-1, HIDDEN), tokens)
    return Answer(recorded, np.array([1, 2, 3], np.int32), np.array(tokens, np.int32))


def sequence(key: str, prompt: list[int], max_tokens: int = 20, **fields) -> RequestState:
    request = GenerateRequest(id=key, input_ids=prompt, max_tokens=max_tokens, **fields)
    return RequestState(key, request, prompt, CODEC, frozenset({0}))


def serve(store: AnswerStore | None, *sequences: RequestState, plan: MethodConfig | None = PLAN):
    """The tokens of each, from a scheduler that stores its answers, and its metrics."""
    scheduler = Scheduler(ToyEngine(), LIMITS, only(plan) if plan else None, answers=store)
    tokens: dict[str, list[int]] = {}
    for each in sequences:
        scheduler.submit(each)
    while not scheduler.idle:
        for output in scheduler.step():
            tokens.setdefault(str(output.key), []).extend(output.token_ids)
    if store:
        store.close()
    return tokens, scheduler.metrics


def counted(metrics, outcome: str) -> float | None:
    return metrics.registry.get_sample_value("redraft_answers_to_learn_total", {"outcome": outcome})


def shards(folder: Path) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    for path in sorted(folder.glob(SHARDS)):
        with safe_open(path, framework="pt") as shard:
            yield {name: shard.get_tensor(name) for name in shard.keys()}, shard.metadata()  # noqa: SIM118


@pytest.mark.parametrize("plan", [PLAN, None], ids=["drafts", "no drafts"])
def test_a_served_answer_is_stored_with_the_states_of_its_own_tokens(stores, plan):
    """The toy engine's features are its state after each token, which tells all tokens before."""
    prompts = {"a": list(range(1, 30)), "b": [5, 7, 5, 7, 9], "c": [8] * 40}
    tokens, metrics = serve(stores.open(), *(sequence(key, prompt) for key, prompt in prompts.items()), plan=plan)
    [(shard, metadata)] = shards(stores.folder)
    assert metadata == {"source": "served", "model": "toy", "target_fingerprint": "f"}
    offsets = shard["offsets"].tolist()
    assert shard["answer_starts"].tolist() == offsets[:-1]
    stored = {
        prompt: (shard["tokens"][start:end].tolist(), shard["hidden"][start:end])
        for prompt, start, end in zip(shard["prompts"].tolist(), offsets, offsets[1:], strict=False)
    }
    assert shard["hidden"].dtype == torch.bfloat16
    engine = ToyEngine()
    for key, prompt in prompts.items():
        text, hidden = stored[prompt_hash(prompt)]
        assert text[: len(tokens[key])] == tokens[key]
        states = [engine.path_state(prompt + text[: n + 1]) for n in range(len(text) - 1)]
        expected = torch.tensor([[s >> 16, s & 0xFFFF] for s in states], dtype=torch.float32).to(torch.bfloat16)
        assert torch.equal(hidden[:-1], expected)
    assert counted(metrics, "stored") == 3


def test_storing_changes_no_answer(stores):
    make = lambda: [  # noqa: E731
        sequence("greedy", [3, 1, 4, 1, 5], 30),
        sequence("sampled", [2, 7, 1, 8], 30, sampling={"temperature": 1.0, "seed": 7}),
    ]
    assert serve(stores.open(), *make())[0] == serve(None, *make())[0]


def test_what_a_request_or_the_operator_keeps_out_is_in_no_file(stores):
    """By its prompt's hash, its tokens and its answer's, and the bytes of its text and of a client's key."""
    secret, quiet, plain = list(range(40, 60)), list(range(60, 80)), list(range(80, 100))
    found = pattern(re.escape(CODEC.decode(secret[3:7])))
    requests = [
        sequence("secret", secret, client="key-of-a-client"),
        sequence("quiet", quiet, store=False, client="key-of-a-client"),
        sequence("plain", plain, client="key-of-a-client"),
    ]
    answers, metrics = serve(stores.open(redacted=(found,)), *requests)
    [(shard, _)] = shards(stores.folder)
    assert shard["prompts"].tolist() == [prompt_hash(plain)]
    content = b"".join(path.read_bytes() for path in stores.folder.rglob("*") if path.is_file())
    for text in ("key-of-a-client", CODEC.decode(secret), CODEC.decode(quiet), CODEC.decode(plain)):
        assert text.encode() not in content
    assert np.array(answers["plain"][:4], "<i4").tobytes() in content
    for tokens in (secret, quiet, plain, answers["secret"], answers["quiet"]):
        for form in ("<i4", "<i8"):
            assert np.array(tokens[:4], form).tobytes() not in content
    for outcome in ("redacted", "opted_out", "stored"):
        assert counted(metrics, outcome) == 1


def test_no_text_takes_long_to_search_and_what_could_is_refused():
    """Python's own search of this text would not end."""
    assert not pattern(r"(\w+\s?)+@").search("a" * 100_000)
    for text in ("(?<=a)b", r"(a)\1", "("):
        with pytest.raises(ValueError, match="expected a regular expression of RE2"):
            pattern(text)


def test_an_answer_whose_own_text_matches_is_not_stored(stores):
    store = stores.open(redacted=(pattern(re.escape(CODEC.decode([21, 22]))),))
    store.put(answer([20, 21, 22, *range(30, 40)]))
    store.put(answer([20, 22, 21, *range(30, 40)]))
    store.close()
    assert stores.counts == {"redacted": 1, "stored": 1}


@pytest.mark.parametrize(
    ("kinds", "options", "is_learned"),
    [
        (["recurrent"], {}, True),
        (["eagle3", "medusa"], {}, True),
        (["eagle3"], {}, False),
        (["eagle3"], {"--features": ""}, True),
        ([None], {}, False),
        ([None], {"--features": ""}, True),
    ],
)
def test_a_bundle_without_hidden_states_is_refused(monkeypatch, tmp_path, kinds, options, is_learned):
    manifest = SimpleNamespace(built_from=SimpleNamespace(options=options))
    methods = {str(index): SimpleNamespace(drafter=kind) for index, kind in enumerate(kinds)}
    monkeypatch.setattr(module.Manifest, "read", lambda _: manifest)
    monkeypatch.setattr(module.BundleConfig, "read", lambda _: SimpleNamespace(methods=methods))
    assert (module.why_nothing_to_learn(tmp_path) is None) == is_learned
    if not is_learned:
        (tmp_path / "config.json").touch()
        monkeypatch.setattr(launcher, "bundle_ranks", lambda _: 1)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ServingError, match=r"^--learn answers: .* build it with --features$"):
            launcher._check_bundle(ServeSettings(bundle=tmp_path, learn=Path("answers")))


def test_a_long_answer_is_searched_beyond_what_is_recorded(stores, monkeypatch):
    monkeypatch.setattr(recording, "MOST_TOKENS", 10)
    tokens, _ = serve(None, sequence("long", [3, 1, 4], 60))
    found = pattern(re.escape(CODEC.decode(tokens["long"][-5:])))
    assert not found.search(CODEC.decode(tokens["long"][:30]))
    _, metrics = serve(stores.open(redacted=(found,)), sequence("long", [3, 1, 4], 60))
    assert counted(metrics, "redacted") == 1
    assert not list(stores.folder.glob(SHARDS))


def test_a_recording_keeps_no_step_alive_and_nothing_for_long_on_a_device(monkeypatch):
    monkeypatch.setattr(recording, "STEPS_ON_DEVICE", 3)
    steps = [torch.randn(50, 5) for _ in range(7)]
    for device in (True, False):
        kept = Recording(4)
        for step in steps:
            own = step if device else step.numpy()
            kept.add(own[3:5], [1, 2])  # of 5 columns, of which 4 are the hidden states
            assert kept._last == [] or not np.shares_memory(np.asarray(kept._last[-1]), step.numpy())
        assert [part.dtype for part in kept.features] == [np.uint16] * 2
        assert kept.nbytes == 6 * 2 * 4 * 2 + 2 * 4 * 4
        assert (kept.bits() == bfloat16_bits(torch.cat([step[3:5, :4] for step in steps]).numpy())).all()


def test_whatever_goes_wrong_with_a_shard_the_writer_goes_on_and_ends(stores, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ANSWERS", 1)
    store = stores.open()
    with monkeypatch.context() as patch:
        patch.setattr(module, "shard_bytes", lambda *_: 1 // 0)
        store.put(answer(list(range(20))))
        wait_until(lambda: stores.counts["failed"] == 1)
    store.put(answer(list(range(20))))
    store.close()
    assert stores.counts == {"failed": 1, "stored": 1}


def test_only_this_user_reads_what_is_stored(stores):
    before = os.umask(0o022)
    try:
        store = stores.open()
        store.put(answer(list(range(20))))
        store.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(stores.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in stores.folder.iterdir()] == [0o600]


def test_features_are_cut_to_the_hidden_states(stores):
    tokens, _ = serve(stores.open(hidden_size=1), sequence("a", [3, 1, 4]))
    [(shard, _)] = shards(stores.folder)
    assert shard["hidden"].shape == (len(tokens["a"]), 1)


def test_short_answers_and_those_that_did_not_end_by_themselves_are_left_out(stores):
    store = stores.open()
    scheduler = Scheduler(ToyEngine(), LIMITS, only(PLAN), answers=store)
    for key, prompt, most in (("kept", [3, 1, 4], 20), ("short", [1, 5, 9], 4), ("gone", [2, 6, 5], 200)):
        scheduler.submit(sequence(key, prompt, most))
    ends: dict[str, str] = {}
    while not scheduler.idle:
        ends |= {str(output.key): output.finish_reason for output in scheduler.step() if output.finish_reason}
        if len(ends) == 2:
            scheduler.cancel("gone")
    store.close()
    [(shard, _)] = shards(stores.folder)
    assert shard["prompts"].tolist() == [prompt_hash([3, 1, 4])]
    assert (counted(scheduler.metrics, "stored"), counted(scheduler.metrics, "short")) == (1, 1)
    assert ends == {"kept": "length", "short": "length", "gone": "cancelled"}


def test_answers_are_dropped_where_the_writer_is_behind(stores, monkeypatch):
    monkeypatch.setattr(module, "QUEUED_BYTES", 3 * 19 * HIDDEN * 4)
    held = threading.Event()
    monkeypatch.setattr(AnswerStore, "_kept", lambda store, item: held.wait(10) and [])
    store = stores.open()
    store.put(answer(list(range(20))))
    deadline = time.monotonic() + 10
    while not store._queue.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(5):
        store.put(answer(list(range(20))))
    held.set()
    store.close()
    assert stores.counts == {"dropped": 3}, "one is being written, and two more wait"
    assert store._queued_bytes == 0


def test_a_full_disk_is_said_once_and_serving_goes_on(stores, monkeypatch, capsys):
    monkeypatch.setattr(module, "SHARD_ANSWERS", 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "add_shard", full)
        store = stores.open()
        for _ in range(3):
            store.put(answer(list(range(20))))
        store.close()
    assert stores.counts == {"failed": 3}
    said = f"cannot store answers in {stores.folder}: No space left on device; serving goes on\n"
    assert capsys.readouterr().err == said


def test_shards_that_are_old_or_too_many_are_removed(folder):
    """An unfinished generation keeps its own for some time. What no service stored stays, and does not count."""
    generation, elsewhere = folder / "generations" / "1" / "trained", folder / "teacher"
    for made in (generation, elsewhere):
        made.mkdir(parents=True)
    content = shard_bytes([np.arange(9)], [np.zeros((8, 40), np.uint16)], [7], {"source": "served"})
    paths = [add_shard(folder, content) for _ in range(4)]
    copied = [add_shard(generation, content) for _ in range(2)]
    linked = [generation / path.name for path in paths[2:]]
    for path in linked:
        path.hardlink_to(folder / path.name)
    left = folder / ".shard.7.partial"
    left.touch()
    others = [elsewhere / paths[0].name, folder / "shard-old.safetensors", folder / "shard-00000009.safetensors"]
    for path in others:
        path.write_bytes(content.replace(b"served", b"wrote!") + bytes(9 * len(content)))
    torn, header = folder / "shard-00000010.safetensors", folder / "shard-00000011.safetensors"
    torn.touch()
    header.write_bytes(b"[" * 60_000)
    ages = {paths[0]: 3, copied[0]: 10, copied[1]: 8, paths[2]: 1, **dict.fromkeys((*others, left, torn, header), 99)}
    for path, days in ages.items():
        os.utime(path, (time.time() - days * 86400,) * 2)
    remove_old(folder, days=2, gigabytes=1.5e-9 * len(content))
    assert {path for path in folder.rglob("*") if path.is_file()} == {copied[1], *linked, paths[3], *others}


def test_a_folder_with_other_shards_is_refused(stores):
    store = stores.open()
    store.put(answer(list(range(20))))
    store.close()
    assert module.why_not_stored(stores.folder) is None
    (stores.folder / "shard-00001.safetensors").write_bytes(
        shard_bytes([np.arange(3)], [np.zeros((2, 4), np.uint16)], [7], {})
    )
    said = f"--learn {stores.folder}: shard-00001.safetensors in it is no shard of served answers"
    with pytest.raises(ServingError, match=said):
        launcher._check_answers(ServeSettings(bundle=stores.folder, learn=stores.folder))
    (stores.folder / "shard-00001.safetensors").unlink()
    (stores.folder / "shard-00001.safetensors").mkdir()
    with pytest.raises(ServingError, match=r"--learn .*: Is a directory"):
        launcher._check_answers(ServeSettings(bundle=stores.folder, learn=stores.folder))


def test_a_share_of_the_answers_is_stored(stores):
    store = stores.open(share=0.25)
    request = sequence("a", [1, 2, 3]).request
    assert 100 < sum(store.takes(request) for _ in range(800)) < 300
    store.close()


def test_two_workers_never_take_the_same_number_or_mix_their_files(folder):
    """Threads have one process id, as workers in containers may have."""
    folder.mkdir()
    contents = [bytes([worker]) * 100_000 for worker in range(3)]
    with ThreadPoolExecutor(3) as pool:
        wrote = list(pool.map(lambda content: [add_shard(folder, content) for _ in range(9)], contents))
    for content, paths in zip(contents, wrote, strict=True):
        assert all(path.read_bytes() == content for path in paths)
    assert [path.name for path in sorted(folder.iterdir())] == [f"shard-{n:08d}.safetensors" for n in range(27)]
    (folder / "shard-00000002.safetensors").unlink()
    assert add_shard(folder, b"y").name == "shard-00000027.safetensors"


def test_bits_are_those_of_the_nearest_bfloat16():
    values = torch.randn(7, 111) * torch.logspace(-9, 9, 111)
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (bfloat16_bits(values.numpy()) == expected).all()


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    tokens = [np.arange(5), np.arange(3)]
    features = [np.full((4, 3), 0x3F80, np.uint16), np.full((2, 3), 0x4000, np.uint16)]
    path = add_shard(tmp_path, shard_bytes(tokens, features, [7, -9], {"name": "ä"}))
    with safe_open(path, framework="pt") as shard:
        assert shard.metadata() == {"name": "ä"}
        assert shard.get_tensor("hidden").tolist() == [[1.0] * 3] * 5 + [[2.0] * 3] * 3
        assert shard.get_tensor("prompts").tolist() == [7, -9]
