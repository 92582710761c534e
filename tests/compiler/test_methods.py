"""Methods fitted to their drafters: only what was not given changes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from redraft.compiler.methods import MethodSettings, drafting_loop
from redraft.engines.cuda.buckets import fitting, step_buckets
from redraft.errors import BundleError
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.eagle import EagleConfig, EagleDrafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.target.attention import rope_tables
from tests.engines.tiny import DRAFTING, LAYERS, LIMITS, VOCAB, bundle_config, tiny_drafter_of, tiny_of

SEARCH = DRAFTING.model_copy(update={"beam_length": 5})
DRAWS = DRAFTING.model_copy(update={"construction": "gumbel_top_k", "levels": (4, 2, 1), "tree_budget": 20})


def settings(**given: Any) -> MethodSettings:
    return MethodSettings.model_validate({"drafter": "d", **given})


def test_what_training_measured_is_carried(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"drafter": "medusa", "acceptance_ratio": 0.9}))
    assert settings(drafter=tmp_path).config().acceptance_ratio == 0.9


@pytest.mark.parametrize(("most", "length"), [(None, 5), (6, 5), (5, 5), (3, 3)])
def test_beams_are_no_longer_than_the_drafter_goes(most, length):
    assert settings().fitted(SEARCH, most) == SEARCH.model_copy(update={"beam_length": length})
    assert settings(beam_length=5).fitted(SEARCH, most) == SEARCH


def test_draws_are_no_deeper_and_their_usual_budget_is_smaller():
    draws = settings(construction="gumbel_top_k")
    assert draws.fitted(DRAWS, 3) == DRAWS
    assert draws.fitted(DRAWS, 2) == DRAWS.model_copy(update={"levels": (4, 2), "tree_budget": 12})
    budget = settings(construction="gumbel_top_k", tree_budget=7)
    assert budget.fitted(DRAWS, 2) == DRAWS.model_copy(update={"levels": (4, 2), "tree_budget": 7})
    given = settings(construction="gumbel_top_k", levels="4,2,1")
    assert given.fitted(DRAWS, 2) == DRAWS


def test_the_usual_tree_and_its_root_are_16_rows():
    """CUDA graphs have a bucket of 16 rows, and none between that and 24."""
    limits = LIMITS.model_copy(update={"max_tree": 32})
    rows = 1 + MethodSettings(ngram=True).config().tree_budget
    bucket = fitting(step_buckets(limits), 1, rows)
    assert (rows, bucket.rows) == (16, 16)


def test_thresholds_that_never_matter_in_shorter_drafts_are_refused():
    method = SEARCH.model_copy(update={"resample_above": 2})
    assert settings(resample_above=2).fitted(method, 4).beam_length == 4
    with pytest.raises(BundleError, match=r"--resample-above 2: expected less than 2, .* of 3 tokens, as deep as this"):
        settings(resample_above=2).fitted(method, 3)


@pytest.mark.parametrize("max_len", [80, 81])
def test_longrope_follows_the_longest_context_and_not_the_caches_rows(max_len):
    """In drafters with a RoPE of their own and in draft LMs, as in the target. Layers that are trained here, in short
    windows, have the factors for short contexts whatever is served."""
    divisors = {"short_divisors": tuple(1 + i / 8 for i in range(16)), "long_divisors": (9.0,) * 16}
    longrope = replace(LAYERS["phi4"]["rope"], original_max_position=80, share=None, **divisors)
    target, original = tiny_of("phi4", rope=longrope), 80
    config = bundle_config(target, {}, LIMITS.model_copy(update={"max_len": max_len}))
    rope = target.config.rope
    scaling = {"rope_type": "longrope", "short_factor": rope.short_divisors, "long_factor": rope.long_divisors}
    scaling |= {"original_max_position_embeddings": original, "attention_factor": rope.attention_factor}
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = {**sizes, "head_dim": 32, "vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 128}
    shape = LayerShape.from_hf(folder | {"rope_scaling": scaling})
    contexts = {
        EagleDrafter(EagleConfig(target.config.hidden_size, VOCAB, layer=shape), target): max_len,
        DraftLM.of_model(target, target): max_len,
        tiny_drafter_of(target, "eagle"): original,
        tiny_drafter_of(target, "draft_lm"): original,
    }
    for drafter, context in contexts.items():
        _, loop = drafting_loop(drafter, DRAFTING.model_copy(update={"drafter": drafter.name}), config)
        found = loop.drafter.tables.ropes.of(0)
        assert torch.equal(found, rope_tables(target.config, len(found), context)[0]), drafter.name
