"""Mutants of the shipped constructions and verifiers: each must change the texts that the scheduler produces, in law
or, where a verifier walks, token for token.

    python -m tests.mutants

patches one function at a time, runs the joint-law test of a pairing that uses it, and prints a table of how far each
law is off, in standard deviations, or what else told; the shipped code comes first. Fails if a mutant survives.

Of merging and cutting there are few: the target's mask and the walk read the same nodes, so a node in the wrong place
is wasted, and the text is right. Only a tree that is another sequence's, or whose root is another token, is not.
Of the truncated Gumbels only what puts a node's children in another order shows: any number of them may be kept, as
long as whether the next one is does not depend on which it is.

`reference_draws` is what a drafter's network is compared with elsewhere, and stands for it here. So do `ReferenceDraws`
for the kernels that draw the target's tokens, where the noise is a mutant, and the Python functions that cut and pack
trees for the compiled ones.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from unittest.mock import patch

import numpy as np

from redraft.decoding import draws, native, noise, random_trees, rejection, sampling, token_tree, verification
from redraft.decoding.token_tree import NodeDraws, TokenTree
from redraft.decoding.verification import Verdict
from redraft.drafting import cutting
from redraft.drafting import native as drafting_native
from redraft.plugins.operators.sampling.cpu import TokenDraws
from redraft.plugins.operators.sampling.reference import winner
from redraft.request_state import RequestState
from redraft.scheduling import scheduler
from tests.joint_law import CASES, THRESHOLD, Answers, check, generate, law_of
from tests.scheduling import packed
from tests.toy_drafter import reference_draws


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `function`; the texts of `case`, of `requests` of `kind`, must tell."""

    name: str
    function: Callable
    old: str
    new: str
    case: str
    requests: int = 300
    kind: str = "plain"


class ReferenceDraws(TokenDraws):
    """Races in numpy."""

    def choose(self, logits: np.ndarray, position: int) -> int:
        ids, weights, _ = self.distribution(logits)
        return self.race(ids, weights, position)

    def race(self, ids: np.ndarray | None, weights: np.ndarray, position: int) -> int:
        ids = np.arange(len(weights)) if ids is None else ids
        return winner(ids, weights, noise.race(self.seed, position, ids))


def walk_each(tree: TokenTree, logits: np.ndarray, walkers: native.Walkers) -> list[Verdict]:
    """`verification.walk_all` by `verification.walk`."""
    rows = np.split(logits, tree.offsets[1:-1])
    return [verification.walk(tree, index, rows[index], sampler) for index, sampler in enumerate(walkers.samplers)]


def by_probability(kept: np.ndarray, log_probs: list[list[float]], parents: np.ndarray) -> np.ndarray:
    """A choice of as many draws of each node as `kept` has, but its most probable ones."""
    chosen = np.zeros_like(kept)
    for sequence, node in {(s, n) for s, nodes in enumerate(parents.tolist()) for n in nodes}:
        siblings = np.flatnonzero(parents[sequence] == node)
        best = sorted(siblings, key=lambda draw: -log_probs[sequence][draw])
        chosen[sequence, best[: kept[sequence, siblings].sum()]] = True
    return chosen


def without_forbidden(q: np.ndarray, drawn: NodeDraws) -> NodeDraws:
    """The draws but those that the target never gives."""
    kept = [place for place, entry in enumerate(drawn.entries) if q[entry] > 0]
    children, places = ([column[place] for place in kept] for column in (drawn.children, drawn.entries))
    return NodeDraws(children, places, drawn.ids, drawn.draft_log_probs)


