"""The scripts beside a TensorRT-LLM checkpoint, against stand-ins for what they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler.trtllm.tiny_trtllm import export, make_apple, make_target


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    model = make_target(tmp_path / "model")
    return export(model, make_apple(tmp_path / "drafter"), tmp_path / "checkpoint", "--tp", 3)


STUB = """#!/bin/sh
printf '%s\\n' "$@" > {log}
"""

FILL = """
import string, sys
_, path, pairs = sys.argv[1:]
text = open(path).read()
values = dict(pair.split(":") for pair in pairs.split(","))
assert values.keys() <= set(string.Template(text).get_identifiers()), values
open(path, "w").write(string.Template(text).safe_substitute(values))
"""
TEMPLATES = {
    "ensemble": "triton_max_batch_size logits_datatype",
    "preprocessing": "triton_max_batch_size tokenizer_dir preprocessing_instance_count max_queue_delay_microseconds "
    "max_queue_size",
    "postprocessing": "triton_max_batch_size tokenizer_dir postprocessing_instance_count",
    "tensorrt_llm": "triton_backend triton_max_batch_size decoupled_mode max_queue_delay_microseconds max_queue_size "
    "engine_dir batching_strategy encoder_input_features_data_type logits_datatype prompt_embedding_table_data_type",
    "tensorrt_llm_bls": "triton_max_batch_size decoupled_mode bls_instance_count logits_datatype",
}
"""The mandatory parameters of each model's template, as TensorRT-LLM documents them."""
OPTIONAL = "max_beam_width decoding_mode exclude_input_in_output batch_scheduler_policy " \
    "kv_cache_free_gpu_mem_fraction enable_kv_cache_reuse"  # fmt: skip


def test_build_script_runs_trtllm_build(checkpoint, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "trtllm-build").write_text(STUB.format(log=tmp_path / "log"))
    (tmp_path / "bin" / "trtllm-build").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run([checkpoint / "build_engines.sh"], env={"PATH": path}, cwd="/", check=True)
    words = (tmp_path / "log").read_text().split()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--checkpoint_dir": str(checkpoint), "--output_dir": str(checkpoint / "engines"),
        "--speculative_decoding_mode": "explicit_draft_tokens", "--max_beam_width": "1", "--gemm_plugin": "bfloat16",
        "--kv_cache_type": "paged", "--remove_input_padding": "enable", "--max_batch_size": "16",
        "--max_input_len": "63", "--max_seq_len": "64", "--max_num_tokens": "8192", "--workers": "3",
    }  # fmt: skip


def test_an_engine_takes_a_step_of_all_sequences_at_once(tmp_path):
    flags = ("--max-batch-size", 300, "--beam-width", 10, "--beam-length", 4)
    model, drafter = make_target(tmp_path / "model"), make_apple(tmp_path / "drafter")
    script = (export(model, drafter, tmp_path / "out", *flags) / "build_engines.sh").read_text()
    assert f"--max_num_tokens {300 * 41}" in script


def test_triton_script_fills_in_every_mandatory_parameter(checkpoint, tmp_path):
    sources = tmp_path / "TensorRT-LLM" / "triton_backend"
    (sources / "tools").mkdir(parents=True)
    (sources / "tools" / "fill_template.py").write_text(FILL)
    for name, parameters in TEMPLATES.items():
        folder = sources / "all_models" / "inflight_batcher_llm" / name
        folder.mkdir(parents=True)
        known = f"{parameters} {OPTIONAL if name == 'tensorrt_llm' else ''}".split()
        (folder / "config.pbtxt").write_text("".join(f"{p} = ${{{p}}}\n" for p in known))
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TRTLLM": str(sources.parent)}
    done = subprocess.run(
        [checkpoint / "triton_repository.sh", tmp_path / "repository"],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"--world_size 3 --model_repo {tmp_path / 'repository'}" in done.stdout
    filled = {path.parent.name: path.read_text() for path in (tmp_path / "repository").glob("*/config.pbtxt")}
    assert filled.keys() == TEMPLATES.keys() - {"tensorrt_llm_bls"}
    assert not [text for text in filled.values() if "$" in text]
    assert "batching_strategy = inflight_fused_batching\n" in filled["tensorrt_llm"]
    assert "decoding_mode = redrafter\n" in filled["tensorrt_llm"]
    assert f"engine_dir = {checkpoint / 'engines'}\n" in filled["tensorrt_llm"]
    assert f"tokenizer_dir = {checkpoint / 'target'}\n" in filled["preprocessing"]
    listed = json.loads((checkpoint / "triton_parameters.json").read_text())
    assert {name: values.keys() for name, values in listed.items()} == {
        name: dict(line.split(" = ") for line in text.splitlines()).keys() for name, text in filled.items()
    }
