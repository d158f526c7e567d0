"""Moves that one look asks for: one transaction, whatever fails in the middle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import PolicyError
from placement.actions import Drain, Move
from tests.golden_words import Golden
from tests.traces.simulator.test_steering import ONE, Scripted, run, told
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, placed_on
from traces.request import Request
from traces.simulator.cluster import Cluster
from traces.simulator.deployments import Deployments
from traces.simulator.policy_errors import PolicyFault
from traces.simulator.requests import Requests
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import Action, Deploy, NodeFails, Policies, Remove, Scenario, Service


def move(name: str, gpu: int, load_s: float, *, replica: int, node: int = 0) -> Move:
    where = placed_on(f"gpu{gpu}", node_id=f"node{node}", size_bytes=60)
    return Move(name=name, replica_id=f"{name}#{replica}", placement=where, load_s=load_s)


# a, on gpu0 of node0, is to move to node1, and b, on gpu1 of node0, to node2. Both are asked for at 10 s; a's new
# place would be loaded at 15 s, b's at 40 s.
BOTH = (move("a", 2, 5.0, replica=1, node=1), move("b", 4, 30.0, replica=2, node=2))
ASKED = [Request(0.0, 1, 60, "a"), Request(0.0, 1, 60, "b"), Request(70.0, 1, 4, "a"), Request(70.0, 1, 4, "b")]


def run_both(*more: Action) -> SimulationResult:
    """Six GPUs, two on a node."""
    return run(list(ASKED), Scripted(BOTH), actions=(*deploy_all("a", "b"), *more), num_gpus=6, per_node=2)


def held_s(result: SimulationResult) -> list[float]:
    return [round(gpu.held_fraction * result.end_s, 6) for gpu in result.gpus]


def test_moves_of_one_look_take_over_together_when_the_last_is_loaded() -> None:
    result = run_both()
    assert told(result, ChangeKind.MOVED, ChangeKind.DRAINING) == [
        (40.0, "moved"), (40.0, "draining"), (40.0, "moved"), (40.0, "draining"),
    ]  # fmt: skip
    assert result.outcomes.completed.all()
    assert held_s(result) == [60.0, 60.0, 64.0, 0.0, 64.0, 0.0]  # from 10 to 74 s in the new places


@pytest.mark.parametrize(("node", "loaded"), [(1, "gpu2"), (2, "gpu4")])
def test_a_place_that_is_lost_in_the_middle_leaves_all_where_they_are(
    node: int, loaded: str, golden: Golden
) -> None:
    """At 25 s, when the first would have taken over already and the second is still to be loaded."""
    result = run_both(NodeFails(at_s=25.0, node_id=f"node{node}"))
    assert told(result, ChangeKind.MOVED, ChangeKind.DRAINING) == []
    golden("simulator-errors", [c.text for c in result.changes if c.kind is ChangeKind.ENDED])
    assert result.outcomes.completed.all()
    assert held_s(result) == [74.0, 74.0, 15.0, 0.0, 15.0, 0.0]


@pytest.mark.parametrize("second", [move("b", 2, 30.0, replica=2, node=1), move("b", 9, 30.0, replica=2, node=1)])
def test_no_move_of_a_look_is_started_where_one_has_no_place(second: Move) -> None:
    """The second of two moves to a GPU that has room for one, or to none: nothing of the plan is carried out."""
    policies = Policies(deployer=OnTheFirst(ONE, 60), cluster_policy=Scripted([BOTH[0], second]))
    actions = (Deploy(at_s=0.0, name="a", model="a"), Deploy(at_s=0.0, name="b", model="b"))
    scenario = Scenario(cluster=cluster(6, per_node=2), actions=actions, service=Service.CONTINUOUS, startup_s=0.0)
    simulated = Cluster(scenario.cluster, policies.contention_of(scenario.service))
    deployments = Deployments(scenario, policies, simulated, Requests())
    for action in actions:
        deployments.deploy(action, 0.0)
    before = deployments.snapshot(10.0), simulated.servers, tuple(simulated.events), tuple(deployments.changes)
    with pytest.raises(PolicyFault, match=r"GiB free|no GPU gpu9"):
        deployments.steer(10.0)
    after = deployments.snapshot(10.0), simulated.servers, tuple(simulated.events), tuple(deployments.changes)
    assert after == before


def test_a_place_that_has_no_room_refuses_all() -> None:
    """The simulation ends with the policy's fault."""
    policy = Scripted([BOTH[0], move("b", 2, 30.0, replica=2, node=1)])
    with pytest.raises(PolicyError, match=r"scripted.*GiB free"):
        run(list(ASKED), policy, actions=deploy_all("a", "b"), num_gpus=6, per_node=2)


