"""Memory and time of adapter slots on top of an estimate of the base alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import (
    Estimate,
    Estimator,
    MemoryEstimate,
    Quantity,
    Source,
    SteadyState,
    TellsSteadyState,
)
from fingerprint.estimators.delta_slots import added_delta_step_s, delta_prompt_s
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost
from fingerprint.load_time import RECORDED_TENSORS, recorded_load_s
from fingerprint.load_waits import OneLoad
from fingerprint.lora.slot_bytes import adapter_bytes, adapter_tensors, largest_delta_bytes, reserved_bytes
from fingerprint.model_spec import ModelSpec

__all__ = [
    "ADDED_ERROR",
    "MOST_KERNEL_ROWS",
    "TAKES_DELTA_PROMPTS",
    "WithAdapterSlots",
    "added_prompt_share",
    "added_step_s",
    "kernel_cost",
    "kernel_step_s",
    "later",
    "load_s",
    "loads_stop_steps",
    "requests_within",
    "variant_cost",
    "variant_load_s",
]

# Fitted on one recording: vLLM 0.33 on an H200, Llama-3.1-8B, 8 and 32 slots of rank 64, 32 and 128 rows, 1 to 32
# adapters (``tests.bench.lora_steps``). Ten added times are met within 5.2%, each from the other nine within 12%.
# Kernels start a program for every tile of rows and every slot, of which those of adapters in use compute; each
# layer has the same ones. Seconds of one layer:
_ALWAYS_S = 3.24e-6
_ROW_S = 9.56e-7
_ADAPTER_S = 1.307e-5
_ROW_AND_ADAPTER_S = 2.067e-7
_ROW_AND_SLOT_S = 5.65e-8
# Empty slots skip these kernels and cost a little. Of four added times (0.02 to 0.88 ms, two bursts of one case
# up to 0.86 ms apart) each is met within 0.13 ms from the other three: the interval begins at nothing for that.
_ROW_AND_ROOT_OF_SLOTS_S = 3.71e-8
_PROMPT_SHARE, _PROMPT_SHARE_OF_SLOT = 0.455, 0.0121  # of a prompt's time, of the same recording
_PROMPT_SHARE_OF_BASE = 0.044  # 0.033 to 0.066, without a trend by slots; each from the other three within 0.03
# Our kernels of adapters (docs/decisions/0054), by themselves after the linears of a layer of Qwen3-8B on an H200:
# 25 times of 1 to 1,024 rows, 1 to 32 adapters and ranks 8 to 64, met within 20%, three quarters of them within 9%
# (``tests.bench.test_adapter_kernel_law``). Seconds of one layer; those of rank 16 grow with the rank:
_KERNELS_S, _KERNELS_ROW_S = 1.175e-5, 8.414e-8
_KERNELS_RANK_16_S, _KERNELS_ADAPTER_OF_RANK_16_S = 6.640e-6, 6.109e-7
MOST_KERNEL_ROWS, _KERNEL_RANKS = 1024, (8, 16, 32, 64)  # which they serve; all else is vLLM's
TAKES_DELTA_PROMPTS = False
"""Whether plans for vLLM take prompts of deltas as profiles measure them, as they take those of adapters. Whole
models on an H200 judged both laws: that of adapters held; that of deltas was changed after the first model, and on
the second was not clearly nearer than the recording, whose times plans keep (docs/decisions/0053)."""
_ALL = 1e15  # requests, which ask for every variant
_HALVINGS = 50
ADDED_ERROR = (
    2.0  # factor by which the added time may be off, on another model, GPU, release or rank: not measured
)


def added_step_s(num_layers: int, rows: float, active: float, slots: int) -> float:
    """Return the time that ``slots`` add to a decode step of ``rows`` sequences with ``active`` adapters.

    Below one, ``active`` is the share of steps with one adapter; the rest are steps of the base alone. All rows
    count as rows of adapters where there is one. Estimated, of vLLM alone.
    """
    empty_s = rows * _ROW_AND_ROOT_OF_SLOTS_S * math.sqrt(slots)
    if not slots or not active:
        return num_layers * empty_s
    used = max(1.0, active)
    layer_s = _ALWAYS_S + _ADAPTER_S * used + rows * (_ROW_S + _ROW_AND_ADAPTER_S * used + _ROW_AND_SLOT_S * slots)
    share = min(1.0, active)
    return num_layers * (share * layer_s + (1 - share) * empty_s)


def kernel_step_s(num_layers: int, rows: float, active: float, rank: int) -> float:
    """Return the time that our kernels of adapters add to a decode step, on vLLM; arguments as ``added_step_s``.

    Empty slots add nothing.
    """
    used = max(1.0, active)
    layer_s = _KERNELS_S + rows * _KERNELS_ROW_S
    layer_s += rank / 16 * (_KERNELS_RANK_16_S + _KERNELS_ADAPTER_OF_RANK_16_S * used)
    return num_layers * min(1.0, active) * layer_s


def added_prompt_share(slots: int, base_share: float = 0.0) -> float:
    """Return the time that slots add to the mean prompt, as a share of it: estimated, of vLLM alone.

    Args:
        base_share: prompts without an adapter, as a share of all.
    """
    if not slots:
        return 0.0
    return base_share * _PROMPT_SHARE_OF_BASE + (1 - base_share) * (_PROMPT_SHARE + _PROMPT_SHARE_OF_SLOT * slots)


def load_s(num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
    """Return the time of a load of an adapter or delta from the page cache, in which its worker decodes nothing.

    Estimated, of vLLM alone, from adapters of up to 88 MB; a delta of 2.3 GB took 2.7 s where this says 1.8
    (docs/decisions/0053). A file that is not in the page cache takes longer.
    """
    return recorded_load_s(num_bytes, num_tensors)


def variant_load_s(cost: VariantCost, spec: ModelSpec, config: DeploymentConfig, rank: int = 0) -> float:
    """Return the time of a load of the largest variant that slots of ``config`` hold.

    Args:
        rank: of adapters; 0: the slots'.
    """
    if delta_bytes := largest_delta_bytes(spec, config):
        return cost.load_s(delta_bytes)
    return cost.load_s(adapter_bytes(spec, rank or config.adapter_rank), adapter_tensors(spec))


def loads_stop_steps(config: DeploymentConfig) -> bool:
    """Return whether a worker decodes nothing while it loads a variant.

    So it is on vLLM, but for deltas: our plug-in reads them next to the steps, of which the longest took 1.2 to
    1.5 times the median on an H200 (docs/decisions/0048); on several GPUs that was not measured. Slots with a size
    for deltas, which only simulations assume on vLLM, are taken to follow the plug-in's law too.
    """
    in_background = config.has_delta_slots or config.delta_mib > 0
    return traits_of(config.engine).loads_stop_steps and not in_background


def variant_cost(estimator: object, spec: ModelSpec, config: DeploymentConfig) -> VariantCost | None:
    """Return what variants in the slots of ``config`` take; None: there are none, or it is not known.

    It is measured where ``estimator`` has it from fingerprints, else scaled from a recording, of vLLM alone.
    Prompts of deltas on vLLM are always scaled: measured ones were not clearly nearer (``TAKES_DELTA_PROMPTS``).
    """
    if not config.adapter_slots:
        return None
    measured = estimator.variant_cost(config) if isinstance(estimator, TellsVariantCost) else None
    if not traits_of(config.engine).times_adapters:
        return measured
    delta_bytes = largest_delta_bytes(spec, config)
    recorded = (
        _RecordedDeltas(delta_bytes) if delta_bytes else _RecordedAdapters(spec.num_layers, config.adapter_slots)
    )
    if measured is None:
        return recorded
    takes_prompts = measured.has_measured_prompts and (TAKES_DELTA_PROMPTS or not delta_bytes)
    return measured if takes_prompts else _WithRecordedPrompts(measured, recorded)


def kernel_cost(spec: ModelSpec, config: DeploymentConfig) -> VariantCost | None:
    """Return what adapters in the slots of ``config`` take by our kernels, from a recording; None: by vLLM's."""
    is_of_adapters = config.adapter_slots and not largest_delta_bytes(spec, config)
    if not is_of_adapters or config.adapter_rank not in _KERNEL_RANKS:
        return None
    return _RecordedKernels(spec.num_layers, config.adapter_slots, config.adapter_rank)


