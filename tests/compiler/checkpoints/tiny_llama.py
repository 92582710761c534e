"""A tiny random Llama as a Hugging Face folder and as a GGUF file, and what a fetched model must be."""

from __future__ import annotations

import json

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from redraft.compiler.checkpoints import fetch as fetching
from redraft.compiler.checkpoints.fetch import Request
from redraft.model_defs.files import INDEX, SINGLE
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from tests.model_defs.weights.folders import HALVES

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


TOKENS = ["<s>", "</s>", *ALPHABET, "he", "ll"]


MERGES = [("h", "e"), ("l", "l")]


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_gguf(path, reference, architecture="llama", cut="gpt-2"):
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(LLAMA3["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    if cut:
        writer.add_tokenizer_pre(cut)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in reference.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    plain = RopeConfig(theta=LLAMA3["rope_theta"]).inverse_frequencies(8)
    scaled = RopeConfig(theta=LLAMA3["rope_theta"], type="llama3", factor=8.0).inverse_frequencies(8)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(file):
    """A GGUF file's tensors by its own names, as the package dequantizes them."""
    tensors = gguf.GGUFReader(file).tensors
    return {one.name: torch.from_numpy(gguf.dequantize(one.data.copy(), one.tensor_type)) for one in tensors}


def rewrite(file, into, type_of):
    """A GGUF file with its tensors in other types: `type_of(name, weight)`, None for float32."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(into, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for name, weight in stored(file).items():
        if (kind := type_of(name, weight)) is None:
            writer.add_tensor(name, weight.numpy())
        else:
            writer.add_tensor(name, quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(weight, kind):
    """A matrix in a GGUF type; random blocks with scales around 1 for those that the package only reads."""
    try:
        return gguf.quantize(weight, kind)
    except NotImplementedError:
        return random_blocks(weight.shape, kind)


def random_blocks(shape, kind):
    """Random rows of a GGUF type, uint8 [rows, bytes], whose float16 numbers are small."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for at in HALVES[kind.name]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(2e-3).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def fetch(source, tmp_path, *, name=None, template=None, replace=False):
    request = Request(str(source), tmp_path / "models", tmp_path / "cache", name, None, template, replace)
    return fetching.fetch(request, print)


@torch.no_grad()
def assert_same_model(folder, reference):
    input_ids = torch.randint(0, len(TOKENS), (1, 30))
    target = Target.from_folder(folder)
    logits = target.lm_head(target(input_ids, causal_attend(target.config, 30)).hidden)
    torch.testing.assert_close(logits, reference(input_ids).logits, atol=1e-4, rtol=0)


def assert_complete(folder, title, weights=SINGLE):
    config = json.loads((folder / "config.json").read_text())
    assert config["_name_or_path"] == title
    assert [file.name for pattern in ("*.safetensors", "*.gguf") for file in folder.rglob(pattern)] == [weights]
    if weights == SINGLE:
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config
        assert all(weight.dtype == torch.bfloat16 for weight in load_file(folder / SINGLE).values())
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").tokens == ["he", "ll", "o"]
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def pickle(folder):
    """Turn a folder's weights into a PyTorch file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def index(folder, *files):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(files))}))
