"""Memory and time of adapter slots on top of an estimate of the base alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate, Quantity, Source, TellsHiddenTime
from fingerprint.lora.slot_bytes import reserved_bytes
from fingerprint.model_spec import ModelSpec

__all__ = ["ADDED_ERROR", "PROMPT_FACTOR", "WithAdapterSlots", "added_step_s"]

# vLLM 0.24 on an H200, Llama-3.1-8B, 32 rows: a step of 5.20 ms became 7.80 with one adapter of rank 16 and 10.50
# with eight; a prompt of 2,048 tokens 70.6 ms for 49.9, eight of 512 137.1 for 98.1. Launches of small kernels are
# most of it, so that it is taken to go with the layers and not with their size.
_FIRST_S = (7.80e-3 - 5.20e-3) / 32  # of a layer, for the first adapter of a step
_FURTHER_S = (10.50e-3 - 7.80e-3) / 7 / 32  # of a layer, for each further one
PROMPT_FACTOR = 1.40
ADDED_ERROR = 2.0  # factor by which the added time may be off, on another GPU, release or rank: not measured


def added_step_s(num_layers: int, active: float) -> float:
    """Return the time that ``active`` adapters add to a decode step, one at least: estimated, of vLLM alone."""
    return num_layers * (_FIRST_S + _FURTHER_S * (max(1.0, active) - 1))


class WithAdapterSlots:
    """``base`` for configurations with adapter slots; the rest is as ``base`` says.

    All requests are taken to ask for an adapter. On an engine on which adapters were not timed they take memory
    alone.

    Args:
        distinct: returns how many adapters so many requests ask for on average.
    """

    def __init__(self, base: Estimator, spec: ModelSpec, distinct: Callable[[float], float]) -> None:
        self.name = f"{base.name}, with adapters"
        self.base, self._spec, self._distinct = base, spec, distinct

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, with the slots in memory and the time of adapters in every step."""
        plain = self.base.estimate(config.without_slots, workload)
        if not config.adapter_slots:
            return plain
        found = replace(plain, config=config, memory=self._with_slots(plain.memory, config))
        if not traits_of(config.engine).times_adapters:
            return found
        active = min(config.adapter_slots, self._distinct(workload.batch))
        step_s = added_step_s(self._spec.num_layers, active)
        prompt_s = (PROMPT_FACTOR - 1) * found.ttft_s.value
        return replace(found, ttft_s=_later(found.ttft_s, prompt_s), tpot_s=_later(found.tpot_s, step_s))

    def _with_slots(self, memory: MemoryEstimate, config: DeploymentConfig) -> MemoryEstimate:
        """Return ``memory`` with the room of slots: a part for each layer, and what every GPU has."""
        every_gpu = reserved_bytes(self._spec, config, 0)
        layer_bytes = reserved_bytes(self._spec, config, 1) - every_gpu
        return replace(
            memory,
            layer_weight_bytes=memory.layer_weight_bytes + layer_bytes,
            runtime_bytes=memory.runtime_bytes + every_gpu,
        )

    def hidden_s(self, config: DeploymentConfig) -> float:
        """Return that of ``base``, where it has one (``estimates.TellsHiddenTime``)."""
        return self.base.hidden_s(config.without_slots) if isinstance(self.base, TellsHiddenTime) else 0.0


def _later(time: Quantity, added_s: float) -> Quantity:
    source = Source.SCALED if time.source is not Source.ROOFLINE else time.source
    return Quantity(
        time.value + added_s, time.low + added_s / ADDED_ERROR, time.high + added_s * ADDED_ERROR, source
    )
