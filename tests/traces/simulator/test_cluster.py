"""Many deployments on one cluster: sharing, arriving, failing, profiling, and what policies see of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.harvesting import spare_gpu
from placement.routing import RoundRobin, Router
from placement.types import ClusterSnapshot
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.worlds import (
    AsTold,
    OnTheFirst,
    cluster,
    deploy_all,
    limits,
    placed_on,
    second_per_step,
    serve,
)
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.contention import processor_sharing
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import (
    Action,
    Deploy,
    Deployed,
    Deployer,
    NodeFails,
    NodeReturns,
    NotDeployed,
    Policies,
    Profile,
    Remove,
    Scenario,
    Service,
)
from traces.simulator.simulation import simulate

ONE = second_per_step(1)


def run(
    requests: list[Request],
    actions: tuple[Action, ...],
    deployer: Deployer,
    *,
    num_gpus: int = 1,
    per_node: int = 8,
    service: Service = Service.CONTINUOUS,
    startup_s: float = 0.0,
    overhead_s: float = 0.0,
    max_waiting: int | None = None,
    router: Router | None = None,
) -> SimulationResult:
    scenario = Scenario(
        cluster=cluster(num_gpus, per_node=per_node),
        actions=actions,
        service=service,
        startup_s=startup_s,
        overhead_s=overhead_s,
        max_waiting=max_waiting,
    )
    more = {} if router is None else {"router": router}
    return simulate(
        requests, scenario, Policies(deployer=deployer, harvest=spare_gpu, contention=processor_sharing, **more)
    )


def kinds(result: SimulationResult, name: str) -> list[str]:
    return [f"{change.at_s:g} {change.kind}" for change in result.changes if change.name == name]


@pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])
def test_two_models_on_one_gpu_each_go_at_half_speed_while_both_run(service: Service) -> None:
    """Ten steps from 0 s, four from 2 s: until 10 s both have half, so the second ends at 10 s; then the first has
    4 s left for itself."""
    asked = [Request(0.0, 1, 10, "a"), Request(2.0, 1, 4, "b")]
    result = run(asked, deploy_all("a", "b"), OnTheFirst(ONE), service=service)
    assert result.outcomes.last_token_s.tolist() == pytest.approx([14.0, 10.0])
    assert result.outcomes.first_token_s.tolist() == pytest.approx([1.0, 4.0])
    assert result.gpus[0].busy_fraction == pytest.approx(1.0)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(st.floats(0, 6), st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=30),
    service=st.sampled_from([Service.FCFS, Service.CONTINUOUS]),
)
def test_sharing_loses_no_work(asked: list[tuple[float, int, str]], service: Service) -> None:
    """Three models with one slot each on one GPU: however they share it, its busy time is the work asked for."""
    now_s, requests = 0.0, []
    for gap_s, output_tokens, name in asked:
        now_s += gap_s
        requests.append(Request(now_s, 1, output_tokens, name))
    result = run(requests, deploy_all("a", "b", "c"), OnTheFirst(ONE), service=service)
    assert result.outcomes.completed.all()
    work_s = sum(request.output_tokens for request in requests)
    assert result.gpus[0].busy_fraction * result.end_s == pytest.approx(work_s)


def test_an_arrival_cuts_a_run_at_the_right_step_on_a_shared_gpu() -> None:
    """At half speed a step of a takes 2 s. The request at 5 s joins at 6 s; from there on both go together."""
    steps = linear_steps(limits(2), step_s=1.0)
    asked = [Request(0.0, 1, 100, "b"), Request(0.0, 1, 10, "a"), Request(5.0, 1, 3, "a")]
    result = run(asked, deploy_all("a", "b"), OnTheFirst(steps))
    assert result.outcomes.first_token_s.tolist() == pytest.approx([2.0, 2.0, 8.0])
    assert result.outcomes.last_token_s.tolist()[1:] == pytest.approx([20.0, 12.0])


def test_who_is_alone_again_goes_at_full_speed() -> None:
    """a ends at half speed with b; b is taken down while a is idle; a's next request has the GPU to itself."""
    actions = (*deploy_all("a", "b"), Remove(at_s=20.0, name="b"))
    asked = [Request(0.0, 1, 100, "b"), Request(0.0, 1, 5, "a"), Request(30.0, 1, 5, "a")]
    result = run(asked, actions, OnTheFirst(ONE))
    assert result.outcomes.last_token_s.tolist()[1:] == pytest.approx([10.0, 35.0])


