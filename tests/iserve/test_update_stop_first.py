"""``update --stop-first``: the former worker drains and ends, then the new one starts; whatever fails, one serves.

Stand-in workers that never fit twice, by a synthetic machine's profile; a gateway that has read all routes. Kills
are of a real controller process.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.registry import get_engine
from daemon.process import own_record, write_record
from daemon.status import WorkerState
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.errors import InfeasibleError
from fingerprint.families import load_spec
from iserve.api_documents import DeploymentDocument
from iserve.controller.deployer import Deployer
from iserve.controller.profiling_validity import machine_key
from iserve.controller.reconcile import Reconciler
from iserve.controller.stored_values import recorded_request, recorded_workers, update_workers
from iserve.demo import demo_model_path
from iserve.rest_bodies import UpdateBody
from iserve.route_table import Demand, Route, RouteTable
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from tests.daemon.conftest import Node
from tests.fingerprint.synthetic_machine import SyntheticMachine, Truth, take_profile
from tests.golden_words import Golden
from tests.iserve.kill_storm import DEPLOYMENTS, Controllers, persist
from tests.iserve.test_deployer import World
from tests.waiting import wait_until

pytestmark = pytest.mark.process

Until = Callable[..., Any]
RUNTIME_SHARE = 0.6  # of a device
ALL_READ = Demand(routes_version=2**31, deployments=())


def on_one_device(node: Node) -> Path:
    """Have the node offer one device; return a copy of the demo model whose workers do as configured."""
    model = node.home.parent / "model"
    shutil.copytree(demo_model_path(), model)
    node.checkpoint = model
    node.start(cpu_devices=1)
    return model


def profile_of(node: Node, model: Path, store: Store) -> None:
    (device,) = node.client.node().devices
    machine = SyntheticMachine(load_spec(model), Truth(runtime_bytes=int(RUNTIME_SHARE * device.free_bytes)))
    store.put_profile(take_profile(machine), machine_key(node.client.node(), get_engine("torch")))


class Replaced(World):
    """A deployment that is ready, with a reconciler that the test drives."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.controller.demand = lambda: ALL_READ  # type: ignore[method-assign]
        self.reconciler = Reconciler(self.controller)
        self.model = on_one_device(self.node)
        profile_of(self.node, self.model, self.store)
        self.running = folder / "running"
        self.most_at_once = 0

    def behave(self, **behaviour: object) -> None:
        self.node.behave(running_file=str(self.running), **behaviour)

    def begin(self, until: Until) -> str:
        self.behave()
        self.deploy(model=str(self.model))
        until(lambda: self.phase() == "ready", "it is deployed")
        return self.worker()

    def update(self, **changes: Any) -> None:
        self.controller.update("a", UpdateBody(stop_first=True, **changes))

    def row(self) -> DeploymentRow:
        return self.store.deployment("a")

    def worker(self) -> str:
        (spec,) = recorded_workers(self.row())
        return spec.worker_id

    def tick(self) -> None:
        self.reconciler.tick()
        self.most_at_once = max(self.most_at_once, len(self.states()))

    def reaches(self, phase: str) -> Callable[[], bool]:
        def reached() -> bool:
            self.tick()
            return self.phase() == phase

        return reached

    def ended(self) -> bool:
        self.tick()
        return self.row().update_request is None and self.phase() == "ready"

    def route(self) -> Route:
        table = from_json((self.node.home / "run" / "routes.json").read_bytes(), RouteTable)
        (route,) = table.routes
        return route

    def phases(self) -> list[str]:
        kinds = [event.kind for event in self.store.events()]
        return kinds[kinds.index("draining") :]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Replaced]:
    with closing(Replaced(tmp_path)) as world:
        yield world


def test_the_former_worker_ends_before_the_new_one_starts(world: Replaced, until: Until) -> None:
    former, capacity = world.begin(until), recorded_workers(world.row())[0].limits
    world.update(intent="min-latency")
    until(world.ended, "the update has ended")
    assert world.row().error is None
    assert recorded_request(world.row()).intent == "min-latency"
    assert world.worker() != former
    assert world.states() == {world.worker(): WorkerState.READY}
    assert world.most_at_once == 1
    assert recorded_workers(world.row())[0].limits.max_batch == capacity.max_batch
    assert world.phases() == ["draining", "replacing", "ready"]


