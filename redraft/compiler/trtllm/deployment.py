"""What goes beside a TensorRT-LLM checkpoint: how to build its engines and how to serve them under Triton.

The parameters are those of TensorRT-LLM 1.2's `triton_backend/all_models/inflight_batcher_llm`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

BUILD_SCRIPT, TRITON_SCRIPT, PARAMETERS = "build_engines.sh", "triton_repository.sh", "triton_parameters.json"
TARGET = "target"
"""Folder of a checkpoint with the target's files besides weights: the tokenizer's folder."""

MIN_NUM_TOKENS = 8192
"""TensorRT-LLM's own default of --max_num_tokens."""


@dataclass(frozen=True)
class Limits:
    """What an engine is built for; lengths in tokens, `max_seq_len` is prompt and answer."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int


def build_command(dtype: str, tp_size: int, draft_tokens: int, limits: Limits) -> list[str]:
    """Flags of trtllm-build besides the folders; `draft_tokens` are those of a step, over all beams."""
    flags = {
        "speculative_decoding_mode": "explicit_draft_tokens",
        "max_beam_width": 1,
        "gemm_plugin": dtype,
        "kv_cache_type": "paged",
        "remove_input_padding": "enable",
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": max(MIN_NUM_TOKENS, limits.max_input_len, limits.max_batch_size * (1 + draft_tokens)),
        "workers": tp_size,
    }
    return [f"--{name} {value}" for name, value in flags.items()]


def triton_parameters(limits: Limits) -> dict[str, dict[str, str]]:
    """The parameters of each model's config.pbtxt that fill_template.py fills in."""
    batch, tokenizer = {"triton_max_batch_size": str(limits.max_batch_size)}, {"tokenizer_dir": "$TOKENIZER_DIR"}
    queue = {"max_queue_delay_microseconds": "0", "max_queue_size": "0"}
    logits = {"logits_datatype": "TYPE_FP32"}
    return {
        "ensemble": batch | logits,
        "preprocessing": batch | tokenizer | queue | {"preprocessing_instance_count": "1"},
        "postprocessing": batch | tokenizer | {"postprocessing_instance_count": "1"},
        "tensorrt_llm": batch
        | queue
        | logits
        | {
            "triton_backend": "tensorrtllm",
            "engine_dir": "$ENGINE_DIR",
            "batching_strategy": "inflight_fused_batching",
            "decoding_mode": "redrafter",
            "max_beam_width": "1",
            "decoupled_mode": "true",
            "exclude_input_in_output": "true",
            "batch_scheduler_policy": "guaranteed_no_evict",
            "kv_cache_free_gpu_mem_fraction": "0.9",
            "enable_kv_cache_reuse": "false",
            "encoder_input_features_data_type": "TYPE_FP16",
            "prompt_embedding_table_data_type": "TYPE_FP16",
        },
    }


HEAD = """\
#!/usr/bin/env bash
# {what}
# Written after TensorRT-LLM's documentation; docs/status.md of redraft says what has run.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
ENGINE_DIR=${{ENGINE_DIR:-$here/engines}}
"""

BUILD = (
    HEAD
    + """
trtllm-build --checkpoint_dir "$here" --output_dir "$ENGINE_DIR" \\
  {flags}
"""
)

TRITON = (
    HEAD
    + """: "${{TRTLLM:?the source folder of the TensorRT-LLM that built the engines}}"
TOKENIZER_DIR=${{TOKENIZER_DIR:-$here/{target}}}
repository=${{1:?usage: TRTLLM=FOLDER $0 REPOSITORY}}
[ ! -e "$repository" ] || {{ echo "$repository is there already" >&2; exit 1; }}

cp -r "$TRTLLM/triton_backend/all_models/inflight_batcher_llm" "$repository"
rm -r "$repository/tensorrt_llm_bls"
fill() {{ python3 "$TRTLLM/triton_backend/tools/fill_template.py" -i "$repository/$1/config.pbtxt" "$2"; }}
{fills}
echo "python3 $TRTLLM/triton_backend/scripts/launch_triton_server.py --world_size {tp_size} --model_repo $repository"
"""
)


def write_deployment(folder: Path, dtype: str, tp_size: int, draft_tokens: int, limits: Limits) -> None:
    """Write both scripts and the parameters into a checkpoint's folder."""
    parameters = triton_parameters(limits)
    fills = [
        f'fill {model} "{",".join(f"{name}:{value}" for name, value in values.items())}"'
        for model, values in parameters.items()
    ]
    gpus = f"{tp_size} GPU{'s' if tp_size > 1 else ''}"
    scripts = {
        BUILD_SCRIPT: BUILD.format(
            what=f"Builds this checkpoint's engines into ENGINE_DIR with TensorRT-LLM 1.0 to 1.2.1, on {gpus}.",
            flags=" \\\n  ".join(build_command(dtype, tp_size, draft_tokens, limits)),
        ),
        TRITON_SCRIPT: TRITON.format(
            what=f"Makes Triton's model repository for the engines in ENGINE_DIR; prints how to start it on {gpus}.",
            target=TARGET,
            fills="\n".join(fills),
            tp_size=tp_size,
        ),
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / PARAMETERS).write_text(json.dumps(parameters, indent=2) + "\n")
