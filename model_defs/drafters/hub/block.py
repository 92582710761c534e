"""DFlash and DSpark, in the forms of z-lab, SpecForge (which SGLang serves), ModelOpt, DeepSeek and speculators.

ModelOpt calls DSpark's tensors otherwise. A mask's embedding may stand apart, in `mask_embedding.pt`.

All hold `fc` [H, n * H] over several layers of the target, `hidden_norm` after it, layers of Qwen3 and a norm. DSpark
has a previous-token head as well: `markov_w1` [V, r] of the token before, times `markov_w2` [K, r]. Its confidence
head, which would shorten drafts, is not read.

Layers of speculators' form may attend to a sliding window of the context before a block, within which they are causal
or not, as the folder says. Readers count such windows differently, so longer contexts than one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redraft.model_defs.drafters.block import BlockConfig, BlockDrafter
from redraft.model_defs.drafters.hub.eagle3 import IGNORED, settled, token_ids
from redraft.model_defs.drafters.hub.folder import (
    HubFolder,
    Reader,
    Reading,
    expect_shapes,
    llama_layer,
    refuse_scaled_embeddings,
)
from redraft.model_defs.drafters.layer_shape import WITH_HEAD_NORMS, LayerShape
from redraft.model_defs.files import load_pickled_object
from redraft.model_defs.target.config import TargetConfig

ANCHOR, NON_CAUSAL = "sample_from_anchor", "sliding_window_non_causal"
"""Whether the root's row predicts a token, and whether rows of a block see later ones where layers have a window; what
--read-as answers"""
BONUS = "dspark_bonus_anchor"
"""The contrary of ANCHOR, in DeepSeek's and SpecForge's DSpark"""
EITHER_ANCHOR = (
    f"give --read-as {ANCHOR}=true where a block drafts block_size tokens, "
    f"--read-as {ANCHOR}=false where it drafts one less"
)
SHIFT = "shift_label"
"""The same as ANCHOR, in ModelOpt's DSpark"""
MASK = "mask_token_id"
OWN = "dflash_config"
"""The object of `config.json` where most of these fields stand"""
MARKOV = ("markov_head.markov_w", "markov_w")
"""How names of the previous-token head's two matrices begin"""
CONFIDENCE = (
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
    "confidence_proj.weight",
    "confidence_proj.bias",
)
MASK_FILE = "mask_embedding.pt"
OWN_KINDS = ("dflash", "dspark")
"""Values of `model_type` that say nothing of the layers, which are Qwen3's"""
UNREAD: dict[str, Any] = {
    "dflash_query_causal": False,
    "markov_head_type": "vanilla",
    "use_swa": False,
}
"""What is read of fields of this form that change what a drafter computes, besides null"""


def says(folder: HubFolder, name: str) -> Any:
    """A field of `config.json`, or of its `dflash_config`; None without it."""
    return folder.says(name, OWN)


def is_speculators(folder: HubFolder) -> bool:
    return "speculators_model_type" in folder.config


def is_dspark(folder: HubFolder) -> bool:
    if is_speculators(folder):
        return folder.config["speculators_model_type"] == "dspark"
    return folder.names_architecture("DSpark") or says(folder, "projector_type") == "dspark"


