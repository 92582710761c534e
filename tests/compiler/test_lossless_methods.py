"""What benchmarks/methods/lossless.toml promises: every shipped drafter with every construction, as the builder takes
them.

Unpacked beams have a check of their own, in benchmarks/speed/beam_packing_throughput.py.
"""

from __future__ import annotations

from itertools import product

import pytest

from compiler.bundle import check
from compiler.methods import drafting_loop, load_draft_source, read_methods
from model_defs.drafters.registry import DRAFTERS
from model_defs.target.fingerprint import target_fingerprint
from model_defs.target.model import Target
from redraft.bundle.config import LimitsInfo
from redraft.decoding.construction import CONSTRUCTIONS, UNPACKED
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.retrieval import NGRAM_TRIE
from redraft.decoding.verification import VERIFIERS
from tests.conftest import ROOT
from tests.engines.tiny import bundle_config

FILE = ROOT / "benchmarks" / "methods" / "lossless.toml"
SHIPPED = DRAFTERS.keys() - {"eagle3", "parallel_eagle3", "block"}
"""Kinds of which a drafter ships."""


@pytest.fixture(scope="module")
def methods(monkeypatch_module):
    """Its methods; drafters' folders are relative to the repository's root."""
    monkeypatch_module.chdir(ROOT)
    return {name: settings.info() for name, settings in read_methods(FILE).items()}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_drafter_and_every_construction_is_walked(methods):
    pairs = {(method.drafter, method.construction) for method in methods.values() if not method.ngram}
    constructions = CONSTRUCTIONS.keys() - {UNPACKED} | RANDOM_CONSTRUCTIONS.keys()
    assert pairs >= set(product(SHIPPED, constructions)) | {(None, NGRAM_TRIE)}
    grown = {method.drafter for method in methods.values() if method.ngram and method.construction == "best_first"}
    assert grown == SHIPPED
    assert (None, None) in {(method.drafter, method.construction) for method in methods.values() if method.ngram}
    assert {method.verification for method in methods.values()} == {"greedy", "sampled_walk"}
    assert all(VERIFIERS[method.verification].merges for method in methods.values())


def test_names_say_what_the_methods_are(methods):
    for name, method in methods.items():
        assert name.startswith(method.drafter or "ngram")
        if method.drafter and not method.ngram:
            assert name == f"{method.drafter}_{method.construction}"


@pytest.mark.slow
def test_the_builder_takes_all_of_them(methods, smollm2):
    """It would catch a method that `make verify` refuses after minutes."""
    target, settings = Target.from_folder(smollm2), read_methods(FILE)
    config = bundle_config(target, methods, LimitsInfo(slots=16, max_len=2048, max_tree=32, prefill_chunk=128))
    check(config, target)
    fingerprint = target_fingerprint(target)
    folders = {one.drafter for one in settings.values() if one.drafter}
    drafters = {folder: load_draft_source(folder, None, None, target, smollm2, fingerprint) for folder in folders}
    for name, one in settings.items():
        if one.drafter:
            method, _ = drafting_loop(drafters[one.drafter], methods[name], config, one.token_info)
            assert method.resample_above is None or method.chain_levels > 0
