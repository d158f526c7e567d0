"""Another estimator, corrected by checks of running configurations (``fingerprint.verification``).

Times are multiplied by measured over predicted. Memory gets the missing bytes added beside weights and KV cache:
those two are counted, and what an estimate gets wrong is what surrounds them, which does not grow with them.

A check speaks for its own configuration and workload. To all others on the same engine the nearest check is
carried over, and the interval then holds the uncorrected one as well: whether the error is the same there, nobody
measured. Other formats are not left out, though they run other kernels: one ranking never mixes raw sources, and a
check that slowed down what was chosen, alone, would have the next plan choose whatever was not checked yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import Correction, Estimate, Estimator, MemoryEstimate, Quantity
from fingerprint.estimators.fingerprinted import nearest
from fingerprint.verification import Reading, Verification

__all__ = ["CorrectedEstimator"]


class CorrectedEstimator:
    """``base`` with the errors that ``verifications`` found taken out of it.

    Args:
        base: predicts the same model on the same machine and engine that were checked.
        verifications: of one configuration the one measured last counts.
    """

    name = "corrected"

    def __init__(self, base: Estimator, verifications: Sequence[Verification]) -> None:
        self.base = base
        in_order = sorted(verifications, key=lambda verification: verification.measured_at)
        self._checks = {verification.config: verification for verification in in_order}
        self._expected: dict[DeploymentConfig, tuple[Estimate, int]] = {}

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """As ``base``, corrected where a check reaches."""
        raw = self.base.estimate(config, workload)
        alike = [checked for checked in self._checks if checked.engine == config.engine]
        if not alike:
            return raw
        check = self._checks[nearest(config, alike)]
        there, more_bytes = self._of(check)
        exact = (check.config, check.workload) == (config, workload)
        has_room = (check.config, check.room) == (config, workload)
        return replace(
            raw,
            ttft_s=_corrected(raw.ttft_s, check.ttft_s, there.ttft_s, exact=exact),
            tpot_s=_corrected(raw.tpot_s, check.tpot_s, there.tpot_s, exact=exact),
            memory=_with_more(raw.memory, more_bytes, exact=has_room),
            correction=Correction(
                measured_at=check.measured_at,
                config=check.config,
                workload=check.workload,
                exact=exact,
                ttft_log_ratio=_log_ratio(check.ttft_s, there.ttft_s),
                tpot_log_ratio=_log_ratio(check.tpot_s, there.tpot_s),
                memory_bytes=more_bytes,
            ),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the numbers must know: which checks they are corrected by, and how much."""
        return tuple(self._told(check) for check in self._checks.values())

    def _told(self, check: Verification) -> str:
        there, more_bytes = self._of(check)
        work = check.workload
        return (
            f"corrected by the check of {check.config} at {check.measured_at} (batch {work.batch}, "
            f"{work.input_tokens} in, {work.output_tokens} out): TTFT times "
            f"{math.exp(_log_ratio(check.ttft_s, there.ttft_s)):.3g}, TPOT times "
            f"{math.exp(_log_ratio(check.tpot_s, there.tpot_s)):.3g}, {more_bytes / 2**20:+.1f} MiB on each GPU"
        )

    def _of(self, check: Verification) -> tuple[Estimate, int]:
        """What ``base`` says of the check, and the bytes per GPU that it misses."""
        found = self._expected.get(check.config)
        if found is None:
            there = self.base.estimate(check.config, check.workload)
            room = self.base.estimate(check.config, check.room).memory
            held_bytes, more_bytes = check.memory_bytes_per_gpu, 0
            if held_bytes is not None:
                more_bytes = held_bytes - room.per_gpu_bytes(check.layers_per_stage)
            found = self._expected[check.config] = (there, more_bytes)
        return found


def _log_ratio(measured: Reading | None, predicted: Quantity) -> float:
    return 0.0 if measured is None else math.log(measured.value / predicted.value)


def _corrected(raw: Quantity, measured: Reading | None, predicted: Quantity, *, exact: bool) -> Quantity:
    """``raw`` times measured over predicted. The interval is scaled with it, and holds the ratios that the
    measurement's own interval allows, and where it is not ``exact`` the uncorrected one."""
    if measured is None:
        return raw
    ratio = measured.value / predicted.value
    low = min(raw.low * ratio, raw.value * (measured.low / predicted.value))
    high = max(raw.high * ratio, raw.value * (measured.high / predicted.value))
    if not exact:
        low, high = min(low, raw.low), max(high, raw.high)
    return Quantity(raw.value * ratio, low, high, raw.source)


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
