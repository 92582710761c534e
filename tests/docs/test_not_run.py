"""What no GPU has executed yet is labelled "not run" wherever it is mentioned."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile(r"CUDA|TensorRT(?!-LLM)|NCCL|NVIDIA GPU")
LABELS = re.compile(r"\b(not|none|neither|nothing|never)\b[^.]{0,60}\b(run|executed)\b", re.IGNORECASE)
WITHOUT = {
    ".ci/run": "compiles kernels, which is done",
    "pyproject.toml": "the tests' marker",
    "build/methods.py": "refuses choices while building",
    "plugins/cuda/host_shim.cuh": "is for the CPU",
}
"""Files that name one of these and run nothing there, with the reason."""


def test_what_was_not_run_says_so():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    unlabelled = []
    for name in listed:
        if name.startswith(("tests/", "docs/results/")) or name.endswith((".png", ".json", ".safetensors")):
            continue
        text = re.sub(r"[\s#*/]+", " ", (ROOT / name).read_text(errors="replace"))
        if NAMES.search(text) and not LABELS.search(text):
            unlabelled.append(name)
    assert sorted(unlabelled) == sorted(WITHOUT)