def test_without_it_the_refusal_names_it(world: Replaced, until: Until, golden: Golden) -> None:
    former = world.begin(until)
    world.controller.update("a", UpdateBody(intent="min-latency"))
    until(world.ended, "the update has ended")
    error = world.row().error
    assert error is not None
    golden.hide(re.search(r"at most ([\d.]+) GiB", error)[1], "N")  # of this machine
    golden("controller", error)
    assert world.states() == {former: WorkerState.READY}


def test_what_cannot_be_even_then_ends_no_worker(world: Replaced, until: Until, golden: Golden) -> None:
    former = world.begin(until)
    world.update(intent="latency-slo", slo={"e2e_s": 1e-6})
    until(world.ended, "the update has ended")
    golden("controller", world.row().error or "")
    assert world.states() == {former: WorkerState.READY}
    assert "draining" not in [event.kind for event in world.store.events()]


def test_requests_are_finished_and_new_ones_wait_meanwhile(world: Replaced, until: Until) -> None:
    former = world.begin(until)
    assert world.phase() == "ready"
    world.running.touch()
    world.update(intent="min-latency")
    until(world.reaches("draining"), "it drains")
    world.tick()
    (target,) = world.route().workers
    assert (target.worker_id, target.ready) == (former, False)
    assert world.route().ready_wait_s == world.settings.start_timeout_s
    assert world.states() == {former: WorkerState.READY}
    assert world.phase() == "draining"
    world.running.unlink()
    until(world.ended, "the update has ended")
    world.tick()
    (target,) = world.route().workers
    assert (target.worker_id, target.ready) == (world.worker(), True)
    assert world.route().ready_wait_s is None


def test_the_former_worker_starts_again_where_the_new_one_does_not_come_up(
    world: Replaced, until: Until, golden: Golden
) -> None:
    former, plan = world.begin(until), world.row().plan
    world.behave(exit_if="-u")
    world.update(intent="min-latency")
    until(world.ended, "the update has ended")
    golden("controller", world.row().error or "")
    assert recorded_request(world.row()).intent == "min-cost"
    assert (world.worker(), world.row().plan) == (former, plan)
    assert world.states() == {former: WorkerState.READY}
    assert world.most_at_once == 1
    assert world.phases() == ["draining", "replacing", "restoring", "update-failed"]


