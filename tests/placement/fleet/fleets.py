"""Fleets made by hand for tests: round numbers, so that expected values can be worked out."""

from __future__ import annotations

from fingerprint.config import DeploymentConfig
from fingerprint.service_model import STEP_KNOTS, ServiceModel
from placement.fleet.types import Fleet, FleetDeployment, FleetGpu

GIB = 2**30


def option(
    tp: int = 1,
    *,
    prompt_s: float = 0.1,
    step_s: float = 0.01,
    step_slope_s: float = 0.0001,
    input_tokens: float = 1000,
    output_tokens: float = 101,
    longest_tokens: int = 2000,
    fixed_gib: float = 20,
    kv_bytes_per_token: float = 100_000,
    measured: bool = True,
) -> ServiceModel:
    """Return a configuration whose step of n sequences takes ``step_s + n step_slope_s``, faster by TP."""
    faster = 1 / (1 + 0.7 * (tp - 1))
    return ServiceModel(
        config=DeploymentConfig(tp=tp, engine="vllm"),
        prompt_s=prompt_s * faster,
        step_s=tuple((step_s + n * step_slope_s) * faster for n in STEP_KNOTS),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        longest_tokens=longest_tokens,
        fixed_bytes=int(fixed_gib * GIB / tp),
        kv_bytes_per_token=kv_bytes_per_token / tp,
        is_split_measured=measured,
    )


def gpus(count: int, gib: float = 80) -> tuple[FleetGpu, ...]:
    return tuple(
        FleetGpu(
            node_id="node0",
            device_id=f"gpu{number}",
            gpu_index=number,
            usable_bytes=int(0.95 * gib * GIB),
            total_bytes=int(gib * GIB),
        )
        for number in range(count)
    )


def fleet(models: int, count: int, *, degrees: tuple[int, ...] = (1, 2, 4), **options: float) -> Fleet:
    """Return a fleet of equal deployments."""
    able = tuple(option(tp, **options) for tp in degrees if tp <= count)  # type: ignore[arg-type]
    return Fleet(tuple(FleetDeployment(name=f"m{number}", options=able) for number in range(models)), gpus(count))
