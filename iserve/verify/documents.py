"""A check as it leaves iServe: every figure predicted and measured side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import WorkerStats
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Correction, Estimate, Estimator, Quantity, Source
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.model_spec import ModelSpec
from fingerprint.verification import Reading, Verification
from iserve.api_documents import ProgressDocument

__all__ = [
    "MetricDocument",
    "StoredVerification",
    "VerificationDocument",
    "VerificationJobDocument",
    "kv_room_tokens",
    "verification_document",
]

SERVED = "served: over HTTP, from a burst's first byte sent to its last one read"
_MIB = 2**20  # corrections of memory are shown in tenths of it


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDocument:
    """Figure of a check. ``measured`` None: not reported; ``error`` is measured over predicted, less 1.

    ``corrects``: whether the model's estimates are changed by it. They are not by what is not reported, nor by a
    time that is less certain than what was predicted, nor by memory within 0.05 MiB of the prediction; room that
    was ordered is no estimate.
    """

    name: str
    """Figure: `ttft_s`, `tpot_s`, `memory_bytes_per_gpu` or `kv_tokens`."""
    predicted: float
    """Predicted value; of `kv_tokens` what was ordered."""
    low: float
    """Lower end of the 90% interval; of `kv_tokens` what was ordered."""
    high: float | None
    """Upper end of the 90% interval; None: none."""
    source: Source | None
    """Method of the prediction; None: ordered, not predicted."""
    measured: float | None
    """Measured value; None: not reported."""
    measured_low: float | None
    """Lower end of the measured mean's 90% interval; None: read once."""
    measured_high: float | None
    """Upper end of the measured mean's 90% interval; None: read once."""
    repeats: int
    """Number of repeats."""
    error: float | None
    """Measured over predicted, less 1; None: not reported."""
    within_interval: bool | None
    """Whether the measured value lies within the interval; None: not reported."""
    method: str
    """Method of the measurement, in words."""
    corrects: bool
    """Whether the model's estimates are changed by it."""
    corrects_single_request: bool | None
    """Whether the estimates of one request alone are changed by it; None: not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationDocument:
    """Result of a check."""

    model: str
    """Model that was checked."""
    deployment: str | None
    """Deployment that was checked; None: a worker was launched for the check and ended with it."""
    hardware: str
    """Devices in words."""
    config: DeploymentConfig
    """Configuration that was checked."""
    workload: Workload
    """Workload that was run."""
    measured_at: str
    """Time of the check, ISO 8601 in UTC."""
    metrics: tuple[MetricDocument, ...]
    """Predicted and measured value of each figure."""
    correction_before: Correction | None
    """Correction by an earlier check that the predictions include; None: none."""
    notes: tuple[str, ...]
    """Remarks on the check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationJobDocument:
    """A check that is under way, or was."""

    job_id: str
    """Identifier of the job."""
    model: str
    """Model that is checked."""
    status: str
    """State of the job: `running`, `done` or `failed`."""
    error: str | None
    """Reason of a failure; None: none."""
    progress: ProgressDocument | None
    """Step that is under way; None: none."""
    result: VerificationDocument | None = None
    """Findings of the check; None: not done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVerification:
    """A check that is kept. It corrects every model of its shape on its engine, while it is ``in_force``: the
    devices, the driver, the engine's version and its largest CUDA graph are as they were."""

    model: str
    """Model that was checked."""
    shape_hash: str
    """Hash of the model's shape; models with the same shape share the correction."""
    engine: str
    """Engine that was checked."""
    in_force: bool
    """Whether estimates are corrected by it."""
    verification: Verification
    """Measurements of the check."""


