"""An update of several replicas is one transaction: all new workers serve, or none is left and the former ones do.

A real daemon with stand-in workers, each of which becomes ready only when it may; kills are of a real controller.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from daemon.process import own_record, write_record
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment, WorkerSpec
from fingerprint.codec import to_json
from iserve.api_types import DeployBody
from iserve.controller import reconcile
from iserve.controller.deployer import Deployer
from iserve.controller.reconcile import Reconciler
from iserve.controller.stored_values import recorded_request, recorded_workers
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from tests.iserve.kill_storm import Controllers
from tests.iserve.test_deployer import World
from tests.iserve.test_replicas import limits
from tests.iserve.test_update_stop_first import ALL_READ, AllRead

pytestmark = pytest.mark.process

Until = Callable[..., Any]
FORMER, NEW = ("a-1-r1", "a-1-r2"), ("a-1-u1-r1", "a-1-u1-r2")
TOO_MUCH_BYTES = 2**50


class Several(World):
    """Deployment of two replicas that serve, one on each device, and an update that has recorded two more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.controller.demand = lambda: ALL_READ  # type: ignore[method-assign]
        self.reconciler = Reconciler(self.controller)
        self.former = tuple(map(self.spec, FORMER))
        self.new = tuple(map(self.spec, NEW))

    def spec(self, worker_id: str) -> WorkerSpec:
        checkpoint = self.folder / worker_id
        checkpoint.mkdir()
        self.behave(worker_id)
        stage = StageAssignment(device_ids=(f"cpu:{int(worker_id[-1]) - 1}",), num_layers=2)
        return self.node.spec(worker_id, checkpoint=str(checkpoint), stages=(stage,), limits=limits(2**26))

    def behave(self, worker_id: str, **more: object) -> None:
        behaviour = {"fail_health_file": str(self.held(worker_id)), **more}
        (self.folder / worker_id / "behaviour.json").write_text(json.dumps(behaviour))

    def held(self, worker_id: str) -> Path:
        return self.folder / f"{worker_id}-held"

    def hold(self, worker_id: str) -> None:
        self.held(worker_id).touch()

    def serve(self, worker_id: str) -> None:
        self.held(worker_id).unlink()

    def begin(self, until: Until) -> None:
        self.start()
        row = self.store.add_deployment("a", to_json(DeployBody(name="a", replicas=2)))
        self.store.update_deployment(row.id, phase="launching", workers=to_json(self.former))
        until(lambda: self.reconciler.tick() or self.phase() == "ready", "it is deployed")
        self.former = recorded_workers(self.row())
        request = to_json(DeployBody(name="a", replicas=2, intent="min-latency"))
        assert self.store.begin_update(self.row().id, request, "asked for", former=self.row().request)
        self.store.record_update(self.row().id, plan=b"{}", workers=to_json(self.new))
        for worker_id in NEW:
            self.hold(worker_id)

    def row(self) -> DeploymentRow:
        return self.store.deployment("a")

    def pids(self, *worker_ids: str) -> list[int | None]:
        return [self.node.client.worker(worker_id).pid for worker_id in worker_ids]

    def is_seen(self, states: dict[str, WorkerState]) -> Callable[[], bool]:
        """Return a look, after a pass, at whether these new workers are as given and the former ones serve."""

        def seen() -> bool:
            self.reconciler.tick()
            return self.states() == states | dict.fromkeys(FORMER, WorkerState.READY)

        return seen

    def ended_with(self, ids: tuple[str, ...]) -> Callable[[], bool]:
        """Return a look, after a pass, at whether the update has ended and ``ids`` alone are there and serve."""

        def ended() -> bool:
            self.reconciler.tick()
            row = self.row()
            ready = row.phase == "ready" and row.update_request is None and row.draining is None
            return ready and self.states() == dict.fromkeys(ids, WorkerState.READY)

        return ended

    def serves_as_before(self) -> bool:
        row = self.row()
        before = (recorded_workers(row), recorded_request(row).intent) == (self.former, "min-cost")
        return before and "a was not updated and serves as before: " in (row.error or "")

    def serves_the_update(self) -> bool:
        row = self.row()
        ids = tuple(spec.worker_id for spec in recorded_workers(row))
        return (ids, recorded_request(row).intent, row.error) == (NEW, "min-latency", None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Several]:
    monkeypatch.setattr(reconcile, "_ORPHAN_GRACE_S", 0.1)
    with closing(Several(tmp_path)) as world:
        yield world


def test_no_former_worker_drains_before_all_new_ones_serve(world: Several, until: Until) -> None:
    world.begin(until)
    first, second = NEW
    until(world.is_seen(dict.fromkeys(NEW, WorkerState.STARTING)), "both are started")
    world.serve(first)
    until(world.is_seen({first: WorkerState.READY, second: WorkerState.STARTING}), "one serves")
    assert world.row().draining is None
    assert recorded_workers(world.row()) == world.former
    world.serve(second)
    until(world.ended_with(NEW), "the former ones have ended")
    assert world.serves_the_update()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fate", ["has no room", "gives up"])
