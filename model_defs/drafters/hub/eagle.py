"""EAGLE-1 and EAGLE-2, as SafeAILab publishes them (HASS writes the same form).

`fc` [H, 2H] fuses a token's embedding with the target's hidden state before it, in this order. The one layer has no
norm before its attention, and none stands after it. The head is the target's; some folders hold a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from redraft.model_defs.drafters.eagle import EagleConfig, EagleDrafter
from redraft.model_defs.drafters.hub.eagle3 import settled
from redraft.model_defs.drafters.hub.folder import (
    HubFolder,
    Reader,
    Reading,
    expect_shapes,
    llama_layer,
    refuse_scaled_embeddings,
)
from redraft.model_defs.drafters.layer_shape import LayerShape, has_head_norms
from redraft.model_defs.target.config import TargetConfig

OWN_HEAD = "own_head"
"""Whether the drafter drafts with the folder's head; what --read-as answers"""
WITHOUT_HEAD = f"give --read-as {OWN_HEAD}=false to draft with the target's head, as SafeAILab and SGLang do"


def holds(folder: HubFolder) -> bool:
    names = folder.names
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and "layers.0.hidden_norm.weight" not in names


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    tensors, raw = folder.tensors(), folder.config
    size, vocabulary = raw["hidden_size"], raw["vocab_size"]
    if raw["num_hidden_layers"] != 1:
        raise ValueError(f"{folder.path}: num_hidden_layers is {raw['num_hidden_layers']}, expected 1")
    raw.get("tie_word_embeddings")  # says nothing: the head is the target's, or asked about
    fc = tensors.take("fc.weight")
    if fc.shape != (size, 2 * size):
        raise ValueError(f"{folder.path}: fc.weight has shape {tuple(fc.shape)}, expected {(size, 2 * size)}")
    weights = {"fuse.weight": torch.cat([fc[:, size:], fc[:, :size]], dim=1)}
    weights |= llama_layer(tensors, "layers.0", "layer", has_head_norms(raw))
    for name, ours in (
        ("fc.bias", "fuse.bias"),
        ("layers.0.input_layernorm.weight", "layer.attention_norm.weight"),
        ("norm.weight", "norm.weight"),
    ):
        if name in tensors:
            weights[ours] = tensors.take(name)
    embedding, head = tensors.take_if_there("embed_tokens.weight"), tensors.take_if_there("lm_head.weight")
    tensors.require_all_taken(EAGLE.form)
    if embedding is None:
        refuse_scaled_embeddings(folder, target)
    owns_head = settled(answers, target.num_layers).get(OWN_HEAD)
    if owns_head is False:
        head = None
    elif owns_head and head is None:
        raise ValueError(f"{folder.path}: lm_head.weight is missing; expected it with --read-as {OWN_HEAD}=true")
    if head is not None and head.shape != (vocabulary, size):
        head_shape, expected = tuple(head.shape), (vocabulary, size)
        raise ValueError(f"{folder.path}: lm_head.weight has shape {head_shape}, expected {expected}; {WITHOUT_HEAD}")
    if head is not None and owns_head:
        weights["own_head.weight"], head = head, None
    shape = LayerShape.from_hf(raw, qkv_bias="layer.qkv.bias" in weights)
    expect_shapes(folder.path, weights, "layer", shape, size, size)
    config = EagleConfig(
        size,
        vocabulary,
        fuse_bias="fuse.bias" in weights,
        input_norm="layer.attention_norm.weight" in weights,
        output_norm="norm.weight" in weights,
        head="own" if owns_head else "target",
        layer=shape,
    )
    return Reading(config, weights, embedding=embedding, head=head)


EAGLE = Reader("EAGLE-1/2", EagleDrafter.name, holds, read, (OWN_HEAD,))
