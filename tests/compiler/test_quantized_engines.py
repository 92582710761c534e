"""Quantized engines: TensorRT for RTX builds them from the very file that ONNX Runtime verifies, full TensorRT's are
built and run by a stand-in library; the script calibrates."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from redraft.bundle.manifest import Bundle
from redraft.cli import build, calibrate
from redraft.compiler.calibration import Calibration, linear_layers
from redraft.compiler.calibration import calibrate as calibrated
from redraft.engines import load_engine
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from tests.cli.commands import invoke
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import chain, expected, make_batch, tiny_lm, tiny_target, write_model
from tests.model_defs.weights.layouts import compressed, group_of
from tests.model_defs.weights.test_checkpoint import PACKED, write_folder

TEXT = [5, 9, 2, 77, 31, 8, 44]
NARROW = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}
LARGEST_ERRORS = {"int8": 0.08, "int4": 0.5, "fp8": 0.5}
"""Of logits, as a share of their mean magnitude."""


def narrow_layers(target: Target, precision: str) -> int:
    """Linear layers whose weights are in the precision itself."""
    layers = linear_layers(target)
    if precision == "int8":
        return len(layers)
    return sum(
        name != "lm_head" and (precision == "fp8" or layer.in_features % 32 == 0) for name, layer in layers.items()
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny target, whose template is the user's turn alone."""
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny_target(), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    turns = [json.dumps({"turns": [f"t{n}", f"t{n + 50}"]}) for n in range(50)]
    (folder / "prompts.jsonl").write_text("\n".join(turns))
    options = ["--model", model, "--prompts", folder / "prompts.jsonl", "--output", folder / "c.json"]
    done = invoke(calibrate.main, *options)
    assert done.exit_code == 0, done.output
    return folder / "c.json"


