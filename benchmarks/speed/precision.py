"""What stored precisions change: next-token distributions against those of the target in float32.

    python -m benchmarks.speed.precision --model MODEL --prompts mt_bench.jsonl
    python -m benchmarks.speed.precision --model MODEL --prompts mt_bench.jsonl --bundle BF16 --bundle INT4

Without bundles it runs the networks that TensorRT for RTX builds engines from, native form in float16, in ONNX Runtime
on the CPU, and the target in bfloat16 beside them. With bundles it runs their engines, and llama.cpp over GGUF files of
the same target, where an interpreter that has llama-cpp-python is named. Figures: KL divergence from float32 in nats,
mean over all positions of the prompts, and how often both have the same most likely token. With --max-tokens also how
many tokens a step gives in a bundle's greedy answers, by its first method.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
import typer
from torch import Tensor

from benchmarks.command import LlamaModels, LlamaPython, ModelFolder, NumPrompts, Report, require_llama, run
from benchmarks.load.llama_cpp import LlamaCpp
from benchmarks.speed.acceptance import acceptance_figures
from benchmarks.speed.inprocess import load_llm, teacher_force
from redraft.compiler.calibration import Calibration
from redraft.compiler.passes.quantization import FP8, INT4, INT8, quantize_network
from redraft.console.progress import tracked
from redraft.llm import LLM
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.model_defs.export.target import CacheShape, export_target_native
from redraft.model_defs.loops.padded_context_cache import HIDDEN_SCORE
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.prompts import load_prompts, spread
from redraft.request import GenerateRequest


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
    acceptance_length: float | None = None
    """Tokens that a step gives, one more than it accepts of a draft"""

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


LogProbs = Callable[[list[int]], Tensor]
"""Log-probabilities float32 [N, V] after every token of a text."""


class Contender(NamedTuple):
    """What is compared with float32."""

    megabytes: float
    """Size of its weights"""
    log_probs: LogProbs
    acceptance_length: Callable[[list[list[int]]], float | None] | None = None
    """Tokens per step of its answers to these texts"""


Contenders = dict[str, Contender]
"""Contenders by name."""


def compare(target: Target, texts: list[list[int]], contenders: Contenders) -> list[Difference]:
    """Contenders against the target in float32, text by text."""
    results = {name: Difference(name, contender.megabytes) for name, contender in contenders.items()}
    for ids in tracked(texts, "compare", "texts"):
        reference = module_log_probs(target, ids)
        for name, contender in contenders.items():
            results[name].add(reference, contender.log_probs(ids))
    for name, contender in contenders.items():
        if contender.acceptance_length:
            results[name].acceptance_length = contender.acceptance_length(texts)
    return list(results.values())


@contextmanager
def open_networks(target: Target, rows: int, calibration: Calibration | None) -> Iterator[Contenders]:
    """The target in bf16, its networks in fp16, int8, int4 and, with a calibration, fp8, for texts of so many rows."""
    half = Target(target.config).eval().requires_grad_(False)
    half.load_state_dict(target.state_dict())
    half.in_dtype(torch.bfloat16)
    megabytes = 2e-6 * sum(weight.numel() for weight in half.parameters())
    contenders: Contenders = {"bf16": Contender(megabytes, partial(module_log_probs, half))}
    network = export_target_native(
        deepcopy(target).in_dtype(torch.float16), CacheShape(1, rows, 1), features_output=False
    )
    networks = {"fp16": network, **{name: quantize_network(network, name) for name in (INT8, INT4)}}
    if calibration:
        networks[FP8] = quantize_network(network, FP8, calibration.largest_inputs)
    with ExitStack() as stack:
        for name, compared in networks.items():
            session = Network(compared, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            contenders[name] = Contender(session.megabytes, session.log_probs)
        yield contenders


@contextmanager
def open_engines(
    bundles: list[Path], python: Path | None, models: list[Path], rows: int, max_tokens: int | None
) -> Iterator[Contenders]:
    """Bundles' engines and llama.cpp over GGUF files, for texts of so many rows; bundles that draft answer in up to
    `max_tokens`. Raises typer.BadParameter."""
    with ExitStack() as stack:
        contenders: Contenders = {}
        for bundle in bundles:
            llm = stack.enter_context(load_llm(bundle))
            weights = [*bundle.glob("target*.weights"), *bundle.glob("target.pt2")]
            megabytes = 1e-6 * sum(file.stat().st_size for file in weights)
            answers = partial(acceptance_length, llm, max_tokens) if max_tokens and llm.runtime.methods else None
            contenders[bundle.name] = Contender(megabytes, partial(engine_log_probs, llm), answers)
        for model in models:
            assert python is not None
            try:
                peer = stack.enter_context(closing(LlamaCpp(python, model, rows, all_logits=True)))
            except RuntimeError as error:
                raise typer.BadParameter(f"--llama-cpp: {error}") from None
            megabytes = 1e-6 * model.stat().st_size
            contenders[f"llama.cpp {model.stem}"] = Contender(megabytes, partial(peer_log_probs, peer))
        yield contenders


def engine_log_probs(llm: LLM, ids: list[int]) -> Tensor:
    """Those of a bundle's engine."""
    logits = np.concatenate([logits for logits, _ in teacher_force(llm, ids, 0)])
    return torch.from_numpy(logits).float().log_softmax(-1)


