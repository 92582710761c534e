"""From prompts to a drafter on a tiny random target: files, resuming, and a drafter that learns."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from model_defs.drafters.eagle import EagleDrafter
from model_defs.drafters.hidden_state import HiddenStateDrafter
from model_defs.target.attention import causal_attend
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from redraft.console.progress import Progress
from tests.engines.tiny import LIMITS, tiny_bundle, tiny_target
from training.teacher_data import USUAL_CUTOFF, TeacherData

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import distill  # noqa: E402
import train_drafter  # noqa: E402
from redraft.prompts import Prompt  # noqa: E402
from training import (  # noqa: E402
    conversations,
    parts,
    writing,
)
from training import prompts as teacher_prompts  # noqa: E402
from training import run as training_run  # noqa: E402
from training.forward import EngineForward, TorchForward  # noqa: E402
from training.plan import usual_rows  # noqa: E402
from training.shards import Document, Shards, write_shard  # noqa: E402

VOCAB, END = 111, 2
LETTERS = SimpleNamespace(
    chat_template="<>",
    apply_chat_template=lambda messages, **_: f"<{messages[0]['content']}>",
    encode=lambda text, **_: [ord(character) for character in text],
)
"""A tokenizer: every character is one."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr(distill, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: LETTERS))


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = TargetConfig(VOCAB, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, False, False, (END,))
    target = Target(config).eval().requires_grad_(False)
    target.embedding.weight.mul_(3)
    return target


def generate(
    target: Target, count: int, prompts: list[list[int]], slots: int = 3, prefix: tuple[int, ...] = (7, 8, 9)
) -> list[Document]:
    docs = (Document(deque(prompt), 0.0, answer_start=len(prefix) + len(prompt)) for prompt in itertools.cycle(prompts))
    generator = conversations.Generator(TorchForward(target, slots, 64), {END}, list(prefix), seed=0)
    stream = generator.run(partial(next, docs), 20, [END, 5])
    return list(itertools.islice(itertools.chain.from_iterable(stream), count))


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_an_engine_gives_what_the_module_gives(tmp_path, backend):
    """Wherever it keeps hidden states: in arrays, or in tensors."""
    module = tiny_target()
    bundle = tiny_bundle(tmp_path, module, backend, limits=LIMITS.model_copy(update={"slots": 3}))
    engine, through_module = EngineForward(bundle.path, 1), TorchForward(module, 3, LIMITS.max_len)
    for tokens, lengths, wanted in (([[7, 8, 9]] * 3, [0, 0, 0], []), ([[4], [5], [6]], [3, 2, 3], [0, 2])):
        (hidden, logits), (states, expected) = (
            forward(tokens, lengths, wanted) for forward in (engine, through_module)
        )
        torch.testing.assert_close(hidden, states, atol=0.02, rtol=0.02)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(file: Path) -> list[list[int]]:
    """The documents of a shard."""
    shard = load_file(file)
    return [shard["tokens"][begin:end].tolist() for begin, end in itertools.pairwise(shard["offsets"].tolist())]


def begun_with(folder: Path) -> set[str]:
    """What the users of all conversations of a folder say."""
    texts: set[str] = set()
    for file in folder.glob("shard-*.safetensors"):
        texts |= set(prompts_of(load_file(file)))
    return texts


def prompts_of(shard: dict[str, torch.Tensor]) -> list[str]:
    """What the user says in each conversation of a shard."""
    places = zip(shard["offsets"][:-1].tolist(), shard["answer_starts"].tolist(), strict=True)
    return ["".join(map(chr, shard["tokens"][begin + 1 : answer - 1].tolist())) for begin, answer in places]


def write_teacher(folder: Path, prompts: Path | None, tokens: int = 600, **more) -> tuple[Path, Path]:
    """The folders to train on and held out that distilling with this file filled."""
    where = {"model": folder, "prompts": prompts, "output": folder / "data", "held_out": folder / "held"}
    distill.main(**where | {"tokens": tokens, "slots": 8, "max_new_tokens": 12, "self_written": 0, "threads": 1} | more)
    return folder / "data", folder / "held"


UNRESERVED = [text for text in map(str, range(300)) if teacher_prompts.rank(text) >= USUAL_CUTOFF]
RESERVED = [text for text in map(str, range(300)) if teacher_prompts.rank(text) < USUAL_CUTOFF]


