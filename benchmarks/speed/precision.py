"""What 8-bit networks change: their next-token distributions against those of the target in float32.

Runs the networks that TensorRT for RTX builds engines from, native form in float16, in ONNX Runtime on the CPU, and the
target in bfloat16 beside them. Figures: KL divergence from float32 in nats, mean over all positions of the prompts, and
how often both have the same most likely token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
import typer
from torch import Tensor

from benchmarks.command import ModelFolder, NumPrompts, Report, run
from redraft.compiler.calibration import Calibration
from redraft.compiler.passes.quantization import FP8, INT8, quantize_network
from redraft.console.progress import tracked
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.model_defs.export.target import CacheShape, export_target_native
from redraft.model_defs.loops.padded_context_cache import HIDDEN_SCORE
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.prompts import load_prompts, spread


@dataclass
class Difference:
    """Sums over positions."""

    name: str
    megabytes: float
    """Size of the network's weights."""
    positions: int = 0
    kl: float = 0.0
    largest_kl: float = 0.0
    same: int = 0

    def add(self, reference: Tensor, log_probs: Tensor) -> None:
        """Count a text's positions: log-probabilities float32 [N, V] of the reference and of what is compared."""
        kl = (reference.exp() * (reference - log_probs)).sum(-1)
        self.positions += len(kl)
        self.kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.same += int((reference.argmax(-1) == log_probs.argmax(-1)).sum())


def module_log_probs(target: Target, ids: list[int]) -> Tensor:
    """Log-probabilities float32 [N, V] after every token of a text."""
    with torch.inference_mode():
        hidden = target(torch.tensor([ids]), causal_attend(target.config, len(ids))).hidden
        return target.lm_head(hidden)[0].float().log_softmax(-1)


class Network:
    """A native-form network of one slot in ONNX Runtime on the CPU; its file is kept in `folder`."""

    def __init__(self, network: ir.Model, folder: Path):
        file = folder / "target.onnx"
        ir.save(network, file, external_data="target.onnx.data")
        self.megabytes = (folder / "target.onnx.data").stat().st_size / 1e6
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        inputs = {value.name: value for value in self._session.get_inputs()}
        self._dtype = np.float16 if inputs["mask"].type == "tensor(float16)" else np.float32
        self._rows = inputs["mask"].shape[3]
        shapes = {name: (1, *value.shape[1:]) for name, value in inputs.items() if "_cache." in name}
        self._caches = {name: np.zeros(shape, self._dtype) for name, shape in shapes.items()}

    def log_probs(self, ids: list[int]) -> Tensor:
        """Log-probabilities float32 [N, V] after every token of a text."""
        count = len(ids)
        rows = {
            "input_ids": np.array([ids], np.int32),
            "positions": np.arange(count)[None],
            "write_indices": np.zeros(1, np.int64),
            "mask": np.triu(np.full((1, 1, count, self._rows), HIDDEN_SCORE, self._dtype), 1),
            "logit_rows": np.arange(count, dtype=np.int32),
        }
        (logits,) = self._session.run(["logits"], rows | self._caches)
        return torch.from_numpy(logits).float().log_softmax(-1)


def compare(target: Target, texts: list[list[int]], calibration: Calibration | None) -> list[Difference]:
    """The target in float32, which is left in float16, against bf16 and against networks in fp16, int8 and, with a
    calibration, fp8."""
    references = [module_log_probs(target, ids) for ids in tracked(texts, "float32", "texts")]

    def measure(name: str, megabytes: float, log_probs: Callable[[list[int]], Tensor]) -> Difference:
        difference = Difference(name, megabytes)
        for reference, ids in zip(references, tracked(texts, name, "texts"), strict=True):
            difference.add(reference, log_probs(ids))
        return difference

    half = Target(target.config).eval().requires_grad_(False)
    half.load_state_dict(target.state_dict())
    half.to(torch.bfloat16)
    megabytes = 2e-6 * sum(weight.numel() for weight in half.parameters())
    result = [measure("bf16", megabytes, lambda ids: module_log_probs(half, ids))]
    network = export_target_native(target.half(), CacheShape(1, max(map(len, texts)), 1), features_output=False)
    networks = {"fp16": network, INT8: quantize_network(network, INT8)}
    if calibration:
        networks[FP8] = quantize_network(network, FP8, calibration.largest_inputs)
    for name, compared in networks.items():
        with tempfile.TemporaryDirectory() as folder:
            session = Network(compared, Path(folder))
            result.append(measure(name, session.megabytes, session.log_probs))
    return result


def table(results: list[Difference]) -> Table:
    """A row per precision."""
    columns = ["precision", "weights, MB", "KL, mean", "KL, largest", "same likeliest token", "positions"]
    result = Table("Next-token distributions against float32", columns)
    for entry in results:
        cells = [f"{entry.kl / entry.positions:.4f}", f"{entry.largest_kl:.3f}"]
        cells += [f"{entry.same / entry.positions:.1%}", f"{entry.positions}"]
        result.rows.append([entry.name, f"{entry.megabytes:.0f}", *cells])
    return result


def main(
    model: ModelFolder,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts: JSON, text lines, CSV or Parquet.")],
    calibration: Annotated[
        Path | None, typer.Option(help="What redraft calibrate wrote; default: none, so no fp8.")
    ] = None,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of a prompt at most; longer ones are cut.")
    ] = 512,
    output: Report = Path("artifacts/reports/precision.json"),
) -> None:
    try:
        target = Target.from_folder(model)
        ranges = None
        if calibration:
            ranges = Calibration.load(calibration)
            ranges.check(target, target_fingerprint(target), calibration)
        tokenizer = ChatTokenizer(model)
        chosen = spread(load_prompts(prompts), num_prompts)
        texts = [tokenizer.encode(tokenizer.chat(prompt.turns[0]))[:max_prompt_tokens] for prompt in chosen]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    results = compare(target, texts, ranges)
    finish(output, {"rows": [asdict(entry) for entry in results]}, table(results))


if __name__ == "__main__":
    run(main)
