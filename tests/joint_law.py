"""The joint law of several tokens through the real scheduler, against the target's own, enumerated.

Requests of every kind of `KINDS` run mixed in one batch, joining and leaving; the budget table cuts some steps' trees
and not others. Each request generates five tokens (fewer where an end token comes first): the first from its prompt,
the others over at least two trees of at most two levels. Everything is seeded. The vocabulary has 4 tokens, or 2; or
111, and then the laws are of the three first tokens.

The target's own law is enumerated with the shipped `Sampler.distribution`: an error in penalties, minimum length or
filters shifts law and texts alike and does not show here. tests/decoding/test_sampling.py tests these by themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice, product

import numpy as np

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.decoding.draws import log_softmax
from redraft.decoding.sampling import Sampler
from redraft.decoding.verification import VERIFIERS
from redraft.grammar.compiler import Grammars
from redraft.grammar.state import Grammar
from redraft.output import Output
from redraft.request import GenerateRequest, Guide, SamplingConfig
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import only, toy_codec

CODEC = toy_codec()
PROMPT = [1, 2, 1]
TOKENS = 5
LIMITS = Limits(slots=24, max_len=16, max_tree=16, prefill_chunk=80, max_queue=24)
THRESHOLD = 4.5
"""Standard deviations beyond which a law is off: chance alone gets there once in 300000 times."""
BUSY = 16
"""Sequences beyond which trees are cut; about this many of the slots are decoding at a time."""

KINDS: dict[str, dict] = {
    "plain": {"temperature": 1.0},
    "penalized": {"temperature": 1.2, "repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.8},
    "filtered": {"temperature": 1.5, "top_k": 3, "top_p": 0.75},
    "min-p": {"temperature": 1.3, "min_p": 0.3},
    "ending": {"temperature": 1.0, "min_length": 2},
    "guided": {"temperature": 1.0},
}
"""Top-k and top-p both take tokens from some targets of `PAIRS`, and top-p from all drafts."""
END_IDS = {"ending": frozenset({0}), "guided": frozenset({0})}
GUIDE = Guide(kind="regex", text='(!["#]|"[#!]?|#!")*#?')
"""What the answers of the kind `guided` are, of the tokens 1 to 3: after some every token may come, after others one or
two, and some texts are complete."""
Answers = dict[tuple[str, int], tuple[int, ...]]
"""Text by kind and seed."""

PAIRS = np.array(
    [[[0.344, 0.063, 0.126, 0.467], [0.176, 0.753, 0.061, 0.010]],
     [[0.022, 0.286, 0.353, 0.339], [0.728, 0.094, 0.005, 0.173]],
     [[0.153, 0.241, 0.314, 0.292], [0.007, 0.009, 0.164, 0.820]]]
)  # fmt: skip
"""Target and draft distributions on which all common mistakes show (found by a random search): after each path one of
the pairs, its tokens permuted."""
PAIRS_OF_TWO = np.array([[[0.35, 0.65], [0.8, 0.2]], [[0.6, 0.4], [0.95, 0.05]], [[0.1, 0.9], [0.4, 0.6]]])


class LawEngine(DrawingToyEngine):
    @property
    def prompt(self) -> list[int]:
        """The prompt of all requests."""
        return [token % self.vocab_size for token in PROMPT]


class AdversarialEngine(LawEngine):
    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(state)
        pairs = PAIRS if self.vocab_size == 4 else PAIRS_OF_TWO
        pair = pairs[rng.integers(len(pairs))][:, rng.permutation(self.vocab_size)]
        target, draft = np.log(pair).astype(np.float32)
        return target, draft

    def draft(self, batch: DraftBatch, noise: SharedNoise | None = None) -> DraftCandidates:
        """Beams, and as chains to re-sample from any logits: lossless is any tree."""
        states = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        chains = [[self.logits_of(state + level)[1] for level in range(self.length)] for state in states]
        return replace(super().draft(batch), raw_logits=np.array(chains))

    def resample(
        self, chains: list[np.ndarray], roots: np.ndarray, noise: SharedNoise | None = None
    ) -> DraftCandidates:
        """On each level its two likeliest tokens, below the likelier one of the level above."""
        shape = len(roots), self.length, 1
        ids, log_probs = np.zeros((*shape, 2), np.int32), np.full((*shape, 2), -np.inf, np.float32)
        for b, chain in enumerate(chains):
            likeliest = np.argsort(-chain)[:, :2]
            ids[b, : len(chain), 0] = likeliest
            logs = np.take_along_axis(log_softmax(chain), likeliest, axis=1)
            log_probs[b, : len(chain), 0] = logs + np.cumsum([0.0, *logs[:-1, 0]])[:, None]
        return DraftCandidates(ids, log_probs, np.zeros(shape, np.int32))


class AgreeingEngine(AdversarialEngine):
    """A drafter that is the target."""

    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        target, _ = super().logits_of(state)
        return target, target


class SureEngine(AdversarialEngine):
    """A drafter that is sure of one token where the target may give any: most drafts are rejected, and most tokens come
    from the residual."""

    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        pair = np.array([[0.28, 0.26, 0.24, 0.22], [0.01, 0.97, 0.01, 0.01]])
        target, draft = np.log(pair[:, np.random.default_rng(state).permutation(4)]).astype(np.float32)
        return target, draft


class DisjointEngine(AdversarialEngine):
    """A drafter of the two tokens that the target never gives; a third draw without replacement is of the other two."""

    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        target, draft = super().logits_of(state)
        mine = np.arange(self.vocab_size) % 2 == state % 2
        return np.where(mine, target, np.float32(-1e4)), np.where(mine, np.float32(-1e4), draft)


class WideEngine(LawEngine):
    """Any target and drafter, but for the first token, of which both are sure: the next ones' laws are of few paths."""

    def logits_of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        if state != self.path_state(self.prompt):
            return super().logits_of(state)
        sure = np.where(np.arange(self.vocab_size) == 5, np.float32(0), np.float32(-1e4))
        return sure, sure


