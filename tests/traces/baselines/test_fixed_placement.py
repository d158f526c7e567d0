"""A placement that was decided beforehand, through failures too."""

from __future__ import annotations

import pytest

from placement.types import Placement, StagePlacement
from tests.golden_words import Golden
from tests.traces.baselines.small_models import cluster
from tests.traces.simulator.linear_steps import linear_steps
from traces.baselines.fixed_placement import Fixed
from traces.request import Request
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import Action, Deploy, Deployed, NodeFails, NodeReturns, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits

STEPS = linear_steps(Limits(max_batch=2, max_context_tokens=64, max_batched_tokens=64), step_s=1.0)


def on(device: int, size_bytes: int = 40, per_node: int = 8) -> Deployed:
    stage = StagePlacement(
        node_id=f"node{device // per_node}",
        device_ids=(f"gpu{device}",),
        first_layer=0,
        num_layers=4,
        bytes_per_gpu=size_bytes,
    )
    return Deployed(placement=Placement((stage,)), steps=STEPS, what="as planned")


def run(planned: dict[str, list[Deployed]], *events: Action, per_node: int = 8) -> SimulationResult:
    deploys = [Deploy(at_s=0.0, name=n, model=n, replicas=max(1, len(r))) for n, r in planned.items()]
    scenario = Scenario(cluster=cluster(2, per_node=per_node), actions=(*deploys, *events))
    requests = [Request(float(t), 1, 2, name) for t in range(0, 60, 10) for name in planned]
    return simulate(requests, scenario, Policies(deployer=Fixed("planned", planned)))


def placed(result: SimulationResult) -> list[tuple[float, str, tuple[str, ...]]]:
    return [(c.at_s, c.name, c.device_ids) for c in result.changes if c.kind is ChangeKind.DEPLOYED]


def test_every_replica_goes_to_its_gpu() -> None:
    result = run({"a": [on(1), on(0)], "b": [on(1)]})
    assert placed(result) == [(0.0, "a", ("gpu1",)), (0.0, "a", ("gpu0",)), (0.0, "b", ("gpu1",))]


def test_what_was_dropped_is_not_served_and_says_why(golden: Golden) -> None:
    result = run({"a": [on(0)], "b": []})
    (refused,) = [c for c in result.changes if c.kind is ChangeKind.REFUSED]
    assert refused.name == "b"
    golden("traces", refused.text)
    assert int(result.outcomes.completed.sum()) == 6


@pytest.mark.parametrize("per_node", [1, 8])
def test_a_lost_replica_comes_back_to_its_gpu_when_the_node_does(per_node: int) -> None:
    """The replica returns also where the whole cluster was away, so that no deployer was asked in between."""
    planned = {"a": [on(0, per_node=per_node)], "b": [on(1, per_node=per_node)]}
    failing = (NodeFails(at_s=15.0, node_id="node0"), NodeReturns(at_s=25.0, node_id="node0"))
    back = [
        (at_s, name, devices) for at_s, name, devices in placed(run(planned, *failing, per_node=per_node)) if at_s
    ]
    expected = [(25.0, "a", ("gpu0",)), (25.0, "b", ("gpu1",))]
    assert back == (expected if per_node == 8 else expected[:1])


def test_what_finds_its_gpu_taken_is_refused(golden: Golden) -> None:
    result = run({"a": [on(0, 80)], "b": [on(0, 40)]})
    golden("traces", [c.text for c in result.changes if c.kind is ChangeKind.REFUSED])
