"""Text in, text out: the TensorRT-LLM backend's `ensemble` fields."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(os.environ.get("REDRAFT_HOME", str(Path(__file__).resolve().parents[3])))

from redraft.serving.fields import ENSEMBLE
from redraft.serving.model import Exchange, GenerationModel
from redraft.worker.protocol import Chunk


class TritonPythonModel(GenerationModel):
    """`text_output` string[1], `sequence_index` int32[1, 1], log-probabilities on request."""

    contract = ENSEMBLE
    publishes_worker_metrics = True

    def tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """Output tensors of one chunk."""
        return [
            pb_utils.Tensor("text_output", np.array([chunk.text.encode()], dtype=np.object_)),
            pb_utils.Tensor("sequence_index", np.zeros((1, 1), dtype=np.int32)),
            *self.log_prob_tensors(exchange, chunk),
        ]
