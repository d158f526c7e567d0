"""Performance of a fleet plan at given loads: end-to-end times, utilisation, busy shares. A closed form, pure.

For each replica with arrivals at rate ``l``, slowed ``s`` times by the rest of its GPUs' replicas:

*   decoding sequences N solve ``N = l (O - 1) d(N + 1) s / (1 - phi)``, with d the step of n sequences, O the mean
    answer, and ``phi = l pa s`` the share of time that prompts take from steps (pa: time a prompt adds to a step);
*   a request takes ``p s / (1 - phi / 2)`` for its prompt, ``(O - 1) d(N + 1) s / (1 - phi)`` for its answer, the
    wait for other prompts ``phi p s (ca2 + 1) / (2 (1 - phi))``, and a wait for a slot by Sakasegawa's
    approximation (1977) with as many servers as the KV cache holds requests, busy for the smaller of N over their
    number and the utilisation;
*   beyond 98% of capacity a queue grows for as long as the load lasts (``_OVERLOAD_S``);
*   a replica is busy for ``B = 1 - exp(-l E)`` of the time; next to replicas of busy shares B the slowdown is
    ``1 + 1.1 sum(B) + 0.1 min(1, sum(B))``: k engines that are always busy cost each 1.1 k (measured on an H200).

Requests go to the replicas of a deployment in proportion to how fast these are. The fixed point is found in damped
rounds. All cases of load are worked out together, as columns [cases, replicas].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fingerprint.service_model import LARGEST_BATCH, STEP_KNOTS
from placement.fleet.load import Loads
from placement.fleet.memory import KvRoom
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["FleetForecast", "forecast"]

Table = npt.NDArray[np.float64]

_ROUNDS = 7
_NEWTON = 4  # steps on the piecewise linear law of a step's time
_FULL = 0.98  # share of capacity from which a queue is taken to grow
_OVERLOAD_S = 150.0  # mean wait per unit of load that is not served: that of a few minutes of overload
_MOST_PROMPT_SHARE = 0.95
_SHARING, _SWITCHING = 1.1, 0.1
_LOG_KNOTS = len(STEP_KNOTS)


@dataclass(frozen=True)
class FleetForecast:
    """Forecast of a plan; one row per case of load.

    Attributes:
        e2e_s: [cases, deployments], mean time of a request; infinite for a deployment without a replica.
        busy: [cases, replicas], share of time in which a replica has requests.
        slowdown: [cases, replicas], by the rest of its GPUs' replicas; at least 1.
        utilisation: [cases, replicas], rate over capacity; may exceed 1.
        kv_tokens: [replicas].
    """

    e2e_s: Table
    busy: Table
    slowdown: Table
    utilisation: Table
    kv_tokens: Table


@dataclass(frozen=True)
class _Rows:
    """Columns of the replicas of a plan."""

    deployment: npt.NDArray[np.intp]
    prompt_s: Table
    added_s: Table
    step_s: Table  # of one sequence
    full_step_s: Table  # of as many as run at once
    intercepts: Table  # [replicas, pairs of knots], flat: of the step's time between two of them
    slopes: Table  # likewise
    more_tokens: Table  # output tokens after the first
    most: Table  # requests at once
    gpus: npt.NDArray[np.intp]  # [replicas, widest group], the first repeated
    share: Table
    on: Table  # [replicas, GPUs]: share of a step that runs there
    splits: Table  # log2 of the GPUs whose communication was not measured

    @classmethod
    def of(cls, fleet: Fleet, plan: FleetPlan, room: KvRoom) -> _Rows:
        options = [fleet.option(replica) for replica in plan.replicas]
        widest = max(len(replica.gpus) for replica in plan.replicas)
        share = np.array([option.busy_share_per_gpu for option in options])
        on = np.zeros((len(options), len(fleet.gpus)))
        for row, replica in enumerate(plan.replicas):
            on[row, list(replica.gpus)] = share[row]
        steps_s = np.array([option.step_s for option in options])
        knots = np.exp2(np.arange(_LOG_KNOTS - 1))
        slopes = (steps_s[:, 1:] - steps_s[:, :-1]) / knots
        most = np.array([option.batch_of(tokens) for option, tokens in zip(options, room.kv_tokens, strict=True)])
        rows = cls(
            deployment=np.array([replica.deployment for replica in plan.replicas], np.intp),
            prompt_s=np.array([option.prompt_s for option in options]),
            added_s=np.array([option.added_prompt_s for option in options]),
            step_s=steps_s[:, 0],
            full_step_s=np.zeros(len(options)),
            intercepts=(steps_s[:, :-1] - slopes * knots).ravel(),
            slopes=slopes.ravel(),
            more_tokens=np.array([option.output_tokens - 1 for option in options]),
            most=most,
            gpus=np.array(
                [[*replica.gpus, *[replica.gpus[0]] * (widest - len(replica.gpus))] for replica in plan.replicas],
                np.intp,
            ),
            share=share,
            on=on,
            splits=np.array([0.0 if o.is_split_measured else np.log2(o.config.tp) for o in options]),
        )
        return replace(rows, full_step_s=rows.steps_s(most))

    def line(self, batch: Table) -> tuple[Table, Table]:
        """Return intercept and slope of the step's time about ``batch`` [cases, replicas]."""
        position = np.log2(np.minimum(np.maximum(batch, 1.0), LARGEST_BATCH))
        low = np.minimum(position.astype(np.intp), _LOG_KNOTS - 2)
        low += np.arange(len(self.deployment)) * (_LOG_KNOTS - 1)
        return self.intercepts[low], self.slopes[low]

    def steps_s(self, batch: Table) -> Table:
        intercept, slope = self.line(batch)
        return np.asarray(intercept + slope * batch)


