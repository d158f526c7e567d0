"""The probability that a request misses a latency limit under an arrival rate, for many configurations at once.

What is uncertain, and how it is put together:

*   *The truth.* The interval of an estimate is taken for a law over the truth: lognormal on each side of the
    value, a twentieth beyond either end. TTFT, TPOT and E2E are wrong together (an E2E has the sum of their
    intervals), so there is one normal number z for all, and the probability is the mean over it. Where the truth
    would leave no steady queue, every request misses.
*   *How many run at once*, the chain of ``planner.queueing`` as if there were slots for all: with ``q = rate * B``
    a negative binomial of mean ``m = rate (A + B z) / (1 - q)`` and variance ``z m / (1 - q)`` at peakedness z. A
    request runs among ``m + z``, itself included, by which Little's law holds; never among more than there are
    slots.
*   *The request's own length*, of a mean as the workload says and a given coefficient of variation.
*   *The waits*: for a slot; and, where there are several, for prompts that are under way, a queue of one server
    whose service is a prompt's share of a batch's TTFT. Besides, a first token waits for half a step.

*   *The rate*, where it moves (``planner.rate_profile``): the mean over its levels. Who comes while a busy time
    left work finds every slot taken and waits for that work; else a level is as if it lasted (Green and Kolesar's
    pointwise stationary approximation). But while the rate stays near it a queue only grows so long as a random
    walk of as many requests goes: no level above the mean rate counts as busier than the one whose steady queue is
    that long; and those below it count as near the mean as a queue of the mean rate still is then.

A time is a lognormal service (the second and third together) plus an independent exponential wait. Of several
limits the one that is missed most often counts: all grow with the same load and the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.cells import Column, Rows
from planner.intent import Traffic
from planner.normal_distribution import normal_cdf, normal_quantile
from planner.paces import Paces, Uncertain
from planner.queueing import Tail, peakedness, wait_probability, wait_tail
from planner.rate_profile import moving_rate

__all__ = ["Attainment", "Metric"]

Metric = Literal["ttft", "tpot", "e2e"]

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2  # of [0, 1]
_MIDDLE, _OTHERS = [2], [0, 1, 3, 4, 5, 6, 7]  # of the eight truths; the first alone has a third of the weight
_TINY = 1e-300
_LARGEST = 1 - 1e-9  # utilisation; beyond, no wait is worth a number
_FLAT = 1e-3
# In logarithms, from what a time is without load, and from the highest rate there can be: nothing is farther off.
_OFF_TIME = np.array([-21, -4, -2.5, -2, -1.5, -1, -0.75, -0.5, -0.3, -0.2, -0.1, 0.0, 0.1, 0.3, 1, 21])
_OFF_RATE = np.array([-21, -8, -5, -4, -3, -2.5, -2, -1.5, -1.2, -0.9, -0.7, -0.5, -0.3, -0.2, -0.1, 0.0])
_CLOSE = 1e-4
_TURNS, _SECTIONS = 60, 16


class _Load(NamedTuple):
    """A level of the rate: its number, and requests per second of each configuration, then and on average."""

    level: int
    then: Column
    mean: Column

    def take(self, rows: Rows) -> _Load:
        return _Load(self.level, self.then[rows], self.mean[rows])


class _State(NamedTuple):
    """State of the queue: a truth of each configuration, and the load that follows from it: all [..., rows]."""

    z: Column
    mean: Column  # utilisation over all levels, below 1
    utilisation: Column  # below 1
    among: Column  # how many run at once while a request runs, itself included
    spread: Column  # standard deviation of that


class Attainment:
    """Answers for ``paces`` under ``traffic``. Rates are columns too, or one number for all."""

    def __init__(self, seen: Paces, traffic: Traffic) -> None:
        self._seen, self._traffic = seen, traffic
        one = seen.slots <= 1
        per_slot = (seen.e2e_s.value - seen.e2e_alone_s) / np.where(one, 1.0, seen.slots - 1)
        self._grows = np.where(one, seen.e2e_s.value, per_slot)  # B
        self._fixed = np.where(one, 0.0, seen.e2e_alone_s - per_slot)  # A
        self._fixed_share = self._fixed / seen.e2e_s.value
        prompts = np.minimum(seen.prompt_s / self.service_s, 1.0)  # of the work
        self._work_cv = np.hypot(prompts * traffic.input_cv, (1 - prompts) * traffic.output_cv)
        self._moving = moving_rate(traffic.relative_rates)
        self._stays_s = self._moving.stays * traffic.window_s if traffic.relative_rates else np.inf
        self._largest_cv = max(traffic.input_cv, traffic.output_cv)  # no mixture of the two is above it

    def __len__(self) -> int:
        return len(self._seen.slots)

    def take(self, rows: Rows) -> Attainment:
        return Attainment(self._seen.take(rows), self._traffic)

    def slowed(self, times: Column) -> Attainment:
        """Return the attainment where everything takes ``times`` as long."""
        return Attainment(self._seen.slowed(times), self._traffic)

    @cached_property
    def service_s(self) -> Column:
        """Seconds of the deployment that a request takes, when every slot is taken."""
        return np.asarray(self._seen.e2e_s.value / self._seen.slots)

    def service_at(self, percentile: float) -> Column:
        """The same at that percentile of the truth."""
        z = np.full(len(self), float(normal_quantile(np.array(percentile / 100))))
        return np.asarray(self.service_s * self._seen.e2e_s.factor(z))

    def alone_high(self, metric: Metric) -> Column:
        """Return the metric of a request alone, at the upper end of its interval."""
        seen = self._seen
        highs = {"ttft": seen.ttft_alone_high_s, "tpot": seen.tpot_alone_high_s, "e2e": seen.e2e_alone_high_s}
        return highs[metric]

    def misses(self, metric: Metric, limit_s: Column | float, rate_per_s: Column | float) -> Column:
        """The share of requests whose ``metric`` is above ``limit_s``."""
        limit, rate = self._column(limit_s), self._column(rate_per_s)
        found = np.zeros(len(self))
        for number, level in enumerate(self._moving.levels):
            load = _Load(number, rate * level.relative_rate, rate)
            sure, z, weights = self._truths(metric, limit, load)
            missed = self._misses_at(metric, limit, load, z)
            found += level.share * np.clip(sure + (weights * missed).sum(axis=0), 0.0, 1.0)
        return found

    def mean_e2e(self, rate_per_s: Column | float, z: float = 0.0) -> Column:
        """Seconds from arrival to the last token in the mean, where the truth is ``z`` standard deviations from
        the estimate's value: ``A + B among`` and the wait for a slot, over the levels of a rate that moves;
        infinite where it is not served.

        Who finds work left of a busy time has a full batch beside it and waits for that work as well: no less than
        what ``misses`` adds up to, which takes the longer of the two.
        """
        rate, truth = self._column(rate_per_s), np.full(len(self), z)
        times, found = self._seen.e2e_s.factor(truth), np.zeros(len(self))
        for number, level in enumerate(self._moving.levels):
            state = self._state(truth, _Load(number, rate * level.relative_rate, rate))
            own_s, queue_s = times * (self._fixed + self._grows * state.among), self._mean_slot_wait(state)
            if self._traffic.relative_rates:
                late = self._left(number, state)(np.zeros(len(self)))
                own_s = own_s + late * (times * self._seen.e2e_s.value - own_s)
                queue_s = queue_s + self._moving.mean_left(number, state.mean) * self._traffic.window_s
            found += level.share * (own_s + queue_s)
        return np.where(rate >= 1 / (times * self.service_s), np.inf, found)

    def misses_given(
        self, metric: Metric, limit_s: Column | float, rate_per_s: Column | float, z: float
    ) -> Column:
        """Return ``misses``, were the truth known to be ``z`` standard deviations from the estimate's value."""
        limit, rate, truth = self._column(limit_s), self._column(rate_per_s), np.full((1, len(self)), z)
        found = np.zeros(len(self))
        for number, level in enumerate(self._moving.levels):
            load = _Load(number, rate * level.relative_rate, rate)
            found += level.share * self._misses_at(metric, limit, load, truth)[0]
        served = rate * self.service_s * self._seen.e2e_s.factor(truth[0]) < _LARGEST
        return np.where(served, np.clip(found, 0.0, 1.0), 1.0)

    def exceeds(
        self, metric: Metric, limit_s: Column | float, rate_per_s: Column | float, share: float
    ) -> npt.NDArray[np.bool_]:
        """Return whether ``misses`` is above ``share``, at less cost: a sum of what is not negative is above it
        once a part of it is, and one truth in the middle settles most rows."""
        limit, rate = self._column(limit_s), self._column(rate_per_s)
        found = np.zeros(len(self))
        for number, level in sorted(enumerate(self._moving.levels), key=lambda one: -one[1].relative_rate):
            rows = np.flatnonzero(found <= share)
            if not len(rows):
                break
            some = self if len(rows) == len(self) else self.take(rows)
            enough = (share - found[rows]) / level.share
            load = _Load(number, level.relative_rate * rate[rows], rate[rows])
            found[rows] += level.share * some._misses_upto(metric, limit[rows], load, enough)
        return np.asarray(found > share)

    def _misses_upto(self, metric: Metric, limit: Column, load: _Load, enough: Column) -> Column:
        """``misses`` at one level, or a part of it that is above ``enough``."""
        found, z, weights = self._truths(metric, limit, load)
        rows = np.arange(len(self))
        for points in _MIDDLE, _OTHERS:
            rows = rows[found[rows] <= enough[rows]]
            if not len(rows):
                break
            some = self if len(rows) == len(self) else self.take(rows)
            missed = some._misses_at(metric, limit[rows], load.take(rows), z[points][:, rows])
            found[rows] += (weights[points][:, rows] * missed).sum(axis=0)
        return np.minimum(found, 1.0)

    def _column(self, value: Column | float) -> Column:
        return np.broadcast_to(np.asarray(value, np.float64), (len(self),))

    def _truths(self, metric: Metric, limit: Column, load: _Load) -> tuple[Column, Column, Column]:
        """The share of truths that leave no steady queue; and the points, [points, rows], at which the others are
        looked at, with their weights."""
        full = load.mean * self.service_s
        steady = normal_cdf(self._seen.e2e_s.z_of(_LARGEST / np.maximum(full, _TINY)))
        middle = np.minimum(normal_cdf(self._where_it_turns(metric, limit, load)), steady)
        quick = np.minimum(self._never_late(metric, limit), middle)
        below, above = quick + (middle - quick) * _POINTS[:, None], middle + (steady - middle) * _POINTS[:, None]
        weights = np.concatenate([(middle - quick) * _WEIGHTS[:, None], (steady - middle) * _WEIGHTS[:, None]])
        return 1 - steady, normal_quantile(np.concatenate([below, above])), weights

    def _never_late(self, metric: Metric, limit: Column) -> Column:
        """The share of truths under which TPOT keeps ``limit`` with every slot taken: beyond them the share that
        misses it jumps, and no point may stand for both sides."""
        if metric != "tpot":
            return np.zeros(len(self))
        most = self._per_token(self._fixed + self._grows * self._seen.slots)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.clip(self._seen.tpot_s.z_of(limit / most), -8.0, 8.0)
        return np.where(self._batches, normal_cdf(z), 0.0)

    def _where_it_turns(self, metric: Metric, limit: Column, load: _Load) -> Column:
        """The truth at which the service alone is as long as the limit, by a few steps to a fixed point."""
        z = np.zeros(len(self))
        law = self._law(metric)
        for _ in range(3):
            mean, _ = self._service(metric, self._state(z, load))
            with np.errstate(invalid="ignore"):
                z = np.clip(law.z_of(limit * law.factor(z) / mean), -8.0, 8.0)
        return z

    def _state(self, z: Column, load: _Load) -> _State:
        work_s = self.service_s * self._seen.e2e_s.factor(z)
        mean = np.minimum(load.mean * work_s, _LARGEST)
        utilisation = np.minimum(load.then * work_s, _LARGEST)
        if self._traffic.relative_rates:
            utilisation = self._reached(work_s, mean, utilisation)
        pace = utilisation / self.service_s  # arrivals in units of the value's times
        peak = peakedness(utilisation * self._seen.slots, self._traffic.burstiness, self._traffic.output_cv)
        alone = 1 - pace * self._grows
        others = pace * (self._fixed + self._grows * peak) / alone
        among = np.clip(others + peak, 1.0, self._seen.slots)
        # No law between 1 and the slots has a larger variance than the second (Bhatia and Davis).
        variance = np.minimum(peak * others / alone, (self._seen.slots - among) * (among - 1))
        return _State(z, mean, utilisation, among, np.sqrt(variance))

    def _reached(self, work_s: Column, mean: Column, there: Column) -> Column:
        """The utilisation whose steady queue is the one that a level has in the time for which the rate stays.

        With v the sum of the squared variations, a reflected random walk without drift is
        ``sqrt(2 v work_s t / pi)`` long after t; a queue is forgotten after ``v work_s / (1 - utilisation)**2``.
        """
        varied_s = (self._traffic.burstiness**2 + self._work_cv**2) * work_s
        busiest = 1 - np.sqrt(np.pi * varied_s / (8 * self._stays_s))
        forgotten_s = varied_s / (1 - mean) ** 2
        below = mean + (there - mean) * self._stays_s / (self._stays_s + forgotten_s)
        return np.where(there > mean, np.minimum(there, np.maximum(busiest, mean)), below)

    def _service(self, metric: Metric, state: _State) -> tuple[Column, Column]:
        """Mean of the time without waits, and its squared coefficient of variation."""
        seen, traffic = self._seen, self._traffic
        together = self._fixed + self._grows * state.among
        wobble = self._grows * state.spread
        if metric == "e2e":
            prompt = np.minimum(seen.ttft_s.value / together, 1.0)
            own = (prompt * traffic.input_cv) ** 2 + ((1 - prompt) * traffic.output_cv) ** 2
            return together * seen.e2e_s.factor(state.z), (wobble / together) ** 2 + own
        steps = seen.output_tokens - 1
        if metric == "tpot":
            later = np.maximum(together - seen.ttft_s.value, _TINY)
            squared = np.where(self._batches & (steps > 0), (wobble / later) ** 2, 0.0)
            return self._per_token(together) * seen.tpot_s.factor(state.z), squared
        grown = (seen.tpot_s.value - seen.tpot_alone_s) / np.maximum(seen.slots - 1, 1) * (state.among - 1)
        step_s = (seen.tpot_alone_s + grown) * np.minimum(state.utilisation * seen.slots, 1.0) / 2
        beside_s = np.where(seen.slots > 1, step_s + grown, 0.0) * seen.tpot_s.factor(state.z)
        own_s = seen.ttft_s.value * seen.ttft_s.factor(state.z)
        return own_s + beside_s, (traffic.input_cv * own_s / (own_s + beside_s)) ** 2

    def _per_token(self, together: Column) -> Column:
        """TPOT of a request whose whole time is ``together``."""
        seen, steps = self._seen, self._seen.output_tokens - 1
        later = np.maximum(together - seen.ttft_s.value, _TINY) / np.maximum(steps, 1)
        # Alone, or where nothing is known of one request alone, it is the estimate's own.
        return np.asarray(np.where(self._batches & (steps > 0), later, seen.tpot_s.value))

    @cached_property
    def _batches(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._grows * (self._seen.slots > 1) > 0)

    def _misses_at(self, metric: Metric, limit: Column, load: _Load, z: Column) -> Column:
        """[points, rows]: at each truth z."""
        state = self._state(z, load)
        missed = self._misses_in(metric, limit, state, None)
        if not self._traffic.relative_rates:
            return missed
        left = self._left(load.level, state)
        late = left(np.zeros_like(missed))
        if not late.any():
            return missed
        full = state._replace(among=np.broadcast_to(self._seen.slots, z.shape), spread=np.zeros_like(z))
        some = np.maximum(late, _TINY)
        return missed + late * (self._misses_in(metric, limit, full, lambda wait_s: left(wait_s) / some) - missed)

    def _left(self, level: int, state: _State) -> Callable[[Column], Column]:
        """Return a function: the share of requests at a level that find at least ``wait_s`` of work left."""

        def beyond(wait_s: Column) -> Column:
            return self._moving.left_beyond(level, state.mean, wait_s / self._traffic.window_s)

        return beyond

    def _misses_in(
        self, metric: Metric, limit: Column, state: _State, left: Callable[[Column], Column] | None
    ) -> Column:
        """Return the share that misses of arrivals in that state; ``left``: the share finding more work left."""
        mean, squared = self._service(metric, state)
        if not squared.any():
            return np.where(mean > limit, 1.0, self._waits(metric, limit - mean, state, left))
        width = np.sqrt(np.log1p(squared))
        with np.errstate(divide="ignore", invalid="ignore"):
            turn = np.log(limit / mean) / width + width / 2
        in_time = normal_cdf(np.where(width > 0, turn, np.where(mean > limit, -np.inf, np.inf)))
        missed = 1 - in_time
        if metric == "tpot":
            most = self._per_token(
                self._fixed + self._grows * self._seen.slots
            )  # never more run than there are slots
            return np.where(limit < most * self._seen.tpot_s.factor(state.z), missed, 0.0)
        for point, weight in zip(_POINTS.tolist(), _WEIGHTS.tolist(), strict=True):
            service = mean * np.exp(width * normal_quantile(in_time * point) - width**2 / 2)
            missed = missed + in_time * weight * self._waits(metric, limit - service, state, left)
        return missed

    def _waits(
        self, metric: Metric, longer_than_s: Column, state: _State, left: Callable[[Column], Column] | None
    ) -> Column:
        """The share of requests that wait longer, 0 of TPOT."""
        if metric == "tpot":
            return np.zeros_like(longer_than_s)
        wait_s = np.maximum(longer_than_s, 0.0)
        missed = self._slot_wait(wait_s, state)
        if metric == "ttft" and (self._seen.slots > 1).any():
            missed = 1 - (1 - missed) * (1 - self._prompt_wait(wait_s, state))
        if left is not None:
            missed = 1 - (1 - missed) * (1 - left(np.broadcast_to(wait_s, missed.shape)))
        return missed

    def _slot_wait(self, longer_than_s: Column, state: _State) -> Column:
        often, tail = self._slot_queue(state)
        return often * tail.beyond(longer_than_s / (self.service_s * self._seen.e2e_s.factor(state.z)))

    def _mean_slot_wait(self, state: _State) -> Column:
        often, tail = self._slot_queue(state)
        return often * tail.mean * self.service_s * self._seen.e2e_s.factor(state.z)

    def _slot_queue(self, state: _State) -> tuple[Column, Tail]:
        """Return the share of requests that wait for a slot, and the tail of their wait."""
        seen, traffic = self._seen, self._traffic
        often = np.empty_like(state.utilisation)
        for slots in np.unique(seen.slots).tolist():
            rows = seen.slots == slots
            often[..., rows] = wait_probability(
                state.utilisation[..., rows],
                self._fixed_share[rows],
                int(slots),
                traffic.burstiness,
                traffic.output_cv,
            )
        return often, wait_tail(state.utilisation, traffic.burstiness, self._work_cv, self._largest_cv)

    def _prompt_wait(self, longer_than_s: Column, state: _State) -> Column:
        seen, traffic = self._seen, self._traffic
        busy = state.utilisation * seen.prompt_s / self.service_s
        often = wait_probability(busy, np.zeros(len(self)), 1, traffic.burstiness, traffic.input_cv)
        tail = wait_tail(busy, traffic.burstiness, np.full(len(self), traffic.input_cv), self._largest_cv)
        # Those that come while a step runs are served together by the next: who waits for others that came before
        # it waits for as many that came after. All but the rest of the step under way is such a wait.
        mean = often * tail.mean
        together = np.clip(2 - busy * (1 + traffic.input_cv**2) / 2 / np.maximum(mean, _TINY), 1.0, 2.0)
        waits = often * tail.beyond(longer_than_s / (seen.prompt_s * seen.e2e_s.factor(state.z) * together))
        return np.where(seen.slots > 1, waits, 0.0)

    def quantile(self, metric: Metric, percentile: float, rate_per_s: Column | float) -> Column:
        """Seconds that ``percentile`` % of the requests do not exceed, at most 0.01% too many; infinite where
        so many truths leave no steady queue."""
        middle = np.log(self._law(metric).value)

        def excess(x: Column, rows: Rows) -> Column:
            rates = rate_per_s[rows] if isinstance(rate_per_s, np.ndarray) else rate_per_s
            return _excess(self.take(rows).misses(metric, np.exp(-x), rates), percentile)

        return np.asarray(np.exp(-_crossing(excess, _OFF_TIME[:, None] - middle)))

    def highest_rate(self, limits_s: Mapping[Metric, Column], percentile: float, most: Column) -> Column:
        """The highest rate up to ``most`` at which ``percentile`` % of the requests keep every limit; 0 where
        it is not worth a number."""

        def excess(x: Column, rows: Rows) -> Column:
            rate, some = np.exp(x), self.take(rows)
            worst = np.max([some.misses(metric, limit[rows], rate) for metric, limit in limits_s.items()], axis=0)
            return _excess(worst, percentile)

        top = np.log(np.maximum(most, _TINY))
        return np.asarray(np.minimum(np.exp(_crossing(excess, top + _OFF_RATE[:, None])), most))

    def _law(self, metric: Metric) -> Uncertain:
        return {"ttft": self._seen.ttft_s, "tpot": self._seen.tpot_s, "e2e": self._seen.e2e_s}[metric]


