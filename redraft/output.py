"""What a request's client gets: its text, scores and draft trees, in parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain

from redraft.decoding.log_probs import LogProbs
from redraft.decoding.verification import Verdict
from redraft.request import DraftTree, Generated, GenerateRequest
from redraft.text import TextCodec, TextStream


@dataclass
class Output(Generated):
    """What one request gained since its last output."""

    key: Hashable = field(kw_only=True)
    prompt_tokens: int = 0
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was drafted and accepted, rather than chosen after the draft's last accepted one."""
    error: str | None = None
    """Why the request failed, where the finish reason is `error`."""


class OutputStream:
    """A request's output since it was last taken, and the text that is held back: whole characters, and nothing that
    may turn into a stop word, are given out."""

    def __init__(
        self,
        key: Hashable,
        request: GenerateRequest,
        prompt: list[int],
        codec: TextCodec,
        stop_words: list[str],
        interval_s: float,
    ):
        """`stop_words`: those of the request that are no special tokens. Text is due at most every `interval_s`
        seconds."""
        self._key, self._request, self._prompt_tokens = key, request, len(prompt)
        self._has_stop_words = bool(stop_words)
        """Else nothing asks for the text until it is taken."""
        self._text = TextStream(codec, prompt, stop_words, request.include_stop_words, request.skip_special_tokens)
        self._tail: deque[int] = deque(maxlen=max(map(len, request.stop_word_ids), default=0))
        self._interval_s = interval_s
        self._next_at = 0.0
        self.token_ids: list[int] = []
        """All tokens since the start."""
        self._taken = 0
        """How many of them have been taken."""
        self._prompt_scores: list[LogProbs] = []
        self._output = self._empty()
        if not request.exclude_input_in_output:
            self._output.text = request.text if request.text is not None else codec.decode(prompt)

    @property
    def stop_word(self) -> str | None:
        """The stop word that ended the text, if one did."""
        return self._text.stop_word

    @property
    def due(self) -> bool:
        """Whether the client streams, and should get what there is now."""
        return self._request.stream and len(self.token_ids) > self._taken and time.perf_counter() >= self._next_at

    def extend(self, verdict: Verdict, start: int, end: int) -> None:
        """Append the verdict's tokens from `start` to `end`, at least one."""
        output, tokens, scores = self._output, verdict.tokens, verdict.log_probs
        self.token_ids += tokens[start:end]
        output.drafted += [True] * (end - start)
        output.drafted[-1] = end < len(tokens)
        if scores is not None and output.log_probs is not None:
            output.log_probs += scores.chosen[start:end].tolist()
            if output.top_log_probs is not None:
                output.top_log_probs += scores.top[start:end]

    def push(self, verdict: Verdict, index: int) -> bool:
        """Append the verdict's token at this index; whether it completes a stop word."""
        self.extend(verdict, index, index + 1)
        token = verdict.tokens[index]
        return (self._has_stop_words and self._text.push(token)) or self._completes_stop_word(token)

    def add_tree(self, tree: DraftTree) -> None:
        """Append a step's draft tree, if the request wants them."""
        if self._output.draft_trees is not None:
            self._output.draft_trees.append(tree)

    def score_prompt(self, scores: LogProbs) -> None:
        """Append the log-probabilities of the prompt's next tokens."""
        self._prompt_scores.append(scores)

    def take(self, prompt_scored: bool, finished: bool) -> Output:
        """Return what is new, all of it if the request has `finished`. The prompt's scores come in one piece, once it
        is `prompt_scored` to its end."""
        output, self._output = self._output, self._empty()
        output.token_ids, self._taken = self.token_ids[self._taken :], len(self.token_ids)
        if self._prompt_scores and prompt_scored:
            chosen = (scores.chosen.tolist() for scores in self._prompt_scores)
            output.prompt_log_probs = [None, *chain.from_iterable(chosen)]
            if self._request.top_log_probs:
                output.prompt_top_log_probs = [[], *chain.from_iterable(scores.top for scores in self._prompt_scores)]
            self._prompt_scores = []
        if not self._has_stop_words:
            self._text.extend(output.token_ids)
        if finished:
            self._text.finish()
        output.text += self._text.take()
        if output.text:
            self._next_at = time.perf_counter() + self._interval_s
        return output

    def _empty(self) -> Output:
        request = self._request
        return Output(
            key=self._key,
            prompt_tokens=self._prompt_tokens,
            log_probs=[] if request.return_log_probs else None,
            top_log_probs=[] if request.top_log_probs else None,
            draft_trees=[] if request.draft_trees else None,
        )

    def _completes_stop_word(self, token: int) -> bool:
        self._tail.append(token)
        tail = list(self._tail)
        return any(tail[-len(word) :] == word for word in self._request.stop_word_ids)
