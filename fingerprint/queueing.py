"""Queueing at one replica: requests that run at once at a rate, and their waits, by a G/G/c queue. Columns, pure.

The one law of load, for planning (``planner.attainment``) and placement (``placement.fleet``):

*   *A batch.* A request among n takes ``T(n) = p + (n - 1) pa + (O - 1) d(n)``: its prompt, the time that each
    other prompt takes from it, and its steps (``fingerprint.service_model``). With c requests at once at most, the
    replica is busy for ``u = rate T(c) / c``.
*   *Requests at once.* By Little's law ``m = rate T(m + z)`` run when one arrives, z the peakedness of arrivals;
    their number is negative binomial, as in a queue with slots for all.
*   *A free slot* is missing with a probability close to Erlang's of ``c / z`` slots (Hayward), by a power of u
    (Sakasegawa); of one slot, and of prompts, which are served one after the other, with that of GI/M/1.
*   *A wait* is exponential. Its mean is that of GI/M/1 times ``(ca2 + cs2) / (ca2 + 1)``: exact for M/G/1, and
    Kingman's in heavy traffic.

Gaps between arrivals are gamma. Nothing is fitted to simulated loads.

Sources: Sakasegawa, An approximation formula for L_q, 1977; Whitt, Heavy-traffic approximations for service
systems with blocking, 1984 (Hayward); Eckberg, Generalized peakedness of teletraffic processes, 1983; Asmussen,
Applied Probability and Queues, 2003, chapter X (GI/M/1); Kingman, 1961. How well it does: docs/risk.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.load_columns import LoadColumns
from fingerprint.service_model import STEP_KNOTS, ServiceModel

__all__ = [
    "MODEL_NAME",
    "Column",
    "RequestsAtOnce",
    "Rows",
    "ServiceColumns",
    "Variation",
    "Wait",
    "idle_share",
    "no_slot_exponent",
    "peakedness",
    "prompt_wait",
    "requests_at_once",
    "slot_wait",
    "without_slot",
]

MODEL_NAME = "G/G/c with batch-dependent service"

Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_TINY = 1e-300
_LEAST = 1e-9
_SMOOTHEST = 1 / 16  # constant gaps and services have peakedness 0, for which there are no slots to speak of
_LOADS = np.concatenate([[0.0], np.geomspace(1e-9, 0.05, 128)[:-1], np.linspace(0.05, 1.0, 245)])
_HALVINGS = 60
_LIGHT = 0.2  # more of Sakasegawa's exponent at light load: Erlang's formula within 1.7 points at 2 to 256 slots


class Variation(NamedTuple):
    """Coefficients of variation: of the gaps between arrivals, of prompts, of answers."""

    burstiness: float = 1.0
    input_cv: float = 1.0
    output_cv: float = 1.0


@dataclass(frozen=True)
class ServiceColumns:
    """Service models as columns, a row per replica. Between two knots of 1, 2, 4, ... a step's time is linear."""

    most: Column
    """Requests at once at most."""
    prompt_s: Column
    added_prompt_s: Column
    more_tokens: Column
    """Tokens of an answer after the first."""
    intercepts_s: Column
    """[segments, rows]: of a round's time over the number of sequences; one segment holds at any number."""
    slopes_s: Column
    loads: LoadColumns | None = None
    """Waits for loads of variants next to the steps, in no time of these; None: there are none."""
    spared_s: Column | None = None
    """Seconds of loads, of those in the prompts, that replicas spare one another at most; None: none."""

    @classmethod
    def of(cls, services: Sequence[ServiceModel], most: Column, spared_s: Column | None = None) -> ServiceColumns:
        """Return the columns of replicas that run ``most`` requests at once, as far as these find slots."""
        steps_s = np.array([service.rounds_s for service in services]).T
        knots = np.array(STEP_KNOTS, np.float64)
        slopes_s = np.diff(steps_s, axis=0) / np.diff(knots)[:, None]
        return cls(
            most=np.minimum(most, [service.most_at_once or np.inf for service in services]),
            prompt_s=np.array([service.prompt_s for service in services]),
            added_prompt_s=np.array([service.added_prompt_s for service in services]),
            more_tokens=np.array([service.output_tokens - 1 for service in services]),
            intercepts_s=steps_s[:-1] - slopes_s * knots[:-1, None],
            slopes_s=slopes_s,
            loads=LoadColumns.of([service.load_waits for service in services]),
            spared_s=spared_s,
        )

    def take(self, rows: Rows) -> ServiceColumns:
        columns = [one.name for one in fields(self) if one.name != "loads" and getattr(self, one.name) is not None]
        loads = None if self.loads is None else self.loads.take(rows)
        return replace(self, **{name: getattr(self, name)[..., rows] for name in columns}, loads=loads)

    def steps_s(self, batch: Column) -> Column:
        """Return the time in which each of ``batch`` [..., rows] sequences gets a token, without their prompts."""
        intercept, slope = self._about(batch, self.intercepts_s, self.slopes_s)
        return np.asarray(intercept + slope * batch)

    def request_line(self, batch: Column) -> tuple[Column, Column]:
        """Return intercept and slope of T(n) about ``batch`` [..., rows]."""
        return self._about(batch, *self._request_lines)

    def line_in(self, segment: Rows) -> tuple[Column, Column]:
        """Return intercept and slope of T(n) in ``segment`` [..., rows]."""
        return self._in(segment, *self._request_lines)

    def requests_s(self, batch: Column) -> Column:
        """Return T(n), the time of a request that runs among ``batch`` [..., rows]."""
        intercept, slope = self.request_line(batch)
        return np.asarray(intercept + slope * batch)

    @cached_property
    def slot_s(self) -> Column:
        """Seconds of the replica that a request takes when as many run as may."""
        return self.requests_s(self.most) / self.most

    @cached_property
    def prompt_share(self) -> Column:
        """Share of that which is the request's prompt."""
        prompt_s = self.added_prompt_s + (self.prompt_s - self.added_prompt_s) / self.most
        return np.minimum(prompt_s / self.slot_s, 1.0)

    @cached_property
    def knots(self) -> tuple[Column, Column]:
        """Ends of the segments, as far as requests run at once, and T(n) there: [segments + 1, rows] each."""
        ends = np.append(2.0 ** np.arange(len(self.slopes_s)), np.inf)
        batches = np.minimum(ends[:, None], self.most)
        return batches, self.requests_s(batches)

    @cached_property
    def _request_lines(self) -> tuple[Column, Column]:
        fixed_s = self.prompt_s - self.added_prompt_s + self.more_tokens * self.intercepts_s
        return fixed_s, self.added_prompt_s + self.more_tokens * self.slopes_s

    def _about(self, batch: Column, intercepts: Column, slopes: Column) -> tuple[Column, Column]:
        if len(slopes) == 1:
            return intercepts[0], slopes[0]
        return self._in(np.log2(np.maximum(batch, 1.0)).astype(np.intp), intercepts, slopes)

    def _in(self, segment: Rows, intercepts: Column, slopes: Column) -> tuple[Column, Column]:
        segments, rows = intercepts.shape
        at = np.minimum(segment, segments - 1) * rows + np.arange(rows)
        return intercepts.ravel()[at], slopes.ravel()[at]


