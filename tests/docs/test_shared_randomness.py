"""The worked example of docs/shared-randomness.md, from the code that it explains."""

from __future__ import annotations

import numpy as np
import torch

from redraft.decoding.noise import race
from redraft.plugins.operators.perturbed_topk.reference import perturbed_topk
from tests.conftest import ROOT

TOKENS = ["tea", "your", "hot", "coffee", "water"]
SEED, POSITION, BETA = 8, 5, 0.8
Q, P = np.array([0.45, 0.25, 0.15, 0.10, 0.05]), np.array([0.50, 0.20, 0.10, 0.15, 0.05])


def test_the_table_is_what_the_code_computes():
    noise = -np.log(race(SEED, POSITION, np.arange(5)))
    likely = np.argsort(-P)
    values, ids = perturbed_topk(
        torch.from_numpy(np.log(P[likely]))[None], torch.from_numpy(likely.astype(np.int32))[None],
        torch.tensor([[SEED, 0]]), torch.tensor([POSITION]), torch.ones(1), torch.zeros(1, dtype=torch.int32),
        torch.ones(1), torch.tensor([BETA]), level=0, k=5,
    )  # fmt: skip
    scores = dict(zip(ids[0].tolist(), values[0].exp().tolist(), strict=True))
    page = (ROOT / "docs" / "shared-randomness.md").read_text()
    for token, name in enumerate(TOKENS):
        q, p, g = Q[token], P[token], noise[token]
        columns = (q, p, g, np.log(q) + g, np.log(p) + g, scores[token])
        assert f"| {token} | {name} | {' | '.join(f'{value:.2f}' for value in columns)} |" in page
    assert TOKENS[int((np.log(Q) + noise).argmax())] == "hot"
    assert [TOKENS[token] for token in ids[0, :2].tolist()] == ["hot", "your"]
