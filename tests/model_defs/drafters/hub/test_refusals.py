"""Drafters of the hub that are not served are refused, and the message says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from tests.model_defs.drafters.hub.forms import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    Form,
    block_speculators,
    dflash,
    dspark,
    eagle,
    medusa,
    modelopt,
    modelopt_without_head,
    peagle,
    specforge,
    speculators,
    windowed,
    with_head_norms,
    within,
)
from tests.model_defs.drafters.hub.test_readers import target_of


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(7)


REFUSED: dict[str, tuple[Callable[[], Form], str]] = {
    "hidden size": (lambda: eagle(hidden_size=48), r"fc.weight has shape \(24, 48\), expected \(48, 96\)"),
    "vocabulary": (lambda: eagle(vocab_size=99), "hidden size 24 and vocabulary 99; this one has 24 and 111"),
    "layers": (lambda: eagle(num_hidden_layers=2), "num_hidden_layers is 2, expected 1"),
    "activation": (lambda: eagle(hidden_act="gelu"), "hidden_act 'gelu', expected 'silu'"),
    "another head": (
        lambda: headed(eagle(), VOCAB),
        "is not the target's head; give --read-as own_head=false to .*, or --read-as own_head=true to",
    ),
    "another head's rows": (
        lambda: headed(eagle(), DRAFT_VOCAB),
        r"lm_head.weight has shape \(53, 24\), expected \(111, 24\); give --read-as own_head=false to",
    ),
    "capped logits": (lambda: eagle(final_logit_softcapping=30.0), "says final_logit_softcapping 30.0; read is 0"),
    "scaled logits": (lambda: specforge(logit_scale=0.5), "says logit_scale 0.5; read is 1"),
    "scaled embeddings": (
        lambda: scaled(speculators(), 4.0),
        "says transformer_layer_config.input_embedding_scale 4.0; read is 1",
    ),
    "kind of layer": (lambda: specforge(model_type="deepseek_v3"), "its layers are of model_type 'deepseek_v3'"),
    "another target": (
        lambda: specforge(target_hidden_size=48),
        "hidden size 24 and is for a target of 48; this one has 24, and both must be the same",
    ),
    "residual": (lambda: speculators(norm_before_residual=None), "give --read-as norm_before_residual=true or"),
    "layer ids": (
        lambda: speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        r"give --read-as target_layers=1\+2\+3 for inputs, or --read-as target_layers=2\+3\+4 for outputs",
    ),
    "layer ids outside of eagle_config": (
        lambda: specforge(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        r"\[1, 2, 3\] outside of eagle_config, .*=1\+2\+3 for inputs, .*=2\+3\+4 for outputs",
    ),
    "layer ids in both places": (
        lambda: outside(modelopt(), [0, 4]),
        r"target_layers=0\+4 for inputs, .*=1\+5 for outputs",
    ),
    "layer ids that are usual for inputs": (
        lambda: modelopt(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        r"other projects count inputs .* target_layers=2\+3\+4 for inputs",
    ),
    "window": (lambda: specforge(model_type="mistral", sliding_window=32), "layers attend to a sliding window"),
    "some windows": (lambda: mixed(windowed(speculators(others=1), 3)), "some of its layers attend to a sliding"),
    "windowed layers": (lambda: eagle(layer_types=["sliding_attention"]), "layers attend to a sliding window"),
    "partial RoPE": (lambda: eagle(partial_rotary_factor=0.5), "partial_rotary_factor 0.5, expected 1"),
    "residual, official": (lambda: specforge(norm_before_residual=True), "norm_before_residual True; read is False"),
    "feedback, ModelOpt": (lambda: modelopt(norm_output=True), "eagle_config.norm_output True; read is False"),
    "no norm": (lambda: specforge(norm_output=False), "the head reads states without a norm, which is not served"),
    "no heads": (lambda: without(more(medusa(1, 0), "x"), "0.0.weight"), "has no Medusa heads"),
    "feedback": (lambda: specforge(norm_output=True), "give --read-as norm_output=true where"),
    "no layers": (lambda: modelopt(use_aux_hidden_state=False), "use_aux_hidden_state false .* not served yet"),
    "ids": (lambda: absolute_ids(specforge()), "d2t is an offset from the row"),
    "head": (lambda: without(specforge(), "lm_head.weight"), "lm_head.weight is missing"),
    "head of some tokens": (
        lambda: without(modelopt(), "lm_head.weight"),
        "only in ModelOpt's form, for drafters of all",
    ),
    "head of fewer tokens": (
        lambda: modelopt_without_head(draft_vocab_size=DRAFT_VOCAB),
        "lm_head.weight is missing; the target's is read only",
    ),
    "number of layers": (
        lambda: modelopt(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        r"fc.weight has shape \(24, 48\), for the layers \(1, 2, 3\) expected \(24, 72\)",
    ),
    "other tensors": (
        lambda: more(specforge(), "midlayer.self_attn.q_norm.weight"),
        "has tensors that EAGLE-3 does not have: midlayer.self_attn.q_norm.weight",
    ),
    "no norms of heads": (
        lambda: without(with_head_norms(speculators()), "layers.0.self_attn.k_norm.weight"),
        "layers.0.self_attn.k_norm.weight",
    ),
    "int8": (
        lambda: stored_in(specforge(), "midlayer.mlp.up_proj.weight", torch.int8),
        "midlayer.mlp.up_proj.weight is stored in int8, and quantized drafters are not read",
    ),
    "fp8": (
        lambda: stored_in(eagle(), "layers.0.self_attn.q_proj.weight", torch.float8_e4m3fn),
        "layers.0.self_attn.q_proj.weight is stored in float8_e4m3fn",
    ),
    "bias after attention": (
        lambda: more(specforge(), "midlayer.self_attn.o_proj.bias"),
        "midlayer.self_attn.o_proj.bias is not 0",
    ),
    "MTP": (lambda: speculators(speculators_model_type="mtp"), "recognised: MTP; not served yet"),
    "nothing known": (
        lambda: Form({"model_type": "bert"}, {"pooler.weight": torch.ones(2, 2)}),
        "config.json has model_type 'bert'; tensors pooler.weight. Read are drafters of .* Medusa, DFlash",
    ),
}
BLOCKS: dict[str, tuple[Callable[[], Form], str]] = {
    "causal blocks": (lambda: within(dflash(is_causal=True), causal=False), "says is_causal and causal, which contra"),
    "causal queries": (lambda: dflash(dflash_query_causal=True), "says dflash_query_causal True; read is False"),
    "values": (lambda: dflash(attention_value_scale=0.5), "says attention_value_scale 0.5; read is 1"),
    "sinks": (
        lambda: within(dflash(), attention_sink_bias=True),
        "says dflash_config.attention_sink_bias True; read is False",
    ),
    "other windows": (lambda: within(dflash(), use_swa=True), "says use_swa True; read is False"),
    "the root's row": (lambda: block_speculators("dspark"), "give --read-as sample_from_anchor=true where a block"),
    "the root's row, twice": (
        lambda: dspark(sample_from_anchor=True, dspark_bonus_anchor=True),
        "True and dspark_bonus_anchor True, which contradict each other; .* give --read-as sample_from_anchor=true",
    ),
    "DSpark's head without its name": (
        lambda: dspark(architectures=["DFlashDraftModel"]),
        "neither names DSpark .* nor says sample_from_anchor; give --read-as sample_from_anchor=true where",
    ),
    "windows": (lambda: dflash(layer_types=["sliding_attention"] * 2), "attend to a sliding window"),
    "blocks in windows": (
        lambda: windowed(block_speculators("dflash"), 9),
        "give --read-as sliding_window_non_causal=false where",
    ),
    "logits": (lambda: dflash(final_logit_softcapping=30.0), "says final_logit_softcapping 30.0; read is 0"),
    "head of the token before": (
        lambda: dspark(markov_head_type="gated"),
        "head_type 'gated'; read is 'vanilla'",
    ),
    "nothing drafted": (lambda: dflash(block_size=1), "the drafter has blocks of 1, which draft nothing"),
    "no mask": (lambda: dspark(mask_token_id=None), "mask_token_id"),
    "mask": (lambda: dspark(mask_token_id=VOCAB), "mask is token 111 of 111"),
    "layers": (lambda: block_speculators("dflash", aux_hidden_state_layer_ids=[1, 4, 8]), r"layers \(1, 4, 8\), the"),
    "number of layers": (lambda: block_speculators("dflash", aux_hidden_state_layer_ids=[1, 4]), "fuse.fc.weight"),
    "hidden size": (lambda: dflash(target_hidden_size=48), "is for a target of 48; this one has 24"),
    "no head": (lambda: without(block_speculators("dflash"), "lm_head.weight"), "d2t is there and lm_head.weight is"),
    "other tensors": (
        lambda: more(dflash(), "layers.0.attention_conv.base_kernel"),
        "that DFlash does not have",
    ),
    "P-EAGLE without a mask": (lambda: without(peagle(), "mask_hidden"), "mask_hidden"),
    "Domino": (lambda: dflash(dflash_config={"projector_type": "domino"}), "recognised: Domino; not served yet"),
    "DFlash 2": (lambda: dflash(architectures=["DFlash2DraftModel"]), "recognised: DFlash 2; not served yet"),
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


def mixed(form: Form) -> Form:
    form.config["transformer_layer_config"]["layer_types"][0] = "full_attention"
    return form


def outside(form: Form, ids: list[int]) -> Form:
    """With layer ids outside of `eagle_config`."""
    form.config["eagle_aux_hidden_state_layer_ids"] = ids
    return form


def absolute_ids(form: Form) -> Form:
    """`d2t` as llama.cpp has it."""
    form.tensors["d2t"] += torch.arange(DRAFT_VOCAB)
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
