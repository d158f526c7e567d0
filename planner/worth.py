"""Worth of a measurement, whether it can change a decision: asked while a profile is taken, between measurements.

An estimate that was scaled from another configuration's measurement has a wide interval, one that was measured a
narrow one. A configuration that stays behind even where its whole interval is as favourable as it can be, and the
measured ones' as unfavourable, need not be measured for this intent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fingerprint.estimates import Estimate, MemoryEstimate, Quantity
from planner.costs import Prices
from planner.intent import Intent
from planner.plan import Candidate, Plan
from planner.rank import Fits, rank

__all__ = ["cannot_become_best"]

_NO_PRICES = Prices()
_NEXT_TO_NOTHING = 1e-6  # of a value, for an interval that reaches down to zero: times must be positive


def cannot_become_best(
    asked: Sequence[Estimate],
    measured: Sequence[Estimate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
) -> str | None:
    """Return why none of ``asked`` is chosen whatever is measured of them; None when one of them may be.

    Args:
        asked: what a measurement would tell more of, as it is estimated without.
        measured: what is known; of these, one that surely keeps every limit sets the mark.
        fits: as :func:`planner.rank.rank`.
    """
    at_best = _ranked([_end(estimate, favourable=True) for estimate in asked], intent, fits, prices)
    if at_best.best is None:
        refused = at_best.candidates[0]
        return f"refused even at the favourable end of its interval: {refused.config}: {refused.reason}"
    at_worst = _ranked([_end(estimate, favourable=False) for estimate in measured], intent, fits, prices)
    if at_worst.best is None:
        return None
    best, mark = at_best.best.objective, at_worst.best.objective
    if best is None or mark is None or (best >= mark if at_best.maximize else best <= mark):
        return None
    bound, other = ("at most", "at least") if at_best.maximize else ("at least", "at most")
    unit = at_best.objective_unit
    return (
        f"{intent.kind} of {at_best.best.config} is {bound} {best:.4g} {unit}, of the measured "
        f"{at_worst.best.config} {other} {mark:.4g} {unit}"
    )


def _ranked(estimates: Sequence[Estimate], intent: Intent, fits: Fits, prices: Prices) -> Plan:
    candidates = [Candidate(e.config, e) for e in estimates]
    return rank(candidates, intent, fits=fits, prices=prices)


def _end(estimate: Estimate, *, favourable: bool) -> Estimate:
    """``estimate`` as if its intervals were nothing but one of their ends."""

    def only(quantity: Quantity) -> Quantity:
        end = max(quantity.low, _NEXT_TO_NOTHING * quantity.value) if favourable else quantity.high
        return Quantity(end, end, end, quantity.source)

    power = estimate.power_w_per_gpu
    return replace(
        estimate,
        memory=_memory_end(estimate.memory, favourable=favourable),
        ttft_s=only(estimate.ttft_s),
        tpot_s=only(estimate.tpot_s),
        power_w_per_gpu=None if power is None else only(power),
    )


def _memory_end(memory: MemoryEstimate, *, favourable: bool) -> MemoryEstimate:
    factor = max(0.0, 1 - memory.relative_error) if favourable else 1 + memory.relative_error
    toward = math.floor if favourable else math.ceil
    return replace(
        memory,
        layer_weight_bytes=toward(factor * memory.layer_weight_bytes),
        layer_kv_bytes=toward(factor * memory.layer_kv_bytes),
        first_stage_bytes=toward(factor * memory.first_stage_bytes),
        last_stage_bytes=toward(factor * memory.last_stage_bytes),
        activation_bytes=toward(factor * memory.activation_bytes),
        pp_buffer_bytes=toward(factor * memory.pp_buffer_bytes),
        runtime_bytes=toward(factor * memory.runtime_bytes),
        relative_error=0.0,
    )
