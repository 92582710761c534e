"""Drafters of the hub that are not served are refused, and the message says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from tests.model_defs.drafters.hub.forms import (
    HIDDEN,
    VOCAB,
    Form,
    block_speculators,
    dflash,
    dspark,
    eagle,
    modelopt,
    peagle,
    specforge,
    speculators,
    windowed,
    within,
)
from tests.model_defs.drafters.hub.test_readers import target_of


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(7)


REFUSED: dict[str, tuple[Callable[[], Form], str]] = {
    "hidden size": (lambda: eagle(hidden_size=48), r"fc.weight has shape \(24, 48\), expected \(48, 96\)"),
    "vocabulary": (lambda: eagle(vocab_size=99), "hidden size 24 and vocabulary 99; this one has 24 and 111"),
    "activation": (lambda: eagle(hidden_act="gelu"), "hidden_act 'gelu', expected 'silu'"),
    "another head": (
        lambda: headed(eagle(), VOCAB),
        "is not the target's head; give --read-as own_head=false to .*, or --read-as own_head=true to",
    ),
    "capped logits": (lambda: eagle(final_logit_softcapping=30.0), "says final_logit_softcapping 30.0; read is 0"),
    "scaled embeddings": (
        lambda: scaled(speculators(), 4.0),
        "says transformer_layer_config.input_embedding_scale 4.0; read is 1",
    ),
    "another target": (
        lambda: specforge(target_hidden_size=48),
        "hidden size 24 and is for a target of 48; this one has 24, and both must be the same",
    ),
    "residual": (lambda: speculators(norm_before_residual=None), "give --read-as norm_before_residual=true or"),
    "layer ids": (
        lambda: speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        r"give --read-as target_layers=1\+2\+3 for inputs, or --read-as target_layers=2\+3\+4 for outputs",
    ),
    "layer ids that are usual for inputs": (
        lambda: modelopt(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        r"other projects count inputs .* target_layers=2\+3\+4 for inputs",
    ),
    "window": (lambda: specforge(model_type="mistral", sliding_window=32), "layers attend to a sliding window"),
    "partial RoPE": (lambda: eagle(partial_rotary_factor=0.5), "partial_rotary_factor 0.5, expected 1"),
    "feedback": (lambda: specforge(norm_output=True), "give --read-as norm_output=true where"),
    "head": (lambda: without(specforge(), "lm_head.weight"), "lm_head.weight is missing"),
    "other tensors": (
        lambda: more(specforge(), "midlayer.self_attn.q_norm.weight"),
        "has tensors that EAGLE-3 does not have: midlayer.self_attn.q_norm.weight",
    ),
    "int8": (
        lambda: stored_in(specforge(), "midlayer.mlp.up_proj.weight", torch.int8),
        "midlayer.mlp.up_proj.weight is stored in int8, and quantized drafters are not read",
    ),
    "bias after attention": (
        lambda: more(specforge(), "midlayer.self_attn.o_proj.bias"),
        "midlayer.self_attn.o_proj.bias is not 0",
    ),
    "nothing known": (
        lambda: Form({"model_type": "bert"}, {"pooler.weight": torch.ones(2, 2)}),
        "config.json has model_type 'bert'; tensors pooler.weight. Read are drafters of .* Medusa, DFlash",
    ),
}
BLOCKS: dict[str, tuple[Callable[[], Form], str]] = {
    "causal blocks": (lambda: within(dflash(is_causal=True), causal=False), "says is_causal and causal, which contra"),
    "the root's row": (lambda: block_speculators("dspark"), "give --read-as sample_from_anchor=true where a block"),
    "DSpark's head without its name": (
        lambda: dspark(architectures=["DFlashDraftModel"]),
        "neither names DSpark .* nor says sample_from_anchor; give --read-as sample_from_anchor=true where",
    ),
    "blocks in windows": (
        lambda: windowed(block_speculators("dflash"), 9),
        "give --read-as sliding_window_non_causal=false where",
    ),
    "head of the token before": (
        lambda: dspark(markov_head_type="gated"),
        "head_type 'gated'; read is 'vanilla'",
    ),
    "mask": (lambda: dspark(mask_token_id=VOCAB), "mask is token 111 of 111"),
    "number of layers": (lambda: block_speculators("dflash", aux_hidden_state_layer_ids=[1, 4]), "fuse.fc.weight"),
    "other tensors": (
        lambda: more(dflash(), "layers.0.attention_conv.base_kernel"),
        "that DFlash does not have",
    ),
    "P-EAGLE without a mask": (lambda: without(peagle(), "mask_hidden"), "mask_hidden"),
    "XPress": (lambda: block_speculators("xpress"), "recognised: XPress; not served yet"),
}
"""Those that draft a block at once."""


def headed(form: Form, rows: int) -> Form:
    form.tensors["lm_head.weight"] = torch.randn(rows, HIDDEN)
    return form


def scaled(form: Form, scale: float) -> Form:
    """With embeddings that are scaled, as the configuration of the layers says."""
    form.config["transformer_layer_config"]["input_embedding_scale"] = scale
    return form


def outside(form: Form, ids: list[int]) -> Form:
    """With layer ids outside of `eagle_config`."""
    form.config["eagle_aux_hidden_state_layer_ids"] = ids
    return form


def without(form: Form, name: str) -> Form:
    del form.tensors[name]
    return form


def more(form: Form, name: str) -> Form:
    form.tensors[name] = torch.ones(8)
    return form


def stored_in(form: Form, name: str, dtype: torch.dtype) -> Form:
    form.tensors[name] = form.tensors[name].to(dtype)
    return form


CASES = REFUSED | {f"block, {name}": case for name, case in BLOCKS.items()}


@pytest.mark.parametrize("name", CASES)
def test_refused(target, tmp_path, name):
    make, message = CASES[name]
    with pytest.raises((ValueError, KeyError, RuntimeError), match=message):
        load_drafter(make().write(tmp_path), target)


def test_small_targets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the target has 5 layers: EAGLE-3 reads three of them, of at least 6"):
        load_drafter(specforge().write(tmp_path), target_of(5))
    with pytest.raises(ValueError, match=r"outside of eagle_config, .* target_layers=1\+2\+4 for inputs"):
        load_drafter(outside(specforge(), [1, 2, 4]).write(tmp_path), target_of(5))
