"""Token ids in, token ids out: the TensorRT-LLM backend's `tensorrt_llm` fields."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(os.environ.get("REDRAFT_PATH", str(Path(__file__).resolve().parents[3])))

from redraft.serving.triton.fields import TENSORRT_LLM
from redraft.serving.triton.model import Exchange, GenerationModel
from redraft.worker.protocol import Chunk


class TritonPythonModel(GenerationModel):
    """`output_ids` int32[1, 1, n], `sequence_length` int32[1, 1], and what all models have."""

    contract = TENSORRT_LLM

    def tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """Output tensors of one chunk; the prompt comes first if that was asked for."""
        prompt = exchange.take_prompt()
        ids = np.array([[prompt + chunk.token_ids]], dtype=np.int32)
        return [
            pb_utils.Tensor("output_ids", ids),
            pb_utils.Tensor("sequence_length", np.array([[ids.size]], dtype=np.int32)),
            *self.shared_tensors(exchange, chunk),
        ]
