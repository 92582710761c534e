"""Memory of both TensorRT backends: what would fit where there is too little, and what shares it.

The slow case would catch a step that runs out of memory and does not say what would fit.
"""

from __future__ import annotations

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.tensorrt.library import Messages
from redraft.errors import BundleError
from redraft.model_defs.drafters.token_info import InfoForm
from tests.engines.draws import draft_batch
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tensorrt.bundles import bundle_of, recorded_steps
from tests.engines.tiny import LIMITS, METHOD, chain, make_batch, tiny_drafter_of, tiny_target


@pytest.mark.slow
def test_too_little_memory_in_a_step_says_so_too(monkeypatch, tmp_path):
    """The target's steps, and those of both engines of a drafter."""
    options = {"trained": tiny_drafter_of(tiny_target(), "hidden_state"), "resample_above": 0}
    options |= {"token_info": InfoForm.bf16, "limits": LIMITS, "beam_length": 4}  # as in test_drafter: one export
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, **options))
    drafter, batch = engine.drafters[METHOD], draft_batch(3)
    calls = {
        "target": lambda: engine.execute(make_batch([chain(0, [], [1] * 8)])),
        "drafter": lambda: drafter.draft(batch),
        "resampler": lambda: drafter.resample([np.zeros((1, 50), np.float32)], np.zeros(1, np.int32)),
    }
    monkeypatch.setattr(Messages, "text", "Requested size was 5 bytes: OutOfMemory")
    monkeypatch.setattr(stand_in_tensorrt.Context, "execute_async_v3", lambda *_: False)
    for call in calls.values():
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed .* would fit"):
            call()


def test_outputs_of_all_extents_are_in_the_largest_ones(monkeypatch, tmp_path):
    """So that the logits that are counted, where memory does not suffice, are those of one step."""
    drafter = tiny_drafter_of(tiny_target(), "eagle")
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, trained=drafter)
    with recorded_steps() as steps:
        load_engine(bundle)
    sessions = {id(session) for session, _ in steps}
    assert len(sessions) == 2, "the target's and the drafter's"
    for own in sessions:
        first, *others = [step.outputs for session, step in steps if id(session) == own]
        assert others
        for outputs in others:
            for name, output in outputs.items():
                assert output.data_ptr() == first[name].data_ptr()
                assert output.numel() <= first[name].numel()


def test_prompts_of_every_length_are_sent_from_the_same_memory(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, drafts=False))
    sizes = []
    for count in (16, *range(9, 17)):
        engine.execute(make_batch([chain(0, [], [5] * count, causal=True)], words=1))
        sizes.append(sum(len(memory) for memory in engine._target._host._pinned._memory.values()))
    assert len(set(sizes)) == 1
