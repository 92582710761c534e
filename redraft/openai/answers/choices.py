"""What the worker's chunks become in an answer: choices, log-probabilities, draft trees, usage, statistics."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from redraft.openai.model import ServedModel
from redraft.openai.structured.reader import CallReader, Delta
from redraft.openai.structured.thoughts import Thought, ThoughtReader
from redraft.openai.translate import Job
from redraft.request import Alternatives, DraftTree, SequenceStats, StopReason
from redraft.worker.protocol import Chunk

IMPOSSIBLE = -9999.0
TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools."""


@dataclass
class Call:
    """A call of a function so far; the arguments are a JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Choice:
    """One sequence so far."""

    reader: CallReader | None = None
    """Tells calls from text, where the request has tools."""
    thought_reader: ThoughtReader | None = None
    """Tells thoughts from the answer."""
    thoughts: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason | None = None
    stats: SequenceStats | None = None
    log_probs: list[dict[str, Any]] = field(default_factory=list)
    """In the chat form."""
    trees: list[dict[str, Any]] = field(default_factory=list)
    """Draft trees, where they are asked for."""

    @property
    def ending(self) -> dict[str, Any]:
        """Why it ended, as vLLM says it."""
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.stats.output_tokens if self.stats else len(self.token_ids)

    def add(self, chunk: Chunk) -> list[Delta | Thought]:
        """Append what a chunk brings, and return its pieces: thoughts, text, and calls."""
        thoughts, text = "", chunk.text
        if self.thought_reader is not None:
            thoughts, text = self.thought_reader.push(chunk.text, chunk.done)
        pieces: list[Delta] = [text] if text else []
        if self.reader is not None:
            pieces = self.reader.push(text) + (self.reader.finish() if chunk.done else [])
        deltas: list[Delta | Thought] = [Thought(thoughts), *pieces] if thoughts else [*pieces]
        for delta in deltas:
            if isinstance(delta, Thought):
                self.thoughts += delta.text
            elif isinstance(delta, str):
                self.text += delta
            elif delta.name is not None and delta.id is not None:
                self.calls.append(Call(delta.id, delta.name))
            else:
                self.calls[delta.index].arguments += delta.arguments
        self.token_ids += chunk.token_ids
        self.finish_reason, self.stop_reason = chunk.finish_reason or self.finish_reason, chunk.stop_reason
        # Only whole calls are to be run: one that a stop word or the length cut keeps that reason. `enough`: what the
        # length cut comes after the last call that is wanted.
        if self.reader is not None and self.calls and self.reader.whole:
            ended = self.finish_reason == "stop" or (self.finish_reason == "length" and self.reader.enough)
            self.finish_reason = TOOL_CALLS if ended else self.finish_reason
        self.stats = chunk.stats or self.stats
        return deltas


def usage(job: Job, choices: list[Choice]) -> dict[str, Any]:
    """Tokens of a request: those of its prompts, and of all its choices; at its end also how many of the prompts were
    cached."""
    completion = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        "prompt_tokens_details": _details(job.n, choices),
        **_thought_details(job, choices),
    }


def _thought_details(job: Job, choices: list[Choice]) -> dict[str, dict[str, int]]:
    """Tokens of the thoughts, at the end of an answer that has some."""
    thinking = job.prompts[0].thinking
    if (
        thinking is None
        or not all(choice.stats for choice in choices)
        or not any(choice.thoughts for choice in choices)
    ):
        return {}
    counts = (min(thinking.tokens(choice.thoughts), choice.output_tokens) for choice in choices)
    return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}}


def _details(n: int, choices: list[Choice]) -> dict[str, int] | None:
    """A prompt counts once, as the choice with the fewest cached tokens has it: the others copied that one's."""
    cached = [choice.stats.cached_tokens for choice in choices if choice.stats]
    if len(cached) < len(choices):
        return None
    return {"cached_tokens": sum(min(cached[first : first + n]) for first in range(0, len(cached), n))}


def metrics(choices: list[Choice]) -> dict[str, Any]:
    """`{"metrics": ...}` of a request with one choice, in vLLM's names; nothing for several, or before its end."""
    if len(choices) != 1 or choices[0].stats is None:
        return {}
    stats = choices[0].stats
    seconds = (stats.prefill_ms + stats.decode_ms) / 1e3
    return {
        "metrics": {
            "time_to_first_token_ms": stats.prefill_ms,
            "generation_time_ms": stats.decode_ms,
            "queue_time_ms": stats.queue_ms,
            "tokens_per_second": stats.output_tokens / seconds if seconds else None,
            "seed": stats.seed,
            "speculative_decoding": _speculation(stats),
        }
    }


