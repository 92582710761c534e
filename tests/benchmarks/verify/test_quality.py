"""BLEU and ROUGE-2 from summed counts."""

from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from benchmarks.verify.quality import Measure

ANSWERS = ["the cat sat on the mat", "a dog", "", "the quick brown fox jumps over the lazy dog"]
REFERENCES = [
    ("the cat sits on the mat",),
    ("a dog barked", "one dog"),
    ("nothing",),
    ("the quick fox jumps over the lazy dogs", "the quick brown fox leaps over the lazy dog"),
]


def total(measure):
    return np.sum([measure.counts(answer, texts) for answer, texts in zip(ANSWERS, REFERENCES, strict=True)], axis=0)


def test_summed_counts_give_corpus_bleu():
    measure = Measure.for_category("translation")
    by_place = [[texts[place] if place < len(texts) else None for texts in REFERENCES] for place in range(2)]
    assert measure.of(total(measure)) == pytest.approx(BLEU().corpus_score(ANSWERS, by_place).score)


def test_rouge_2_by_hand():
    """Two of five bigrams match; stemmed words match too; the best reference counts."""
    measure = Measure.for_category("summarization")
    assert measure.of(measure.counts("the cat sat on the mat", ("a cat sat in the mat",))) == pytest.approx(40)
    assert measure.of(measure.counts("dogs barked", ("dog barking",))) == pytest.approx(100)
    assert measure.of(measure.counts("a b c", ("x y z", "a b z"))) == pytest.approx(50)
    counts = measure.counts("a b c", ("a b c",)) + measure.counts("a b c", ("x y z",))
    assert measure.of(counts) == pytest.approx(50)


def test_an_answer_without_words_scores_nothing():
    for category in ("translation", "summarization"):
        measure = Measure.for_category(category)
        assert measure.of(measure.counts("", ("a text",))) == 0
