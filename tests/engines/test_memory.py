"""The estimate of a bundle's need of GPU memory."""

from __future__ import annotations

import re

from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.engines.memory import ATTENTION, attention_bytes, cache_bytes, step_bytes, what_fits, working_bytes
from tests.engines.tiny import bundle_config, tiny_target


def config_of(precision: str, max_len: int) -> BundleConfig:
    limits = LimitsInfo(slots=3, max_len=max_len, max_tree=5, prefill_chunk=40)
    config = bundle_config(tiny_target(), {}, limits, precision, "torch")
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "hidden_size": 4096}
    return config.model_copy(update={"target": config.target.model_copy(update=shape)})


def test_partial_results_of_attention_are_counted():
    """Those of a long context in fp32 outweigh an MLP. Both the graphs' pool and a step without a graph hold them."""
    rows = 40  # a prompt's; beside two trees it has 2 x 5 + 20
    long = config_of("fp32", 100_000)
    assert attention_bytes(long) == 391 * rows * 32 * (128 + 2) * 4
    assert working_bytes(long) == 2 * (attention_bytes(long) + ATTENTION * rows * 4096 * 4)
    assert attention_bytes(config_of("bf16", 100_000)) == attention_bytes(config_of("bf16", 1_000)) < 20e6


def test_a_shorter_context_has_smaller_partial_results():
    """In fp32 a length is found that fits though the steps of the longest context do not."""
    long, shorter = config_of("fp32", 100_000), config_of("fp32", 50_000)
    free = cache_bytes(shorter) + step_bytes(shorter)
    found = re.search(r"--max-len (\d+) would fit", what_fits(long, 0, free))
    assert found
    assert 49_000 < int(found[1]) <= 50_000
    assert "--max-len" in what_fits(long, 0, step_bytes(long))
