"""What a load test measures: one timeline per request, and the figures drawn from many of them.

Times are seconds on one monotonic clock; figures are milliseconds. They count from the moment at which a request was
due, so that a generator or a server that is late does not hide it. TTFT runs to the first text, end-to-end to the
last chunk, TPOT = (end-to-end - TTFT) / (tokens - 1), and ITL is the time between two streamed chunks. Speculation
delivers several tokens in a chunk: compare it by TPOT, not by ITL.
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
    turn: int = 0
    """Its place in its conversation"""
    due: float = 0.0
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
        return 1e3 * (self.chunk_times[0] - self.due) if self.chunk_times else None

    @property
    def e2el(self) -> float:
        """Milliseconds to the end."""
        return 1e3 * (self.finished - self.due)

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
        """All fields, times as recorded."""
        return asdict(self)

    def tokens_within(self, window: Window) -> float:
        """Output tokens that came in the window; a chunk counts as an equal share of the answer."""
        if not self.chunk_times:
            return 0.0
        return self.output_tokens * sum(map(window.holds, self.chunk_times)) / len(self.chunk_times)


@dataclass(frozen=True)
class Window:
    """A span of time, seconds."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin

    def holds(self, moment: float) -> bool:
        """Whether a moment is in it, its ends included."""
        return self.begin <= moment <= self.end


def whole_run(timelines: list[Timeline]) -> Window:
    """From the first request that was due to the last that ended."""
    return Window(min(t.due for t in timelines), max(t.finished for t in timelines))


def steady_window(timelines: list[Timeline], ramp_s: float) -> Window | None:
    """The part of a run in which the load is constant: without its first `ramp_s` seconds, while the number of requests
    in flight rises, and without the tail after the last conversation was due. None where nothing is left, as where all
    requests are due at once."""
    starts = [t.due for t in timelines if t.turn == 0]
    window = Window(min(starts) + ramp_s, max(starts)) if starts else None
    return window if window is not None and window.seconds > 0 else None


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


def summarize(
    timelines: list[Timeline], slo: dict[str, float] | None = None, window: Window | None = None
) -> dict[str, Any]:
    """Figures of one run, or of a window in it.

    Latencies are those of the requests that were due in the window. Tokens count when they came in it, and requests
    when they ended in it, whenever they were due. In a part of a run, requests count when they ended in the window
    moved by the median latency: a service that keeps up ends as many as are due, even where answers take longer than
    the ramp.
    """
    part = window is not None
    if not timelines:
        window = Window(0.0, 0.0)
    window = window or whole_run(timelines)
    counted = [t for t in timelines if window.holds(t.due)]
    good = [t for t in counted if t.error is None]
    answered = [t for t in timelines if t.error is None]
    delay = float(np.median([t.e2el for t in good])) / 1e3 if part and good else 0.0
    ended = [t for t in answered if window.holds(t.finished - delay)]
    rate = 1 / window.seconds if window.seconds > 0 else 0.0
    tokens_per_s = rate * sum(t.tokens_within(window) for t in answered)
    summary: dict[str, Any] = {
        "requests": len(counted),
        "completed": len(good),
        "errors": len(counted) - len(good),
        "error_messages": dict(Counter(t.error for t in counted if t.error is not None)),
        "duration_s": window.seconds,
        "prompt_tokens": sum(t.prompt_tokens for t in good),
        "output_tokens": sum(t.output_tokens for t in good),
        "requests_due_per_s": len(counted) * rate,
        "request_throughput": len(ended) * rate,
        "output_token_throughput": tokens_per_s,
        "total_token_throughput": tokens_per_s + rate * sum(t.prompt_tokens for t in ended),
        "max_concurrency_seen": concurrency(answered, window),
        "ms_per_token": ms_per_token(good),
        "max_send_delay_ms": 1e3 * max((t.sent - t.due for t in counted), default=0.0),
        "ttft_ms": distribution([t.ttft for t in good if t.ttft is not None]),
        "tpot_ms": distribution([t.tpot for t in good if t.tpot is not None]),
        "itl_ms": distribution([gap for t in good for gap in t.itl]),
        "e2el_ms": distribution([t.e2el for t in good]),
    }
    if slo:
        summary["slo_ms"] = slo
        summary["goodput"] = sum(meets(t, slo) for t in counted) * rate
    return summary


def ms_per_token(timelines: list[Timeline]) -> float | None:
    """Mean over requests of end-to-end time per output token, waiting and prefill included."""
    values = [t.e2el / t.output_tokens for t in timelines if t.output_tokens]
    return float(np.mean(values)) if values else None


def concurrency(timelines: list[Timeline], window: Window) -> int:
    """Largest number of requests that were in flight at once in the window, whenever they were due."""
    inside = [t for t in timelines if t.sent <= window.end and t.finished > window.begin]
    events = sorted([(t.sent, 1) for t in inside] + [(t.finished, -1) for t in inside])
    return int(np.cumsum([change for _, change in events]).max()) if events else 0


def acceptance(steps: float, drafted: float, accepted: float) -> dict[str, float]:
    """Acceptance length (tokens per step, bonus included) and rate (accepted share of the draft tokens).

    Empty when nothing was drafted: auto-regressive decoding has neither.
    """
    if not steps or not drafted:
        return {}
    return {"acceptance_length": 1 + accepted / steps, "acceptance_rate": accepted / drafted}
