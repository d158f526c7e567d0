"""Effects of a cluster policy's actions on replicas, requests and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, PolicyError
from placement.actions import ClusterAction, Drain, Move, Scale
from placement.types import ClusterSnapshot
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, limits, placed_on, second_per_step
from traces.request import Request
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import (
    Action,
    Deploy,
    Deployed,
    NodeFails,
    NodeReturns,
    NotDeployed,
    Policies,
    Scenario,
    Service,
)
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel

ONE = second_per_step(1)


class Scripted:
    """Gives its orders look by look; "wakes" what sleeps and has requests."""

    name = "scripted"

    def __init__(self, *script: Sequence[ClusterAction], every_s: float = 10.0, wakes: bool = True) -> None:
        self.every_s, self.wakes = every_s, wakes
        self._script = list(script)
        self.seen: list[ClusterSnapshot] = []

    def __call__(self, snapshot: ClusterSnapshot) -> Sequence[ClusterAction]:
        self.seen.append(snapshot)
        waking = [Scale(name=d.name, replicas=1) for d in snapshot.deployments if not d.wanted and d.waiting]
        if waking:
            return waking if self.wakes else ()
        return self._script.pop(0) if self._script else ()


def run(
    requests: list[Request],
    cluster_policy: Scripted,
    *,
    actions: tuple[Action, ...] | None = None,
    steps: StepModel = ONE,
    size_bytes: int = 60,
    num_gpus: int = 2,
    per_node: int = 8,
    service: Service = Service.CONTINUOUS,
    startup_s: float = 0.0,
) -> SimulationResult:
    """Replicas of 60 bytes on GPUs of 100: one on each."""
    scenario = Scenario(
        cluster=cluster(num_gpus, per_node=per_node),
        actions=deploy_all("a") if actions is None else actions,
        service=service,
        startup_s=startup_s,
    )
    return simulate(
        requests, scenario, Policies(deployer=OnTheFirst(steps, size_bytes), cluster_policy=cluster_policy)
    )


def told(result: SimulationResult, *kinds: ChangeKind) -> list[tuple[float, str]]:
    return [(change.at_s, str(change.kind)) for change in result.changes if change.kind in kinds]


@pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])
def test_a_second_replica_takes_what_waits_once_it_has_started(service: Service) -> None:
    """Four requests of 20 s at 0 s: two in the replica, two behind it. The second replica is asked for at 10 s and
    serves from 15 s on: 20, 40 s there; 35, 55 s here."""
    asked = [Request(0.0, 1, 20, "a") for _ in range(4)]
    result = run(
        asked,
        Scripted([Scale(name="a", replicas=2)]),
        startup_s=5.0,
        service=service,
        actions=(Deploy(at_s=0.0, name="a", model="a"),),
    )
    assert sorted(result.outcomes.last_token_s.tolist()) == [25.0, 35.0, 45.0, 55.0]


@pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])
def test_a_replica_that_drains_ends_what_runs_and_gives_back_what_waits(service: Service) -> None:
    """Two replicas, each with a request of 30 s and one of 5 s behind it. At 10 s the younger drains: its waiting
    request ends with the elder's, after 30 s; its GPU is free from 30 s on."""
    asked = [Request(0.0, 1, n, "a") for n in (30, 30, 5, 5)]
    actions = (Deploy(at_s=0.0, name="a", model="a", replicas=2),)
    result = run(asked, Scripted([Scale(name="a", replicas=1)]), actions=actions, service=service)
    assert result.outcomes.last_token_s.tolist() == [30.0, 30.0, 35.0, 40.0]
    assert told(result, ChangeKind.DRAINING, ChangeKind.ENDED) == [(10.0, "draining"), (30.0, "ended")]
    assert [gpu.held_fraction for gpu in result.gpus] == pytest.approx([1.0, 0.75])


def test_scaled_to_nothing_requests_wait_and_wake_it() -> None:
    """The deployment has no replica from 10 s on; a request at 42 s is served after the start's 5 s, one at 43 s
    waits.
    """
    asked = [Request(0.0, 1, 4, "a"), Request(42.0, 1, 3, "a"), Request(43.0, 1, 2, "a")]
    cluster_policy = Scripted([Scale(name="a", replicas=0)])
    result = run(asked, cluster_policy, startup_s=5.0)
    assert result.outcomes.first_token_s.tolist() == [6.0, 48.0, 51.0]
    assert result.outcomes.last_token_s.tolist() == [9.0, 50.0, 52.0]
    asleep = cluster_policy.seen[1].deployments[0]
    assert (asleep.wanted, asleep.replicas, asleep.busy_fraction) == (0, (), 0.0)
    assert result.gpus[0].held_fraction == pytest.approx((10 + (52 - 42)) / 52)