def test_the_script_calibrates_on_all_turns(model, calibration):
    target = Target.from_folder(model)
    read = Calibration.load(calibration)
    assert (read.target_fingerprint, read.texts, read.tokens) == (target_fingerprint(target), 100, 100)
    assert set(read.largest_inputs) == set(linear_layers(target))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "nowhere", "nowhere"),
        ("--prompts", "nowhere.jsonl", "nowhere.jsonl"),
        ("--prompts", "EMPTY", "holds no prompts"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, calibration, tmp_path, option, value, message):
    (tmp_path / "empty.jsonl").touch()
    options = {"--model": model, "--prompts": calibration.with_name("prompts.jsonl"), "--output": tmp_path / "c.json"}
    options[option] = tmp_path / "empty.jsonl" if value == "EMPTY" else value
    done = invoke(calibrate.main, *(part for pair in options.items() for part in pair))
    assert done.exit_code in (1, 2)
    assert message in done.output
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_the_engine_is_built_from_the_file_that_onnx_runtime_verifies(model, calibration, tmp_path, precision):
    options = ["--model", model, "--backend", "tensorrt_rtx", "--no-drafter", "--precision", precision]
    if precision == "fp8":
        options += ["--calibration", calibration]
    options += ["--slots", 1, "--max-len", 40, "--max-tree", 8, "--prefill-chunk", 16]
    done = invoke(build.main, *options, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.config.precision == precision
    assert ("calibration.json" in bundle.manifest.files) == (precision == "fp8")
    layers = json.loads((tmp_path / "b" / "target.engine.json").read_text())["layers"]
    assert (layers["DEQUANTIZE"], layers.get("QUANTIZE", 0)) == ((16, 8) if precision == "fp8" else (9, 0))
    stored = Counter(value.dtype for value in ir.load(tmp_path / "b" / "target.onnx").graph.initializers.values())
    assert stored[NARROW[precision]] >= narrow_layers(tiny_target(), precision)
    assert (tmp_path / "b" / "target.engine").stat().st_size > 0

    session = onnxruntime.InferenceSession(tmp_path / "b" / "target.onnx", providers=["CPUExecutionProvider"])
    caches = {
        value.name: np.zeros((1, 1, 48, 32), np.float16) for value in session.get_inputs() if "_cache" in value.name
    }
    rows = np.arange(len(TEXT))
    inputs = {"input_ids": np.array([TEXT], np.int32), "positions": rows[None], "write_indices": np.zeros(1, np.int64)}
    mask = np.triu(np.full((1, 1, len(TEXT), 48), -3e4, np.float16), 1)
    (logits,) = session.run(["logits"], inputs | caches | {"mask": mask, "logit_rows": rows.astype(np.int32)})
    target = tiny_target()
    want = target.lm_head(target(torch.tensor([TEXT]), causal_attend(target.config, len(TEXT))).hidden)[0].numpy()
    error = np.abs(logits.astype(np.float32) - want).mean() / np.abs(want).mean()
    assert error < LARGEST_ERRORS[precision]


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_full_tensorrt_takes_quantized_weights_with_bf16_around(monkeypatch, tmp_path, precision):
    """The quantized file in plugin form is what is built; its engine's logits are near the module's."""
    target, model = tiny_lm(), tmp_path / "model"
    write_model(target, model)
    read = Target.from_folder(model)
    calibrated(read, target_fingerprint(read), [TEXT, list(range(20, 45))]).save(tmp_path / "c.json")
    options = ["--model", model, "--backend", "tensorrt", "--no-drafter", "--precision", precision, "--slots", 1]
    options += ["--max-len", 40, "--max-tree", 8, "--prefill-chunk", 16, "--output", tmp_path / "b"]
    options += ["--calibration", tmp_path / "c.json"] if precision == "fp8" else []
    stand_in_tensorrt.install(monkeypatch, "tensorrt", capability="8.6")
    if precision == "fp8":
        done = invoke(build.main, *options)
        assert done.exit_code == 1
        assert "8.6: fp8 engines need 8.9" in done.output
        stand_in_tensorrt.install(monkeypatch, "tensorrt", capability="8.9")
    done = invoke(build.main, *options)
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    assert ("calibration.json" in bundle.manifest.files) == (precision == "fp8")
    constants = ir.load(tmp_path / "b" / "target.onnx").graph.initializers
    stored = Counter(value.dtype for value in constants.values())
    assert stored[NARROW[precision]] >= narrow_layers(target, precision)
    assert constants["target.norm.weight"].dtype == ir.DataType.BFLOAT16
    assert not stored[ir.DataType.FLOAT16]
    step = [chain(0, [], TEXT, causal=True)]
    logits, _ = load_engine(bundle).execute(make_batch(step, words=1))
    want = expected(target, step)[0]
    assert np.abs(logits - want).mean() / np.abs(want).mean() < LARGEST_ERRORS[precision]


@pytest.mark.parametrize(("symmetric", "kept"), [(True, 8), (False, 0)])
def test_weights_of_4_bits_around_their_middle_are_kept_as_they_are(tmp_path, symmetric, kept):
    """Others are rounded anew."""
    settings = PACKED | {"config_groups": group_of(4, symmetric=symmetric, group_size=32)}
    folder = tmp_path / "model"
    write_folder(folder, settings, lambda w: compressed(w, 4, symmetric=symmetric, size=32), intermediate_size=192)
    options = ["--model", folder, "--backend", "tensorrt_rtx", "--no-drafter", "--precision", "int4", "--slots", 1]
    options += ["--max-len", 40, "--max-tree", 8, "--prefill-chunk", 16, "--output", tmp_path / "b"]
    done = invoke(build.main, *options)
    assert done.exit_code == 0, done.output
    assert f"{kept} matrices keep the 4 bits of their source" in done.output
    constants, exact = ir.load(tmp_path / "b" / "target.onnx").graph.initializers, Target.from_folder(folder)
    for name in ("layers.0.qkv", "layers.1.down"):
        values, scale = (constants[f"{name}.{part}"].const_value.numpy() for part in ("weight.int4", "scale"))
        products = values.astype(np.float32).reshape(*scale.shape, -1) * scale.astype(np.float32)[..., None]
        weight = exact.get_parameter(f"{name}.weight").numpy()
        error = np.abs(products.reshape(weight.shape) - weight).max() / np.abs(weight).max()
        assert error < (2**-10 if symmetric else 0.2)
