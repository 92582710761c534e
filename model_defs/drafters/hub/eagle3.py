"""EAGLE-3 and 3.1, in the forms of SafeAILab and SpecForge (which SGLang serves), of ModelOpt, and of speculators, and
P-EAGLE of speculators, which holds `mask_hidden` [n * H] as well.

All hold `fc` [H, n * H] over what enters n layers of the target, one layer whose attention reads [norm(embedding),
norm(state)], a norm, a head over the draft vocabulary, and `d2t`: row i of the head is token i + d2t[i]. They differ in
names, and in what says which layers are read and which state is fed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from redraft.model_defs.drafters.eagle3 import (
    LEAST_LAYERS,
    Eagle3Config,
    Eagle3Drafter,
    ParallelEagle3Config,
    ParallelEagle3Drafter,
    parse_layers,
    usual_layers,
)
from redraft.model_defs.drafters.hub.folder import HubFolder, HubTensors, Reader, Reading, expect_shapes, llama_layer
from redraft.model_defs.drafters.layer_shape import LayerShape, has_head_norms
from redraft.model_defs.target.config import TargetConfig

OUTPUTS = "eagle_aux_hidden_state_layer_ids"
"""Layer ids: in speculators' form those whose inputs are read, in `eagle_config` those whose outputs are."""
TARGET_LAYERS, LAYER_IDS = "target_layer_ids", "layer_ids"
"""Layer ids as vLLM reads them: those whose outputs are read, which DeepSpec writes, and those in `eagle_config` whose
inputs are"""
OWN = "eagle_config"
"""The object of `config.json` where ModelOpt and TensorRT-LLM say what is EAGLE-3's"""
RESIDUAL, FEEDBACK, LAYERS = "norm_before_residual", "norm_output", "target_layers"
"""What --read-as answers; `target_layers` are the layers whose inputs are read, with + between them."""
IGNORED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""What only training reads."""


def is_speculators(folder: HubFolder) -> bool:
    return folder.config.get("speculators_model_type") == "eagle3"


def is_parallel(folder: HubFolder) -> bool:
    return folder.config.get("speculators_model_type") == "peagle"


def is_modelopt(folder: HubFolder) -> bool:
    return "layers.0.hidden_norm.weight" in folder.names and "speculators_model_type" not in folder.config


def is_official(folder: HubFolder) -> bool:
    return "midlayer.hidden_norm.weight" in folder.names and "speculators_model_type" not in folder.config


def read_speculators(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    raw = folder.config
    residual = folder.says(RESIDUAL)
    if residual is None and RESIDUAL not in answers and not is_parallel(folder):
        raise ValueError(
            f"{folder.path}: config.json does not say {RESIDUAL}, which vLLM then takes for true and speculators for "
            f"false; give --read-as {RESIDUAL}=true or --read-as {RESIDUAL}=false"
        )
    count, answers_settled = target.num_layers, settled(answers, target.num_layers)
    named = raw.get(OUTPUTS)
    layers = answers_settled.get(LAYERS) or named or usual_layers(count)
    if LAYERS not in answers_settled and count >= LEAST_LAYERS and tuple(layers) == outputs_of(usual_layers(count)):
        raise ValueError(
            f"{folder.path}: {OUTPUTS} is {list(layers)}, the numbers by which other projects count outputs of layers, "
            f"and this form counts inputs; {either(layers)}"
        )
    settings = {RESIDUAL: bool(residual), FEEDBACK: feeds_back(folder), "fuse_norm": fuse_norm(folder), LAYERS: layers}
    return read(folder, raw["transformer_layer_config"], target, settings | answers_settled)


def read_modelopt(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    if folder.says("use_aux_hidden_state", OWN) is False or "fc.weight" not in folder.names:
        raise ValueError(f"{folder.path}: use_aux_hidden_state false (no fc.weight) is recognised; not served yet")
    if (steps := folder.says("parallel_draft_step", OWN)) not in (None, 0, 1):
        raise ValueError(f"{folder.path}: parallel_draft_step {steps} is recognised; not served yet")
    answers_settled = settled(answers, target.num_layers)
    layers = layers_of(folder, target, answers_settled.get(LAYERS))
    settings = {LAYERS: layers, "fuse_norm": fuse_norm(folder), FEEDBACK: returns_post_norm(folder)}
    return read(folder, folder.config, target, settings | answers_settled)


def read_official(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    raw = folder.config
    norm, post_norm = fuse_norm(folder), returns_post_norm(folder)
    feedback = folder.says(FEEDBACK, OWN)
    settles = FEEDBACK in answers or (post_norm and feedback is not False) or (norm == "each" and feedback)
    if feedback is not None and not settles:
        if feedback:
            means = (
                "a norm before the head and vLLM one before the state is fed back; give "
                f"--read-as {FEEDBACK}=true where the state is fed back after the norm, --read-as {FEEDBACK}=false "
                "where it is before"
            )
        else:
            means = (
                "that the head reads states without a norm, which is not served, and vLLM that states are fed back "
                f"before the norm; give --read-as {FEEDBACK}=false where vLLM's meaning holds"
            )
        raise ValueError(
            f"{folder.path}: config.json says {FEEDBACK} {str(feedback).lower()}, by which SpecForge before September "
            f"2026 means {means}"
        )
    answers_settled = settled(answers, target.num_layers)
    layers = layers_of(folder, target, answers_settled.get(LAYERS))
    settings = {FEEDBACK: bool(feedback) or post_norm, "fuse_norm": norm, LAYERS: layers}
    return read(folder, raw, target, settings | answers_settled)


def read(folder: HubFolder, layer: dict[str, Any], target: TargetConfig, settings: Mapping[str, Any]) -> Reading:
    """What all forms share: `layer` configures the layers, `settings` are fields of `Eagle3Config`."""
    tensors = folder.tensors()
    size, vocabulary = folder.hidden_size(layer, target), layer["vocab_size"]
    first = "midlayer" if "midlayer.hidden_norm.weight" in folder.names else "layers.0"
    count = 1 if first == "midlayer" else layer["num_hidden_layers"]
    head_norms = has_head_norms(layer)
    weights = first_layer(tensors, first, head_norms)
    for index in range(1, count):
        ours = f"others.{index - 1}"
        weights |= llama_layer(tensors, f"layers.{index}", ours, head_norms)
        weights[f"{ours}.attention_norm.weight"] = tensors.take(f"layers.{index}.input_layernorm.weight")
    weights |= {"fuse.fc.weight": tensors.take("fc.weight"), "norm.weight": tensors.take("norm.weight")}
    kind: Any = Eagle3Config
    if is_parallel(folder):
        kind, weights["mask_layers"] = ParallelEagle3Config, tensors.take("mask_hidden").flatten()
        if (mask := folder.config["mask_token_id"]) >= vocabulary:
            raise ValueError(f"{folder.path}: config.json says mask_token_id {mask}, of {vocabulary} tokens")
        settings = {**settings, "mask_token": mask}
    layers = tuple(settings[LAYERS])
    if settings["fuse_norm"] == "all":
        weights["fuse.norms.0.weight"] = tensors.take("input_norm.weight")
    elif settings["fuse_norm"] == "each":
        weights |= {f"fuse.norms.{i}.weight": tensors.take(f"fc_norm.{i}.weight") for i in range(len(layers))}
    head, offsets = tensors.take_if_there("lm_head.weight"), tensors.take_if_there("d2t")
    layer.get("tie_word_embeddings")  # says nothing in speculators' form, which copies it from the target
    is_tied = folder.says("tie_word_embeddings")
    if head is not None:
        weights["own_head.weight"] = head
    elif is_tied and offsets is None:
        weights |= tied_head(folder, tensors, target)
    elif not is_modelopt(folder) or offsets is not None or folder.says("draft_vocab_size") not in (None, vocabulary):
        raise ValueError(
            f"{folder.path}: lm_head.weight is missing; the target's is read only in ModelOpt's form, for drafters of "
            "all tokens"
        )
    if head is not None and is_tied:
        raise ValueError(
            f"{folder.path}: config.json says tie_word_embeddings true, by which SGLang drafts with the embedding, and "
            "lm_head.weight, with which vLLM does, is there: give --read-as ignore=tie_word_embeddings to draft with it"
        )
    hot_ids = None if head is None else token_ids(folder, offsets, len(head), vocabulary)
    embedding = tensors.take_if_there("embed_tokens.weight")
    tensors.require_all_taken("EAGLE-3", IGNORED)
    expected = (size, len(layers) * size)
    if tuple(weights["fuse.fc.weight"].shape) != expected:
        fuse_shape = tuple(weights["fuse.fc.weight"].shape)
        raise ValueError(
            f"{folder.path}: fc.weight has shape {fuse_shape}, for the layers {layers} expected {expected}"
        )
    shape = LayerShape.from_hf(layer, "layer.qkv.bias" in weights, windows="speculators_model_type" in folder.config)
    expect_shapes(folder.path, weights, "layer", shape, size, 2 * size)
    for index in range(1, count):
        expect_shapes(folder.path, weights, f"others.{index - 1}", shape, size, size)
    config = kind(
        size,
        vocabulary,
        None if hot_ids is None else len(hot_ids),
        num_layers=count,
        head="own" if "own_head.weight" in weights else "target",
        layer=shape,
        **{**settings, LAYERS: layers},
    )
    return Reading(config, weights, hot_ids, embedding)


def fuse_norm(folder: HubFolder) -> str:
    """What is normed before the layers are fused: see `Eagle3Config.fuse_norm`. Raises ValueError for two norms."""
    whole, each = folder.says("norm_before_fc", OWN), folder.says("fc_norm", OWN)
    if whole and each:
        raise ValueError(f"{folder.path}: config.json says norm_before_fc and fc_norm, expected one of them")
    return "all" if whole else "each" if each else "none"


def feeds_back(folder: HubFolder) -> bool:
    """Whether states are fed back after the last norm, as speculators and vLLM read it."""
    return bool(folder.says(FEEDBACK)) or returns_post_norm(folder)


def returns_post_norm(folder: HubFolder) -> bool:
    """The same, as TensorRT-LLM reads it."""
    return bool(folder.says("return_hidden_post_norm", OWN))


def tied_head(folder: HubFolder, tensors: HubTensors, target: TargetConfig) -> dict[str, Tensor]:
    """The head of a drafter that drafts with its embedding; none where the target's head is that too. Raises ValueError
    where the target's embedding is not its head."""
    if "embed_tokens.weight" in tensors:
        return {"own_head.weight": tensors.peek("embed_tokens.weight")}
    if target.tie_embeddings:
        return {}
    raise ValueError(
        f"{folder.path}: config.json says tie_word_embeddings true and embed_tokens.weight is missing: the head is "
        "the target's embedding then, which is not the target's head; this is not served"
    )