@pytest.mark.parametrize("service", [Service.CONTINUOUS, Service.STEPPED])
def test_who_arrives_as_a_step_ends_is_in_the_next(service: Service) -> None:
    steps = linear_steps(limits(2), step_s=1.0)
    outcomes = serve([Request(0.0, 1, 5), Request(1.0, 1, 2)], steps, service=service).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 2.0]


def test_a_pipeline_keeps_each_gpu_busy_for_its_share() -> None:
    deployer = AsTold(ONE, {"a": placed_on("gpu0", "gpu1", pp=2)})
    result = run([Request(0.0, 1, 10, "a")], deploy_all("a"), deployer, num_gpus=2)
    assert [gpu.busy_fraction for gpu in result.gpus] == pytest.approx([0.5, 0.5])


def test_a_tensor_parallel_group_keeps_all_its_gpus_busy() -> None:
    deployer = AsTold(ONE, {"a": placed_on("gpu0", "gpu1")})
    result = run([Request(0.0, 1, 10, "a")], deploy_all("a"), deployer, num_gpus=2)
    assert [gpu.busy_fraction for gpu in result.gpus] == pytest.approx([1.0, 1.0])


def test_a_tensor_parallel_group_is_as_slow_as_the_gpu_that_it_shares() -> None:
    """b runs on the second of a's two GPUs: both go at half speed, and the first GPU is a's alone."""
    deployer = AsTold(ONE, {"a": placed_on("gpu0", "gpu1"), "b": placed_on("gpu1")})
    result = run([Request(0.0, 1, 5, "a"), Request(0.0, 1, 5, "b")], deploy_all("a", "b"), deployer, num_gpus=2)
    assert result.outcomes.last_token_s.tolist() == [10.0, 10.0]


def test_the_planner_sees_memory_and_load_as_they_are_then() -> None:
    """The first model runs from 0 to 60 s and waits: a planner at 100 s sees it busy for 60 of 100 s."""
    deployer = OnTheFirst(ONE)
    actions = (*deploy_all("a"), Deploy(at_s=100.0, name="b", model="b"))
    run([Request(0.0, 1, 60, "a"), Request(130.0, 1, 1, "b")], actions, deployer, num_gpus=2)
    assert [gpu.load_fraction for gpu in deployer.seen[1].gpus] == pytest.approx([0.6, 0.0])
    assert [gpu.free_bytes for gpu in deployer.seen[1].gpus] == [90, 100]


def test_requests_before_a_deployment_are_not_served_and_during_its_start_they_wait() -> None:
    asked = [Request(4.0, 1, 1, "a"), Request(5.0, 1, 1, "a")]
    result = run(asked, deploy_all("a", at_s=5.0), OnTheFirst(ONE), startup_s=30.0)
    assert result.outcomes.failure.tolist() == [Failure.NOT_SERVED, Failure.NONE]
    assert result.outcomes.last_token_s[1] == pytest.approx(36.0)


def test_what_a_request_takes_beside_its_steps_puts_off_its_tokens_and_holds_no_gpu() -> None:
    asked = [Request(0.0, 1, 3, "a"), Request(1.0, 1, 1, "a")]
    plain, later = (run(asked, deploy_all("a"), OnTheFirst(ONE), overhead_s=s) for s in (0.0, 0.25))
    assert later.outcomes.first_token_s.tolist() == pytest.approx([1.25, 4.25])
    assert later.outcomes.last_token_s.tolist() == pytest.approx([3.25, 4.25])
    assert later.gpus == plain.gpus


def test_what_finds_no_room_is_asked_for_again_when_memory_is_free() -> None:
    actions = (*deploy_all("a", "b"), Remove(at_s=10.0, name="a"))
    asked = [Request(1.0, 1, 1, "b"), Request(9.0, 1, 30, "a"), Request(11.0, 1, 1, "b")]
    result = run(asked, actions, OnTheFirst(ONE, size_bytes=80))
    assert result.outcomes.failure.tolist() == [Failure.NOT_SERVED, Failure.NOT_SERVED, Failure.NONE]
    assert kinds(result, "a") == ["0 deployed", "10 removed"]
    assert kinds(result, "b") == ["0 refused", "10 deployed"]


