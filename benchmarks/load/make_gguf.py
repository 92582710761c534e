"""Writes a model folder's target as a BF16 GGUF file, for llama.cpp as a contender. Llama and SmolLM2 shapes.

python -m benchmarks.load.make_gguf artifacts/models/SmolLM2-135M-Instruct artifacts/models/target-bf16.gguf
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from redraft.model_defs.files import weight_files
from redraft.model_defs.target.config import TargetConfig

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face Llama tensor. Raises ValueError for any other tensor."""
    stem = name.removesuffix(".weight")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight"
    _, _, layer, *rest = stem.split(".")
    if ".".join(rest) not in LAYER_NAMES:
        raise ValueError(f"no place in a Llama GGUF file for the tensor {name}")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(rest)]}.weight"


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from rotate-half order to llama.cpp's adjacent pairs."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write(source: Path, target: Path) -> None:
    """Convert the folder `source` (safetensors, tokenizer.json, config.json) to the file `target`."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_name(source.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    add_tokenizer(writer, source / "tokenizer.json", config)
    for path in weight_files(source):
        for name, tensor in load_file(path).items():
            if ".q_proj." in name or ".k_proj." in name:
                tensor = interleave(tensor, heads if ".q_proj." in name else kv_heads)
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            else:
                data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, path: Path, config: dict[str, Any]) -> None:
    """The byte-level BPE vocabulary: needed to load the file, although prompts arrive as token ids."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokens = [f"[unused{i}]" for i in range(config["vocab_size"])]
    types = np.full(len(tokens), int(gguf.TokenType.UNUSED), np.int32)
    for token, place in tokenizer["model"]["vocab"].items():
        tokens[place], types[place] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types.tolist())
    writer.add_token_merges(merges)
    writer.add_eos_token_id(TargetConfig.load(path.parent).eos_token_ids[0])
    writer.add_add_bos_token(False)


def main() -> int:
    """Convert a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path, help="model folder")
    parser.add_argument("target", type=Path, help="GGUF file to write")
    args = parser.parse_args()
    args.target.parent.mkdir(parents=True, exist_ok=True)
    write(args.source, args.target)
    print(f"{args.target}: {args.target.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
