"""Memory of both TensorRT backends: what would fit where there is too little, and what shares it."""

from __future__ import annotations

from redraft.engines import load_engine
from tests.engines.tensorrt.bundles import bundle_of, recorded_steps
from tests.engines.tiny import chain, make_batch, tiny_drafter_of, tiny_target


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
