"""Token ids to text: the TensorRT-LLM backend's `postprocessing` fields."""

import os
import sys
from pathlib import Path

sys.path.append(os.environ.get("REDRAFT_PATH", str(Path(__file__).resolve().parents[3])))

from redraft.serving.triton.tokens import Postprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
