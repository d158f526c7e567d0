"""Degrees of tensor parallelism for which there are not enough GPUs, profiled as one rank on one GPU per stage.

The rank's shape (``shard_config``) is loaded with tp = 1 and run through the same plan; its points are marked
``shard``, and estimators add the work of a group (``estimators.all_reduce``). Everything else is
``depth_tied_profile``: once for all degrees that there are GPUs for, and once for each that there are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import StepTimedTarget
from fingerprint.errors import InfeasibleError, IserveError
from fingerprint.measurements import MachineInfo, Profile, StepTimedSession, Unreached
from fingerprint.shard_config import refuses_shards

__all__ = ["Measure", "Shapes", "profile_with_shards"]

Needless = Callable[[DeploymentConfig, Profile], str | None]  # as ``depth_tied_profile`` asks
Shapes = Callable[[int, int], Path]  # (layers, tp): a directory with one rank's config.json; tp=1: the model's


class Measure(Protocol):
    """``depth_tied_profile`` with the model and the options already given."""

    def __call__(
        self,
        target: StepTimedTarget,
        fingerprints: Callable[[int], Path],
        plan: DepthTiedPlan,
        *,
        needless: Needless = ...,
    ) -> Profile: ...


def profile_with_shards(
    measure: Measure,
    family: str,
    target: StepTimedTarget,
    shapes: Shapes,
    plan: DepthTiedPlan,
    *,
    num_gpus: int,
    needless: Needless = lambda _config, _so_far: None,
) -> Profile:
    """``plan`` on ``num_gpus`` GPUs, as shards where they are too few. The budget is of all together.

    Args:
        needless: as ``depth_tied_profile``; of a shard's formats it is asked together, before the first.

    Raises:
        InfeasibleError: neither works for any degree; the message says why.
        IserveError: nothing at all could be measured; the first failure.
    """
    real = tuple((tp, pp) for tp, pp in plan.degrees if tp * pp <= num_gpus)
    jobs = ([(real, 1)] if real else []) + [(((tp, pp),), tp) for tp, pp in plan.degrees if (tp, pp) not in real]
    taken: list[Profile] = []
    notes: list[str] = []
    unneeded: list[str] = []
    unreached: list[Unreached] = []
    errors: list[IserveError] = []
    for degrees, ranks in jobs:
        left_s = plan.budget_s - sum(profile.spent_s for profile in taken)
        why_not = _refusal(family, ranks, degrees[0][1], num_gpus)
        what = ", ".join(f"tp={tp} pp={pp}" for tp, pp in degrees)
        if why_not is None and left_s <= 0:
            why_not = f"the budget of {plan.budget_s:g} GPU-seconds is spent"
            unreached += _all_of(replace(plan, degrees=degrees), target.engine)
        if why_not is not None:
            notes.append(f"{what} left out: {why_not}")
            continue
        part = replace(plan, degrees=degrees, budget_s=left_s)
        if ranks > 1 and taken:
            weights, skipped = _needed(part, target.engine, needless, _merged(taken, (), plan.budget_s))
            unneeded += skipped
            if not weights:
                continue
            part = replace(part, weights=weights)
        try:
            if ranks > 1:
                taken.append(_rank_alone(measure, target, shapes, part, ranks))
            else:
                taken.append(measure(target, lambda layers: shapes(layers, 1), part, needless=needless))
        except IserveError as error:
            errors.append(error)
            notes.append(f"{what} failed: {error}")
    if not taken:
        raise errors[0] if errors else InfeasibleError("; ".join(notes))
    merged = _merged(taken, notes, plan.budget_s)
    return replace(merged, notes=(*merged.notes, *unneeded), unreached=(*merged.unreached, *unreached))


def _all_of(plan: DepthTiedPlan, engine: str) -> list[Unreached]:
    """Return every configuration of ``plan`` without one point."""
    num_points = len(plan.points)
    return [
        Unreached(
            config=DeploymentConfig(tp=tp, pp=pp, weights=weights, kv=kv, engine=engine),
            missing_points=num_points,
            planned_points=num_points,
        )
        for tp, pp in plan.degrees
        for weights in plan.weights
        for kv in plan.kv
    ]


def _refusal(family: str, ranks: int, pp: int, num_gpus: int) -> str | None:
    if pp > num_gpus:
        return f"its {pp} stages need as many GPUs, there are {num_gpus}"
    return refuses_shards(family) if ranks > 1 else None


def _needed(
    part: DepthTiedPlan, engine: str, needless: Needless, so_far: Profile
) -> tuple[tuple[WeightFormat, ...], list[str]]:
    """Return the weight formats of one degree that are worth measuring, and a note on each other."""
    ((tp, pp),) = part.degrees
    kept, notes = [], []
    for weights in part.weights:
        configs = [DeploymentConfig(tp=tp, pp=pp, weights=weights, kv=kv, engine=engine) for kv in part.kv]
        reasons = [needless(config, so_far) for config in configs]
        if None in reasons:
            kept.append(weights)
        else:
            notes.append(f"tp={tp} pp={pp} {weights} not measured: {reasons[0]}")
    return tuple(kept), notes


def _rank_alone(
    measure: Measure, target: StepTimedTarget, shapes: Shapes, plan: DepthTiedPlan, ranks: int
) -> Profile:
    found = measure(_OneRank(target), lambda layers: shapes(layers, ranks), plan)
    return replace(
        found,
        memory=tuple(replace(point, shard=True) for point in found.memory),
        timing=tuple(replace(point, shard=True) for point in found.timing),
        notes=(*found.notes, f"tp={ranks} was run as one rank's shape, without communication"),
    )


class _OneRank:
    """A target on which a group of any size is one GPU: what is loaded is a rank's shape."""

    def __init__(self, target: StepTimedTarget) -> None:
        self.engine = target.engine
        self._target = target

    def machine(self) -> MachineInfo:
        return self._target.machine()

    def open_step_timed(self, *, tp: int, pp: int) -> StepTimedSession:
        return self._target.open_step_timed(tp=1, pp=pp)


def _merged(taken: Sequence[Profile], notes: Sequence[str], budget_s: float) -> Profile:
    """Return all of ``taken``, with ``notes`` on what is missing."""
    return replace(
        taken[0],
        budget_s=budget_s,
        spent_s=sum(profile.spent_s for profile in taken),
        complete=not notes and all(profile.complete for profile in taken),
        memory=tuple(point for profile in taken for point in profile.memory),
        timing=tuple(point for profile in taken for point in profile.timing),
        notes=(*(note for profile in taken for note in profile.notes), *notes),
        unreached=tuple(gap for profile in taken for gap in profile.unreached),
    )
