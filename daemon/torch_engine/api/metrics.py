"""Prometheus metrics of the worker, prefix ``iserve_worker_``, base units.

Sums and levels are read from the engine at each scrape; only latencies are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from daemon.status import WorkerStats
from daemon.torch_engine.runtime.engine import Totals

__all__ = ["Reading", "WorkerMetrics"]

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Reading:
    """Account of the engine at a scrape."""

    stats: WorkerStats
    totals: Totals
    adapters: int  # loaded now


class WorkerMetrics:
    """Metrics registry of one worker; ``read`` gives its account when scraped."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        prefix = "iserve_worker_"
        self.requests = Counter(
            prefix + "requests", "Finished requests by outcome.", ["route", "outcome"], registry=self._registry
        )
        self._ttft = Histogram(
            prefix + "ttft_seconds", "Time to first token.", buckets=_TTFT_S, registry=self._registry
        )
        self._tpot = Histogram(
            prefix + "tpot_seconds",
            "Time per output token after the first, mean of a sequence.",
            buckets=_TPOT_S,
            registry=self._registry,
        )
        self._e2e = Histogram(
            prefix + "e2e_seconds", "Time to the last token.", buckets=_E2E_S, registry=self._registry
        )
        self._registry.register(self)

    def observe_sequence(self, start_s: float, first_s: float, last_s: float, tokens: int) -> None:
        """Observe a sequence that ended: its submission, its first and last token, how many tokens it has."""
        self._ttft.observe(first_s - start_s)
        self._e2e.observe(last_s - start_s)
        if tokens > 1:
            self._tpot.observe((last_s - first_s) / (tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: else the registry would collect, and so read the engine, on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        stats, totals = reading.stats, reading.totals
        for name, text, value in (
            ("running", "Sequences in a slot.", stats.running),
            ("waiting", "Sequences in the queue.", stats.waiting),
            ("kv_tokens_capacity", "Tokens the KV cache has room for.", stats.kv_tokens_total),
            ("kv_tokens_free", "Of these, not in use.", stats.kv_tokens_free),
            ("adapters", "LoRA adapters that requests may name.", reading.adapters),
        ):
            yield GaugeMetricFamily(f"iserve_worker_{name}", text, value=value)
        for name, text, total in (
            ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("output_tokens", "Tokens generated.", stats.output_tokens),
            ("steps", "Steps of the engine.", stats.steps),
            ("device_seconds", "Time in the model's forward.", totals.device_s),
            ("handover_seconds", "Of that, between pipeline stages.", totals.handover_s),
        ):
            yield CounterMetricFamily(f"iserve_worker_{name}", text, value=total)
        busy = CounterMetricFamily(
            "iserve_worker_busy_seconds", "Time a device executed steps.", labels=["device"]
        )
        for device in stats.busy:
            busy.add_metric([device.device_id], device.busy_s)
        yield busy
        memory = GaugeMetricFamily("iserve_worker_memory_bytes", "Bytes on a rank.", labels=["rank", "kind"])
        for rank in stats.memory:
            for kind in ("weights", "kv", "activation_peak", "pp_buffer", "runtime"):
                memory.add_metric([str(rank.rank), kind], getattr(rank, f"{kind}_bytes"))
        yield memory
