"""BLEU and ROUGE-2 of answers against references, from counts that can be summed and re-sampled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

BLEU_NAME, ROUGE_NAME = "BLEU", "ROUGE-2"
TRANSLATION = "translation"
_ORDERS = 4


@dataclass(frozen=True)
class Measure:
    """A score of answers from their counts float64 [N, C]: `of(counts.sum(axis=0))`, 0 to 100."""

    name: str

    @classmethod
    def for_category(cls, category: str) -> Measure:
        """BLEU for translations, ROUGE-2 for everything else."""
        return cls(BLEU_NAME if category == TRANSLATION else ROUGE_NAME)

    def counts(self, answer: str, references: tuple[str, ...]) -> np.ndarray:
        """Counts float64 [C] of one answer.

        BLEU: matches and n-grams for n = 1 to 4, length and the closest reference's, by sacrebleu's 13a tokens.
        ROUGE-2: F-measure against the best reference, of stemmed words, and 1.
        """
        if self.name == BLEU_NAME:
            score = _bleu().sentence_score(answer, list(references))
            return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)
        return np.array([_rouge().score_multi(references, answer)["rouge2"].fmeasure, 1.0])

    def of(self, total: np.ndarray) -> float:
        """The score of summed counts float64 [C]: corpus BLEU (smoothed as sacrebleu does), mean F-measure."""
        if self.name == BLEU_NAME:
            counts, ngrams = total[:_ORDERS], total[_ORDERS : 2 * _ORDERS]
            length, reference = total[-2:].astype(int).tolist()
            return BLEU.compute_bleu(counts.tolist(), ngrams.tolist(), length, reference, smooth_method="exp").score
        return 100 * float(total[0] / total[1])


@cache
def _bleu() -> BLEU:
    return BLEU(effective_order=True)


@cache
def _rouge() -> RougeScorer:
    return RougeScorer(["rouge2"], use_stemmer=True)