def test_who_is_never_woken_does_not_keep_the_simulation_going() -> None:
    asked = [Request(0.0, 1, 4, "a"), Request(42.0, 1, 3, "a")]
    result = run(asked, Scripted([Scale(name="a", replicas=0)], wakes=False))
    assert result.outcomes.completed.tolist() == [True, False]


def test_a_replica_moves_while_it_serves() -> None:
    """Until the running request has ended, both places hold memory; the waiting one is given to the new replica.

    The move is ordered at 10 s, loaded at 40 s; the request that arrived at 35 s waits in the old replica.
    """
    move = Move(name="a", replica_id="a#1", placement=placed_on("gpu1", size_bytes=60), load_s=30.0)
    asked = [Request(0.0, 1, 45, "a"), Request(35.0, 1, 5, "a")]
    result = run(asked, Scripted([move]))
    assert result.outcomes.last_token_s.tolist() == [45.0, 45.0]
    assert [gpu.held_fraction * result.end_s for gpu in result.gpus] == pytest.approx([45.0, 35.0])
    assert [gpu.busy_fraction * result.end_s for gpu in result.gpus] == pytest.approx([45.0, 5.0])


def test_a_move_takes_at_least_the_start_of_an_engine_and_memory_twice_meanwhile() -> None:
    """The move is ordered at 10 s and would load in 1 s; a start takes 5 s, so the replica takes over at 15 s."""
    move = Move(name="a", replica_id="a#1", placement=placed_on("gpu1", size_bytes=60), load_s=1.0)
    result = run([Request(0.0, 1, 8, "a"), Request(16.0, 1, 4, "a")], Scripted([move]), startup_s=5.0)
    assert told(result, ChangeKind.MOVED) == [(15.0, "moved")]
    held = {each.device_id: each for each in result.held}
    assert (held["gpu0"].placed_s, held["gpu1"].placed_s) == (pytest.approx(15.0), pytest.approx(10.0))


@pytest.mark.parametrize(("given_s", "first_s"), [(None, 61.0), (0.0, 1.0), (7.0, 8.0)])
def test_without_a_start_up_of_its_own_a_scenario_takes_that_of_the_engine(
    given_s: float | None, first_s: float
) -> None:
    class Slow(OnTheFirst):
        def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
            found = super().__call__(model, snapshot)
            return replace(found, startup_s=60.0) if isinstance(found, Deployed) else found

    scenario = Scenario(cluster=cluster(1), actions=deploy_all("a"), startup_s=given_s)
    result = simulate([Request(0.0, 1, 3, "a")], scenario, Policies(deployer=Slow(ONE)))
    assert result.outcomes.first_token_s.tolist() == [first_s]


@pytest.mark.parametrize("slots", [1, 2])
def test_an_evicted_request_goes_on_elsewhere_from_its_last_token(slots: int) -> None:
    """A token a second, prompts of any length a step. 20 tokens from 0 s, evicted at 10.5 s after ten of them: the
    half step is lost, one step for the prompt with its ten gives the eleventh. The first token stays as it was."""
    steps = linear_steps(limits(slots), step_s=1.0)
    asked = [Request(0.0, 1, 2, "a"), Request(0.0, 3, 20, "a")]
    actions = (Deploy(at_s=0.0, name="a", model="a", replicas=2),)
    cluster_policy = Scripted([Drain(name="a", replica_id="a#2", evict=True)], every_s=10.5)
    result = run(asked, cluster_policy, actions=actions, steps=steps)
    assert result.outcomes.first_token_s.tolist() == [1.0, 1.0]
    assert result.outcomes.last_token_s.tolist() == [2.0, 20.5]
    assert result.gpus[1].held_fraction * result.end_s == pytest.approx(10.5)


def test_the_policy_sees_rate_and_service_of_the_last_two_minutes() -> None:
    """At 99 s 50 requests have arrived since the beginning; each takes one step for its prompt, three for more."""
    asked = [Request(2.0 * i, 5, 4, "a") for i in range(60)]
    cluster_policy = Scripted(every_s=99.0)
    run(asked, cluster_policy)
    seen = cluster_policy.seen[0].deployments[0]
    assert seen.requests_per_s == pytest.approx(50 / 99)
    assert seen.service_s == pytest.approx(4.0)
    assert seen.busy_fraction == pytest.approx(50 / 99 * 4)


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        (Scale(name="b", replicas=1), "nothing is deployed under that name"),
        (Scale(name="a", replicas=-1), "no negative number"),
        (Drain(name="a", replica_id="a#1"), "it is the last replica"),
        (Drain(name="a", replica_id="a#9"), "no such replica"),
        (Move(name="a", replica_id="a#1", placement=placed_on("gpu1"), load_s=-1), "takes a negative time"),
        (Move(name="a", replica_id="a#1", placement=placed_on("gpu0", size_bytes=60), load_s=1), "GiB free"),
        (Move(name="a", replica_id="a#1", placement=placed_on("gpu0", "gpu1"), load_s=1), "keeps its layers"),
    ],
)
def test_orders_that_cannot_be_are_the_policys_fault(order: ClusterAction, complaint: str) -> None:
    with pytest.raises(PolicyError, match=rf"scripted.*{complaint}"):
        run([Request(0.0, 1, 40, "a")], Scripted([order]))


