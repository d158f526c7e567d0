"""Prometheus metrics of the gateway. Labels are deployments of the table and small fixed sets, never input.

Series of a deployment or a variant are dropped when it leaves the table, whether the page is read or not.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from iserve.gateway.deployments import Dispatcher
from iserve.gateway.routes_file import RoutesFile
from iserve.gateway.sse import Usage

__all__ = ["GatewayMetrics", "VariantMetrics", "VariantRequestMetrics"]

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """Metrics in a registry of their own; ``page()`` is the text of /metrics."""

    def __init__(self, dispatcher: Dispatcher, routes: RoutesFile) -> None:
        self._dispatcher = dispatcher
        self._registry = registry = CollectorRegistry()
        registry.register(_LiveState(dispatcher, routes))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"iserve_gateway_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Requests answered.", "deployment", "endpoint", "status")
        self._refused = counter("rejected_requests", "Requests rejected before they had a deployment.", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens, as the workers counted them.", "deployment")
        self._completion = counter("completion_tokens", "Generated tokens, as the workers counted.", "deployment")
        self._retries = counter(
            "retries", "Requests sent once more, to a worker that had not begun.", "deployment"
        )
        self._late = counter(
            "late_rejections", "Requests rejected because they would have missed the SLO.", "deployment"
        )
        self._cuts = counter("cut_streams", "Streams that ended in an error frame.", "deployment")
        self._left = counter(
            "client_disconnects", "Clients that left before their answer was complete.", "deployment"
        )
        self._ttft = Histogram(
            "iserve_gateway_time_to_first_token_seconds",
            "Streams: from the request's arrival to the first frame passed on.",
            ("deployment",),
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "iserve_gateway_request_seconds",
            "From the request's arrival to the end of its answer.",
            ("deployment",),
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._statuses: dict[str, set[tuple[str, str]]] = {}
        self.variants = VariantMetrics(registry)

    def answered(self, deployment: str, endpoint: str, status: int, duration_s: float) -> None:
        series = (endpoint, str(status))
        self._statuses.setdefault(deployment, set()).add(series)
        self._requests.labels(deployment, *series).inc()
        self._duration.labels(deployment).observe(duration_s)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def tokens(self, deployment: str, usage: Usage | None) -> None:
        if usage is not None:
            self._prompt.labels(deployment).inc(max(0, usage.prompt_tokens))
            self._completion.labels(deployment).inc(max(0, usage.completion_tokens))

    def first_token(self, deployment: str, ttft_s: float) -> None:
        self._ttft.labels(deployment).observe(ttft_s)

    def retried(self, deployment: str) -> None:
        self._retries.labels(deployment).inc()

    def rejected_late(self, deployment: str) -> None:
        self._late.labels(deployment).inc()

    def cut(self, deployment: str) -> None:
        self._cuts.labels(deployment).inc()

    def client_left(self, deployment: str) -> None:
        self._left.labels(deployment).inc()

    def of_variant(self, variant: str) -> VariantRequestMetrics:
        return VariantRequestMetrics(self, self.variants, variant)

    def _forget(self, deployment: str) -> None:
        for series in self._statuses.pop(deployment, ()):
            self._requests.remove(deployment, *series)
        per_deployment = (self._prompt, self._completion, self._retries, self._late, self._cuts, self._left)
        for metric in (*per_deployment, self._ttft, self._duration):
            metric.remove(deployment)

    def drop_gone(self) -> None:
        """Drop the series of what has left the table; a stream that outlives it may cause them once more."""
        for gone in self._statuses.keys() - self._dispatcher.deployments.keys():
            self._forget(gone)
        self.variants.keep(self._dispatcher.variant_names)

    def page(self) -> bytes:
        self.drop_gone()
        return generate_latest(self._registry)


class VariantMetrics:
    """Series of LoRA variants, of those in the table only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"iserve_gateway_variant_{name}", text, ("variant",), registry=registry)

        def summary(name: str, text: str) -> Summary:  # not a histogram: there may be thousands of variants
            return Summary(f"iserve_gateway_variant_{name}", text, ("variant",), registry=registry)

        self.requests = counter("requests", "Requests answered.")
        self.prompt = counter("prompt_tokens", "Prompt tokens, as the workers counted them.")
        self.completion = counter("completion_tokens", "Generated tokens, as the workers counted.")
        self.ttft = summary(
            "time_to_first_token_seconds", "Streams: from the request's arrival to the first frame passed on."
        )
        self._loads = summary("load_seconds", "Loads at workers, and the time that they took.")
        self._evictions = counter("evictions", "Unloads that made room for another variant.")
        self._seen: set[str] = set()

    def see(self, variant: str) -> None:
        """Note that the variant has series."""
        self._seen.add(variant)

    def loaded(self, variant: str, seconds: float) -> None:
        self.see(variant)
        self._loads.labels(variant).observe(seconds)

    def evicted(self, variant: str) -> None:
        self.see(variant)
        self._evictions.labels(variant).inc()

    def keep(self, variants: Collection[str]) -> None:
        """Drop the series of all but ``variants``."""
        metrics = (self.requests, self.prompt, self.completion, self.ttft, self._loads, self._evictions)
        for gone in [variant for variant in self._seen if variant not in variants]:
            self._seen.discard(gone)
            for metric in metrics:
                metric.remove(gone)


