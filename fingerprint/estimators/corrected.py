"""Another estimator, corrected by checks of running configurations (``fingerprint.verification``).

Times are multiplied by measured over predicted, unless the reading is the less certain of the two: an
interval that holds the whole predicted one corrects nothing. Memory gets the missing bytes added outside weights
and KV cache: those are counted, and what an estimate gets wrong is what surrounds them and does not grow so.

A check is made with all slots full and with one request alone, for the error of a batch is not that of a request.
Between the two batches the logarithm of the ratio goes evenly with that of the batch; a check without the second
has one ratio for all.

A check speaks for its own configuration and workloads. It is carried over to another only where both estimates
rest on the same measurement (``Estimate.measured_config``): the error of what was run shows in all scaled from it.
The error of an estimate that was scaled may be that of the scaling: it never moves the one that was run, only
other estimates scaled from it. The nearest check that reaches counts.

What is carried over is bounded. At other workloads of its own configuration the ratio is one that was measured,
or between two that were; another configuration moves no further than to the end of its own interval, which says
where its truth is for all that was measured of it. Either way the interval holds the uncorrected one as well:
whether the error is the same there was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import (
    Correction,
    Estimate,
    Estimator,
    MemoryEstimate,
    Quantity,
    SteadyState,
    TellsSteadyState,
)
from fingerprint.estimators.fingerprinted import nearest
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost
from fingerprint.verification import Reading, Verification

__all__ = ["CorrectedEstimator"]


class _Ratio(NamedTuple):
    """Measured over predicted, and what the measurement's own interval makes of it, as logarithms."""

    value: float
    low: float
    high: float


class _Found(NamedTuple):
    """Corrections that a check gives the uncorrected estimator; None: the check timed no such thing."""

    ttft: _Ratio | None
    tpot: _Ratio | None
    ttft_alone: _Ratio | None
    tpot_alone: _Ratio | None
    more_bytes: int  # on each GPU
    measured_config: DeploymentConfig | None  # of the uncorrected estimate, as the next
    was_run: bool


