"""`POST /v1/chat/completions`: answers and streams in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from redraft.openai.answers.choices import Choice, DraftTrees, chat_log_probs, metrics, prompt_log_probs, usage
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatBody
from redraft.openai.service import new_id
from redraft.openai.sse import END, event
from redraft.openai.structured.reader import CallPart
from redraft.openai.structured.thoughts import Thought
from redraft.openai.translate import Job


class ChatAnswer:
    """One request's answer, whole or as a stream."""

    def __init__(self, body: ChatBody, job: Job, model: ServedModel):
        self._body, self._job, self._model = body, job, model
        self._choices = [Choice(job.call_reader(), job.thought_reader()) for _ in job.requests]
        self._trees = [DraftTrees(model) for _ in job.requests]
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model.name}

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        scores: dict[str, Any] = {}
        async for index, chunk in generation.chunks():
            self._choices[index].add(chunk)
            if chunk.prompt_log_probs is not None and index == 0:  # all choices have the same prompt
                ids, alternatives = self._job.prompts[0].ids, self._body.prompt_alternatives
                scores = {"prompt_logprobs": prompt_log_probs(ids, chunk, self._model, alternatives or 0)}
            if self._body.logprobs:
                self._choices[index].log_probs += chat_log_probs(chunk, self._model, self._body.alternatives)
            self._choices[index].trees += self._trees[index].write(chunk.draft_trees or ())
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": _message(choice, self._body.include_reasoning),
                    "logprobs": {"content": choice.log_probs, "refusal": None} if self._body.logprobs else None,
                    **choice.ending,
                }
                | ({"draft_trees": choice.trees} if self._body.draft_trees else {})
                for index, choice in enumerate(self._choices)
            ],
            "usage": usage(self._job, self._choices),
            **scores,
            **metrics(self._choices),
        }

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer's events; several are sent at once where they come from one chunk."""
        begun: set[int] = set()
        async for index, chunk in generation.chunks():
            choice, parts = self._choices[index], []
            deltas = choice.add(chunk)
            if index not in begun:
                begun.add(index)
                parts.append(self._event(index, {"role": "assistant", "content": ""}))
            entries = chat_log_probs(chunk, self._model, self._body.alternatives) if self._body.logprobs else []
            trees = self._trees[index].write(chunk.draft_trees or ())
            thoughts = "".join(delta.text for delta in deltas if isinstance(delta, Thought))
            text = "".join(delta for delta in deltas if isinstance(delta, str))
            if not self._body.include_reasoning:
                thoughts = ""
            if thoughts:
                # Scores and trees of the chunk go out once: with its text where it has some.
                beside = ([], []) if text else (entries, trees)
                parts.append(self._event(index, {"reasoning_content": thoughts}, *beside))
            if text or ((entries or trees) and not thoughts):
                parts.append(self._event(index, {"content": text}, entries, trees))
            calls = [_call_delta(delta) for delta in deltas if isinstance(delta, CallPart)]
            parts += [self._event(index, {"tool_calls": [call]}) for call in calls]
            if chunk.done:
                parts.append(self._event(index, {}, ending=choice.ending))
            if parts:
                yield b"".join(parts)
        if self._body.usage_at_end:
            yield self._write([], usage(self._job, self._choices))
        yield END

    def error(self, error: ApiError) -> bytes:
        """The event with which a stream ends that fails."""
        return event(error.body)

    def _event(
        self, index: int, delta: dict[str, Any], entries: list[dict[str, Any]] | None = None,
        trees: list[dict[str, Any]] | None = None, *, ending: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        log_probs = {"content": entries, "refusal": None} if entries else None
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": log_probs,
            **(ending or {"finish_reason": None}),
        }
        if trees:
            choice["draft_trees"] = trees
        return self._write([choice], usage(self._job, self._choices) if self._body.usage_always else None)

    def _write(self, choices: list[dict[str, Any]], counts: dict[str, Any] | None) -> bytes:
        data: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._body.usage_at_end:
            data["usage"] = counts
        if not choices or (choices[0]["finish_reason"] and not self._body.usage_at_end):
            data |= metrics(self._choices)
        return event(data)


def _message(choice: Choice, include_reasoning: bool) -> dict[str, Any]:
    """An answer as the message that the client sends back with the results of its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thoughts:
        message["content"] = choice.text or None
        if include_reasoning:
            message["reasoning_content"] = choice.thoughts
    if not choice.calls:
        return message
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
    return message | {"content": choice.text or None, "tool_calls": calls}


def _call_delta(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