def test_one_that_fails_undoes_all(world: Several, until: Until, fate: str, which: int) -> None:
    failing = world.new[which]
    if fate == "has no room":
        world.new = (*world.new[:which], replace(failing, limits=limits(TOO_MUCH_BYTES)), *world.new[which + 1 :])
    else:
        world.behave(failing.worker_id, exit_code=1)
    world.begin(until)
    world.serve(NEW[1 - which])
    pids = world.pids(*FORMER)
    until(world.ended_with(FORMER), "the new ones have ended")
    assert world.serves_as_before()
    assert ("GiB are free" in (world.row().error or "")) == (fate == "has no room")
    assert world.pids(*FORMER) == pids


def test_one_that_is_lost_while_the_next_starts_is_waited_for(
    world: Several, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former ones drain only when all serve at once."""
    asked, served = list[str](), list[str]()
    once_ready = Deployer.once_ready

    def recorded(self: Deployer, row: DeploymentRow, spec: WorkerSpec, deadline_s: float) -> WorkerSpec:
        asked.append(spec.worker_id)
        serving = once_ready(self, row, spec, deadline_s)
        served.append(spec.worker_id)
        return serving

    monkeypatch.setattr(Deployer, "once_ready", recorded)
    world.begin(until)
    first, second = NEW
    del asked[:], served[:]
    world.serve(first)
    until(lambda: world.reconciler.tick() or served == [first], "the first serves and the second is waited for")
    world.hold(first)
    (pid,) = world.pids(first)
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    until(lambda: world.states()[first] is not WorkerState.READY, "the first is lost")
    world.serve(second)
    until(lambda: len(asked) > 2 or world.row().update_request is None, "the second serves")
    assert world.row().update_request is not None
    assert recorded_workers(world.row()) == world.former
    world.serve(first)
    until(world.ended_with(NEW), "all of the new ones serve")
    assert world.serves_the_update()


@pytest.mark.parametrize("fits", [True, False])
def test_a_controller_killed_between_two_launches_goes_on_or_undoes_the_first(
    world: Several, until: Until, fits: bool
) -> None:
    if not fits:  # its memory has been taken meanwhile
        world.new = (world.new[0], replace(world.new[1], limits=limits(TOO_MUCH_BYTES)))
    world.begin(until)
    world.node.client.launch(world.new[0])
    first = until(lambda: world.pids(NEW[0])[0], "the first is started")
    for worker_id in NEW:
        world.serve(worker_id)
    until(world.ended_with(NEW if fits else FORMER), "the update has ended")
    assert world.serves_the_update() if fits else world.serves_as_before()
    assert not fits or world.pids(NEW[0]) == [first]


class Killed:
    """Controller processes that go on with what ``world`` began, and a gateway that has read all routes."""

    def __init__(self, world: Several) -> None:
        world.controller.close()
        world.store.close()
        self.world = world
        self.settings = Settings(home=world.node.home, port=0, api_port=0, start_timeout_s=60.0)
        self.gateway = ThreadingHTTPServer(("127.0.0.1", 0), AllRead)
        threading.Thread(target=self.gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.gateway.server_port}"
        write_record(world.node.home / "run" / "gateway.json", own_record(url=url, token=""))
        self.controllers = Controllers(self.settings)

    def row(self) -> DeploymentRow:
        store = Store.read_only(self.settings.state)
        try:
            return store.deployment("a")
        finally:
            store.close()

    def ended_with(self, ids: tuple[str, ...]) -> bool:
        row = self.row()
        over = row.update_request is None and row.draining is None
        return over and self.world.states() == dict.fromkeys(ids, WorkerState.READY)

    def close(self) -> None:
        if self.controllers.lives:
            self.controllers.end()
        self.gateway.shutdown()
        self.gateway.server_close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_controller_killed_when_one_serves_leaves_all_or_none(world: Several, until: Until, fails: bool) -> None:
    """Kill it with -9 while one new worker serves and one starts."""
    world.begin(until)
    first, second = NEW
    pids = world.pids(*FORMER)
    with closing(Killed(world)) as killed:
        killed.controllers.start()
        world.serve(first)
        half = {first: WorkerState.READY, second: WorkerState.STARTING} | dict.fromkeys(FORMER, WorkerState.READY)
        until(lambda: world.states() == half, "one of the new ones serves")
        killed.controllers.end()
        assert (killed.row().draining, world.states(), world.pids(*FORMER)) == (None, half, pids)
        if fails:
            world.behave(second, exit_code=1)
            (pid,) = world.pids(second)
            assert pid is not None
            os.killpg(pid, signal.SIGKILL)
        else:
            world.serve(second)
        killed.controllers.start()
        until(lambda: killed.ended_with(FORMER if fails else NEW), "the update has ended")
        assert ("serves as before" in (killed.row().error or "")) == fails
        assert not fails or world.pids(*FORMER) == pids
