"""`LLM`: an engine bundle run inside this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, Unpack, cast, overload

from redraft.bundle.generation import GenerationConfig
from redraft.chat import ChatMessage, Writing, effort_options, render_chat
from redraft.output import Output
from redraft.request import (
    AUTO_REGRESSIVE,
    MAX_TOKENS,
    Generated,
    GenerateRequest,
    InvalidRequest,
    Options,
    SequenceStats,
    joined,
    request,
)
from redraft.request_state import RequestState
from redraft.runtime import Runtime


@dataclass
class Answer(Generated):
    """A finished request: its generated tokens without the end token, statistics, and seconds from submission to end.

    `str(stats)` is a line with tokens, tokens/s, tokens/step and accepted drafted tokens.
    """

    stats: SequenceStats = field(default_factory=SequenceStats)
    seconds: float = 0.0


class LLM:
    """A bundle's target and drafters, loaded into this process. Also a context manager, which closes it.

    Requests are batched in flight: each step of the target serves every request that runs, the open streams' too.
    Threads may share an LLM; their calls take turns.

    A bundle split over several ranks needs as many processes: `mpiexec -n 2 python program.py`. Only rank 0 goes on
    after the constructor. The other ranks execute the batches it sends until it closes the LLM, then exit.
    """

    def __init__(self, bundle: str | Path | Runtime, threads: int | None = None, prefix_reuse: bool = True):
        """Load a bundle's folder, or take a runtime that is loaded. `threads`: default all cores. The CPU operators of
        a process share one pool of threads, which has the last number given. With `prefix_reuse` a prompt that begins
        like an earlier one is prefilled only from there on; measurements want it off.

        Raises BundleError where the folder is no bundle or does not fit this machine, and ValueError for a runtime that
        another LLM has taken.
        """
        self.runtime = (
            bundle if isinstance(bundle, Runtime) else Runtime.load(bundle, threads, prefix_reuse=prefix_reuse)
        )
        if self.runtime.taken:
            raise ValueError("an LLM has taken this Runtime before: share that LLM, or load the bundle again")
        self.runtime.taken = True
        self._keys = itertools.count()
        self._inboxes: dict[int, deque[Output]] = {}
        """Outputs not taken yet, by the key of each request in flight."""
        self._abandoned: list[int] = []
        self._lock = threading.RLock()
        self._closed = False

    @property
    def methods(self) -> list[str]:
        """Methods that a request can name; the first is the default."""
        return list(dict.fromkeys([*self.runtime.methods, AUTO_REGRESSIVE]))

    @property
    def sampling_defaults(self) -> Options:
        """The sampling that the model's authors advise, as options of `generate`; empty where its bundle has none."""
        if self.runtime.path is None:
            return {}
        config = GenerationConfig.read(self.runtime.path)
        return cast(Options, config.model_dump(exclude_none=True, exclude={"max_new_tokens"}))

    @overload
    def generate(self, prompts: str, max_tokens: int | None = MAX_TOKENS, **options: Unpack[Options]) -> Answer: ...

    @overload
    def generate(
        self, prompts: list[str], max_tokens: int | None = MAX_TOKENS, **options: Unpack[Options]
    ) -> list[Answer]: ...

    def generate(
        self, prompts: str | list[str], max_tokens: int | None = MAX_TOKENS, **options: Unpack[Options]
    ) -> Answer | list[Answer]:
        """Continue a prompt, or several at once in their order, by up to `max_tokens` tokens each.

        `max_tokens` None is what the context has left. Prompts are taken as they are: `chat` applies the chat template.
        Raises InvalidRequest, before any starts, for an option that does not exist or a prompt that does not fit, and
        Overloaded where other threads' requests fill the queue. A guide that turns out too complex while an answer is
        written raises InvalidRequest too.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        # All are checked before any starts, but of those that wait only their tokens are kept: a state has a bitmap of
        # the vocabulary, where there is a guide.
        states = (self._prepared(text, max_tokens, **options) for text in texts)
        prepared = [(state.request, state.prompt) for state in states]
        waiting = (self._sequence(request, prompt.tolist()) for request, prompt in prepared)
        answers = self._run(waiting, self.runtime.limits.slots)
        return answers[0] if isinstance(prompts, str) else answers

    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        max_tokens: int | None = MAX_TOKENS,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer a conversation: messages with `role` and `content`, or one user turn as a text. As `generate`; the
        other arguments are `render`'s."""
        prompt = self.render(
            messages,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
        )
        options.setdefault("add_special_tokens", False)
        return self.generate(prompt, max_tokens, **options)

    def stream(
        self, prompt: str | Sequence[ChatMessage], max_tokens: int | None = MAX_TOKENS, **options: Unpack[Options]
    ) -> Generator[Output, None, None]:
        """Yield what each step adds to a prompt, or, for a list of messages, to a conversation.

        `drafted` says of each token whether it was drafted. The last output has a finish reason and statistics. Leaving
        the iterator cancels the request. Raises as `generate`.
        """
        if not isinstance(prompt, str):
            prompt = self.render(prompt)
            options.setdefault("add_special_tokens", False)
        return self._outputs(self._prepared(prompt, max_tokens, stream=True, **options))

    def render(
        self,
        messages: str | Sequence[ChatMessage],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> str:
        """A conversation as the prompt that the model continues: `generate` takes it with `add_special_tokens` False,
        since the template writes them.

        `chat_template_kwargs` are the template's own options, such as `enable_thinking`. `reasoning_effort` says how
        much a reasoning model is to think, from "none" to "max", where they do not. With `continue_final_message` the
        answer continues the last message. `add_generation_prompt` False leaves the header of an answer out.
        Raises InvalidRequest where there is no chat template or it refuses the messages.
        """
        if self.runtime.path is None:
            raise InvalidRequest("messages: this runtime has no bundle folder, which would have the chat template")
        try:
            options = {**effort_options(reasoning_effort), **(chat_template_kwargs or {})}
            writing = Writing(options, documents, continue_final_message, add_generation_prompt)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        try:
            return render_chat(self.runtime.path, messages, writing)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"messages: {error}; generate() continues a text as it is") from None

    def run(self, requests: Sequence[GenerateRequest], concurrency: int = 1) -> list[Answer]:
        """Answers in the requests' order, at most `concurrency` of them in flight.

        Raises InvalidRequest for a request that does not fit; those in flight are then cancelled.
        """
        return self._run((self._sequence(request) for request in requests), concurrency)

    def close(self) -> None:
        """Free the engine's memory. Later calls and open streams raise RuntimeError. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inboxes.clear()
                self.runtime.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepared(
        self, prompt: str, max_tokens: int | None, *, stream: bool = False, **options: Unpack[Options]
    ) -> RequestState:
        """A sequence that the bundle can answer, to be submitted later. Raises InvalidRequest, with the options'
        names."""
        self._require_open()
        try:
            sequence = self._sequence(
                request(prompt, 1 if max_tokens is None else max_tokens, stream=stream, **options)
            )
        except InvalidRequest as error:
            raise InvalidRequest(error.message.removeprefix("sampling."), error.code) from None
        if max_tokens is None:
            left = self.runtime.limits.max_len - len(sequence.prompt)
            sequence.request = sequence.request.model_copy(update={"max_tokens": left})
        return sequence

    def _sequence(self, request: GenerateRequest, prompt: list[int] | None = None) -> RequestState:
        self._require_open()
        return self.runtime.sequence(next(self._keys), request, prompt=prompt)

    def _run(self, sequences: Iterable[RequestState], concurrency: int) -> list[Answer]:
        """Answers in order, at most `concurrency` sequences in flight; the next is taken when another has ended."""
        waiting = enumerate(sequences)
        answers: dict[int, Answer] = {}
        parts: dict[int, tuple[int, float, list[Output]]] = {}
        """Index, start and outputs so far, by key."""
        with self._lock:
            try:
                while True:
                    while len(parts) < concurrency:
                        started = time.perf_counter()
                        if (item := next(waiting, None)) is None:
                            break
                        index, sequence = item
                        self._submit(sequence)
                        parts[cast(int, sequence.key)] = index, started, []
                    if not parts:
                        return [answers[index] for index in sorted(answers)]
                    self._step()
                    for key, (index, started, outputs) in list(parts.items()):
                        outputs += self._take(key)
                        if outputs and outputs[-1].finish_reason:
                            answers[index] = Answer(**joined(outputs), seconds=time.perf_counter() - started)
                            del parts[key]
                            self._leave(key)
            finally:
                for key in parts:
                    self._leave(key)

    def _outputs(self, sequence: RequestState) -> Generator[Output, None, None]:
        key = cast(int, sequence.key)
        with self._lock:
            self._submit(sequence)
        try:
            while True:
                with self._lock:
                    while not (outputs := self._take(key)):
                        self._step()
                for output in outputs:
                    yield output
                    if output.finish_reason:
                        return
        finally:
            self._leave(key)

    def _submit(self, sequence: RequestState) -> None:
        self._require_open()
        sequence.arrive()  # it may have been prepared long before: its deadline and its wait begin now
        self.runtime.scheduler.submit(sequence)
        self._inboxes[cast(int, sequence.key)] = deque()

    def _take(self, key: int) -> list[Output]:
        """Outputs of a request in flight since the last call."""
        self._require_open()
        if key not in self._inboxes:
            raise RuntimeError("this request was dropped when a step failed or was interrupted: submit it again")
        inbox = self._inboxes[key]
        outputs = list(inbox)
        inbox.clear()
        if outputs and outputs[-1].error is not None:
            raise InvalidRequest(outputs[-1].error)
        return outputs

    def _leave(self, key: int) -> None:
        """Forget a request; if it still runs, the next step cancels it. The garbage collector may call this in the
        middle of a step."""
        if self._inboxes.pop(key, None) is not None:
            self._abandoned.append(key)

    def _step(self) -> None:
        self._require_open()
        scheduler = self.runtime.scheduler
        while self._abandoned:
            scheduler.cancel(self._abandoned.pop())
        try:
            for output in scheduler.step():
                if (inbox := self._inboxes.get(output.key)) is not None:  # type: ignore[call-overload]
                    inbox.append(output)
        except BaseException:  # KeyboardInterrupt too: the sequences are in the middle of a step
            scheduler.drop_all()
            self._inboxes.clear()
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed: load the bundle again")
