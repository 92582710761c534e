"""An EAGLE-3 drafter in the forms that other servers load: speculators' (vLLM) and SpecForge's (SGLang, TensorRT-LLM).

Both hold the same tensors, by names that differ for the first layer, in bfloat16 but for `d2t` (int64, the target's id
of a row less the row) and `t2d` (bool). Rows of the head are in the order of the target's ids.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.bundle.writer import new_bundle
from redraft.model_defs.drafters.eagle3 import Eagle3Drafter
from redraft.model_defs.files import read_json, save_tensors

SPECULATORS_VERSION = "0.9.0"
CONFIG, WEIGHTS, TRTLLM_CONFIG = "config.json", "model.safetensors", "speculative_config.yaml"
FIRST = {"speculators": "layers.0", "specforge": "midlayer"}
"""What each form calls the first layer."""


class Form(StrEnum):
    speculators = "speculators"
    specforge = "specforge"


def export_eagle3(drafter: Eagle3Drafter, model: Path, output: Path, form: Form, verifier: str, depth: int) -> None:
    """Write a drafter of the target in the folder `model`, whole or not at all; `verifier` names the target for others,
    `depth` is how many tokens they are to draft. Raises ValueError for what the form cannot say, BundleError where it
    cannot be written."""
    config, tensors = drafter.config, hub_tensors(drafter, FIRST[form])
    if form == Form.speculators and not config.hot_vocabulary:
        del tensors["d2t"], tensors["t2d"]  # as speculators does where the head has all tokens
    if form == Form.specforge:
        beyond = [name for name in ("norm_before_residual", "norm_output") if getattr(config, name)]
        beyond += [f"fuse_norm {config.fuse_norm}"] * (config.fuse_norm == "all")
        beyond += [f"num_layers {config.num_layers}"] * (config.num_layers > 1)
        beyond += ["norms of heads"] * drafter.layer_config.qk_norm
        beyond += ["sliding windows"] * (drafter.layer_config.window is not None)
        if beyond:
            raise ValueError(f"SpecForge's form has no {', '.join(beyond)}: export to {Form.speculators}")
        written = specforge_config(drafter)
    else:
        written = speculators_config(drafter, read_json(model / "config.json"), verifier, depth)
    with new_bundle(output, sum(tensor.nbytes for tensor in tensors.values()), is_export) as folder:
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
        if form == Form.specforge:
            (folder / TRTLLM_CONFIG).write_text(trtllm_yaml(output, verifier, depth, outputs_of(drafter)))


def is_export(folder: Path) -> bool:
    """Whether a folder holds nothing but the files of an export: a model's folder has a tokenizer too."""
    return {file.name for file in folder.iterdir()} <= {CONFIG, WEIGHTS, TRTLLM_CONFIG}


def hub_tensors(drafter: Eagle3Drafter, first: str) -> dict[str, Tensor]:
    """A drafter's tensors by the forms' names, with `first` for the first layer."""
    state, shape = drafter.state_dict(), drafter.layer_config
    order = drafter.hot_ids.argsort()
    ids = drafter.hot_ids[order]
    tensors = {
        "embed_tokens.weight": drafter.embedding,
        "fc.weight": state["fuse.fc.weight"],
        f"{first}.input_layernorm.weight": state["layer.embedding_norm.weight"],
        f"{first}.hidden_norm.weight": state["layer.state_norm.weight"],
        "norm.weight": state["norm.weight"],
        "lm_head.weight": drafter.head_weight[order],
    }
    norms = {"all": "input_norm.weight", "each": "fc_norm.{}.weight"}.get(drafter.config.fuse_norm, "")
    tensors |= {norms.format(i): state[f"fuse.norms.{i}.weight"] for i in range(len(drafter.fuse.norms))}
    layers = {"layer": first} | {f"others.{i}": f"layers.{i + 1}" for i in range(len(drafter.others))}
    heads = [shape.head_size * count for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    for ours, theirs in layers.items():
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            parts = state[f"{ours}.qkv.{kind}"].split(heads)
            tensors |= {f"{theirs}.self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", parts, strict=True)}
        if shape.qkv_bias:  # loaders take `attention_bias` to mean this one too
            tensors[f"{theirs}.self_attn.o_proj.bias"] = torch.zeros(drafter.config.hidden_size)
        gate, up = state[f"{ours}.gate_up.weight"].chunk(2)
        tensors |= {
            f"{theirs}.self_attn.o_proj.weight": state[f"{ours}.attention_out.weight"],
            f"{theirs}.post_attention_layernorm.weight": state[f"{ours}.mlp_norm.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": state[f"{ours}.down.weight"],
        }
        if shape.qk_norm:
            tensors |= {
                f"{theirs}.self_attn.{name}.weight": state[f"{ours}.{name}.weight"] for name in ("q_norm", "k_norm")
            }
        if theirs != first:
            tensors[f"{theirs}.input_layernorm.weight"] = state[f"{ours}.attention_norm.weight"]
    in_bf16 = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    is_drafted = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    return in_bf16 | {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def layer_config(drafter: Eagle3Drafter) -> dict[str, Any]:
    """A Llama or Qwen3 configuration of the drafter's layers."""
    shape = drafter.layer_config
    windows = {
        "sliding_window": shape.window,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * shape.num_layers,
    }
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position,
        "rope_theta": shape.rope.theta,
        "rope_scaling": shape.rope.scaling(),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **(windows if shape.window is not None else {}),
    }


def speculators_config(drafter: Eagle3Drafter, target: dict[str, Any], verifier: str, depth: int) -> dict[str, Any]:
    """`config.json` of speculators' form; `target` is the target's own."""
    config = drafter.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": len(drafter.hot_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fuse_norm == "all",
        "fc_norm": config.fuse_norm == "each",
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": target.get("architectures") or []},
        },
        "transformer_layer_config": layer_config(drafter),
    }


def specforge_config(drafter: Eagle3Drafter) -> dict[str, Any]:
    """`config.json` of SpecForge's form, whose layer ids count outputs."""
    eagle = {"eagle_aux_hidden_state_layer_ids": outputs_of(drafter), "use_aux_hidden_state": True}
    vocabulary = {"draft_vocab_size": len(drafter.hot_ids), "eagle_config": eagle}
    each = {"fc_norm": True} if drafter.config.fuse_norm == "each" else {}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(drafter), **vocabulary, **each}


def outputs_of(drafter: Eagle3Drafter) -> list[int]:
    """The layers whose outputs a drafter reads. Raises ValueError where it reads the embeddings."""
    if 0 in drafter.feature_layers:
        raise ValueError(f"SpecForge's form counts outputs of layers, and the drafter reads {drafter.feature_layers}")
    return [layer - 1 for layer in drafter.feature_layers]


def trtllm_yaml(output: Path, verifier: str, depth: int, outputs: list[int]) -> str:
    """What `trtllm-serve` is given, with its command; `outputs` are the layers whose outputs are read.

    TensorRT-LLM of 2026 says `Eagle3` and `speculative_model`, and takes the names of 2025 too, which are written.
    """
    return (
        f"# trtllm-serve {verifier} --backend pytorch --extra_llm_api_options {output.name}/speculative_config.yaml\n"
        "# Eagle is EAGLE-3 with this backend. Versions of 2026 say Eagle3 and speculative_model, and take both.\n"
        "speculative_config:\n"
        "  decoding_type: Eagle\n"
        f"  max_draft_len: {depth}\n"
        f"  speculative_model_dir: {output.name}\n"
        f"  eagle3_layers_to_capture: {outputs}\n"
    )
