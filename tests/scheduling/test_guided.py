"""Structured output on the toy engine: the text of masked auto-regressive decoding, whatever is drafted."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from redraft.bundle.method import MethodConfig
from redraft.decoding import verification
from redraft.decoding.sampling import Sampler
from redraft.drafting import method
from redraft.engines.cuda.masks import row_masks
from redraft.engines.cuda.sampling import sample
from redraft.engines.cuda.transfer import Results
from redraft.grammar.state import GrammarState
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Scheduler
from tests.grammar.tokens import CODEC, GUIDES, grammar
from tests.mutants import Mutant, planted
from tests.scheduling.test_scheduler import LIMITS, PLANS, SAMPLINGS, run
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import ToyEngine, only

END = frozenset({0})
PROMPT = list(range(1, 30))
WHOLE = {
    "choice": lambda text: text in GUIDES["choice"].choices,
    "regex": re.compile(r"(ab|aab|name){2,9}[12]*").fullmatch,
    "schema": lambda text: set(json.loads(text)) == {"name", "age"},
    "grammar": re.compile(r"na(\(|\)|me|12)*").fullmatch,
    "json": lambda text: isinstance(json.loads(text), dict),
}
RANDOM = {"gumbel_top_k": (3, 2, 1), "stochastic_beam": (4, 4, 4), "independent": (3, 3, 3)}


class ChoosingToyEngine(ToyEngine):
    """It chooses tokens as a GPU does, on the CPU."""

    def execute(self, batch, samplers=None, meanwhile=None):
        logits, hidden = super().execute(batch)
        return sample(torch.from_numpy(logits), batch, samplers, Results(torch.device("cpu")), draws=True), hidden


def make(key, guide: str | None, sampling=None, max_tokens=60, end_ids=END, prompt=PROMPT, **fields) -> RequestState:
    request = GenerateRequest(
        id=str(key), input_ids=prompt, max_tokens=max_tokens, sampling=sampling or {},
        guide=None if guide is None else GUIDES[guide], **fields,
    )  # fmt: skip
    compiled = None if guide is None else grammar(guide)
    return RequestState(key, request, prompt, CODEC, end_ids, grammar=compiled)


def answer(sequence: RequestState, plan: MethodConfig | None = None, engine=ToyEngine, **options) -> tuple:
    """Text, tokens, log-probabilities, reason, statistics."""
    scheduler = Scheduler(engine(slots=3, **options), LIMITS, only(plan))
    return run(scheduler, [sequence])[sequence.key]


DRAFTING = ("best_first", "beam cut", "merged", "ngram", "greedy verifier")
EVERY_PAIR = [
    (plan, sampling, guide)
    for (i, plan), (j, sampling), (k, guide) in product(*map(enumerate, (DRAFTING, SAMPLINGS, GUIDES)))
    if (i + j + 2 * k) % 3 == 0
]
"""Every two of plans, samplings and guides together: a third of all threes."""


@cache
def masked(sampling: str, guide: str) -> tuple:
    """The answer of masked auto-regressive decoding."""
    return answer(make("a", guide, sampling=SAMPLINGS[sampling], return_log_probs=True))


@pytest.mark.parametrize(("plan", "sampling", "guide"), EVERY_PAIR)
def test_speculation_equals_autoregressive(plan, sampling, guide):
    expected = masked(sampling, guide)
    got = answer(make("a", guide, sampling=SAMPLINGS[sampling], return_log_probs=True), PLANS[plan])
    assert got[:4] == expected[:4]
    if expected[3] == "stop":
        assert WHOLE[guide](expected[0])
    assert expected[3] in ("stop", "length")
    if guide in ("schema", "choice"):
        assert expected[3] == "stop"
    if guide == "schema":
        assert got[4].accepted > 8, "what the schema forces is drafted, and mostly kept"


@pytest.mark.parametrize("construction", RANDOM)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_random_trees_that_are_walked(construction, sampling):
    plan = MethodConfig(
        construction=construction, verification="sampled_walk", tree_budget=12, levels=RANDOM[construction], support=12
    )
    engine = DrawingToyEngine(construction, RANDOM[construction], 12, slots=3)
    got = run(Scheduler(engine, LIMITS, only(plan)), [make("a", "schema", SAMPLINGS[sampling])])["a"]
    assert got[:4] == answer(make("a", "schema", SAMPLINGS[sampling]))[:4]
    assert got[4].accepted > 8


@pytest.mark.parametrize(
    ("construction", "verification"), [("gumbel_top_k", "recursive_rejection"), ("independent", "k_seq")]
)
def test_greedy_requests_of_a_rejection_verifier_are_guided(construction, verification):
    """They are verified by a walk. A sampled request beside them keeps its draws."""
    plan = MethodConfig(
        construction=construction, verification=verification, tree_budget=12, levels=RANDOM[construction], support=12
    )
    engine = DrawingToyEngine(construction, RANDOM[construction], 12, slots=3)
    sampled = make("b", None, {"temperature": 1.0, "seed": 1})
    found = run(Scheduler(engine, LIMITS, only(plan)), [make("a", "schema"), sampled])
    assert found["a"][:4] == answer(make("a", "schema"))[:4]
    assert found["a"][4].accepted > 8
    assert found["b"][4].accepted > 0


def test_best_first_trees_grow_by_the_guide_without_ngrams_too(monkeypatch):
    monkeypatch.setattr(method, "guided_trees", None)
    found = answer(make("a", "schema"), PLANS["best_first"])
    assert found[:4] == answer(make("a", "schema"))[:4]
    assert found[4].accepted > 8


@pytest.mark.parametrize("engine", [ToyEngine, ChoosingToyEngine])
def test_mixed_batches_joining_and_leaving(engine):
    """Requests that are chosen on the device, and such as are not, beside each other."""
    rng = np.random.default_rng(5)
    guides, samplings = [*GUIDES, None], list(SAMPLINGS.values())
    sequences, joins, expected = [], [], {}
    for key in range(12):
        options = {
            "guide": guides[key % len(guides)],
            "sampling": samplings[key % len(samplings)],
            "prompt": rng.integers(1, 111, rng.integers(1, 70)).tolist(),
            "max_tokens": int(rng.integers(1, 50)),
        }
        expected[key] = answer(make(key, **options))[:4]
        sequences.append(make(key, **options))
        joins.append(int(rng.integers(0, 25)))
    scheduler = Scheduler(engine(slots=3), LIMITS, only(PLANS["merged"]))
    results = run(scheduler, sequences[:7], joins[:7]) | run(scheduler, sequences[7:])
    assert {key: result[:4] for key, result in results.items()} == expected


@pytest.mark.parametrize("plan", [None, "merged", "best_first"])
def test_what_the_device_chooses_is_masked_once(plan, monkeypatch):
    """The host chooses in no step, not even where the text's end is drafted, and no mask is made twice."""
    expected = answer(make("a", "schema"))
    certain, made, on_host = list[int](), list[tuple[int, ...]](), list[int]()
    choose, advance, mask = Sampler.choose, GrammarState.advance, GrammarState.mask

    def masked(self, path=()):
        new, found = path not in self._masks, mask(self, path)
        if new and found.any():
            made.append((*certain, *path))
        return found

    monkeypatch.setattr(Sampler, "choose", lambda self, logits: on_host.append(self.position) or choose(self, logits))
    monkeypatch.setattr(GrammarState, "advance", lambda self, token: certain.append(token) or advance(self, token))
    monkeypatch.setattr(GrammarState, "mask", masked)
    found = answer(make("a", "schema"), plan and PLANS[plan], ChoosingToyEngine)
    assert found[:4] == expected[:4]
    assert len(made) == len(set(made))
    assert on_host == []


