"""Whether FP8 pays, from the times of products."""

from __future__ import annotations

import math

import torch

from benchmarks.gpu.llama_7b import TINY
from benchmarks.gpu.matmuls import BF16_WAY, FP8_ROW, GOALS, OPERATOR, WAYS, measure, sums, verdicts


def test_fp8_pays_below_its_share_of_bf16():
    times = {BF16_WAY: 10.0, FP8_ROW: 5.0, OPERATOR: 7.0}
    results = [
        {"product": name, "rows": rows, "way": way, "microseconds": time}
        for name in ("qkv", "head")
        for rows in (1, *GOALS)
        for way, time in times.items()
    ]
    found = sums(results, layers=3)
    assert found[16][BF16_WAY] == (3 + 1) * 10 / 1e3
    assert [(entry["rows"], entry["pays"]) for entry in verdicts(found)] == [(16, True), (512, False)]


def test_every_way_of_a_product_is_measured_or_says_what_refused_it():
    results = measure(TINY, [3], torch.device("cpu"), 1)
    assert {(entry["product"], entry["way"]) for entry in results} >= {("head", way) for way in WAYS}
    assert all(("error" in entry) != ("microseconds" in entry) for entry in results)
    share = verdicts(sums(results, TINY.num_layers))
    assert not share, "of 3 rows nothing is decided"
    assert not math.isnan(sums(results, TINY.num_layers)[3][OPERATOR])
