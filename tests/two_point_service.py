"""Service models by two estimates: one request alone, and a whole batch."""

from __future__ import annotations

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.service_model import ServiceModel, service_between

__all__ = ["two_point_service"]


def two_point_service(
    *,
    batch: int,
    input_tokens: int,
    output_tokens: int,
    ttft_s: float,
    tpot_s: float,
    full_ttft_s: float | None = None,
    full_tpot_s: float | None = None,
) -> ServiceModel:
    """Return the model of these times; those of the full batch are those of one where they are left out."""
    return service_between(
        DeploymentConfig(),
        Workload(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens),
        (ttft_s, ttft_s if full_ttft_s is None else full_ttft_s),
        (tpot_s, tpot_s if full_tpot_s is None else full_tpot_s),
    )
