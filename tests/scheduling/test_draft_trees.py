"""Draft trees as outputs show them: what each step verified, and where its nodes came from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from redraft.batch import DraftCandidates
from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.origins import Proposals
from redraft.decoding.scores import Scores
from redraft.decoding.verification import Verdict
from redraft.drafting import start_method
from redraft.drafting.groups import Group
from redraft.drafting.method import Method
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, joined
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests import joint_law
from tests.toy_engine import TOY, ToyEngine, only, toy_codec

CODEC = toy_codec()
LIMITS = Limits(slots=3, max_len=256, max_tree=24, prefill_chunk=16)
END_IDS = frozenset({0, 17})
BUDGET = BudgetTable.constant(9)
PLANS = {
    "grown": (MethodConfig(construction="best_first", ngram=True, budget=BUDGET), {"drafter", "ngrams", "both"}),
    "best first": (MethodConfig(construction="best_first", budget=BUDGET), {"drafter"}),
    "beam beside n-grams": (MethodConfig(construction="beam", ngram=True, budget=BUDGET), {"drafter", "ngrams"}),
    "chain": (MethodConfig(construction="chain", budget=BUDGET), {"drafter"}),
    "n-grams": (MethodConfig(construction=None, ngram=True, budget=BUDGET), {"ngrams"}),
}


def outputs_of(scheduler, sequences):
    for sequence in sequences:
        scheduler.submit(sequence)
    found = {sequence.key: [] for sequence in sequences}
    while not scheduler.idle:
        for output in scheduler.step():
            found[output.key].append(output)
    return found


def check(outputs) -> Counter:
    """That each output's trees tell its tokens and each tree its path; how many nodes came from where."""
    origins: Counter = Counter()
    for output in outputs:
        assert [token for tree in output.draft_trees for token in tree.gained] == output.token_ids
        for tree in output.draft_trees:
            origins.update(tree.origins)
            assert tree.path[0] == 0
            assert [tree.parents[node] for node in tree.path] == [-1, *tree.path[:-1]]
            accepted = [tree.token_ids[node] for node in tree.path[1:]]
            end = accepted[len(tree.gained) :]
            assert len(end) <= 1
            assert set(end) <= END_IDS
            assert accepted == [*tree.gained, *end][: len(accepted)]
            assert len(tree.gained) <= len(tree.path)
            assert all(parent < node for node, parent in enumerate(tree.parents))
    return origins


@pytest.mark.parametrize("name", PLANS)
def test_trees_tell_the_tokens_and_change_nothing(name):
    """Beside requests that want none, of another method, and cut by stop words and by their end."""
    plan, kinds = PLANS[name]

    def sequences(wanted):
        for key, fields in enumerate(
            ({"stream": True}, {"stop_words": ["q", "T"]}, {}, {"method": AUTO_REGRESSIVE}, {"stream": True})
        ):
            prompt = [*range(1, 20 + key)] * 2
            one = GenerateRequest(
                id=str(key), input_ids=prompt, max_tokens=40, sampling={"temperature": key / 2, "seed": key},
                draft_trees=wanted and key != 2, **fields,
            )  # fmt: skip
            yield RequestState(key, one, prompt, CODEC, END_IDS)

    def run(wanted):
        return outputs_of(Scheduler(ToyEngine(slots=3), LIMITS, only(plan)), list(sequences(wanted)))

    shown, hidden = run(True), run(False)
    origins = Counter()
    for key, outputs in shown.items():
        assert [token for one in outputs for token in one.token_ids] == [
            token for one in hidden[key] for token in one.token_ids
        ]
        assert all(one.draft_trees is None for one in hidden[key])
        if key == 2:
            assert all(one.draft_trees is None for one in outputs)
            continue
        origins += check(outputs)
        trees, stats = joined(outputs)["draft_trees"], outputs[-1].stats
        assert len(trees) == 1 + stats.steps
        assert sum(len(tree.token_ids) - 1 for tree in trees) == stats.drafted
    assert set(origins) - {"root"} == kinds


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("RSD-S", {"drafter"}),
        ("beams merged with n-grams and re-sampled trees", {"drafter", "ngrams", "both", "resampled"}),
    ],
)
def test_random_and_resampled_trees(name, kinds):
    case = joint_law.CASES[name]
    plan = MethodConfig(
        construction=case.construction, verification=case.verification, ngram=case.ngram,
        budget=BUDGET, levels=case.levels, support=case.support,
        resample_above=case.resample_above,
        resample_budget=2,
    )  # fmt: skip
    engine = joint_law.engine_of(case)
    made = []
    for key in range(20):
        one = GenerateRequest(
            id=str(key), input_ids=engine.prompt, max_tokens=joint_law.TOKENS, draft_trees=True,
            sampling={"temperature": 1.0, "seed": key},
        )  # fmt: skip
        made.append(RequestState(key, one, engine.prompt, CODEC, frozenset()))
    found = outputs_of(Scheduler(engine, joint_law.LIMITS, {TOY: plan}), made)
    origins = sum((check(outputs) for outputs in found.values()), Counter())
    assert set(origins) - {"root"} == kinds


class Again:
    """Drafts 40 tokens below the root, and 40 others from what is left of a chain; those below root 5 are all surer
    than those below root 6."""

    reads_context = reads_text = False

    def draft(self, batch, noise=None):
        return self._tokens(batch.tokens, 0)

    def resample(self, chains, roots, noise=None):
        return self._tokens(roots, 40)

    def _tokens(self, roots, first):
        ids = np.tile(np.arange(first, first + 40, dtype=np.int32), (len(roots), 1, 1, 1))
        scores = -0.01 - np.arange(40) / 1000 - 9 * (roots - 5).reshape(-1, 1, 1, 1)
        return DraftCandidates(ids, scores.astype(np.float32), np.zeros(ids.shape[:3], np.int32))

    def copy(self, source, target, rows):
        raise AssertionError


