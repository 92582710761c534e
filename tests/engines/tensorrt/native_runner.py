"""Networks of the target in native form, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from redraft.bundle.config import TargetInfo
from redraft.model_defs.export.target import CacheShape
from tests.engines.tiny import Rows


def native_inputs(sequences: list[Rows], cache: dict[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    """Every slot's rows, padded to the longest; the mask hides what a row must not see."""
    count, cache_rows = max(len(s.tokens) for s in sequences), cache["k_cache.0"].shape[2]
    ids = np.zeros((len(sequences), count), np.int32)
    positions = np.zeros((len(sequences), count), np.int64)
    mask = np.full((len(sequences), 1, count, cache_rows), -3e4, dtype)
    for b, s in enumerate(sequences):
        mask[b, :, :, : len(s.context)] = 0
        for row, token in enumerate(s.tokens):
            ids[b, row], positions[b, row] = token, len(s.path(row)) - 1
            mask[b, 0, row, [len(s.context) + j for j in s.ancestors(row)]] = 0
        mask[b, 0, len(s.tokens) :, len(s.context)] = 0
    wanted = [b * count + row for b, s in enumerate(sequences) for row in range(len(s.tokens))]
    lengths = np.array([len(s.context) for s in sequences], np.int64)
    rows = {"input_ids": ids, "positions": positions, "write_indices": lengths, "mask": mask}
    return {**rows, "logit_rows": np.array(wanted, np.int32), **cache}


class NativeRunner:
    """ONNX Runtime over the network's file; keeps the caches that it returns."""

    def __init__(self, network: Path, info: TargetInfo, cache: CacheShape, dtype: type):
        self.session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
        self.dtype, shape = dtype, (cache.slots, info.num_kv_heads, cache.rows, info.head_size)
        self.cache = {
            f"{kind}_cache.{layer}": np.zeros(shape, dtype) for kind in "kv" for layer in range(info.num_layers)
        }

    def run(self, sequences: list[Rows]) -> tuple[np.ndarray, np.ndarray]:
        """Logits and hidden states of the sequences' rows, float32."""
        inputs = native_inputs(sequences, self.cache, self.dtype)
        outputs = self.session.run(None, inputs)
        named = dict(zip([output.name for output in self.session.get_outputs()], outputs, strict=True))
        self.cache = {name: named[f"{name}.updated"] for name in self.cache}
        return named["logits"].astype(np.float32), named["features"][inputs["logit_rows"]].astype(np.float32)
