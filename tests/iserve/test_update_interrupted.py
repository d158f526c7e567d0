"""An update during which the former workers are lost, as by `iserve down` and `up`: the deployment ends in one
configuration, with the workers of that one alone. A real daemon with stand-in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daemon.status import WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json
from fingerprint.errors import ConflictError
from iserve.api_types import DeployBody, VerifyBody
from iserve.controller.reconcile import Reconciler
from iserve.controller.stored_values import draining_workers, recorded_request, recorded_update, recorded_workers
from iserve.model_source import ModelSource
from iserve.rest_bodies import UpdateBody
from iserve.route_table import Demand
from iserve.state.store import DeploymentRow
from tests.golden_words import Golden
from tests.iserve.test_deployer import World

pytestmark = pytest.mark.process

Until = Callable[..., Any]
ALL_READ = Demand(routes_version=2**31, deployments=())


class Interrupted(World):
    """A deployment that is ready, and an update of it that has recorded its worker. Each worker becomes ready only
    when it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.controller.demand = lambda: ALL_READ  # type: ignore[method-assign]
        self.reconciler = Reconciler(self.controller)
        self.former, self.new = self.spec("a-1"), self.spec("a-1-u1")

    def spec(self, worker_id: str) -> WorkerSpec:
        checkpoint = self.folder / worker_id
        checkpoint.mkdir()
        behaviour = f'{{"fail_health_file": "{self.held(worker_id)}"}}'
        (checkpoint / "behaviour.json").write_text(behaviour)
        return self.node.spec(worker_id, checkpoint=str(checkpoint))

    def held(self, worker_id: str) -> Path:
        return self.folder / f"{worker_id}-held"

    def begin(self, until: Until) -> None:
        """The former worker has been lost, and none serves."""
        self.start()
        self.record(self.former)
        self.work()
        until(lambda: self.phase() == "ready", "it is deployed")
        request = to_json(DeployBody(name="a", intent="min-latency"))
        assert self.store.begin_update(self.row().id, request, "asked for", former=self.row().request)
        self.store.record_update(self.row().id, plan=b"{}", workers=to_json((self.new,)))
        self.node.client.stop("a-1")
        self.held("a-1").touch()
        self.held("a-1-u1").touch()

    def row(self) -> DeploymentRow:
        return self.store.deployment("a")

    def serve(self, worker_id: str) -> None:
        self.held(worker_id).unlink()

    def is_starting(self, worker_id: str) -> bool:
        return self.states().get(worker_id) is WorkerState.STARTING

    def at_work(self) -> bool:
        return bool(self.controller._active)

    def settled(self) -> bool:
        """After a pass: no update is under way, and every worker is one of those recorded, and serves."""
        self.reconciler.tick()
        row = self.row()
        ids = {spec.worker_id for spec in recorded_workers(row)}
        ready = row.phase == "ready" and row.update_request is None and row.draining is None
        return ready and self.states() == dict.fromkeys(ids, WorkerState.READY) and not self.at_work()

    def serves_the_update(self) -> bool:
        row = self.row()
        ids = [spec.worker_id for spec in recorded_workers(row)]
        return (recorded_request(row).intent, ids, row.error) == ("min-latency", ["a-1-u1"], None)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Interrupted]:
    with closing(Interrupted(tmp_path)) as world:
        yield world


def test_the_former_worker_is_started_again_then_the_update_goes_on(world: Interrupted, until: Until) -> None:
    world.begin(until)

    def starts() -> bool:
        world.reconciler.tick()
        return world.is_starting("a-1") and world.phase() == "launching"

    until(starts, "the former worker is started again")
    world.reconciler.tick()
    assert not world.controller._updating
    assert "a-1-u1" not in world.states()
    world.serve("a-1")
    world.serve("a-1-u1")
    until(world.settled, "one configuration is left")
    assert world.serves_the_update()


@pytest.mark.parametrize("fate", ["serves", "ends"])
def test_a_former_worker_that_starts_later_than_the_new_one_drains(
    world: Interrupted, until: Until, fate: str
) -> None:
    """The former worker was lost when the update had begun already."""
    world.begin(until)
    world.work()
    until(lambda: world.is_starting("a-1"), "the former worker is started again")
    world.controller.work_on_update(world.row())
    until(lambda: world.is_starting("a-1-u1"), "the update goes on")
    world.serve("a-1-u1")
    until(lambda: world.row().update_request is None, "the update has ended")
    assert world.at_work()
    if fate == "serves":
        world.serve("a-1")

    def given_up() -> bool:
        if fate == "ends" and "a-1" in world.states():  # it is asked for once more where the daemon has lost it
            world.node.client.stop("a-1")
        return not world.at_work()

    until(given_up, "the deployer has seen what became of it")
    assert (world.phase(), world.serves_the_update()) == ("ready", True)
    until(world.settled, "one configuration is left")
    assert world.serves_the_update()


