"""Counts of tokens and their successors in the answers of teacher data."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

from redraft.cli import count

VOCAB = 111


@pytest.fixture
def model(tmp_path):
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_prompts_do_not_count(model, tmp_path):
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
    count.main(model, [tmp_path], tmp_path / "out")
    counts = np.load(tmp_path / "out" / "token_counts.npy")
    assert counts.shape == (2, VOCAB)
    assert {token: int(counts[:, token].sum()) for token in (5, 6, 7, 9, 110)} == {5: 3, 6: 4, 7: 0, 9: 0, 110: 1}
    assert counts[1].sum() == 3
    bigrams = np.load(tmp_path / "out" / "bigrams.npy")
    assert bigrams[5] == 6
    assert bigrams[9] == bigrams[6] == -1


def test_a_folder_without_shards_is_named(model, tmp_path):
    with pytest.raises(typer.BadParameter, match=r"no shard-\*\.safetensors"):
        count.main(model, [tmp_path / "none"], tmp_path)
