"""Deployments of several replicas, step by step: a real daemon with stand-in workers, lost, out of room.

With the embedded engine and under load: test_e2e_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError, UnavailableError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec
from iserve.api_documents import DeploymentDocument
from iserve.api_types import DeployBody
from iserve.controller import deployer, reconcile
from iserve.controller.reconcile import Patience
from iserve.controller.snapshot import hardware_of, serving_on
from iserve.controller.stored_values import recorded_workers
from iserve.demo import demo_model_path
from iserve.planning.pipeline import (
    PlanOptions,
    hypothetical_hardware,
    make_plan,
    placements_of,
)
from iserve.state.store import DeploymentRow
from placement.load_model import LoadedCluster
from placement.replicas import Replicas
from planner.intent import MAX_REPLICAS, Intent, IntentKind, Slo
from tests.golden_words import Golden
from tests.iserve.test_autoscaling import LIMIT_S, Napping, at_work
from tests.iserve.test_snapshot import A6000, NOW, WORKER, planned_s, row, running, told

pytestmark = pytest.mark.process

__all__ = ["row"]  # a fixture

Until = Callable[..., Any]


def limits(memory_bytes: int) -> WorkerLimits:
    return WorkerLimits(
        max_batch=1,
        max_batched_tokens=64,
        max_context_tokens=64,
        kv_tokens=64,
        memory_bytes_per_device=memory_bytes,
    )


class Twins(Napping):
    """World of one deployment of two replicas, one on each of the node's two CPU devices."""

    def spec_on(self, worker_id: str, device: int, memory_bytes: int) -> WorkerSpec:
        stage = StageAssignment(device_ids=(f"cpu:{device}",), num_layers=2)
        return self.node.spec(worker_id, stages=(stage,), limits=limits(memory_bytes))

    def deploy_two(self, until: Until, **wish: Any) -> None:
        body = DeployBody(name="a", replicas=2, **wish)
        row = self.store.add_deployment("a", to_json(body))
        third_bytes = self.free_bytes() // 3  # far more than the usual variation on this machine
        specs = (self.spec_on("a-1-r1", 0, third_bytes), self.spec_on("a-1-r2", 1, third_bytes))
        self.store.update_deployment(row.id, phase="launching", workers=to_json(specs))
        self.tick_until(until, "ready")

    def shown(self) -> DeploymentDocument:
        return self.controller.deployment("a")

    def route_names(self) -> list[str]:
        return [route.name for route in self.table().routes]

    def ready(self) -> int:
        self.reconciler.tick()
        return self.shown().num_ready

    def pids(self) -> dict[str, int | None]:
        return {worker.spec.worker_id: worker.pid for worker in self.node.client.workers()}

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events()]

    def fill(self, device: int) -> None:
        """Let another worker take nearly all that is free there."""
        free_bytes = min(d.free_bytes for d in self.node.client.node().devices if d.device_id == f"cpu:{device}")
        self.node.client.launch(self.spec_on("big", device, free_bytes * 9 // 10))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Twins]:
    with at_work(Twins(tmp_path)) as world:
        yield world


def test_the_route_names_all_and_each_is_told(world: Twins, until: Until) -> None:
    world.deploy_two(until)
    assert [(w.worker_id, w.ready, w.max_outstanding) for w in world.route().workers] == [
        ("a-1-r1", True, 2),
        ("a-1-r2", True, 2),
    ]
    shown = world.shown()
    assert (shown.status, shown.num_ready, shown.num_replicas) == ("ready", 2, 2)
    assert [(r.worker_id, r.device_ids, r.status) for r in shown.replicas] == [
        ("a-1-r1", ("cpu:0",), "ready"),
        ("a-1-r2", ("cpu:1",), "ready"),
    ]
    assert shown.device_ids == ("cpu:0", "cpu:1")


def test_a_controller_killed_between_two_launches_launches_the_other(world: Twins, until: Until) -> None:
    """All were recorded before the first was asked for."""
    body = DeployBody(name="a", replicas=2)
    row = world.store.add_deployment("a", to_json(body))
    specs = (world.spec_on("a-1-r1", 0, 2**26), world.spec_on("a-1-r2", 1, 2**26))
    world.store.update_deployment(row.id, phase="launching", workers=to_json(specs))
    world.node.client.launch(specs[0])
    pid = until(lambda: world.pids()["a-1-r1"], "the first is started")
    world.tick_until(until, "ready")
    assert world.ready() == 2
    assert world.pids()["a-1-r1"] == pid


def test_one_that_does_not_come_to_serve_fails_the_deploy_and_none_is_left(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_ORPHAN_GRACE_S", 0.1)
    body = DeployBody(name="a", replicas=2)
    row = world.store.add_deployment("a", to_json(body))
    broken = replace(world.spec_on("a-1-r2", 1, 2**26), checkpoint=str(world.node.home / "nothing"))
    specs = (world.spec_on("a-1-r1", 0, 2**26), broken)
    world.store.update_deployment(row.id, phase="launching", workers=to_json(specs))
    world.tick_until(until, "failed")
    until(world.ended, "the one that did serve is ended too")
    assert world.route_names() == []


def test_a_lost_one_is_started_again_alone(world: Twins, until: Until) -> None:
    """The daemon forgot it, or it was stopped there."""
    world.deploy_two(until)
    before, events = world.pids(), world.kinds()
    world.node.client.stop("a-1-r1")
    assert [r.status for r in world.shown().replicas] == ["lost", "ready"]
    assert world.shown().status == "ready"
    until(lambda: world.ready() == 2, "both serve")
    after = world.pids()
    assert after["a-1-r2"] == before["a-1-r2"]
    assert after["a-1-r1"] != before["a-1-r1"]
    until(lambda: not world.controller._active, "nothing is under way")
    assert [kind for kind in world.kinds()[len(events) :] if kind != "ready"] == [], "it was ready all the while"


def test_one_that_finds_no_room_again_is_told_while_the_other_serves(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tried again after a while, not at every look; the events tell it once."""
    world.deploy_two(until)
    pid = world.pids()["a-1-r2"]
    with monkeypatch.context() as held:
        held.setattr(world.controller, "work_on", lambda row: None)
        world.node.client.stop("a-1-r1")
        world.fill(0)

    def told() -> bool:
        world.reconciler.tick()
        return world.shown().error is not None

    until(told, "it is told why it is not started")
    tries: list[str] = []
    work_on = world.controller.work_on

    def counted(row: DeploymentRow) -> None:
        tries.append(row.name)
        work_on(row)

    monkeypatch.setattr(world.controller, "work_on", counted)
    for _ in range(5):
        world.reconciler.tick()
    assert tries == []
    monkeypatch.setattr(reconcile, "_TRY_AGAIN_S", 0.0)
    world.reconciler.tick()
    assert tries == ["a"]
    until(lambda: not world.controller._active, "nothing is under way")
    shown = world.shown()
    assert (shown.status, shown.num_ready) == ("ready", 1)
    assert shown.error is not None
    assert "cpu:0" in shown.error
    assert world.kinds().count("ready") == 2, "once it was, and once with the reason"
    assert world.pids()["a-1-r2"] == pid
    assert [worker.ready for worker in world.route().workers] == [False, True]
    world.node.client.stop("big")
    until(lambda: world.ready() == 2, "it is started when there is room")
    until(lambda: not world.controller._active, "nothing is under way")
    assert world.shown().error is None
    assert world.pids()["a-1-r2"] == pid


def test_a_daemon_that_is_away_just_then_gives_up_nobody_who_serves(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_ORPHAN_GRACE_S", 0.0)
    monkeypatch.setattr(reconcile, "_LOST_AGAIN_S", 0.0)
    world.deploy_two(until)
    pid = world.pids()["a-1-r2"]
    world.node.client.stop("a-1-r1")
    with monkeypatch.context() as away:

        def ask(*_: Any) -> None:
            raise UnavailableError("this node's daemon is away")

        away.setattr(deployer, "ask_daemon", ask)
        for _ in range(3):
            world.reconciler.tick()
            until(lambda: not world.controller._active, "nothing is under way")
            assert world.phase() == "ready"
    until(lambda: world.ready() == 2, "the lost one is started when the daemon is back")
    assert world.pids()["a-1-r2"] == pid


def test_each_lost_one_is_started_for_which_there_is_room(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three are lost, and the first has no room any more."""
    monkeypatch.setattr(reconcile, "_LOST_AGAIN_S", 0.0)
    quarter = world.free_bytes() // 4
    row = world.store.add_deployment("a", to_json(DeployBody(name="a", replicas=3)))
    specs = tuple(world.spec_on(f"a-1-r{i}", int(i > 1), quarter) for i in (1, 2, 3))
    world.store.update_deployment(row.id, phase="launching", workers=to_json(specs))
    world.tick_until(until, "ready")
    with monkeypatch.context() as held:
        held.setattr(world.controller, "work_on", lambda row: None)
        world.node.client.stop("a-1-r1")
        world.node.client.stop("a-1-r2")
        world.fill(0)
    until(lambda: world.ready() == 2, "the second serves again, and the third")
    assert [r.status for r in world.shown().replicas] == ["lost", "ready", "ready"]


def test_one_lost_while_another_starts_is_started_too(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may take any time: no other start waits for it."""
    monkeypatch.setattr(reconcile, "_LOST_AGAIN_S", 0.0)
    world.deploy_two(until)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a mend waits for no worker")

    monkeypatch.setattr(deployer, "wait_until_ready", never)
    world.node.client.stop("a-1-r1")
    world.reconciler.tick()
    until(lambda: "a-1-r1" in world.states(), "the first is started again")
    world.node.client.stop("a-1-r2")
    until(lambda: world.ready() == 2, "both serve again")
    until(lambda: not world.controller._active, "nothing is under way")
    assert world.shown().error is None


def test_one_that_never_serves_again_is_ended_and_said_and_tried_later(
    world: Twins, until: Until, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(reconcile, "_TRY_AGAIN_S", 0.0)
    world.reconciler._patience = Patience(60.0, lambda: world.now_s)
    world.deploy_two(until)
    pid = world.pids()["a-1-r2"]
    world.node.behave(slow_start_s=600)
    world.node.client.stop("a-1-r1")

    def starts() -> bool:
        world.reconciler.tick()
        return world.states().get("a-1-r1") is WorkerState.STARTING

    def is_gone() -> bool:
        world.reconciler.tick()
        return set(world.states()) == {"a-1-r2"} and not world.controller._active

    until(starts, "it is started again")
    for _ in range(3):
        world.later(20)
        assert world.states()["a-1-r1"] is WorkerState.STARTING
    world.later(1)
    until(is_gone, "it is ended")
    shown = world.shown()
    assert (shown.status, shown.num_ready, [r.status for r in shown.replicas]) == ("ready", 1, ["lost", "ready"])
    golden("controller", shown.error or "")
    assert world.kinds().count("ready") == 3, "once it was, once it was started again, and once with the reason"
    world.later(58)
    assert is_gone()
    world.node.behave()
    world.now_s += 2
    until(lambda: world.ready() == 2, "it is started again and serves")
    until(lambda: not world.controller._active, "nothing is under way")
    assert world.shown().error is None
    assert world.pids()["a-1-r2"] == pid


def test_where_no_other_is_there_one_that_was_ended_is_started_at_once(
    world: Twins, until: Until, kill: Callable[[int], None]
) -> None:
    """The daemon restarts crashed workers, without asking the controller."""
    world.reconciler._patience = Patience(60.0, lambda: world.now_s)
    world.deploy_one(until, scale_to_zero_s=None)
    world.node.behave(slow_start_s=600)
    crashed = world.pids()["a-1"]
    assert crashed is not None
    kill(crashed)

    def hangs() -> bool:
        world.reconciler.tick()
        return world.pids()["a-1"] not in (None, crashed) and world.states()["a-1"] is WorkerState.STARTING

    until(hangs, "the daemon has started it again")
    assert world.phase() == "ready"
    world.node.behave()
    world.later(61)
    until(lambda: world.ready() == 1, "it is ended and serves again")
    until(lambda: not world.controller._active, "nothing is under way")
    assert (world.phase(), world.shown().error) == ("ready", None)
    assert any(event.message.startswith("a-1 did not serve") for event in world.store.events())


def test_what_fell_asleep_meanwhile_is_not_mended(world: Twins, until: Until) -> None:
    world.deploy_two(until, scale_to_zero_s=LIMIT_S)
    row = world.store.deployment("a")
    assert row is not None
    world.store.update_deployment(row.id, phase="scaled-to-zero")
    world.node.client.stop("a-1-r1")
    world.controller._deployer.run(row)  # which had seen it ready, one replica lost
    assert world.phase() == "scaled-to-zero"
    assert "a-1-r1" not in world.states()


def test_all_sleep_and_wake_together(world: Twins, until: Until) -> None:
    world.deploy_two(until, scale_to_zero_s=LIMIT_S)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    assert world.phase() == "scaled-to-zero"
    world.reconciler.tick()
    assert [worker.ready for worker in world.route().workers] == [False, False]
    until(world.ended, "both have ended")
    assert world.shown().num_ready == 0
    world.waiting = 1
    world.tick_until(until, "ready")
    assert world.ready() == 2


def test_a_waking_one_whose_place_is_gone_in_part_is_planned_anew_and_leaves_nothing(
    world: Twins, until: Until
) -> None:
    """A place is left for one of two; both go, for no two may be had."""
    world.know_demo(runtime_bytes=world.free_bytes() // 4)
    world.deploy_two(until, scale_to_zero_s=LIMIT_S)
    world.later(LIMIT_S, idle_s=LIMIT_S)
    until(world.ended, "both have ended")
    world.fill(1)
    world.waiting = 1

    def refused() -> bool:
        world.reconciler.tick()
        return world.phase() == "scaled-to-zero" and world.store.deployment("a").error is not None

    until(refused, "it sleeps on, and says why")
    error = world.store.deployment("a").error
    assert error is not None
    assert "1 of 2 replicas" in error
    assert set(world.states()) == {"big"}


def test_a_removed_one_leaves_none(world: Twins, until: Until) -> None:
    world.deploy_two(until)
    world.controller.remove("a")

    def gone() -> bool:
        world.reconciler.tick()
        return world.store.deployments() == () and world.states() == {}

    until(gone, "both have ended")


def test_a_deploy_places_each_on_a_device_of_its_own(world: Twins, until: Until, golden: Golden) -> None:
    """The ids of several cannot be taken for those of another deployment."""
    world.know_demo()
    world.answers = False  # the gateway: there are no routes yet
    for name, replicas in (("a", 2), ("a-1", 1), ("many", 3)):
        world.controller.deploy(DeployBody(name=name, input_tokens=16, output_tokens=16, replicas=replicas))
        until(lambda name=name: world.phase(name) in {"ready", "refused"}, f"{name} is carried out")
    ids = {row.name: [w.worker_id for w in recorded_workers(row)] for row in world.store.deployments()}
    assert ids == {"a": ["a-1-r1", "a-1-r2"], "a-1": ["a-1-2"], "many": []}
    assert [r.device_ids for r in world.shown().replicas] in ([("cpu:0",), ("cpu:1",)], [("cpu:1",), ("cpu:0",)])
    golden("controller", str(world.store.deployment("many").error))
    assert set(world.states().values()) == {WorkerState.READY}
    assert set(world.states()) == {"a-1-r1", "a-1-r2", "a-1-2"}


SPEC = load_spec(demo_model_path())
ESTIMATOR, ENGINES = RooflineEstimator(SPEC, A6000), list(capabilities_for("torch"))


def test_each_is_judged_by_its_share_of_the_rate() -> None:
    """Two keep a limit at twice the rate that one does, and are one replica's plan at half the rate."""
    hardware = hypothetical_hardware(A6000, 4)
    alone = make_plan(SPEC, hardware, ESTIMATOR, ENGINES, PlanOptions())
    assert alone.best is not None
    assert alone.best.estimate is not None
    e2e_s = alone.best.estimate.e2e_s.value

    def plan(rate_per_s: float, replicas: int) -> Any:
        slo = Slo(e2e_s=10 * e2e_s)
        intent = Intent(kind=IntentKind.LATENCY_SLO, slo=slo, rate_per_s=rate_per_s, percentile=90)
        return make_plan(SPEC, hardware, ESTIMATOR, ENGINES, PlanOptions(intent=intent, replicas=replicas))

    rate = plan(0.1 / e2e_s, 1).served.highest_rate_per_s * 1.5
    one, two, half = plan(rate, 1), plan(rate, 2), plan(rate / 2, 1)
    assert one.best is None or one.best.config != two.best.config
    assert two.best is not None
    assert (two.best.config, two.best.objective) == (half.best.config, half.best.objective)
    assert two.served == half.served
    assert isinstance(two.best.layout, Replicas)
    devices = [placement.device_ids for placement in placements_of(two.best.layout)]
    assert len(devices) == 2
    assert not set(devices[0]) & set(devices[1])


def test_a_configuration_that_fits_once_and_not_so_often_is_refused() -> None:
    """Three replicas leave one of four GPUs for each: only configurations of one GPU can be."""
    plan = make_plan(SPEC, hypothetical_hardware(A6000, 4), ESTIMATOR, ENGINES, PlanOptions(replicas=3))
    for one in plan.candidates:
        if one.refusal is None:
            assert one.feasible == (one.config.num_gpus == 1), one.reason
            if not one.feasible:
                assert "replicas" in str(one.reason)


@pytest.mark.parametrize("replicas", [0, -1, MAX_REPLICAS + 1])
def test_a_number_that_cannot_be_is_refused(replicas: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to {MAX_REPLICAS} replicas, got {replicas}"):
        PlanOptions(replicas=replicas)


def test_replicas_share_what_is_asked_and_each_is_told(row: DeploymentRow) -> None:
    """Two on GPUs of their own: each is asked for half, and what was seen of both is what all requests take."""
    specs = tuple(
        replace(
            WORKER,
            worker_id=f"chat-1-r{number + 1}",
            config=DeploymentConfig(tp=1, pp=1, engine="torch"),
            stages=(StageAssignment(device_ids=(f"GPU-{number}",), num_layers=4),),
        )
        for number in range(2)
    )
    two = replace(row, workers=to_json(specs).decode())
    one = running(for_s=300.0, busy=0.0).workers[0]
    status = running(for_s=300.0, busy=0.2)
    here = replace(status, workers=tuple(replace(one, spec=spec) for spec in specs))
    (state,) = serving_on(here, [two], told(1000.0, outstanding=3))
    assert [replica.replica_id for replica in state.replicas] == ["chat-1-r1", "chat-1-r2"]
    assert [replica.outstanding for replica in state.replicas] == [2, 1]
    assert state.wanted == 2
    assert state.requests_per_s * state.service_s <= 2, "of two replicas' time at most"
    (seen,) = serving_on(here, [two], told(1000.0))
    assert seen.busy_fraction == pytest.approx(0.2)
    loads = LoadedCluster.of(hardware_of(here, A6000, (seen,)).snapshot).loads
    assert loads == {("n", "GPU-0"): pytest.approx(0.2), ("n", "GPU-1"): pytest.approx(0.2)}
    fresh = replace(here, workers=(here.workers[0], replace(here.workers[1], started_at=_at(NOW - 5.0))))
    (state,) = serving_on(fresh, [two], told(1000.0))
    assert state.busy_fraction == pytest.approx(min(1.0, 1000.0 * planned_s(row) / 2)), "one was not seen for long"
    (state,) = serving_on(replace(here, workers=here.workers[:1]), [two], told(1000.0))
    assert [replica.replica_id for replica in state.replicas] == ["chat-1-r1"]


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
