"""`POST /v1/completions`: answers and streams in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from redraft.openai.answers.choices import Choice, CompletionLogProbs, DraftTrees, metrics, prompt_log_probs, usage
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.schemas import CompletionBody
from redraft.openai.service import new_id
from redraft.openai.sse import END, event
from redraft.openai.translate import Job
from redraft.worker.protocol import Chunk


class CompletionAnswer:
    """One request's answer, whole or as a stream. The choices of a prompt follow each other."""

    def __init__(self, body: CompletionBody, job: Job, model: ServedModel):
        self._body, self._job, self._model = body, job, model
        self._choices = [Choice() for _ in job.requests]
        self._log_probs = [
            CompletionLogProbs(model, body.alternatives, not body.skip_special_tokens) for _ in job.requests
        ]
        self._trees = [DraftTrees(model) for _ in job.requests]
        self._begun: set[int] = set()
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        texts = [""] * len(self._choices)
        lists: list[dict[str, Any] | None] = [None] * len(self._choices)
        scores: list[dict[str, Any]] = [{}] * len(self._choices)
        async for index, chunk in generation.chunks():
            text, log_probs = self._add(index, chunk)
            self._choices[index].trees += self._trees[index].write(chunk.draft_trees or ())
            texts[index] += text
            lists[index] = _joined(lists[index], log_probs)
            if (alternatives := self._body.prompt_alternatives) is not None and chunk.prompt_log_probs is not None:
                ids = self._job.prompt_of(index).ids
                scores[index] = {"prompt_logprobs": prompt_log_probs(ids, chunk, self._model, alternatives)}
        return {
            **self._head,
            "choices": [
                {"index": index, "text": text, "logprobs": log_probs, **choice.ending}
                | scores[index]
                | ({"draft_trees": choice.trees} if self._body.draft_trees else {})
                for index, (text, log_probs, choice) in enumerate(zip(texts, lists, self._choices, strict=True))
            ],
            "usage": usage(self._job, self._choices),
            **metrics(self._choices),
        }

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer's events."""
        async for index, chunk in generation.chunks():
            text, log_probs = self._add(index, chunk)
            trees = self._trees[index].write(chunk.draft_trees or ())
            if text or log_probs or trees or chunk.done:
                ending = self._choices[index].ending if chunk.done else {"finish_reason": None}
                choice = {"index": index, "text": text, "logprobs": log_probs, **ending}
                yield self._write([choice | ({"draft_trees": trees} if trees else {})])
        if self._body.usage_at_end:
            yield self._write([])
        yield END

    def error(self, error: ApiError) -> bytes:
        """The event with which a stream ends that fails."""
        return event(error.body)

    def _add(self, index: int, chunk: Chunk) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities that a chunk adds to a choice; those of an echo with the first."""
        self._choices[index].add(chunk)
        text, log_probs, writer = chunk.text, None, self._log_probs[index]
        first = index not in self._begun
        if first and self._body.echo:
            prompt = self._job.prompt_of(index)
            text = prompt.text + text
            if self._body.log_probs:
                scores, best = chunk.prompt_log_probs or [], chunk.prompt_top_log_probs
                log_probs = writer.add(prompt.ids, scores, best, prompt.text)
        self._begun.add(index)
        # An answer without tokens has empty lists, not none: clients index into them.
        if self._body.log_probs and (chunk.token_ids or (first and chunk.done)):
            new = writer.add(chunk.token_ids, list(chunk.log_probs or ()), chunk.top_log_probs)
            log_probs = _joined(log_probs, new)
        return text, log_probs

    def _write(self, choices: list[dict[str, Any]]) -> bytes:
        data: dict[str, Any] = {**self._head, "choices": choices}
        if self._body.usage_always or (self._body.usage_at_end and not choices):
            data["usage"] = usage(self._job, self._choices)
        elif self._body.usage_at_end:
            data["usage"] = None
        if not choices or (choices[0]["finish_reason"] and not self._body.usage_at_end):
            data |= metrics(self._choices)
        return event(data)


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two parts of the parallel lists, one after the other."""
    if first is None or second is None:
        return first or second
    return {name: None if values is None else values + second[name] for name, values in first.items()}
