"""Placement by a real controller and daemon: places taken meanwhile, memory lent, splits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from fingerprint.gpus import gpu_spec
from iserve.api_types import DeployBody
from iserve.controller.reconcile import Reconciler
from iserve.controller.snapshot import hardware_of
from iserve.controller.stored_values import recorded_workers
from iserve.demo import demo_model_path
from iserve.model_source import resolve
from iserve.planning.document import PlanDocument
from iserve.planning.worker_launch import worker_spec
from iserve.route_table import Demand, DeploymentDemand
from placement.load_model import LoadedCluster
from placement.types import Placement, StagePlacement
from tests.iserve.test_deployer import Until, World, ended, limits, world

pytestmark = pytest.mark.process

__all__ = ["ended", "world"]  # fixtures


def test_a_deployment_whose_place_is_taken_is_planned_anew(world: World, ended: Callable[..., str]) -> None:
    """This happens after `iserve down`, something else started, and `iserve up`."""
    world.start()
    world.know_demo(runtime_bytes=64 * 2**20)
    one_gpu = (StageAssignment(device_ids=("cpu:0",), num_layers=8),)
    too_much = limits(world.free_bytes() * 2)
    world.record(world.node.spec("a-1", stages=one_gpu, limits=too_much))
    world.work()
    assert ended() == "ready"
    (worker,) = world.node.client.workers()
    assert worker.spec.worker_id == "a-1"
    assert worker.spec.limits.memory_bytes_per_device < world.free_bytes()


@pytest.mark.parametrize(("former", "replicas"), [("a-1", 1), ("a-1-r2", 2)])
def test_a_deployment_that_is_planned_anew_takes_no_worker_that_still_drains(
    world: World, ended: Callable[..., str], former: str, replicas: int
) -> None:
    """The former worker of before an update has the id of a first deploy."""
    world.start()
    world.know_demo(runtime_bytes=64 * 2**20)
    world.node.ready(former)
    world.deploy(replicas=replicas)
    assert ended() == "ready"
    chosen = {spec.worker_id for spec in recorded_workers(world.store.deployment("a"))}
    assert len(chosen - {former}) == replicas
    assert world.states() == dict.fromkeys({former} | chosen, WorkerState.READY)


def test_two_deploys_at_once_choose_one_after_the_other(world: World, ended: Callable[..., str]) -> None:
    """Each takes more than half of a device: the second sees what the first was promised."""
    world.start()
    world.know_demo(runtime_bytes=int(world.free_bytes() * 0.6))
    threads = [threading.Thread(target=world.deploy, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ended("a"), ended("b")] == ["ready", "ready"]
    devices = [world.controller.deployment(name).device_ids for name in ("a", "b")]
    assert sorted(devices) == [("cpu:0",), ("cpu:1",)]


def test_a_split_follows_the_room_there_is(world: World, ended: Callable[..., str]) -> None:
    """On one device there is less than half of the other's: each stage is promised what it takes, not the most."""
    world.start()
    device_bytes = world.free_bytes()
    world.know_demo(layer_split_bytes=device_bytes // 7, runtime_bytes=2**20)
    world.node.ready("other", limits=limits(int(device_bytes * 0.6)))  # on cpu:0
    world.deploy("a", quality="exact")
    assert ended("a") == "ready"
    (spec,) = [w.spec for w in world.node.client.workers() if w.spec.worker_id != "other"]
    layers = {stage.device_ids: stage.num_layers for stage in spec.stages}
    assert sum(layers.values()) == 8
    assert layers["cpu:0",] < 4 < layers["cpu:1",]
    promised = spec.promised_bytes()
    assert promised["cpu:0"] < device_bytes * 0.4
    assert promised["cpu:1"] > promised["cpu:0"] * 1.5


def test_memory_lent_to_a_profile_is_waited_for_and_a_removal_waits_for_nobody(
    world: World, until: Until, ended: Callable[..., str]
) -> None:
    world.start()
    world.know_demo(runtime_bytes=int(world.free_bytes() * 0.6))
    both = (
        StageAssignment(device_ids=("cpu:0",), num_layers=1),
        StageAssignment(device_ids=("cpu:1",), num_layers=1),
    )
    lent = limits(int(world.free_bytes() * 0.8))
    with world.controller.profiler.paused(lambda: None):  # as while a profile is taken
        world.node.ready("profile", config=DeploymentConfig(pp=2), stages=both, limits=lent, profiling=True)
        world.deploy("a")
        many = [f"waiting-{number}" for number in range(40)]
        for name in many:
            world.deploy(name)
        until(lambda: {world.phase(name) for name in ("a", *many)} == {"planning"}, "all wait for their turn")
        for name in many:
            assert world.controller.remove(name).status == "removing"
        reconciler = Reconciler(world.controller)

        def others_are_gone() -> bool:
            for row in world.store.deployments():
                reconciler._settle(row, world.controller.observe())
            return [row.name for row in world.store.deployments()] == ["a"]

        until(others_are_gone, "the removed are gone")
        assert world.phase("a") == "planning"
        world.node.client.stop("profile")
    assert ended("a") == "ready"


@pytest.mark.parametrize(
    ("free_bytes", "limit_bytes"),
    [
        pytest.param(2000, 1020, id="room"),
        pytest.param(1010, 1010, id="little"),
        pytest.param(1000, 1000, id="exactly-what-was-placed"),
    ],
)
def test_what_was_placed_is_never_refused_for_the_headroom(free_bytes: int, limit_bytes: int) -> None:
    stage = StagePlacement(node_id="n", device_ids=("cpu:0",), first_layer=0, num_layers=8, bytes_per_gpu=1000)
    config, placement = DeploymentConfig(), Placement((stage,))
    source = resolve(str(demo_model_path()), {})
    options = DeployBody().options(default_policy="hybrid", load_threshold=0.5)
    free = {"cpu:0": free_bytes, "cpu:1": 1}
    spec = worker_spec("a", source, "a-1", config, placement, options.workload, free)
    assert spec.limits.memory_bytes_per_device == limit_bytes


def test_a_plan_is_told_how_often_who_runs_beside_it_is_called(world: World, ended: Callable[..., str]) -> None:
    """The stand-in is never busy: all that a plan sees of it is what the gateway counts."""
    world.start()
    world.know_demo()
    world.deploy()
    assert ended() == "ready"
    (worker,) = world.node.client.workers()
    (device,) = worker.spec.stages[0].device_ids
    assert device in {seen.device_id for seen in world.node.client.node().devices}
    plan = from_json(world.store.deployment("a").plan or "", PlanDocument)
    chosen = next(one.estimate for one in plan.candidates if one.config == worker.spec.config)
    assert chosen is not None

    def load(requests_per_s: float | None) -> float:
        asked = DeploymentDemand(name="a", waiting=0, outstanding=0, idle_s=0.0, requests_per_s=requests_per_s)
        world.controller.demand = lambda: Demand(routes_version=1, deployments=(asked,))  # type: ignore[method-assign]
        node = hardware_of(world.node.client.node(), gpu_spec("a6000"), world.controller.serving())
        return LoadedCluster.of(node.snapshot).loads.get((node.snapshot.gpus[0].node_id, device), 0.0)

    assert load(None) == load(0.0) == 0.0
    assert load(0.5 / chosen.e2e_s.value) == pytest.approx(0.5)
