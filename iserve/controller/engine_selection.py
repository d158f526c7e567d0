"""Selection of the engine for a model on this node: the one that is named, else the preferred one that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from daemon.amd_gpus import count_amd_gpus
from daemon.engines.base import Engine
from daemon.engines.registry import ENGINES, get_engine
from daemon.status import NodeStatus
from daemon.unlisted_gpus import device_spec
from fingerprint.capability import PLANNED_ONLY
from fingerprint.errors import InfeasibleError, SilentEngineError
from fingerprint.estimates import Estimator
from fingerprint.gpu_spec import Vendor
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from iserve.controller.snapshot import hardware_of, without
from iserve.planning.engine_choice import EngineChoice, engine_choices, first_feasible, nothing_feasible_on
from iserve.planning.joint_plan import chosen_plan
from iserve.planning.pipeline import PlanOptions, datasheet_estimator
from planner.intent import Quality

__all__ = ["SelectedEngine", "deployable_engine", "engine_for", "select_engine"]


class SelectedEngine(NamedTuple):
    """An engine with the profile that a plan on it rests on, and why each preferred one is passed over."""

    engine: Engine
    profile: Profile
    notes: tuple[str, ...]


def deployable_engine(name: str, version: str | None = None) -> Engine:
    """Return the engine of that name, or for ``auto`` the first that can start workers.

    Args:
        version: of the engine, wherever it is installed; None: the first installation.

    Raises:
        ConfigError: no such engine.
        InfeasibleError: it is not installed here, or not in that version.
    """
    engines = _engines_in(name, version)
    able = [engine for engine in engines if engine.capabilities().deployable]
    if not able:
        tables = [engine.capabilities() for engine in engines]
        if name == "auto":
            reasons = "; ".join(f"{table.engine}: {table.unavailable}" for table in tables)
            raise InfeasibleError(f"no engine that could serve a deployment is installed here; {reasons}")
        others = (engine.name for engine in ENGINES.values() if engine.capabilities().deployable)
        other = next((f"; or deploy with --engine {engine}" for engine in others), "")
        raise InfeasibleError(f"{name} can be planned for, not deployed here: {tables[0].unavailable}{other}")
    return able[0]


def _engines_in(name: str, version: str | None) -> tuple[Engine, ...]:
    """Return the engines of that name as installed in ``version``. Raises as :func:`deployable_engine`."""
    if name != "auto":
        return (get_engine(name).pinned(version),)
    found, reasons = [], []
    for engine in ENGINES.values():
        try:
            found.append(engine.pinned(version))
        except (InfeasibleError, SilentEngineError) as error:
            reasons.append(str(error))
    if not found:
        raise InfeasibleError(f"no engine is installed here in version {version}: {'; '.join(reasons)}")
    return tuple(found)


def engine_for(
    name: str, spec: ModelSpec, node: NodeStatus, quality: Quality, version: str | None = None
) -> tuple[Engine, tuple[str, ...]]:
    """Return the engine of that name, or for ``auto`` the preferred one that serves ``spec`` on ``node``.

    Whether a configuration is feasible on it is not asked; :func:`select_engine` does.

    Returns:
        The engine, and for each that is preferred to it why it is passed over.

    Raises:
        ConfigError, InfeasibleError: as :func:`deployable_engine`.
        UnsupportedModelError: no engine serves the model there.
    """
    choice = _choices(name, spec, node, quality, version)[0]
    return get_engine(choice.engine).pinned(version), choice.passed_over


def _choices(
    name: str, spec: ModelSpec, node: NodeStatus, quality: Quality, version: str | None
) -> tuple[EngineChoice, ...]:
    if name != "auto":
        return (EngineChoice(deployable_engine(name, version).name),)
    first = next(iter(node.devices), None)
    on_gpus = first is not None and first.kind == "cuda"
    gpu = device_spec(first.name) if first is not None and on_gpus else None
    tables = tuple(engine.capabilities() for engine in _engines_in(name, version))
    choices = engine_choices(spec, gpu, tables, quality, on_gpus=on_gpus)
    if on_gpus or not count_amd_gpus():
        return choices
    unused = f"GPUs of this machine: {PLANNED_ONLY[Vendor.AMD]}"
    return tuple(replace(choice, passed_over=(*choice.passed_over, unused)) for choice in choices)


def select_engine(
    name: str,
    version: str | None,
    spec: ModelSpec,
    node: NodeStatus,
    options: PlanOptions,
    *,
    profile_of: Callable[[Engine, tuple[str, ...]], Profile],
    estimator_of: Callable[[Profile, Engine, NodeStatus], Estimator],
) -> SelectedEngine:
    """Return the engine of :func:`engine_for`, or the next one where nothing is feasible on it.

    Feasible is what the node could run without the workers that are there now: an engine is not given up because
    another deployment has the memory. The next engine is measured only where something is feasible by datasheet.

    Args:
        version: of the engine, wherever it is installed; None: the first installation.
        profile_of: finds or takes the profile on an engine; is given why other engines are passed over.

    Raises:
        ConfigError, InfeasibleError, UnsupportedModelError: as :func:`engine_for`.
    """
    choices = _choices(name, spec, node, options.intent.quality, version)
    engines = {choice.engine: get_engine(choice.engine).pinned(version) for choice in choices}
    passed_over = {choice.engine: choice.passed_over for choice in choices}
    profiles: dict[str, Profile] = {}
    idle = without(node, [worker.spec for worker in node.workers])

    def profile(engine: str) -> Profile:
        if engine not in profiles:
            why = (*map(nothing_feasible_on, profiles), *passed_over[engine])
            profiles[engine] = profile_of(engines[engine], why)
        return profiles[engine]

    def is_feasible(engine: str) -> bool:
        table = engines[engine].capabilities()
        if profiles:  # not the first: minutes are not spent on measuring what cannot be
            gpu = next(iter(profiles.values())).machine.device
            by_datasheet = datasheet_estimator(spec, gpu, [table])
            plan, _ = chosen_plan(spec, hardware_of(idle, gpu), by_datasheet, [table.unprepared()], options)
            if plan.best is None:
                return False
        measured = profile(engine)
        estimator = estimator_of(measured, engines[engine], node)
        hardware = hardware_of(idle, measured.machine.device)
        plan, _ = chosen_plan(spec, hardware, estimator, [table.unprepared()], options)
        return plan.best is not None

    choice = first_feasible(choices, is_feasible)
    return SelectedEngine(engines[choice.engine], profile(choice.engine), choice.passed_over)
