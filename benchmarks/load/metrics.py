"""What a load test measures: one timeline per request, and the figures drawn from many of them.

Times are seconds on one monotonic clock; figures are milliseconds. TTFT runs from sending a request to its first
text, TPOT = (end-to-end - TTFT) / (tokens - 1), ITL is the time between two streamed chunks, and end-to-end runs from
sending to the last chunk. Speculation delivers several tokens in a chunk: compare it by TPOT, not by ITL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "End-to-end"}


@dataclass
class Timeline:
    """One request as the client saw it."""

    question_id: str
    category: str
    prompt_tokens: int = 0
    scheduled: float = 0.0
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    finished: float = 0.0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float | None:
        """Milliseconds to the first text; None if none came."""
        return 1e3 * (self.chunk_times[0] - self.sent) if self.chunk_times else None

    @property
    def e2el(self) -> float:
        """Milliseconds from sending to the end."""
        return 1e3 * (self.finished - self.sent)

    @property
    def tpot(self) -> float | None:
        """Milliseconds per output token after the first; None for fewer than two tokens."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Milliseconds between consecutive chunks."""
        return (1e3 * np.diff(self.chunk_times)).tolist()

    def to_json(self) -> dict[str, Any]:
        """All fields, times relative to the start of the run as recorded."""
        return asdict(self)


def parse_slo(items: list[str]) -> dict[str, float]:
    """Service level objective from `metric:milliseconds` items, such as `ttft:500 tpot:50`.

    Raises ValueError for an unknown metric or a limit that is not a positive number.
    """
    slo = {}
    for item in items:
        name, _, limit = item.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"goodput: expected ttft, tpot or e2el before the colon, got {item!r}")
        try:
            slo[name] = float(limit)
        except ValueError:
            raise ValueError(f"goodput: expected metric:milliseconds, got {item!r}") from None
        if not slo[name] > 0:
            raise ValueError(f"goodput: expected a limit above 0 ms, got {item!r}")
    return slo


def meets(timeline: Timeline, slo: dict[str, float]) -> bool:
    """Whether a request succeeded within every limit; a figure that one token cannot have counts as met."""
    if timeline.error is not None:
        return False
    values = {"ttft": timeline.ttft, "tpot": timeline.tpot, "e2el": timeline.e2el}
    return all((value := values[name]) is None or value <= limit for name, limit in slo.items())


def distribution(values: list[float]) -> dict[str, float] | None:
    """Mean, standard deviation and percentiles of values; None without any."""
    if not values:
        return None
    array = np.asarray(values, float)
    percentiles = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    return {"mean": float(array.mean()), "std": float(array.std()), **percentiles}


def summarize(timelines: list[Timeline], slo: dict[str, float] | None = None) -> dict[str, Any]:
    """Figures of one run. The duration is from the first request sent to the last one finished."""
    good = [timeline for timeline in timelines if timeline.error is None]
    duration = max(t.finished for t in timelines) - min(t.sent for t in timelines) if timelines else 0.0
    rate = 1 / duration if duration > 0 else 0.0
    output_tokens = sum(t.output_tokens for t in good)
    summary: dict[str, Any] = {
        "requests": len(timelines),
        "completed": len(good),
        "errors": len(timelines) - len(good),
        "error_messages": dict(Counter(t.error for t in timelines if t.error is not None)),
        "duration_s": duration,
        "prompt_tokens": sum(t.prompt_tokens for t in good),
        "output_tokens": output_tokens,
        "request_throughput": len(good) * rate,
        "output_token_throughput": output_tokens * rate,
        "total_token_throughput": (output_tokens + sum(t.prompt_tokens for t in good)) * rate,
        "max_concurrency_seen": concurrency(good),
        "ms_per_token": ms_per_token(good),
        "max_send_delay_ms": 1e3 * max((t.sent - t.scheduled for t in timelines), default=0.0),
        "ttft_ms": distribution([t.ttft for t in good if t.ttft is not None]),
        "tpot_ms": distribution([t.tpot for t in good if t.tpot is not None]),
        "itl_ms": distribution([gap for t in good for gap in t.itl]),
        "e2el_ms": distribution([t.e2el for t in good]),
    }
    if slo:
        summary["slo_ms"] = slo
        summary["goodput"] = sum(meets(t, slo) for t in timelines) * rate
    return summary


def ms_per_token(timelines: list[Timeline]) -> float | None:
    """Mean over requests of end-to-end time per output token, waiting and prefill included."""
    values = [t.e2el / t.output_tokens for t in timelines if t.output_tokens]
    return float(np.mean(values)) if values else None


def concurrency(timelines: list[Timeline]) -> int:
    """Largest number of requests that were in flight at once."""
    events = sorted([(t.sent, 1) for t in timelines] + [(t.finished, -1) for t in timelines])
    return int(np.cumsum([change for _, change in events]).max()) if events else 0


def acceptance(steps: float, drafted: float, accepted: float) -> dict[str, float]:
    """Acceptance length (tokens per step, bonus included) and rate (accepted share of the draft tokens).

    Empty when nothing was drafted: auto-regressive decoding has neither.
    """
    if not steps or not drafted:
        return {}
    return {"acceptance_length": 1 + accepted / steps, "acceptance_rate": accepted / drafted}
