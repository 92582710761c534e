"""What changes nothing in a drafter's folder. Any other field, tensor or file that no reader takes is refused: somebody
may have written it because it changes what the drafter computes."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from redraft.model_defs.drafters.hub.fields import Fields
from redraft.model_defs.drafters.hub.folder import MEDUSA_FILE, HubFolder
from redraft.model_defs.files import INDEX, PICKLED, PICKLED_INDEX

VALUES: dict[str, Any] = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "logit_scale": 1,
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1,
    "use_gemma_norm": False,
    "is_neox_style": True,
    "rope_interleaved": False,
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "return_hidden_post_norm": False,
    "eh_proj_before_attn": False,
    "use_mtp_layernorm": False,
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "is_causal": True,
    "original_lm_head": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "attention_mode": "gqa",
    "shift_label": False,
}
"""Fields that change what a drafter computes in some reader, and the values that change nothing, as null does. What
the form's own reader takes is not asked here."""
OF_TRAINING = (
    *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("num_anchors", "max_anchors", "confidence_head_alpha", "embed_requires_grad", "draft_attn_kernel", "ttt_steps"),
    *("num_depths", "loss_type", "loss_decay_gamma", "gradient_checkpointing", "enable_sp_ulysses"),
    *("ce_loss_alpha", "l1_loss_alpha", "lambda_base_start", "lambda_base_decay_ratio", "auf"),
)
OF_TEXTS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("tokenizer_class", "prefix", "chat_template", "image_token_id", "image_token_index", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "mask_token", "generation_config"),
)
OF_TRANSFORMERS = (
    *("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict"),
    *("output_hidden_states", "output_attentions", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads"),
    *("chunk_size_feed_forward", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"),
    *("finetuning_task", "id2label", "label2id", "task_specific_params", "problem_type", "_name_or_path"),
    *("name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("has_no_defaults_at_init", "base_config_key", "is_composition", "attribute_map", "sub_configs"),
    *("pretraining_tp", "is_llama_config", "transformers.js_config"),
)
OF_SERVERS = (
    *("speculators_model_type", "speculators_version", "algorithm", "default_proposal_method", "proposal_methods"),
    *("verifier", "speculative_tokens", "num_lookahead_tokens", "base_model_name_or_path", "target_model_type"),
    *("target_model_name_or_path", "target_architecture", "eagle_decoder_type", "version", "license", "language"),
    *("max_paths", "max_seq_len", "eagle_topk", "num_steps", "topk", "medusa_choices"),
)
"""How servers draft, and for which target: neither changes what a drafter computes"""
SAID_BY_TENSORS = (
    *("draft_vocab_size", "bias", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "quantization_config"),
    *("num_aux_hidden_states", "has_lm_head", "load_embedding_from_target", "load_lm_head_from_target"),
    *("parallel_draft_heads_num_layers", "medusa_num_heads", "medusa_num_layers", "medusa_fc_bias", "num_heads"),
    *("enable_confidence_head", "confidence_head_with_markov", "use_confidence_head", "max_window_layers"),
    *("mrope_section", "mrope_interleaved", "finetuned", "use_sliding_window", "use_mrope", "truncated_vocab_size"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
)
"""What the tensors, or other fields, tell as well: experts and Domino's network have tensors of their own, which are
refused; and the parts of RoPE for images"""
NAMES = frozenset((*OF_TRAINING, *OF_TEXTS, *OF_TRANSFORMERS, *OF_SERVERS, *SAID_BY_TENSORS))

OBJECTS = ("dflash_config", "eagle_config", "transformer_layer_config", "speculators_config")
"""Objects whose fields are looked at one by one, whether or not a reader asks for any"""

ADAPTER = "adapter_*"
"""A LoRA of the target, which ModelOpt writes beside a drafter"""
FILES = (
    *(".*", "*.md", "*.txt", "*.rst", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.html"),
    *("LICENSE*", "NOTICE*", "README*", "USE_POLICY*", "*.py", "*.sh", "*.yaml", "*.yml", "*.csv", "*.log", "*.jsonl"),
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja"),
    *("chat_template*", "generation_config.json", "*processor_config.json", "hf_quant_config.json"),
    *("training_args*", "trainer_state*", "training_state*", "optimizer*", "scheduler*", "rng_state*", "scaler*"),
    *("*_results.json", "*metrics*.json", "config_sentence_transformers.json", "configuration.json"),
    *("train_config.json", "training_config.json", "latest"),
    *(INDEX, PICKLED, PICKLED_INDEX, MEDUSA_FILE),
)
"""Texts, pictures, programs, tokenizers, what training leaves, and the same weights in torch's format"""


def require_all_read(folder: HubFolder, form: str, ignored: set[str]) -> None:
    """Raise ValueError for what no reader took in a folder that was read: a field or a file."""
    for whole, name, value in _unknown_fields(folder.config):
        only = f"; read is {VALUES[name]!r}" if name in VALUES else f", which {form} does not know"
        raise ValueError(
            f"{folder.path}: config.json says {whole} {value!r}{only}. Where the drafter computes the same without it, "
            f"give --read-as ignore={whole}"
        )
    for name in sorted(_unknown_files(folder)):
        if name in ignored:
            continue
        if fnmatch(name, ADAPTER):
            raise ValueError(
                f"{folder.path} has {name}: the drafter was trained for its target with this LoRA. Fetch the target "
                f"with --adapter {folder.path}, and then give --read-as ignore={name} here"
            )
        raise ValueError(
            f"{folder.path} has a file {name}, which {form} does not know. Where the drafter computes the same without "
            f"it, give --read-as ignore={name}"
        )


def _unknown_fields(fields: Fields) -> Iterator[tuple[str, str, Any]]:
    for whole, name, value in fields.unread():
        if isinstance(value, Fields) and name in OBJECTS:
            yield from _unknown_fields(value)
        elif name not in NAMES and not (name in VALUES and VALUES[name] == value):
            yield whole, name, value


def _unknown_files(folder: HubFolder) -> Iterator[str]:
    read = {"config.json", *folder.files_read}
    for file in folder.path.iterdir():
        if file.is_file() and file.name not in read and not any(fnmatch(file.name, pattern) for pattern in FILES):
            yield file.name