def test_a_policy_must_look_at_intervals() -> None:
    with pytest.raises(ConfigError, match="above 0 s"):
        run([Request(0.0, 1, 1, "a")], Scripted(every_s=0.0))


class Restless:
    """Whatever the draws say, of what is there."""

    name = "restless"
    every_s = 3.0

    def __init__(self, draws: list[tuple[int, int, int]]) -> None:
        self._draws = list(draws)

    def __call__(self, snapshot: ClusterSnapshot) -> Sequence[ClusterAction]:
        waking = [Scale(name=d.name, replicas=1) for d in snapshot.deployments if not d.wanted and d.waiting]
        if waking or not self._draws or not snapshot.deployments:
            return waking
        kind, which, number = self._draws.pop()
        d = snapshot.deployments[which % len(snapshot.deployments)]
        if kind == 0:
            return [Scale(name=d.name, replicas=number)]
        if kind == 1 and len(d.replicas) > 1:
            evicted = d.replicas[number % len(d.replicas)]
            return [Drain(name=d.name, replica_id=evicted.replica_id, evict=bool(which % 2))]
        roomy = [gpu for gpu in snapshot.gpus if gpu.free_bytes >= 30]
        if kind == 2 and d.replicas and not d.moving and roomy:
            there = roomy[number % len(roomy)]
            placement = placed_on(there.device_id, node_id=there.node_id, size_bytes=30)
            return [
                Move(name=d.name, replica_id=d.replicas[0].replica_id, placement=placement, load_s=float(which))
            ]
        return ()


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(st.floats(0, 4), st.integers(1, 12), st.sampled_from("ab")), min_size=1, max_size=40),
    draws=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(0, 3)), max_size=25),
    service=st.sampled_from([Service.FCFS, Service.CONTINUOUS]),
    fails=st.booleans(),
)
def test_whatever_is_ordered_every_request_ends_once_and_no_memory_is_lost(
    asked: list[tuple[float, int, str]], draws: list[tuple[int, int, int]], service: Service, fails: bool
) -> None:
    """All requests are answered without a failing node, as a deployment has room to start; tokens are in order."""
    now_s, requests = 0.0, []
    for gap_s, output_tokens, name in asked:
        now_s += gap_s
        requests.append(Request(now_s, 2, output_tokens, name))
    actions = deploy_all("a", "b")
    if fails:
        actions = (*actions, NodeFails(at_s=7.0, node_id="node1"), NodeReturns(at_s=20.0, node_id="node1"))
    result = run(
        requests, Restless(draws), actions=actions, service=service, size_bytes=30, num_gpus=4, per_node=2,
        steps=linear_steps(limits(2), step_s=1.0), startup_s=1.0,
    )  # fmt: skip
    done = result.outcomes.completed
    assert (done | (result.outcomes.failure != 0)).all()
    assert all(gpu.peak_bytes <= gpu.total_bytes for gpu in result.gpus)
    if not fails:
        assert done.all()
    answered = result.outcomes
    assert (answered.first_token_s[done] > answered.arrival_s[done]).all()
    assert (
        answered.last_token_s[done] >= answered.first_token_s[done] + answered.output_tokens[done] - 1 - 1e-6
    ).all()


def test_who_waits_for_room_is_served_once_another_deployment_sleeps() -> None:
    """a sleeps from 10 s on, b has taken the one GPU at 15 s. a is called at 21 s and finds no room until b is put
    to sleep, at 60 s, long after the last arrival."""
    sleep = [Scale(name="a", replicas=0)]
    script = [sleep, [], [Scale(name="a", replicas=1)], [], [], [Scale(name="b", replicas=0)]]
    actions = (*deploy_all("a"), Deploy(at_s=15.0, name="b", model="b"))
    asked = [Request(0.0, 1, 2, "a"), Request(20.0, 1, 2, "b"), Request(21.0, 1, 2, "a")]
    result = run(asked, Scripted(*script), actions=actions, num_gpus=1)
    assert result.outcomes.last_token_s.tolist() == [2.0, 22.0, 62.0]