@torch.no_grad()  # which ends with the test, unlike the command's own
@pytest.mark.parametrize(("texts", "apart"), [(UNRESERVED[:40], 1), (RESERVED[:3], 2), (["7", "8", "7 "], 1)])
def test_anybodys_prompts_are_distilled(target, tmp_path, monkeypatch, texts, apart):
    """Prompts without a source, some with: both parts are written, however few prompts there are, from none of the
    same."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    rows = [{"prompt": text} | ({"source": "mine"} if place % 3 == 1 else {}) for place, text in enumerate(texts)]
    data, held = map(begun_with, write_teacher(tmp_path, write_lines(tmp_path / "mine.jsonl", rows), 2000))
    assert held
    assert {text.strip() for text in data | held} == {text.strip() for text in texts}
    assert not {text.strip() for text in held} & {text.strip() for text in data}
    assert len({text.strip() for text in held}) == apart


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_a_single_prompt_is_trained_on(target, tmp_path, monkeypatch, capsys):
    """Judging is by prompts that the target writes itself; where it must not write any, the file is refused."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    prompts = write_lines(tmp_path / "one.jsonl", [{"prompt": RESERVED[0]}])
    with pytest.raises(typer.BadParameter, match=r"one.jsonl has no prompt for --held-out, which shares none"):
        write_teacher(tmp_path, prompts)
    data, held = write_teacher(tmp_path, prompts, self_written=0.1)
    assert RESERVED[0] in begun_with(data)
    assert begun_with(held)
    assert RESERVED[0] not in begun_with(held)
    assert "held: 100 tokens held out, to judge drafters by; from the target's own prompts" in capsys.readouterr().err


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_a_larger_file_moves_no_prompt_to_the_other_part(target, tmp_path, monkeypatch):
    """The first file has no prompt that is held out by the usual rank; the second has."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    few = [{"prompt": text} for text in UNRESERVED[:3]]
    first = [begun_with(part) for part in write_teacher(tmp_path, write_lines(tmp_path / "few.jsonl", few), 300)]
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 600)
    more = few + [{"prompt": text} for text in UNRESERVED[3:12] + RESERVED[:2]]
    data, held = write_teacher(tmp_path, write_lines(tmp_path / "more.jsonl", more), 2400)
    assert len(first[1]) == 1
    assert first[1] | set(RESERVED[:2]) <= begun_with(held)
    assert not begun_with(held) & begun_with(data)
    shutil.rmtree(held)
    shutil.copytree(data, tmp_path / "all")
    shutil.rmtree(data)
    data, held = write_teacher(tmp_path, write_lines(tmp_path / "other.jsonl", more[3:]), 300)
    with pytest.raises(typer.BadParameter, match="do not hold out the same prompts"):
        write_teacher(tmp_path, tmp_path / "more.jsonl", output=tmp_path / "all", held_out=held, tokens=9999)


def test_training_refuses_prompts_that_are_held_out(tmp_path):
    """Where folders of different files were brought together."""
    doc = Document(deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4, dtype=torch.bfloat16)] * 3)
    for name, meta in (("data", {}), ("usual", {"held_out": "true"}), ("more", {"held_out": "true"})):
        below = {"held_out_below": str(USUAL_CUTOFF + (name == "more"))}
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "shard-00000.safetensors", [doc], meta | below)
    assert TeacherData([tmp_path / "data", tmp_path / "usual"], 1, False).training
    with pytest.raises(ValueError, match=r"data may hold prompts that .*more holds out"):
        TeacherData([tmp_path / "data", tmp_path / "more"], 1, False)


@pytest.mark.parametrize("tokens", [20_000, 1_000_000, 5_000_000, 90_000_000])
def test_held_out_conversations_are_a_small_share(tokens):
    assert 2_000 <= parts.held_out_tokens(tokens) <= 100_000
    assert tokens < 1_000_000 or parts.held_out_tokens(tokens) <= tokens / 50


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_shares_are_drawn_as_they_are_named(target, tmp_path):
    prompts = [Prompt(str(place), "few" if place < 2 else "many", (str(place),)) for place in range(50)]
    even = teacher_prompts.draw_prompts(teacher_prompts.by_share(prompts, {}), 0)
    assert sorted(prompt.turns[0] for prompt in itertools.islice(even, 50)) == sorted(map(str, range(50)))
    shared = teacher_prompts.draw_prompts(teacher_prompts.by_share(prompts, {"few": 3, "many": 1}), 0)
    drawn = [prompt.category for prompt in itertools.islice(shared, 4000)]
    assert drawn.count("few") == pytest.approx(3000, abs=150)
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text, "source": "a"} for text in UNRESERVED[:9]])
    for shares, message in (("b=1", r"no source \['b'\]; it has \['a'\]"), ("a=-1", "above 0"), ("a", "form source=")):
        with pytest.raises(typer.BadParameter, match=message):
            write_teacher(tmp_path, lines, shares=shares)


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_a_check_says_what_a_run_takes_and_writes_nothing(target, tmp_path, capsys):
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    write_teacher(tmp_path, lines, 20_000, check=True, bundle=tmp_path / "not-built-yet")
    said = capsys.readouterr().err
    assert "data: 20,000 tokens to train on; from 8 prompts" in said
    assert "held: 2,000 tokens held out, to judge drafters by; from 1 prompt\n" in said
    assert re.search(
        r"about 1 MB of disk and 1 MB for the engine, whose build .*, at least \d+ MB of memory and, "
        r"on \d+ cores of a CPU, about 0 s",
        said,
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("context", "expected"),
    [(8192, (352, 256, 639)), (512, (245, 245, 511)), (333, (149, 149, 319)), (64, (21, 21, 63))],
)
def test_conversations_fit_the_targets_context(context, expected):
    """Slots of the engine, with the row of a tree, have whole multiples of 64 rows."""
    template = conversations.Template([1] * 9, [2] * 12)
    assert astuple(conversations.Lengths.within(context, template, 256)) == expected
    with pytest.raises(ValueError, match=r"21 tokens, which leaves no room .* context of 63"):
        conversations.Lengths.within(63, template, 256)


@torch.no_grad()
def test_a_prompt_of_the_targets_own_leaves_room_for_an_answer(target):
    """The cache holds fewer tokens than a prompt may have elsewhere."""
    own = conversations.documents(None, LETTERS, conversations.Template([7, 8], [9]), 1.0, False, random.Random(0))
    generator = conversations.Generator(TorchForward(target, 2, 31), {END}, [7], seed=0)
    for doc in itertools.islice(itertools.chain.from_iterable(generator.run(lambda: next(own), 20, [9])), 5):
        assert doc.answer_start <= 2 + 14 + 1
        assert doc.answer_start < len(doc.tokens) <= 31


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_all_is_done_when_the_log_says_so(target, tmp_path, monkeypatch):
    """Although the held-out part holds more than it is to."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 400)
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    write_teacher(tmp_path, lines, 100)
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    update, done = Progress.update, []
    monkeypatch.setattr(Progress, "update", lambda shown, *given: (update(shown, *given), done.append(shown.done)))
    write_teacher(tmp_path, lines, 1000)
    assert done[-1] == 1100 > done[-2]
    assert done == sorted(done)
    done.clear()
    write_teacher(tmp_path, lines, 1000)
    assert not done