def acceptance_length(llm: LLM, max_tokens: int, texts: list[list[int]]) -> float | None:
    """Tokens per step of a bundle's greedy answers, where as much is drafted as may be."""
    llm.runtime.fix_budget()
    requests = [GenerateRequest(id=str(i), input_ids=ids, max_tokens=max_tokens) for i, ids in enumerate(texts)]
    return acceptance_figures(llm.run(requests))["acceptance_length"]


def peer_log_probs(peer: LlamaCpp, ids: list[int]) -> Tensor:
    """Those of llama.cpp."""
    return torch.from_numpy(peer.logits(ids)).log_softmax(-1)


def table(results: list[Difference]) -> Table:
    """A row per precision."""
    columns = [
        "precision",
        "weights, MB",
        "KL, mean",
        "KL, largest",
        "same most likely token",
        "tokens/step",
        "positions",
    ]
    result = Table("Next-token distributions against float32", columns)
    for entry in results:
        cells = [f"{entry.kl / entry.positions:.4f}", f"{entry.largest_kl:.3f}"]
        cells += [f"{entry.same / entry.positions:.1%}"]
        cells += [f"{entry.acceptance_length:.2f}" if entry.acceptance_length else "", f"{entry.positions}"]
        result.rows.append([entry.name, f"{entry.megabytes:.0f}", *cells])
    return result


def main(
    model: ModelFolder,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts: JSON, text lines, CSV or Parquet.")],
    calibration: Annotated[
        Path | None, typer.Option(help="What redraft calibrate wrote; default: none, so no fp8.")
    ] = None,
    bundles: Annotated[
        list[Path], typer.Option("--bundle", metavar="FOLDER", help="Engine bundles of the target; default: none.")
    ] = [],
    llama_cpp: LlamaPython = None,
    llama_models: LlamaModels = [],
    num_prompts: NumPrompts = None,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of a prompt at most; longer ones are cut.")
    ] = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an answer of each bundle that drafts; default: none, so no tokens/step."),
    ] = None,
    output: Report = Path("artifacts/reports/precision.json"),
) -> None:
    require_llama(llama_cpp, llama_models)
    if calibration and (bundles or llama_models):
        raise typer.BadParameter("--calibration: expected without --bundle and --llama-model")
    if len({bundle.name for bundle in bundles}) < len(bundles):
        raise typer.BadParameter("--bundle: the folders' names must differ")
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
    rows = max(map(len, texts))
    engines = bundles or llama_models
    if engines:
        opened = open_engines(bundles, llama_cpp, llama_models, rows, max_tokens)
    else:
        opened = open_networks(target, rows, ranges)
    with opened as contenders:
        results = compare(target, texts, contenders)
    finish(output, {"rows": [asdict(entry) for entry in results]}, table(results))


if __name__ == "__main__":
    run(main)
