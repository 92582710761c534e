"""Every family's layers in native form: ONNX Runtime runs the file, and TensorRT for RTX builds an engine from it.

The slow cases would catch a family whose network the library refuses, or whose numbers are not the module's.
"""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bundle.backends import Form
from redraft.bundle.config import LimitsInfo
from redraft.compiler.bundle import target_info
from redraft.compiler.writers.engine_builder import EngineBuilder
from redraft.compiler.writers.tensorrt import save
from redraft.model_defs.export.target import CacheShape, export_target_native
from tests.engines.tensorrt.native_runner import NativeRunner
from tests.engines.tiny import VOCAB, bundle_config, chain, expected, random_tree, tiny_of, tiny_target

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layers", [None, "gemma3", "mixtral", "opt", "smollm3"])
def test_the_native_form_agrees_with_the_module(tmp_path, layers):
    """Also of other families' layers, which the library builds."""
    target, cache = tiny_of(layers) if layers else tiny_target(), CacheShape(3, 40, 12)
    rng = np.random.default_rng(0)
    save(export_target_native(target, cache), tmp_path / "target.onnx")
    if layers:
        limits = LimitsInfo(slots=3, max_len=40, max_tree=12, prefill_chunk=16)
        config = bundle_config(target, {}, limits, "fp32", "tensorrt_rtx")
        EngineBuilder(config.model_copy(update={"form": Form.native})).build_target(tmp_path / "target.onnx", 0)
    info = target_info(target)
    runner = NativeRunner(tmp_path / "target.onnx", info, cache, np.float32)
    contexts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 1, 17)]
    runner.run([chain(slot, [], context) for slot, context in enumerate(contexts)])
    step = [random_tree(rng, 0, contexts[0], 12), chain(1, contexts[1], [5, 6]), random_tree(rng, 2, contexts[2], 7)]
    for found, want in zip(runner.run(step), expected(target, step), strict=True):
        np.testing.assert_allclose(found, want, atol=max(1e-4, 1e-4 * np.abs(want).max()), rtol=1e-5)
