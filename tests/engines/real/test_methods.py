"""A method of every drafter that ships, on the real target: speculation changes nothing.

Slow, as five drafters are built. It would catch a drafter whose drafts change a text in fp32, or are never right. All
pairs of drafter and construction, on many prompts: `python -m benchmarks.verify.lossless`.
"""

import pytest

from redraft.bundle.config import LimitsInfo
from redraft.compiler.bundle import build, check
from redraft.compiler.methods import read_methods
from redraft.llm import LLM
from redraft.model_defs.target.model import Target
from tests.conftest import ROOT
from tests.engines.real.methods import SETTINGS, assert_nothing_changes
from tests.engines.tiny import bundle_config

pytestmark = pytest.mark.slow

METHODS = [
    "recurrent_gumbel_top_k",
    "hidden_state_resampled",
    "eagle_stochastic_beam",
    "medusa_beam",
    "draft_lm_chain",
    "ngram",
]
"""Of benchmarks/methods/lossless.toml."""


@pytest.fixture(scope="module")
def llm(smollm2, tmp_path_factory) -> LLM:
    target, every = Target.from_folder(smollm2), read_methods(ROOT / "benchmarks" / "methods" / "lossless.toml")
    chosen = {name: every[name] for name in METHODS}
    limits = LimitsInfo(slots=4, max_len=512, max_tree=32, prefill_chunk=128)
    config = bundle_config(target, {name: settings.config() for name, settings in chosen.items()}, limits, "fp32")
    check(config, target)
    output = tmp_path_factory.mktemp("methods") / "bundle"
    build(config, target, smollm2, chosen, output, features=True)
    return LLM(output)


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_every_method_gives_the_tokens_of_auto_regressive_decoding(llm, smollm2, sampling):
    gained = assert_nothing_changes(llm, smollm2, sampling, prompts=2, tokens=16, at_once=(2,))
    assert min(gained.values()) > 1
