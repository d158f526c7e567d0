"""Costs of variants, extrapolated from fingerprints with slots filled (``estimators.variant_laws``).

A burst for ``a`` distinct variants takes longer than the same burst for the base by
``prompt + (output_tokens - 1) * step``; of k layers, with n rows (of prompts: tokens, of steps: sequences) each is
``k * (per variant * a + per row * n) + (once + once per variant * a)``. All bursts are fitted at once, so that N
layers follow from one and two; what variants that are loaded add to bursts of the base (``k * a layer + once``) is
fitted apart. No part is below zero. The interval is the noise of the differences, what the fit leaves
(``estimators.linear``), and what whole models were found to differ by (``SPREAD``).

Of an engine with our step timer the same is fitted to forwards of single steps, which ran r times
(``fingerprint.variant_steps``): r times the parts of a forward, in which a layer has a part of its own and each of
its rows one for each of the engine's slots, and what is outside of a forward (``once + per variant * a + per row *
n``, rows likewise with slots) apart. Rows of the base in an engine with slots take ``k * (a layer + per row * n)``
longer than without. Forwards of prompts go by the lengths that were measured (``estimators.prompt_curve``).

Ranks, formats of deltas and tensor-parallel degrees that were not measured lie between no change and proportion:
half-way, with both in the interval. Loads go by the bytes, on vLLM no faster than recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.delta.formats import FORMATS
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.adapter_slots import ADDED_ERROR, load_s
from fingerprint.estimators.linear import Interval, LinearModel, combine
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.estimators.variant_laws import Added, law_of
from fingerprint.load_time import RECORDED_TENSORS
from fingerprint.variant_measurements import VariantKind, VariantLoads, VariantMeasurement, kind_of

__all__ = ["SPREAD", "MeasuredVariantCost", "measured_cost"]

SPREAD = 0.12
"""Half of the 90% interval of what a whole model differs by, as a share of the added time: with it 36 of the 40
times of the embedded engine that were judged are within (docs/decisions/0051)."""


def measured_cost(
    measurements: Sequence[VariantMeasurement], num_layers: int, config: DeploymentConfig
) -> MeasuredVariantCost | None:
    """Return what variants in the slots of ``config`` take, by the nearest kind that was measured; None: none was.

    Deltas do not tell of adapters, nor adapters of deltas. Slots that hold both count as slots of deltas.
    """
    kind = kind_of(config)
    if kind is None:
        return None
    usable = [one for one in measurements if (one.runs or one.steps) and one.kind.is_delta == kind.is_delta]
    if not usable:
        return None
    found = min(usable, key=lambda one: abs(np.log2(_size(one.kind) / _size(kind))))
    return MeasuredVariantCost(found, num_layers, kind=kind, tp=config.tp, slots=config.adapter_slots)


def _size(kind: VariantKind) -> float:
    """Return what the bytes of a variant go by: the rank of an adapter, the bits of a delta's weight."""
    return FORMATS[kind.delta_format].bits_per_weight if kind.is_delta else kind.rank


