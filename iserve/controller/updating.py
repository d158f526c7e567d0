"""Update of a deployment: new workers start next to the former ones and take their place; these drain.

Where it is asked to stop first, the former workers drain and end before the new ones start, and the gateway has
requests wait: ``ready`` -> ``draining`` -> ``replacing`` -> ``ready``; or, if the new ones do not start,
``replacing`` -> ``restoring`` -> ``ready`` with the former ones.

Each step is recorded before it is taken. Until the new workers serve, the deployment is what it was; one
transaction then makes it what it was asked to become, and the routes follow. A controller that is killed in
between finds the record and goes on; an update that fails leaves the former workers serving and says why.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import replace

from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json
from fingerprint.errors import (
    ConfigError,
    InfeasibleError,
    IserveError,
    StateUnavailableError,
    UnavailableError,
)
from iserve.controller.deployer import Deployer, Measured, NoLongerWantedError
from iserve.controller.profiling import Profiler
from iserve.controller.stored_values import (
    DRAINING,
    REPLACING,
    RESTORING,
    recorded_update,
    recorded_workers,
    update_workers,
)
from iserve.controller.update_capacity import WorkerCapacity, reduction, tightest_device, too_small
from iserve.planning.worker_launch import PlannedDeployment, worker_slug
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store

__all__ = ["Updater"]

log = logging.getLogger(__name__)

_NOTHING = WorkerCapacity(0, 0)
_FREED_WITHIN_S = 10.0
_LOOK_S = 0.2
_DRAINS = "{}: update, the former workers drain and end first"


class Updater:
    """Carries accepted updates out."""

    def __init__(self, settings: Settings, store: Store, profiler: Profiler, deployer: Deployer) -> None:
        self._settings, self._store, self._profiler, self._deployer = settings, store, profiler, deployer

    def run(self, row: DeploymentRow) -> None:
        """Carry the update of ``row`` through; every expected failure ends in its record, not in an exception."""
        try:
            self._run(row)
        except NoLongerWantedError:
            log.info("%s: its update is given up, it is to be removed", row.name)
        except StateUnavailableError as error:
            log.warning("%s: its update is taken up again when the state is back: %s", row.name, error)
        except IserveError as error:
            self._drop(row, str(error))
        except Exception as error:
            log.exception("updating %s", row.name)
            self._drop(row, f"internal error: {type(error).__name__}: {error}")

    def _drop(self, row: DeploymentRow, why: str) -> None:
        if row.phase in (REPLACING, RESTORING):
            self._start_anew(row, why)
        else:
            self._store.drop_update(row.id, _as_before(row, why))

    def _start_anew(self, row: DeploymentRow, why: str) -> None:
        """Give the update up and have the deployer carry the deployment out as it was."""
        self._store.drop_update(
            row.id, f"{row.name} was not updated and is started anew: {why}", phase="launching"
        )

    def _run(self, row: DeploymentRow) -> None:
        if row.phase == REPLACING:
            self._replace(row)
        elif row.phase == RESTORING:
            self._restore(row)
        elif row.phase != DRAINING:  # which the reconciler takes further
            self._roll_or_drain(row)

    def _roll_or_drain(self, row: DeploymentRow) -> None:
        """Start the new workers next to the former ones; or choose them and have the former ones drain first."""
        deployer, body, recorded = self._deployer, recorded_update(row), update_workers(row)
        measured = None if recorded else deployer.measured(row, body, lambda step: self._tell(row, step))
        with self._profiler.paused(lambda: deployer.check_not_removed(row)):
            specs = recorded if measured is None else self._choose(row, measured)
            if row.update_stop_first:
                if recorded:  # another phase was recorded since, such as that of a worker given up
                    self._store.move_update(row.id, row.phase, DRAINING, _DRAINS.format(row.name))
                return
            self._tell(row, "launching")
            for spec in specs:
                deployer.ask_to_run(spec)
        self._finish(row, self._once_ready(row, specs))

    def _once_ready(self, row: DeploymentRow, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Return ``specs`` once all serve at one look: one may be lost while the rest are waited for.

        Raises:
            EngineError: a worker gave up, or is not ready in time.
        """
        deadline_s = time.monotonic() + self._settings.ready_timeout_s
        while True:
            serving = tuple(self._deployer.once_ready(row, spec, deadline_s) for spec in specs)
            self._deployer.check_not_removed(row)
            if self._deployer.all_ready(serving):
                return serving

    def _replace(self, row: DeploymentRow) -> None:
        """End the former workers, which have drained, and start the new ones; whatever fails, go back."""
        try:
            specs = update_workers(row)
            if not specs:
                raise ConfigError("its new workers were recorded by another version of iServe and cannot be read")
            with self._profiler.paused(lambda: self._deployer.check_not_removed(row)):
                self._deployer.end(recorded_workers(row))
                self._start_in_freed_memory(row, specs)
            serving = self._once_ready(row, specs)
        except (NoLongerWantedError, StateUnavailableError):
            raise
        except IserveError as error:
            self._go_back(row, str(error))
        except Exception as error:
            log.exception("updating %s", row.name)
            self._go_back(row, f"internal error: {type(error).__name__}: {error}")
        else:
            self._finish(row, serving)

    def _start_in_freed_memory(self, row: DeploymentRow, specs: tuple[WorkerSpec, ...]) -> None:
        """Start ``specs`` where other workers have just ended: a driver that does not list processes may count
        their memory for a moment longer."""
        deadline_s = time.monotonic() + _FREED_WITHIN_S
        for spec in specs:
            while True:
                try:
                    self._deployer.ask_to_run(spec)
                    break
                except InfeasibleError:
                    if time.monotonic() > deadline_s:
                        raise
                self._deployer.check_not_removed(row)
                time.sleep(_LOOK_S)

    def _go_back(self, row: DeploymentRow, why: str) -> None:
        message = f"{row.name}: the new workers do not serve, the former ones start again: {why}"
        self._store.move_update(row.id, REPLACING, RESTORING, message, error=why)
        self._restore(replace(row, error=why))

    def _restore(self, row: DeploymentRow) -> None:
        """End the new workers and start the former ones again. Where these cannot be started either, the
        deployment is carried out anew as it was."""
        former, why = recorded_workers(row), row.error or "the new workers did not start"
        try:
            with self._profiler.paused(lambda: self._deployer.check_not_removed(row)):
                self._deployer.end(update_workers(row))
                self._start_in_freed_memory(row, former)
            serving = self._once_ready(row, former)
        except NoLongerWantedError:
            raise
        except UnavailableError as error:
            log.warning("%s: its former workers are started again when that can be: %s", row.name, error)
        except IserveError as error:
            log.warning("%s: its former workers do not start again: %s", row.name, error)
            self._start_anew(row, why)
        except Exception:
            log.exception("%s: its former workers do not start again", row.name)
            self._start_anew(row, why)
        else:
            self._store.drop_update(row.id, _as_before(row, why), phase="ready", workers=to_json(serving))

    def _finish(self, row: DeploymentRow, serving: tuple[WorkerSpec, ...]) -> None:
        """Have ``serving`` take the place of the former workers, and say so if they serve less."""
        smaller = reduction(WorkerCapacity.of(recorded_workers(row)), WorkerCapacity.of(serving))
        former = "the former workers " + ("have ended" if row.update_stop_first else "drain")
        message = f"{row.name}: updated, {former}" + (f"; {smaller}" if smaller else "")
        if not self._store.finish_update(row.id, former=row.workers, workers=to_json(serving), message=message):
            log.info("%s: its workers have changed, so that its update is taken up again", row.name)

    def _choose(self, row: DeploymentRow, measured: Measured) -> tuple[WorkerSpec, ...]:
        """Return the best workers next to the former ones, or in their place, recorded before any is launched.

        Their ids
        are new.
        """
        if row.update_stop_first:
            planned = self._deployer.plan(*measured[:5], gone=recorded_workers(row), of=row.name)
        else:
            planned = self._plan_beside(row, measured)
        worker_id = f"{worker_slug(row.name)}-{row.id}-u{uuid.uuid4().hex[:8]}"
        specs = self._deployer.workers_of(row, planned, measured, worker_id)
        plan, workers = to_json(planned.document), to_json(specs)
        if row.update_stop_first:
            message = _DRAINS.format(row.name)
            self._store.record_update(row.id, plan=plan, workers=workers, phase=DRAINING, message=message)
        else:
            self._store.record_update(row.id, plan=plan, workers=workers)
        return specs

    def _plan_beside(self, row: DeploymentRow, measured: Measured) -> PlannedDeployment:
        """Return the best plan next to the present workers that serves as much as they do, or as it would without
        them.

        Where the best place has too little memory, the device that limits it is left out, and so on.

        Raises:
            InfeasibleError: no place has as much; the message says what would help.
        """
        present, full = recorded_workers(row), set[str]()
        least = WorkerCapacity.of(present)
        first = planned = self._deployer.plan(*measured[:5], of=row.name)
        plans: list[PlannedDeployment] = []
        while (tightest := tightest_device(planned)) is not None:
            if WorkerCapacity.planned(planned).holds(least):
                return planned
            plans.append(planned)
            full.add(tightest)
            planned = self._deployer.plan(*measured[:5], full=full, of=row.name)
        alone = WorkerCapacity.planned(self._deployer.plan(*measured[:5], gone=present, of=row.name))
        if not alone.requests_at_once:  # refused for another reason than the present workers' memory
            return first
        able = [one for one in plans if WorkerCapacity.planned(one).holds(least.at_most(alone))]
        if able:
            return able[0]
        largest = max(map(WorkerCapacity.planned, plans), key=lambda one: one.share_of(least), default=_NOTHING)
        raise InfeasibleError(too_small(present, largest, first.free_bytes))

    def _tell(self, row: DeploymentRow, step: str) -> None:
        self._deployer.check_not_removed(row)
        self._store.add_event(row.id, "updating", f"{row.name}: update, {step}")


def _as_before(row: DeploymentRow, why: str) -> str:
    return f"{row.name} was not updated and serves as before: {why}"
