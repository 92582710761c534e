"""Random drafters in the forms of the hub, and what they compute by each form's definition: plain code over the tensors
that are written, which shares nothing with the drafters of model_defs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, DRAFT_VOCAB = 111, 24, 53
HEADS, KV_HEADS, HEAD_SIZE, MLP, THETA, EPS = 4, 2, 32, 40, 500.0, 1e-5
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


@dataclass
class Form:
    """A folder's content."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: tuple[int, ...] = ()
    """EAGLE-3: the target's layers whose inputs are read"""
    reads: dict[str, bool] = field(default_factory=dict)
    """EAGLE-3: norm_before_residual and norm_output, as this form means them"""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def random(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.3 if len(shape) > 1 else 1 + 0.3 * torch.randn(*shape)


def layer_tensors(name: str, inputs: int) -> dict[str, Tensor]:
    """A Llama layer's tensors but for the norms before attention, which reads so many numbers."""
    wide, narrow = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    return {
        f"{name}.self_attn.q_proj.weight": random(wide, inputs),
        f"{name}.self_attn.k_proj.weight": random(narrow, inputs),
        f"{name}.self_attn.v_proj.weight": random(narrow, inputs),
        f"{name}.self_attn.o_proj.weight": random(HIDDEN, wide),
        f"{name}.post_attention_layernorm.weight": random(HIDDEN),
        f"{name}.mlp.gate_proj.weight": random(MLP, HIDDEN),
        f"{name}.mlp.up_proj.weight": random(MLP, HIDDEN),
        f"{name}.mlp.down_proj.weight": random(HIDDEN, MLP),
    }


def eagle(**changes: Any) -> Form:
    tensors = layer_tensors("layers.0", HIDDEN) | {"fc.weight": random(HIDDEN, 2 * HIDDEN), "fc.bias": random(HIDDEN)}
    return Form({**LAYER, "architectures": ["LlamaForCausalLM"], "bias": True, **changes}, tensors)


def medusa(heads: int = 3, blocks: int = 2) -> Form:
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors |= {f"{i}.{j}.linear.weight": random(HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": random(HIDDEN)}
        tensors[f"{i}.{blocks}.weight"] = random(VOCAB, HIDDEN)
    return Form({"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "a/b"}, tensors)


def eagle3_tensors(first: str, layers: int = 3, others: int = 0) -> dict[str, Tensor]:
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors = layer_tensors(first, 2 * HIDDEN) | {
        "fc.weight": random(HIDDEN, layers * HIDDEN),
        f"{first}.input_layernorm.weight": random(HIDDEN),
        f"{first}.hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB), ids),
    }
    for i in range(1, 1 + others):
        tensors |= layer_tensors(f"layers.{i}", HIDDEN) | {f"layers.{i}.input_layernorm.weight": random(HIDDEN)}
    return tensors


def specforge(**changes: Any) -> Form:
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, **changes}
    return Form(config, eagle3_tensors("midlayer"), (2, 3, 4))


def specforge_3_1(**changes: Any) -> Form:
    form = specforge(fc_norm=True, norm_output=True, **changes)
    form.tensors |= {f"fc_norm.{i}.weight": random(HIDDEN) for i in range(3)}
    form.reads = {"norm_output": True}
    return form


def modelopt(**changes: Any) -> Form:
    own = {"eagle_aux_hidden_state_layer_ids": [0, 4], "use_aux_hidden_state": True, "use_last_layernorm": True}
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own | changes}
    tensors = eagle3_tensors("layers.0", 2)
    return Form(config, tensors, (1, 5))


def modelopt_without_head(**changes: Any) -> Form:
    """Of all tokens, whose head is the target's: give it to the tensors once they are written."""
    form = modelopt()
    form.config |= {"draft_vocab_size": VOCAB, **changes}
    for name in ("lm_head.weight", "d2t", "t2d"):
        del form.tensors[name]
    return form


def speculators(others: int = 0, **changes: Any) -> Form:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "transformer_layer_config": {**LAYER, "num_hidden_layers": 1 + others},
        **changes,
    }
    form = Form(config, eagle3_tensors("layers.0", others=others), (1, 3, 6))
    form.tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN)
    form.reads = {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_output")}
    if config.get("norm_before_fc"):
        form.tensors["input_norm.weight"] = random(3 * HIDDEN)
    return form


def peagle(**changes: Any) -> Form:
    form = speculators(others=1, speculators_model_type="peagle", mask_token_id=MASK, **changes)
    form.tensors["mask_hidden"] = random(1, 1, 3 * HIDDEN)
    return form


MASK, BLOCK = 7, 5
"""Of DFlash and DSpark."""


def block_tensors(layers: int = 2) -> dict[str, Tensor]:
    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
    }
    for i in range(layers):
        tensors |= layer_tensors(f"layers.{i}", HIDDEN) | {f"layers.{i}.input_layernorm.weight": random(HIDDEN)}
    return tensors


def draft_vocabulary() -> dict[str, Tensor]:
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return {
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB), ids),
    }