class RequestsAtOnce(NamedTuple):
    """Requests that run while one runs, itself included: their mean, and their variance with slots for all."""

    mean: Column
    variance: Column
    most: Column
    peak: Column
    """Peakedness of the arrivals."""

    @property
    def deviation(self) -> Column:
        """Standard deviation; twice it stays within what the replica runs at once."""
        return np.minimum(np.sqrt(self.variance), np.minimum(self.most - self.mean, self.mean - 1) / 2)


class Wait(NamedTuple):
    """Wait of which ``share`` of the requests have any, exponential with ``mean_s``."""

    share: Column
    mean_s: Column

    def beyond(self, wait_s: Column) -> Column:
        """Return the share of requests that wait longer."""
        return np.asarray(self.share * np.exp(-wait_s / np.maximum(self.mean_s, _LEAST)))

    @property
    def of_all_s(self) -> Column:
        """Mean over all requests."""
        return self.share * self.mean_s


def requests_at_once(service: ServiceColumns, utilisation: Column, variation: Variation) -> RequestsAtOnce:
    """Return how many requests run while one runs, for utilisations [..., rows] from 0 to below 1."""
    rate = utilisation / service.slot_s
    peak = peakedness(utilisation * service.most, variation)
    # Steps that jump may have the law hold at several numbers. The least, which a queue that fills gets to first,
    # is in the first segment of whose end fewer than that are met.
    batches, times_s = (_cases(knots, utilisation.ndim) for knots in service.knots)
    are_fewer = rate * times_s + peak <= batches
    segment = np.maximum(are_fewer.argmax(axis=0) - 1, 0)
    fixed_s, grows_s = service.line_in(segment)
    is_full = ~are_fewer.any(axis=0)
    left = np.where(is_full, 1.0, np.maximum(1 - rate * grows_s, _LEAST))
    met = np.where(is_full, utilisation * service.most, rate * (fixed_s + grows_s * peak) / left)
    met = np.clip(met, 0.0, service.most)
    mean = np.minimum(np.maximum(met + peak, 1.0), service.most)
    return RequestsAtOnce(mean, peak * met / left, service.most, peak)


