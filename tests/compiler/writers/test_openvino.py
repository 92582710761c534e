"""Blocks that a network does not take are named, and not served as the numbers that stand for them."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from redraft.bundle.backends import Precision
from redraft.compiler.writers.openvino import lower_target
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from redraft.model_defs.target.model import Target
from tests.model_defs.weights.folders import write_folder


def test_every_weight_in_blocks_is_asked_for(tmp_path):
    """A network without the last layer lacks its weights."""
    target = Target.from_folder(write_folder(tmp_path, tie_word_embeddings=True), in_blocks=True, float_ends=False)
    lower_target(export_target_plugin(target, CacheShape(4, 40, 8)), Precision.source, target.blocks)
    assert not target.blocks.unread
    shorter = Target.from_folder(tmp_path, in_blocks=True, float_ends=False)
    shorter.config = dataclasses.replace(shorter.config, num_layers=1)
    shorter.layers = nn.ModuleList([shorter.layers[0]])
    network = export_target_plugin(shorter, CacheShape(4, 40, 8))
    with pytest.raises(ValueError, match=r"the network has no layers\.1\.attention_out\.weight: choose another --prec"):
        lower_target(network, Precision.source, shorter.blocks)