def first_layer(tensors: HubTensors, source: str, head_norms: bool) -> dict[str, Tensor]:
    """The first layer's weights by our names."""
    norms = {"embedding_norm": "input_layernorm", "state_norm": "hidden_norm"}
    weights = {f"layer.{ours}.weight": tensors.take(f"{source}.{name}.weight") for ours, name in norms.items()}
    return weights | llama_layer(tensors, source, "layer", head_norms)


def token_ids(folder: HubFolder, offsets: Tensor | None, rows: int, vocabulary: int) -> Tensor | None:
    """The target's ids int64 [K] of the head's rows, from `d2t`; None where the head has all of them."""
    if offsets is None:
        if rows != vocabulary:
            raise ValueError(f"{folder.path}: d2t is missing, and the head has {rows} rows of {vocabulary} tokens")
        return None
    ids = torch.arange(len(offsets)) + offsets.long()
    if len(ids) != rows or bool((ids < 0).any() or (ids >= vocabulary).any()) or len(ids.unique()) != rows:
        raise ValueError(
            f"{folder.path}: d2t gives {len(ids)} tokens from {int(ids.min())} to {int(ids.max())}, "
            f"{len(ids.unique())} of them different; expected one of {vocabulary} for each of {rows} rows (d2t is an "
            "offset from the row)"
        )
    return ids


