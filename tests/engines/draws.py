"""Random draws of the tiny drafter: inputs, and what the reference loop draws from the module's own logits."""

from __future__ import annotations

import numpy as np
import torch

from redraft.batch import DraftBatch, DraftDraws, DraftSampling
from redraft.decoding.draws import gumbel_noise
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.model_defs.drafters.recurrent import RecurrentDrafter
from tests.toy_drafter import reference_draws

LEVELS = {"gumbel_top_k": (3, 2, 1), "stochastic_beam": (4, 5, 3), "independent": (3, 3, 3), "random_chain": (1, 1, 1)}
SUPPORT = 7
FILTERS = [(1.0, 0, 1.0), (0.7, 2, 1.0), (0.0, 0, 1.0), (1.5, 5, 0.8), (1e-4, 0, 1.0), (0.01, 0, 0.95), (1.0, 1, 1.0)]
"""Temperature, top-k and top-p of a batch's sequences; where two tokens are left, a level can run out of them."""


def draft_batch(size: int) -> DraftBatch:
    hidden = np.random.default_rng(5).standard_normal((size, 96), dtype=np.float32)
    return DraftBatch.of_roots(hidden, np.array([5, 0, 110, 7, 31, 99, 2][:size], np.int32))


def sampling_of(construction: str, size: int, seed: int = 3) -> DraftSampling:
    rows = sum(RANDOM_CONSTRUCTIONS[construction].shape(LEVELS[construction]).noise_rows)
    columns = zip(*FILTERS[:size], strict=True)
    temperature, top_k, top_p = (
        np.array(x, dtype) for x, dtype in zip(columns, (np.float32, np.int32, np.float32), strict=True)
    )
    noise = np.stack([gumbel_noise(seed, b, rows, SUPPORT) for b in range(size)])
    return DraftSampling(noise, temperature, top_k, top_p)


def expected_draws(
    drafter: RecurrentDrafter, construction: str, batch: DraftBatch, sampling: DraftSampling
) -> DraftDraws:
    """The reference loop over the module's logits after each path."""

    def support_of(sequence: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        tokens = torch.tensor(path)
        state = drafter.first_state(tokens[:1])
        for token in tokens[1:]:
            state = drafter.next_state(state, token[None])
        logits = drafter.logits(state, torch.from_numpy(batch.features[sequence])[None])[0]
        values, rows = logits.topk(SUPPORT)
        return drafter.hot_ids[rows].int().numpy(), values.numpy()

    return reference_draws(construction, LEVELS[construction], batch.tokens.tolist(), sampling, support_of)


def assert_same_draws(got: DraftDraws, expected: DraftDraws) -> None:
    np.testing.assert_array_equal(got.draws, expected.draws, strict=True)
    there = np.isfinite(expected.log_probs).any(axis=-1)
    np.testing.assert_array_equal(got.ids[there], expected.ids[there])
    np.testing.assert_array_equal(np.isfinite(got.log_probs), np.isfinite(expected.log_probs))
    np.testing.assert_allclose(np.exp(got.log_probs), np.exp(expected.log_probs), atol=2e-4, strict=True)
