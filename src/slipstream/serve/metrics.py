"""Metrics for Prometheus, under vLLM's names where it has them (`vllm:…` is `slipstream:…` here).

The engine's counts are read for each scrape; only the times of single requests are noted, as they end. So metrics cost
a step nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slipstream.core.outputs import GAP_BOUNDS_S, Snapshot
from slipstream.engine.remote import EngineProcess
from slipstream.serve.admission import Admission
from slipstream.serve.config import ServeConfig
from slipstream.serve.telemetry import AnswerRecord, Record

CONTENT_TYPE = CONTENT_TYPE_LATEST
# fmt: off
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0,
)
# fmt: on
DECISIONS = (
    "Rounds of an answer by drafter. drafted: it had a draft. Else why not: off: no drafter, or all switched off; "
    "plain: to compare with; declined: not expected to pay, or lost lately; no_guess: it had none; "
    "limited: by the request, memory, the pass, or the answer's end; no_pages: the cache is short; "
    "late: not waited for; failed: before."
)
_TOKENS = tuple(float(2**n) for n in range(18))
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


class Metrics:
    """The metrics of one engine. Several servers can live in one process: each has its own registry."""

    def __init__(self, llm: EngineProcess, config: ServeConfig, admission: Admission) -> None:
        model, self._slo = config.models[0], (config.slo_ttft_ms, config.slo_tpot_ms)
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm, model, admission))
        self._model = model
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first, by answer.", GAP_BOUNDS_S
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to the first pass.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._http = Counter(
            "slipstream:http_requests",
            "Requests by endpoint and status; 499: the client went away.",
            ["model_name", "path", "status"],
            registry=self.registry,
        )
        self._good = Counter(
            "slipstream:slo_requests",
            "Ended requests by whether they met --slo-ttft-ms and --slo-tpot-ms; the rate of yes is the goodput.",
            ["model_name", "met"],
            registry=self.registry,
        )

    def observe(self, record: Record) -> None:
        """Note a request that ended."""
        if self._slo != (None, None) and not record.disconnected:
            met = bool(record.answers) and all(map(self._meets_slo, record.answers))
            self._good.labels(self._model, "yes" if met else "no").inc()
        for answer in record.answers:
            self._first.observe(answer.timing.first_token_s)
            self._whole.observe(answer.timing.total_s)
            self._queued.observe(answer.timing.queued_s)
            self._answer.observe(answer.tokens)
            if answer.tokens > 1:
                self._each.observe((answer.timing.total_s - answer.timing.first_token_s) / (answer.tokens - 1))
        if record.answers:
            self._prompt.observe(record.prompt_tokens)

    def _meets_slo(self, answer: AnswerRecord) -> bool:
        (first_ms, each_ms), timing, later = self._slo, answer.timing, answer.tokens - 1
        soon = first_ms is None or timing.first_token_s * 1e3 <= first_ms
        fast = each_ms is None or later < 1 or (timing.total_s - timing.first_token_s) * 1e3 <= each_ms * later
        return answer.finish_reason in ("stop", "length") and soon and fast

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request to any path."""
        self._http.labels(self._model, path, status).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(f"slipstream:{name}", about, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)