class MeasuredVariantCost(VariantCost):
    """Time that variants add to a model of ``num_layers`` layers.

    Args:
        kind: that is asked for; None: as measured.
        tp: degree that is asked for.
        slots: that are asked for; None: as measured.
    """

    def __init__(
        self,
        measured: VariantMeasurement,
        num_layers: int,
        *,
        kind: VariantKind | None = None,
        tp: int = 1,
        slots: int | None = None,
    ) -> None:
        kind = kind or measured.kind
        self.measured, self.is_exact = measured, kind == measured.kind and tp == 1
        self._layers = num_layers
        self._bounds = sorted((1.0, _size(kind) / _size(measured.kind) / tp))
        self._slots = float(measured.slots if slots is None else slots)
        self._law = law_of(measured)
        self._known: dict[Added, Quantity] = {}
        self._prompt_s: dict[int, float] = {}  # of one variant's, by tokens
        self.has_measured_prompts = self._law.has_prompts
        self.prompt_s = self._one_variant_s if self.has_measured_prompts else None

    def step_s(self, rows: float, active: float) -> Quantity:
        share = min(1.0, active)
        return self._added(self._asked(False, max(1.0, active), share, rows, rows, 1.0))

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        """Return what is added to prompts, as measured.

        Raises:
            NotMeasuredError: they were not (``has_measured_prompts``).
        """
        share, batch = 1 - base_share**workload.batch, float(workload.batch)
        if share <= 0:
            return self._added(self._asked(True, 0.0, 0.0, 0.0, batch, workload.input_tokens))
        of_variants = (1 - base_share) * workload.batch / share
        active, tokens = max(1.0, distinct / share), workload.input_tokens
        return self._added(self._asked(True, active, share, of_variants, batch, tokens))

    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        """Return the time of a load, in proportion to the bytes of those measured; 0 bytes: as large as these.

        On vLLM it is no less than what the recording has for ``num_bytes``: a part of each load is its tensors'.
        """
        of_bytes = num_bytes / self.file_bytes if num_bytes and self.file_bytes else 1.0
        found_s = self.load.value * of_bytes
        return max(found_s, load_s(num_bytes, num_tensors)) if num_bytes and self._has_step_timer else found_s

    @property
    def load(self) -> Quantity:
        """Time of a load from the page cache.

        On an engine with our step timer, vLLM, it is no less than what a recording has for as many bytes: files of
        fingerprints are small, and those of deltas mostly vocabulary, so that two depths hardly tell what a layer
        takes (docs/decisions/0053).
        """
        found = self._by_layers([one.loads_s for one in self._loads])
        if not self._has_step_timer:
            return found
        recorded_s = load_s(round(self.file_bytes), self._num_tensors)
        return Quantity(
            max(found.value, recorded_s),
            min(found.low, recorded_s),
            max(found.high, ADDED_ERROR * recorded_s),
            found.source if found.value >= recorded_s else Source.SCALED,
        )

    @property
    def _num_tensors(self) -> int:
        """Tensors of an adapter of every matrix, where an MLP has three; of a delta as many as count for one."""
        is_delta = self.measured is not None and self.measured.kind.is_delta
        return RECORDED_TENSORS if is_delta else 2 * 7 * self._layers

    @property
    def _has_step_timer(self) -> bool:
        return self.measured is not None and bool(self.measured.steps)

    @property
    def file_bytes(self) -> float:
        """Bytes of the tensors of a variant of the kind that was measured."""
        return self._by_layers([(float(one.file_bytes),) * 2 for one in self._loads]).value

    @property
    def held_bytes(self) -> float:
        """Bytes that a loaded variant takes; 0: not known."""
        return self._by_layers([(float(one.held_bytes),) * 2 for one in self._loads]).value

    @property
    def _loads(self) -> Sequence[VariantLoads]:
        return () if self.measured is None else self.measured.loads

    def _by_layers(self, values: Sequence[Sequence[float]]) -> Quantity:
        """Return what each fingerprint's repeated ``values`` say of the whole model."""
        runs = [np.array(one) for one in values]
        fit = LinearModel(np.array([[one.num_layers, 1.0] for one in self._loads]), runs, non_negative=True)
        found = combine([(fit.predict(np.array([self._layers, 1.0])), runs)])
        return Quantity(found.value, max(0.0, found.low), found.high, Source.EXTRAPOLATED)

    def _one_variant_s(self, tokens: int) -> float:
        """Return the value alone: a simulation asks for every length, and an interval takes a millisecond."""
        if not tokens:
            return 0.0
        if tokens not in self._prompt_s:
            reading = self._law.added(self._asked(True, 1.0, 1.0, 1.0, 1.0, tokens))[0]
            self._prompt_s[tokens] = self._scaled(sum(part.value for group in reading for part, _ in group))
        return self._prompt_s[tokens]

    def _added(self, asked: Added) -> Quantity:
        """Return what is added: a simulation asks for the same ones again and again."""
        if asked not in self._known:
            self._known[asked] = self._predicted(asked)
        return self._known[asked]

    def _asked(
        self,
        is_prompt: bool,
        active: float,
        share: float,
        sequences: float,
        all_sequences: float,
        tokens: float,
    ) -> Added:
        """Return variants in ``share`` of the steps, and an engine with them in all.

        Args:
            active: distinct variants of a step that has one.
            sequences: of variants, in such a step.
            all_sequences: those of the base too.
            tokens: of each sequence in the step.
        """
        return Added(
            num_layers=self._layers,
            is_prompt=is_prompt,
            active=active,
            rows=sequences * tokens,
            sequences=sequences,
            share=share,
            all_rows=all_sequences * tokens,
            all_sequences=all_sequences,
            slots=self._slots,
        )

    def _scaled(self, value: float) -> float:
        return max(0.0, value * sum(self._bounds) / 2)

    def _predicted(self, asked: Added) -> Quantity:
        readings = [combine(*(group for group in reading if group)) for reading in self._law.added(asked)]
        low, high = self._bounds
        value, ends = readings[0].value, [_with_spread(one) for one in readings]
        return Quantity(
            self._scaled(value),
            max(0.0, min(one.low for one in ends) * low),
            max(0.0, max(one.high for one in ends) * high),
            Source.EXTRAPOLATED if self.is_exact else Source.SCALED,
        )


def _with_spread(found: Interval) -> Interval:
    """Return ``found`` widened by what whole models differ by."""
    spread_s = SPREAD * found.value
    below_s, above_s = hypot(found.value - found.low, spread_s), hypot(found.high - found.value, spread_s)
    return Interval(found.value, found.value - below_s, found.value + above_s)
