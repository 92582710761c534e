"""The metrics. Each is one entry of a table, counted where the thing happens: `metrics[STEPS].inc()`.

An entry has its kind, name, help, labels and, of a histogram, the bounds of its buckets. The end of the name is the
unit, such as `_seconds` or `_tokens`. prometheus_client keeps the values and writes the pages, in which counters end in
`_total`. Names are vLLM's where it has the metric, with `redraft_` instead of `vllm:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.parser import text_string_to_metric_families


class Histogram(prometheus_client.Histogram):
    """A histogram that takes many values at once, too: `observe` takes two locks for each."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Observe all of the values."""
        # prometheus_client has no such call. A value counts in the first bucket whose bound it does not exceed.
        counts = np.bincount(np.searchsorted(self._upper_bounds, values), minlength=len(self._buckets))
        for bucket, count in zip(self._buckets, counts.tolist(), strict=True):
            bucket.inc(count)
        self._sum.inc(sum(values))


M = TypeVar("M", Counter, Gauge, Histogram)
PREFIX = "redraft_"
FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)


@dataclass(frozen=True, eq=False)  # two entries are never the same, and the identity is a fast key
class Metric(Generic[M]):
    """An entry; `name` is without the prefix."""

    kind: type[M]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name on a page, without a histogram's endings."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Counter else ''}"


class Metrics:
    """The values of some entries, all 0 at first."""

    def __init__(self, entries: Iterable[Metric[Any]]):
        self.registry = CollectorRegistry()
        self._values = {
            entry: entry.kind(
                PREFIX + entry.name,
                entry.help,
                entry.labels,
                registry=self.registry,
                **({"buckets": entry.buckets} if entry.buckets else {}),
            )
            for entry in entries
        }

    def __getitem__(self, entry: Metric[M]) -> M:
        """What counts an entry."""
        return self._values[entry]

    def total(self, entry: Metric[Any]) -> float:
        """The value of a counter or gauge, summed over its labels."""
        (family,) = _families(self._values[entry].collect())
        return sum(sample.value for sample in family.samples)

    def page(self) -> bytes:
        """All values in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterable[MetricFamily]:
        """All values, as prometheus_client's writers ask for them."""
        return _families(self.registry.collect())


def _families(collected: Iterable[MetricFamily]) -> Iterator[MetricFamily]:
    """Values without the second series of each counter and histogram, its time of birth. prometheus_client can leave
    these out for the whole process only, which may have metrics of its own."""
    for family in collected:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family


