"""The commands that a user with an own model walks, on a tiny random model, in an empty REDRAFT_HOME: fetched, served
without a drafter, stopped, and given a drafter.

Slow, as it builds, tunes and serves. It would catch a command that no longer hands the next one what it needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from redraft.bundle.config import BundleConfig
from redraft.model_defs.target.model import Target
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
def redraft(tmp_path):
    """Runs a command in an empty home, on free ports."""
    source = tmp_path / "source" / NAME
    write_model(odd_target(), source)
    toy_tokenizer().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    (source / "chat_template.jinja").write_text("Q{{ messages[0]['content'] }}A")
    rows = (json.dumps({"prompt": f"say {n} times {7 * n}"}) + "\n" for n in range(70))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "REDRAFT_HOME": str(tmp_path / "home")}

    def run(*words: object, status: int = 0) -> str:
        command = [sys.executable, "-m", "redraft.cli", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=800)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield run
    run("stop")


def test_a_users_model_is_served_and_given_a_drafter(redraft, tmp_path):
    names = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
    ports = [word for pair in zip(names, free_ports(4), strict=True) for word in pair]
    plain = ("--precision", "fp32", "--tune-minutes", 0)
    said = redraft("serve", tmp_path / "source" / NAME, *plain, *ports)
    ngrams = tmp_path / "home" / "engines" / f"{NAME}-ngrams-fp32"
    assert f"redraft build --model {tmp_path / 'home' / 'models' / NAME}" in said.replace("\n", "")
    (method,) = BundleConfig.read(ngrams).methods.values()
    assert (method.drafter, method.construction, method.ngram) == (None, "ngram_trie", True)
    assert "stopped" in redraft("stop")
    asked = ("drafter", "--model", NAME, "--prompts", "prompts.jsonl", "--hours", 0.004, *plain)
    said = redraft(*asked)
    assert "tokens of teacher data" in said
    assert "n-grams only" in said
    (method,) = BundleConfig.read(tmp_path / "home" / "engines" / f"{NAME}-redrafter-fp32").methods.values()
    assert method.drafter == "recurrent"
    drafter = tmp_path / "home" / "drafters" / NAME
    gains = json.loads((drafter / "gains.json").read_text())
    assert gains["speed"].keys() == {"n-grams", "drafter"}
    assert "redraft train --model" in (drafter / "drafter.log").read_text()
    assert "going on with" in redraft(*asked), "what was made is kept"