@pytest.mark.parametrize("plan", [None, "merged"])
def test_a_complete_text_ends_without_an_end_token(plan):
    """Nothing else ends it where the request has no end token; a text that may go on, goes on."""
    plan = plan and PLANS[plan]
    text, tokens, _, reason, _ = answer(make("a", "schema", end_ids=frozenset()), plan)
    assert (json.loads(text).keys(), reason) == ({"name", "age"}, "stop")
    assert text == CODEC.decode(tokens)
    _, tokens, _, reason, _ = answer(make("a", "regex", end_ids=frozenset()), plan)
    assert (len(tokens), reason) == (60, "length")


def test_a_text_that_fails_in_its_grammar_is_an_error(monkeypatch):
    """Unless it ends there anyway."""
    monkeypatch.setattr(GrammarState, "failed", property(lambda self: self.ended))
    tokens, _, reason, _ = answer(make("a", "schema", end_ids=frozenset()))[1:]
    assert reason == "error"
    assert answer(make("a", "schema", max_tokens=len(tokens), end_ids=frozenset()))[3] == "length"


@pytest.mark.parametrize("plan", [None, "merged"])
def test_the_grammar_has_the_last_word(plan):
    """Words and a minimum length give way where they leave nothing of it; elsewhere they count."""
    plan = plan and PLANS[plan]
    forbidden = {"bad_words": ["name", "na"], "sampling": {"min_length": 55}}
    text, _, _, reason, _ = answer(make("a", "schema", **forbidden), plan)
    assert (json.loads(text).keys(), reason) == ({"name", "age"}, "stop")
    for seed in range(5):
        bad = [CODEC.encode_part(word) for word in ("y", "ye", "a", "aa")]
        chosen = {"bad_word_ids": bad, "sampling": {"temperature": 2.0, "seed": seed}}
        assert answer(make("a", "choice", **chosen), plan)[0] in ("no", "none", "nobody")


