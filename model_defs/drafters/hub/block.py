"""DFlash and DSpark, in the forms of z-lab, SpecForge (which SGLang serves), ModelOpt, DeepSeek and speculators.

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

from model_defs.drafters.block import BlockConfig, BlockDrafter
from model_defs.drafters.hub.eagle3 import IGNORED, settled, token_ids
from model_defs.drafters.hub.folder import HubFolder, Reader, Reading, llama_layer, refuse_scaled_embeddings
from model_defs.drafters.layer_shape import WITH_HEAD_NORMS, LayerShape
from model_defs.target.config import TargetConfig

ANCHOR, NON_CAUSAL = "sample_from_anchor", "sliding_window_non_causal"
"""Whether the root's row predicts a token, and whether rows of a block see later ones where layers have a window; what
--read-as answers"""
BONUS = "dspark_bonus_anchor"
"""The contrary of ANCHOR, in DeepSeek's and SpecForge's DSpark"""
EITHER_ANCHOR = (
    f"give --read-as {ANCHOR}=true where a block drafts block_size tokens, "
    f"--read-as {ANCHOR}=false where it drafts one less"
)
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
OWN_KINDS = ("dflash", "dspark")
"""Values of `model_type` that say nothing of the layers, which are Qwen3's"""
UNREAD: dict[str, Any] = {
    "is_causal": False,
    "causal": False,
    "dflash_query_causal": False,
    "shift_label": False,
    "markov_head_type": "vanilla",
    "use_swa": False,
}
"""What is read of fields of this form that change what a drafter computes, besides null"""


def says(folder: HubFolder, name: str) -> Any:
    """A field of `config.json`, or of its `dflash_config`; None without it."""
    own = folder.config.get("dflash_config") or {}
    return own[name] if own.get(name) is not None else folder.config.get(name)


def is_speculators(folder: HubFolder) -> bool:
    return "speculators_model_type" in folder.config


def is_dspark(folder: HubFolder) -> bool:
    if is_speculators(folder):
        return folder.config["speculators_model_type"] == "dspark"
    named = any("DSpark" in name for name in folder.says("architectures") or ())
    return named or says(folder, "projector_type") == "dspark"


def is_dflash(folder: HubFolder) -> bool:
    if is_speculators(folder):
        return folder.config["speculators_model_type"] == "dflash"
    named = "DFlashDraftModel" in (folder.says("architectures") or ())
    return (named or isinstance(folder.config.get("dflash_config"), dict)) and not is_dspark(folder)


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    tensors, layer = folder.tensors(), folder.config.get("transformer_layer_config") or folder.config
    if layer.get("model_type") in (None, *OWN_KINDS):
        layer = layer | {"model_type": WITH_HEAD_NORMS}
    for name, read in UNREAD.items():
        if (value := says(folder, name)) not in (None, read):
            raise ValueError(f"{folder.path}: config.json says {name} {value!r}; read is {read!r}")
    refuse_scaled_embeddings(folder, target)
    size, of_target, vocabulary = layer["hidden_size"], folder.says("target_hidden_size"), layer["vocab_size"]
    if size != (of_target or size) or size != target.hidden_size:
        raise ValueError(
            f"{folder.path}: the drafter has hidden size {size} and is for a target of {of_target or size}; this one "
            f"has {target.hidden_size}, and both must be the same"
        )
    count, head_norms = layer["num_hidden_layers"], "layers.0.self_attn.q_norm.weight" in tensors
    shape = LayerShape.from_hf(layer, "layers.0.self_attn.q_proj.bias" in tensors, windows=is_speculators(folder))
    weights = {"fuse.fc.weight": tensors.take("fc.weight"), "fuse.norm.weight": tensors.take("hidden_norm.weight")}
    for name in (f"layers.{index}" for index in range(count)):
        weights |= llama_layer(tensors, name, name, head_norms)
        weights[f"{name}.attention_norm.weight"] = tensors.take(f"{name}.input_layernorm.weight")
    weights["norm.weight"] = tensors.take("norm.weight")
    settings = settled(answers, target.num_layers)
    from_root = drafts_from_root(folder, settings)
    if "markov_head.markov_w1.weight" in tensors:
        if not is_dspark(folder) and says(folder, ANCHOR) is None and ANCHOR not in settings:
            raise ValueError(
                f"{folder.path}: markov_head.markov_w1.weight is there, and config.json neither names DSpark "
                f"(projector_type) nor says {ANCHOR}; {EITHER_ANCHOR}"
            )
        weights["token_info.z"] = tensors.take("markov_head.markov_w1.weight")
        weights["token_info.up"] = tensors.take("markov_head.markov_w2.weight")
    offsets, head = tensors.take_if_there("d2t"), tensors.take_if_there("lm_head.weight")
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
        layers_of(folder),
        count,
        block_size=require(folder, "block_size"),
        mask_token=require(folder, "mask_token_id"),
        from_root=from_root,
        head="target" if head is None else "own",
        info_rank=weights["token_info.z"].shape[1] if "token_info.z" in weights else 0,
        causal=shape.window is not None and is_causal(folder, settings),
        window=shape.window,
        layer=replace(shape, qk_norm=head_norms, window=None),
    )
    return Reading(config, weights, hot_ids, embedding)