def test_a_killed_run_goes_on_with_what_was_under_way(target, tmp_path):
    """`kill -9` before a document has ended: the same command keeps the answers as far as they were."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:40]])
    script = f"""
import itertools, os, signal, sys
sys.path[:0] = {[str(ROOT), str(ROOT / "build")]!r}
from pathlib import Path
from types import SimpleNamespace
import distill
from training import conversations, writing
from tests.build.test_distill_and_train import LETTERS, write_teacher

step, steps = conversations.Generator._step, itertools.count()

def killed(*arguments):
    if next(steps) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)

conversations.Generator._step = killed
distill.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: LETTERS)
writing.SHARD_S = 0.0
write_teacher(Path({str(tmp_path)!r}), Path({str(lines)!r}), 4000, max_new_tokens=60)
"""
    assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    (kept,) = (tmp_path / "held").glob("running-*")
    before = texts_of(kept)
    assert len(before) >= 4
    with torch.no_grad():
        parts = write_teacher(tmp_path, lines, 4000, max_new_tokens=60)
    for folder, least in zip(parts, (4000, 2000), strict=True):
        texts = [text for file in sorted(folder.glob("shard-*")) for text in texts_of(file)]
        assert least <= sum(map(len, texts)) < least + 80, "no more than a step of each slot and a document"
        assert not list(folder.glob("running-*"))
    assert all(text in texts for text in before)


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_a_prompt_that_is_too_long_is_no_partner_of_the_others(target, tmp_path, monkeypatch, capsys):
    """The ranks of those that are used decide which is held out: here that of the long one is the lowest."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 100)
    write_model(target, tmp_path)
    lowest = min(("1" * length for length in range(353, 2000)), key=teacher_prompts.rank)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in (lowest, *UNRESERVED[:9])])
    data, held = map(begun_with, write_teacher(tmp_path, lines, 600))
    assert data | held == set(UNRESERVED[:9])
    assert "1 of 10 prompts have more than 108 tokens and are left out" in capsys.readouterr().err


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_responses_that_are_too_short_are_left_out(target, tmp_path, monkeypatch, capsys):
    """Where all of them are, there is nothing to read."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 20)
    write_model(target, tmp_path)
    rows = [{"prompt": text, "response": "1234567"} for text in UNRESERVED[:9]]
    reads = {"source": distill.Source.prefill}
    with pytest.raises(typer.BadParameter, match=r"no response of .*short.jsonl has 8 tokens"):
        write_teacher(tmp_path, write_lines(tmp_path / "short.jsonl", rows), 100, **reads)
    mixed = [row | ({"response": "12345678"} if place < 4 else {}) for place, row in enumerate(rows)]
    data, held = map(begun_with, write_teacher(tmp_path, write_lines(tmp_path / "mine.jsonl", mixed), 100, **reads))
    assert data | held == set(UNRESERVED[:4])
    assert "5 of 9 responses have fewer than 8 tokens and are left out" in capsys.readouterr().err


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_runs_of_a_folder_go_through_the_prompts_in_turn(target, tmp_path):
    """A run begins with those that no other has drawn."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:30]])
    begun: list[list[str]] = []
    for tokens in (120, 240):
        write_teacher(tmp_path, lines, tokens, held_out=None)
        files = sorted((tmp_path / "data").glob("shard-*"))[len(begun) :]
        shards = [load_file(file) for file in files]
        begun.append([text for shard in shards for text in prompts_of(shard)])
    assert len(begun[0]) >= 4
    assert len(begun[1]) >= 4
    assert len({*begun[0], *begun[1]}) == len(begun[0]) + len(begun[1]) <= 30


