"""Rejection-type verification: keeps a draw with a probability such that tokens follow the target's distribution q.

A rule tries the draws of one node in draw order: `rule(q, drawn, accept)`, with q float64 [M] the target's
probabilities of the tokens `drawn.ids`, asks `accept(chance)` for each. It gives the index of the draw that was
accepted, or -1 and what is left of q, float64 [M]: the bonus token is drawn from this and the other tokens'
probabilities, which no rule changes. Nothing else is random in it, so its law can be enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat

import numpy as np

from redraft.decoding.construction import Draws
from redraft.decoding.draws import log_softmax
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import NodeDraws, TokenTree
from redraft.decoding.verification import Verdict, Verifier, register_verifier, walk

Accept = Callable[[float], bool]
Rule = Callable[[np.ndarray, NodeDraws, Accept], tuple[int, np.ndarray]]

_BISECTIONS = 24


def recursive_rejection(q: np.ndarray, drawn: NodeDraws, accept: Accept) -> tuple[int, np.ndarray]:
    """Draws without replacement: RSD, algorithm 1 and the loop of algorithm 6.

    A rejected token leaves the draft distribution, which is renormalized (the paper prints its index instead).
    """
    return _rounds(q, drawn, _without_replacement(drawn), accept)


def multi_round(q: np.ndarray, drawn: NodeDraws, accept: Accept) -> tuple[int, np.ndarray]:
    """Independent draws, repeats included: SpecInfer's multi-round rejection (RSD, section 2). Of a single draw, this
    is speculative sampling."""
    return _rounds(q, drawn, repeat(np.exp(log_softmax(drawn.draft_log_probs))), accept)


def k_seq(q: np.ndarray, drawn: NodeDraws, accept: Accept) -> tuple[int, np.ndarray]:
    """Independent draws, repeats included: SpecTr's K-SEQ (RSD, section 2).

    Its gamma is the smallest, and accepts the most, for which the residual is a distribution.
    """
    p = np.exp(log_softmax(drawn.draft_log_probs))
    gamma = k_seq_gamma(p, q, len(drawn.entries))
    for draw, entry in enumerate(drawn.entries):
        if accept(_chance(q[entry], gamma * p[entry])):
            return draw, q
    overlap = np.minimum(p, q / gamma)
    beta = float(overlap.sum())
    tried = (1 - (1 - beta) ** len(drawn.entries)) / beta if beta > 0 else 0.0
    return -1, np.maximum(q - tried * overlap, 0.0)


def k_seq_gamma(p: np.ndarray, q: np.ndarray, draws: int) -> float:
    """The least gamma in [1, draws] with 1 - (1 - beta)^draws <= gamma beta, where beta = sum min(p, q / gamma).

    p and q float64 [M]. What the right side exceeds the left by grows with gamma: bisection, ending where it holds.
    """
    low, high = 1.0, float(draws)
    for _ in range(_BISECTIONS if draws > 1 else 0):
        gamma = (low + high) / 2
        beta = np.minimum(p, q / gamma).sum()
        low, high = (low, gamma) if 1 - (1 - beta) ** draws <= gamma * beta else (gamma, high)
    return high


def _rounds(
    q: np.ndarray, drawn: NodeDraws, distributions: Iterable[np.ndarray], accept: Accept
) -> tuple[int, np.ndarray]:
    """Rejection round by round; `distributions` float64 [M] are what each draw came from, given those before it.

    The residual is kept unnormalized: outside of p's support it never changes.
    """
    residual, mass = q, 1.0
    outside = max(1.0 - float(q.sum()), 0.0)
    for draw, (entry, p) in enumerate(zip(drawn.entries, distributions, strict=False)):
        share = mass * p
        if accept(_chance(residual[entry], share[entry])):
            return draw, q
        left = np.maximum(residual - share, 0.0)
        if (total := float(left.sum()) + outside) > 0:
            residual, mass = left, total
    return -1, residual


def _without_replacement(drawn: NodeDraws) -> np.ndarray:
    """float64 [draws, M], what each draw came from: the draws before it have left."""
    scores = np.tile(drawn.draft_log_probs.astype(np.float64), (len(drawn.entries), 1))
    for draw, entry in enumerate(drawn.entries, 1):
        scores[draw:, entry] = -np.inf
    return np.exp(log_softmax(scores))


def _chance(target: float, draft: float) -> float:
    """min(1, target / draft), 0 where the target has nothing (the draft's probability may have underflowed)."""
    return 0.0 if target <= 0 else 1.0 if target >= draft else float(target / draft)


def _coin(sampler: Sampler) -> Accept:
    """Accepts with the chance asked, by random numbers of the current output position that nothing else uses."""
    tries = count(1)
    return lambda chance: sampler.flip(chance, next(tries))


def verify(rule: Rule, tree: TokenTree, sequence: int, logits: np.ndarray, sampler: Sampler) -> Verdict:
    """Walk down from the root: at each node the rule accepts one of its draws, or the bonus token is drawn.

    The target's distribution is the sampler's, filters and processors applied to the node's own path. Acceptance and
    bonus take random numbers of their own from each output position. It stops after an end token. A greedy request is
    walked: only one token is right, however the tree was made. A draw that the request's grammar forbids stays in its
    place, and its target probability of 0 rejects it: without it the others would be of another law.
    """
    if sampler.greedy:
        return walk(tree, sequence, logits, sampler)
    draws = tree.draws[sequence] if tree.draws is not None else {}
    verdict = Verdict(path=[], tokens=[])
    node: int | None = 0
    while node is not None:
        verdict.path.append(node)
        node_logits, drawn = logits[node], draws.get(node)
        child = None
        if drawn is None:
            token = sampler.choose(node_logits)
        else:
            q = sampler.distribution(node_logits)
            draw, left = rule(q.at(drawn.ids), drawn, _coin(sampler))
            if draw >= 0:
                child, token = drawn.children[draw], int(drawn.ids[drawn.entries[draw]])
            else:
                q.put(drawn.ids, left)
                token = sampler.draw(q)
        sampler.accept(token)
        verdict.tokens.append(token)
        node = None if token in sampler.end_ids else child
    return verdict


_CHOSEN = "it weighs draws by their draft probability, and these tokens were chosen, not drawn"
_SEVERAL = "it verifies one draw after each token"
_REPEATED = "it takes every rejected token out of the draft distribution, and these draws repeat"
_DEPENDENT = "it takes the draws for independent, and these come without replacement"
_INDEPENDENT = {Draws.SINGLE, Draws.INDEPENDENT}
_NOT_INDEPENDENT = {Draws.TOP: _CHOSEN, Draws.WITHOUT_REPLACEMENT: _DEPENDENT}

register_verifier(
    Verifier(
        "rejection",
        partial(verify, multi_round),
        {Draws.SINGLE},
        {Draws.TOP: _CHOSEN, Draws.WITHOUT_REPLACEMENT: _SEVERAL, Draws.INDEPENDENT: _SEVERAL},
    )
)
register_verifier(
    Verifier(
        "recursive_rejection",
        partial(verify, recursive_rejection),
        {Draws.SINGLE, Draws.WITHOUT_REPLACEMENT},
        {Draws.TOP: _CHOSEN, Draws.INDEPENDENT: _REPEATED},
    )
)
register_verifier(Verifier("multi_round", partial(verify, multi_round), _INDEPENDENT, _NOT_INDEPENDENT))
register_verifier(Verifier("k_seq", partial(verify, k_seq), _INDEPENDENT, _NOT_INDEPENDENT))
