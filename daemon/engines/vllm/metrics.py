"""A worker's statistics from vLLM's ``/metrics`` (names of ``v1/metrics/loggers.py``, 0.24 to 0.33)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daemon.worker_stats import WorkerStats
from fingerprint.errors import EngineError

__all__ = ["read_stats"]

_PREFIX = "vllm:"
_READ = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total_count",
)
_LINES = tuple(f"{_PREFIX}{name}{{".encode() for name in _READ)


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    labels: dict[str, str]
    value: float


def read_stats(served_model: str, body: bytes) -> WorkerStats:
    """Figures of the engine in ``/metrics``.

    vLLM reports neither seconds of work per device nor its memory: ``busy`` and ``memory`` are empty, and the
    daemon goes by the driver's utilisation. One block is vLLM's own and counts as neither total nor free, as in
    its ``kv_cache_usage_perc``.

    Raises:
        EngineError: not Prometheus text, or a metric is missing that every release of the range has.
    """
    samples = _samples(body)
    total = sum(_kv_tokens(sample) for sample in _named(samples, "cache_config_info"))
    usage = max(sample.value for sample in _named(samples, "kv_cache_usage_perc"))
    if not 0.0 <= usage <= 1.0:
        raise EngineError(f"vllm reports kv_cache_usage_perc={usage}, a part of 1")
    return WorkerStats(
        model=served_model,
        running=_sum(samples, "num_requests_running"),
        waiting=_sum(samples, "num_requests_waiting"),
        kv_tokens_total=total,
        kv_tokens_free=round(total * (1.0 - usage)),
        prompt_tokens=_sum(samples, "prompt_tokens_total"),
        output_tokens=_sum(samples, "generation_tokens_total"),
        steps=_sum(samples, "iteration_tokens_total_count"),
        busy=(),
        memory=(),
        kv_block_tokens=_label(_named(samples, "cache_config_info")[0], "block_size"),
    )


def _samples(body: bytes) -> list[_Sample]:
    """Return the samples of the few metrics that are read.

    A busy server's 50 kB of histograms take 64 ms to parse, these 3.
    """
    from prometheus_client.parser import text_string_to_metric_families  # slow to import, and used by daemons only

    wanted = b"".join(line + b"\n" for line in body.splitlines() if line.startswith(_LINES))
    try:
        families = list(text_string_to_metric_families(wanted.decode()))
    except (ValueError, KeyError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise EngineError(f"vllm's /metrics is not Prometheus text: {error}") from error
    return [
        _Sample(sample.name.removeprefix(_PREFIX), dict(sample.labels), sample.value)
        for family in families
        for sample in family.samples
    ]


def _named(samples: Iterable[_Sample], name: str) -> list[_Sample]:
    found = [sample for sample in samples if sample.name == name]
    if not found:
        raise EngineError(f"vllm's /metrics has no {_PREFIX}{name}")
    return found


def _sum(samples: Iterable[_Sample], name: str) -> int:
    """Over the engines of one server, of which ours has one."""
    value = sum(sample.value for sample in _named(samples, name))
    if not 0 <= value < 2**63:  # NaN too
        raise EngineError(f"vllm reports {_PREFIX}{name}={value}")
    return int(value)


def _kv_tokens(info: _Sample) -> int:
    return (_label(info, "num_gpu_blocks") - 1) * _label(info, "block_size")


def _label(info: _Sample, name: str) -> int:
    try:
        return int(info.labels[name])
    except (KeyError, ValueError) as error:
        raise EngineError(f"vllm's cache_config_info does not tell its blocks: {error}") from error
