"""The end of the former workers of an updated deployment, look by look: all around it are stand-ins.

With real processes: test_e2e_update.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig
from iserve.controller import draining
from iserve.controller.draining import Drainer
from iserve.controller.service import Controller
from iserve.route_table import Demand
from iserve.state.store import DeploymentRow

FORMER = WorkerSpec(
    worker_id="a-1",
    served_model="a",
    checkpoint="/m",
    config=DeploymentConfig(),
    stages=(StageAssignment(device_ids=("cpu:0",), num_layers=2),),
    limits=WorkerLimits(
        max_batch=1, max_batched_tokens=64, max_context_tokens=64, kv_tokens=64, memory_bytes_per_device=2**20
    ),
)
ROW = DeploymentRow(
    id=1,
    name="a",
    created_at=0.0,
    request="{}",
    desired="running",
    phase="ready",
    error=None,
    plan=None,
    workers="[]",
    draining=to_json((FORMER,)).decode(),
)


class World:
    """A former worker that has a request, and the drainer that looks at it every second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.running = 1
        self.state = WorkerState.READY
        self.spec = FORMER
        self.gateway_version: int | None = 5  # None: it does not answer
        self.ended: list[str] = []
        self.forgotten: list[int] = []
        self.rows: tuple[DeploymentRow, ...] = (ROW,)
        controller = SimpleNamespace(
            demand=self.demand,
            end_worker=lambda worker_id, _: self.ended.append(worker_id),
            store=SimpleNamespace(forget_drained=lambda row_id, _: self.forgotten.append(row_id)),
            profiler=SimpleNamespace(workers=frozenset()),
        )
        self.controller = controller
        self.drainer = Drainer(cast(Controller, controller), clock=lambda: self.now_s)
        monkeypatch.setattr(draining, "worker_stats", self.stats)

    def demand(self) -> Demand | None:
        version = self.gateway_version
        return None if version is None else Demand(routes_version=version, deployments=())

    def stats(self, *_worker: Any) -> Any:
        return SimpleNamespace(running=self.running, waiting=0)

    def look(self, *, seconds: int = 1, routes_version: int = 5) -> list[str]:
        """So many looks, one a second; return the workers that they ended."""
        self.ended.clear()
        for _ in range(seconds):
            self.now_s += 1
            status = WorkerStatus(
                spec=self.spec, state=self.state, url="http://127.0.0.1:1", pid=1, restarts=0, started_at=""
            )
            workers = () if self.state is WorkerState.STOPPED else (status,)
            node = NodeStatus(node_id="local", observed_at=self.now_s, devices=(), workers=workers)
            self.drainer.look(self.rows, node, routes_version)
        return list(self.ended)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_worker_ends_with_its_last_request_and_is_forgotten(world: World) -> None:
    assert world.look(seconds=30) == []
    world.running = 0
    assert world.look() == ["a-1"]
    world.state = WorkerState.STOPPED
    assert (world.look(), world.forgotten) == ([], [1])


def test_a_gateway_that_has_not_read_the_newest_routes_yet_ends_no_worker(world: World) -> None:
    """Routes change with every key and every worker that becomes ready."""
    world.look(seconds=300)
    assert world.look(routes_version=6) == []
    world.gateway_version = None
    assert world.look() == [], "one answer of the gateway was lost"
    world.gateway_version = 6
    assert world.look(seconds=300, routes_version=6) == []
    world.running = 0
    assert world.look(routes_version=7) == [], "the gateway may still send requests there"


def test_a_gateway_that_is_away_for_a_minute_keeps_no_worker(world: World) -> None:
    world.look(seconds=300)
    world.gateway_version = None
    assert world.look(seconds=60) == []
    assert world.look() == ["a-1"]


def test_each_worker_is_given_that_minute(world: World) -> None:
    """The gateway is away while another deployment, whose worker does not run any more, drains already."""
    world.gateway_version = None
    other = replace(FORMER, worker_id="b-2")
    world.rows = (replace(ROW, id=2, name="b", draining=to_json((other,)).decode()),)
    world.look(seconds=100)
    world.rows = (*world.rows, ROW)
    assert world.look(seconds=60) == []
    assert world.look() == []
    assert world.look() == ["a-1"]


def test_a_minute_is_counted_anew_for_the_next_update(world: World) -> None:
    world.look()
    world.rows = ()
    world.look(seconds=300)
    world.rows, world.gateway_version = (ROW,), None
    assert world.look(seconds=60) == []


def test_requests_of_a_quarter_of_an_hour_are_enough(world: World) -> None:
    assert world.look(seconds=901) == []
    assert world.look() == ["a-1"]


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        (WorkerState.STARTING, False),  # so is a busy one that misses three probes
        (WorkerState.STOPPING, False),
        (WorkerState.RESTARTING, True),
        (WorkerState.FAILED, True),
    ],
)
def test_only_a_worker_without_a_process_has_lost_its_requests(
    world: World, state: WorkerState, ends: bool
) -> None:
    world.look()
    world.state = state
    assert world.look() == (["a-1"] if ends else [])


def test_a_worker_under_check_is_not_ended(world: World) -> None:
    world.running = 0
    world.controller.profiler.workers = frozenset({"a-1"})
    assert world.look(seconds=1000) == []
    world.controller.profiler.workers = frozenset()
    assert world.look() == ["a-1"]


def test_a_worker_that_has_the_id_of_a_former_one_is_not_ended(world: World) -> None:
    """Ids repeat after a state was restored; the port is chosen at each start."""
    world.running = 0
    world.spec = replace(FORMER, port=4711)
    assert world.look() == ["a-1"]
    world.spec = replace(FORMER, checkpoint="/another")
    assert world.look(seconds=1000) == []
    assert set(world.forgotten) == {1}, "the former one is gone"
