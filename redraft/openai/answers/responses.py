"""The answer of `/v1/responses`: a message and calls of functions, whole or as the events that build them up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from redraft.openai.answers.choices import TOOL_CALLS, Choice, chat_log_probs, metrics, usage
from redraft.openai.answers.items import CallItem, Event, MessageItem, ReasoningItem
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ResponsesBody
from redraft.openai.service import new_id
from redraft.openai.sse import event
from redraft.openai.structured.reader import Delta
from redraft.openai.structured.thoughts import Thought
from redraft.openai.translate import Job, sampling
from redraft.worker.protocol import Chunk


class ResponsesAnswer:
    """One request's answer."""

    def __init__(self, body: ResponsesBody, job: Job, model: ServedModel):
        self._body, self._job, self._model = body, job, model
        self._choice = Choice(job.call_reader(), job.thought_reader())
        self._items: list[ReasoningItem | MessageItem | CallItem] = []
        self._log_probs: list[dict[str, Any]] = []
        """Those of tokens whose text has not come yet."""
        self._number = 0
        chosen = sampling(body, model)
        self._head = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": chosen["temperature"],
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice.for_responses,
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": chosen["top_p"],
            "truncation": "disabled",
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer, once it has ended."""
        async for _, chunk in generation.chunks():
            self._grow(chunk)
        return self._response()

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The events that build the answer up; those that belong together are sent at once."""
        begun = False
        async for _, chunk in generation.chunks():
            parts = [] if begun else self._begin()
            begun = True
            parts += self._grow(chunk)
            if parts:
                yield b"".join(parts)
        response = self._response()
        yield b"".join([*self._close(response["status"]), self._event(response["status"], {"response": response})])

    def error(self, error: ApiError) -> bytes:
        """The events with which a stream ends that fails."""
        failure = {"code": "server_error", "message": error.message}
        said = {"code": error.code, "message": error.message, "param": None}
        failed = self._event("failed", {"response": self._response("failed") | {"error": failure}})
        return event({"type": "error", "sequence_number": self._count(), **said}, "error") + failed

    def _begin(self) -> list[bytes]:
        kinds = "created", "in_progress"
        return [self._event(kind, {"response": self._response("in_progress")}) for kind in kinds]

    def _grow(self, chunk: Chunk) -> list[bytes]:
        """Add what a chunk brings. An answer that has nothing is an empty message."""
        deltas = self._choice.add(chunk)
        if self._body.log_probs:
            self._log_probs += chat_log_probs(chunk, self._model, self._body.alternatives)
        if chunk.done and not deltas and (self._log_probs or not self._items) and not self._choice.calls:
            deltas = [""]
        return [part for delta in deltas for part in self._add(delta)]

    def _add(self, delta: Delta | Thought) -> list[bytes]:
        last = self._items[-1] if self._items else None
        if isinstance(delta, Thought):
            if isinstance(last, ReasoningItem):
                return [self._item_event(last.add(delta.text))]
            reasoning = ReasoningItem(new_id("rs"))
            return [*self._open(reasoning), self._item_event(reasoning.add(delta.text))]
        if isinstance(delta, str):
            log_probs = self._take_log_probs(delta)
            if isinstance(last, MessageItem):
                return [self._item_event(last.add(delta, log_probs))]
            message = MessageItem(new_id("msg"))
            return [*self._open(message), self._item_event(message.add(delta, log_probs))]
        self._log_probs = []
        if delta.name is not None and delta.id is not None:
            return self._open(CallItem(new_id("fc"), delta.id, delta.name))
        return [self._item_event(last.add(delta.arguments))] if isinstance(last, CallItem) else []

    def _take_log_probs(self, text: str) -> list[dict[str, Any]]:
        """Those of a text's tokens: all that have come or, where calls may follow the text in them, as many as cover
        it. Those before the text were of thoughts."""
        if self._items and isinstance(self._items[-1], ReasoningItem):
            lengths = accumulate(len(entry["token"]) for entry in reversed(self._log_probs))
            last = next((count for count, length in enumerate(lengths, 1) if length >= len(text)), len(self._log_probs))
            self._log_probs = self._log_probs[len(self._log_probs) - last :]
        count = len(self._log_probs)
        if self._job.tools is not None and text:
            covered = enumerate(accumulate(len(entry["token"]) for entry in self._log_probs), 1)
            count = next((index for index, length in covered if length >= len(text)), count)
        taken, self._log_probs = self._log_probs[:count], self._log_probs[count:]
        return taken

    def _open(self, item: ReasoningItem | MessageItem | CallItem) -> list[bytes]:
        """Begin an item, after the end of the one before."""
        parts = self._close("completed") if self._items else []
        self._items.append(item)
        return parts + [self._item_event(item_event) for item_event in item.begin()]

    def _close(self, status: str) -> list[bytes]:
        """End the last item."""
        item = self._items[-1]
        done: Event = ("output_item.done", {"item": item.whole(self._last_status(status))})
        return [self._item_event(item_event) for item_event in (*item.end(), done)]

    def _last_status(self, status: str) -> str:
        """The last item's status in a response of a status: a call that a stop word cut is not complete."""
        cut = (
            isinstance(self._items[-1], CallItem) and self._choice.reader is not None and not self._choice.reader.whole
        )
        return "incomplete" if cut else status

    def _item_event(self, item_event: Event) -> bytes:
        kind, data = item_event
        return self._event(kind, {"output_index": len(self._items) - 1} | data)

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": self._count(), **data}, kind)

    def _count(self) -> int:
        self._number += 1
        return self._number - 1

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response as it is; `status` None is how it ended."""
        status = status or ("completed" if self._choice.finish_reason in ("stop", TOOL_CALLS) else "incomplete")
        ended = status in ("completed", "incomplete")
        counts = usage(self._job, [self._choice])
        cached = (counts["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        reason = {"length": "max_output_tokens"}.get(self._choice.finish_reason or "", self._choice.finish_reason)
        before = [item.whole("completed") for item in self._items[:-1]]
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "output": [*before, self._items[-1].whole(self._last_status(status))] if ended else [],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": counts["total_tokens"],
            }
            if ended
            else None,
            **metrics([self._choice]),
        }