def _speculation(stats: SequenceStats) -> dict[str, Any] | None:
    """What drafting gained; None before the first step. Entry j of the histogram counts the steps that accepted exactly
    j drafted tokens, and entry d of the two lists by depth those of depth d + 1."""
    if not stats.steps:
        return None
    at_least = [stats.steps, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": stats.steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.offered_by_depth),
        "offered_by_depth": stats.offered_by_depth,
        "accepted_by_depth": stats.accepted_by_depth,
    }


def chat_log_probs(chunk: Chunk, model: ServedModel, alternatives: int) -> list[dict[str, Any]]:
    """A chunk's log-probabilities, token by token, in the form of chats and responses."""
    best = chunk.top_log_probs or [[]] * len(chunk.token_ids)
    return [
        _entry(token, value, model) | {"top_logprobs": [_entry(*pair, model) for pair in pairs[:alternatives]]}
        for token, value, pairs in zip(chunk.token_ids, chunk.log_probs or (), best, strict=True)
    ]


def _entry(token: int, value: float, model: ServedModel) -> dict[str, Any]:
    data = model.codec.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}


def prompt_log_probs(
    ids: list[int], chunk: Chunk, model: ServedModel, alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Log-probabilities of a prompt in vLLM's form: for each token but the first its own and those of the alternatives,
    by token id. A token's rank among all is known where it is one of the most likely."""
    best = chunk.prompt_top_log_probs or [[]] * len(ids)
    return [
        None if value is None else _by_id(token, value, pairs, model, alternatives)
        for token, value, pairs in zip(ids, chunk.prompt_log_probs or (), best, strict=True)
    ]


def _by_id(
    token: int, value: float, best: Alternatives, model: ServedModel, alternatives: int
) -> dict[str, dict[str, Any]]:
    ranks = {other: rank for rank, (other, _) in enumerate(best, 1)}
    return {
        str(other): {"logprob": finite(score), "rank": ranks.get(other), "decoded_token": model.token_text(other)}
        for other, score in {token: value, **dict(best[:alternatives])}.items()
    }


def finite(log_prob: float) -> float:
    """A log-probability as JSON can write it: OpenAI's -9999 for a token that cannot come."""
    return max(log_prob, IMPOSSIBLE)


class CompletionLogProbs:
    """Log-probabilities in the form of text completions: parallel lists, with each token's offset in the choice's text,
    in characters. `special`: whether that has the answer's special tokens."""

    def __init__(self, model: ServedModel, alternatives: int, special: bool):
        self._model, self._alternatives, self._special = model, alternatives, special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def add(
        self,
        token_ids: list[int],
        values: list[float | None],
        alternatives: list[list[tuple[int, float]]] | None,
        echoed: str | None = None,
    ) -> dict[str, Any]:
        """The lists for the next tokens, of the answer or of the `echoed` prompt. The chosen token is among its
        alternatives, also where it is less likely; a prompt's first token has neither."""
        tokens = [self._model.token_text(token) for token in token_ids]
        offsets = []
        for token, text in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            if self._model.codec.is_special(token):
                # A prompt has them where the client wrote them, and not where the tokenizer put them before it.
                written = self._special if echoed is None else echoed.startswith(text, self._offset)
                self._offset += len(text) if written else 0
            else:
                piece = self._decoder.decode(self._model.codec.token_bytes(token))
                if echoed is not None and not echoed.startswith(piece, self._offset):
                    piece = piece.removeprefix(" ")  # which SentencePiece puts before a text, and the text lacks
                self._offset += len(piece)
        best: list[dict[str, float] | None] | None = None
        if self._alternatives:
            best = [
                None
                if value is None
                else {self._model.token_text(other): finite(score) for other, score in pairs[: self._alternatives]}
                | {token: finite(value)}
                for token, value, pairs in zip(tokens, values, alternatives or [[]] * len(tokens), strict=True)
            ]
        scores = [None if value is None else finite(value) for value in values]
        return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": best, "text_offset": offsets}


class DraftTrees:
    """Writes the trees of one choice, step by step."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, trees: Sequence[DraftTree]) -> list[dict[str, Any]]:
        """Each tree with the text of each of its nodes, and what each token that it gained adds to the answer. A
        character of several tokens comes with its last one."""
        return [
            {
                "nodes": [
                    {"token": self._model.token_text(token), "token_id": token, "parent": parent, "score": score,
                     "origin": origin}
                    for token, parent, score, origin in zip(
                        tree.token_ids, tree.parents, tree.scores, tree.origins, strict=True
                    )
                ],
                "path": tree.path,
                "gained": list(map(self._text, tree.gained)),
            }
            for tree in trees
        ]  # fmt: skip

    def _text(self, token: int) -> str:
        if self._model.codec.is_special(token):  # which the text does not have
            return ""
        return self._decoder.decode(self._model.codec.token_bytes(token))
