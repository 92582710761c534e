"""Names of weights in the checkpoints of every form."""

from __future__ import annotations

import pytest

from redraft.model_defs.weights.names import own_name, whole_name


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_names_of_either_version_of_transformers_are_known(beginning):
    assert own_name(f"{beginning}layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert own_name("language_model.lm_head.weight") == "lm_head.weight"
    assert own_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"


def test_names_without_their_beginning_get_it():
    assert whole_name("decoder.layers.0.fc1.weight") == "model.decoder.layers.0.fc1.weight"
    assert whole_name("model.norm.weight") == "model.norm.weight"
    assert whole_name("language_model.lm_head.weight") == "lm_head.weight"
