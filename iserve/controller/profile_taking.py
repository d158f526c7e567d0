"""What a profile measures: the formats and degrees that the engine runs and somebody may want, as far as they can
still change the decision that it is taken for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from daemon.profile_client import WorkerProfileTarget
from daemon.status import NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.depth_tied_profile import depth_tied_plan, depth_tied_profile
from fingerprint.errors import ConfigError, NotMeasuredError, UnsupportedModelError
from fingerprint.generate import generate, generate_dummy, generate_shape
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress, profile
from fingerprint.profile_plan import Shards, default_plan
from fingerprint.sharded_profile import profile_with_shards
from iserve.controller.estimating import estimator_for
from iserve.controller.node import hardware_of
from iserve.controller.profile_room import STEP_TOKENS, Room, fitting, quietest
from iserve.model_source import ModelSource
from iserve.planning import PlanOptions
from iserve.worth_measuring import cannot_change_plan
from planner.intent import Quality, allows
from planner.space import shape_refusal

__all__ = ["Fingerprints", "Order", "take"]

_DEGREES = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One profile to be taken.

    Attributes:
        table: what the engine runs of checkpoints as they are.
        node: before any worker of this profile.
        wish: measure what may serve it best; None: everything that may serve some wish of that quality.
        shards: which degrees may be taken as one tensor-parallel rank alone.
        max_seconds: launches included, but for an engine that carries our step timer: there the GPU's time after
            engine starts.
    """

    source: ModelSource
    table: EngineCapabilities
    node: NodeStatus
    workload: Workload
    wish: PlanOptions | None
    quality: Quality
    shards: Shards
    max_seconds: float
    progress: Callable[[ProfileProgress], None]


