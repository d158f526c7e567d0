"""Scenarios that cannot be simulated are refused in a sentence; requests that cannot be served have an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fingerprint.errors import BadInputError, ConfigError, NotFoundError, NotMeasuredError, PolicyError
from placement.routing import Replica
from placement.types import ClusterSnapshot, GpuState
from tests.golden_words import Golden
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, placed_on, second_per_step
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.scenario import (
    Action,
    Deploy,
    Deployed,
    NodeFails,
    NotDeployed,
    Policies,
    Profile,
    Remove,
    Scenario,
    Service,
)
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits
from traces.simulator.stepped import Chunk

ONE = second_per_step(1)
SCENARIO = Scenario(cluster=cluster(2), actions=deploy_all("a"))
POLICIES = Policies(deployer=OnTheFirst(ONE))


def test_a_rate_beyond_capacity_stops_at_the_bound_and_says_so(golden: Golden) -> None:
    """Requests of ten seconds arrive every second: after 13 s one is answered, the worker has two, 11 wait."""
    bounded = replace(SCENARIO, most_waiting=10)
    result = simulate((Request(float(t), 1, 10, "a") for t in range(10**9)), bounded, POLICIES)
    assert result.stopped is not None
    golden("simulator-errors", result.stopped)
    assert len(result.outcomes) == 14
    assert sorted(set(result.outcomes.failure.tolist())) == [Failure.NONE, Failure.INTERRUPTED]
    assert result.outcomes.completed.sum() == 1


def test_a_growing_queue_shows_in_the_figures() -> None:
    result = simulate((Request(float(t), 1, 2, "a") for t in range(100)), SCENARIO, POLICIES)
    assert result.stopped is None
    assert [(figures.arrived, figures.waiting) for figures in result.deployments] == [(100, 49)]


@pytest.mark.parametrize(
    ("requests", "error"),
    [
        pytest.param([], BadInputError, id="no-request"),
        pytest.param([Request(1.0, 1, 1, "b")], NotFoundError, id="never-deployed"),
        pytest.param([Request(1.0, 1, 1, "a"), Request(0.5, 1, 1, "a")], BadInputError, id="out-of-order"),
        pytest.param([Request(float("nan"), 1, 1, "a")], BadInputError, id="at-no-time"),
        pytest.param([Request(1.0, 0, 1, "a")], BadInputError, id="no-prompt"),
        pytest.param([Request(1.0, 5, 0, "a")], BadInputError, id="no-answer"),
    ],
)
def test_traces_that_cannot_be_simulated(requests: list[Request], error: type[Exception], golden: Golden) -> None:
    with pytest.raises(error) as caught:
        simulate(requests, SCENARIO, POLICIES)
    golden("simulator-errors", str(caught.value))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"cluster": ClusterSnapshot(())}, id="no-gpu"),
        pytest.param({"startup_s": -1.0}, id="startup"),
        pytest.param({"overhead_s": float("nan")}, id="overhead"),
        pytest.param({"most_waiting": 0}, id="no-queue"),
        pytest.param({"outstanding_per_slot": 0}, id="no-outstanding"),
        pytest.param({"max_waiting": -1}, id="negative-queue"),
        pytest.param({"actions": (Deploy(at_s=-1.0, name="a", model="a"),)}, id="before-the-start"),
        pytest.param({"actions": deploy_all("a", "a")}, id="deployed-twice"),
        pytest.param({"actions": (Deploy(at_s=0.0, name="a", model="a", replicas=0),)}, id="no-replica"),
        pytest.param({"actions": (Remove(at_s=1.0, name="a"),)}, id="nothing-to-remove"),
        pytest.param({"actions": (NodeFails(at_s=1.0, node_id="x"),)}, id="no-such-node"),
        pytest.param({"actions": (Profile(at_s=1.0, name="p", memory_bytes=1, work_s=0.0),)}, id="no-work"),
    ],
)
def test_scenarios_that_cannot_be(change: dict[str, object], golden: Golden) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SCENARIO, **change)
    golden("simulator-errors", str(caught.value))


def test_stepped_service_needs_a_batching_policy(golden: Golden) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate([Request(0.0, 1, 1, "a")], replace(SCENARIO, service=Service.STEPPED), POLICIES)
    golden("simulator-errors", str(caught.value))


class _Raises:
    name = "broken"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        raise self.error

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        raise self.error


class _Beyond:
    name = "beyond"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        return len(replicas)


TWO = replace(SCENARIO, actions=(Deploy(at_s=2.5, name="a", model="a", replicas=2),))
LATER = [Request(3.0, 1, 1, "a")]


def test_a_planner_that_raises_is_named_with_the_time(golden: Golden) -> None:
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, TWO, Policies(deployer=_Raises(ZeroDivisionError("x"))))
    golden("simulator-errors", str(caught.value), "first")
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, TWO, Policies(deployer=_Raises(NotMeasuredError("measure first"))))
    golden("simulator-errors", str(caught.value), "second")


def test_a_router_that_raises_or_chooses_nobody_is_named_with_the_time(golden: Golden) -> None:
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, TWO, replace(POLICIES, router=_Raises(KeyError("x"))))
    golden("simulator-errors", str(caught.value), "first")
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, TWO, replace(POLICIES, router=_Beyond()))
    golden("simulator-errors", str(caught.value), "second")


def test_a_harvest_that_raises_is_named_with_the_time(golden: Golden) -> None:
    def harvest(snapshot: ClusterSnapshot, need_bytes: int) -> GpuState | None:
        raise IndexError("none")

    profile: Action = Profile(at_s=1.5, name="p", memory_bytes=1, work_s=1.0)
    scenario = replace(SCENARIO, actions=(*deploy_all("a"), profile))
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, scenario, replace(POLICIES, harvest=harvest))
    golden("simulator-errors", str(caught.value))


@pytest.mark.parametrize("speed", [0.0, 1.5])
def test_a_contention_model_that_stops_or_speeds_up_workers_is_named(speed: float, golden: Golden) -> None:
    scenario = replace(SCENARIO, actions=deploy_all("a", "b"))
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, scenario, replace(POLICIES, contention=lambda stages: speed))
    golden("simulator-errors", str(caught.value))


def test_a_batching_policy_that_plans_nothing_is_named(golden: Golden) -> None:
    class Idle:
        def __init__(self, bounds: Limits) -> None: ...
        def submit(self, row: int, input_tokens: int, output_tokens: int) -> None: ...
        def plan(self) -> Sequence[Chunk]:
            return ()

        def complete(self, plan: Sequence[Chunk]) -> Sequence[int]:
            return ()

    scenario = replace(SCENARIO, service=Service.STEPPED)
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, scenario, replace(POLICIES, make_batcher=Idle))
    golden("simulator-errors", str(caught.value))


class _Misplaces(OnTheFirst):
    name = "misplaces"

    def __init__(self, node_id: str, size_bytes: int) -> None:
        super().__init__(ONE)
        self.placement = placed_on("gpu0", node_id=node_id, size_bytes=size_bytes)

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        return Deployed(placement=self.placement, steps=ONE, what="somewhere")


@pytest.mark.parametrize(
    "deployer",
    [
        pytest.param(_Misplaces("node0", 101), id="too-large"),
        pytest.param(_Misplaces("node9", 1), id="no-such-node"),
    ],
)
def test_a_placement_that_cannot_be_is_the_planners_fault(deployer: _Misplaces, golden: Golden) -> None:
    with pytest.raises(PolicyError) as caught:
        simulate(LATER, TWO, Policies(deployer=deployer))
    golden("simulator-errors", str(caught.value))


def test_an_unknown_name_is_refused_with_the_names_there_are(golden: Golden) -> None:
    with pytest.raises(NotFoundError) as caught:
        simulate([Request(1.0, 1, 1, "b")], SCENARIO, POLICIES)
    golden("simulator-errors", str(caught.value))