class _Recorded(VariantCost):
    """Time of variants by recordings of Llama-3.1-8B on an H200: half to twice of it on another model or GPU."""

    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        return load_s(num_bytes, num_tensors)

    @staticmethod
    def _quantity(value: float, least: float | None = None) -> Quantity:
        return Quantity(
            value, (value if least is None else least) / ADDED_ERROR, value * ADDED_ERROR, Source.SCALED
        )


class _RecordedAdapters(_Recorded):
    def __init__(self, num_layers: int, slots: int) -> None:
        self._layers, self._slots = num_layers, slots
        self.prompt_share = added_prompt_share(slots)

    def step_s(self, rows: float, active: float) -> Quantity:
        return self._quantity(added_step_s(self._layers, rows, active, self._slots))

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        added_s = added_prompt_share(self._slots, base_share) * ttft_s
        return self._quantity(added_s, (1 - base_share) * added_prompt_share(self._slots) * ttft_s)


class _RecordedKernels(_RecordedAdapters):
    """Adapters by our kernels: steps as these take, prompts as vLLM's."""

    has_measured_prompts = False

    def __init__(self, num_layers: int, slots: int, rank: int) -> None:
        super().__init__(num_layers, slots)
        self._rank = rank

    def step_s(self, rows: float, active: float) -> Quantity:
        if rows > MOST_KERNEL_ROWS:
            return super().step_s(rows, active)
        return self._quantity(kernel_step_s(self._layers, rows, active, self._rank))


class _RecordedDeltas(_Recorded):
    def __init__(self, delta_bytes: int) -> None:
        self._bytes = delta_bytes
        self.prompt_s = partial(delta_prompt_s, delta_bytes)

    def step_s(self, rows: float, active: float) -> Quantity:
        return self._quantity(added_delta_step_s(self._bytes, rows, active))

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        return self._quantity((1 - base_share) * delta_prompt_s(self._bytes, workload.input_tokens))


