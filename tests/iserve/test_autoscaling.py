"""Scaling to zero and back step by step: a real daemon with stand-in workers, gateway and clock set by hand.

With real processes throughout: test_e2e_asleep.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import text

from daemon.status import WorkerState
from fingerprint.codec import from_json, to_json
from iserve.api_types import DeployBody
from iserve.controller.autoscaling import Autoscaler
from iserve.controller.reconcile import Reconciler
from iserve.controller.service import Controller
from iserve.route_table import Demand, DeploymentDemand, Route, RouteTable
from iserve.state.store import Store
from tests.golden_words import Golden
from tests.iserve.state.raw_sql import connected
from tests.iserve.state.test_migrations import PLAN_OF_0008
from tests.iserve.test_deployer import World

pytestmark = pytest.mark.process

Until = Callable[..., Any]
LIMIT_S = 300.0
N = TypeVar("N", bound="Napping")


class Napping(World):
    """World with one deployment that may be scaled to zero, ready, and what its gateway would say."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now_s = 1000.0
        self.waiting, self.outstanding, self.idle_s = 0, 0, 0.0
        self.reads_routes = self.answers = True
        self.asked = 0
        self.control()

    def take_over(self) -> None:
        """Continue with the next controller, whose predecessor has closed its store."""
        self.controller.close()
        self.store = Store.open(self.settings.state)
        self.controller = Controller(self.settings, self.store)
        self.control()

    def control(self) -> None:
        self.controller.demand = self.demand  # type: ignore[method-assign]
        self.reconciler = Reconciler(self.controller)
        self.autoscaler = Autoscaler(self.controller, lambda: self.now_s)
        self.reconciler._autoscaler = self.autoscaler

    def demand(self) -> Demand | None:
        self.asked += 1
        if not self.answers:
            return None
        one = DeploymentDemand(name="a", waiting=self.waiting, outstanding=self.outstanding, idle_s=self.idle_s)
        return Demand(routes_version=self.table().version if self.reads_routes else 0, deployments=(one,))

    def table(self) -> RouteTable:
        return from_json((self.node.home / "run" / "routes.json").read_bytes(), RouteTable)

    def route(self) -> Route:
        (route,) = self.table().routes
        return route

    def deploy_one(self, until: Until, *, scale_to_zero_s: float | None = LIMIT_S) -> None:
        body = DeployBody(name="a", scale_to_zero_s=scale_to_zero_s)
        row = self.store.add_deployment("a", to_json(body))
        self.store.update_deployment(row.id, phase="launching", workers=to_json((self.node.spec("a-1"),)))
        self.tick_until(until, "ready")

    def tick_until(self, until: Until, phase: str) -> None:
        def reached() -> bool:
            self.reconciler.tick()
            return self.phase() == phase

        until(reached, f"it is {phase}")
        self.reconciler.tick()  # and its routes are written

    def later(self, seconds: float, *, idle_s: float = 0.0) -> None:
        """Tick so many seconds later, without a request for ``idle_s``."""
        self.now_s += seconds
        self.idle_s = idle_s
        self.reconciler.tick()

    def ended(self) -> bool:
        self.reconciler.tick()
        return self.states() == {}


@contextmanager
def at_work(world: N) -> Iterator[N]:
    """Started, and taken down whatever happens."""
    try:
        world.start()
        yield world
    finally:
        world.controller.close()
        world.node.clear()
        world.store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Napping]:
    with at_work(Napping(tmp_path)) as world:
        yield world


