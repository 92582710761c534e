"""Every shipped drafter with every construction, on the real target: speculation changes nothing.

Slow, as all of them are built. It would catch a pair of drafter and construction that changes a text in fp32.
"""

import pytest

from tests.engines.real.methods import SETTINGS, assert_nothing_changes, llm_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(smollm2, tmp_path_factory):
    return llm_of("lossless.toml", "fp32", smollm2, tmp_path_factory.mktemp("methods") / "bundle")


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_every_method_gives_the_tokens_of_auto_regressive_decoding(llm, smollm2, sampling):
    gained = assert_nothing_changes(llm, smollm2, sampling, prompts=2, tokens=16, at_once=(2,))
    assert min(gained.values()) > 1
