"""A tiny random Llama, as the sources that it can be fetched from."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.compiler.checkpoints.tiny_llama import LLAMA3, MERGES, TEMPLATE, TOKENS, write_gguf


@pytest.fixture(scope="session")
def reference():
    """A tiny random Llama with Llama 3's RoPE, in fp32 values that bf16 holds exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA3,
        eos_token_id=1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


@pytest.fixture(scope="session")
def checkpoint(reference, tmp_path_factory):
    """The reference as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("source") / "tiny-llama"
    reference.save_pretrained(folder)
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gguf_file(reference, tmp_path_factory):
    """The reference as an fp32 GGUF file, as llama.cpp's converter lays it out."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, reference)
    return path