def require(folder: HubFolder, name: str) -> Any:
    """A field that has no usual value. Raises KeyError with its name."""
    if (value := says(folder, name)) is None:
        raise KeyError(name)
    return value


def layers_of(folder: HubFolder) -> tuple[int, ...]:
    """The layers whose inputs are read: the numbers of speculators' form, one more than those of others, which count
    outputs."""
    if is_speculators(folder):
        return tuple(require(folder, "aux_hidden_state_layer_ids"))
    return tuple(layer + 1 for layer in require(folder, "target_layer_ids"))


def drafts_from_root(folder: HubFolder, answers: Mapping[str, bool]) -> bool:
    """Whether the root's row predicts a token: usual with DSpark. Raises ValueError where there is no answer, and a
    folder contradicts itself, or one of speculators' DSpark does not say."""
    if ANCHOR in answers:
        return answers[ANCHOR]
    said = says(folder, ANCHOR)
    bonus = says(folder, BONUS) if is_dspark(folder) and not is_speculators(folder) else None
    meant = {bool(said)} if said is not None else set()
    meant |= {not bonus} if bonus is not None else set()
    if len(meant) > 1:
        raise ValueError(
            f"{folder.path}: config.json says {ANCHOR} {said} and {BONUS} {bonus}, which contradict each other; "
            f"vLLM reads the latter; {EITHER_ANCHOR}"
        )
    if meant:
        return meant.pop()
    if is_speculators(folder) and is_dspark(folder):
        raise ValueError(
            f"{folder.path}: config.json does not say {ANCHOR}, which DSpark of today takes for true, and which files "
            f"older than the field mean as false; {EITHER_ANCHOR}"
        )
    return is_dspark(folder)


def is_causal(folder: HubFolder, answers: Mapping[str, bool]) -> bool:
    """Whether a row of a block sees no later one, in layers with a window. Raises ValueError where the folder does not
    say, and no answer does."""
    non_causal = answers.get(NON_CAUSAL, folder.says(NON_CAUSAL))
    if non_causal is None:
        raise ValueError(
            f"{folder.path}: config.json does not say {NON_CAUSAL}, which speculators then takes for false and vLLM "
            f"for true; give --read-as {NON_CAUSAL}=false where a block's rows see only those before them, --read-as "
            f"{NON_CAUSAL}=true where they see each other"
        )
    return not non_causal


DFLASH = Reader("DFlash", BlockDrafter.name, is_dflash, read, (ANCHOR, NON_CAUSAL))
DSPARK = Reader("DSpark", BlockDrafter.name, is_dspark, read, (ANCHOR, NON_CAUSAL))