def forecast(fleet: Fleet, plan: FleetPlan, loads: Loads, room: KvRoom) -> FleetForecast:
    """Return how ``plan``, whose replicas have the KV cache of ``room``, serves ``loads``."""
    rows, cases = _Rows.of(fleet, plan, room), len(loads.weights)
    shape = (cases, len(plan.replicas))
    counts = np.bincount(rows.deployment, minlength=len(fleet.deployments))
    member = np.zeros((len(plan.replicas), len(fleet.deployments)))
    member[np.arange(len(plan.replicas)), rows.deployment] = 1.0
    loss = 1 + loads.split_loss[:, None] * rows.splits
    slow, routed = np.ones(shape), np.tile(1.0 / counts[rows.deployment], (cases, 1))
    foreign = np.array([gpu.busy for gpu in fleet.gpus])
    arriving = loads.rates_per_s[:, rows.deployment]
    e2e = busy = used = np.zeros(shape)
    for number in range(_ROUNDS):
        e2e, used = _served(rows, arriving * routed, slow * loss, loads.arrival_cv2)
        busy = 1 - np.exp(-arriving * routed * e2e)
        there = busy @ rows.on + foreign  # [cases, GPUs]
        others = np.maximum(0.0, there[:, rows.gpus].max(axis=2) - busy * rows.share)
        found = 1 + _SHARING * others + _SWITCHING * np.minimum(1.0, others)
        slow = found if number == 0 else (slow + found) / 2
        if (counts > 1).any():
            speed = 1 / slow / loss / rows.step_s
            routed = (routed + speed / ((speed @ member) @ member.T)) / 2
    total = (routed * e2e) @ member
    return FleetForecast(
        e2e_s=np.where(counts > 0, total, np.inf),
        busy=busy,
        slowdown=slow,
        utilisation=used,
        kv_tokens=np.array(room.kv_tokens),
    )


def _served(rows: _Rows, rate: Table, slow: Table, arrival_cv2: float) -> tuple[Table, Table]:
    """Return the mean end-to-end time and the utilisation of each replica at its rate."""
    full = rows.more_tokens * rows.full_step_s + rows.added_s * rows.most
    used = rate * slow * full / rows.most
    phi = np.minimum(rate * rows.added_s * slow, _MOST_PROMPT_SHARE)
    left = 1 - phi
    work = rate * rows.more_tokens * slow / left
    decoding = np.zeros(rate.shape)
    for _ in range(_NEWTON):
        intercept, slope = rows.line(decoding + 1)
        steady = 1 - work * slope
        solved = work * (intercept + slope) / np.maximum(steady, 1e-9)
        decoding = np.where(steady > 0, np.minimum(solved, rows.most), rows.most)
    stay = rows.more_tokens * rows.steps_s(np.minimum(decoding + 1, rows.most)) * slow / left
    prompt = rows.prompt_s * slow
    between = phi * prompt * (arrival_cv2 + 1) / (2 * left)
    taken = np.minimum(np.minimum(decoding / rows.most, used), _FULL)
    exponent = np.sqrt(2 * (rows.most + 1)) - 1
    slot = stay / rows.most * taken**exponent / (1 - taken) * (arrival_cv2 + 1) / 2
    over = np.maximum(0.0, 1 - _FULL / np.maximum(used, 1e-12)) * _OVERLOAD_S
    return prompt / (1 - phi / 2) + stay + between + slot + over, used