def _excess(missed: Column, percentile: float) -> Column:
    """Above 0 where more miss than may."""
    allowed = 1 - percentile / 100
    return np.asarray(np.log(np.maximum(missed / allowed, _FLAT)))  # beyond, a straight line is no guide


def _crossing(excess: Callable[[Column, Rows], Column], ladder: Column) -> Column:
    """The largest x on ``ladder`` or between at which a rising ``excess`` is at most 0, within 1e-4 below it;
    -inf where it is above 0 everywhere, infinite where it is nowhere.

    The ladder and a section of it are asked at once, which of few rows costs as much as asking one x; then regula
    falsi between halvings, never closer to an end than half the tolerance, so that both ends close in. What is
    done to a row does not depend on those beside it.

    Args:
        excess: of x in the given rows of the columns; only those are asked that are still open.
        ladder: [steps, rows], ascending.
    """
    every = np.arange(ladder.shape[1])
    there = _asked(excess, ladder, every)
    never, always = there[0] > 0, there[-1] <= 0
    low, high, at_low, at_high = _between(ladder, there)
    for turn in range(_TURNS):
        rows = np.flatnonzero(~(never | always) & (high - low > _CLOSE))
        if not len(rows):
            break
        left, right, at_left, at_right = low[rows], high[rows], at_low[rows], at_high[rows]
        if turn == 0:
            x = np.linspace(left, right, _SECTIONS + 1)
            there = np.concatenate([at_left[None], _asked(excess, x[1:-1], rows), at_right[None]])
            low[rows], high[rows], at_low[rows], at_high[rows] = _between(x, there)
            continue
        x = (left + right) / 2
        if turn % 5:
            with np.errstate(divide="ignore", invalid="ignore"):
                straight = left - at_left * (right - left) / (at_right - at_left)
            x = np.where(np.isfinite(straight), np.clip(straight, left + _CLOSE / 2, right - _CLOSE / 2), x)
        here = excess(x, rows)
        fine = here <= 0
        # Illinois: what stays where it was counts half.
        low[rows], at_low[rows] = np.where(fine, x, left), np.where(fine, here, at_left / 2)
        high[rows], at_high[rows] = np.where(fine, right, x), np.where(fine, at_right / 2, here)
    return np.where(never, -np.inf, np.where(always, np.inf, low))


def _asked(excess: Callable[[Column, Rows], Column], x: Column, rows: Rows) -> Column:
    """``excess`` of all of x, [steps, rows], at once."""
    return excess(x.ravel(), np.tile(rows, len(x))).reshape(x.shape)


def _between(x: Column, there: Column) -> tuple[Column, Column, Column, Column]:
    """The last step whose lower end is not above 0: its ends, and what is there."""
    step = len(x) - 2 - np.argmax((there <= 0)[-2::-1], axis=0)
    row = np.arange(x.shape[1])
    return x[step, row], x[step + 1, row], there[step, row], there[step + 1, row]
