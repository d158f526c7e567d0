"""Gaps of a profile: what of its plan had no room, or failed, and what fills them later on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from daemon.status import DeviceStatus
from fingerprint.config import DeploymentConfig
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.errors import IserveError
from fingerprint.measurements import Lack, Profile, Unreached, key_of
from fingerprint.profile_gaps import lack_of
from iserve.controller.profiling_devices import FittingPlan, has_room

__all__ = ["fillable", "with_failure", "with_missing_points", "with_part", "with_what_had_no_room"]

_PASSES = (Lack.MEMORY, Lack.AVAILABILITY)


def fillable(profile: Profile, devices: Collection[DeviceStatus]) -> tuple[DeploymentConfig, ...]:
    """Return the configurations of which a new measurement now has points that ``profile`` lacks.

    Those that lacked memory have room for one point more at least, so that none is measured again in vain.
    """
    return tuple(
        dict.fromkeys(
            gap.config
            for gap in profile.unreached
            if gap.lacked in _PASSES and has_room(devices, gap.config, gap.need_bytes)
        )
    )


def with_missing_points(plan: DepthTiedPlan, known: Profile, config: DeploymentConfig) -> DepthTiedPlan:
    """Return ``plan`` with the points of an earlier plan that ``known`` lacks of ``config``."""
    missing = {point for gap in known.unreached if gap.config == config for point in gap.points}
    if missing <= set(plan.points):
        return plan
    points = tuple(sorted({*plan.points, *missing}))
    all_shallow = set(plan.shallow_points) == set(plan.points)
    return replace(
        plan,
        points=points,
        shallow_points=points if all_shallow else plan.shallow_points,
        max_batch=max(plan.max_batch, *(batch for batch, _ in points)),
        max_context_tokens=max(plan.max_context_tokens, *(n + plan.long_output for _, n in points)),
    )


def with_what_had_no_room(
    measured: Profile, plan: DepthTiedPlan, fits: FittingPlan, left_out: Iterable[DeploymentConfig]
) -> Profile:
    """Return ``measured``, for which ``fits`` was run, with what of ``plan`` it lacks.

    Args:
        left_out: wanted of ``plan``, and not run for lack of room.
    """
    planned = len(plan.points)
    run = {point.key for point in measured.timing}
    gaps = [
        *(replace(gap, planned_points=planned) for gap in measured.unreached),
        *(
            Unreached(
                config=key.config(measured.engine),
                missing_points=len(fits.dropped),
                planned_points=planned,
                lacked=Lack.MEMORY,
                points=fits.dropped,
                need_bytes=fits.dropped_bytes,
            )
            for key in sorted(run)
            if fits.dropped
        ),
        *(
            Unreached(
                config=config,
                missing_points=planned,
                planned_points=planned,
                lacked=Lack.MEMORY,
                points=plan.points,
                need_bytes=fits.largest_bytes,
            )
            for config in left_out
        ),
    ]
    lacks_memory = any(gap.lacked is Lack.MEMORY for gap in gaps)
    return replace(measured, unreached=tuple(gaps), complete=measured.complete and not lacks_memory)


def with_part(known: Profile, config: DeploymentConfig, part: Profile) -> Profile:
    """Return ``known`` with ``part``, which was measured of ``config`` in addition.

    Of the same configuration, points that ``part`` has not are kept; but those of one rank alone not next to
    those of the whole.
    """
    now = {(point.batch, point.input_tokens, point.shard) for point in part.timing}
    ranks = {point.shard for point in part.timing}
    key = key_of(config)
    timing = (
        point
        for point in known.timing
        if point.key != key or (point.shard in ranks and (point.batch, point.input_tokens, point.shard) not in now)
    )
    return replace(
        known,
        spent_s=known.spent_s + part.spent_s,
        compile_s=known.compile_s + part.compile_s,
        complete=known.complete and part.complete,
        memory=(*(point for point in known.memory if point.key != key), *part.memory),
        timing=(*timing, *part.timing),
        notes=(*known.notes, f"{config} was added on {part.created_at}", *part.notes),
        skipped=tuple(other for other in known.skipped if other != config),
        unreached=(*(gap for gap in known.unreached if gap.config != config), *part.unreached),
    )


def with_failure(known: Profile, config: DeploymentConfig, plan: DepthTiedPlan, error: IserveError) -> Profile:
    """Return ``known`` with ``config`` as what was tried, and is not to be tried again until it is asked for."""
    gaps = [gap for gap in known.unreached if gap.config == config and gap.lacked in _PASSES]
    if not gaps:
        planned = len(plan.points)
        gaps = [Unreached(config=config, missing_points=planned, planned_points=planned, points=plan.points)]
    return replace(
        known,
        complete=False,
        notes=(*known.notes, f"{config} failed: {error}"),
        skipped=tuple(other for other in known.skipped if other != config),
        unreached=(
            *(gap for gap in known.unreached if gap.config != config or gap.lacked not in _PASSES),
            *(replace(gap, lacked=lack_of(error), need_bytes=0) for gap in gaps),
        ),
    )
