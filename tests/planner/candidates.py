"""Candidates with round figures. Import with ``from tests.planner.candidates import ...``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity, Source
from planner.plan import Candidate, Layout, NoRoom

GIB = 2**30


def estimate(
    config: DeploymentConfig,
    *,
    gib_per_gpu: float = 10.0,
    ttft_s: float = 0.4,
    tpot_s: float = 0.02,
    spread: float = 0.0,
    memory_spread: float = 0.0,
    power_w: float | None = None,
    workload: Workload | None = None,
) -> Estimate:
    """``gib_per_gpu`` on every GPU, times ``1 -+ memory_spread``; times within ``value * (1 -+ spread)``; 101
    output tokens unless said."""

    def quantity(value: float) -> Quantity:
        return Quantity(value, value * (1 - spread), value * (1 + spread), Source.ROOFLINE)

    memory = MemoryEstimate(
        tp=config.tp,
        pp=config.pp,
        num_layers=config.pp,
        layer_weight_bytes=int(gib_per_gpu * GIB),
        layer_kv_bytes=0,
        first_stage_bytes=0,
        last_stage_bytes=0,
        activation_bytes=0,
        pp_buffer_bytes=0,
        runtime_bytes=0,
        relative_error=memory_spread,
        source=Source.ROOFLINE,
    )
    return Estimate(
        config=config,
        workload=workload or Workload(batch=1, input_tokens=512, output_tokens=101),
        memory=memory,
        ttft_s=quantity(ttft_s),
        tpot_s=quantity(tpot_s),
        power_w_per_gpu=None if power_w is None else quantity(power_w),
    )


def full_and_alone(batch: int, *, spread: float = 0.0) -> tuple[Estimate, Estimate]:
    """Return estimates of a batch and of one request alone, which has a TTFT of 0.4 s and a TPOT of 20 ms.

    A batch takes a quarter more for each further request.
    """

    def of_batch(size: int) -> Estimate:
        factor, workload = 1 + (size - 1) / 4, Workload(batch=size, input_tokens=512, output_tokens=101)
        times = {"ttft_s": 0.4 * factor, "tpot_s": 0.02 * factor}
        return estimate(DeploymentConfig(), spread=spread, workload=workload, **times)

    return of_batch(batch), of_batch(1)


def candidate(config: DeploymentConfig, *, refusal: str | None = None, **figures: object) -> Candidate:
    return Candidate(config, estimate(config, **figures), refusal)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Somewhere:
    """A place that is never asked where it is."""

    layers_per_stage: tuple[int, ...] = (1,)


def everything_fits(seen: Estimate) -> Layout | NoRoom:
    return Somewhere()


def fits_below(gib_per_gpu: float) -> Callable[[Estimate], Layout | NoRoom]:
    """A cluster whose every GPU has that much free, and as many GPUs as anybody asks for."""

    def fits(seen: Estimate) -> Layout | NoRoom:
        need = seen.memory.layer_weight_bytes
        if need <= gib_per_gpu * GIB:
            return Somewhere()
        return NoRoom(f"needs {need / GIB:g} GiB, {gib_per_gpu:g} GiB are free", int(need - gib_per_gpu * GIB))

    return fits