class VariantRequestMetrics:
    """``GatewayMetrics`` for one request of a variant, which counts for its deployment and for the variant."""

    __slots__ = ("_metrics", "_variant", "_variants")

    def __init__(self, metrics: GatewayMetrics, variants: VariantMetrics, variant: str) -> None:
        self._metrics, self._variants, self._variant = metrics, variants, variant
        variants.see(variant)

    def answered(self) -> None:
        self._variants.requests.labels(self._variant).inc()

    def tokens(self, deployment: str, usage: Usage | None) -> None:
        self._metrics.tokens(deployment, usage)
        if usage is not None:
            self._variants.prompt.labels(self._variant).inc(max(0, usage.prompt_tokens))
            self._variants.completion.labels(self._variant).inc(max(0, usage.completion_tokens))

    def first_token(self, deployment: str, ttft_s: float) -> None:
        self._metrics.first_token(deployment, ttft_s)
        self._variants.ttft.labels(self._variant).observe(ttft_s)

    def cut(self, deployment: str) -> None:
        self._metrics.cut(deployment)


class _LiveState:
    """Gauges read from the live objects at each scrape, so that the hot path keeps no second account."""

    def __init__(self, dispatcher: Dispatcher, routes: RoutesFile) -> None:
        self._dispatcher = dispatcher
        self._routes = routes

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "outstanding_requests": ("Requests at a worker.", "num_outstanding"),
            "waiting_requests": ("Requests in the gateway's queue.", "num_waiting"),
            "ready_workers": ("Workers that requests go to.", "num_ready"),
            "pending_loads": ("Loads of variants that were ordered and have not ended.", "num_pending_loads"),
        }
        for name, (text, attribute) in gauges.items():
            gauge = GaugeMetricFamily(f"iserve_gateway_{name}", text, labels=["deployment"])
            for deployment_name, deployment in self._dispatcher.deployments.items():
                gauge.add_metric([deployment_name], getattr(deployment, attribute))
            yield gauge
        yield from self._variant_places()
        table = self._routes.table
        yield GaugeMetricFamily(
            "iserve_gateway_routes_version", "Version of the table in force.", value=table.version if table else 0
        )
        yield CounterMetricFamily(
            "iserve_gateway_rejected_routes", "Route files that could not be used.", value=self._routes.rejected
        )

    def _variant_places(self) -> Iterator[Metric]:
        """Yield how many variants each worker has where, and how many workers have each variant."""
        counts: Counts[tuple[str, str, str]] = Counts()
        workers: Counts[tuple[str, str]] = Counts()
        for name, deployment in self._dispatcher.deployments.items():
            for one in () if deployment.variants is None else deployment.variants.places:
                counts[name, one.worker_id, one.place] += 1
                workers[one.variant, one.place] += 1
        loaded = GaugeMetricFamily(
            "iserve_gateway_loaded_variants",
            "Variants that a worker has, by place: gpu, host or loading.",
            labels=["deployment", "worker", "place"],
        )
        for key, count in counts.items():
            loaded.add_metric(list(key), count)
        yield loaded
        of_variant = GaugeMetricFamily(
            "iserve_gateway_variant_workers",
            "Workers that have a variant, by place: gpu, host or loading.",
            labels=["variant", "place"],
        )
        for named, count in workers.items():
            of_variant.add_metric(list(named), count)
        yield of_variant