def dflash(**changes: Any) -> Form:
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 3, 6]}
    config = {**LAYER, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": BLOCK}
    return with_head_norms(Form({**config, "dflash_config": own, **changes}, block_tensors(), (1, 4, 7)))


def dspark(**changes: Any) -> Form:
    """DeepSeek's, of all tokens, with an embedding and a head."""
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 3, 6], "num_hidden_layers": 2, "block_size": BLOCK}
    config = {**LAYER, "architectures": ["Qwen3DSparkModel"], **own, "markov_rank": 6, "markov_head_type": "vanilla"}
    form = with_head_norms(Form({**config, **changes}, block_tensors(), (1, 4, 7)))
    form.tensors |= {
        "markov_head.markov_w1.weight": random(VOCAB, 6),
        "markov_head.markov_w2.weight": random(VOCAB, 6),
        "confidence_head.proj.weight": random(1, HIDDEN + 6),
        "confidence_head.proj.bias": random(1),
        "lm_head.weight": random(VOCAB, HIDDEN),
        "embed_tokens.weight": random(VOCAB, HIDDEN),
    }
    return form


def modelopt_dspark() -> Form:
    """ModelOpt's, with other names of tensors, and without a head."""
    form = dspark(architectures=["DFlashDraftModel"])
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    own = {name: form.config.pop(name) for name in names} | {"projector_type": "dspark", "shift_label": True}
    form.config["dflash_config"] = own | {"use_confidence_head": True, "causal": False}
    renamed = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
    for theirs, ours in renamed.items():
        form.tensors = {name.replace(theirs, ours): tensor for name, tensor in form.tensors.items()}
    del form.tensors["lm_head.weight"], form.tensors["embed_tokens.weight"]
    return form


def norm_before_fc(form: Form, layers: int) -> Form:
    """The same with a norm of all layers that are read, which its configuration says already."""
    form.tensors["input_norm.weight"] = random(layers * HIDDEN)
    return form


def feeding_back(form: Form) -> Form:
    """The same, of which states are fed back after the norm, as its configuration says already."""
    form.reads = {**form.reads, "norm_output": True}
    return form


def reading(form: Form, *layers: int) -> Form:
    """The same for other layers, which its configuration names already."""
    form.layers = layers
    return form


def block_speculators(kind: str, **changes: Any) -> Form:
    config = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": DRAFT_VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
        **changes,
    }
    form = with_head_norms(Form(config, block_tensors() | draft_vocabulary(), (1, 4, 7)))
    if kind == "dspark":
        form.tensors["markov_head.markov_w1.weight"] = random(VOCAB, 6)
        form.tensors["markov_head.markov_w2.weight"] = random(DRAFT_VOCAB, 6)
    return form


def with_head_norms(form: Form) -> Form:
    """The same with the layers of Qwen3."""
    form.config.get("transformer_layer_config", form.config)["model_type"] = "qwen3"
    for name in [name for name in form.tensors if name.endswith("self_attn.q_proj.weight")]:
        for kind in "qk":
            form.tensors[name.replace("q_proj", f"{kind}_norm")] = random(HEAD_SIZE)
    return form


def within(form: Form, **own: Any) -> Form:
    """With more fields in `dflash_config`."""
    form.config["dflash_config"] |= own
    return form


