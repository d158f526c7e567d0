"""Notes on a plan as a whole: gaps of its profile, candidates passed over, replicas, and room that is left."""

from __future__ import annotations

from fingerprint.config import DeploymentConfig, KvFormat
from fingerprint.estimates import Source
from fingerprint.measurements import Lack, MeasuredKey, Profile, key_of
from fingerprint.profile_checks import routing_caveat
from planner.intent import Intent
from planner.plan import Plan

__all__ = ["plan_notes"]

_LATER = "a deploy for whose choice it may matter measures the rest once"
_LACKS = {  # why a profile lacks points, with its budget in seconds; and what measures them
    Lack.BUDGET: (
        "the profile was cut short, its budget of {:g} s ended first",
        "`iserve profile` with more --max-seconds measures the rest",
    ),
    Lack.MEMORY: (
        "the profile lacks what the GPUs had too little free memory for when it was taken",
        f"{_LATER} there is room",
    ),
    Lack.AVAILABILITY: (
        "the profile lacks what the node's daemon was away for when it was taken",
        f"{_LATER} the daemon is back",
    ),
    Lack.FAILURE: (
        "the profile lacks what failed when it was taken, as its own notes say",
        "`iserve profile` tries again",
    ),
}


def plan_notes(plan: Plan, profile: Profile | None, replicas: int) -> tuple[str, ...]:
    """Return every note on ``plan``, which ``profile`` (None: datasheets) was made for."""
    return (
        *_cut_short(profile),
        *_expert_routing(profile),
        *_at_one_length(plan, profile),
        *_less_sure(plan),
        *_replicated(plan.intent, replicas),
        *_room_left(plan),
        *_may_miss(plan),
        *_by_measured_links(plan),
    )


def _cut_short(profile: Profile | None) -> tuple[str, ...]:
    """Return what the profile did not reach, by what it lacked, and what measures it."""
    if profile is None or not profile.unreached:
        return ()
    run, notes = {point.key for point in profile.timing}, []
    for lack, (why, rest) in _LACKS.items():
        gaps = [gap.config for gap in profile.unreached if gap.lacked is lack]
        partly = [config for config in gaps if key_of(config) in run]
        never = [config for config in gaps if config not in partly]
        parts = [
            f"{', '.join(map(_named, configs))} {how}"
            for configs, how in (
                (never, "not measured"),
                (partly, "measured at some points only, or fewer times than planned"),
            )
            if configs
        ]
        if parts:
            notes.append(f"{why.format(profile.budget_s)}: {', and '.join(parts)}; {rest}")
    return tuple(notes)


def _expert_routing(profile: Profile | None) -> tuple[str, ...]:
    caveat = None if profile is None else routing_caveat(profile)
    return () if caveat is None else (caveat,)


def _at_one_length(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Return why configurations that were run have scaled times: at one prompt length only, as a profile runs
    split models, they do not tell what a longer context costs."""
    lengths: dict[MeasuredKey, set[int]] = {}
    for point in () if profile is None else profile.timing:
        lengths.setdefault(point.key, set()).add(point.input_tokens)
    named: dict[str, int] = {}
    for estimate in (ranked.estimate for ranked in plan.candidates):
        if estimate is None or Source.SCALED not in (estimate.ttft_s.source, estimate.tpot_s.source):
            continue
        config = estimate.config
        run_at = lengths.get(key_of(config), set())
        if estimate.measured_config == config and len(run_at) == 1:
            named[_named(config)] = min(run_at)
    at = {tokens: [name for name in named if named[name] == tokens] for tokens in sorted(set(named.values()))}
    return tuple(
        f"{', '.join(names)}: run at one prompt length only ({tokens} tokens), so that times at other context "
        "lengths are scaled from there (s)"
        for tokens, names in at.items()
    )


def _named(config: DeploymentConfig) -> str:
    """Return the name of ``config`` that a profile's notes use."""
    kv = "" if config.kv is KvFormat.BITS16 else f" kv={config.kv}"
    return f"tp={config.tp} pp={config.pp} {config.weights}{kv}{' experts=parallel' * config.expert_parallel}"


def _less_sure(plan: Plan) -> tuple[str, ...]:
    """Return what is better than the chosen one by its estimate, and was not measured."""
    if not plan.passed_over:
        return ()
    first, more = plan.passed_over[0].reason, len(plan.passed_over) - 1
    return (
        first
        if not more
        else f"{first}; passed over likewise: {more} more that {'was' if more == 1 else 'were'} not measured",
    )


def _replicated(intent: Intent, replicas: int) -> tuple[str, ...]:
    """Return what the figures are of, where there are several replicas."""
    if replicas == 1:
        return ()
    share = f" at its share of the rate, {intent.rate_per_s:.4g} requests/s" if intent.rate_per_s else ""
    return (f"{replicas} replicas, each on devices of its own; the table's figures are of one{share}",)


def _room_left(plan: Plan) -> tuple[str, ...]:
    """Return what the deployments that are to follow have to do with the choice."""
    return () if plan.room is None or plan.best is None else (plan.room.text(plan.best.config),)


def _may_miss(plan: Plan) -> tuple[str, ...]:
    """Return which limits the chosen one may miss by its interval, where no rate says how many requests do."""
    slo, best = plan.intent.slo, plan.best
    if slo is None or plan.served is not None or best is None or best.estimate is None:
        return ()
    one = best.estimate
    limits = (("ttft", slo.ttft_s, one.ttft_s), ("tpot", slo.tpot_s, one.tpot_s), ("e2e", slo.e2e_s, one.e2e_s))
    missed = [
        f"{name} is {time.value:.4g} s, at the upper end of its interval {time.high:.4g} s"
        for name, limit, time in limits
        if limit is not None and time.high > limit
    ]
    return (f"it may miss its SLO: {'; '.join(missed)}; a measurement narrows that",) if missed else ()


def _by_measured_links(plan: Plan) -> tuple[str, ...]:
    """Return what the communication between the chosen one's GPUs rests on, where it was measured."""
    best = plan.best
    if best is None or best.estimate is None or not best.estimate.links_measured:
        return ()
    return (f"links measured: all-reduces of {best.config.tp} GPUs take what they took on this machine",)