def test_a_removed_shards_number_is_not_given_again(tmp_path):
    """Nor its seed: the others stay as they are."""
    doc = Document(deque(), 0.0, tokens=[5, 6, 7], hidden=[torch.zeros(4, dtype=torch.bfloat16)] * 3)
    for number in (0, 2):
        write_shard(tmp_path / f"shard-{number:05d}.safetensors", [doc], {})
    shards = Shards(tmp_path, {"model": "tiny"})
    assert shards.count == 3
    shards.add([doc], [])
    assert [file.stem[-1] for file in sorted(tmp_path.glob("shard-*"))] == ["0", "2", "3"]


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_shards_of_another_model_or_division_are_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    data, held = write_teacher(tmp_path, lines, 200)
    (file,) = held.glob("shard-*")
    moved = shutil.copy(file, data / "shard-00007.safetensors")
    with pytest.raises(typer.BadParameter, match=r"shard-00007.safetensors is of another division .*: remove it"):
        write_teacher(tmp_path, lines, 300)
    Path(moved).unlink()
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(typer.BadParameter, match=r"is of another .* than the one that is there now: give another"):
        write_teacher(tmp_path, lines, 300)


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_shards_of_other_prompts_or_another_template_are_not_taken_for_these(target, tmp_path, monkeypatch, capsys):
    """Shards that tell neither, as older ones, are taken."""
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 60)
    write_model(target, tmp_path)
    rows = [{"prompt": text} for text in UNRESERVED[:9]]
    first, more = (write_lines(tmp_path / f"{n}.jsonl", rows[:n]) for n in (5, 9))
    write_teacher(tmp_path, first, 200)
    write_teacher(tmp_path, first, 200)
    assert "already hold what is asked for" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter, match=r"data and .*held already hold .* of other prompts: remove or rename"):
        write_teacher(tmp_path, more, 200)
    write_teacher(tmp_path, more, 400)
    assert "hold conversations of other prompts, which are kept" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(typer.BadParameter, match=r"is of another chat template: remove or rename .*data"):
        write_teacher(tmp_path, more, 900)
    for file in (file for folder in ("data", "held") for file in (tmp_path / folder).iterdir()):
        with safe_open(file, framework="pt") as shard:
            meta = {name: text for name, text in shard.metadata().items() if name not in ("prompts", "chat_template")}
        save_file(load_file(file), file, meta)
    write_teacher(tmp_path, first, 200)
    assert "already hold what is asked for" in capsys.readouterr().err


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_what_was_under_way_is_kept_where_fewer_tokens_are_asked_for(target, tmp_path, capsys):
    """A check leaves all as it is."""
    write_model(target, tmp_path)
    lines = write_lines(tmp_path / "mine.jsonl", [{"prompt": text} for text in UNRESERVED[:9]])
    data, _ = write_teacher(tmp_path, lines, 200, held_out=None)
    (data / "shard-00000.safetensors").rename(data / "running-00000.safetensors")
    write_teacher(tmp_path, lines, 100, held_out=None, check=True)
    assert (data / "running-00000.safetensors").exists()
    assert "data: 100 tokens to train on, 100 of them there" in capsys.readouterr().err
    write_teacher(tmp_path, lines, 100, held_out=None)
    assert [file.name for file in data.iterdir()] == ["shard-00000.safetensors"]
    said = capsys.readouterr().err
    assert "data already hold what is asked for" in said
    assert "fewer than about 1,000 tokens cannot be trained on" in said


def test_answers_that_have_not_begun_do_not_count(tmp_path):
    """They are dropped if the part ends now: a part is done when it ends, not before."""
    part = parts.Part(False, Shards(tmp_path, {"model": "tiny"}), 100, [])
    asked = Document(deque([5]), 0.0, tokens=[1] * 90, answer_start=91)
    answered = Document(deque(), 0.0, tokens=[1] * 40, answer_start=30)
    assert writing.written([part], [asked, answered]) == 40


def test_a_template_that_fails_is_said_in_a_line():
    def fails(*_, **__):
        raise jinja2.TemplateError("system first")

    tokenizer = SimpleNamespace(chat_template="!", apply_chat_template=fails)
    with pytest.raises(ValueError, match=r"the chat template fails on .*: system first"):
        conversations.Template.of(tokenizer)


def test_more_tokens_than_the_disk_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64_000_000_000))
    part = parts.Part(False, Shards(tmp_path / "new", {"model": "tiny"}), 60_000_000, [])
    part.shards.tokens = 5_000_000
    parts.require_space([part], 1156)
    with pytest.raises(ValueError, match=r"64\.0 GB free: at most --tokens 50363321 fit"):
        parts.require_space(
            [part, parts.Part(True, Shards(tmp_path / "held", {"model": "tiny"}), 10_000_000, [])], 1156
        )
    part.wanted = 90_000_000
    with pytest.raises(
        ValueError, match=r"--tokens 90000000 take 104\.0 GB, .* has 64\.0 GB free: at most --tokens 60363321 fit"
    ):
        parts.require_space([part], 1156)


