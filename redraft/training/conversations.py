"""Conversations that the target writes or reads, with its hidden states: what `redraft distill` stores."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jinja2 import TemplateError

from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.prompts import Prompt
from redraft.training.forward import Forward
from redraft.training.shards import Document

MAX_USER_TOKENS = 96
SLOT_ROWS = 64
"""Rows of an engine's cache slot are a multiple of this, so that TensorRT's alignment holds for heads of any size."""
OPENING_TOKENS = 16
"""How much of a text a model without a chat template writes as a prompt."""
MOST_REPEATS = 64
"""After so many prompts that are not new, one is answered again: the target may know no others."""
PROMPT_TEMPERATURE = 0.8
"""Temperature of the prompts that the target writes itself, as in Magpie (Xu et al. 2024). At 1, the paper's, a 135M
target loses its thread in many of them; at 0.8 its prompts still differ."""
TEMPERATURES = ((0.0, 0.6), (0.7, 0.25), (1.0, 0.15))
TIMED_STEPS = 3


def draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Tokens int64 [B] from float logits [B, V], on their and the generator's device; temperatures [B], on the CPU: 0
    takes the largest."""
    greedy = logits.argmax(-1)
    rows = (temperatures > 0).nonzero().squeeze(-1)
    if len(rows):
        scale, rows = temperatures[rows, None].to(logits.device), rows.to(logits.device)
        cdf = torch.softmax(logits[rows].float() / scale, dim=-1).cumsum_(-1)
        uniform = torch.rand(len(rows), 1, generator=generator, device=logits.device) * cdf[:, -1:]
        greedy[rows] = torch.searchsorted(cdf, uniform).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return greedy


def _draw_temperature(rng: random.Random) -> float:
    temperatures, shares = zip(*TEMPERATURES, strict=True)
    return rng.choices(temperatures, shares)[0]


