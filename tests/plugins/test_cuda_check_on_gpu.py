"""The GPU script's checks, as far as they run on the CPU."""

import pytest
import torch

from plugins.beam_packing.tensorrt_plugin import PACK_BEAMS
from plugins.cuda import check_on_gpu
from plugins.cuda.check_on_gpu import Heads, attended_bytes, check, check_packing, make_batch

HEADS = Heads(3, 1, 64)


def test_a_mixed_batch_passes_and_a_wrong_output_does_not(monkeypatch):
    batch = make_batch(HEADS, [9, 0, 40], [5, 1, 33], chunk=7)
    assert attended_bytes(batch, HEADS) == 2 * 2 * 64 * (9 + 5 + 1 + 40 + 33 + 7)
    assert check(batch, HEADS, "cpu")["rms_error"] > 0
    attend = check_on_gpu.attend
    monkeypatch.setattr(check_on_gpu, "attend", lambda *arguments: attend(*arguments) + 0.05)
    with pytest.raises(ArithmeticError, match="output differs from the reference"):
        check(batch, HEADS, "cpu")
    monkeypatch.setattr(check_on_gpu, "attend", lambda found, heads: (attend(found, heads), found.v_cache.add_(1))[0])
    with pytest.raises(ArithmeticError, match="v_cache differs"):
        check(batch, HEADS, "cpu")


def test_fp32_is_held_to_its_own_tolerance_and_to_bits(monkeypatch):
    batch = make_batch(HEADS, [9, 0, 40], [5, 1, 33], chunk=7, dtype=torch.float32)
    assert check(batch, HEADS, "cpu")["max_error"] < 1e-5
    attend = check_on_gpu.attend
    monkeypatch.setattr(check_on_gpu, "attend", lambda found, heads: attend(found, heads) + 1e-6 * len(found.slots))
    with pytest.raises(ArithmeticError, match="sequence 0 alone has other bits than in the batch"):
        check(batch, HEADS, "cpu")


@pytest.mark.parametrize(("place", "name"), list(enumerate(output.name for output in PACK_BEAMS.outputs)))
def test_packing_is_compared_in_every_output(place, name, monkeypatch):
    for sizes in ((1, 1, 1), (3, 6, 5)):
        check_packing(*sizes, "cpu")
    run = check_on_gpu.run

    def wrong(*arguments):
        outputs = run(*arguments)
        outputs[place][2] += 1
        return outputs

    monkeypatch.setattr(check_on_gpu, "run", wrong)
    with pytest.raises(ArithmeticError, match=f"packing 3 x 6 x 5: {name} not the reference's"):
        check_packing(3, 6, 5, "cpu")
