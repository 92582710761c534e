"""The make targets that a user with an own model walks, on a tiny random model: fetched, served without a drafter,
load-tested, stopped, and given a drafter.

Slow, as it builds, tunes and serves. It would catch a target that no longer hands the next one what it needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest

from redraft.bundle.budget import BudgetFile
from redraft.bundle.config import BundleConfig
from redraft.model_defs.target.model import Target
from tests.conftest import ROOT
from tests.engines.tiny import random_model, tiny_target, write_model
from tests.serving.client_side import free_ports
from tests.toy_engine import toy_tokenizer

pytestmark = pytest.mark.slow

NAME = "nobodys-model"


def odd_target() -> Target:
    """A Llama of odd sizes with a short context."""
    shape = {"hidden_size": 60, "intermediate_size": 88, "num_layers": 1, "max_position": 333}
    return random_model(dataclasses.replace(tiny_target().config, **shape, tie_embeddings=True, qkv_bias=False))


@pytest.fixture
def make(tmp_path):
    """Runs make with all that it writes under a folder of its own, on free ports."""
    source = tmp_path / "source" / NAME
    write_model(odd_target(), source)
    toy_tokenizer().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    (source / "chat_template.jinja").write_text("Q{{ messages[0]['content'] }}A")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n} times {7 * n}"}) + "\n" for n in range(70)))
    ports = free_ports(4)
    settings = {
        "SOURCE": source,
        "MODEL": tmp_path / "models" / NAME,
        "ENGINES": tmp_path / "engines",
        "TEACHER": tmp_path / "teacher",
        "OWN_DRAFTER": tmp_path / "drafter",
        "RESULTS": tmp_path / "results",
        "RUN_DIR": tmp_path / "run",
        "DATA": prompts,
        "PROMPTS": prompts,
        "PRECISION": "fp32",
        "TUNE_MINUTES": 0,
        "HOURS": 0.004,
        "RATES": "inf",
        "LOADTEST": "--num-prompts 20 --runs 1",
    } | dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "OPENAI_PORT"), ports, strict=True))

    def run(*targets: str, status: int = 0) -> str:
        command = ["make", *targets, *(f"{name}={value}" for name, value in settings.items())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=800)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield run
    run("stop")


def test_a_users_model_is_served_tested_and_given_a_drafter(make, tmp_path):
    ngrams, trained = (tmp_path / "engines" / f"{NAME}-{kind}-fp32" for kind in ("ngrams", "redrafter"))
    make("serve")
    (method,) = BundleConfig.read(ngrams).methods.values()
    assert (method.drafter, method.construction, method.ngram) == (None, "ngram_trie", True)
    assert BudgetFile.load(ngrams).methods.keys() == {"ngram_trie"}
    make("loadtest")
    assert "request_rate" in (next((tmp_path / "results").glob("*.json"))).read_text()
    assert "stopped" in make("stop")
    assert "make serve" in make("loadtest", status=2)
    said = make("drafter")
    assert "tokens of teacher data" in said
    assert "n-grams only" in said
    (method,) = BundleConfig.read(trained).methods.values()
    assert method.drafter == "recurrent"
    gains = json.loads((tmp_path / "drafter" / "gains.json").read_text())
    assert gains["speed"].keys() == {"n-grams", "drafter"}
    assert f"--bundle {trained}" in make("serve", "--dry-run")
