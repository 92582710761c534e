"""The default target: its shipped bundle changes no text, and an fp32 engine gives its module's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.compiler.bundle import build
from redraft.engines import load_engine
from redraft.llm import LLM
from redraft.model_defs.target.model import Target
from tests.engines.real.methods import SETTINGS, assert_nothing_changes
from tests.engines.tiny import bundle_config, chain, expected, make_batch, random_tree


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_the_shipped_drafter_changes_no_text(smollm2, smollm2_bundle, sampling):
    with LLM(smollm2_bundle) as llm:
        gained = assert_nothing_changes(llm, smollm2, sampling, prompts=3, tokens=24, at_once=(1, 3))
    assert min(gained.values()) > 1.15


@pytest.mark.slow
def test_the_real_target_in_fp32(smollm2, tmp_path):
    """It would catch a target of real size whose numbers are not its module's."""
    target = Target.from_folder(smollm2)
    config = bundle_config(target, {}, LimitsInfo(slots=3, max_len=2048, max_tree=64, prefill_chunk=64))
    build(config, target, smollm2, {}, tmp_path / "bundle")
    engine = load_engine(Bundle.load(tmp_path / "bundle"))
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, 49152, count).tolist() for count in (20, 7, 0)]
    for slot in (0, 1):
        engine.execute(make_batch([chain(slot, [], contexts[slot], causal=True)]))
    step = [
        random_tree(rng, 0, contexts[0], 6),
        chain(1, contexts[1], [504, 3575]),
        chain(2, [], rng.integers(3, 49152, 4).tolist(), causal=True),
    ]
    logits, _ = engine.execute(make_batch(step))
    np.testing.assert_allclose(logits, expected(target, step)[0], atol=3e-4, rtol=1e-5)
