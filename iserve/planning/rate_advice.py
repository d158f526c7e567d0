"""Ways out where no configuration serves the rate: more requests at once, or more replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator
from iserve.planning.pipeline import Hardware, PlanOptions, winner_at
from iserve.planning.runner_up import MOST_BATCH
from planner.intent import MAX_REPLICAS
from planner.plan import LimitKind, Plan, RefusedFor, Relaxation

__all__ = ["with_rate_advice"]

_MOST_TRIES = 8  # of replicas


def with_rate_advice(plan: Plan, hardware: Hardware, estimator: Estimator, options: PlanOptions) -> Plan:
    """Return ``plan`` with the smallest batch (a power of two) and the fewest replicas that would serve its rate.

    The plan stays as it is where something is feasible or no configuration fails by the rate. Advice to add GPUs
    stays last.
    """
    able = tuple(ranked for ranked in plan.candidates if ranked.refusal is None)
    if plan.best is not None or all(ranked.refused_for is not RefusedFor.RATE for ranked in able):
        return plan
    configs = tuple(ranked.config for ranked in able)

    def first(limit: LimitKind, now: int, tried: Iterable[int]) -> Iterator[Relaxation]:
        for number in tried:
            batch = number if limit is LimitKind.BATCH else options.workload.batch
            asked = replace(options, replicas=number) if limit is LimitKind.REPLICAS else options
            try:
                best = winner_at(hardware, estimator, asked, configs, batch, asked.intent.kind)
            except NotMeasuredError:
                return
            if best is not None:
                text = f"--{limit} {number} in place of {now} would admit {best.config}"
                yield Relaxation(limit, now, number, best.config, None, text)
                return

    batch, replicas = options.workload.batch, options.replicas
    most = min(len(hardware.snapshot.gpus), MAX_REPLICAS, replicas + _MOST_TRIES)
    powers = (1 << exponent for exponent in range(MOST_BATCH.bit_length()))
    found = (
        *first(LimitKind.BATCH, batch, (size for size in powers if size > batch)),
        *first(LimitKind.REPLICAS, replicas, range(replicas + 1, most + 1)),
    )
    told = plan.why_not.relaxations
    gpus = tuple(one for one in told if one.limit is LimitKind.GPUS)
    others = tuple(one for one in told if one.limit is not LimitKind.GPUS)
    return replace(plan, why_not=replace(plan.why_not, relaxations=(*others, *found, *gpus)))