def take(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Measure; raises as ``Profiler.take``, and ConfigError: shards are wanted of an engine without step timer."""
    if order.shards is Shards.ALWAYS and not order.table.step_timed:
        raise ConfigError(
            f"shards={order.shards} profiles one tensor-parallel rank alone, which takes an engine with our step "
            f"timer, and {order.table.engine} has none; take --engine vllm, or leave --shards out"
        )
    return (_take_depth_tied if order.table.step_timed else _take_plain)(order, target, fingerprints)


def _take_plain(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Fingerprints as they are, on an engine that loads one after the other in a moment."""
    source, started = order.source, time.monotonic()
    device = target.machine().device  # launches the worker that the first degree then uses
    launch_s = time.monotonic() - started
    weights, degrees = _formats_and_degrees(source.spec, order, device)
    left_s = max(1.0, order.max_seconds - launch_s)
    plan = default_plan(source.spec, order.workload, weights=weights, degrees=degrees, budget_s=left_s)
    measured = profile(
        source.name, source.spec, target, fingerprints, plan, progress=order.progress, launch_s=launch_s
    )
    return replace(measured, budget_s=order.max_seconds, spent_s=measured.spent_s + launch_s)


def _take_depth_tied(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Every forward repeated to the model's depth. A format takes two engine starts of its own, so those that the
    wished quality does not allow are left out, as is what cannot become the best any more."""
    source, workload = order.source, order.workload
    device = target.machine().device
    weights, degrees = _formats_and_degrees(source.spec, order, device)
    allowed = tuple(w for w in weights if allows(order.quality, DeploymentConfig(weights=w)))
    plan = replace(
        depth_tied_plan(
            source.spec,
            workload,
            max_batch=workload.batch,
            weights=allowed,
            degrees=degrees,
            budget_s=order.max_seconds,
        ),
        max_batched_tokens=STEP_TOKENS,
    )
    room = fitting(plan, source.spec, device, quietest(order.node.devices))
    alone = _ranks_alone(order, device, room)
    measured = profile_with_shards(
        partial(depth_tied_profile, source.name, source.spec, progress=order.progress),
        source.spec.family,
        target,
        fingerprints,
        replace(room.plan, degrees=(*room.plan.degrees, *alone)),
        num_gpus=max((tp * pp for tp, pp in room.plan.degrees), default=1),
        needless=lambda config, so_far: _needless(order, config, so_far),
    )
    left_out = (
        f"{w} not measured: quality={order.quality} does not allow it" for w in weights if w not in allowed
    )
    no_gpus = (
        f"tp={tp} pp={pp} {'not run whole' if (tp, pp) in alone else 'left out'}: {why}"
        for (tp, pp), why in room.too_full
    )
    return replace(measured, notes=(*measured.notes, *room.notes, *no_gpus, *left_out))


def _ranks_alone(order: Order, gpu: GpuSpec, room: Room) -> tuple[tuple[int, int], ...]:
    """Of the degrees there are no GPUs for, those to take as one rank alone."""
    if order.shards is Shards.NEVER:
        return ()
    full = [degree for degree, _ in room.too_full]
    missing = [degree for degree in _DEGREES if degree[0] * degree[1] > len(order.node.devices)]
    wanted = full + (missing if order.shards is Shards.ALWAYS else [])
    return tuple(
        (tp, pp)
        for tp, pp in wanted
        if pp == 1 and _runs(order, DeploymentConfig(tp=tp, engine=order.table.engine), gpu, num_gpus=tp)
    )


def _needless(order: Order, config: DeploymentConfig, so_far: Profile) -> str | None:
    """Why measuring ``config`` cannot change what the wish is answered with."""
    if order.wish is None:
        return None
    measured = {
        DeploymentConfig(tp=p.tp, pp=p.pp, weights=p.weights, kv=p.kv, engine=so_far.engine) for p in so_far.timing
    }
    hardware = hardware_of(order.node, so_far.machine.device)
    try:
        return cannot_change_plan(
            config, sorted(measured), order.source.spec, hardware, estimator_for(so_far), order.table, order.wish
        )
    except NotMeasuredError:  # too little of the first was measured to compare with
        return None


def _formats_and_degrees(
    spec: ModelSpec, order: Order, gpu: GpuSpec
) -> tuple[tuple[WeightFormat, ...], tuple[tuple[int, int], ...]]:
    """What the engine runs of the model on the node's devices. Raises UnsupportedModelError: nothing at all."""
    table, name = order.table, order.table.engine

    def runs(config: DeploymentConfig) -> bool:
        return _runs(order, config, gpu, num_gpus=len(order.node.devices))

    weights = tuple(w for w in WeightFormat if runs(DeploymentConfig(weights=w, engine=name)))
    degrees = tuple((tp, pp) for tp, pp in _DEGREES if runs(DeploymentConfig(tp=tp, pp=pp, engine=name)))
    if not weights or not degrees:
        reason = table.refusal(spec, DeploymentConfig(engine=name), gpu)
        raise UnsupportedModelError(f"{name} cannot run this model here: {reason}")
    return weights, degrees


def _runs(order: Order, config: DeploymentConfig, gpu: GpuSpec, *, num_gpus: int) -> bool:
    spec = order.source.spec
    return shape_refusal(spec, config, num_gpus) is None and order.table.refusal(spec, config, gpu) is None


class Fingerprints:
    """Cuts each fingerprint when it is first asked for."""

    def __init__(self, source: ModelSource, folder: Path, *, weights: bool) -> None:
        self._source, self._folder, self._weights = source, folder, weights

    def __call__(self, num_layers: int, tp: int = 1) -> Path:
        """The first layers; of one rank of ``tp``, which is a shape without weights, where that is above 1."""
        target = self._folder / (f"{num_layers}-layers" if tp == 1 else f"{num_layers}-layers-of-{tp}")
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            if tp > 1 or not self._weights:  # the engine makes random ones
                generate_shape(self._source.directory, target, num_layers, tp=tp)
            elif self._source.has_weights:
                generate(self._source.directory, target, range(num_layers))
            else:
                generate_dummy(self._source.directory, target, num_layers, seed=0)
        return target