def test_memory_that_is_free_a_moment_after_a_worker_has_ended_is_waited_for(
    world: Replaced, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin(until)
    ask, refused = Deployer.ask_to_run, list[str]()

    def refused_once(self: Deployer, spec: WorkerSpec) -> None:
        if spec.worker_id not in refused:
            refused.append(spec.worker_id)
            raise InfeasibleError("0.00 GiB are free")
        ask(self, spec)

    monkeypatch.setattr(Deployer, "ask_to_run", refused_once)
    world.update(intent="min-latency")
    until(world.ended, "the update has ended")
    assert world.row().error is None
    assert refused == [world.worker()]


def test_a_phase_that_another_records_meanwhile_does_not_stop_the_update(world: Replaced, until: Until) -> None:
    world.begin(until)
    world.running.touch()
    world.update(intent="min-latency")
    until(world.reaches("draining"), "it drains")
    world.store.update_deployment(world.row().id, phase="scaled-to-zero")
    until(world.reaches("draining"), "it drains again")
    world.running.unlink()
    until(world.ended, "the update has ended")
    assert recorded_request(world.row()).intent == "min-latency"


def test_where_neither_comes_up_the_deployment_is_carried_out_anew(world: Replaced, until: Until) -> None:
    world.begin(until)
    world.behave(exit_if="a-")
    world.update(intent="min-latency")
    until(world.reaches("failed"), "it is given up")
    row = world.row()
    assert (row.update_request, recorded_request(row).intent) == (None, "min-cost")
    assert "is started anew" in next(e.message for e in world.store.events() if e.kind == "update-failed")


@pytest.mark.parametrize("phase", ["draining", "replacing"])
def test_a_removal_meanwhile_ends_all(world: Replaced, until: Until, phase: str) -> None:
    world.begin(until)
    world.running.touch()
    world.behave(slow_start_s=600)
    world.update(intent="min-latency")
    until(world.reaches("draining"), "it drains")
    if phase == "replacing":
        world.running.unlink()
        until(world.reaches("replacing"), "the former one ends")
    world.controller.remove("a")

    def gone() -> bool:
        world.reconciler.tick()
        return world.store.deployments() == () and world.states() == {}

    until(gone, "it is removed")


class Killed:
    """A controller process that is killed, a daemon, and a gateway that has read all routes."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder / "home")
        self.model = on_one_device(self.node)
        self.settings = Settings(home=self.node.home, port=0, api_port=0, start_timeout_s=60.0)
        self.store = Store.open(self.settings.state)
        profile_of(self.node, self.model, self.store)
        self.store.close()
        self.gateway = ThreadingHTTPServer(("127.0.0.1", 0), AllRead)
        threading.Thread(target=self.gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.gateway.server_port}"
        write_record(self.node.home / "run" / "gateway.json", own_record(url=url, token=""))
        self.controllers = Controllers(self.settings)
        self.running = folder / "running"

    def start(self) -> None:
        self.controllers.start()
        wait_until(self.controllers.answers, "the controller answers")

    def document(self) -> DeploymentDocument:
        path = f"{DEPLOYMENTS}/a"
        return persist(lambda: self.controllers.client().get(path, DeploymentDocument))[0]

    def row(self) -> DeploymentRow:
        store = Store.read_only(self.settings.state)
        try:
            return store.deployment("a")
        finally:
            store.close()

    def workers(self) -> dict[str, WorkerState]:
        return {worker.spec.worker_id: worker.state for worker in self.node.client.workers()}

    def close(self) -> None:
        if self.controllers.lives:
            self.controllers.end()
        self.gateway.shutdown()
        self.gateway.server_close()
        self.node.clear()


class AllRead(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = to_json(ALL_READ)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    killed = Killed(tmp_path)
    try:
        yield killed
    finally:
        killed.close()


def is_recorded(killed: Killed, phase: str) -> bool:
    return killed.row().phase == phase


def is_launched(killed: Killed, _: str) -> bool:
    """The new worker runs; the former one has ended."""
    new = {spec.worker_id for spec in update_workers(killed.row())}
    return bool(new) and new == set(killed.workers())


@pytest.mark.parametrize(
    ("moment", "there", "intent"),
    [
        ("ready", is_recorded, "min-latency"),
        ("draining", is_recorded, "min-latency"),
        ("replacing", is_recorded, "min-latency"),
        ("replacing", is_launched, "min-latency"),
        ("restoring", is_recorded, "min-cost"),
    ],
)
def test_a_killed_controller_leaves_one_of_both(
    killed: Killed, moment: str, there: Callable[[Killed, str], bool], intent: str
) -> None:
    killed.node.behave(running_file=str(killed.running))
    killed.start()
    body = {"model": str(killed.model), "name": "a", "input_tokens": 16, "output_tokens": 16}
    killed.controllers.client().post(DEPLOYMENTS, body, DeploymentDocument)
    wait_until(lambda: killed.document().status == "ready", "it is deployed")
    (former,) = killed.workers()
    slow = {"slow_start_s": 1.0, "running_file": str(killed.running)}
    killed.node.behave(**slow, **({"exit_if": "-u"} if moment == "restoring" else {}))
    if moment == "draining":
        killed.running.touch()  # so that it stays there
    changes = {"intent": "min-latency", "stop_first": True}
    killed.controllers.client().patch(f"{DEPLOYMENTS}/a", changes, DeploymentDocument)
    wait_until(lambda: there(killed, moment), f"the controller is to be killed at {moment}")
    killed.controllers.end()
    killed.running.unlink(missing_ok=True)
    killed.start()
    wait_until(lambda: not killed.document().updating, "the update has ended")
    document = killed.document()
    assert (document.status, document.intent) == ("ready", intent)
    assert list(killed.workers()) == [document.replicas[0].worker_id]
    assert (document.replicas[0].worker_id == former) == (intent == "min-cost")
    assert ("serves as before" in (document.error or "")) == (intent == "min-cost")
