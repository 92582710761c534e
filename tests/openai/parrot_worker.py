"""A worker process whose target answers what the last message says: `python tests/openai/parrot_worker.py SOCKET`.

The prompt is that of PARROT_TEMPLATE; messages may end with `<end>`, which is not said. What a guide forbids it cannot
say, of course.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from redraft.bundle.method import MethodConfig
from redraft.grammar import trial
from redraft.runtime import Runtime
from redraft.worker.server import serve
from tests.toy_engine import ToyEngine, only, toy_codec
from tests.worker.toy_worker import LIMITS

VOCABULARY = 257
"""Every byte, and the end token."""
PARROT_LIMITS = replace(LIMITS, max_len=1024)
PARROT_TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{# <tool_call> #}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}<assistant>"
)
"""The comment makes its form of calls Hermes'."""


class Parrot(ToyEngine):
    """Its state is the next token."""

    def __init__(self, **options):
        super().__init__(**options)
        codec = toy_codec(self.vocab_size)
        self._characters = [codec.token_bytes(token).decode(errors="replace") for token in range(self.vocab_size)]
        self._tokens = {character: token for token, character in enumerate(self._characters)}

    def path_state(self, tokens) -> int:
        text = "".join(self._characters[token] for token in tokens)
        asked, _, said = text.rpartition("<assistant>")
        script = max(asked.rpartition("<user>"), asked.rpartition("<tool>"), key=lambda parts: len(parts[0]))[2]
        script = script.removesuffix(self._characters[0])
        return self._tokens[script[len(said)]] if len(said) < len(script) else 0

    def _propose(self, state: int, path: list[int]):
        """Drafts of no use: n-grams of the prompt make better ones."""
        return np.arange(1, self.candidates + 1), np.full(self.candidates, 1 / self.candidates)

    def logits_after(self, state: int) -> np.ndarray:
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[state] = 100
        return logits


if __name__ == "__main__":
    trial.COMPILE_S, trial.PATIENCE_S = 60.0, 600.0
    engine = Parrot(
        vocab_size=VOCABULARY, slots=LIMITS.slots, max_len=PARROT_LIMITS.max_len, max_tree=PARROT_LIMITS.max_tree
    )
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
    runtime = Runtime(
        engine, toy_codec(VOCABULARY), PARROT_LIMITS, VOCABULARY, frozenset({0}), only(plan), name="parrot"
    )
    serve(runtime, Path(sys.argv[1]), os.getppid())
