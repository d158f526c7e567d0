"""Least time that a configuration can take on a GPU: bytes over bandwidth, arithmetic over peak, nothing else.

No right measurement or prediction lies below it: of 25 recorded whole models of eleven families none took less
than 1.2 times as long at any point (``tests/bench/results``; ``test_physical_floor.py`` holds that).
"""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimators.roofline import RooflineConstants, RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec

__all__ = ["FLOOR_SHARE", "NOTHING_LOST", "PhysicalFloor"]

# Datasheets give peaks at a boost clock that a cool GPU exceeds by some percent.
FLOOR_SHARE = 0.9
_ONE_STEP_TOKENS = 2**40

NOTHING_LOST = RooflineConstants(
    memory_efficiency=1.0,
    compute_efficiency=1.0,
    quantized_efficiency=1.0,
    activation_passes=0.0,
    link_efficiency=1.0,
    all_reduce_latency_s=0.0,
    all_reduce_hop_s=0.0,
    handover_latency_s=0.0,
    launch_per_layer_s=0.0,
    host_per_step_s=0.0,
    host_per_sequence_s=0.0,
)


class PhysicalFloor(RooflineEstimator):
    """The roofline with every peak attained, all prompts in one step, and of a mixture's experts no more read than
    one token chooses."""

    name = "physical floor"

    def __init__(self, spec: ModelSpec, gpu: GpuSpec) -> None:
        super().__init__(spec, gpu, constants=NOTHING_LOST, max_batched_tokens=_ONE_STEP_TOKENS)

    def ttft_s(self, config: DeploymentConfig, workload: Workload) -> float:
        """Return the least TTFT; prompts that are spread over the stages of a pipeline pass them at once."""
        in_turn_s = super().ttft_s(config, workload)
        if not self._fills_stages(config):
            return in_turn_s
        return max(super().ttft_s(config, replace(workload, batch=1)), in_turn_s / config.pp)

    def tpot_s(self, config: DeploymentConfig, workload: Workload) -> float:
        """Return the least TPOT; a pipeline's batches in flight share the sequences."""
        batches = config.pp if self._fills_stages(config) else 1
        return super().tpot_s(config, replace(workload, batch=max(1, workload.batch // batches)))

    @staticmethod
    def _fills_stages(config: DeploymentConfig) -> bool:
        return config.pp > 1 and traits_of(config.engine).fills_stages

    def allows(self, config: DeploymentConfig, workload: Workload, *, ttft_s: float, tpot_s: float) -> bool:
        """Return whether neither time is below ``FLOOR_SHARE`` of the least possible one.

        An engine that prepares a step while the one before runs hands the first token over up to a step late, so
        n tokens are n - 2 whole steps at least, measured or predicted from what was (Llama-3.1-8B on an H200, 64
        prompts of 2,047: two tokens are 0.87 of the least step apart).
        """
        steps = workload.output_tokens - 1
        least_s = self.tpot_s(config, workload) * max(0, steps - 1)
        return ttft_s >= FLOOR_SHARE * self.ttft_s(config, workload) and tpot_s * steps >= FLOOR_SHARE * least_s

    def _experts_read_fraction(self, tokens: float) -> float:
        """Return the share of the experts that a single token chooses: all may choose the same."""
        spec = self._spec
        return spec.experts_per_token / spec.num_experts if spec.num_experts else 1.0