def test_a_worker_is_ended_only_when_the_gateway_has_nothing_there(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.later(LIMIT_S - 1, idle_s=LIMIT_S - 1)
    assert world.phase() == "ready"
    world.reads_routes = False
    world.later(1, idle_s=LIMIT_S)
    assert world.phase() == "ready", "the gateway speaks of routes that are no longer the last"
    world.reads_routes = True
    world.later(0, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"
    world.outstanding = 1  # sent there just before the gateway read that it sleeps
    world.later(1)
    (target,) = world.route().workers
    assert not target.ready
    world.later(1)
    assert world.states() == {"a-1": WorkerState.READY}
    world.outstanding = 0
    until(world.ended, "its worker has ended")
    assert world.phase() == "scaled-to-zero"


def test_a_long_answer_is_not_cut_short(world: Napping, until: Until) -> None:
    """Sent there just before the gateway read that it sleeps. A gateway that does not answer is another case."""
    world.deploy_one(until)
    world.outstanding = 1
    world.later(LIMIT_S, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"
    world.later(1)
    world.later(3600)
    assert not world.controller.is_ending("a-1")
    world.outstanding = 0
    until(world.ended, "its worker has ended")


def test_who_calls_before_the_worker_has_ended_gets_that_one(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    pid = world.node.client.worker("a-1").pid
    world.outstanding = 1
    world.later(LIMIT_S, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"
    world.waiting = 1
    world.tick_until(until, "ready")
    assert world.node.client.worker("a-1").pid == pid
    (target,) = world.route().workers
    assert target.ready


def test_who_calls_what_has_ended_waits_for_a_start(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    until(world.ended, "its worker has ended")
    assert world.route().ready_wait_s == world.settings.start_timeout_s
    world.waiting = 1
    world.tick_until(until, "ready")
    assert world.states() == {"a-1": WorkerState.READY}
    assert world.route().ready_wait_s is None
    kinds = [event.kind for event in world.store.events()]
    assert kinds[kinds.index("scaled-to-zero") :] == ["scaled-to-zero", "scaling-up", "ready"]


def test_a_home_of_the_former_names_is_served(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    until(world.ended, "its worker has ended")
    world.store.close()
    state = world.settings.home / "state.db"
    with connected(state) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0008'"))
        for table in ("variants", "quality_results"):  # of 0012 and 0013
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text("UPDATE deployments SET phase = 'asleep' WHERE phase = 'scaled-to-zero'"))
        former = {"request": json.dumps({"name": "a", "scale_to_zero_s": LIMIT_S, "expect": 0, "rates": []})}
        former["plan"] = PLAN_OF_0008.read_text()
        connection.execute(text("UPDATE deployments SET request = :request, plan = :plan"), former)
    world.take_over()
    assert world.controller.deployment("a").status == "scaled-to-zero"
    assert world.controller.deployment_plan("a").load_forecast is not None
    world.waiting = 1
    world.tick_until(until, "ready")
    assert world.states() == {"a-1": WorkerState.READY}


def test_what_cannot_be_started_sleeps_on_is_refused_for_a_while_and_tried_again(
    world: Napping, until: Until, golden: Golden
) -> None:
    world.deploy_one(until)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    until(world.ended, "its worker has ended")
    world.node.signal_daemon(signal.SIGKILL)
    world.start(max_workers=1)
    world.node.ready("other")
    world.waiting = 1
    world.tick_until(until, "scaling-up")
    world.tick_until(until, "scaled-to-zero")
    error = world.store.deployment("a").error
    golden("controller", error)
    assert (world.route().refusal, world.route().retry_after_s) == (error, 10)
    world.later(9)
    assert world.phase() == "scaled-to-zero", "who waited has been told, and the pause is not over"
    world.node.client.stop("other")
    world.later(1)
    world.tick_until(until, "ready")
    assert world.store.deployment("a").error is None
    assert world.route().refusal is None


def test_without_a_gateway_nothing_falls_asleep_and_what_sleeps_ends(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.answers = False
    world.later(10 * LIMIT_S, idle_s=10 * LIMIT_S)
    assert world.phase() == "ready"
    world.answers = True
    world.outstanding = 1
    world.later(0, idle_s=10 * LIMIT_S)
    world.answers = False
    world.later(30)
    assert world.states() == {"a-1": WorkerState.READY}
    world.later(61)
    until(world.ended, "its worker, which finishes what it runs, is ended")


def test_nothing_falls_asleep_while_it_is_checked_or_after_a_change(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.later(100, idle_s=LIMIT_S)
    assert world.phase() == "ready", "it has been so for less than 120 s"
    with world.controller.profiler.paused(lambda: None):
        world.later(LIMIT_S, idle_s=LIMIT_S)
        assert world.phase() == "ready"
    world.later(0, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"


def test_an_update_that_is_accepted_meanwhile_keeps_its_deployment_awake(world: Napping, until: Until) -> None:
    # It may be while the gateway is asked for what it has; at zero, no request would start it again.
    world.deploy_one(until)
    world.later(10 * LIMIT_S, idle_s=0)
    row, demand = world.store.deployment("a"), world.controller.demand

    def while_asked() -> Demand | None:
        assert world.store.begin_update(row.id, to_json(DeployBody(name="a")), "asked for", former=row.request)
        return demand()

    world.controller.demand = while_asked  # type: ignore[method-assign]
    world.idle_s = LIMIT_S
    world.autoscaler.look((row,), world.node.client.node(), 0)
    assert (world.phase(), world.store.deployment("a").update_request is None) == ("ready", False)


def test_a_deployment_that_may_not_sleep_is_not_watched(world: Napping, until: Until) -> None:
    world.deploy_one(until, scale_to_zero_s=None)
    world.later(1e6, idle_s=1e6)
    assert (world.phase(), world.asked) == ("ready", 0)
    assert world.route().ready_wait_s is None


def test_only_a_start_that_came_to_nothing_is_a_reason_to_refuse(world: Napping, until: Until) -> None:
    """Neither an update that failed is one, nor a start that the controller before this one tried."""
    world.deploy_one(until)
    row = world.store.deployment("a")
    world.store.update_deployment(row.id, phase="ready", error="a was not updated and serves as before: no room")
    world.later(LIMIT_S, idle_s=LIMIT_S)
    assert (world.phase(), world.store.deployment("a").error) == ("scaled-to-zero", None)
    world.store.update_deployment(
        row.id, phase="scaled-to-zero", error="a was not updated and serves as before: no room"
    )
    world.later(0)
    assert world.route().refusal is None
    world.reconciler = Reconciler(world.controller)
    world.reconciler.tick()
    world.reconciler.tick()
    assert world.route().refusal is None


def test_a_start_that_fails_between_two_looks_is_a_reason_to_refuse(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    until(world.ended, "its worker has ended")
    row = world.store.deployment("a")
    world.controller.work_on = lambda _: None  # type: ignore[method-assign]
    world.later(60)
    world.waiting = 1
    world.later(1)
    assert world.phase() == "scaling-up"
    world.store.update_deployment(row.id, phase="scaled-to-zero", error="no room")
    world.later(1)
    assert (world.phase(), world.route().refusal) == ("scaled-to-zero", "no room")
    world.later(9)
    assert world.phase() == "scaled-to-zero"
    world.later(1)
    assert world.phase() == "scaling-up"


def test_a_worker_that_has_the_id_of_one_that_sleeps_is_not_ended(world: Napping, until: Until) -> None:
    world.deploy_one(until)
    world.outstanding = 1
    world.later(LIMIT_S, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"
    (row,) = world.store.deployments()
    world.store.update_deployment(row.id, workers=to_json((world.node.spec("a-1", served_model="another"),)))
    world.outstanding = 0
    world.later(1)
    world.later(1)
    assert not world.controller.is_ending("a-1")
    assert world.states() == {"a-1": WorkerState.READY}
