"""The gain of drafts: a running calibration that makes a node's score the chance that it is accepted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

HORIZON, FAST_HORIZON = 2000, 50
"""Drafts of single sequences, the last ones, that the calibration rests on; and those that may prove it wrong."""
PRIOR = (4.0, 8.0)
"""Accepted and expected nodes that stand for what was not seen yet: half of what scores promise, to draft little."""
SURE = 3.0
"""The last drafts replace all before where they are this many standard deviations off: the traffic has changed."""
LEAST_RATIO, MOST_RATIO = 0.02, 1.5
BANDS = (0.0, 0.5, 0.85)
"""Upper ends of the temperature bands, of which the first is greedy; the last band has none."""
COUNT = len(BANDS) + 1


def bands_of(temperatures: Sequence[float]) -> list[int]:
    """The temperature bands of sequences."""
    bands = {temperature: bisect_left(BANDS, temperature) for temperature in set(temperatures)}
    return [bands[temperature] for temperature in temperatures]


@dataclass(config=ConfigDict(extra="forbid", allow_inf_nan=False), kw_only=True)
class Tally:
    """Nodes accepted and expected, by temperature band, old ones fading away."""

    horizon: int = Field(ge=1)
    accepted: list[float] = Field(default_factory=lambda: [PRIOR[0]] * COUNT, min_length=COUNT, max_length=COUNT)
    expected: list[float] = Field(default_factory=lambda: [PRIOR[1]] * COUNT, min_length=COUNT, max_length=COUNT)

    def add(self, band: int, accepted: float, expected: float, drafts: int) -> None:
        """Count `drafts` drafts of a band."""
        keep = (1 - 1 / self.horizon) ** drafts
        self.accepted[band] = keep * self.accepted[band] + accepted
        self.expected[band] = keep * self.expected[band] + expected

    def ratio(self, band: int) -> float:
        """Accepted over expected nodes."""
        return self.accepted[band] / self.expected[band] if self.expected[band] else LEAST_RATIO


class Calibration(BaseModel):
    """What a method's chances are multiplied by, by temperature band: accepted over expected nodes of its last drafts.
    A short tally beside the long one notices when the traffic changes."""

    model_config = ConfigDict(extra="forbid")

    long: Tally = Field(default_factory=lambda: Tally(horizon=HORIZON))
    short: Tally = Field(default_factory=lambda: Tally(horizon=FAST_HORIZON))

    @classmethod
    def measured(cls, ratio: float) -> Calibration:
        """The calibration of a method of whose greedy drafts so much is accepted. Of sampled ones that says nothing."""
        result = cls()
        for tally in (result.long, result.short):
            tally.accepted[0] = ratio * tally.expected[0]
        return result

    def ratios(self, bands: Sequence[int]) -> list[float]:
        """The factors for sequences in these bands."""
        ratios = {band: min(max(self.long.ratio(band), LEAST_RATIO), MOST_RATIO) for band in set(bands)}
        return [ratios[band] for band in bands]

    def observe(self, band: int, accepted: float, expected: float, drafts: int) -> None:
        """Count drafts of sequences in a band: nodes that were accepted, and the sum of all nodes' uncorrected
        chances."""
        self.long.add(band, accepted, expected, drafts)
        self.short.add(band, accepted, expected, drafts)
        if self._changed(band):
            self.long.accepted[band] = self.short.accepted[band]
            self.long.expected[band] = self.short.expected[band]

    def _changed(self, band: int) -> bool:
        """Whether chance does not explain what the short tally has. The nodes of a tree are accepted together, so that
        their number varies about twice as much as if each were by itself."""
        accepted, expected = self.short.accepted[band], self.long.ratio(band) * self.short.expected[band]
        return abs(accepted - expected) > SURE * math.sqrt(2 * max(accepted, expected) + 1)
