"""Verification: which path of a draft tree the target keeps, and the token that it adds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from redraft.decoding import native
from redraft.decoding.construction import CONSTRUCTIONS, Draws
from redraft.decoding.log_probs import LogProbs
from redraft.decoding.native import Walkers
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import Node, TokenTree


@dataclass(slots=True)
class Verdict:
    """What one sequence gains in a step: `tokens` are the accepted tokens and then the bonus token; `path` are the
    nodes at which they were chosen and whose cache rows stay, the root first. The scheduler adds the tokens'
    `log_probs` where they are asked for."""

    path: list[int]
    tokens: list[int]
    log_probs: LogProbs | None = None


@dataclass(frozen=True)
class Verifier:
    """`verify(tree, sequence, logits float32 [nodes, V], sampler)`; `lossless` are the kinds of draws that it goes
    with; all others are refused, for the `reasons` where given. `merges` says whether it is lossless on merged or
    pruned trees. `walk` takes what a plain sampler chooses at every node, int32 [nodes], too."""

    name: str
    verify: Callable[[TokenTree, int, np.ndarray, Sampler], Verdict]
    lossless: Collection[Draws]
    reasons: Mapping[Draws, str] = field(default_factory=dict)
    merges: bool = False


VERIFIERS: dict[str, Verifier] = {}


class PairingError(ValueError):
    """A construction and a verifier that do not go together."""


def register_verifier(verifier: Verifier) -> Verifier:
    """Make a verifier selectable in a bundle's configuration."""
    VERIFIERS[verifier.name] = verifier
    return verifier


def draws_of(construction: str) -> Draws:
    """How a construction, of whatever kind, chooses its tokens. Raises PairingError for one that is not known."""
    kinds = {name: rule.draws for name, rule in CONSTRUCTIONS.items()}
    kinds |= {name: rule.draws for name, rule in RANDOM_CONSTRUCTIONS.items()}
    if construction not in kinds:
        raise PairingError(f"unknown construction {construction!r}: expected one of {', '.join(kinds)}")
    return kinds[construction]


def check_pairing(construction: str, verification: str, merged: bool = False) -> None:
    """Raise PairingError, with the reason, unless the verifier is lossless on the construction's trees.

    `merged`: an n-gram branch or a re-sampled tree is merged in.
    """
    draws = draws_of(construction)
    if verification not in VERIFIERS:
        raise PairingError(f"unknown verification {verification!r}: expected one of {', '.join(VERIFIERS)}")
    verifier = VERIFIERS[verification]
    if draws not in verifier.lossless:
        reason = verifier.reasons.get(draws, f"it is not known to be lossless on {draws.value}")
        raise PairingError(f"{verification!r} does not go with {construction!r}: {reason}")
    if merged and not verifier.merges:
        raise PairingError(f"{verification!r} does not go with merged trees: merging forgets the order of the draws")


def walk(tree: TokenTree, sequence: int, logits: np.ndarray, sampler: Sampler) -> Verdict:
    """Choose the target's token at the root, follow the child that has it, and so on until there is none.

    Each token is chosen as auto-regressive decoding would choose it after the same tokens, so the walk is lossless on
    any tree, greedy or sampled. It stops after an end token. Where siblings repeat a token, it follows all of them.
    `logits`: float32 [nodes, V], or the tokens that a plain sampler chooses at every node, int32 [nodes].
    """
    chosen = logits.ndim == 1
    nodes = tree.nodes[sequence]
    child_at = {(parent, token): node for node, (token, parent, _) in enumerate(nodes)}
    if len(child_at) < len(nodes):
        child_at = _joined(nodes)
    verdict = Verdict(path=[], tokens=[])
    node: int | None = 0
    while node is not None:
        verdict.path.append(node)
        token = int(logits[node]) if chosen else sampler.choose(logits[node])
        sampler.accept(token)
        verdict.tokens.append(token)
        node = None if token in sampler.end_ids else child_at.get((node, token))
    return verdict


def walk_all(tree: TokenTree, logits: np.ndarray, walkers: Walkers) -> list[Verdict]:
    """`walk` of each tree of a batch: `logits` of all their nodes, as there."""
    verdicts = [Verdict(path, tokens) for path, tokens in native.walk_trees(tree, logits, walkers)]
    for sampler, verdict in zip(walkers.samplers, verdicts, strict=True):
        sampler.skip(len(verdict.tokens))
    return verdicts


def _joined(nodes: list[Node]) -> dict[tuple[int, int], int]:
    """The children of a tree that repeats prefixes, by parent and token: nodes of one prefix count as the first of
    them, which has the same logits and the same keys and values."""
    child_at: dict[tuple[int, int], int] = {}
    first = [0]
    for node, (token, parent, _) in enumerate(nodes[1:], 1):
        first.append(child_at.setdefault((first[parent], token), node))
    return child_at


register_verifier(Verifier("greedy", walk, frozenset(Draws), merges=True))
register_verifier(Verifier("sampled_walk", walk, frozenset(Draws), merges=True))
