"""What calibration records, and which files it refuses."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from redraft.compiler.calibration import Calibration, calibrate, linear_layers
from redraft.model_defs.target.fingerprint import target_fingerprint
from tests.engines.tiny import tiny_target

TEXTS = [[5, 9, 2], [100], [7, 7]]


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    target = tiny_target()
    return calibrate(target, target_fingerprint(target), TEXTS)


def test_the_largest_magnitude_over_all_texts(calibration):
    target = tiny_target()
    norm = target.layers[0].attention_norm
    taken = F.rms_norm(
        target.embedding.weight[torch.tensor([token for text in TEXTS for token in text])],
        norm.weight.shape,
        norm.weight,
        norm.eps,
    )
    assert calibration.largest_inputs["layers.0.qkv"] == pytest.approx(taken.abs().max().item())
    assert (calibration.texts, calibration.tokens) == (3, 6)
    assert set(calibration.largest_inputs) == set(linear_layers(target))
    alone = [calibrate(target, "", [text]).largest_inputs for text in TEXTS]
    for name, value in calibration.largest_inputs.items():
        assert value == max(entry[name] for entry in alone)


def test_no_hooks_are_left():
    target = tiny_target()
    calibrate(target, "", TEXTS)
    pickle.dumps(target)  # which the hooks, functions inside of a function, cannot be


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="at least one text"):
        calibrate(tiny_target(), "", [])
    for value in (float("nan"), float("inf")):
        target = tiny_target()
        target.layers[1].mlp_norm.weight[3] = value
        with pytest.raises(ValueError, match=r"largest input of layers\.1\.gate_up is"):
            calibrate(target, "", [*TEXTS, [1]])


def test_a_file_is_read_as_it_was_written(calibration, tmp_path):
    calibration.save(tmp_path / "new" / "c.json")
    assert Calibration.load(tmp_path / "new" / "c.json") == calibration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_fingerprint": "feed"}, "c.json was made for another target: fingerprint feed, this one has"),
        ({"largest_inputs": {"layers.0.qkv": 1.0}}, "c.json lacks the layer layers.0.attention_out (8 names differ"),
        ({"more": {"lm_head": 0.0}}, "the largest input of lm_head is 0.0, expected a positive number"),
        ({"largest_inputs": 3}, "not a calibration"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(calibration, tmp_path, change, message):
    target = tiny_target()
    raw = json.loads(json.dumps(replace(calibration).__dict__))
    raw["largest_inputs"] |= change.pop("more", {})
    (tmp_path / "c.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Calibration.load(tmp_path / "c.json").check(target, target_fingerprint(target), tmp_path / "c.json")
    assert message in str(error.value)
