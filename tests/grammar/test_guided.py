"""Draft trees under a grammar, node by node."""

from __future__ import annotations

import math

from redraft.decoding.token_tree import Node
from redraft.grammar.guided import guided_nodes
from redraft.grammar.state import GrammarState
from tests.grammar.test_state import start, tokens

ROOT = (5, -1, 0.0)


def nodes(*drafts: tuple[str, int, float]) -> list[Node]:
    return [ROOT, *((tokens(text)[0], parent, math.log(chance)) for text, parent, chance in drafts)]


def test_forbidden_nodes_leave_with_all_below_them():
    drafted = nodes(("b", 0, 0.5), ("n", 0, 0.2), ("o", 1, 0.4), ("o", 2, 0.1), ("y", 4, 0.1), ("b", 4, 0.05))
    expected = nodes(("n", 0, 0.2), ("o", 1, 0.1), ("b", 2, 0.05))
    guided = guided_nodes(drafted, start("choice"), most=0)
    assert guided == expected


def test_forced_tokens_join_as_likely_as_the_node_before():
    guided = guided_nodes(nodes(("n", 0, 0.25), ("no", 0, 0.5), ("b", 2, 0.3)), start("choice"), most=9)
    assert guided[:4] == nodes(("n", 0, 0.25), ("no", 0, 0.5), ("b", 2, 0.3))
    assert guided[4:] == nodes(("o", 1, 0.25), ("o", 3, 0.3), ("d", 5, 0.3), ("y", 6, 0.3))[1:]


def test_a_forced_token_that_was_drafted_becomes_likely():
    guided = guided_nodes(nodes(('{"', 0, 0.125), ("na", 1, 0.0625)), start("schema"), most=3)
    assert guided == nodes(('{"', 0, 1), ("na", 1, 1), ("me", 2, 1))
    assert len({(parent, token) for token, parent, _ in guided}) == len(guided), "one node for one prefix"


def test_at_most_so_many_are_forced_at_a_place():
    assert len(guided_nodes([ROOT], start("schema"), most=3)) == 4
    assert guided_nodes([ROOT], start("regex"), most=3) == [ROOT]


def test_nothing_is_asked_of_the_nodes_that_are_forced(monkeypatch):
    asked = []
    grammar, forced = start("schema"), GrammarState.forced
    monkeypatch.setattr(GrammarState, "forced", lambda self, path: asked.append(path) or forced(self, path))
    assert len(guided_nodes(nodes(('{"', 0, 0.5), ("na", 1, 0.5)), grammar, most=9)) > 4
    assert asked == [()]


def test_an_end_token_is_a_leaf():
    drafted = nodes(("no", 0, 0.5), ("<end>", 1, 0.4), ("n", 2, 0.3), ("<end>", 0, 0.1))
    assert guided_nodes(drafted, start("choice"), most=9) == nodes(("no", 0, 0.5), ("<end>", 1, 0.4))
