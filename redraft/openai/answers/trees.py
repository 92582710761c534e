"""Draft trees in an answer: those of its steps, with the texts of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from redraft.openai.model import ServedModel
from redraft.request import DraftTree


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
