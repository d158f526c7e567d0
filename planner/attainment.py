"""Probability that a request misses a latency limit at an arrival rate, for many configurations at once.

The law of one replica at a rate is ``fingerprint.queueing``. Here it is joined with what is not known exactly:

*   *The truth.* The interval of an estimate is taken for a law over the truth: lognormal on each side of the
    value, a twentieth beyond either end. TTFT, TPOT and E2E are wrong together (an E2E has the sum of their
    intervals), so there is one normal number z for all, and the probability is the mean over it. Where the truth
    would leave no steady queue, every request misses.
*   *The request's own length*, of a mean as the workload says and a given coefficient of variation; long answers
    stay longer, so that the contexts of a batch are longer than the mean request's.
*   *The waits*: for a slot; for a first token also for prompts that are under way, and for half a step.
*   *The rate*, where it moves (``planner.rate_profile``): the mean over its levels. A request that arrives while a
    busy time left work finds every slot taken and waits for that work; else a level is as if it lasted (Green and
    Kolesar's pointwise stationary approximation). But while the rate stays near it a queue only grows so long as a
    random walk of as many requests goes: no level above the mean rate counts as busier than the one whose steady
    queue is that long; and those below it count as near the mean as a queue of the mean rate still is then.
*   *A load* of a variant next to the steps, where there is one (``fingerprint.load_waits``): its wait is before
    all that and takes from the limit, at the rate of the level, as if that lasted.

A time is a lognormal service (the second and the number of requests at once) plus an independent exponential wait.
Of several limits the one that is missed most often counts: all grow with the same load and the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.estimates import Estimate
from fingerprint.load_columns import LoadColumns, LoadWait
from fingerprint.queueing import (
    Column,
    RequestsAtOnce,
    Rows,
    ServiceColumns,
    Variation,
    Wait,
    no_slot_exponent,
    prompt_wait,
    requests_at_once,
    slot_wait,
    work_cv,
)
from fingerprint.service_model import SHARED_PROMPT, ServiceModel
from fingerprint.spared_loads import at_rate, spared_column
from planner.costs import Figures
from planner.crossing import crossing
from planner.intent import Traffic
from planner.normal_distribution import normal_cdf, normal_quantile
from planner.rate_profile import moving_rate
from planner.uncertainty import Intervals, Uncertainty

__all__ = ["Attainment", "Metric"]

Metric = Literal["ttft", "tpot", "e2e"]
_METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2  # of [0, 1]
_TINY = 1e-300
_LOAD_PARTS = (1 - (np.arange(16)[::-1] / 16) ** 2).tolist()  # of the longest wait for a load: ends of its parts
_LONGEST_LOAD_WAIT = 1 - 1e-4  # of its law
_MANY_PROMPTS = 0.25  # of the work; below, first tokens are late less often than answers by themselves
_LARGEST = 1 - 1e-9  # utilisation; beyond, no wait is worth a number
# In logarithms, from what a request alone takes, and from the highest rate there can be: nothing is farther off.
_OFF_TIME = np.array([-21, -4, -2.5, -2, -1.5, -1, -0.75, -0.5, -0.3, -0.2, -0.1, 0.0, 0.1, 0.3, 1, 21])
_OFF_RATE = np.array([-21, -8, -5, -4, -3, -2.5, -2, -1.5, -1.2, -0.9, -0.7, -0.5, -0.3, -0.2, -0.1, 0.0])


class _Load(NamedTuple):
    """Level of the rate: its number, and requests per second of each configuration, then and on average."""

    level: int
    then: Column
    mean: Column


class _State(NamedTuple):
    """State of the queue: a truth of each configuration, and what follows from it: all [..., rows]."""

    z: Column
    mean: Column  # utilisation over all levels, below 1
    utilisation: Column  # below 1
    running: RequestsAtOnce


class Attainment:
    """Shares of requests that keep a limit under ``traffic``. Rates are columns too, or one number for all."""

    def __init__(self, service: ServiceColumns, intervals: Intervals, traffic: Traffic) -> None:
        self._service, self._intervals, self._traffic = service, intervals, traffic
        self._variation = Variation(traffic.burstiness, traffic.input_cv, traffic.output_cv)
        self._moving = moving_rate(traffic.relative_rates)
        self._stays_s = self._moving.stays * traffic.window_s if traffic.relative_rates else np.inf

    @classmethod
    def of_estimates(
        cls, full: Figures, alone: Sequence[Estimate], traffic: Traffic, replicas: int = 1
    ) -> Attainment:
        """Return the attainment by estimates of whole batches, and of the same configurations with one request.

        Args:
            replicas: of each deployment, that share its variants.
        """
        values = np.fromiter(chain.from_iterable(map(_alone, alone)), np.float64)
        times = values.reshape(len(alone), 5).T.copy()
        usable = full.usable & (np.isfinite(times) & (times >= 0)).all(axis=0)  # the planner refuses the rest
        full, times = full.where(usable, 1.0), np.where(usable, times, 1.0)
        prompt_s, step_s = np.minimum(times[0], full.ttft_s), np.minimum(times[3], full.tpot_s)
        others = np.maximum(full.batch - 1, 1)
        added_s = np.minimum(
            prompt_s - np.minimum(step_s, SHARED_PROMPT * prompt_s), (full.ttft_s - prompt_s) / others
        )
        slope_s = np.where(full.batch > 1, full.tpot_s - step_s, 0.0) / others
        service = ServiceColumns(
            most=full.most_at_once,
            prompt_s=np.maximum(prompt_s, _TINY),
            added_prompt_s=added_s,
            more_tokens=full.output_tokens - 1,
            intercepts_s=(step_s - slope_s)[None],
            slopes_s=slope_s[None],
            loads=LoadColumns.of([one.load_waits for one in alone]),
            spared_s=spared_column([one.spared_loads_s for one in alone], [replicas] * len(alone)),
        )
        return cls(_with_longer_contexts(service, full.input_tokens, traffic), Intervals.of(full, times), traffic)

    @classmethod
    def of_service(
        cls,
        service: ServiceModel,
        most: float,
        full: Figures,
        alone: Estimate,
        traffic: Traffic,
        replicas: int = 1,
    ) -> Attainment:
        """Return the attainment of one of ``replicas`` with ``most`` requests at once.

        The intervals are those of the estimates.
        """
        spared_s = spared_column([service.spared_loads_s], [replicas])
        columns = ServiceColumns.of([service], np.array([most]), spared_s)
        times = np.array([_alone(alone)]).T
        columns = _with_longer_contexts(columns, np.array([service.input_tokens]), traffic)
        return cls(columns, Intervals.of(full, times), traffic)

    def __len__(self) -> int:
        return len(self._service.most)

    def take(self, rows: Rows) -> Attainment:
        return Attainment(self._service.take(rows), self._intervals.take(rows), self._traffic)

    @cached_property
    def service_s(self) -> Column:
        """Seconds of the replica that a request takes, when every slot is taken."""
        return self._service.slot_s

    @property
    def no_slot_exponent(self) -> Column:
        """Power of the utilisation that is about the share of Poisson requests without a free slot."""
        return no_slot_exponent(self._service.most)

    def service_at(self, percentile: float) -> Column:
        """Return the same at that percentile of the truth."""
        z = np.full(len(self), float(normal_quantile(np.array(percentile / 100))))
        return np.asarray(self.service_s * self._law("e2e").factor(z))

    def alone_high(self, metric: Metric) -> Column:
        """Return the metric of a request alone, at the upper end of its interval."""
        return self._intervals.alone_high_s[_METRICS.index(metric)]

    def misses(
        self, metric: Metric, limit_s: Column | float, rate_per_s: Column | float, z: float | None = None
    ) -> Column:
        """Return the share of requests whose ``metric`` is above ``limit_s``.

        Args:
            z: standard deviations from the estimate's value to the truth; None: it is not known.
        """
        limit, rate = self._column(limit_s), self._column(rate_per_s)
        if self._service.spared_s is None:
            return self._misses_by_levels(metric, limit, rate, z)
        some = self._with_loads_at(rate, z or 0.0)
        if metric != "ttft":
            return some._misses_by_levels(metric, limit, rate, z)
        # Loads are in the mean prompt, which says too little of the few that wait for one: no load is spared.
        late = self._misses_by_levels(metric, limit, rate, z)
        return np.minimum(late, some._misses_by_levels("e2e", limit, rate, z))

    def _misses_by_levels(self, metric: Metric, limit: Column, rate: Column, z: float | None) -> Column:
        found = np.zeros(len(self))
        for load, share in self._loads(rate):
            steady, points, weights = self._truths(metric, limit, load) if z is None else self._truth(z, load)
            missed = (weights * self._misses_at(metric, limit, load, points)).sum(axis=0)
            found += share * np.clip(1 - steady + missed, 0.0, 1.0)
        return found

    def _with_loads_at(self, rate: Column, z: float) -> Attainment:
        """Return the attainment with the loads that are left at the mean rate under the truth ``z``."""
        slower = self._law("e2e").factor(np.full(len(self), z))
        service = at_rate(self._service, rate * slower, self._variation)
        ratio = service.requests_s(service.most) / self._service.requests_s(self._service.most)
        return Attainment(service, self._intervals.with_less(ratio), self._traffic)

    def load_wait(self, rate_per_s: Column | float) -> LoadWait | None:
        """Return the waits for loads next to the steps at the mean rate; None: there are no such loads."""
        loads = self._service.loads
        return None if loads is None else loads.at(self._column(rate_per_s))

    def mean_e2e(self, rate_per_s: Column | float, z: float = 0.0) -> Column:
        """Return mean seconds from arrival to the last token, where the truth is ``z`` standard deviations off.

        Infinite where the rate is not served. A request that finds work left of a busy time is served in a full
        batch and waits for that work as well: no less than what ``misses`` adds up to, which takes the longer one.
        """
        rate, truth = self._column(rate_per_s), np.full(len(self), z)
        if self._service.spared_s is not None:
            return self._with_loads_at(rate, z).mean_e2e(rate, z)
        times, found = self._law("e2e").factor(truth), np.zeros(len(self))
        for load, share in self._loads(rate):
            state = self._state(truth, load)
            own_s, queue_s = self._service.requests_s(state.running.mean), self._slot_wait(state).of_all_s
            if self._traffic.relative_rates:
                late = self._left(load.level, state)(np.zeros(len(self)))
                own_s = own_s + late * (self._service.requests_s(self._service.most) - own_s)
                queue_s = queue_s + self._moving.mean_left(load.level, state.mean) * self._traffic.window_s / times
            if self._service.loads is not None:
                queue_s = queue_s + self._service.loads.at(load.then).of_all_s
            found += share * times * (own_s + queue_s)
        return np.where(rate >= 1 / (times * self.service_s), np.inf, found)

    def quantile(self, metric: Metric, percentile: float, rate_per_s: Column | float) -> Column:
        """Return the seconds that ``percentile`` % of the requests do not exceed, at most 0.01% too many.

        Infinite where so many truths leave no steady queue.
        """
        rate, one, service = self._column(rate_per_s), np.ones(len(self)), self._service
        alone_s = {"ttft": service.prompt_s, "tpot": service.steps_s(one), "e2e": service.requests_s(one)}[metric]
        ladder = _OFF_TIME[:, None] - np.log(np.maximum(alone_s, _TINY))

        def fine(x: Column, rows: Rows) -> npt.NDArray[np.bool_]:
            return self.take(rows).misses(metric, np.exp(-x), rate[rows]) <= 1 - percentile / 100

        return np.asarray(np.exp(-crossing(fine, ladder)))

    def highest_rate(self, limits_s: Mapping[Metric, Column], percentile: float, most: Column) -> Column:
        """Return the highest rate up to ``most`` at which ``percentile`` % of the requests keep every limit.

        0 where it is not worth a number.
        """

        def fine(x: Column, rows: Rows) -> npt.NDArray[np.bool_]:
            rate, some = np.exp(x), self.take(rows)
            missed = [some.misses(metric, limit[rows], rate) for metric, limit in limits_s.items()]
            return np.asarray(np.max(missed, axis=0) <= 1 - percentile / 100)

        top = np.log(np.maximum(most, _TINY))
        return np.asarray(np.minimum(np.exp(crossing(fine, top + _OFF_RATE[:, None])), most))

    def _column(self, value: Column | float) -> Column:
        return np.broadcast_to(np.asarray(value, np.float64), (len(self),))

    def _law(self, metric: Metric) -> Uncertainty:
        return self._intervals.uncertainties[_METRICS.index(metric)]

    def _loads(self, rate: Column) -> list[tuple[_Load, float]]:
        """Return the levels of the rate, with the shares of requests that arrive at them."""
        levels = enumerate(self._moving.levels)
        return [(_Load(number, rate * level.relative_rate, rate), level.share) for number, level in levels]

    def _truths(self, metric: Metric, limit: Column, load: _Load) -> tuple[Column, Column, Column]:
        """Return the share of truths with a steady queue; and points of it, with their weights."""
        full = load.mean * self.service_s
        steady = normal_cdf(self._law("e2e").z_of(_LARGEST / np.maximum(full, _TINY)))
        middle = np.minimum(normal_cdf(self._where_it_turns(metric, limit, load)), steady)
        quick = np.minimum(self._never_late(limit), middle) if metric == "tpot" else 0.0
        below, above = quick + (middle - quick) * _POINTS[:, None], middle + (steady - middle) * _POINTS[:, None]
        weights = np.concatenate([(middle - quick) * _WEIGHTS[:, None], (steady - middle) * _WEIGHTS[:, None]])
        return steady, normal_quantile(np.concatenate([below, above])), weights

    def _truth(self, z: float, load: _Load) -> tuple[Column, Column, Column]:
        truth = np.full((1, len(self)), z)
        is_served = load.mean * self.service_s * self._law("e2e").factor(truth[0]) < _LARGEST
        steady = np.where(is_served, 1.0, 0.0)
        return steady, truth, steady[None]

    def _never_late(self, limit: Column) -> Column:
        """Return the share of truths under which TPOT keeps ``limit`` with every slot taken.

        Beyond them the share that misses it jumps, and no point may be on both sides.
        """
        law, most = self._law("tpot"), self._service.most
        longest = self._per_token(self._service.requests_s(most), most)
        return normal_cdf(np.clip(law.z_of(limit / longest), -8.0, 8.0))

    def _where_it_turns(self, metric: Metric, limit: Column, load: _Load) -> Column:
        """Return the truth at which the service alone is as long as the limit, by a few steps to a fixed point."""
        z, law = np.zeros(len(self)), self._law(metric)
        for _ in range(3):
            mean, _ = self._service_time(metric, self._state(z, load))
            with np.errstate(invalid="ignore"):
                z = np.clip(law.z_of(limit * law.factor(z) / mean), -8.0, 8.0)
        return z

    def _state(self, z: Column, load: _Load) -> _State:
        work_s = self.service_s * self._law("e2e").factor(z)
        mean = np.minimum(load.mean * work_s, _LARGEST)
        utilisation = np.minimum(load.then * work_s, _LARGEST)
        if self._traffic.relative_rates:
            utilisation = self._reached(work_s, mean, utilisation)
        return _State(z, mean, utilisation, requests_at_once(self._service, utilisation, self._variation))

    def _reached(self, work_s: Column, mean: Column, there: Column) -> Column:
        """Return the utilisation whose steady queue is the one that a level has while the rate stays.

        With v the sum of the squared variations, a reflected random walk without drift is
        ``sqrt(2 v work_s t / pi)`` long after t; a queue is forgotten after ``v work_s / (1 - utilisation)**2``.
        """
        varied_s = (self._traffic.burstiness**2 + work_cv(self._service, self._variation) ** 2) * work_s
        busiest = 1 - np.sqrt(np.pi * varied_s / (8 * self._stays_s))
        forgotten_s = varied_s / (1 - mean) ** 2
        below = mean + (there - mean) * self._stays_s / (self._stays_s + forgotten_s)
        return np.where(there > mean, np.minimum(there, np.maximum(busiest, mean)), below)

    def _service_time(self, metric: Metric, state: _State) -> tuple[Column, Column]:
        """Return the mean of the time without waits, and its squared coefficient of variation."""
        service, traffic, running = self._service, self._traffic, state.running
        factor = self._law(metric).factor(state.z)
        if metric == "ttft":
            step_s = service.steps_s(running.mean) * np.minimum(running.mean - 1, 1.0) / 2
            own_s = service.prompt_s + step_s
            return own_s * factor, (traffic.input_cv * service.prompt_s / own_s) ** 2
        together = service.requests_s(running.mean)
        _, grows_s = service.request_line(running.mean)
        wobble = grows_s * running.deviation
        if metric == "tpot":
            later = np.maximum(together - service.prompt_s, _TINY)
            return self._per_token(together, running.mean) * factor, (wobble / later) ** 2
        prompt = service.prompt_s / together
        own = (prompt * traffic.input_cv) ** 2 + ((1 - prompt) * traffic.output_cv) ** 2
        return together * factor, (wobble / together) ** 2 + own

    def _per_token(self, together: Column, batch: Column) -> Column:
        """Return the TPOT of a request whose whole time is ``together``; of one token, the step."""
        service = self._service
        later = (together - service.prompt_s) / np.maximum(service.more_tokens, 1)
        return np.asarray(np.maximum(np.where(service.more_tokens > 0, later, service.steps_s(batch)), _TINY))

    def _misses_at(self, metric: Metric, limit: Column, load: _Load, z: Column) -> Column:
        """Return the share that misses [points, rows] at each truth z."""
        state, loads = self._state(z, load), self._service.loads
        of_loaded = self._misses_of_loaded(metric, load, state)
        missed = of_loaded(limit)
        if loads is None or metric == "tpot":
            return missed
        wait, times = loads.at(load.then), self._law("e2e").factor(z)
        # The wait is known in closed form, the rest only by its share above a time: in parts from the limit down,
        # as far as a wait reaches, in each of which the rest is even.
        reach_s = np.minimum(limit / times, wait.quantile_s(_LONGEST_LOAD_WAIT))
        later = waited = missed
        longer_s = up_to_s = np.zeros_like(missed)
        for part in _LOAD_PARTS:
            left_s = part * reach_s
            sooner = of_loaded(np.maximum(limit - times * left_s, _TINY))
            within_s = wait.up_to_s(left_s)
            waited = waited + (sooner - later) * (within_s - up_to_s) / np.maximum(left_s - longer_s, _TINY)
            later, longer_s, up_to_s = sooner, left_s, within_s
        return missed + wait.share * (waited - missed)

    def _misses_of_loaded(self, metric: Metric, load: _Load, state: _State) -> Callable[[Column], Column]:
        """Return a function: the share that misses a limit of those whose variant is loaded."""
        missed = self._missed(metric, state, None)
        if not self._traffic.relative_rates:
            return missed
        left = self._left(load.level, state)
        late = left(np.zeros_like(state.z))
        if not late.any():
            return missed
        most = np.broadcast_to(self._service.most, state.z.shape)
        full = state._replace(running=state.running._replace(mean=most, variance=np.zeros_like(state.z)))
        some = np.maximum(late, _TINY)
        of_late = self._missed(metric, full, lambda wait_s: left(wait_s) / some)

        def of_all(limit: Column) -> Column:
            found = missed(limit)
            return np.asarray(found + late * (of_late(limit) - found))

        return of_all

    def _left(self, level: int, state: _State) -> Callable[[Column], Column]:
        """Return a function: the share of requests at a level that find at least ``wait_s`` of work left."""

        def beyond(wait_s: Column) -> Column:
            return self._moving.left_beyond(level, state.mean, wait_s / self._traffic.window_s)

        return beyond

    def _missed(
        self, metric: Metric, state: _State, left: Callable[[Column], Column] | None
    ) -> Callable[[Column], Column]:
        """Return ``_misses_in``; of TTFT no more than of E2E, which matters where prompts are much of the work."""
        missed = self._misses_in(metric, state, left)
        are_prompts = self._service.prompt_share > _MANY_PROMPTS
        if metric != "ttft" or not are_prompts.any():
            return missed
        whole = self._misses_in("e2e", state, left)

        def of_first_tokens(limit: Column) -> Column:
            found = missed(limit)
            return np.where(are_prompts, np.minimum(found, whole(limit)), found)

        return of_first_tokens

    def _misses_in(
        self, metric: Metric, state: _State, left: Callable[[Column], Column] | None
    ) -> Callable[[Column], Column]:
        """Return a function: the share that misses a limit, of arrivals in that state; ``left``: the share finding
        more work left.
        """
        mean, squared = self._service_time(metric, state)
        waits = self._waits(metric, state, left)
        if not squared.any():
            return lambda limit: np.where(mean > limit, 1.0, waits(limit - mean))
        width = np.sqrt(np.log1p(squared))

        def missed(limit: Column) -> Column:
            with np.errstate(divide="ignore", invalid="ignore"):
                turn = np.log(limit / mean) / width + width / 2
            in_time = normal_cdf(np.where(width > 0, turn, np.where(mean > limit, -np.inf, np.inf)))
            if metric == "tpot":
                most = self._service.most
                longest = self._per_token(self._service.requests_s(most), most)  # as many as there are slots
                return np.where(limit < longest * self._law("tpot").factor(state.z), 1 - in_time, 0.0)
            found = 1 - in_time
            for point, weight in zip(_POINTS.tolist(), _WEIGHTS.tolist(), strict=True):
                service = mean * np.exp(width * normal_quantile(in_time * point) - width**2 / 2)
                found = found + in_time * weight * waits(limit - service)
            return found

        return missed

    def _waits(
        self, metric: Metric, state: _State, left: Callable[[Column], Column] | None
    ) -> Callable[[Column], Column]:
        """Return a function: the share of requests that wait longer than so many seconds; of TPOT, none."""
        if metric == "tpot":
            return np.zeros_like
        waits = [self._slot_wait(state)]
        if metric == "ttft" and (self._service.most > 1).any():
            waits.append(prompt_wait(self._service, state.utilisation, self._variation))
        times = self._law("e2e").factor(state.z)

        def longer(than_s: Column) -> Column:
            than_s = np.maximum(than_s, 0.0)
            kept = 1 - waits[0].beyond(than_s / times)
            for wait in waits[1:]:
                kept = kept * (1 - wait.beyond(than_s / times))
            return np.asarray(1 - (kept if left is None else kept * (1 - left(than_s))))

        return longer

    def _slot_wait(self, state: _State) -> Wait:
        return slot_wait(self._service, state.utilisation, self._variation, state.running.peak)


def _alone(estimate: Estimate) -> tuple[float, ...]:
    ttft, tpot = estimate.ttft_s, estimate.tpot_s
    return ttft.value, ttft.low, ttft.high, tpot.value, tpot.high


def _with_longer_contexts(service: ServiceColumns, input_tokens: Column, traffic: Traffic) -> ServiceColumns:
    """Return the columns where a step grows with contexts as long as those of the answers that are under way."""
    answer = service.more_tokens + 1
    longer = (input_tokens + answer * (1 + traffic.output_cv**2) / 2) / (input_tokens + answer / 2)
    slopes_s = longer * service.slopes_s
    alone_s = service.intercepts_s[0] + service.slopes_s[0]
    return replace(service, intercepts_s=longer * service.intercepts_s + (1 - longer) * alone_s, slopes_s=slopes_s)