class CorrectedEstimator:
    """``base`` with the errors that ``verifications`` found taken out of it.

    Args:
        base: predicts the same model on the same machine and engine that were checked.
        verifications: of one configuration the one measured last counts.
        graph_tokens: of the largest CUDA graph that ``base`` knows; checks with another correct nothing.
    """

    name = "corrected"

    def __init__(
        self, base: Estimator, verifications: Sequence[Verification], *, graph_tokens: int = GRAPH_TOKENS
    ) -> None:
        self.base = base
        alike = (one for one in verifications if one.graph_tokens == graph_tokens and self._is_known(one))
        in_order = sorted(alike, key=lambda verification: verification.measured_at)
        self._checks = {verification.config: verification for verification in in_order}
        self._found: dict[DeploymentConfig, _Found] = {}

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Return the estimate of ``base``, corrected where a check reaches."""
        raw = self.base.estimate(config, workload)
        reaching = [checked for checked, check in self._checks.items() if self._reaches(check, raw)]
        if not reaching:
            return raw
        check = self._checks[nearest(config, reaching)]
        found, is_own = self._of(check), check.config == config
        along = _along(workload.batch, check.workload.batch)
        ttft = _between(found.ttft_alone, found.ttft, along)
        tpot = _between(found.tpot_alone, found.tpot, along)
        timed = [check.workload] + ([] if check.single_request is None else [check.single_request.workload])
        exact = is_own and _usual(workload) in map(_usual, timed)
        has_room = (check.config, check.launch_workload) == (config, workload)
        return replace(
            raw,
            ttft_s=_corrected(raw.ttft_s, ttft if is_own else _within(ttft, raw.ttft_s), exact=exact),
            tpot_s=_corrected(raw.tpot_s, tpot if is_own else _within(tpot, raw.tpot_s), exact=exact),
            memory=_with_more(
                raw.memory,
                found.more_bytes if is_own else _bytes_within(found.more_bytes, raw.memory),
                exact=has_room,
            ),
            correction=Correction(
                measured_at=check.measured_at,
                config=check.config,
                workload=check.workload,
                exact=exact,
                ttft_log_ratio=0.0 if ttft is None else ttft.value,
                tpot_log_ratio=0.0 if tpot is None else tpot.value,
                memory_bytes=found.more_bytes,
            ),
        )

    def _is_known(self, check: Verification) -> bool:
        """Return whether ``base`` has an estimate of what was checked, which of expert parallelism it may lack."""
        if check.config.expert_parallel:
            try:
                self.base.estimate(check.config, check.workload)
            except NotMeasuredError:
                return False
        return True

    def _reaches(self, check: Verification, raw: Estimate) -> bool:
        """Return whether ``check`` applies to ``raw``: what it checked rests on the same measurement, and no less
        directly."""
        if check.config.engine != raw.config.engine:
            return False
        if check.config == raw.config:
            return True
        found = self._of(check)
        return found.measured_config == raw.measured_config and (found.was_run or not raw.is_measured)

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return the hidden time of ``base``, 0 if unknown: a check of whole bursts does not see hidden time."""
        return self.base.steady_state(config) if isinstance(self.base, TellsSteadyState) else SteadyState()

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a line for each check that corrects the estimates, with how much it changes them."""
        return tuple(self._told(check) for check in self._checks.values())

    def _told(self, check: Verification) -> str:
        found, work = self._of(check), check.workload
        alone = ""
        if check.single_request is not None:
            alone = f" (one request alone: {_times(found.ttft_alone)} and {_times(found.tpot_alone)})"
        return (
            f"corrected by the check of {check.config} at {check.measured_at} (batch {work.batch}, "
            f"{work.input_tokens} in, {work.output_tokens} out): TTFT times {_times(found.ttft)}, TPOT times "
            f"{_times(found.tpot)}{alone}, {found.more_bytes / 2**20:+.1f} MiB on each GPU"
        )

    def _of(self, check: Verification) -> _Found:
        found = self._found.get(check.config)
        if found is None:
            there = self.base.estimate(check.config, check.workload)
            room = self.base.estimate(check.config, check.launch_workload).memory
            held_bytes, more_bytes = check.memory_bytes_per_gpu, 0
            if held_bytes is not None:
                more_bytes = held_bytes - room.per_gpu_bytes(check.layers_per_stage)
            ttft_alone = tpot_alone = None
            if check.single_request is not None:
                single = self.base.estimate(check.config, check.single_request.workload)
                ttft_alone = _ratio(check.single_request.ttft_s, single.ttft_s)
                tpot_alone = _ratio(check.single_request.tpot_s, single.tpot_s)
            found = self._found[check.config] = _Found(
                _ratio(check.ttft_s, there.ttft_s),
                _ratio(check.tpot_s, there.tpot_s),
                ttft_alone,
                tpot_alone,
                more_bytes,
                there.measured_config,
                there.is_measured,
            )
        return found


def _usual(workload: Workload) -> Workload:
    """Without what there is room for besides, which no time depends on."""
    return replace(workload, longest_tokens=0)


def _ratio(measured: Reading | None, predicted: Quantity) -> _Ratio | None:
    """None: nothing was measured. A reading that holds all that was predicted taught nothing: a ratio of one."""
    if measured is None:
        return None
    if measured.low < predicted.low <= predicted.high < measured.high:
        return _Ratio(0.0, 0.0, 0.0)
    value, low, high = (math.log(end / predicted.value) for end in (measured.value, measured.low, measured.high))
    return _Ratio(value, low, high)


def _along(batch: int, full: int) -> float:
    """Return how far ``batch`` lies between one request (0) and the ``full`` batch (1), in its logarithm."""
    return 1.0 if full == 1 else min(math.log(batch) / math.log(full), 1.0)


def _between(alone: _Ratio | None, full: _Ratio | None, along: float) -> _Ratio | None:
    if alone is None or full is None:
        return full
    return _Ratio(*(one + along * (other - one) for one, other in zip(alone, full, strict=True)))


def _within(ratio: _Ratio | None, raw: Quantity) -> _Ratio | None:
    """``ratio``, as far as it stays in the interval of ``raw``."""
    if ratio is None:
        return None
    least = -math.inf if raw.low <= 0 else math.log(raw.low / raw.value)
    most = math.log(raw.high / raw.value)
    return _Ratio(*(min(max(part, least), most) for part in ratio))


def _bytes_within(more_bytes: int, raw: MemoryEstimate) -> int:
    """The same of memory."""
    most = int(raw.per_gpu_bytes(even_split(raw.num_layers, raw.pp)) * raw.relative_error)
    return min(max(more_bytes, -most), most)


def _times(ratio: _Ratio | None) -> str:
    return f"{1.0 if ratio is None else math.exp(ratio.value):.3g}"


def _corrected(raw: Quantity, ratio: _Ratio | None, *, exact: bool) -> Quantity:
    """``raw`` times measured over predicted. The interval is scaled with it, and holds the ratios that the
    measurement's own interval allows, and where it is not ``exact`` the uncorrected one."""
    if ratio is None:
        return raw
    times, low_times, high_times = (math.exp(part) for part in ratio)
    low, high = min(raw.low * times, raw.value * low_times), max(raw.high * times, raw.value * high_times)
    if not exact:
        low, high = min(low, raw.low), max(high, raw.high)
    return Quantity(raw.value * times, low, high, raw.source)


def _with_more(raw: MemoryEstimate, more_bytes: int, *, exact: bool) -> MemoryEstimate:
    """``more_bytes`` on each GPU; fewer are taken off what is neither weights nor KV cache, down to nothing."""
    fewer_bytes = min(raw.activation_bytes, max(0, -more_bytes - raw.runtime_bytes))
    corrected = replace(
        raw,
        runtime_bytes=max(0, raw.runtime_bytes + more_bytes),
        activation_bytes=raw.activation_bytes - fewer_bytes,
    )
    if exact or more_bytes == 0:
        return corrected
    split = even_split(raw.num_layers, raw.pp)
    before_bytes, after_bytes = raw.per_gpu_bytes(split), corrected.per_gpu_bytes(split)
    up = before_bytes * (1 + raw.relative_error) / after_bytes - 1
    down = 1 - before_bytes * (1 - raw.relative_error) / after_bytes
    return replace(corrected, relative_error=max(raw.relative_error, up, down))
