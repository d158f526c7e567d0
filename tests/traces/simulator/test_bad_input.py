"""Scenarios that cannot be simulated are refused in a sentence; requests that cannot be served have an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fingerprint.errors import BadInputError, ConfigError, NotFoundError, NotMeasuredError, PolicyError
from placement.routing import Replica
from placement.types import ClusterSnapshot, GpuState
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


def test_a_rate_beyond_capacity_stops_at_the_bound_and_says_so() -> None:
    """Requests of ten seconds arrive every second: after 13 s one is answered, the worker has two, 11 wait."""
    bounded = replace(SCENARIO, most_waiting=10)
    result = simulate((Request(float(t), 1, 10, "a") for t in range(10**9)), bounded, POLICIES)
    assert result.stopped is not None
    assert result.stopped.startswith("stopped at 13.0 s: 11 requests wait for a,")
    assert "1.077 requests/s arrived and 0.07692 were answered" in result.stopped
    assert len(result.outcomes) == 14
    assert sorted(set(result.outcomes.failure.tolist())) == [Failure.NONE, Failure.INTERRUPTED]
    assert result.outcomes.completed.sum() == 1


def test_a_growing_queue_shows_in_the_figures() -> None:
    result = simulate((Request(float(t), 1, 2, "a") for t in range(100)), SCENARIO, POLICIES)
    assert result.stopped is None
    assert [(figures.arrived, figures.waiting) for figures in result.deployments] == [(100, 49)]


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([], BadInputError, "the trace has no request"),
        ([Request(1.0, 1, 1, "b")], NotFoundError, "request 1 at 1 s calls 'b', which is never deployed"),
        ([Request(1.0, 1, 1, "a"), Request(0.5, 1, 1, "a")], BadInputError, "arrives at 0.5 s, after one at 1"),
        ([Request(float("nan"), 1, 1, "a")], BadInputError, "request 1 arrives at nan s"),
        ([Request(1.0, 0, 1, "a")], BadInputError, "request 1 at 1 s has 0 input and 1 output tokens"),
        ([Request(1.0, 5, 0, "a")], BadInputError, "request 1 at 1 s has 5 input and 0 output tokens"),
    ],
)  # fmt: skip
def test_traces_that_cannot_be_simulated(requests: list[Request], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(requests, SCENARIO, POLICIES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": ClusterSnapshot(())}, "at least one GPU"),
        ({"startup_s": -1.0}, "startup_s must be a number of seconds of at least 0, got -1.0"),
        ({"overhead_s": float("nan")}, "overhead_s must be a number of seconds of at least 0, got nan"),
        ({"most_waiting": 0}, "queue's bounds"),
        ({"outstanding_per_slot": 0}, "outstanding_per_slot must be at least 1, got 0"),
        ({"max_waiting": -1}, "queue's bounds"),
        ({"actions": (Deploy(at_s=-1.0, name="a", model="a"),)}, "finite times from 0 on"),
        ({"actions": deploy_all("a", "a")}, "'a': a name is deployed once"),
        ({"actions": (Deploy(at_s=0.0, name="a", model="a", replicas=0),)}, "at least one replica"),
        ({"actions": (Remove(at_s=1.0, name="a"),)}, "no earlier deployment 'a' to remove"),
        ({"actions": (NodeFails(at_s=1.0, node_id="x"),)}, "there is no node 'x'; the cluster has node0"),
        ({"actions": (Profile(at_s=1.0, name="p", memory_bytes=1, work_s=0.0),)}, "a positive time"),
    ],
)
def test_scenarios_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SCENARIO, **change)


def test_stepped_service_needs_a_batching_policy() -> None:
    with pytest.raises(ConfigError, match="needs a batching policy"):
        simulate([Request(0.0, 1, 1, "a")], replace(SCENARIO, service=Service.STEPPED), POLICIES)


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


def test_a_planner_that_raises_is_named_with_the_time() -> None:
    with pytest.raises(PolicyError, match=r"broken raised ZeroDivisionError: x, at 2.500 s of simulated time"):
        simulate(LATER, TWO, Policies(deployer=_Raises(ZeroDivisionError("x"))))
    with pytest.raises(PolicyError, match=r"the policy broken raised measure first, at 2.500 s of simulated time"):
        simulate(LATER, TWO, Policies(deployer=_Raises(NotMeasuredError("measure first"))))


def test_a_router_that_raises_or_chooses_nobody_is_named_with_the_time() -> None:
    with pytest.raises(PolicyError, match=r"the policy broken raised KeyError: 'x', at 3.000 s of simulated time"):
        simulate(LATER, TWO, replace(POLICIES, router=_Raises(KeyError("x"))))
    with pytest.raises(PolicyError, match=r"beyond chose replica 2; a has 2 with room, from 0 on, at 3.000 s"):
        simulate(LATER, TWO, replace(POLICIES, router=_Beyond()))


def test_a_harvest_that_raises_is_named_with_the_time() -> None:
    def harvest(snapshot: ClusterSnapshot, need_bytes: int) -> GpuState | None:
        raise IndexError("none")

    profile: Action = Profile(at_s=1.5, name="p", memory_bytes=1, work_s=1.0)
    scenario = replace(SCENARIO, actions=(*deploy_all("a"), profile))
    with pytest.raises(PolicyError, match=r"the policy harvest raised IndexError: none, at 1.500 s"):
        simulate(LATER, scenario, replace(POLICIES, harvest=harvest))


@pytest.mark.parametrize(("speed", "did"), [(0.0, "gave a#1 the speed 0.0"), (1.5, "gave a#1 the speed 1.5")])
def test_a_contention_model_that_stops_or_speeds_up_workers_is_named(speed: float, did: str) -> None:
    scenario = replace(SCENARIO, actions=deploy_all("a", "b"))
    with pytest.raises(PolicyError, match=rf"the policy contention {did}; .*, at 3.000 s"):
        simulate(LATER, scenario, replace(POLICIES, contention=lambda stages: speed))


def test_a_batching_policy_that_plans_nothing_is_named() -> None:
    class Idle:
        def __init__(self, bounds: Limits) -> None: ...
        def submit(self, row: int, input_tokens: int, output_tokens: int) -> None: ...
        def plan(self) -> Sequence[Chunk]:
            return ()

        def complete(self, plan: Sequence[Chunk]) -> Sequence[int]:
            return ()

    scenario = replace(SCENARIO, service=Service.STEPPED)
    with pytest.raises(PolicyError, match=r"the policy batching planned nothing for 1 requests, at 3.000 s"):
        simulate(LATER, scenario, replace(POLICIES, make_batcher=Idle))


class _Misplaces(OnTheFirst):
    name = "misplaces"

    def __init__(self, node_id: str, size_bytes: int) -> None:
        super().__init__(ONE)
        self.placement = placed_on("gpu0", node_id=node_id, size_bytes=size_bytes)

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        return Deployed(placement=self.placement, steps=ONE, what="somewhere")


@pytest.mark.parametrize(
    ("deployer", "did"),
    [
        (_Misplaces("node0", 101), "raised .* were placed on gpu0, which has"),
        (_Misplaces("node9", 1), "raised there is no GPU gpu0 on node9 now"),
    ],
)
def test_a_placement_that_cannot_be_is_the_planners_fault(deployer: _Misplaces, did: str) -> None:
    with pytest.raises(PolicyError, match=rf"the policy misplaces {did}.*, at 2.500 s"):
        simulate(LATER, TWO, Policies(deployer=deployer))


def test_an_unknown_name_is_told_with_the_names_there_are() -> None:
    with pytest.raises(NotFoundError, match=r"never deployed; deployed are a$"):
        simulate([Request(1.0, 1, 1, "b")], SCENARIO, POLICIES)