@torch.no_grad()
@pytest.mark.parametrize("prefix", [(7, 8, 9), ()])
def test_batched_generation_equals_the_target_alone(target, prefix):
    """Slots that start and end at different times leave no trace in each other's cache."""
    for doc in generate(target, 12, [[11, 12, 13, 14], [21], [31, 32]], prefix=prefix):
        ids = torch.tensor([doc.tokens])
        hidden = target(ids, causal_attend(target.config, len(doc.tokens))).hidden[0]
        greedy = target.lm_head(hidden).argmax(-1)
        assert doc.tokens[doc.answer_start :] == greedy[doc.answer_start - 1 : -1].tolist()
        stored = torch.stack(doc.hidden).float()
        torch.testing.assert_close(stored, hidden[:-1], atol=0.05, rtol=0.02)
        assert len(doc.hidden) == len(doc.tokens) - 1


@torch.no_grad()
def test_a_prompt_of_the_targets_own_ends_where_it_repeats_itself(target):
    """And is answered: what the user says is no answer, however short answers are."""
    generator = conversations.Generator(TorchForward(target, 3, 160), {END}, [7, 8, 9], seed=0)
    openings = itertools.count(11)
    stream = generator.run(lambda: Document(deque([next(openings)]), 0.0, writes_prompt=True), 4, [END, 5])
    for doc in itertools.islice(itertools.chain.from_iterable(stream), 9):
        turn = doc.answer_start - 2
        assert doc.tokens[turn : doc.answer_start] == [END, 5]
        assert 4 < turn - 4 < conversations.MAX_USER_TOKENS
        assert len(doc.tokens) - doc.answer_start <= 4


@torch.no_grad()
def test_a_prompt_is_written_once(target, monkeypatch):
    """In this run or one before, until the target seems to know no other."""
    monkeypatch.setattr(conversations, "MOST_REPEATS", 3)
    generator = conversations.Generator(TorchForward(target, 1, 160), {END}, [7, 8, 9], seed=0)
    stream = generator.run(lambda: Document(deque([11]), 0.0, writes_prompt=True), 4, [END, 5])
    first, second = itertools.islice(itertools.chain.from_iterable(stream), 2)
    turns = [tuple(doc.tokens[4 : doc.answer_start - 2]) for doc in (first, second)]
    assert turns[0] == turns[1]
    assert generator.written == {turns[0]}
    assert generator.dropped == 3


def test_prompts_of_earlier_runs_are_read_from_their_shards(tmp_path):
    rows = [torch.zeros(4, dtype=torch.bfloat16)] * 9
    docs = [Document(deque(), 0.0, tokens=[7, 8, *turn, 5, 6, 1], answer_start=4 + len(turn), hidden=rows)
            for turn in ([11, 12], [13])]  # fmt: skip
    for number, doc in enumerate(docs):
        write_shard(tmp_path / f"shard-{number:05d}.safetensors", [doc, docs[0]], {})
    found = Shards(tmp_path, {"model": "tiny"}).prompts(2, 2)
    assert list(found) == [(11, 12), (11, 12), (13,), (11, 12)]


@torch.no_grad()
@pytest.mark.parametrize("start", [1, None])
def test_a_model_without_a_chat_template_goes_on_with_plain_text(target, start):
    """Its own prompts are the first tokens of a text; one that ends there is none."""

    def encode(text, add_special_tokens=True):
        return [start] * (start is not None and add_special_tokens) + [ord(character) for character in text]

    tokenizer = SimpleNamespace(chat_template=None, bos_token_id=start, eos_token_id=1, encode=encode)
    template = conversations.Template.of(tokenizer)
    assert (template.prefix, template.assistant) == ([1], [])
    own = conversations.documents(None, tokenizer, template, 0.0, False, random.Random(0))
    generator = conversations.Generator(TorchForward(target, 3, 160), {END}, template.prefix[:-1], seed=0)
    stream = generator.run(lambda: next(own), 6, template.assistant)
    for doc in itertools.islice(itertools.chain.from_iterable(stream), 9):
        assert doc.answer_start == 1 + conversations.OPENING_TOKENS
        assert END not in doc.tokens[: doc.answer_start]
        hidden = target(torch.tensor([doc.tokens]), causal_attend(target.config, len(doc.tokens))).hidden[0]
        torch.testing.assert_close(torch.stack(doc.hidden).float(), hidden[:-1], atol=0.05, rtol=0.02)
    given = conversations.documents(
        iter([Prompt("1", "all", ("ab",))]), tokenizer, template, 0.0, False, random.Random(0)
    )
    doc = next(given)
    assert (list(doc.pending), doc.answer_start) == ([1, 97, 98], 3)


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_without_prompts_the_target_writes_its_own(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "LEAST_HELD_OUT", 300)
    write_model(target, tmp_path)
    with pytest.raises(typer.BadParameter, match="--source prefill reads the responses of --prompts"):
        write_teacher(tmp_path, None, 600, source=distill.Source.prefill)
    data, held = map(begun_with, write_teacher(tmp_path, None, 600))
    assert len(data) > 3
    assert held
    assert not data & held
    assert "no prompts given: the target writes its own" in capsys.readouterr().err


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_an_engine_too_short_for_prompts_and_answers_is_refused(target, tmp_path, monkeypatch):
    write_model(target, tmp_path)
    monkeypatch.setattr(distill, "EngineForward", lambda *_: SimpleNamespace(length=118))
    row = {"source": "own", "prompt": "word"}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row | {"prompt": str(i)}) + "\n" for i in range(9)))
    where = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "data"}
    with pytest.raises(typer.BadParameter, match=r"takes 118 tokens, and a prompt of up to 116 .* more than 118"):
        distill.main(**where, bundle=tmp_path, tokens=100, max_new_tokens=20)