class _WithRecordedPrompts(VariantCost):
    """Steps and loads as measured, prompts as recorded (docs/decisions/0053)."""

    has_measured_prompts = False

    def __init__(self, measured: VariantCost, recorded: VariantCost) -> None:
        self._steps, self._prompts = measured, recorded
        self.measured, self.is_exact = measured.measured, measured.is_exact
        self.prompt_share, self.prompt_s = recorded.prompt_share, recorded.prompt_s

    def step_s(self, rows: float, active: float) -> Quantity:
        return self._steps.step_s(rows, active)

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        return self._prompts.prompts_s(workload, ttft_s, base_share, distinct)

    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        return self._steps.load_s(num_bytes, num_tensors)


class WithAdapterSlots:
    """``base`` for configurations with adapter slots; the rest is as ``base`` says.

    Where the time of variants is not known they take memory alone. Steps that have rows of both the base and
    variants were not measured: the estimate counts all rows as rows of variants, its interval begins at a step of
    those that are. No more requests run at once than ask for as many variants as there are slots.

    Args:
        distinct: returns how many adapters so many requests, those for the base included, ask for on average.
        base_share: requests for the base, as a share of all.
    """

    def __init__(
        self, base: Estimator, spec: ModelSpec, distinct: Callable[[float], float], base_share: float = 0.0
    ) -> None:
        self.name = f"{base.name}, with adapters"
        self.base, self._spec, self._distinct, self._base_share = base, spec, distinct, base_share
        self._within = cache(partial(requests_within, distinct))

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, with the slots in memory and the time of variants in every step."""
        plain = self.base.estimate(config.without_slots, workload)
        if not config.adapter_slots:
            return plain
        found = replace(
            plain,
            config=config,
            memory=self._with_slots(plain.memory, config),
            most_at_once=self._within(config.adapter_slots),
        )
        cost = variant_cost(self.base, self._spec, config)
        if cost is None:
            return found
        distinct = min(config.adapter_slots, self._distinct(workload.batch))
        of_prompts = cost.prompts_s(workload, found.ttft_s.value, self._base_share, distinct)
        return replace(
            found,
            one_load=OneLoad(
                load_s=variant_load_s(cost, self._spec, config), stops_steps=loads_stop_steps(config)
            ),
            ttft_s=later(found.ttft_s, of_prompts),
            tpot_s=later(found.tpot_s, self._added_step(workload.batch, config.adapter_slots, cost)),
        )

    def _added_step(self, rows: int, slots: int, cost: VariantCost) -> Quantity:
        """Return the time that is added to the mean step of ``rows``. The interval begins at that of the rows of
        variants alone."""
        share = 1 - self._base_share**rows  # of steps, those with a variant
        of_base = cost.step_s(rows, 0)
        if share <= 0:  # by rounding: hardly any request is for a variant
            return replace(of_base, low=0.0)
        active = max(1.0, min(slots, self._distinct(rows) / share))
        of_variants = max(1.0, (1 - self._base_share) * rows / share)
        with_base = cost.step_s(rows, active)
        return replace(
            with_base,
            value=share * with_base.value + (1 - share) * of_base.value,
            low=share * cost.step_s(of_variants, active).low,
            high=share * with_base.high + (1 - share) * of_base.high,
        )

    def _with_slots(self, memory: MemoryEstimate, config: DeploymentConfig) -> MemoryEstimate:
        """Return ``memory`` with the room of slots: a part for each layer, and what every GPU has."""
        every_gpu = reserved_bytes(self._spec, config, 0)
        layer_bytes = reserved_bytes(self._spec, config, 1) - every_gpu
        return replace(
            memory,
            layer_weight_bytes=memory.layer_weight_bytes + layer_bytes,
            runtime_bytes=memory.runtime_bytes + every_gpu,
        )

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return that of ``base``, where it has one (``estimates.TellsSteadyState``)."""
        return (
            self.base.steady_state(config.without_slots)
            if isinstance(self.base, TellsSteadyState)
            else SteadyState()
        )

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None


def requests_within(distinct: Callable[[float], float], slots: int) -> float | None:
    """Return how many requests ask for as many variants as ``slots`` on average; None: there are no more variants.

    With more than these under way requests wait for a slot, so that a server runs so many at once. A variant that
    waits gathers requests, which share its slot then. That lets few more run at once (10% after a wait of two
    services, of 1,000 variants by Zipf's law with exponent 1 and 8 slots) and is left out.

    Args:
        distinct: returns how many variants so many requests ask for on average, which grows with their number.
    """
    if distinct(_ALL) <= slots:
        return None
    low, high = 0.0, float(slots)
    while distinct(high) < slots:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle) < slots else (low, middle)
    return high


def later(time: Quantity, added: Quantity) -> Quantity:
    """Return ``time`` with more."""
    source = Source.EXTRAPOLATED if time.source is Source.MEASURED else time.source
    if added.source is Source.SCALED and source is not Source.ROOFLINE:
        source = Source.SCALED
    return Quantity(time.value + added.value, time.low + added.low, time.high + added.high, source)