def is_dflash(folder: HubFolder) -> bool:
    if is_speculators(folder):
        return folder.config["speculators_model_type"] == "dflash"
    named = folder.names_architecture("DFlashDraftModel") or isinstance(folder.config.get(OWN), dict)
    return named and not is_dspark(folder)


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    tensors, layer = folder.tensors(), folder.config
    if is_speculators(folder):
        layer = folder.config["transformer_layer_config"]
        layer.get("tie_word_embeddings")  # says nothing, it is copied from the target
    if layer.get("model_type") in (None, *OWN_KINDS):
        layer["model_type"] = WITH_HEAD_NORMS
    says(folder, "projector_type")  # told which form it is
    for name, read in UNREAD.items():
        if (value := says(folder, name)) not in (None, read):
            raise ValueError(f"{folder.path}: config.json says {name} {value!r}; read is {read!r}")
    refuse_scaled_embeddings(folder, target)
    size, vocabulary = folder.hidden_size(layer, target), layer["vocab_size"]
    if (layers := says(folder, "num_target_layers")) not in (None, target.num_layers):
        raise ValueError(
            f"{folder.path}: config.json says num_target_layers {layers}, and this target has {target.num_layers}"
        )
    count, head_norms = layer["num_hidden_layers"], "layers.0.self_attn.q_norm.weight" in tensors
    shape = LayerShape.from_hf(layer, "layers.0.self_attn.q_proj.bias" in tensors, windows=is_speculators(folder))
    weights = {"fuse.fc.weight": tensors.take("fc.weight"), "fuse.norm.weight": tensors.take("hidden_norm.weight")}
    for name in (f"layers.{index}" for index in range(count)):
        weights |= llama_layer(tensors, name, name, head_norms)
        weights[f"{name}.attention_norm.weight"] = tensors.take(f"{name}.input_layernorm.weight")
        expect_shapes(folder.path, weights, name, shape, size, size)
        if layer.get("is_neox_style") is False:
            turn_adjacent_pairs(weights, name, shape)
    weights["norm.weight"] = tensors.take("norm.weight")
    settings = settled({name: text for name, text in answers.items() if name != MASK}, target.num_layers)
    from_root = drafts_from_root(folder, settings)
    markov = next((name for name in MARKOV if f"{name}1.weight" in tensors), None)
    if (rank := says(folder, "markov_rank")) and markov is None:
        raise ValueError(f"{folder.path}: config.json says markov_rank {rank}, and {MARKOV[0]}1.weight is missing")
    if markov is not None:
        if not is_dspark(folder) and says(folder, ANCHOR) is None and ANCHOR not in settings:
            raise ValueError(
                f"{folder.path}: {markov}1.weight is there, and config.json neither names DSpark "
                f"(projector_type) nor says {ANCHOR}; {EITHER_ANCHOR}"
            )
        weights["token_info.z"] = tensors.take(f"{markov}1.weight")
        weights["token_info.up"] = tensors.take(f"{markov}2.weight")
        if rank not in (None, rank_of_weights := weights["token_info.z"].shape[-1]):
            raise ValueError(
                f"{folder.path}: config.json says markov_rank {rank}, and {markov}1.weight has {rank_of_weights}"
            )
    offsets, head = tensors.take_if_there("d2t"), tensors.take_if_there("lm_head.weight")
    if says(folder, "tie_word_embeddings") and head is not None:
        raise ValueError(
            f"{folder.path}: config.json says tie_word_embeddings true, and lm_head.weight is there: give --read-as "
            "ignore=tie_word_embeddings to draft with it, as vLLM does"
        )
    if head is not None:
        weights["own_head.weight"] = head
    elif offsets is not None:
        raise ValueError(f"{folder.path}: d2t is there and lm_head.weight is missing")
    hot_ids = None if head is None else token_ids(folder, offsets, len(head), vocabulary)
    embedding = tensors.take_if_there("embed_tokens.weight")
    tensors.require_all_taken("DFlash", (*IGNORED, *CONFIDENCE))
    config = BlockConfig(
        size,
        vocabulary,
        None if hot_ids is None else len(hot_ids),
        layers_of(folder, target, count),
        count,
        block_size=require(folder, "block_size"),
        mask_token=mask_of(folder, answers),
        from_root=from_root,
        head="target" if head is None else "own",
        info_rank=weights["token_info.z"].shape[1] if "token_info.z" in weights else 0,
        causal=is_causal(folder, settings, shape.window is not None),
        window=shape.window,
        layer=replace(shape, qk_norm=head_norms, window=None),
    )
    mask = mask_embedding(folder, config.mask_token, size)
    return Reading(config, weights, hot_ids, embedding, mask_embedding=mask)


def require(folder: HubFolder, name: str) -> Any:
    """A field that has no usual value. Raises ValueError where it is absent."""
    if (value := says(folder, name)) is None:
        raise ValueError(f"{folder.path}: config.json says {name} neither by itself nor in {OWN}, and it must be known")
    return value


def mask_of(folder: HubFolder, answers: Mapping[str, str]) -> int:
    """The token of masked rows. Raises ValueError where neither the folder nor an answer says it."""
    said = says(folder, MASK)
    if (answer := answers.get(MASK)) is not None:
        if not answer.isdecimal():
            raise ValueError(f"--read-as {MASK}={answer}: expected the id of a token")
        return int(answer)
    if said is None:
        raise ValueError(
            f"{folder.path}: config.json does not say {MASK}; give --read-as {MASK}= and the id that the target's "
            "tokenizer has, or was given in training, for the mask, <|MASK|> where the drafter's card names no other"
        )
    return said


def mask_embedding(folder: HubFolder, token: int, size: int) -> Tensor | None:
    """float32 [H] of MASK_FILE: a tensor, or one under `embedding` or `mask_embedding` beside the `mask_token_id`. None
    without the file. Raises ValueError for anything else in it."""
    file = folder.path / MASK_FILE
    if not file.is_file():
        return None
    folder.files_read.add(MASK_FILE)
    held = load_pickled_object(file)
    if isinstance(held, dict):
        if (said := held.get(MASK, token)) != token:
            raise ValueError(f"{file} is for the token {said}, and config.json says {MASK} {token}")
        held = next((held[name] for name in ("embedding", "mask_embedding") if name in held), None)
    if not isinstance(held, Tensor) or held.numel() != size or not held.is_floating_point():
        shape = tuple(held.shape) if isinstance(held, Tensor) else type(held).__name__
        raise ValueError(f"{file}: expected an embedding of {size} numbers, found {shape}")
    return held.flatten().float()