def test_a_chat_template_of_the_users_text_alone_is_refused():
    tokenizer = SimpleNamespace(
        chat_template="!",
        apply_chat_template=lambda messages, **_: messages[0]["content"] + "!",
        encode=lambda text, **_: [ord(character) for character in text],
    )
    with pytest.raises(ValueError, match="has '' before the user's text and '!' after it, 0 and 1 tokens: exp"):
        conversations.Template.of(tokenizer)


def test_drawn_tokens_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    drawn = conversations.draw(logits, torch.full((20_000,), 0.7), torch.Generator().manual_seed(0))
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    assert (torch.bincount(drawn, minlength=4) / 20_000 - expected).abs().max() < 0.015


def write_model(target: Target, folder: Path) -> None:
    c = target.config
    weights = {"model.embed_tokens.weight": target.embedding.weight, "model.norm.weight": target.norm.weight}
    weights["lm_head.weight"] = target.lm_head.weight
    for i, layer in enumerate(target.layers):
        q, k, v = layer.qkv.weight.split([32, 16, 16])
        gate, up = layer.gate_up.weight.chunk(2)
        names = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight, "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }  # fmt: skip
        weights |= {f"model.layers.{i}.{name}.weight": w for name, w in names.items()}
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": c.max_position, "tie_word_embeddings": False,
        "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def taught(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, in `data`, three shards of its answers."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(target, folder)
    (folder / "data").mkdir()
    for shard in range(3):
        docs = generate(target, 24, [[token] for token in range(10 + shard, 100, 3)])
        write_shard(folder / f"data/shard-{shard:05d}.safetensors", docs, {})
    return folder


SHAPES: dict[str, dict] = {
    "recurrent": {"settings": ["exit_dim=32", "num_blocks=1"], "window": 8},
    "hidden_state": {"settings": ["info_vocabulary=40", "info_rank=8"], "window": 24},
    "eagle": {"window": 24},
    "medusa": {"settings": ["heads=3"], "window": 8},
    "draft_lm": {"window": 24},
}


def train(taught: Path, output: Path, drafter: str, positions: int, **more) -> list[dict]:
    where = {"model": taught, "data": [taught / "data"], "output": output, "drafter": drafter}
    run = {
        "hot_vocabulary": 64,
        "unroll": 3,
        "batch": 4,
        "positions": positions,
        "held_out": 1,
        "every": 25,
        "threads": 1,
    }
    train_drafter.main(**where | run | SHAPES[drafter] | more)
    return [json.loads(line) for line in (output / "log.jsonl").open()]


def test_a_gpu_carries_the_32k_most_frequent_of_more_than_40k_tokens():
    sizes = (49_152, 40_001, 40_000, 111)
    assert [usual_rows(size, "cuda") for size in sizes] == [32768, 32768, 40_000, 111]
    assert [usual_rows(size, "cpu") for size in sizes] == [12288, 12288, 12288, 111]
    settings = partial(training_run.settings_of, HiddenStateDrafter, vocab_size=49_152)
    assert settings(["info_rank=8"], device="cuda") == {"info_vocabulary": "32768", "info_rank": "8"}
    assert settings(["info_vocabulary=9"], device="cuda") == {"info_vocabulary": "9"}
    assert settings([], device="cpu") == training_run.settings_of(EagleDrafter, [], 49_152, "cuda") == {}


