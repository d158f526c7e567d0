"""Admission control of one deployment: rejects requests forecast to be late, and learns how forecasts err.

A request is *late* where its forecast (``planner.latency_forecast``) exceeds a limit of the SLO. It is checked on
arrival, by what is before it, and once more when its turn is reached, by what it has waited. A request that finds
an idle replica on arrival is never rejected: it delays no other, and if the forecast says that it cannot keep its
limits even so, serving it is how the forecast is found out. So there is no state of the controller, however wrong
its times, in which an idle deployment rejects.

Six ratios are learned from what is served, each an exponential mean that begins at what the plan says and
stays within bounds: what prompts, steps and loads take, how long answers get (of ``max_tokens``, which may be a
bound that none reaches; of the planned length where none is given), and what whole requests take by their
forecast. Of the last the mean is not enough: under overload the queue grows until forecasts are just within the
limit, and then half of the accepted would be late. It is taken with twice its mean deviation, as TCP's
retransmission timer does (Jacobson 1988). At its turn a request has its wait behind it, and is judged by the
forecast itself.

A request for a variant that its worker has not loaded waits for that load, and for those before it
(``planner.pending_loads``). Its prompt begins after them, and what it takes is learned from then on.
What loads take is learned of each load once, whether or not requests wait for it.

Times are seconds of the caller's clock. Used by the gateway on a real one and by the simulator on its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel
from planner.intent import Slo
from planner.latency_forecast import LatencyForecast, RemainingWork, forecast_latency, forecast_queue
from planner.pending_loads import LoadsAhead

__all__ = ["AdmissionController", "AdmissionPolicy", "InFlightRequest", "LearnedRatio", "Rejection"]

_FARTHEST = 8.0  # from what the plan says, either way
_LARGEST_BOUND = 4096.0  # over what an answer gets: some clients give one bound whatever they ask
_LEAST_ERROR, _MOST_ERROR = 0.5, 2.0  # of whole requests, over their forecast
_OLDEST = 1 / 16  # weight of the latest, once many have been seen
_AT_ONCE_S = 0.05  # a request that has waited no longer arrives now
_ROUNDING_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionPolicy:
    """Limits of a deployment that rejects late requests, and the times of a replica by its plan.

    Raises:
        ConfigError: no slot, or no token in or out.
    """

    slo: Slo
    service: ServiceModel
    slots: int  # requests that a replica runs at once, as far as their variants find slots

    def __post_init__(self) -> None:
        given = (self.slots, self.service.input_tokens, self.service.output_tokens)
        if min(given) < 1:
            slots, input_tokens, output_tokens = given
            raise ConfigError(
                "a forecast needs at least one slot and one token each way, "
                f"got {slots} slots, {input_tokens:g} tokens in and {output_tokens:g} out"
            )

    @property
    def at_once(self) -> int:
        """Requests that a replica runs at once on average when as many wait, to the nearest one."""
        return max(1, round(min(self.slots, self.service.most_at_once or self.slots)))


class LearnedRatio(NamedTuple):
    """Ratio of what is seen to what was expected: mean, mean deviation, and count (the plan counts as one)."""

    mean: float = 1.0
    deviation: float = 0.0
    number: int = 1

    def updated(self, value: float, farthest: float = _FARTHEST) -> LearnedRatio:
        """Return the average updated with one more observation."""
        value = min(max(value, 1 / farthest), farthest)
        weight = max(_OLDEST, 1 / (self.number + 1))
        error = value - self.mean
        deviation = self.deviation + weight * (abs(error) - self.deviation)
        return LearnedRatio(self.mean + weight * error, deviation, self.number + 1)

    @property
    def high(self) -> float:
        """Ratio that few exceed."""
        return self.mean + 2 * self.deviation


class Rejection(NamedTuple):
    """Reason why a request is rejected."""

    limit: str  # "ttft" | "tpot" | "e2e", as an SLO is written
    forecast_s: float  # what it would take, its wait so far included
    limit_s: float
    late_alone: bool  # it would be late with none before it
    retry_after_s: float  # until it is likely to be accepted, should no other arrive
    loads_s: float = 0.0  # until its variant is loaded


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """Request from its arrival to its end, as far as it is known."""

    input_tokens: float
    output_tokens: float  # the most that it may get, or the planned length
    is_bounded: bool  # the former
    is_streamed: bool  # its tokens are seen as they are made
    arrived_s: float  # its wait counts from then on
    started_s: float | None = None
    first_token_s: float | None = None
    tokens_seen: int = 0
    body_bytes: int = 0  # that it arrived in, where a prompt's length is known by them alone
    planned: LatencyForecast | None = None  # by the plan's own times, when it started
    promised: tuple[str, float] | None = None  # on arrival: the limit that was nearest, and its forecast
    held: tuple[float, LoadsAhead] | None = None  # since when it waits at its worker, and for which loads


class AdmissionController:
    """Admission controller of one deployment."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._slo, self._slots, self._planned = policy.slo, policy.at_once, policy.service
        self._prompt_ratio, self._step_ratio, self._error_ratio = LearnedRatio(), LearnedRatio(), LearnedRatio()
        self._bound_ratio, self._length_ratio, self._load_ratio = LearnedRatio(), LearnedRatio(), LearnedRatio()
        self._seen = policy.service  # as the ratios say

    def new_request(
        self, arrived_s: float, input_tokens: float, max_tokens: int | None = None, *, is_streamed: bool = True
    ) -> InFlightRequest:
        """Return the state of a request that has just arrived."""
        output_tokens = self._planned.output_tokens if max_tokens is None else max(1, max_tokens)
        return InFlightRequest(input_tokens, output_tokens, max_tokens is not None, is_streamed, arrived_s)

    def check_start(
        self,
        request: InFlightRequest,
        running: Collection[InFlightRequest],
        now_s: float,
        loads: LoadsAhead | None = None,
    ) -> Rejection | None:
        """Judge a request that would be sent now next to ``running``; None: it keeps its limits, or finds none.

        Args:
            loads: what it would wait for there; None: its variant is loaded, or it is for the base.
        """
        work = self._remaining(running, now_s)
        wait_s = self._with_loads(request, loads, 0.0)
        forecast = forecast_latency(self._seen, work, self._all_of(request), wait_s)
        rejection = self._rejection(request, forecast, now_s, [running], [work], (), loads)
        is_idle_on_arrival = not running and now_s - request.arrived_s <= _AT_ONCE_S
        return None if is_idle_on_arrival else rejection

    def check_queue(
        self,
        request: InFlightRequest,
        replicas: Sequence[Collection[InFlightRequest]],
        waiting: Iterable[InFlightRequest],
        now_s: float,
        loads: LoadsAhead | None = None,
    ) -> Rejection | None:
        """Judge a request that would wait behind ``waiting`` for a slot of ``replicas``; there is at least one.

        Args:
            loads: what it waits for where those are fewest, as in :meth:`check_start`.
        """
        work = [self._remaining(running, now_s) for running in replicas]
        queue = [self._all_of(one) for one in waiting]
        wait_s, _ = forecast_queue(self._seen, self._slots, work, queue)
        full = [RemainingWork(0.0, 1.0)] * (self._slots - 1)
        wait_s = self._with_loads(request, loads, wait_s)
        forecast = forecast_latency(self._seen, full, self._all_of(request), wait_s)
        return self._rejection(request, forecast, now_s, replicas, work, queue, loads)

    def record_start(
        self,
        request: InFlightRequest,
        running: Collection[InFlightRequest],
        now_s: float,
        loads: LoadsAhead | None = None,
    ) -> None:
        """Record that ``request`` is sent next to ``running``, or anew; it starts once ``loads`` have ended."""
        request.started_s, request.first_token_s, request.tokens_seen = now_s, None, 0
        if loads is not None:
            request.held, request.started_s, request.planned = (now_s, loads), None, None
            return
        request.held = None
        all_of = RemainingWork(request.input_tokens, request.output_tokens)
        planned = forecast_latency(self._planned, self._remaining(running, now_s), all_of)
        counted_s = self._planned.counted_loads_s(request.input_tokens)
        request.planned = planned._replace(ttft_s=planned.ttft_s - counted_s)

    def record_loaded(self, request: InFlightRequest, running: Collection[InFlightRequest], now_s: float) -> None:
        """Record that the variant of ``request``, which was sent, is loaded."""
        if request.held is None and (request.started_s is None or now_s - request.started_s <= _AT_ONCE_S):
            return  # there was nothing to wait for
        self.record_start(request, running, now_s)

    def record_load(self, took_s: float) -> None:
        """Learn from a load that a worker has made: once, however many requests have waited for it."""
        if (load := self._planned.one_load) is not None and load.load_s > 0:
            self._load_ratio = self._load_ratio.updated(took_s / load.load_s)

    def record_tokens(self, request: InFlightRequest, tokens: int, now_s: float) -> None:
        """Record so many more tokens of its answer."""
        request.tokens_seen += max(0, tokens)
        if request.first_token_s is None and tokens > 0:
            request.first_token_s = now_s
            if request.planned is not None and request.started_s is not None and request.planned.ttft_s > 0:
                ratio = (now_s - request.started_s) / request.planned.ttft_s
                self._prompt_ratio = self._prompt_ratio.updated(ratio)
                self._apply_ratios()

    def record_end(self, request: InFlightRequest, now_s: float, tokens: int | None = None) -> None:
        """Record that the answer of ``request`` is complete, and learn from it.

        Args:
            tokens: of it, where that is known; None: as many as were seen.
        """
        count = request.tokens_seen if tokens is None else tokens
        if count < 1 or request.started_s is None or request.planned is None:
            return
        first_s = request.first_token_s
        if first_s is None:
            first_s = min(now_s, request.started_s + request.planned.ttft_s * self._prompt_ratio.mean)
        took_s = {"ttft": first_s - request.arrived_s, "e2e": now_s - request.arrived_s}
        if count > 1:
            took_s["tpot"] = (now_s - first_s) / (count - 1)
            self._step_ratio = self._step_ratio.updated(took_s["tpot"] / request.planned.tpot_s)
        if request.promised is not None and request.promised[0] in took_s:
            limit, promised_s = request.promised
            self._error_ratio = self._error_ratio.updated(took_s[limit] / promised_s)
        share = count / request.output_tokens
        if request.is_bounded:
            self._bound_ratio = self._bound_ratio.updated(share, _LARGEST_BOUND)
        else:
            self._length_ratio = self._length_ratio.updated(share)
        self._apply_ratios()

    def _apply_ratios(self) -> None:
        self._seen = self._planned.slowed(self._prompt_ratio.mean, self._step_ratio.mean)

    def _all_of(self, request: InFlightRequest) -> RemainingWork:
        """Return the work of a request that has not started, its answer as long as answers are expected to be."""
        share = min(1.0, self._bound_ratio.mean) if request.is_bounded else self._length_ratio.mean
        return RemainingWork(request.input_tokens, max(1.0, request.output_tokens * share))

    def _remaining(self, running: Collection[InFlightRequest], now_s: float) -> list[RemainingWork]:
        """Return the work left of each request: as seen, or as the time that it has run says."""
        step_s = self._seen.loaded_step_of(len(running))
        left = []
        load = self._seen.one_load
        for one in running:
            prompt_tokens, output_tokens = self._all_of(one)
            if one.held is not None and load is not None and not load.stops_steps:
                left.append(RemainingWork(0.0, output_tokens))  # its prompt is after those that can start now
                continue
            if one.tokens_seen:
                left.append(RemainingWork(0.0, max(1.0, output_tokens - one.tokens_seen)))
                continue
            ran_s = 0.0 if one.started_s is None else now_s - one.started_s
            prompt_s = self._seen.prompts_s(prompt_tokens)
            if one.is_streamed or ran_s < prompt_s:
                left.append(RemainingWork(prompt_tokens * max(0.0, 1 - ran_s / prompt_s), output_tokens))
            else:
                left.append(RemainingWork(0.0, max(1.0, output_tokens - 1 - (ran_s - prompt_s) / step_s)))
        return left

    def _held_s(self, running: Collection[InFlightRequest], now_s: float) -> float:
        """Return the time until none of ``running`` waits for the load of its variant."""
        held = (one.held for one in running if one.held is not None)
        return max((0.0, *(self._loads_left_s(loads) - (now_s - since_s) for since_s, loads in held)))

    def _loads_left_s(self, loads: LoadsAhead | None) -> float:
        """Return the time until a request's variant is loaded, if nothing of it waits for its turn."""
        load = self._planned.one_load
        return 0.0 if loads is None or load is None else loads.left_s(self._load_ratio.mean * load.load_s)

    def _with_loads(self, request: InFlightRequest, loads: LoadsAhead | None, wait_s: float) -> float:
        """Return the time until ``request`` starts, whose turn is in ``wait_s``.

        Loads that stop the steps are on top of that wait, which has those of the prompts before it, and in place
        of those that its own prompt counts on average. Loads next to the steps run meanwhile, in their order.
        """
        load, left_s = self._seen.one_load, self._loads_left_s(loads)
        if loads is None or load is None:
            return wait_s
        if load.stops_steps:
            return wait_s + left_s - self._seen.counted_loads_s(request.input_tokens)
        return max(wait_s, left_s + loads.waiting * self._load_ratio.mean * load.load_s)

    def _rejection(
        self,
        request: InFlightRequest,
        forecast: LatencyForecast,
        now_s: float,
        replicas: Sequence[Collection[InFlightRequest]],
        work: Sequence[Sequence[RemainingWork]],
        queue: Sequence[RemainingWork],
        loads: LoadsAhead | None,
    ) -> Rejection | None:
        """Return the limit that it misses by most; what it is promised on arrival is remembered.

        Args:
            work: what is left of the requests at ``replicas``, without the loads that they wait for.
        """
        waited_s, limits = now_s - request.arrived_s, self._limits(request)
        nearest, takes_s = _nearest(limits, forecast, waited_s)
        if request.promised is None and nearest is not None:
            request.promised = nearest, takes_s
        error = 1.0 if waited_s > _AT_ONCE_S else min(max(self._error_ratio.high, _LEAST_ERROR), _MOST_ERROR)
        nearest, takes_s = _nearest(limits, LatencyForecast(*(error * time_s for time_s in forecast)), waited_s)
        if nearest is None or takes_s <= (limit_s := limits[nearest]) + _ROUNDING_S:
            return None
        own = None if loads is None else min(loads, LoadsAhead(1), key=self._loads_left_s)
        own_s = self._with_loads(request, own and own._replace(waiting=0), 0.0)
        alone = forecast_latency(self._seen, (), self._all_of(request), own_s)
        _, alone_s = _nearest({nearest: limit_s}, alone, 0.0)
        late_alone = alone_s > limit_s + _ROUNDING_S
        _, empty_s = forecast_queue(self._seen, self._slots, work, queue)  # an idle replica rejects nothing
        empty_s += max(self._held_s(running, now_s) for running in replicas)
        retry_after_s = empty_s if late_alone or nearest == "tpot" else min(takes_s - limit_s, empty_s)
        return Rejection(nearest, takes_s, limit_s, late_alone, retry_after_s, self._loads_left_s(loads))

    def _limits(self, request: InFlightRequest) -> dict[str, float]:
        """Return the limits of ``request`` by name; an answer of one token has no TPOT."""
        slo = self._slo
        limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s if request.output_tokens > 1 else None, "e2e": slo.e2e_s}
        return {name: limit_s for name, limit_s in limits.items() if limit_s is not None}


def _nearest(limits: Mapping[str, float], forecast: LatencyForecast, waited_s: float) -> tuple[str | None, float]:
    """Return the limit that the forecast is nearest to or exceeds by most, and its time; None: no limit."""
    times_s = {"ttft": waited_s + forecast.ttft_s, "tpot": forecast.tpot_s, "e2e": waited_s + forecast.e2e_s}
    nearest = max(limits, key=lambda name: times_s[name] / limits[name], default=None)
    return nearest, 0.0 if nearest is None else times_s[nearest]