APPEND = """
            drawn[parent].children.append(node)
            drawn[parent].entries.append(entry)
"""
PREPEND = """
            drawn[parent].children.insert(0, node)
            drawn[parent].entries.insert(0, entry)
"""
APPEND_NEW = """
            if node not in drawn[parent].children:
                drawn[parent].children.append(node)
                drawn[parent].entries.append(entry)
"""
KEEP = "not kept[sequence, draw]"
KEEP_REPEATS = "not (kept[sequence, draw] or (node_of.get(expanded), tokens[sequence][draw]) in node_of_token)"
LISTS = "trees, draws = [], []"
CUT_BY_PROBABILITY = LISTS + "; kept = by_probability(kept, log_probs, drafts.draws // support)"
RESIDUAL = "residual, mass = left, total"
FIRST_RESIDUAL = "residual, mass = (residual, mass) if draw else (left, total)"
BONUS = "return -1, residual"
GO_ON = "child, token = drawn.children[0], sampler.draw(q)"
FIRST_SIBLING = "sampler.accept(token if child is None else int(drawn.ids[drawn.entries[0]]))"
SAME_CHILD = "child_at.get((node, token))"
ANY_CHILD = "next((below for (above, _), below in child_at.items() if above == node), None)"
ANY_PARENT = "next((below for (_, drafted), below in child_at.items() if drafted == token and below > node), None)"
FIRST_CHILD = "sampler.accept(next((drafted for above, drafted in child_at if above == node), token))"
CUT = "[_best_nodes(*limits) for limits in zip(tree.nodes, budgets, depths, scores, strict=True)]"
BY_SIZE = "sorted((_best_nodes(*limits) for limits in zip(tree.nodes, budgets, depths, scores, strict=True)), key=len)"
ORDER = "np.argsort(np.concatenate([indices for indices, _ in parts]))"
MERGED, BEAMS = "RSD-S merged with n-grams", "beams merged with n-grams and re-sampled trees"
ANCESTORS = TokenTree.__dict__["ancestors"].func
Q = "q = sampler.distribution(node_logits)"
WITHOUT_TOP_P = f"sampler.top_p = 1.0; vars(sampler).pop('draws', None); {Q}"
UNFILTERED = "append(filter_log_probs(logits, sampling.temperature, 0 * sampling.top_k, 1 + 0 * sampling.top_p))"
RULE = "draw, left = rule(q.at(drawn.ids), drawn, _coin(sampler))"
WITHOUT_FORBIDDEN = "drawn = without_forbidden(q.at(drawn.ids), drawn); " + RULE
LEAF = "token = sampler.choose(node_logits)"
UNMASKED_LEAF = "token = sampler.draws.choose(node_logits, sampler.position)"
ACCEPTED = "if draw >= 0:"
ACCEPTED_INSIDE = "if draw >= 0 and int(drawn.ids[drawn.entries[draw]]) not in sampler.end_ids:"
OUTSIDE = "outside = max(1.0 - float(q.sum()), 0.0)"
SCALED = "probabilities[present] * self.total"
CUT_ORDER = random_trees.DrawShape.__dict__["cut_order"].func
WITHIN = "<= budgets[:, None]"
LAST_WITHIN = "> (allowed.sum(axis=1) - budgets)[:, None]"
PERTURBED = "_perturbed(log_probs, noise, greedy)"
ONE_ROW = "_perturbed(log_probs, noise[:, :1].repeat(count, axis=1), greedy)"
SURE = ("RSD-C, a sure drafter", "K-SEQ, a sure drafter")
WIDE = "RSD-C, wider than its support"
TOKEN_WORDS = "philox(keys, counters, ids >> 2, none, last)"
COINS = "philox(keys, counters, none, ids, none)[:1] * 4"
NARROW, NARROW_K_SEQ = "multi-round, a narrow support", "K-SEQ, a narrow support"


def bonus_from_q(case: str, requests: int) -> Mutant:
    """The token after the last rejection is drawn from q instead of the residual."""
    rule = (rejection._rounds, BONUS, "return -1, q")
    if case.startswith("K-SEQ"):
        rule = (rejection.k_seq, "np.maximum(q - tried * overlap, 0.0)", "q")
    return Mutant(f"bonus drawn from q instead of the residual, {case}", *rule, case, requests)