def verification_document(
    verification: Verification,
    predicted: Estimate,
    *,
    base: Estimator,
    model: str,
    deployment: str | None,
    hardware: str,
    spec: WorkerSpec,
    stats: WorkerStats | None,
    memory_how: str,
    notes: tuple[str, ...],
) -> VerificationDocument:
    """Return the check with ``predicted``, what the plan said of just that configuration and workload.

    Args:
        base: what the check corrects: the estimator without any check's correction.
        stats: the worker's own account; None: it gave none.
        memory_how: how the memory was counted, or why it was not.
    """
    taught, of_alone = _taught(base, verification)
    ttft = taught.ttft_log_ratio, None if of_alone is None else of_alone.ttft_log_ratio
    metrics = [_time("ttft_s", predicted.ttft_s, verification.ttft_s, *ttft)]
    if verification.tpot_s is not None:
        tpot = taught.tpot_log_ratio, None if of_alone is None else of_alone.tpot_log_ratio
        metrics.append(_time("tpot_s", predicted.tpot_s, verification.tpot_s, *tpot))
    memory = _memory(verification, predicted, memory_how)
    metrics += [
        replace(memory, corrects=round(taught.memory_bytes / _MIB, 1) != 0),
        _kv(verification, spec, stats),
    ]
    return VerificationDocument(
        model=model,
        deployment=deployment,
        hardware=hardware,
        config=verification.config,
        workload=verification.workload,
        measured_at=verification.measured_at,
        metrics=tuple(metrics),
        correction_before=predicted.correction,
        notes=notes,
    )


def _taught(base: Estimator, check: Verification) -> tuple[Correction, Correction | None]:
    """Return the corrections of the check's own two workloads; of one request alone, if that was timed."""
    corrected = CorrectedEstimator(base, (check,), graph_tokens=check.graph_tokens)
    run = [check.workload] + ([] if check.single_request is None else [check.single_request.workload])
    found = [corrected.estimate(check.config, workload).correction for workload in run]
    assert found[0] is not None, "it is what was checked"
    return found[0], found[1] if len(found) > 1 else None


def _time(
    name: str, predicted: Quantity, measured: Reading, log_ratio: float, log_ratio_alone: float | None
) -> MetricDocument:
    ends = predicted.value, predicted.low, predicted.high
    return replace(
        _read_once(name, *ends, predicted.source, measured.value, SERVED),
        measured_low=measured.low,
        measured_high=measured.high,
        repeats=measured.repeats,
        corrects=log_ratio != 0,
        corrects_single_request=None if log_ratio_alone is None else log_ratio_alone != 0,
    )


def _memory(verification: Verification, predicted: Estimate, how: str) -> MetricDocument:
    memory, measured = predicted.memory, verification.memory_bytes_per_gpu
    value = memory.per_gpu_bytes(verification.layers_per_stage)
    low, high = value * (1 - memory.relative_error), value * (1 + memory.relative_error)
    return _read_once("memory_bytes_per_gpu", value, low, high, memory.source, measured, how)


def kv_room_tokens(stats: WorkerStats | None, model: ModelSpec) -> int | None:
    """Return the tokens that the engine says its cache holds; None: it does not, or ``model`` keeps none of them.

    Of states alone vLLM counts blocks of 16 tokens, which are a sequence each.
    """
    return None if stats is None or not model.keeps_tokens else stats.kv_tokens_total or None


def _kv(verification: Verification, spec: WorkerSpec, stats: WorkerStats | None) -> MetricDocument:
    ordered, measured = spec.limits.kv_tokens, verification.kv_tokens
    if stats is None or measured is None:
        how = "not reported by the engine"
    elif stats.kv_block_tokens:
        how = f"the engine's own report: {measured // stats.kv_block_tokens} blocks of {stats.kv_block_tokens}"
    else:
        how = "the engine's own report; its cache has no blocks"
    return _read_once("kv_tokens", ordered, ordered, None, None, measured, how)


def _read_once(
    name: str,
    predicted: float,
    low: float,
    high: float | None,
    source: Source | None,
    measured: float | None,
    how: str,
) -> MetricDocument:
    inside = None if measured is None else low <= measured and (high is None or measured <= high)
    return MetricDocument(
        name=name,
        predicted=predicted,
        low=low,
        high=high,
        source=source,
        measured=measured,
        measured_low=None,
        measured_high=None,
        repeats=0 if measured is None else 1,
        error=None if measured is None else measured / predicted - 1,
        within_interval=inside,
        method=how,
        corrects=False,
        corrects_single_request=None,
    )