def read(page: str) -> dict[str, float]:
    """The values of our metrics on a page by name, without the prefix, summed over labels; no buckets."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix(PREFIX)
                values[name] = values.get(name, 0.0) + sample.value
    return values


RUNNING = Metric(Gauge, "num_requests_running", "Requests in slots")
WAITING = Metric(Gauge, "num_requests_waiting", "Requests in the queue")
SLOTS = Metric(Gauge, "num_slots", "Requests that can run at once; not in vLLM")
BUNDLE = Metric(Gauge, "bundle_info", "1, for the bundle that is served; not in vLLM", ("bundle", "build"))
CACHE_USE = Metric(Gauge, "kv_cache_usage_perc", "Share of the KV cache's rows in use, 0 to 1")
REQUESTS = Metric(Counter, "requests", "Requests that were taken into the queue; not in vLLM")
ENDED = Metric(Counter, "request_success", "Requests that ended", ("finished_reason",))
PROMPT_TOKENS = Metric(Counter, "prompt_tokens", "Prompt tokens of requests in slots")
GENERATION_TOKENS = Metric(Counter, "generation_tokens", "Generated tokens")
CACHE_QUERIES = Metric(Counter, "prefix_cache_queries", "Prompt tokens of requests that may reuse cached ones")
CACHE_HITS = Metric(Counter, "prefix_cache_hits", "Prompt tokens that were cached")
STEPS = Metric(Counter, "engine_steps", "Target forwards; not in vLLM")
SEQUENCE_STEPS = Metric(Counter, "engine_sequence_steps", "Target forwards times the sequences that decoded in them")
ROWS = Metric(Counter, "engine_rows", "Rows that the target executed, prefill included")
STEP_TIME = Metric(Counter, "step_seconds", "Wall time of all steps")
ENGINE_TIME = Metric(Counter, "engine_seconds", "The part of it inside of the engine")
DRAFT_TIME = Metric(Counter, "draft_seconds", "The part of that inside of drafters")
DRAFTS = Metric(Counter, "spec_decode_num_drafts", "Steps of sequences that verified a draft", ("method",))
DRAFT_TOKENS = Metric(Counter, "spec_decode_num_draft_tokens", "Drafted tokens: all nodes of the trees", ("method",))
EXPECTED_TOKENS = Metric(
    Counter, "spec_decode_num_expected_tokens", "Draft tokens that should have been accepted; not in vLLM", ("method",)
)
STEP_ERROR = Metric(
    Gauge, "step_time_error", "How far predicted times of steps are off, as a share of what the last steps took"
)
ACCEPTED_TOKENS = Metric(Counter, "spec_decode_num_accepted_tokens", "Draft tokens that were accepted", ("method",))
ACCEPTED_AT = Metric(
    Counter,
    "spec_decode_num_accepted_tokens_per_pos",
    "Drafts whose token at this depth was accepted; position 0 is the first",
    ("method", "position"),
)
REUSED_TOKENS = Metric(
    Counter,
    "spec_decode_num_reused_tokens",
    "Accepted tokens that only a re-sampled draft held; not in vLLM",
    ("method",),
)
TEXT_TOKENS = Metric(Gauge, "served_text_tokens", "Tokens of served texts that drafts may come from; not in vLLM")
TEXT_GUESSES = Metric(
    Counter, "served_text_guesses", "Next tokens of greedy answers that served texts guessed; not in vLLM"
)
TEXT_HITS = Metric(Counter, "served_text_hits", "Guesses of these that were right; not in vLLM")
QUEUE_TIME = Metric(
    Histogram, "request_queue_time_seconds", "From arrival at the worker to a slot", buckets=_SECONDS
)  # fmt: skip
FIRST_TOKEN_TIME = Metric(
    Histogram, "time_to_first_token_seconds", "From arrival at the worker to the first token", buckets=_SECONDS
)
STEP_GAP = Metric(
    Histogram,
    "inter_token_latency_seconds",
    "From one output of a sequence to its next: a step, which gives one token or more",
    buckets=_PER_TOKEN_SECONDS,
)
PER_TOKEN_TIME = Metric(
    Histogram,
    "request_time_per_output_token_seconds",
    "Per request, from the first token to the last, over the tokens after the first",
    buckets=_PER_TOKEN_SECONDS,
)
REQUEST_TIME = Metric(
    Histogram, "e2e_request_latency_seconds", "From arrival at the worker to the last token", buckets=_SECONDS
)
ANSWERS_TO_LEARN = Metric(
    Counter,
    "answers_to_learn",
    "Answers for drafters to learn from: stored, short, redacted, opted_out, dropped since too many waited, or "
    "failed; not in vLLM",
    ("outcome",),
)
WORKER_UP = Metric(Gauge, "worker_up", "1 while the worker answers, else 0, and the engine's metrics are missing")
WORKER_RESTARTS = Metric(Gauge, "worker_restarts", "Starts of the engine worker after its first")
RANK_FAILURES = Metric(
    Gauge,
    "rank_failures",
    "Deaths and hangs of a rank that took the worker down; rank -1 is on another machine",
    ("rank",),
)
GENERATION = Metric(
    Gauge, "drafter_generation", "Generation of the drafter that drafts; 0: it has learned nothing from what is served"
)
SEQUENCES = Metric(Gauge, "openai_sequences_running", "Sequences in flight")
ANSWERS = Metric(Counter, "openai_answers", "Answers; status 499: the client left before", ("endpoint", "status"))

ENGINE: tuple[Metric[Any], ...] = (
    *(RUNNING, WAITING, SLOTS, BUNDLE, CACHE_USE, REQUESTS, ENDED),
    *(PROMPT_TOKENS, GENERATION_TOKENS, CACHE_QUERIES, CACHE_HITS),
    *(STEPS, SEQUENCE_STEPS, ROWS, STEP_TIME, STEP_ERROR, ENGINE_TIME, DRAFT_TIME),
    *(DRAFTS, DRAFT_TOKENS, EXPECTED_TOKENS, ACCEPTED_TOKENS, ACCEPTED_AT, REUSED_TOKENS),
    *(TEXT_TOKENS, TEXT_GUESSES, TEXT_HITS),
    *(QUEUE_TIME, FIRST_TOKEN_TIME, STEP_GAP, PER_TOKEN_TIME, REQUEST_TIME),
    ANSWERS_TO_LEARN,
)
"""Counted by the worker."""
SERVICE: tuple[Metric[Any], ...] = (WORKER_UP, WORKER_RESTARTS, RANK_FAILURES, GENERATION)
"""What both pages say of the processes behind them."""
OPENAI: tuple[Metric[Any], ...] = (SEQUENCES, ANSWERS)
"""Counted by the front end of `/v1`, on its page only."""