@dataclass(frozen=True)
class Case:
    """A pairing, its tree (`levels`: of random draws), how few draws a busy step and the others keep, and how many of a
    text's tokens are compared."""

    construction: str
    levels: tuple[int, ...]
    verification: str
    cut: int
    budget: int = 15
    ngram: bool = False
    support: int = 4
    resample_above: int | None = None
    vocab_size: int = 4
    compared: int = TOKENS
    engine: type[LawEngine] = AdversarialEngine
    reuse: bool = False
    """Whether requests begin after the rows of others, which takes as long as all else: they share one prompt."""

    @property
    def walks(self) -> bool:
        """Whether texts are auto-regressive decoding's, token for token."""
        return VERIFIERS[self.verification].merges


CASES = {
    "RSD-C": Case("gumbel_top_k", (3, 2), "recursive_rejection", cut=3, reuse=True),
    "RSD-C, always cut": Case("gumbel_top_k", (3, 2), "recursive_rejection", cut=2, budget=3),
    "RSD-C, wider than its support": Case("gumbel_top_k", (4, 3), "recursive_rejection", cut=6, support=3),
    "RSD-S": Case("stochastic_beam", (3, 3), "recursive_rejection", cut=3),
    "multi-round": Case("independent", (3, 3), "multi_round", cut=3),
    "K-SEQ": Case("independent", (3, 3), "k_seq", cut=3),
    "K-SEQ, always cut": Case("independent", (3, 3), "k_seq", cut=2, budget=2),
    "multi-round, a narrow support": Case("independent", (3, 3), "multi_round", cut=2, support=3),
    "K-SEQ, a narrow support": Case("independent", (3, 3), "k_seq", cut=2, support=3),
    "speculative sampling": Case("random_chain", (1, 1), "rejection", cut=1),
    "random chain, recursive rejection": Case("random_chain", (1, 1), "recursive_rejection", cut=1),
    "random chain, multi-round": Case("random_chain", (1, 1), "multi_round", cut=1),
    "random chain, K-SEQ": Case("random_chain", (1, 1), "k_seq", cut=1),
    "RSD-S merged with n-grams": Case("stochastic_beam", (3, 3), "sampled_walk", cut=4, ngram=True),
    "beams merged with n-grams and re-sampled trees": Case(
        "beam", (), "sampled_walk", cut=4, ngram=True, resample_above=0
    ),
    "RSD-C of two tokens": Case("gumbel_top_k", (2, 1), "recursive_rejection", cut=1, support=2, vocab_size=2),
    "RSD-S of two tokens": Case("stochastic_beam", (2, 2), "recursive_rejection", cut=1, support=2, vocab_size=2),
    "multi-round of two tokens": Case("independent", (3, 3), "multi_round", cut=1, support=2, vocab_size=2),
    "K-SEQ of two tokens": Case("independent", (3, 3), "k_seq", cut=1, support=2, vocab_size=2),
    "speculative sampling of two tokens": Case("random_chain", (1, 1), "rejection", cut=1, support=2, vocab_size=2),
    "RSD-S of 111 tokens": Case(
        "stochastic_beam",
        (5, 5),
        "recursive_rejection",
        cut=4,
        support=40,
        vocab_size=111,
        compared=3,
        engine=WideEngine,
    ),
    "K-SEQ of 111 tokens": Case(
        "independent", (5, 5), "k_seq", cut=4, support=40, vocab_size=111, compared=3, engine=WideEngine
    ),
    "RSD-S, p = q": Case("stochastic_beam", (3, 3), "recursive_rejection", cut=3, engine=AgreeingEngine),
    "K-SEQ, p = q": Case("independent", (3, 3), "k_seq", cut=3, engine=AgreeingEngine),
    "RSD-C, a sure drafter": Case("gumbel_top_k", (1, 1), "recursive_rejection", cut=1, engine=SureEngine),
    "K-SEQ, a sure drafter": Case("independent", (3, 3), "k_seq", cut=1, engine=SureEngine),
    "RSD-C, disjoint supports": Case(
        "gumbel_top_k", (3, 2), "recursive_rejection", cut=3, budget=8, engine=DisjointEngine
    ),
    "multi-round, disjoint supports": Case(
        "independent", (3, 3), "multi_round", cut=3, budget=8, engine=DisjointEngine
    ),
    "K-SEQ, disjoint supports": Case("independent", (3, 3), "k_seq", cut=3, budget=8, engine=DisjointEngine),
}


