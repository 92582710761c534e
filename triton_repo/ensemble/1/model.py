"""Text in, text out: the TensorRT-LLM backend's `ensemble` fields."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(os.environ.get("REDRAFT_PATH", str(Path(__file__).resolve().parents[3])))

from redraft.serving.triton.fields import ENSEMBLE
from redraft.serving.triton.model import Exchange, GenerationModel
from redraft.worker.protocol import Chunk


class TritonPythonModel(GenerationModel):
    """`text_output` string[1], and what all models have."""

    contract = ENSEMBLE

    def tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """Output tensors of one chunk."""
        return [
            pb_utils.Tensor("text_output", np.array([chunk.text.encode()], dtype=np.object_)),
            *self.shared_tensors(exchange, chunk),
        ]