@pytest.mark.parametrize("drafter", SHAPES)
def test_training_learns(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Random models answer in short cycles, which a drafter learns fast, from random weights too."""
    monkeypatch.setattr(train_drafter.DRAFTERS[drafter], "initialize", lambda *_: None)
    log = train(taught, tmp_path, drafter, 6400, peak_rate=3e-3)
    assert log[-1]["positions"] >= 6400 > log[-1]["positions"] - 4 * 24
    assert log[-1]["loss"] < log[0]["loss"] - 0.01
    assert log[-1]["chain_acceptance_length"] > 1.5
    with safe_open(tmp_path / "drafter.safetensors", framework="pt") as file:
        assert file.get_tensor("hot_ids").shape == (64,)
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.int32, torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize("drafter", ["recurrent", "hidden_state"])
def test_a_run_that_was_stopped_goes_on_identically(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Stopped at a checkpoint and started again: the same batches, rates and weights as a run in one piece."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    log = train(taught, whole, drafter, 2400)
    save = training_run.save_checkpoint

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_run, "save_checkpoint", save_and_stop)
        with pytest.raises(SystemExit):
            train(taught, parts, drafter, 2400)
    timing = {"hours", "rate", "minutes_left"}
    for again, expected in zip(train(taught, parts, drafter, 2400), log[1:], strict=True):
        assert {key: again[key] for key in again.keys() - timing} == {
            key: expected[key] for key in again.keys() - timing
        }
    assert (parts / "drafter.safetensors").read_bytes() == (whole / "drafter.safetensors").read_bytes()


def test_a_run_that_is_done_says_so(taught: Path, tmp_path: Path, capsys):
    train(taught, tmp_path, "medusa", 200)
    (log,) = train(taught, tmp_path, "medusa", 200)
    assert re.search(r"was trained on 2\d\d positions already: nothing to do", capsys.readouterr().err)
    assert log["positions"] >= 200


def test_a_run_is_killed_between_two_lines_of_its_log(taught: Path, tmp_path: Path, monkeypatch):
    """It goes on from a checkpoint of the clock's, and logs what a run in one piece logs."""
    log = train(taught, tmp_path / "whole", "recurrent", 2400)
    steps, save = itertools.count(1), training_run.save_checkpoint

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        if next(steps) == 40:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_run, "CHECKPOINT_S", 0.0)
        patched.setattr(training_run, "save_checkpoint", save_and_stop)
        with pytest.raises(SystemExit):
            train(taught, tmp_path / "parts", "recurrent", 2400)
    assert len(log) >= 3
    assert (tmp_path / "parts/log.jsonl").read_text().count("\n") == 1
    timing = {"hours", "rate", "minutes_left"}
    for again, expected in zip(train(taught, tmp_path / "parts", "recurrent", 2400), log, strict=True):
        assert [again[key] for key in again.keys() - timing] == [expected[key] for key in again.keys() - timing]


@pytest.mark.parametrize(("shards", "judged", "trained"), [(1, 0, 1), (2, 1, 1), (3, 1, 2)])
def test_whatever_number_of_shards_is_trained_on(taught: Path, tmp_path: Path, capsys, shards, judged, trained):
    """A single one is not judged by; conversations that were held out are, however few."""
    (tmp_path / "data").mkdir()
    for shard in range(shards):
        shutil.copy(taught / f"data/shard-{shard:05d}.safetensors", tmp_path / "data")
    log = train(taught, tmp_path / "drafter", "recurrent", 100, data=[tmp_path / "data"], held_out=None)
    assert ("chain_acceptance_length" in log[-1]) == (judged > 0)
    teacher = TeacherData([tmp_path / "data"], None, False)
    assert (len(teacher.evaluation), len(teacher.training)) == (judged, trained)
    assert f"on {trained} shard" in capsys.readouterr().err
    docs = generate(Target.from_folder(taught), 4, [[11]])
    (tmp_path / "held").mkdir()
    write_shard(tmp_path / "held/shard-00000.safetensors", docs, {"held_out": "true"})
    teacher = TeacherData([tmp_path / "data", tmp_path / "held"], None, False)
    assert (len(teacher.evaluation), len(teacher.training)) == (1, shards)


def test_shards_of_less_than_a_batch_are_trained_on_together(taught: Path, tmp_path: Path):
    """A clock closes them where the target is slow."""
    (tmp_path / "data").mkdir()
    target = Target.from_folder(taught)
    for shard in range(7):
        docs = generate(target, 1, [[11 + shard]])
        write_shard(tmp_path / f"data/shard-{shard:05d}.safetensors", docs, {})
    log = train(taught, tmp_path / "drafter", "recurrent", 100, data=[tmp_path / "data"], held_out=None, batch=8)
    assert log[-1]["positions"] >= 100


def test_a_run_goes_on_from_another_drafter(taught: Path, tmp_path: Path):
    """Its shape is kept, its weights are the start; another kind is refused."""
    log = train(taught, tmp_path / "first", "eagle", 2400)
    more = train(taught, tmp_path / "second", "eagle", 200, start_from=tmp_path / "first", peak_rate=1e-9)
    assert more[0]["chain_acceptance_length"] == pytest.approx(log[-1]["chain_acceptance_length"], abs=0.02)
    with pytest.raises(typer.BadParameter, match="holds a drafter 'eagle', the command trains one 'medusa'"):
        train(taught, tmp_path / "third", "medusa", 200, start_from=tmp_path / "first")