def engine_of(case: Case) -> LawEngine:
    """The toy engine of a case: always the same target."""
    return case.engine(
        case.construction, case.levels, case.support, vocab_size=case.vocab_size, slots=LIMITS.slots,
        max_len=LIMITS.max_len, max_tree=LIMITS.max_tree, seed=1, sharpness=1.0, width=3, length=3, candidates=4,
    )  # fmt: skip


@cache
def grammar_of(kind: str) -> Grammar | None:
    """The compiled guide of a kind that has one."""
    return Grammars(CODEC, 4).compile(GUIDE) if kind == "guided" else None


def sampler_of(engine: LawEngine, kind: str, **seed: int) -> Sampler:
    """A request's sampler, without a scheduler."""
    end_ids, grammar = END_IDS.get(kind, frozenset()), grammar_of(kind)
    state = None if grammar is None else grammar.start(end_ids)
    return Sampler(SamplingConfig(**KINDS[kind], **seed), engine.prompt, end_ids, grammar=state)


def ended(sampler: Sampler, tokens: Collection[int]) -> bool:
    """Whether a text of these tokens has ended."""
    return bool(set(tokens) & sampler.end_ids) or (sampler.grammar is not None and sampler.grammar.ended)


def target_law(engine: LawEngine, kind: str, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every outcome of auto-regressive sampling, its first `length` tokens."""
    law: Counter[tuple[int, ...]] = Counter()

    def extend(tokens: tuple[int, ...], chance: float) -> None:
        sampler = sampler_of(engine, kind)
        for token in tokens:
            sampler.accept(token)
        if len(tokens) == length or ended(sampler, tokens):
            law[tuple(token for token in tokens if token not in sampler.end_ids)] += chance
            return
        logits = engine.logits_after(engine.path_state([*engine.prompt, *tokens]))
        probs = sampler.distribution(logits).at(np.arange(len(logits)))
        for token in np.flatnonzero(probs):
            extend((*tokens, int(token)), chance * probs[token])

    extend((), 1.0)
    return dict(law)


def text_of(engine: LawEngine, kind: str, seed: int) -> tuple[int, ...]:
    """What auto-regressive sampling gives a request of this seed, without a scheduler or a verifier."""
    sampler, tokens = sampler_of(engine, kind, seed=seed), list[int]()
    while len(tokens) < TOKENS and not ended(sampler, tokens):
        tokens.append(sampler.choose(engine.logits_after(engine.path_state([*engine.prompt, *tokens]))))
        sampler.accept(tokens[-1])
    return tuple(token for token in tokens if token not in sampler.end_ids)


@cache
def law_of(case: Case, kind: str) -> dict[tuple[int, ...], float]:
    """The target's law of a case's compared tokens."""
    return target_law(engine_of(case), kind, case.compared)


def check(case: Case, kind: str, answers: Answers) -> float:
    """How far the answers of a kind are off the target's law, see `deviation`. Raises AssertionError for an outcome
    that the target never gives and, where the verifier walks, for any text but auto-regressive decoding's."""
    engine, found = engine_of(case), {seed: text for (of, seed), text in answers.items() if of == kind}
    if case.walks:
        others = sum(text != text_of(engine, kind, seed) for seed, text in found.items())
        assert not others, f"{others} of {len(found)} texts are not auto-regressive decoding's"
    seen = Counter(text[: case.compared] for text in found.values())
    return deviation(seen, law_of(case, kind))


def served(scheduler: Scheduler, sequences: Iterable[RequestState]) -> Iterator[Output]:
    """Outputs of sequences, of which as many wait at a time as there are slots: each step looks at all that wait."""
    slots, rest = scheduler.limits.slots, iter(sequences)
    joining = list(islice(rest, slots // 2))  # these are a step ahead: else all would start and end together
    while joining or not scheduler.idle:
        for sequence in joining:
            scheduler.submit(sequence)
        yield from scheduler.step()
        joining = list(islice(rest, slots - scheduler.status().waiting))


def generate(
    case: Case, requests: int, kinds: Collection[str] = tuple(KINDS), first: int = 0
) -> tuple[Answers, Scheduler, Counter]:
    """Answers to `requests` requests of each kind, of seeds from `first`; the scheduler; and how many steps kept how
    many nodes."""
    table = BudgetTable(
        entries=[
            BudgetEntry(running=BUSY, nodes=case.budget),
            BudgetEntry(running=LIMITS.slots, nodes=case.cut),
        ]
    )
    plan = MethodConfig(
        construction=case.construction, verification=case.verification, ngram=case.ngram,
        budget=table, levels=case.levels, support=case.support,
        resample_above=case.resample_above,
        resample_budget=2,
    )  # fmt: skip
    sizes: Counter[int] = Counter()
    engine = engine_of(case)
    observe = lambda tree, place, _: sizes.update([int(tree.sizes[place]) - 1])  # noqa: E731
    scheduler = Scheduler(engine, LIMITS, only(plan), observe=observe, prefix_reuse=case.reuse)

    def sequence_of(number: int, kind: str) -> RequestState:
        sampling = SamplingConfig(**KINDS[kind], seed=number)
        request = GenerateRequest(id=str(number), input_ids=engine.prompt, max_tokens=TOKENS, sampling=sampling)
        end_ids = END_IDS.get(kind, frozenset())
        return RequestState((kind, number), request, engine.prompt, CODEC, end_ids, grammar=grammar_of(kind))

    made = (sequence_of(number, kind) for number, (_, kind) in enumerate(product(range(requests), kinds), first))
    answers = {output.key: tuple(output.token_ids) for output in served(scheduler, made)}
    return answers, scheduler, sizes


def deviation(counts: Counter, law: dict[tuple[int, ...], float]) -> float:
    """The largest deviation, in standard normal terms, of the joint laws of all, all but the first, and any one or two
    tokens.

    Raises AssertionError for an outcome that the target never gives.
    """
    assert not set(counts) - set(law), f"impossible outcomes {set(counts) - set(law)}"
    places = range(max(map(len, law)))
    views = [places, places[1:], *combinations(places, 1), *combinations(places, 2)]
    return max(_chi_square(_seen(counts, view), _seen(law, view), sum(counts.values())) for view in views)


def _seen(outcomes: Mapping[tuple[int, ...], float], view: Iterable[int]) -> dict[tuple[int, ...], float]:
    seen: dict[tuple[int, ...], float] = defaultdict(float)
    for outcome, weight in outcomes.items():
        seen[tuple(outcome[place] for place in view if place < len(outcome))] += weight
    return seen


def _chi_square(counts: dict, law: dict, total: int) -> float:
    """Chi-square as a standard normal (Wilson and Hilferty); cells expected less than 5 times are one cell."""
    common = [outcome for outcome, chance in law.items() if chance * total >= 5]
    expected = [law[outcome] * total for outcome in common]
    seen = [counts[outcome] for outcome in common]
    if (rest := total - sum(expected)) >= 5:
        expected.append(rest)
        seen.append(total - sum(seen))
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(seen, expected, strict=True))
    freedom = max(len(expected) - 1, 1)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
