"""Conversations of a tiny random teacher: what is generated, and within which lengths."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
import typer

from redraft.cli import distill
from redraft.model_defs.target.attention import causal_attend
from redraft.prompts import Prompt
from redraft.training import conversations, parts, writing
from redraft.training.forward import EngineForward, TorchForward
from redraft.training.shards import Document, Shards, write_shard
from tests.engines.tiny import LIMITS, tiny_bundle, tiny_target, write_model
from tests.training.teacher import END, LETTERS, begun_with, generate, write_teacher


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_an_engine_gives_what_the_module_gives(tmp_path, backend):
    """Wherever it keeps hidden states: in arrays, or in tensors."""
    module = tiny_target()
    bundle = tiny_bundle(tmp_path, module, backend, limits=LIMITS.model_copy(update={"slots": 3}), beam_length=2)
    engine, through_module = EngineForward(bundle.path, 1), TorchForward(module, 3, LIMITS.max_len)
    for tokens, lengths, wanted in (([[7, 8, 9]] * 3, [0, 0, 0], []), ([[4], [5], [6]], [3, 2, 3], [0, 2])):
        (hidden, logits), (states, expected) = (
            forward(tokens, lengths, wanted) for forward in (engine, through_module)
        )
        torch.testing.assert_close(hidden, states, atol=0.02, rtol=0.02)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


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


def test_answers_that_have_not_begun_do_not_count(tmp_path):
    """They are dropped if the part ends now: a part is done when it ends, not before."""
    part = parts.Part(False, Shards(tmp_path, {"model": "tiny"}), 100, [])
    asked = Document(deque([5]), 0.0, tokens=[1] * 90, answer_start=91)
    answered = Document(deque(), 0.0, tokens=[1] * 40, answer_start=30)
    assert writing.written([part], [asked, answered]) == 40


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
@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_prompt_is_written_once(target, monkeypatch, keeps_rows):
    """In this run or one before, until the target seems to know no other. The template's rows may be lost."""
    monkeypatch.setattr(conversations, "MOST_REPEATS", 3)
    forward = TorchForward(target, 1, 160)
    generator = conversations.Generator(forward, {END}, [7, 8, 9], seed=0)
    if not keeps_rows:
        forward.keeps_rows = False
        forward.cache.v[:] = 9
    stream = generator.run(lambda: Document(deque([11]), 0.0, writes_prompt=True), 4, [END, 5])
    first, second = itertools.islice(itertools.chain.from_iterable(stream), 2)
    turns = [tuple(doc.tokens[4 : doc.answer_start - 2]) for doc in (first, second)]
    assert turns[0] == turns[1]
    assert generator.written == {turns[0]}
    assert generator.dropped == 3
    hidden = target(torch.tensor([first.tokens]), causal_attend(target.config, len(first.tokens))).hidden[0]
    torch.testing.assert_close(torch.stack(first.hidden).float(), hidden[:-1], atol=0.05, rtol=0.02)


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


@torch.no_grad()
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


def test_drawn_tokens_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    drawn = conversations.draw(logits, torch.full((20_000,), 0.7), torch.Generator().manual_seed(0))
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    assert (torch.bincount(drawn, minlength=4) / 20_000 - expected).abs().max() < 0.015
