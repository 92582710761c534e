"""The answer of `/v1/responses`: one message of one text, whole or as the events that build it up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from redraft.openai.answers.choices import Choice, chat_log_probs, metrics, usage
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.responses import ResponsesBody
from redraft.openai.service import new_id
from redraft.openai.sse import event
from redraft.openai.translate import Job


class ResponsesAnswer:
    """One request's answer."""

    def __init__(self, body: ResponsesBody, job: Job, model: ServedModel):
        self._body, self._job, self._model = body, job, model
        self._choice = Choice()
        self._item_id = new_id("msg")
        self._number = 0
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
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer, once it has ended."""
        async for _, chunk in generation.chunks():
            self._choice.add(chunk)
            if self._body.log_probs:
                self._choice.log_probs += chat_log_probs(chunk, self._model)
        return self._response()

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The events that build the answer up; those that belong together are sent at once."""
        item = {"item_id": self._item_id, "output_index": 0}
        begun = False
        async for _, chunk in generation.chunks():
            parts = [] if begun else self._begin(item)
            begun = True
            entries = chat_log_probs(chunk, self._model) if self._body.log_probs else []
            if chunk.text or entries:
                delta = {**item, "content_index": 0, "delta": chunk.text, "logprobs": entries}
                parts.append(self._event("response.output_text.delta", delta))
            self._choice.add(chunk)
            self._choice.log_probs += entries
            if parts:
                yield b"".join(parts)
        yield b"".join(self._end(item))

    def error(self, error: ApiError) -> bytes:
        """The events with which a stream ends that fails."""
        failure = {"code": "server_error", "message": error.message}
        return self._event("error", {"code": error.code, "message": error.message, "param": None}) + self._event(
            "response.failed", {"response": self._response("failed") | {"error": failure}}
        )

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        message = self._message("in_progress") | {"content": []}
        return [
            self._event("response.created", {"response": self._response("in_progress")}),
            self._event("response.in_progress", {"response": self._response("in_progress")}),
            self._event("response.output_item.added", {"output_index": 0, "item": message}),
            self._event("response.content_part.added", {**item, "content_index": 0, "part": self._part()}),
        ]

    def _end(self, item: dict[str, Any]) -> list[bytes]:
        response = self._response()
        content = {**item, "content_index": 0}
        text = {"text": self._choice.text, "logprobs": self._choice.log_probs}
        return [
            self._event("response.output_text.done", content | text),
            self._event("response.content_part.done", content | {"part": self._part()}),
            self._event("response.output_item.done", {"output_index": 0, "item": response["output"][0]}),
            self._event(f"response.{response['status']}", {"response": response}),
        ]

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response as it is; `status` None is how it ended."""
        status = status or ("completed" if self._choice.finish_reason == "stop" else "incomplete")
        ended = status in ("completed", "incomplete")
        counts = usage(self._job.prompt_tokens, [self._choice])
        reason = {"length": "max_output_tokens"}.get(self._choice.finish_reason or "", self._choice.finish_reason)
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "output": [self._message(status)] if ended else [],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
            if ended
            else None,
            **metrics([self._choice]),
        }

    def _message(self, status: str) -> dict[str, Any]:
        content = [self._part()]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        log_probs = self._choice.log_probs
        return {"type": "output_text", "text": self._choice.text, "annotations": [], "logprobs": log_probs}