def turn_adjacent_pairs(weights: dict[str, Tensor], name: str, shape: LayerShape) -> None:
    """Put the elements of a layer's query and key heads, which RoPE turns in adjacent pairs, in our order."""
    order = shape.rope.element_order(shape.head_size, adjacent=True)
    turned = (shape.num_heads + shape.num_kv_heads) * shape.head_size
    for kind in ("weight", "bias"):
        if (qkv := weights.get(f"{name}.qkv.{kind}")) is not None:
            heads = qkv[:turned].unflatten(0, (-1, shape.head_size))[:, order].flatten(0, 1)
            weights[f"{name}.qkv.{kind}"] = torch.cat([heads, qkv[turned:]])
    for norm in ("q_norm", "k_norm"):
        if (weight := weights.get(f"{name}.{norm}.weight")) is not None:
            weights[f"{name}.{norm}.weight"] = weight[order]


def layers_of(folder: HubFolder, target: TargetConfig, count: int) -> tuple[int, ...]:
    """The layers whose inputs are read: the numbers of speculators' form, one more than those of others, which count
    outputs, and without them take as many as the drafter has layers, evenly spaced from the second on."""
    if is_speculators(folder):
        return tuple(require(folder, "aux_hidden_state_layer_ids"))
    ids, last = says(folder, "target_layer_ids"), target.num_layers - 3
    if not ids and count == 1:
        ids = [target.num_layers // 2]
    elif not ids and last >= 1:
        ids = [round(1 + index * (last - 1) / (count - 1)) for index in range(count)]
    elif not ids:
        raise ValueError(
            f"{folder.path}: config.json does not say target_layer_ids, and the target has only "
            f"{target.num_layers} layers"
        )
    return tuple(layer + 1 for layer in ids)


def drafts_from_root(folder: HubFolder, answers: Mapping[str, bool]) -> bool:
    """Whether the root's row predicts a token: usual with DSpark. Raises ValueError where there is no answer, and a
    folder contradicts itself, or one of speculators' DSpark does not say."""
    fields = (ANCHOR, SHIFT, BONUS) if is_dspark(folder) and not is_speculators(folder) else (ANCHOR,)
    said = {name: value for name in fields if (value := says(folder, name)) is not None}
    if ANCHOR in answers:
        return answers[ANCHOR]
    meant = {value != (name == BONUS) for name, value in said.items()}
    if len(meant) > 1:
        says_all = " and ".join(f"{name} {value}" for name, value in said.items())
        raise ValueError(
            f"{folder.path}: config.json says {says_all}, which contradict each other; vLLM reads the last; "
            f"{EITHER_ANCHOR}"
        )
    if meant:
        return meant.pop()
    if is_speculators(folder) and is_dspark(folder):
        raise ValueError(
            f"{folder.path}: config.json does not say {ANCHOR}, which DSpark of today takes for true, and which files "
            f"older than the field mean as false; {EITHER_ANCHOR}"
        )
    return is_dspark(folder)


def is_causal(folder: HubFolder, answers: Mapping[str, bool], windows: bool) -> bool:
    """Whether a row of a block sees no later one: as the folder says, and as usual only in layers with a window. Raises
    ValueError where it does not say so of these, and no answer does."""
    said = {name: value for name in ("is_causal", "causal") if (value := says(folder, name)) is not None}
    non_causal = folder.says(NON_CAUSAL)
    if len(set(said.values())) > 1:
        raise ValueError(f"{folder.path}: config.json says is_causal and causal, which contradict each other")
    if said:
        return next(iter(said.values()))
    if not windows:
        return False
    non_causal = answers.get(NON_CAUSAL, non_causal)
    if non_causal is None:
        raise ValueError(
            f"{folder.path}: config.json does not say {NON_CAUSAL}, which speculators then takes for false and vLLM "
            f"for true; give --read-as {NON_CAUSAL}=false where a block's rows see only those before them, --read-as "
            f"{NON_CAUSAL}=true where they see each other"
        )
    return not non_causal


DFLASH = Reader("DFlash", BlockDrafter.name, is_dflash, read, (ANCHOR, NON_CAUSAL, MASK))
DSPARK = Reader("DSpark", BlockDrafter.name, is_dspark, read, (ANCHOR, NON_CAUSAL, MASK))