@pytest.mark.parametrize(("budget", "skip_above", "rows"), [(16, None, (32, 10)), (12, 0, (25, 1))])
def test_no_tree_outgrows_its_limit(budget, skip_above, rows):
    """Of the rows that two sequences share the surer one takes as many as fit beside re-sampled nodes. The other has
    re-sampled nodes beside its new draft or, where it skips that, within its budget."""
    plan = MethodConfig(
        construction="best_first", tree_budget=budget, resample_above=0, resample_budget=4, skip_above=skip_above
    )
    method, sequences = start_method(plan, Again(), 32), []
    for key in range(2):
        one = RequestState(key, GenerateRequest(id="r", input_ids=[1, 2], max_tokens=9), [1, 2], CODEC, frozenset())
        one.prefill(2, np.zeros((1, 2), np.float32))
        one.begin(Verdict([0], [5 + key]))
        one.memory = method.remember(one)
        one.memory.chain = None if skip_above is not None and not key else np.zeros((3, 111), np.float32)
        sequences.append(one)
    assert tuple(map(len, method.draft(Group(sequences), 2).nodes)) == rows


@pytest.mark.parametrize(("odds", "rows"), [(1.0, (5, 5)), (0.02, (9, 1))])
def test_greedy_and_sampled_sequences_share_rows_by_their_fitted_scores(odds, rows):
    """Both have the same n-gram guesses. Where those of sampled answers were fitted to be right less often, the greedy
    sequence takes their rows."""
    scores = (Scores(), Scores(temperature=0.7, ngram_odds=odds))
    config = MethodConfig(construction=None, ngram=True, tree_budget=4, scores=scores)
    method, sequences = Method(config, None, 32), []
    prompt = [*range(1, 13), 1]
    for key, sampling in enumerate(({}, {"temperature": 0.7, "seed": 5})):
        request = GenerateRequest(id="r", input_ids=prompt, max_tokens=20, sampling=sampling)
        one = RequestState(key, request, prompt, CODEC, frozenset())
        one.memory = method.remember(one)
        one.prefill(len(prompt), None)
        one.begin(Verdict([0], [2]))
        sequences.append(one)
    assert tuple(map(len, method.draft(Group(sequences), 2).nodes)) == rows


def test_a_path_ends_with_the_text():
    """A stop word ends it among the accepted nodes; the target's own token is not gained then."""
    one = GenerateRequest(id="r", input_ids=[1, 2], max_tokens=20, stop_words=["STO"], draft_trees=True)
    sequence = RequestState("r", one, [1, 2], CODEC, frozenset())
    sequence.prefill(2, None)
    sequence.begin(Verdict([0], CODEC.encode("a")))
    tokens = CODEC.encode("STOPS")
    nodes = [(1, -1, 0.0), *((token, place, 0.0) for place, token in enumerate(tokens[:-1]))]
    sequence.step(Verdict([0, 1, 2, 3, 4], tokens), None, len(nodes), False, nodes)
    first, last = sequence.take_output().draft_trees
    assert (first.token_ids, first.path, first.gained) == ([2], [0], CODEC.encode("a"))
    assert (last.path, last.gained) == ([0, 1, 2, 3], tokens[:3])


@pytest.mark.parametrize(("guesses", "path"), [([30, 17], [0, 1, 2]), ([30, 0], [0, 1]), ([30], [0, 1])])
def test_a_guessed_end_is_accepted(guesses, path):
    """Though the answer does not have it, and verifiers do not follow it: nothing comes after it."""
    request = GenerateRequest(id="r", input_ids=[1, 2], max_tokens=20, draft_trees=True)
    sequence = RequestState("r", request, [1, 2], CODEC, END_IDS)
    sequence.prefill(2, None)
    sequence.begin(Verdict([0], [3]))
    nodes = [(3, -1, 0.0), *((token, parent, 0.0) for parent, token in enumerate(guesses))]
    sequence.step(Verdict([0, 1], [30, 17]), None, len(nodes), False, nodes)
    _, tree = sequence.take_output().draft_trees
    assert (tree.path, tree.gained) == (path, [30])
    assert sequence.stats.accepted == 1


def test_a_node_is_a_guess_only_where_n_grams_made_it():
    """After the same tokens: the token of a guess is none elsewhere, and the text goes on after the draft."""
    index, proposals = NgramIndex([1, 2, 3, 1, 2]), Proposals()
    grown = [(2, -1, 0.0), (3, 0, -1.0), (7, 0, -2.0), (1, 1, -2.0), (3, 2, -3.0), (5, 1, -4.0)]
    proposals.add("drafter", [(2, -1, 0.0), (3, 0, -1.0), (7, 0, -2.0), (3, 2, -3.0)])
    proposals.add("resampled", [(2, -1, 0.0), (3, 0, -1.0), (5, 1, -3.0)])
    proposals.add_guesses(grown, index)
    index.extend([9])
    nodes = [*grown[:5], (5, 1, -4.0)]
    assert proposals.take(nodes) == ["root", "both", "drafter", "ngrams", "drafter", "resampled"]
    assert proposals.take(nodes[:1]) == ["root"]
