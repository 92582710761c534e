"""Counts of tokens in the answers of teacher data."""

import numpy as np
import torch
from safetensors.torch import save_file

from studies.training import token_counts

VOCAB = 111


def test_prompts_do_not_count(tmp_path):
    documents = [([7, 7, 7], [5, 6, 5, 6]), ([9], [5, 6, 110]), ([7], [6])]
    tokens = [token for prompt, answer in documents for token in prompt + answer]
    lengths = [len(prompt) + len(answer) for prompt, answer in documents]
    ends = np.cumsum(lengths)
    starts = [int(end) - len(answer) for end, (_, answer) in zip(ends, documents, strict=True)]
    save_file(
        {
            "tokens": torch.tensor(tokens, dtype=torch.int32), "hidden": torch.zeros(len(tokens), 32),
            "offsets": torch.tensor([0, *ends]), "answer_starts": torch.tensor(starts),
        },
        tmp_path / "shard-00000.safetensors",
    )  # fmt: skip
    counts = token_counts([tmp_path], VOCAB)
    assert counts.shape == (2, VOCAB)
    assert {token: int(counts[:, token].sum()) for token in (5, 6, 7, 9, 110)} == {5: 3, 6: 4, 7: 0, 9: 0, 110: 1}
    assert counts[1].sum() == 3
