"""Objectives of a fleet plan, each against the plain rule's own plan at the same loads. Lower is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from placement.fleet.load import Loads
from placement.fleet.memory import KvRoom, kv_room
from placement.fleet.performance import FleetForecast, forecast
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["FleetGoal", "Judged", "Judgement", "judge_of"]

Table = npt.NDArray[np.float64]

_LOSES = 1.02  # times the rule's latency, from which a plan loses to it
_PEAK = 1.5  # times the mean rate, at which the guard of a cost must hold
_GUARD = 2.3  # times the latency of an idle replica on the fewest GPUs; 3 is promised for the P95
_UNPLACED_S = 600.0  # time of a request that is not served, where latencies are compared
_MISSING = 1e6  # score of a deployment without a replica, above any other promise
_SPARE = 2.0  # times the requests at once of the peak, for which a cheap plan reserves KV cache


class FleetGoal(StrEnum):
    """Goal of a joint plan."""

    LATENCY = "latency"  # mean end-to-end time of all requests
    COST = "cost"  # held share of GPUs per request, with a guard on each deployment's latency


@dataclass(frozen=True)
class Judged:
    """Plan with its memory, forecast and score. ``score``: replicas missing and promises broken come first."""

    plan: FleetPlan
    room: KvRoom
    forecast: FleetForecast
    score: tuple[float, float]


Judgement = Callable[[FleetPlan], Judged | None]


def judge_of(fleet: Fleet, loads: Loads, rule: FleetPlan, goal: FleetGoal) -> Judgement:
    """Return the function that judges plans; its answer is None for a plan that does not fit."""
    room = kv_room(fleet, rule)
    assert room is not None, "the rule places only what fits"
    of_rule = _latency(loads, forecast(fleet, rule, loads, room))
    at_peak = loads.at_peak(_PEAK)

    def by_latency(plan: FleetPlan) -> Judged | None:
        room = kv_room(fleet, plan)
        if room is None:
            return None
        found = forecast(fleet, plan, loads, room)
        ratios = _latency(loads, found) / of_rule
        missing = _MISSING * _missing(fleet, plan)
        broken = 0.0 if loads.are_known else float(np.maximum(0.0, ratios - _LOSES).sum())
        return Judged(plan, room, found, (missing + broken, float(loads.weights @ np.log(ratios))))

    def by_cost(plan: FleetPlan) -> Judged | None:
        ample = kv_room(fleet, plan)
        if ample is None:
            return None
        wanted = _wanted_tokens(fleet, plan, at_peak, forecast(fleet, plan, at_peak, ample))
        room = kv_room(fleet, plan, wanted_tokens=wanted)
        assert room is not None, "it is no more than was found to fit"
        found = forecast(fleet, plan, loads, room)
        broken = _over_guard(fleet, at_peak, forecast(fleet, plan, at_peak, room))
        return Judged(
            plan, room, found, (_MISSING * _missing(fleet, plan) + broken, _held_gpus(fleet, loads, found, plan))
        )

    return by_latency if goal is FleetGoal.LATENCY else by_cost


def _missing(fleet: Fleet, plan: FleetPlan) -> int:
    return len(fleet.deployments) - len({replica.deployment for replica in plan.replicas})


def _latency(loads: Loads, found: FleetForecast) -> Table:
    """Return the sum over deployments of rate times end-to-end time; without a replica that is ``_UNPLACED_S``."""
    times_s = np.where(np.isfinite(found.e2e_s), found.e2e_s, _UNPLACED_S)
    return np.asarray((loads.rates_per_s * times_s).sum(axis=1) + 1e-12)


def _wanted_tokens(fleet: Fleet, plan: FleetPlan, loads: Loads, peak: FleetForecast) -> list[float]:
    """Return the KV cache with room for twice the requests at once of the peak, by Little's law."""
    counts = np.bincount([r.deployment for r in plan.replicas], minlength=len(fleet.deployments))
    inside = (loads.rates_per_s * np.where(np.isfinite(peak.e2e_s), peak.e2e_s, 0.0)).max(axis=0)
    wanted = []
    for replica, most in zip(plan.replicas, peak.kv_tokens, strict=True):
        option = fleet.option(replica)
        at_once = max(1.0, _SPARE * inside[replica.deployment] / counts[replica.deployment])
        wanted.append(float(min(most, max(at_once * option.mean_tokens, 2.0 * option.longest_tokens))))
    return wanted


def _over_guard(fleet: Fleet, loads: Loads, peak: FleetForecast) -> float:
    """Return by how much the guard is broken, over all deployments, weighted over the cases."""
    alone = np.array([fleet.least(number).alone_s for number in range(len(fleet.deployments))])
    placed = np.isfinite(peak.e2e_s)
    over = np.where(placed, np.maximum(0.0, peak.e2e_s / (_GUARD * alone) - 1), 0.0)
    return float(loads.weights @ np.log1p(over).sum(axis=1))


def _held_gpus(fleet: Fleet, loads: Loads, found: FleetForecast, plan: FleetPlan) -> float:
    """Return the GPUs held, each by the larger of the memory share and the busy share of each replica."""
    total = np.zeros(len(loads.weights))
    for row, (replica, tokens) in enumerate(zip(plan.replicas, found.kv_tokens, strict=True)):
        option = fleet.option(replica)
        size_bytes = option.bytes_per_gpu(float(tokens))
        for gpu in replica.gpus:
            share = size_bytes / fleet.gpus[gpu].total_bytes
            worked = found.busy[:, row] / found.slowdown[:, row]
            total += np.maximum(share, worked * option.busy_share_per_gpu)
    return float(loads.weights @ total)
