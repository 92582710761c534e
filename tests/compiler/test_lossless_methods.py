"""What benchmarks/methods/lossless.toml promises: every shipped drafter with every construction, as the builder takes
them.

Unpacked beams have a check of their own, in studies/speed/beam_packing_throughput.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from redraft.bundle.config import BundleConfig
from redraft.bundle.method import MethodConfig
from redraft.compiler.methods import check_method, drafting_loop, read_methods
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.verification import VERIFIERS, draws_of
from redraft.errors import BundleError
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import DRAFTERS
from tests.conftest import ROOT
from tests.engines.draws import LEVELS
from tests.engines.tiny import DRAFTING, LIMITS, bundle_config, tiny_drafter_of, tiny_target

FILE = ROOT / "benchmarks" / "methods" / "lossless.toml"
SHIPPED = DRAFTERS.keys() - {"eagle3", "parallel_eagle3", "block"}
"""Kinds of which a drafter ships."""


@pytest.fixture(scope="module")
def methods(monkeypatch_module):
    """Its methods; drafters' folders are relative to the repository's root."""
    monkeypatch_module.chdir(ROOT)
    return {name: settings.config() for name, settings in read_methods(FILE).items()}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_drafter_and_every_construction_is_walked(methods):
    pairs = {(method.drafter, method.construction) for method in methods.values() if not method.ngram}
    constructions = CONSTRUCTIONS.keys() | RANDOM_CONSTRUCTIONS.keys()
    assert pairs >= set(product(SHIPPED, constructions))
    grown = {method.drafter for method in methods.values() if method.ngram and method.construction == "best_first"}
    assert grown == SHIPPED
    assert (None, None) in {(method.drafter, method.construction) for method in methods.values() if method.ngram}
    assert {method.verification for method in methods.values()} == {"greedy", "sampled_walk"}
    assert all(VERIFIERS[method.verification].merges for method in methods.values())


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_draft_model_goes_with_every_construction_and_verification(kind):
    """Those that ship and those of the hub: of trees that a verification is lossless on, and again from chains where
    there are any. What else is refused, with reasons: tests/decoding/test_rejection.py."""
    target = tiny_target()
    drafter, config = tiny_drafter_of(target, kind), bundle_config(target, {}, LIMITS)
    for construction, (name, verifier) in product((*CONSTRUCTIONS, *RANDOM_CONSTRUCTIONS), VERIFIERS.items()):
        if draws_of(construction) in verifier.lossless:
            method = {"construction": construction, "verification": name, "levels": LEVELS.get(construction, ())}
            assert takes(drafter, config, method | {"support": 7})
    again: dict[str, Any] = {"construction": "best_first", "resample_above": 0, "resample_budget": 4}
    if drafter.has_raw_logits:
        assert takes(drafter, config, again).chain_levels == DRAFTING.beam_length - 1
    else:
        with pytest.raises(BundleError, match=f"only drafters .* leave a chain behind, this is '{kind}'"):
            takes(drafter, config, again)


def takes(drafter: Drafter, config: BundleConfig, changes: dict[str, Any]) -> MethodConfig:
    """The method, checked, and what its drafter needs."""
    method = DRAFTING.model_copy(update={"drafter": drafter.name, **changes})
    check_method("a", method, config)
    return drafting_loop(drafter, method, config)[0]
