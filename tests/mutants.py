"""Mutants of the shipped constructions and verifiers: each must change the joint law that the scheduler produces.

    python -m tests.mutants

patches one function at a time, runs the joint-law test of a pairing that uses it, and prints a table of how far each
law is off, in standard deviations; the shipped code comes first. Fails if a mutant survives.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

import numpy as np

from redraft.decoding import draws, random_trees, rejection
from redraft.decoding.token_tree import TokenTree
from tests.joint_law import CASES, THRESHOLD, deviation, engine_of, generate, target_law


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `function`; the joint law of `case`, of `requests` of `kind`, must tell."""

    name: str
    function: Callable
    old: str
    new: str
    case: str
    requests: int = 300
    kind: str = "plain"


def by_probability(kept: np.ndarray, log_probs: list[list[float]], parents: np.ndarray) -> np.ndarray:
    """As many draws of each node as are kept, but its most probable ones."""
    chosen = np.zeros_like(kept)
    for sequence, node in {(s, n) for s, nodes in enumerate(parents.tolist()) for n in nodes}:
        siblings = np.flatnonzero(parents[sequence] == node)
        best = sorted(siblings, key=lambda draw: -log_probs[sequence][draw])
        chosen[sequence, best[: kept[sequence, siblings].sum()]] = True
    return chosen


APPEND = """
            drawn[parent].children.append(node)
            drawn[parent].places.append(entry)
"""
PREPEND = """
            drawn[parent].children.insert(0, node)
            drawn[parent].places.insert(0, entry)
"""
APPEND_NEW = """
            if node not in drawn[parent].children:
                drawn[parent].children.append(node)
                drawn[parent].places.append(entry)
"""
KEEP = "not kept[sequence, draw]"
KEEP_REPEATS = "not (kept[sequence, draw] or (node_of.get(expanded), tokens[sequence][draw]) in known)"
LISTS = "trees, draws = [], []"
CUT_BY_PROBABILITY = LISTS + "; kept = by_probability(kept, log_probs, drafts.draws // support)"
RESIDUAL = "residual, mass = left, total"
FIRST_RESIDUAL = "residual, mass = (residual, mass) if place else (left, total)"
BONUS = "_with_inside(q, drawn.ids, residual)"
FIRST_SIBLING = "sampler.accept(token if child is None else int(drawn.ids[drawn.places[0]]))"
ANCESTORS = TokenTree.__dict__["ancestors"].func

# fmt: off
MUTANTS = [
    Mutant("p not renormalized after a rejection",
           rejection._without_replacement, "np.exp(log_softmax(scores))", "np.exp(scores)", "RSD-C"),
    Mutant("bonus drawn from q instead of the residual",
           rejection._rounds, BONUS, "q", "RSD-S", 600),
    Mutant("bonus drawn from q instead of the residual, K-SEQ",
           rejection.k_seq, "np.maximum(inside - tried * overlap, 0.0)", "inside", "K-SEQ", 500),
    Mutant("the residual of the first rejection kept for all",
           rejection._rounds, RESIDUAL, FIRST_RESIDUAL, "multi-round", 1000),
    Mutant("gamma 1: K-SEQ accepts too much",
           rejection.k_seq_gamma, "return high", "return 1.0", "K-SEQ", 1500),
    Mutant("siblings in the wrong order",
           random_trees.pack_draws, APPEND, PREPEND, "RSD-C"),
    Mutant("repeated draws removed",
           random_trees.pack_draws, APPEND, APPEND_NEW, "multi-round", 1000),
    Mutant("repeated draws removed, K-SEQ",
           random_trees.pack_draws, APPEND, APPEND_NEW, "K-SEQ", 1000),
    Mutant("repeated draws kept beyond the budget, as they cost no row",
           random_trees.pack_draws, KEEP, KEEP_REPEATS, "K-SEQ, always cut", 3000),
    Mutant("children cut by probability instead of draw order",
           random_trees.pack_draws, LISTS, CUT_BY_PROBABILITY, "RSD-C, always cut", 1000),
    Mutant("a node's parent mask off by one",
           ANCESTORS, "path[parent]", "path[max(parent - 1, 0)]", "RSD-C"),
    Mutant("a penalty counted on the wrong path: the first sibling's",
           rejection.verify, "sampler.accept(token)", FIRST_SIBLING, "RSD-C", kind="penalized"),
    Mutant("the bonus takes the random number of the first acceptance",
           rejection._coin, "count(1)", "count(0)", "speculative sampling", 1500),
    Mutant("every acceptance at a node takes the same random number",
           rejection._coin, "next(tries)", "1", "RSD-C, wider than its support", 1500),
    Mutant("the same draft noise at every position",
           draws.gumbel_noise, "(0, position, 0, 0)", "(0, 0, 0, 0)", "RSD-C", 1500),
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
    scope = {**function.__globals__}
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    shipped = function.__code__
    function.__globals__[by_probability.__name__] = by_probability
    function.__code__ = scope[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = shipped
        del function.__globals__[by_probability.__name__]


def law_of(case: str, kind: str, requests: int) -> float | str:
    """How far the joint law is off; or the error that came before there was one."""
    try:
        outcomes, _, _ = generate(CASES[case], requests, (kind,))
        return deviation(outcomes[kind], target_law(engine_of(CASES[case]), kind))
    except AssertionError as error:
        return str(error)


def is_killed(result: float | str) -> bool:
    return isinstance(result, str) or result > THRESHOLD


def main() -> int:
    for case, kind in sorted({(mutant.case, mutant.kind) for mutant in MUTANTS}):
        print(f"{law_of(case, kind, 1000):6.1f}          shipped: {case}, {kind}")
    survivors = 0
    for mutant in MUTANTS:
        with planted(mutant):
            result = law_of(mutant.case, mutant.kind, mutant.requests)
        survivors += not is_killed(result)
        text = " error" if isinstance(result, str) else f"{result:6.1f}"
        print(f"{text}  {'killed' if is_killed(result) else 'ALIVE '}  {mutant.name} ({mutant.case})")
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants killed (beyond {THRESHOLD} standard deviations)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