def test_an_update_goes_on_from_workers_that_were_chosen_anew_meanwhile(world: Interrupted, until: Until) -> None:
    world.begin(until)
    world.controller.work_on_update(world.row())
    until(lambda: world.is_starting("a-1-u1"), "the update goes on")
    world.node.ready("a-2")
    chosen = to_json((world.node.client.worker("a-2").spec,))
    world.store.update_deployment(world.row().id, workers=chosen)
    world.serve("a-1-u1")
    until(lambda: not world.controller._updating, "the update has seen its worker serve")
    assert world.row().workers == chosen.decode()
    assert world.row().update_request is not None
    until(lambda: world.reconciler.tick() or world.row().update_request is None, "it has been taken up again")
    assert [spec.worker_id for spec in draining_workers(world.row())] == ["a-2"]
    until(world.settled, "one configuration is left")
    assert world.serves_the_update()


def test_a_deployment_that_could_not_be_started_again_is_saved_by_its_update(
    world: Interrupted, until: Until
) -> None:
    world.begin(until)
    world.store.update_deployment(world.row().id, phase="failed", error="it gave up")
    world.serve("a-1-u1")
    until(world.settled, "the update has ended")
    assert world.serves_the_update()


def test_an_update_of_a_failed_deployment_that_fails_too_leaves_the_reason(world: Interrupted) -> None:
    row = world.store.add_deployment("a", b"{}")
    world.store.update_deployment(row.id, phase="ready")
    assert world.store.begin_update(row.id, b"{}", "asked for", former="{}")
    world.store.update_deployment(row.id, phase="failed", error="it gave up")
    world.store.drop_update(row.id, "a was not updated and serves as before: no room")
    assert (world.row().error, world.row().update_request) == ("it gave up", None)
    assert world.store.events()[-1].message.endswith("no room")


def test_an_update_waits_for_the_daemon(world: Interrupted, until: Until) -> None:
    world.begin(until)
    world.reconciler._settle(world.row(), None)
    assert not world.controller._updating


def test_an_update_that_finishes_during_a_check_leaves_the_worker_to_it(world: Interrupted, until: Until) -> None:
    world.start()
    world.know_demo(runtime_bytes=2**20)
    world.deploy()
    until(lambda: world.phase() == "ready", "it is deployed")
    name, find = world.controller.verifier._targets.deployment(VerifyBody(deployment="a"))
    with find(lambda *_progress: None) as target:
        (former,) = world.states()
        assert (name, target.spec.worker_id) == ("a", former)
        request = world.row().request
        assert world.store.begin_update(world.row().id, request.encode(), "asked for", former=request)
        world.store.record_update(world.row().id, plan=b"{}", workers=to_json((world.new,)))
        new, row = world.node.ready("a-1-u1"), world.row()
        workers = to_json((new.spec,))
        assert world.store.finish_update(row.id, former=row.workers, workers=workers, message="updated")
        world.reconciler.tick()
        assert not world.controller.is_ending(former)
        assert world.states()[former] is WorkerState.READY
    until(world.settled, "the former worker has ended")
    assert set(world.states()) == {"a-1-u1"}


def test_an_update_that_finishes_just_before_a_check_begins_is_told(
    world: Interrupted, until: Until, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    world.start()
    world.record(world.former)
    world.work()
    until(lambda: world.phase() == "ready", "it is deployed")
    targets = world.controller.verifier._targets
    first_ready = targets._first_ready

    def and_updated(row: DeploymentRow) -> WorkerStatus:
        status = first_ready(row)
        world.store.update_deployment(row.id, workers=to_json((world.new,)))
        return status

    monkeypatch.setattr(targets, "_first_ready", and_updated)
    _, find = targets.deployment(VerifyBody(deployment="a"))
    with golden.raises("controller", ConflictError), find(lambda *_: None):
        pass
    assert world.controller.profiler.workers == frozenset()


def test_an_update_changes_what_another_one_has_made_of_the_deployment_meanwhile(
    world: Interrupted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    world.record(world.former)
    world.work()
    until(lambda: world.phase() == "ready", "it is deployed")
    controller, store = world.controller, world.store
    checked, checks = controller._checked, []

    def and_updated(wish: DeployBody) -> ModelSource:
        """Check; the first time, a whole update has ended by then."""
        if not checks:
            row = world.row()
            request = to_json(DeployBody(name="a", intent="min-latency"))
            assert store.begin_update(row.id, request, "asked for", former=row.request)
            workers = to_json((world.new,))
            assert store.finish_update(row.id, former=row.workers, workers=workers, message="updated")
        checks.append(wish.intent)
        return checked(wish)

    monkeypatch.setattr(controller, "_checked", and_updated)
    monkeypatch.setattr(controller, "work_on_update", lambda _: None)
    controller.update("a", UpdateBody(replicas=2))
    asked = recorded_update(world.row())
    assert (asked.intent, asked.replicas) == ("min-latency", 2)
    assert checks == ["min-cost", "min-latency"]
    with pytest.raises(ConflictError, match="is being updated"):
        controller.update("a", UpdateBody(replicas=3))
