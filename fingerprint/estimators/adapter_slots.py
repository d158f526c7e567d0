"""Memory and time of adapter slots on top of an estimate of the base alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate, Quantity, Source, TellsHiddenTime
from fingerprint.lora.slot_bytes import reserved_bytes
from fingerprint.model_spec import ModelSpec

__all__ = ["ADDED_ERROR", "WithAdapterSlots", "added_prompt_share", "added_step_s", "load_s"]

# Fitted on one recording: vLLM 0.33 on an H200, Llama-3.1-8B, 8 and 32 slots of rank 64, 32 and 128 rows, 1 to 32
# adapters (``tests.bench.lora_steps``). Ten added times are met within 5.2%, each from the other nine within 12%.
# Kernels start a program for every tile of rows and every slot, of which those of adapters in use compute; each
# layer has the same ones. Seconds of one layer:
_ALWAYS_S = 3.24e-6
_ROW_S = 9.56e-7
_ADAPTER_S = 1.307e-5
_ROW_AND_ADAPTER_S = 2.067e-7
_ROW_AND_SLOT_S = 5.65e-8
_PROMPT_SHARE, _PROMPT_SHARE_OF_SLOT = 0.455, 0.0121  # of a prompt's time, of the same recording
# Of a load from the page cache, by least squares of relative errors over the recording's twelve (ranks 8, 16, 64).
# Means of a rank are met within 10%, single loads within 24%.
_LOAD_S, _LOAD_BYTES_PER_S = 0.0533, 1.274e9
ADDED_ERROR = (
    2.0  # factor by which the added time may be off, on another model, GPU, release or rank: not measured
)


def added_step_s(num_layers: int, rows: float, active: float, slots: int) -> float:
    """Return the time that ``active`` adapters, one at least, add to a decode step of ``rows`` sequences.

    Estimated, of vLLM alone.
    """
    active = max(1.0, active)
    layer_s = (
        _ALWAYS_S + _ADAPTER_S * active + rows * (_ROW_S + _ROW_AND_ADAPTER_S * active + _ROW_AND_SLOT_S * slots)
    )
    return num_layers * layer_s


def added_prompt_share(slots: int) -> float:
    """Return the time that an adapter adds to a prompt, as a share of its time: estimated, of vLLM alone."""
    return _PROMPT_SHARE + _PROMPT_SHARE_OF_SLOT * slots


def load_s(num_bytes: int) -> float:
    """Return the time of a load of an adapter from the page cache, in which its worker decodes nothing.

    Estimated, of vLLM alone; a file that is not in the page cache takes longer.
    """
    return _LOAD_S + num_bytes / _LOAD_BYTES_PER_S


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
        step_s = added_step_s(self._spec.num_layers, workload.batch, active, config.adapter_slots)
        prompt_s = added_prompt_share(config.adapter_slots) * found.ttft_s.value
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