class _EngineCollector(Collector):
    """Reads the engine's counts for each scrape."""

    def __init__(self, llm: EngineProcess, model: str, admission: Admission) -> None:
        self._llm = llm
        self._model = model
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        now = self._llm.snapshot()
        yield self._gauge("num_requests_running", "Answers that run.", now.running)
        yield self._gauge("num_requests_waiting", "Answers that wait.", now.waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1.", now.pages_used / now.pages
        )
        yield self._gauge("kv_cache_cached_pages", "Free pages that keep earlier prompts.", now.pages_cached)
        yield self._count("prefix_cache_queries", "Prompt tokens looked up in the cache.", now.prefix_queries)
        yield self._count("prefix_cache_hits", "Prompt tokens found in the cache.", now.prefix_hits)
        gaps = HistogramMetricFamily(
            "slipstream:inter_token_latency_seconds",
            "From a token to the next of its answer; those of one round come together.",
            labels=["model_name"],
        )
        bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
        gaps.add_metric([self._model], [*zip(bounds, accumulate(now.token_gaps), strict=True)], now.token_gaps_s)
        yield gaps
        about = "Memory of a drafter: weights, its part of the cache, workspace, texts."
        name = "slipstream:spec_decode_drafter_memory_bytes"
        yield self._by(GaugeMetricFamily(name, about, labels=["model_name", "drafter"]), now.drafter_bytes)
        yield self._count("num_preemptions", "Answers that had to give back their pages.", now.preemptions)
        refused = now.refused + self._admission.refused
        yield self._count("requests_refused", "Requests answered with 429.", refused)
        yield self._count("prompt_tokens", "Tokens of prompts.", now.prompt_tokens)
        yield self._count("generation_tokens", "Tokens generated.", now.generated_tokens)
        yield self._counts("request_success", "Answers that ended, by reason.", "finished_reason", now.finished)
        yield from self._speculation(now)
        yield self._count("rounds", "Rounds: passes of the target that emitted tokens.", now.rounds)
        parts = {"draft": now.draft_s, "verify": now.verify_s, "host": now.host_s}
        yield self._counts("round_seconds", "Time of rounds, by part.", "part", parts)

    def _speculation(self, now: Snapshot) -> Iterator[Metric]:
        yield self._count("spec_decode_num_drafts", "Drafts.", now.drafts)
        yield self._count("spec_decode_num_draft_tokens", "Tokens drafted.", now.draft_tokens)
        yield self._count("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", now.accepted_tokens)
        yield self._count(
            "spec_decode_num_rolled_back_tokens", "Drafted tokens that were rejected.", now.rejected_tokens
        )
        positions = {str(i): count for i, count in enumerate(now.accepted_by_position)}
        about = "Drafts whose token at this position was accepted."
        yield self._counts("spec_decode_num_accepted_tokens_per_pos", about, "position", positions)
        for key, name, about in (
            ("drafts", "num_drafts", "Drafts, by drafter."),
            ("drafted", "num_draft_tokens", "Tokens drafted, by drafter."),
            ("accepted", "num_accepted_tokens", "Drafted tokens that were accepted, by drafter."),
        ):
            values = {drafter: getattr(stats, key) for drafter, stats in now.drafters.items()}
            yield self._counts(f"spec_decode_{name}_by_drafter", about, "drafter", values)
        drops = CounterMetricFamily(
            "slipstream_drafter_dropped",
            "Answers that went on without a drafter. raised: it raised; invalid: its draft was invalid; late, unread: "
            "it was too slow, and is not asked any more.",
            labels=["model_name", "drafter", "reason"],
        )
        for drafter, reasons in now.drops.items():
            for reason, count in reasons.items():
                drops.add_metric([self._model, drafter, reason], count)
        yield drops
        yield self._counts("spec_decode_drafter_late", "Rounds without a late drafter.", "drafter", now.late)
        about = "Shapes of drafts that are no graph."
        yield self._counts("spec_decode_drafter_unrecorded", about, "drafter", now.unrecorded)
        yield self._counts("spec_decode_decisions", DECISIONS, "reason", now.decisions)
        about = "Measured speed of drafted steps over plain ones, lately, by drafter and batch size."
        yield self._by(
            GaugeMetricFamily("slipstream:spec_decode_gain", about, labels=["model_name", "kind"]), now.gains
        )

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"slipstream:{name}", about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _count(self, name: str, about: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"slipstream:{name}", about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counts(self, name: str, about: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
        return self._by(CounterMetricFamily(f"slipstream:{name}", about, labels=["model_name", label]), values)

    def _by(self, family: Family, values: Mapping[str, float]) -> Family:
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family