def test_one_replica_moves_once_in_a_look() -> None:
    with pytest.raises(PolicyError, match="it moves already"):
        run(list(ASKED), Scripted([BOTH[0], BOTH[0]]), actions=deploy_all("a", "b"), num_gpus=6, per_node=2)


def test_a_removal_in_the_middle_ends_the_plan() -> None:
    """The place of the removed one is given back, and that of the replica that was to move with it."""
    result = run_both(Remove(at_s=25.0, name="b"))
    assert told(result, ChangeKind.MOVED, ChangeKind.DRAINING) == []
    assert held_s(result)[2:5:2] == [15.0, 15.0]


def test_a_drain_of_a_replica_that_moves_ends_the_plan() -> None:
    """Drain, at 20 s, the one of b's two replicas that is to move together with a's."""
    orders = [move("a", 3, 5.0, replica=1, node=1), move("b", 4, 30.0, replica=2, node=2)]
    policy = Scripted(orders, [Drain(name="b", replica_id="b#2")])
    actions = (*deploy_all("a"), Deploy(at_s=0.0, name="b", model="b", replicas=2))
    result = run(list(ASKED), policy, actions=actions, num_gpus=6, per_node=2)
    assert told(result, ChangeKind.MOVED, ChangeKind.DRAINING) == [(20.0, "draining")]
    assert held_s(result)[3:5] == [10.0, 10.0]
    assert result.outcomes.completed.all()


def test_two_replicas_of_a_deployment_move_together_or_are_removed_together() -> None:
    orders = [move("b", 3, 5.0, replica=2, node=1), move("b", 4, 30.0, replica=3, node=2)]
    actions = (*deploy_all("a"), Deploy(at_s=0.0, name="b", model="b", replicas=2))
    moved = run(list(ASKED), Scripted(orders), actions=actions, num_gpus=6, per_node=2)
    assert told(moved, ChangeKind.MOVED) == [(40.0, "moved"), (40.0, "moved")]
    removed = (*actions, Remove(at_s=25.0, name="b"))
    result = run(list(ASKED), Scripted(orders), actions=removed, num_gpus=6, per_node=2)
    assert told(result, ChangeKind.MOVED) == []
    assert held_s(result)[1:5] == [25.0, 25.0, 15.0, 15.0]


def test_a_replica_that_is_lost_in_the_middle_is_replaced_by_its_move() -> None:
    """Both replicas are lost at 25 s with their node: both moves go on, and at 40 s take their places."""
    result = run_both(NodeFails(at_s=25.0, node_id="node0"))
    assert told(result, ChangeKind.MOVED) == [(40.0, "moved"), (40.0, "moved")]
    assert result.outcomes.completed.tolist() == [False, False, True, True]


def test_a_lost_replica_keeps_its_replacement_when_the_plan_is_given_up() -> None:
    result = run_both(NodeFails(at_s=20.0, node_id="node0"), NodeFails(at_s=25.0, node_id="node2"))
    assert told(result, ChangeKind.MOVED) == [(40.0, "moved")]
    assert result.outcomes.completed.tolist() == [False, False, True, True]


@settings(max_examples=100, deadline=None)
@given(
    loads_s=st.tuples(st.floats(0, 30), st.floats(0, 30)),
    fails=st.lists(st.tuples(st.floats(5, 60), st.sampled_from([1, 2])), max_size=2),
)
def test_whatever_place_fails_both_have_moved_or_none(
    loads_s: tuple[float, float], fails: list[tuple[float, int]]
) -> None:
    orders = [move("a", 2, loads_s[0], replica=1, node=1), move("b", 4, loads_s[1], replica=2, node=2)]
    lost = [NodeFails(at_s=at_s, node_id=f"node{node}") for at_s, node in fails if at_s > 10]
    actions = (*deploy_all("a", "b"), *lost)
    result = run(list(ASKED), Scripted(orders), actions=actions, num_gpus=6, per_node=2)
    moved_s = 10 + max(loads_s)
    together = all(failed.at_s > moved_s for failed in lost)
    assert [at_s for at_s, _ in told(result, ChangeKind.MOVED)] == pytest.approx([moved_s] * (2 * together))
    assert all(gpu.peak_bytes <= gpu.total_bytes for gpu in result.gpus)
