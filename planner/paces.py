"""Service times of configurations, alone and with every batch slot taken, for the queueing model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple

import numpy as np

from fingerprint.estimates import Estimate
from planner.cells import Column, Rows
from planner.costs import Figures
from planner.intent import Traffic
from planner.normal_distribution import Z_OF_INTERVAL

__all__ = ["Paces", "Uncertain", "paces"]

_TINY = 1e-300


class Uncertain(NamedTuple):
    """A column of times and the widths of its lognormal law below and above."""

    value: Column
    below: Column
    above: Column

    def factor(self, z: Column) -> Column:
        """Truth over value, z standard deviations from the middle."""
        return np.asarray(np.exp(np.where(z > 0, self.above, self.below) * z))

    def z_of(self, ratio: Column) -> Column:
        """Return the z at which the truth is ``ratio`` times the value; infinite where it cannot be."""
        logarithm = np.log(np.maximum(ratio, _TINY))
        width = np.where(logarithm > 0, self.above, self.below)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = logarithm / width
        return np.where(width > 0, z, np.where(logarithm >= 0, np.inf, -np.inf))


@dataclass(frozen=True, slots=True)
class Paces:
    """Service times of configurations, a row each, at the batch it is planned for and for a request alone."""

    slots: Column
    output_tokens: Column
    ttft_s: Uncertain  # alone
    tpot_s: Uncertain  # of the whole batch, as are the next two
    e2e_s: Uncertain
    prompt_s: Column  # of TTFT, for each request of the batch
    tpot_alone_s: Column
    ttft_alone_high_s: Column
    tpot_alone_high_s: Column
    e2e_alone_s: Column
    e2e_alone_high_s: Column

    def take(self, rows: Rows) -> Paces:
        def of(column: Column | Uncertain) -> Column | Uncertain:
            return Uncertain(*(c[rows] for c in column)) if isinstance(column, Uncertain) else column[rows]

        return Paces(*(of(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def slowed(self, times: Column) -> Paces:
        """The same where everything takes ``times`` as long; the intervals are as wide in ratios."""

        def of(name: str) -> Column | Uncertain:
            column: Column | Uncertain = getattr(self, name)
            if not name.endswith("_s"):
                return column
            if isinstance(column, Uncertain):
                return column._replace(value=times * column.value)
            return times * column

        return Paces(*(of(field.name) for field in fields(self)))  # type: ignore[arg-type]


def paces(full: Figures, alone: Sequence[Estimate] | None, traffic: Traffic) -> Paces:
    """Columns of the estimates of whole batches, and of the same configurations with one request (None: these
    are not known, and a request alone is taken to be as slow).

    Beside requests that decode, a prompt shares its step with their tokens: it does not read the weights once
    more, and they are computed with it. A batch is slower than one request by the reading of contexts, which
    are longer than the mean request's where lengths vary: long answers stay longer.
    """
    rows = [full.batch, full.input_tokens, full.output_tokens, full.ttft_s, full.ttft_low_s, full.ttft_high_s,
            full.tpot_s, full.tpot_low_s, full.tpot_high_s]  # fmt: skip
    if alone is None:
        rows += [full.ttft_s, full.ttft_low_s, full.ttft_high_s, full.tpot_s, full.tpot_high_s]
    else:
        values = np.fromiter(chain.from_iterable(map(_alone, alone)), np.float64, _ALONE * len(alone))
        rows += list(values.reshape(-1, _ALONE).T)
    table = np.stack(rows)
    table[:, ~(np.isfinite(table) & (table >= 0)).all(axis=0)] = 1.0  # the planner refuses them
    slots, inputs, tokens, *times = table
    ttft, ttft_low, ttft_high, tpot, tpot_low, tpot_high, ttft_1, low_1, high_1, tpot_1, tpot_high_1 = times
    steps = tokens - 1
    longer = (inputs + tokens * (1 + traffic.output_cv**2) / 2) / (inputs + tokens / 2)
    step = tpot + np.maximum(tpot - tpot_1, 0.0) * (longer - 1)
    shared = ttft_1 - tpot_1 + (slots - 1) * ttft / (slots * inputs)
    prompt = np.minimum(ttft / slots, np.maximum(shared, 0.0))
    given = np.maximum(ttft + steps * tpot, _TINY)
    whole = np.minimum(ttft, ttft_1 + (slots - 1) * prompt) + steps * step
    lone = np.clip(ttft_1 + steps * tpot_1, whole / slots, whole)
    return Paces(
        slots=slots,
        output_tokens=tokens,
        ttft_s=_uncertain(ttft_1, low_1, high_1),
        tpot_s=_uncertain(tpot, tpot_low, tpot_high)._replace(value=step),
        e2e_s=_uncertain(given, ttft_low + steps * tpot_low, ttft_high + steps * tpot_high)._replace(
            value=np.maximum(whole, _TINY)
        ),
        prompt_s=ttft / slots,
        tpot_alone_s=np.minimum(tpot_1, tpot),
        ttft_alone_high_s=high_1,
        tpot_alone_high_s=tpot_high_1,
        e2e_alone_s=lone,
        e2e_alone_high_s=high_1 + steps * tpot_high_1,
    )


_ALONE = 5


def _alone(estimate: Estimate) -> tuple[float, ...]:
    ttft, tpot = estimate.ttft_s, estimate.tpot_s
    return ttft.value, ttft.low, ttft.high, tpot.value, tpot.high


def _uncertain(value: Column, low: Column, high: Column) -> Uncertain:
    value = np.maximum(value, _TINY)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.log(value / np.maximum(low, value * 1e-3))
        above = np.log(np.maximum(high / value, 1.0))
    return Uncertain(value, np.maximum(below, 0.0) / Z_OF_INTERVAL, above / Z_OF_INTERVAL)