def _cases(knots: Column, dimensions: int) -> Column:
    """Return [knots, ..., rows] for utilisations of so many dimensions."""
    return knots.reshape(len(knots), *[1] * (dimensions - 1), -1)


def no_slot_exponent(slots: Column) -> Column:
    """Return the power of the utilisation that is about the share of requests without a free slot (Sakasegawa)."""
    return np.asarray(np.sqrt(2 * (slots + 1)) - 1)


def slot_wait(service: ServiceColumns, utilisation: Column, variation: Variation, peak: Column) -> Wait:
    """Return the wait for one of the replica's slots, for utilisations [..., rows] from 0 to below 1."""
    idle = idle_share(utilisation, variation.burstiness)
    taken = without_slot(service, utilisation, peak, idle)
    return Wait(taken, service.slot_s * _varied(variation.burstiness, work_cv(service, variation)) / idle)


def without_slot(service: ServiceColumns, utilisation: Column, peak: Column, idle: Column) -> Column:
    """Return the share of requests that find no free slot, for utilisations [..., rows] from 0 to below 1.

    Args:
        peak: peakedness of the arrivals.
        idle: share of requests that would find a lone slot free.
    """
    slots = service.most / peak
    exponent = no_slot_exponent(slots)
    exponent = exponent * (1 + _LIGHT * (1 - utilisation) * np.log(np.maximum(slots, 1.0)))
    return np.where(service.most > 1, utilisation**exponent, 1 - idle)


def prompt_wait(service: ServiceColumns, utilisation: Column, variation: Variation) -> Wait:
    """Return the wait for earlier prompts, for utilisations [..., rows] from 0 to below 1; none with one slot."""
    busy, input_cv = utilisation * service.prompt_share, variation.input_cv
    idle = idle_share(busy, variation.burstiness)
    waits = _varied(variation.burstiness, input_cv) / idle  # in prompts
    # Prompts that arrive while a step runs are served together by the next: a request that waits for earlier ones
    # waits for as many later ones. All but the rest of the step under way is such a wait.
    together = np.clip(2 - busy * (1 + input_cv**2) / 2 / np.maximum((1 - idle) * waits, _TINY), 1.0, 2.0)
    return Wait(
        np.where(service.most > 1, 1 - idle, 0.0), service.prompt_share * service.slot_s * waits * together
    )


def work_cv(service: ServiceColumns, variation: Variation) -> Column:
    """Return the coefficient of variation of a request's work in a full batch."""
    prompts = service.prompt_share
    return np.hypot(prompts * variation.input_cv, (1 - prompts) * variation.output_cv)


def _varied(arrival_cv: float, service_cv: Column | float) -> Column:
    return np.asarray((arrival_cv**2 + service_cv**2) / (arrival_cv**2 + 1))


def peakedness(offered: Column, variation: Variation) -> Column:
    """Return the variance over mean of how many would run at once if all could; 1 for Poisson arrivals.

    Exact for exponential services; for any other its excess over 1 is taken to go with ``2 / (1 + output_cv**2)``,
    which is right for constant ones in heavy traffic.

    Args:
        offered: rate times seconds in service.
    """
    if variation.burstiness == 1:
        return np.ones_like(offered)
    gap = 1 / np.maximum(offered, _LEAST)  # in services
    squared = max(variation.burstiness**2, _LEAST)
    overtaken = np.exp(-np.log1p(squared * gap) / squared)  # E exp(-gap): no service ends within a gap
    exponential = 1 / (1 - overtaken) - 1 / gap
    return np.asarray(np.maximum(1 + (exponential - 1) * 2 / (1 + variation.output_cv**2), _SMOOTHEST))


def idle_share(load: Column, arrival_cv: float) -> Column:
    """Return the share of arrivals that find a GI/M/1 queue empty, for loads from 0 to 1."""
    if arrival_cv == 1:
        return np.asarray(1 - load)
    return np.asarray(np.minimum((1 - load) * np.interp(load, _LOADS, _idle_over_free(arrival_cv)), 1.0))


@lru_cache(maxsize=64)
def _idle_over_free(arrival_cv: float) -> Column:
    """Return the root x of ``log(1 + a x / load) / a + log(1 - x) = 0`` over ``1 - load``; a = arrival_cv ** 2.

    By bisection: the left side rises from 0 and falls through the root.
    """
    a, loads = max(arrival_cv**2, _LEAST), np.clip(_LOADS, 1e-12, 1 - 1e-6)
    low, high = (1 - loads) / (a + 1), np.full_like(loads, 1 - 1e-15)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = np.log1p(a * middle / loads) / a + np.log1p(-middle) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray((low + high) / 2 / (1 - loads))