def test_a_stop_word_ends_a_guided_text_within_a_draft():
    text = answer(make("a", "schema"))[0]
    for end in range(3, len(text), 4):
        sequence = make("a", "schema", stop_words=[text[end - 2 : end]])
        got = answer(sequence, PLANS["merged"])
        assert got[0] == text[: text.index(text[end - 2 : end]) + 2]
        assert got[4].output_tokens == 1 + got[4].steps + got[4].accepted


def test_draft_trees_say_what_the_guide_forced():
    sequence = make("a", "schema", draft_trees=True)
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["merged"]))
    scheduler.submit(sequence)
    outputs = []
    while not scheduler.idle:
        outputs += scheduler.step()
    trees = [tree for output in outputs for tree in output.draft_trees]
    origins = {origin for tree in trees for origin in tree.origins}
    assert "grammar" in origins
    assert len({"drafter", "ngrams", "both"} & origins) > 0
    gained = [token for tree in trees for token in tree.gained]
    assert gained == [token for output in outputs for token in output.token_ids][-len(gained) :]


UNMASKED = "sampler.draws.choose(logits[node], sampler.position)"
MASKED = "sampler.choose(logits[node])"
MUTANTS = {
    "the bonus row unmasked": (
        verification.walk, MASKED, f"({MASKED} if any(above == node for above, _ in child_at) else {UNMASKED})"
    ),
    "a forced token committed unverified": (
        verification.walk, MASKED, f"(sampler.grammar.forced() or [{MASKED}])[0]"
    ),
    "the text goes on when it is complete": (RequestState._append, "grammar is not None", "False"),
}  # fmt: skip


MASK = "grammar.mask(path)"
DEVICE_MUTANTS = {
    "a node's row with its parent's mask": (row_masks, MASK, "grammar.mask(path[:-1])"),
    "the bonus row unmasked": (row_masks, MASK, f"({MASK} | (path not in {{other[:-1] for other in paths if other}}))"),
}  # fmt: skip


@pytest.fixture
def wrong_guesses(monkeypatch):
    """Tokens that are said to be forced, and are only allowed."""

    def guess(state: GrammarState, path: tuple[int, ...] = ()) -> list[int]:
        allowed = np.flatnonzero(state.mask(path)).tolist()
        return allowed[len(path) % 3 :][:1]

    monkeypatch.setattr(GrammarState, "forced", guess)


def answers(plan: MethodConfig | None, engine=ToyEngine) -> list[tuple]:
    """Of six seeds, with the choice and with the schema."""
    return [
        answer(make("a", guide, {"temperature": 1.5, "seed": seed}), plan, engine)[:4]
        for guide in ("schema", "choice")
        for seed in range(6)
    ]


def test_a_forced_token_is_a_draft(wrong_guesses):
    assert answers(PLANS["merged"], ChoosingToyEngine) == answers(PLANS["merged"]) == answers(None)


@pytest.mark.parametrize("name", MUTANTS)
def test_these_mutants_show(name, wrong_guesses):
    """A text is another than masked auto-regressive decoding's."""
    expected = answers(None)
    with planted(Mutant(name, *MUTANTS[name], case="")):
        assert answers(PLANS["merged"]) != expected


@pytest.mark.parametrize("name", DEVICE_MUTANTS)
def test_these_mutants_of_the_devices_masks_show(name):
    expected = answers(None)
    with planted(Mutant(name, *DEVICE_MUTANTS[name], case="")):
        assert answers(PLANS["merged"], ChoosingToyEngine) != expected