def test_a_node_that_fails_loses_what_runs_and_hands_on_what_waits() -> None:
    """At 5 s the first node goes: its running request is lost, the waiting one starts on the second at once."""
    asked = [Request(0.0, 1, 20, "a"), Request(1.0, 1, 3, "a"), Request(20.0, 1, 1, "a")]
    actions = (*deploy_all("a"), NodeFails(at_s=5.0, node_id="node0"))
    result = run(asked, actions, OnTheFirst(ONE), num_gpus=2, per_node=1)
    assert result.outcomes.failure.tolist() == [Failure.CONNECTION_LOST, Failure.NONE, Failure.NONE]
    assert result.outcomes.last_token_s.tolist()[1:] == pytest.approx([8.0, 21.0])
    assert kinds(result, "a") == ["0 deployed", "5 lost", "5 deployed"]
    assert result.gpus[0].busy_fraction * result.end_s == pytest.approx(5.0)


def test_without_another_node_nothing_is_served_until_it_is_back() -> None:
    asked = [Request(float(t), 1, 2, "a") for t in (0, 4, 5, 6, 8)]
    actions = (*deploy_all("a"), NodeFails(at_s=5.0, node_id="node0"), NodeReturns(at_s=7.0, node_id="node0"))
    result = run(asked, actions, OnTheFirst(ONE))
    none, lost, away = Failure.NONE, Failure.CONNECTION_LOST, Failure.NOT_SERVED
    assert result.outcomes.failure.tolist() == [none, lost, away, away, none]
    assert kinds(result, "a") == ["0 deployed", "5 lost", "5 refused", "7 deployed"]


def test_replicas_share_the_requests_as_the_router_says() -> None:
    asked = [Request(float(t), 1, 10, "a") for t in range(4)]
    actions = (Deploy(at_s=0.0, name="a", model="a", replicas=2),)
    one_gpu_each = OnTheFirst(ONE, size_bytes=60)
    assert run(asked, actions, one_gpu_each, num_gpus=2).outcomes.last_token_s.tolist() == [10.0, 11.0, 20.0, 21.0]
    turns = run(asked, actions, one_gpu_each, num_gpus=2, router=RoundRobin())
    assert turns.outcomes.last_token_s.tolist() == [10.0, 11.0, 20.0, 21.0]
    assert [figures.replicas for figures in turns.deployments] == [2]


def test_a_full_queue_refuses_as_the_gateway_does() -> None:
    """The worker has twice its one slot, two wait in the gateway, a fifth is refused until the first is done."""
    asked = [Request(t, 1, 10, "a") for t in (0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 11.0)]
    result = run(asked, deploy_all("a"), OnTheFirst(ONE), max_waiting=2)
    assert [Failure(failure).words for failure in result.outcomes.failure] == [
        *["none"] * 4,
        "rate limited",
        "rate limited",
        "none",
    ]
    assert result.outcomes.last_token_s.tolist()[:4] == [10.0, 20.0, 30.0, 40.0]
    assert result.outcomes.last_token_s[6] == 50.0


def test_what_waits_in_the_gateway_goes_to_the_first_replica_with_room_in_order() -> None:
    """Six at once: two at each replica. The fifth goes to a replica at 5 s, when a short answer ends there, the
    sixth at 8 s."""
    lengths = (5, 8, 3, 4, 2, 1)
    asked = [Request(0.0, 1, n, "a") for n in lengths]
    actions = (Deploy(at_s=0.0, name="a", model="a", replicas=2),)
    result = run(asked, actions, OnTheFirst(ONE, size_bytes=60), num_gpus=2)
    # One replica: 5, then 3 until 8, then 2 until 10. The other: 8, then 4 until 12, then 1 until 13.
    assert result.outcomes.last_token_s.tolist() == [5.0, 8.0, 8.0, 12.0, 10.0, 13.0]


