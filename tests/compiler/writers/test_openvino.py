"""Blocks that a network does not take are named, and not served as the numbers that stand for them."""

from __future__ import annotations

import pytest

from redraft.bundle.backends import Precision
from redraft.compiler.writers.openvino import lower_target
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from redraft.model_defs.target.model import Target
from tests.model_defs.weights.folders import write_folder


def test_every_weight_in_blocks_is_asked_for(tmp_path):
    target = Target.from_folder(write_folder(tmp_path, tie_word_embeddings=True), in_blocks=True, float_ends=False)
    network = export_target_plugin(target, CacheShape(4, 40, 8))
    lower_target(network, Precision.source, target.blocks)
    target.blocks.unread.add("layers.2.down.weight")
    with pytest.raises(ValueError, match=r"the network has no layers\.2\.down\.weight: choose another --precision"):
        lower_target(network, Precision.source, target.blocks)