# fmt: off
MUTANTS = [
    Mutant("p not renormalized after a rejection",
           rejection._without_replacement, "np.exp(log_softmax(scores))", "np.exp(scores)", "RSD-C"),
    Mutant("p not renormalized after a rejection, RSD-S",
           rejection._without_replacement, "np.exp(log_softmax(scores))", "np.exp(scores)", "RSD-S", 600),
    *(bonus_from_q(case, 900) for case in ("RSD-S", "K-SEQ", "multi-round", "speculative sampling")),
    *(bonus_from_q(case, 3200) for case in CASES if case.endswith(" of two tokens")),
    *(bonus_from_q(case, 1600) for case in CASES if case.endswith(" of 111 tokens")),
    Mutant("the residual is how far q and p are apart, whichever is larger",
           rejection._rounds, "np.maximum(residual - share, 0.0)", "np.abs(residual - share)", "speculative sampling"),
    Mutant("the walk goes on below a rejected draft",
           rejection.verify, "token = sampler.draw(q)", GO_ON, "speculative sampling", 600),
    Mutant("the residual of the first rejection kept for all",
           rejection._rounds, RESIDUAL, FIRST_RESIDUAL, "multi-round", 1000),
    Mutant("gamma 1: K-SEQ accepts too much",
           rejection.k_seq_gamma, "return high", "return 1.0", "K-SEQ", 1500),
    Mutant("siblings in the wrong order",
           random_trees.pack_draws, APPEND, PREPEND, "RSD-C"),
    Mutant("siblings in the wrong order, RSD-S",
           random_trees.pack_draws, APPEND, PREPEND, "RSD-S", 600),
    Mutant("repeated draws removed",
           random_trees.pack_draws, APPEND, APPEND_NEW, "multi-round", 1000),
    Mutant("repeated draws removed, K-SEQ",
           random_trees.pack_draws, APPEND, APPEND_NEW, "K-SEQ", 1000),
    Mutant("repeated draws kept beyond the budget, as they cost no row",
           random_trees.pack_draws, KEEP, KEEP_REPEATS, "K-SEQ, always cut", 3000),
    Mutant("children cut by probability instead of draw order",
           random_trees.pack_draws, LISTS, CUT_BY_PROBABILITY, "RSD-C, always cut", 1000),
    Mutant("children cut by probability instead of draw order, RSD-S",
           random_trees.pack_draws, LISTS, CUT_BY_PROBABILITY, "RSD-S", 1000),
    Mutant("draws cut by probability instead of draw order, K-SEQ",
           random_trees.pack_draws, LISTS, CUT_BY_PROBABILITY, "K-SEQ, always cut", 1000),
    Mutant("a node's parent mask off by one",
           ANCESTORS, "path[parent]", "path[max(parent - 1, 0)]", "RSD-C"),
    Mutant("a node's parent mask off by one, speculative sampling",
           ANCESTORS, "path[parent]", "path[max(parent - 1, 0)]", "speculative sampling"),
    Mutant("a node's parent mask off by one, merged trees",
           ANCESTORS, "path[parent]", "path[max(parent - 1, 0)]", BEAMS),
    Mutant("a penalty counted on the wrong path: the first sibling's",
           rejection.verify, "sampler.accept(token)", FIRST_SIBLING, "RSD-C", kind="penalized"),
    Mutant("a penalty counted on the wrong path: the first sibling's, RSD-S",
           rejection.verify, "sampler.accept(token)", FIRST_SIBLING, "RSD-S", 600, kind="penalized"),
    Mutant("a penalty counted on the wrong path: the first child's, walk",
           verification.walk, "sampler.accept(token)", FIRST_CHILD, BEAMS, 40, kind="penalized"),
    Mutant("every acceptance at a node takes the same random number",
           rejection._coin, "next(tries)", "1", "RSD-C, wider than its support", 1500),
    *(Mutant(f"a token's noise is the coin of its number, {case}", noise.race, TOKEN_WORDS, COINS, case, 1200)
      for case in SURE),
    Mutant("noise keyed without the token",
           noise.race, "(seeds, positions, tokens)", "(seeds, positions, 0 * np.asarray(tokens))", BEAMS, 300),
    Mutant("noise shared between positions",
           noise.race, "(seeds, positions, tokens)", "(seeds, 0, tokens)", BEAMS, 300),
    Mutant("noise of four tokens shared",
           noise.race, "ids & 3", "ids & 0", BEAMS, 300),
    Mutant("the same draft noise at every position",
           draws.gumbel_noise, "(0, position, 0, 0)", "(0, 0, 0, 0)", "RSD-C", 1500),
    Mutant("one noise row for all sequences",
           draws.independent, PERTURBED, ONE_ROW, "multi-round", 800),
    Mutant("one noise row for all sequences, K-SEQ",
           draws.independent, PERTURBED, ONE_ROW, "K-SEQ", 1000),
    Mutant("a wrong sign in the truncated Gumbels",
           draws.truncated_gumbels, "- np.maximum(", "+ np.maximum(", "RSD-S"),
    Mutant("later siblings kept first",
           CUT_ORDER, "level + rank", "level - rank", "RSD-C, always cut"),
    Mutant("the last draws kept instead of the first",
           random_trees.DrawShape.within, WITHIN, LAST_WITHIN, "RSD-S"),
    Mutant("p drawn filtered but reported unfiltered",
           reference_draws, "append(log_probs)", UNFILTERED, "RSD-C", 500, kind="filtered"),
    Mutant("p drawn filtered but reported unfiltered, multi-round",
           reference_draws, "append(log_probs)", UNFILTERED, "multi-round", 1200, kind="filtered"),
    Mutant("q without top-p",
           rejection.verify, Q, WITHOUT_TOP_P, "RSD-S", 100, kind="filtered"),
    Mutant("q without the minimum length",
           rejection.verify, Q, f"sampler._min_length = 0; {Q}", "K-SEQ", 100, kind="ending"),
    Mutant("a drafted end token never accepted",
           rejection.verify, ACCEPTED, ACCEPTED_INSIDE, "RSD-C", 800, kind="ending"),
    *(Mutant(f"a forbidden draw removed, {case}", rejection.verify, RULE, WITHOUT_FORBIDDEN, case, 1500, kind="guided")
      for case in ("RSD-C", "RSD-S", "multi-round")),
    *(Mutant(f"the bonus row unmasked, {case}", rejection.verify, LEAF, UNMASKED_LEAF, case, 100, kind="guided")
      for case in ("RSD-C", "speculative sampling")),
    Mutant("nothing of q outside of p's support",
           rejection._rounds, OUTSIDE, "outside = 0.0", WIDE),
    Mutant("nothing of q outside of p's support, multi-round",
           rejection._rounds, OUTSIDE, "outside = 0.0", NARROW, 1200),
    Mutant("the residual on another scale than the tokens outside of p's support",
           sampling.Distribution.put, SCALED, "probabilities[present]", WIDE, 1200, kind="filtered"),
    Mutant("the residual on another scale than the tokens outside of p's support, K-SEQ",
           sampling.Distribution.put, SCALED, "probabilities[present]", NARROW_K_SEQ, 2000, kind="penalized"),
    Mutant("trees joined in the order of their groups",
           token_tree.join_trees, ORDER, "np.arange(sum(len(indices) for indices, _ in parts))", MERGED, 40),
    Mutant("the walk follows a child of another token",
           verification.walk, SAME_CHILD, ANY_CHILD, MERGED, 40),
    Mutant("the walk follows another node's child",
           verification.walk, SAME_CHILD, ANY_PARENT, BEAMS, 40),
    Mutant("the walk chooses by the root's logits",
           verification.walk, "sampler.choose(logits[node])", "sampler.choose(logits[0])", MERGED, 40),
    Mutant("one random number for all tokens of a step",
           verification.walk, "sampler.accept(token)", "sampler.accept(token) if not node else None", BEAMS, 40),
    Mutant("the accepted path's rows stay where they are",
           RequestState.step, "path if path[-1] != accepted else []", "[]", BEAMS, 40),
    Mutant("merged trees in the reverse order of their sequences",
           token_tree.merge_trees, "merged.append(nodes)", "merged.insert(0, nodes)", MERGED, 40),
    Mutant("a merged tree begins with the drafter's last node instead of the root",
           token_tree.merge_trees, "nodes: list[Node] = [root]", "nodes = [(same[0][-1][0], -1, 0.0)]", MERGED, 40),
    Mutant("a cut tree's tokens one place off",
           token_tree._best_nodes, "(nodes[node][0]", "(nodes[node - 1][0]", BEAMS, 40),
    Mutant("cut trees in the order of their sizes",
           token_tree.prune_tree, CUT, BY_SIZE, MERGED, 40),
]
# fmt: on


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The function's code replaced, whoever calls it. Raises ValueError unless the old text stands in it once."""
    function = mutant.function
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@cached_property\n")
    old, new = mutant.old, mutant.new
    if source.count(old) != 1:
        raise ValueError(f"{mutant.name}: {old!r} stands {source.count(old)} times in {function.__qualname__}")
    reference = ReferenceDraws if function is noise.race else TokenDraws
    scope = {**function.__globals__}
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    shipped = function.__code__
    helpers = {helper.__name__: helper for helper in (by_probability, without_forbidden)}
    function.__globals__.update(helpers)
    function.__code__ = scope[function.__name__].__code__
    try:
        with (
            patch.object(sampling, "TokenDraws", reference),
            patch.object(scheduler, "pack", packed.pack),
            patch.object(drafting_native, "cut_trees", cutting.cut_trees),
            patch.object(scheduler, "walk_all", walk_each),
        ):
            yield
    finally:
        function.__code__ = shipped
        for name in helpers:
            del function.__globals__[name]