class Generator:
    """Continuous batching over a preallocated cache: one token of every slot per forward.

    All documents share the rows of `prefix` (the chat template's opening but its last token), computed once if the
    slots keep them.
    """

    def __init__(self, forward: Forward, ends: set[int], prefix: list[int], seed: int):
        self.forward, self.ends, self.prefix = forward, ends, prefix
        self.running: list[Document | None] = [None] * forward.slots
        hidden, _ = forward([prefix or [0]] * forward.slots, [0] * forward.slots, [])
        self.prefix_hidden = hidden[0, : len(prefix)]
        self.random = torch.Generator(forward.device).manual_seed(seed)
        self.written: set[tuple[int, ...]] = set()
        """Prompts that the target wrote itself: none is answered twice"""
        self.dropped = 0
        """Prompts that it wrote again, that are empty, or where a text ended"""
        self.repeats = 0
        """How many of those came one after another just now"""
        self.rng = random.Random(seed)

    def rate(self) -> float:
        """Tokens per second, measured on a few steps with every slot in use."""
        slots = self.forward.slots
        step = [[0]] * slots, [len(self.prefix)] * slots, list(range(slots))
        self.forward(*step)
        begun = time.monotonic()
        for _ in range(TIMED_STEPS):
            self.forward(*step)
        return TIMED_STEPS * slots / (time.monotonic() - begun)

    def of(self, held_out: bool) -> list[Document]:
        """The documents under way of one part."""
        return [doc for doc in self.running if doc and doc.held_out == held_out]

    def cut(self, held_out: bool) -> list[Document]:
        """End the documents under way of one part: those with an answer as far as they are, the others without."""
        conversations = self.of(held_out)
        self.running = [None if doc and doc.held_out == held_out else doc for doc in self.running]
        return [doc for doc in conversations if doc.answered]

    def run(
        self, following: Callable[[], Document | None], max_new_tokens: int, assistant: list[int]
    ) -> Iterator[list[Document]]:
        """Yield after each forward the documents that it ended: at an end token, `max_new_tokens`, a loop, or a full
        cache. A free slot takes the `following` document; the run ends where there is none and all have ended.
        """
        while True:
            for slot in (slot for slot, doc in enumerate(self.running) if doc is None):
                if (new := following()) is None:
                    break
                self.running[slot] = self._start(new)
            if not any(self.running):
                return
            yield self._step(max_new_tokens, assistant)

    def _step(self, max_new_tokens: int, assistant: list[int]) -> list[Document]:
        # The last token of a document is not in the cache yet. A slot without one writes its first row again.
        opening = self.prefix[:1] or [0]
        tokens = [doc.tokens[-1:] if doc else opening for doc in self.running]
        lengths = [len(doc.tokens) - 1 if doc else 0 for doc in self.running]
        busy = [(slot, doc) for slot, doc in enumerate(self.running) if doc]
        wanted = [slot for slot, doc in busy if not doc.pending]
        hidden, logits = self.forward(tokens, lengths, wanted)
        temperatures = torch.tensor([doc.temperature for _, doc in busy if not doc.pending])
        drawn = dict(zip(wanted, draw(logits, temperatures, self.random).tolist(), strict=True))
        ended = []
        for slot, doc in busy:
            doc.hidden.append(hidden[slot, 0])
            if doc.pending:
                doc.tokens.append(doc.pending.popleft())
                continue
            token = drawn[slot]
            doc.drawn += 1
            finished = token in self.ends
            if doc.writes_prompt and not (finished or doc.drawn >= self._longest_prompt(assistant) or doc.loops()):
                doc.tokens.append(token)
                continue
            if doc.writes_prompt:
                if not self._accept(doc, whole=bool(assistant) or not finished):
                    self.running[slot] = None
                    continue
                doc.writes_prompt, doc.drawn = False, 0
                doc.temperature = _draw_temperature(self.rng)
                following = assistant or [token]
                doc.pending.extend(following[1:])
                doc.tokens.append(following[0])
                doc.answer_start = len(doc.tokens) - 1 + len(following)
                continue
            doc.tokens.append(token)
            full = len(doc.tokens) >= self.forward.length
            if finished or full or doc.drawn >= max_new_tokens or doc.loops():
                ended.append(doc)
                self.running[slot] = None
        return ended

    def _longest_prompt(self, assistant: list[int]) -> int:
        """Most tokens of a prompt that the target writes itself: in a short cache half of the room."""
        room = self.forward.length - len(self.prefix) - len(assistant)
        return min(MAX_USER_TOKENS if assistant else OPENING_TOKENS, room // 2)

    def _accept(self, doc: Document, whole: bool) -> bool:
        """Whether to answer the prompt that the target wrote: a `whole` one that is new, or anything after MOST_REPEATS
        others."""
        prompt = tuple(doc.tokens[len(self.prefix) + 1 :])
        if not (whole and prompt) or prompt in self.written:
            self.repeats += 1
            if self.repeats <= MOST_REPEATS:
                self.dropped += 1
                return False
        self.repeats = 0
        self.written.add(prompt)
        return True

    def _start(self, doc: Document) -> Document:
        if self.forward.keeps_rows:
            doc.tokens, doc.hidden = list(self.prefix), list(self.prefix_hidden)
        else:
            doc.tokens, doc.hidden = [], []
            doc.pending.extendleft(reversed(self.prefix))
        doc.tokens.append(doc.pending.popleft())
        return doc


@dataclass(frozen=True)
class Template:
    """The pieces of a chat template around one user turn, as token ids.

    A model without a chat template continues plain text: `assistant` is empty, `prefix` what any text begins with.
    """

    prefix: list[int]
    assistant: list[int]

    @classmethod
    def of(cls, tokenizer) -> Template:
        """The template of a tokenizer. Raises ValueError for a chat template that does not fit."""
        mark = "\u241f"
        if not tokenizer.chat_template:
            first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            return cls(tokenizer.encode("") or [first], [])
        user_turn = [{"role": "user", "content": mark}]
        try:
            text = tokenizer.apply_chat_template(user_turn, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template fails on a user's turn without a system's: {error}") from None
        if text.count(mark) != 1:
            raise ValueError(f"the chat template writes the user's text {text.count(mark)} times, expected once")
        before, after = text.split(mark)
        encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
        template = cls(encode(before), encode(after))
        if not (template.prefix and template.assistant):
            raise ValueError(
                f"the chat template has {before!r} before the user's text and {after!r} after it, "
                f"{len(template.prefix)} and {len(template.assistant)} tokens: expected one at least of each"
            )
        return template

    def __len__(self) -> int:
        return len(self.prefix) + len(self.assistant)


@dataclass(frozen=True)
class Lengths:
    """Most tokens of a conversation: of the user's turn, of the answer, and in all with the chat template's."""

    user: int
    answer: int
    whole: int

    @classmethod
    def within(cls, context: int, template: Template, answer: int) -> Lengths:
        """Lengths that fit a target's context, with answers of up to `answer` tokens; in a short context answers get
        half of the room.

        Raises ValueError where the template leaves no room.
        """
        longest = context // SLOT_ROWS * SLOT_ROWS - 1
        room = longest - len(template)
        if room < 2:
            raise ValueError(
                f"the chat template has {len(template)} tokens, which leaves no room for prompts and answers in the "
                f"target's context of {context}"
            )
        answer = min(answer, room // 2)
        user = min(MAX_USER_TOKENS + answer, room - answer)
        rows = len(template) + user + answer + 1
        return cls(user, answer, min(rows + -rows % SLOT_ROWS - 1, longest))


def documents(
    prompts: Iterator[Prompt] | None,
    tokenizer,
    template: Template,
    self_written: float,
    held_out: bool,
    rng: random.Random,
) -> Iterator[Document]:
    """Endless documents to be written: a share of `self_written` begins with a prompt of the target's own (all of them
    without prompts)."""
    while True:
        if prompts is None or rng.random() < self_written:
            opening = deque(template.prefix[-1:])
            yield Document(opening, PROMPT_TEMPERATURE, writes_prompt=True, held_out=held_out)
            continue
        user = tokenizer.encode(next(prompts).turns[0], add_special_tokens=False)
        pending = deque([template.prefix[-1], *user, *template.assistant])
        start = len(template.prefix) - 1 + len(pending)
        yield Document(pending, _draw_temperature(rng), held_out=held_out, answer_start=start)


def prefill(
    target: Target,
    prompts: Iterator[Prompt],
    tokenizer,
    template: Template,
    batch: int,
    longest: int,
) -> Iterator[list[Document]]:
    """Documents of the prompts' own responses, cut to `longest` tokens, hidden states by batched prefill. Responses
    have LEAST_RESPONSE tokens or more, which fit."""
    while True:
        docs = []
        for row in (next(prompts) for _ in range(batch * 4)):
            user, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (row.turns[0], row.response))
            head = [*template.prefix, *user, *template.assistant]
            tokens = [*head, *answer, target.config.eos_token_ids[0]][:longest]
            docs.append(Document(deque(), 0.0, tokens=tokens, answer_start=len(head)))
        docs.sort(key=lambda doc: len(doc.tokens))
        for group in (docs[i : i + batch] for i in range(0, len(docs), batch)):
            width = max(len(doc.tokens) for doc in group)
            ids = torch.tensor([doc.tokens + [0] * (width - len(doc.tokens)) for doc in group])
            device = target.embedding.weight.device
            states = target(ids.to(device), causal_attend(target.config, width, device))
            for row, doc in zip(states.features.to(torch.bfloat16).cpu(), group, strict=True):
                doc.hidden = list(row[: len(doc.tokens)])
            yield group