def windowed(form: Form, window: int) -> Form:
    """The same with layers that attend to a sliding window, as speculators writes them."""
    layer = form.config["transformer_layer_config"]
    kinds = ["sliding_attention"] * layer["num_hidden_layers"]
    layer |= {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
    return form


def is_causal(form: Form) -> bool:
    """Whether a row of a block sees no later one, as sliding layers usually are."""
    own = form.config.get("dflash_config", {})
    if (said := form.config.get("is_causal", own.get("causal"))) is not None:
        return said
    windows = "sliding_window" in form.config.get("transformer_layer_config", {})
    return windows and not form.config.get("sliding_window_non_causal")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turn(x: Tensor, first: int = 0) -> Tensor:
    """x [rows, heads, HEAD_SIZE] turned by RoPE: row i stands at position first + i."""
    half = HEAD_SIZE // 2
    angles = torch.arange(first, first + len(x))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def attention(t: dict[str, Tensor], name: str, x: Tensor, window: int = 99) -> Tensor:
    """Causal attention of rows x [rows, inputs], after its output projection; a row sees `window` rows, itself too."""
    q, k, v = (F.linear(x, t[f"{name}.self_attn.{p}_proj.weight"]).unflatten(-1, (-1, HEAD_SIZE)) for p in "qkv")
    if f"{name}.self_attn.q_norm.weight" in t:
        q, k = (norm(x, t[f"{name}.self_attn.{p}_norm.weight"]) for x, p in ((q, "q"), (k, "k")))
    q, k = turn(q), turn(k)
    out = torch.zeros(len(x), HEADS, HEAD_SIZE)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for row in range(len(x)):
            seen = slice(max(0, row + 1 - window), row + 1)
            scores = k[seen, group] @ q[row, head] / HEAD_SIZE**0.5
            out[row, head] = scores.softmax(0) @ v[seen, group]
    return F.linear(out.flatten(1), t[f"{name}.self_attn.o_proj.weight"])


def mlp(t: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    x = norm(x, t[f"{name}.post_attention_layernorm.weight"])
    gate, up = (F.linear(x, t[f"{name}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
    return F.linear(F.silu(gate) * up, t[f"{name}.mlp.down_proj.weight"])


def eagle_logits(form: Form, embedding: Tensor, head: Tensor, hidden: Tensor, text: list[int], path: list[int]):
    """Logits after the root (the last of `text`, whose tokens follow the hidden states [n, H]) and each path token."""
    t, states, tokens, found = form.tensors, list(hidden), list(text), []
    for token in [*path, None]:
        pairs = torch.cat([embedding[tokens], torch.stack(states)], dim=-1)
        x = F.linear(pairs, t["fc.weight"], t.get("fc.bias"))
        x = x + attention(t, "layers.0", x)
        x = x + mlp(t, "layers.0", x)
        found.append(head @ x[-1])
        states.append(x[-1])
        tokens.append(token)
    return torch.stack(found)


def medusa_logits(form: Form, hidden: Tensor) -> Tensor:
    """Logits [heads, V] from the hidden state [H] of the token before the root."""
    t, found = form.tensors, []
    blocks = form.config["medusa_num_layers"]
    for i in range(form.config["medusa_num_heads"]):
        x = hidden
        for j in range(blocks):
            x = x + F.silu(F.linear(x, t[f"{i}.{j}.linear.weight"], t[f"{i}.{j}.linear.bias"]))
        found.append(t[f"{i}.{blocks}.weight"] @ x)
    return torch.stack(found)


def eagle3_fused(form: Form, layers: list[Tensor]) -> Tensor:
    """The first states [n, H], from what enters each layer that is read: [n, H] each."""
    t = form.tensors
    if "fc_norm.0.weight" in t:
        layers = [norm(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(layers)]
    fused = torch.cat(layers, dim=-1)
    if "input_norm.weight" in t:
        fused = norm(fused, t["input_norm.weight"])
    return F.linear(fused, t["fc.weight"])


def eagle3_states(form: Form, embedding: Tensor, state: Tensor, tokens: list[int]) -> Tensor:
    """What the layers give [n, H] for states [n, H] and the tokens that follow them, before the last norm."""
    t, window = form.tensors, form.config.get("transformer_layer_config", {}).get("sliding_window", 99)
    first = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
    normed = norm(state, t[f"{first}.hidden_norm.weight"])
    embedded = norm(t.get("embed_tokens.weight", embedding)[tokens], t[f"{first}.input_layernorm.weight"])
    residual = normed if form.reads.get("norm_before_residual") else state
    x = residual + attention(t, first, torch.cat([embedded, normed], dim=-1), window)
    x = x + mlp(t, first, x)
    for i in range(1, sum(name.endswith("self_attn.q_proj.weight") for name in t)):
        x = x + attention(t, f"layers.{i}", norm(x, t[f"layers.{i}.input_layernorm.weight"]), window)
        x = x + mlp(t, f"layers.{i}", x)
    return x


def parallel_logits(form: Form, embedding: Tensor, layers: list[Tensor], text: list[int], levels: int) -> Tensor:
    """Logits [levels, DRAFT_VOCAB] of P-EAGLE: after the text's last pair come masks, with a state of their own."""
    mask = form.tensors["mask_hidden"][0, 0].split(HIDDEN)
    state = eagle3_fused(form, [torch.cat([x, m.expand(levels - 1, -1)]) for x, m in zip(layers, mask, strict=True)])
    x = eagle3_states(form, embedding, state, [*text, *[MASK] * (levels - 1)])
    return norm(x[-levels:], form.tensors["norm.weight"]) @ form.tensors["lm_head.weight"].T


def eagle3_logits(form: Form, embedding: Tensor, layers: list[Tensor], text: list[int], path: list[int]) -> Tensor:
    """Logits [1 + path, DRAFT_VOCAB] as for EAGLE-1, from what enters each layer that is read: [n, H] each."""
    t, found, tokens = form.tensors, [], list(text)
    states = list(eagle3_fused(form, layers))
    for token in [*path, None]:
        x = eagle3_states(form, embedding, torch.stack(states), tokens)
        last, normed_last = x[-1], norm(x[-1], t["norm.weight"])
        found.append(t["lm_head.weight"] @ normed_last)
        states.append(normed_last if form.reads.get("norm_output") else last)
        tokens.append(token)
    return torch.stack(found)


def block_logits(
    form: Form, embedding: Tensor, head: Tensor, layers: list[Tensor], root: int, path: list[int], from_root: bool
) -> Tensor:
    """Logits [rows that predict, K] of a block, from what enters each layer that is read [n, H]; with a previous-token
    head, those after the root and each token of `path`, one less than the rows."""
    t, count = form.tensors, len(layers[0])
    embedding, head = t.get("embed_tokens.weight", embedding), t.get("lm_head.weight", head)
    context = norm(F.linear(torch.cat(layers, dim=-1), t["fc.weight"]), t["hidden_norm.weight"])
    x = embedding[[root] + [MASK] * (BLOCK - 1)]
    for name in ("layers.0", "layers.1"):
        own = norm(x, t[f"{name}.input_layernorm.weight"])
        read = torch.cat([context, own])
        q, k, v = (
            F.linear(rows, t[f"{name}.self_attn.{p}_proj.weight"]).unflatten(-1, (-1, HEAD_SIZE))
            for rows, p in ((own, "q"), (read, "k"), (read, "v"))
        )
        q = turn(norm(q, t[f"{name}.self_attn.q_norm.weight"]), count)
        k = turn(norm(k, t[f"{name}.self_attn.k_norm.weight"]))
        out, hidden = torch.zeros(BLOCK, HEADS, HEAD_SIZE), torch.zeros(BLOCK, count + BLOCK)
        if is_causal(form):
            hidden[:, count:] = torch.full((BLOCK, BLOCK), -torch.inf).triu(1)
        for h in range(HEADS):
            group = h // (HEADS // KV_HEADS)
            out[:, h] = (q[:, h] @ k[:, group].T / HEAD_SIZE**0.5 + hidden).softmax(-1) @ v[:, group]
        x = x + F.linear(out.flatten(1), t[f"{name}.self_attn.o_proj.weight"])
        x = x + mlp(t, name, x)
    logits = norm(x, t["norm.weight"])[0 if from_root else 1 :] @ head.T
    for name in ("markov_head.markov_w", "markov_w"):
        if f"{name}1.weight" in t:
            logits = logits + t[f"{name}1.weight"][[root, *path]] @ t[f"{name}2.weight"].T
    return logits