def deviation_of(case: str, kind: str, requests: int) -> float | str:
    """How far the joint law is off, of so many requests or of the first of them that tell; or the error that came
    before there was one."""
    answers: Answers = {}
    result = 0.0
    try:
        for part in (32, 16, 8, 4, 2, 1):
            first = len(answers)
            answers |= generate(CASES[case], requests // part - first, (kind,), first)[0]
            result = check(CASES[case], kind, answers)
            if is_killed(result):
                break
    except (AssertionError, ValueError) as error:
        return str(error)
    return result


def trial(mutant: Mutant) -> float | str:
    """What tells that the mutant runs, see `deviation_of`."""
    law_of(CASES[mutant.case], mutant.kind)  # enumerated by the shipped code, and kept
    with planted(mutant):
        return deviation_of(mutant.case, mutant.kind, mutant.requests)


def is_killed(result: float | str) -> bool:
    return isinstance(result, str) or result > THRESHOLD


def main() -> int:
    for case, kind in sorted({(mutant.case, mutant.kind) for mutant in MUTANTS}):
        print(f"{deviation_of(case, kind, 1000):6.1f}          shipped: {case}, {kind}")
    survivors = 0
    for mutant in MUTANTS:
        result = trial(mutant)
        survivors += not is_killed(result)
        text, told = ("     -", f": {result}") if isinstance(result, str) else (f"{result:6.1f}", "")
        print(f"{text}  {'killed' if is_killed(result) else 'ALIVE '}  {mutant.name} ({mutant.case}){told}")
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants killed (beyond {THRESHOLD} standard deviations)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
