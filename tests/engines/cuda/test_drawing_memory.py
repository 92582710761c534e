"""Memory of drawing tokens on a GPU, as it is counted where memory does not suffice."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.engines.cuda.masks import forbid
from redraft.engines.cuda.sampling import AT_ONCE, DRAW_BYTES, sample, sample_tokens
from redraft.engines.cuda.transfer import Results
from redraft.engines.memory import drawing_bytes, returned_bytes, step_bytes
from tests.engines.tiny import DRAFTING, bundle_config, chain, make_batch, tiny_target


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that live at a time, of all that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = function(*arguments, **(options or {}))
        for result in given if isinstance(given, (tuple, list)) else [given]:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.live:
                self.live[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.live.values()))
        return given


def test_drawing_takes_no_more_memory_than_is_counted():
    """Logits in bf16 are gathered and converted; more rows are drawn from in parts. Masking takes less."""
    rows, vocabulary = 8, 10_000
    scales, top_p = np.ones((1, rows), np.float32).view(np.int32), np.full(rows, 0.9).view(np.int32).reshape(-1, 2).T
    keys = np.zeros((3, rows), np.int32)
    margins = np.full((1, rows), -2, np.float32).view(np.int32)
    table = np.concatenate([np.arange(rows, dtype=np.int32)[None], keys, keys[:1], scales, margins, top_p])
    logits = torch.randn(rows, vocabulary).bfloat16()
    with LiveBytes() as live:
        sample_tokens(logits, [table[:, :0], table])
    assert 0.9 * DRAW_BYTES < live.most / (rows * vocabulary) <= 1.01 * DRAW_BYTES
    masks = np.ones((rows, vocabulary // 8), np.uint8)
    with LiveBytes() as live:
        forbid(logits, np.arange(rows), masks, rows)
    assert 0 < live.most / (rows * vocabulary) <= DRAW_BYTES
    limits = LimitsInfo(slots=16, max_len=2048, max_tree=32, prefill_chunk=128)
    config = config_of(limits, 128_256)
    assert 0.39e9 < drawing_bytes(config) <= DRAW_BYTES * AT_ONCE


def test_logits_for_the_host_take_no_more_memory_than_is_counted():
    """Where each row of a step needs its own."""
    vocabulary, batch = 10_000, make_batch([chain(0, [], [5, 6, 7])])
    logits = torch.randn(3, vocabulary).bfloat16()
    with LiveBytes() as live:
        sample(logits, batch, [None], Results(torch.device("cpu")), draws=True)
    counted = returned_bytes(config_of(LimitsInfo(slots=1, max_len=16, max_tree=2, prefill_chunk=3), vocabulary))
    assert 0.9 * counted < live.most <= 1.01 * counted


def test_raw_logits_of_chains_are_counted():
    limits = LimitsInfo(slots=4, max_len=16, max_tree=3, prefill_chunk=16)
    plain, chained = config_of(limits, 1000), config_of(limits, 1000)
    shape = {"beam_width": 1, "beam_length": 2, "candidates": 1, "tree_budget": 2, "chain_levels": 2}
    method = DRAFTING.model_copy(update={"drafter": "hidden_state", **shape})
    chained.methods["chained"] = method
    assert step_bytes(chained) - step_bytes(plain) == 3 * 4 * 4 * 2 * 1000


def config_of(limits: LimitsInfo, vocabulary: int) -> BundleConfig:
    config = bundle_config(tiny_target(), {}, limits, "bf16", "tensorrt")
    target = config.target.model_copy(update={"vocab_size": vocabulary})
    return config.model_copy(update={"target": target})
