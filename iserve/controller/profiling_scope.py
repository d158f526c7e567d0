"""Scope of a profile for a request: what it need not hold, and what one taken for another request lacks."""

from __future__ import annotations

from daemon.status import NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.errors import NotMeasuredError
from fingerprint.measurements import Profile
from iserve.controller.snapshot import hardware_of
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions
from iserve.planning.worth_measuring import cannot_change_plan
from placement.types import DeploymentState
from planner.intent import allows

__all__ = ["lacking", "why_needless"]


def why_needless(
    config: DeploymentConfig,
    so_far: Profile,
    node: NodeStatus,
    table: EngineCapabilities,
    plan_options: PlanOptions,
    serving: tuple[DeploymentState, ...] = (),
) -> str | None:
    """Return why measuring ``config`` in addition to ``so_far`` cannot change the plan; None: it may.

    Args:
        serving: on ``node``, with their rates, where these are known.
    """
    if not allows(plan_options.intent.quality, config):
        return f"quality={plan_options.intent.quality} does not allow it"
    measured = {
        DeploymentConfig(tp=p.tp, pp=p.pp, weights=p.weights, kv=p.kv, engine=so_far.engine) for p in so_far.timing
    }
    hardware = hardware_of(node, so_far.machine.device, serving)
    try:
        return cannot_change_plan(
            config, sorted(measured), so_far.spec, hardware, estimator_for(so_far), table, plan_options
        )
    except NotMeasuredError:  # too little of the first was measured to compare with
        return None


def lacking(
    profile: Profile,
    node: NodeStatus,
    table: EngineCapabilities,
    plan_options: PlanOptions,
    serving: tuple[DeploymentState, ...] = (),
) -> tuple[DeploymentConfig, ...]:
    """Return what was left out of ``profile`` as needless for its own request and may be needed by this one.

    Args:
        table: what the engine runs of checkpoints as they are.
        serving: on ``node``, with their rates, where these are known.
    """
    return tuple(
        c for c in profile.skipped if why_needless(c, profile, node, table, plan_options, serving) is None
    )