def test_unfit_commands_are_refused(taught: Path, tmp_path: Path):
    train(taught, tmp_path, "hidden_state", 100)
    with pytest.raises(typer.BadParameter, match=r"run with labels soft, batch 4, the command asks for labels hard, b"):
        train(taught, tmp_path, "hidden_state", 100, labels="hard", batch=8)
    with pytest.raises(typer.BadParameter, match=r"run with positions 100, the command asks for positions 200; for"):
        train(taught, tmp_path, "hidden_state", 200)
    with pytest.raises(typer.BadParameter, match=r"run with data 2 shards \(\w+\), the command asks for data 1 shards"):
        train(taught, tmp_path, "hidden_state", 100, held_out=2)
    with pytest.raises(typer.BadParameter, match=r"info_rank=8.*asks for.*info_rank=4"):
        train(taught, tmp_path, "hidden_state", 200, settings=["info_vocabulary=40", "info_rank=4"])
    with pytest.raises(typer.BadParameter, match="'info_rank' is not of the form name=value"):
        train(taught, tmp_path / "new", "hidden_state", 200, settings=["info_rank"])
    with pytest.raises(typer.BadParameter, match=r"no shard-\*.safetensors in"):
        train(taught, tmp_path / "new", "eagle", 200, data=[tmp_path])
    with pytest.raises(typer.BadParameter, match="holds only the 3 held-out shards"):
        train(taught, tmp_path / "new", "eagle", 200, held_out=3)
    with pytest.raises(typer.BadParameter, match=r"data holds .* windows of 24 positions, fewer than a batch of 500"):
        train(taught, tmp_path / "new", "eagle", 200, batch=500)
    with pytest.raises(typer.BadParameter, match="4 drafting steps need as many heads, this drafter has 3"):
        train(taught, tmp_path / "new", "medusa", 200, unroll=4)
    with pytest.raises(typer.BadParameter, match="json does not exist"):
        train(taught, tmp_path / "new", "eagle", 200, start_from=tmp_path / "nowhere")
    with pytest.raises(typer.BadParameter, match="nowhere does not exist"):
        train(tmp_path / "nowhere", tmp_path / "new", "eagle", 200, data=[taught / "data"])
    assert not (tmp_path / "new").exists()


@torch.no_grad()  # which ends with the test, unlike the command's own
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "nowhere"}, "config.json does not exist"),
        ({"bundle": "nowhere"}, "nowhere does not exist; "),
        ({"prompts": "nowhere.jsonl"}, "prompts .*nowhere.jsonl: No such file.*; give a file"),
        ({"prompts": "nameless.jsonl"}, "nameless.jsonl, line 2: no turns, prompt, .* among 'source': name the field"),
        ({"prompts": "prose.jsonl"}, "prose.jsonl, line 1: not JSON .*; expected"),
        ({"prompts": "empty.jsonl"}, "empty.jsonl holds no prompts"),
        ({"prompts": "long.jsonl"}, "all 3 prompts of .*long.jsonl have more than 127 tokens: shorten"),
        ({"prompts": "half.jsonl"}, "half.jsonl, line 2: .*surrogates not allowed"),
        ({"held_out": "data"}, "expected another folder than --output"),
        ({"source": distill.Source.prefill}, "needs a `response`, the prompt .* has none"),
    ],
)
def test_input_that_is_not_there_is_refused(target, tmp_path, monkeypatch, given, message):
    """In one line, before a folder is made for the output or a shard is written."""
    write_model(target, tmp_path)
    rows = [json.dumps({"source": "own", "prompt": str(i)}) + "\n" for i in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    (tmp_path / "nameless.jsonl").write_text(rows[0] + '{"source": "own"}\n')
    (tmp_path / "prose.jsonl").write_text("Once upon a time")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "half.jsonl").write_text(rows[0] + '{"prompt": "\\ud800"}\n')
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "1" * n}) + "\n" for n in (353, 400, 500)))
    paths = {key: value if key == "source" else tmp_path / value for key, value in given.items()}
    where = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "data"}
    with pytest.raises(typer.BadParameter, match=message):
        distill.main(**(where | paths), tokens=100)
    assert not (tmp_path / "data").exists()


def test_a_chain_of_one_step_is_trained(taught: Path, tmp_path: Path):
    assert train(taught, tmp_path, "hidden_state", 100, unroll=1)[-1]["loss"] > 0


def test_the_command_line(taught: Path, tmp_path: Path):
    app = typer.Typer()
    app.command()(train_drafter.main)
    base = ["--model", taught, "--data", taught / "data", "--output", tmp_path, "--positions", 50, "--threads", 1]
    shape = ["--set", "heads=3", "--set", "num_blocks=2", "--unroll", 3, "--hot-vocabulary", 0, "--batch", 2]
    arguments = [str(part) for part in (*base, *shape, "--held-out", 1)]
    done = CliRunner().invoke(app, [*arguments, "--drafter", "medusa"])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["drafter"], config["heads"], config["num_blocks"]) == ("medusa", 3, 2)
    assert config["hot_vocabulary"] == VOCAB
    done = CliRunner().invoke(app, [*arguments, "--drafter", "oracle"])
    assert done.exit_code == 2
    assert "known are" in done.output