def test_what_waited_at_a_dead_worker_keeps_its_place() -> None:
    """At 5 s the first request is lost; those that waited, at the worker and in the gateway, keep their order."""
    asked = [Request(0.1 * i, 1, 20 if i == 0 else 2, "a") for i in range(5)]
    actions = (*deploy_all("a"), NodeFails(at_s=5.0, node_id="node0"))
    result = run(asked, actions, OnTheFirst(ONE), num_gpus=2, per_node=1)
    assert result.outcomes.failure.tolist() == [Failure.CONNECTION_LOST] + [Failure.NONE] * 4
    assert result.outcomes.last_token_s.tolist()[1:] == pytest.approx([7.0, 9.0, 11.0, 13.0])


def test_a_profile_takes_spare_memory_and_time_of_the_quietest_gpu() -> None:
    """a runs on gpu0, so the profile goes to gpu1 and ends after its own 20 s; on one GPU they share it."""
    actions = (*deploy_all("a"), Profile(at_s=10.0, name="new", memory_bytes=50, work_s=20.0))
    alone = run([Request(0.0, 1, 60, "a")], actions, OnTheFirst(ONE), num_gpus=2)
    assert kinds(alone, "new") == ["10 profiling", "30 profiled"]
    assert alone.outcomes.last_token_s.tolist() == [60.0]
    shared = run([Request(0.0, 1, 60, "a")], actions, OnTheFirst(ONE))
    assert kinds(shared, "new") == ["10 profiling", "50 profiled"]
    assert shared.outcomes.last_token_s.tolist() == pytest.approx([80.0])
    assert shared.gpus[0].peak_bytes == 60


def test_a_profile_without_spare_memory_waits_for_some() -> None:
    actions = (
        *deploy_all("a"),
        Profile(at_s=1.0, name="new", memory_bytes=50, work_s=2.0),
        Remove(at_s=10.0, name="a"),
    )
    result = run([Request(0.0, 1, 1, "a")], actions, OnTheFirst(ONE, size_bytes=60))
    assert kinds(result, "new") == ["1 refused", "10 profiling", "12 profiled"]


def test_a_profile_ends_with_its_node() -> None:
    actions = (Profile(at_s=0.0, name="new", memory_bytes=5, work_s=9.0), NodeFails(at_s=3.0, node_id="node0"))
    result = run([Request(0.0, 1, 1, "a")], (*deploy_all("a"), *actions), OnTheFirst(ONE))
    assert kinds(result, "new") == ["0 profiling", "3 lost"]


def test_the_same_input_gives_the_same_output() -> None:
    rng = np.random.default_rng(3)
    times_s = np.cumsum(rng.exponential(0.5, 400))
    asked = [Request(float(t), 3, int(rng.integers(1, 9)), "abc"[int(rng.integers(3))]) for t in times_s]
    actions = (*deploy_all("a", "b", "c"), NodeFails(at_s=50.0, node_id="node0"))
    one, other = (run(asked, actions, OnTheFirst(ONE), num_gpus=3, per_node=1) for _ in range(2))
    assert one.changes == other.changes
    np.testing.assert_array_equal(one.outcomes.last_token_s, other.outcomes.last_token_s)


def test_snapshots_are_of_the_living_nodes_only() -> None:
    deployer = OnTheFirst(ONE)
    actions = (NodeFails(at_s=1.0, node_id="node0"), Deploy(at_s=2.0, name="a", model="a"))
    run([Request(3.0, 1, 1, "a")], actions, deployer, num_gpus=2, per_node=1)
    (snapshot,) = deployer.seen
    assert isinstance(snapshot, ClusterSnapshot)
    assert [gpu.node_id for gpu in snapshot.gpus] == ["node1"]


def test_a_request_that_is_too_long_for_its_replica_is_refused_there() -> None:
    """The second replica found less room than the first, and every other request goes to it."""

    class Shrinking(OnTheFirst):
        def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
            self.steps = linear_steps(limits(1, 50 if self.seen else 100), step_s=1.0)
            return super().__call__(model, snapshot)

    requests = [Request(10.0 * i, 60, 2) for i in range(4)]
    actions = (Deploy(at_s=0.0, name="", model="", replicas=2),)
    result = run(requests, actions, Shrinking(ONE, 60), num_gpus=2, router=RoundRobin())
    refused = [Failure.NONE, Failure.BAD_REQUEST]
    assert sorted(result.outcomes.failure.tolist()) == sorted(refused * 2)
    (figures,) = result.deployments
    assert figures.limits is not None
    assert figures.limits.max_context_tokens == 50