def layers_of(folder: HubFolder, target: TargetConfig, answer: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers whose inputs are read: the answer, or else those of `eagle_config`, whose ids count outputs, or of
    what else names them.

    Raises ValueError for ids that may count inputs: the usual ones by number, or others beside it, which vLLM reads so
    and SGLang not at all; and for two fields that name other layers.
    """
    own, count = folder.config.part(OWN), target.num_layers
    ids, beside = tuple(own.get(OUTPUTS) or ()), tuple(folder.config.get(OUTPUTS) or ())
    named = {
        f"{OWN}.{OUTPUTS}": tuple(layer + 1 for layer in ids),
        TARGET_LAYERS: tuple(layer + 1 for layer in folder.config.get(TARGET_LAYERS) or ()),
        f"{OWN}.{LAYER_IDS}": tuple(own.get(LAYER_IDS) or ()),
    }
    said = {name: inputs for name, inputs in named.items() if inputs}
    if answer:
        return answer
    if len(set(said.values())) > 1:
        raise ValueError(
            f"{folder.path}: config.json names other layers in {' and '.join(said)}: inputs of "
            f"{' and '.join(str(list(inputs)) for inputs in said.values())}; give --read-as {LAYERS}= and the right "
            "ones, with + between them"
        )
    layers = next(iter(said.values()), ())
    if not layers and (count >= LEAST_LAYERS or not beside):
        layers = usual_layers(count)
    if count >= LEAST_LAYERS and ids == usual_layers(count):
        raise ValueError(
            f"{folder.path}: eagle_config says {OUTPUTS} {list(ids)}, the numbers by which other projects count inputs "
            f"of layers, and this form counts outputs; {either(ids)}"
        )
    if beside and beside != layers:
        raise ValueError(
            f"{folder.path}: config.json says {OUTPUTS} {list(beside)} outside of eagle_config, by which vLLM means "
            f"inputs of layers and others outputs; {either(beside)}"
        )
    return layers


def outputs_of(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers whose outputs are these layers' inputs."""
    return tuple(layer - 1 for layer in layers)


def either(ids: Sequence[int]) -> str:
    """What to answer where ids may count inputs or outputs."""
    inputs, outputs = ("+".join(str(layer + more) for layer in ids) for more in (0, 1))
    return f"give --read-as {LAYERS}={inputs} for inputs, or --read-as {LAYERS}={outputs} for outputs"


def settled(answers: Mapping[str, str], count: int) -> dict[str, Any]:
    """The answers of --read-as as fields of `Eagle3Config`. Raises ValueError for one that does not fit."""
    settings: dict[str, Any] = {}
    for name, text in answers.items():
        if name == LAYERS:
            settings[name] = parse_layers(text, count)
        elif text not in ("true", "false"):
            raise ValueError(f"--read-as {name}={text}: expected true or false")
        else:
            settings[name] = text == "true"
    return settings


EAGLE3_SPECULATORS = Reader(
    "EAGLE-3 (speculators)", Eagle3Drafter.name, is_speculators, read_speculators, (RESIDUAL, FEEDBACK, LAYERS)
)
P_EAGLE = Reader("P-EAGLE", ParallelEagle3Drafter.name, is_parallel, read_speculators, (RESIDUAL, LAYERS))
EAGLE3_MODELOPT = Reader("EAGLE-3 (ModelOpt)", Eagle3Drafter.name, is_modelopt, read_modelopt, (LAYERS,))
EAGLE3_OFFICIAL = Reader(
    "EAGLE-3 (SafeAILab, SpecForge)", Eagle3Drafter.name, is_official, read_official, (FEEDBACK, LAYERS)
)
