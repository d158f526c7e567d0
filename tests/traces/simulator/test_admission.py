"""Late requests rejected by the gateway's own controller: on arrival, by the plan's times and what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.actions import Scale
from placement.types import ClusterSnapshot
from planner.intent import Slo
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.test_refusing_late import words
from tests.traces.simulator.test_steering import Scripted
from tests.traces.simulator.worlds import OnTheFirst, cluster, limits, second_per_step
from tests.two_point_service import two_point_service
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import (
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
from traces.summary import kept


class OnTheFirstAsPlanned(OnTheFirst):
    """A second a token, of which the plan may say something else."""

    def __init__(self, max_batch: int = 1, told: float = 1.0) -> None:
        super().__init__(second_per_step(max_batch))
        self.service = two_point_service(
            batch=max_batch, input_tokens=1, output_tokens=5, ttft_s=told, tpot_s=told
        )

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = super().__call__(model, snapshot)
        return replace(found, forecast_service=self.service) if isinstance(found, Deployed) else found


def run(
    asked: Sequence[tuple[float, int]],
    slo: Slo,
    *,
    forecasts: bool = True,
    replicas: int = 1,
    max_batch: int = 1,
    told: float = 1.0,
    startup_s: float = 0.0,
) -> SimulationResult:
    scenario = Scenario(
        cluster=cluster(replicas),
        actions=(Deploy(at_s=0.0, name="a", model="a", replicas=replicas),),
        service=Service.CONTINUOUS if max_batch > 1 else Service.FCFS,
        reject_late={"a": slo},
        rejects_by_forecast=forecasts,
        startup_s=startup_s,
    )
    deployer = OnTheFirstAsPlanned(max_batch, told)
    deployer.size_bytes = cluster().gpus[0].free_bytes  # a GPU of its own for each replica
    return simulate([Request(at_s, 1, n, "a") for at_s, n in asked], scenario, Policies(deployer=deployer))


def test_it_is_rejected_on_arrival_not_at_its_turn() -> None:
    """The second of two requests of 10 s and one of 4 is rejected, as by exact times, but at once.

    A request that is rejected on arrival is never counted in another's place of the queue.
    """
    result = run([(0.0, 10), (0.0, 10), (0.0, 4)], Slo(e2e_s=15.0))
    assert words(result) == ["none", "too late", "none"]
    assert result.outcomes.last_token_s[[0, 2]].tolist() == [10.0, 14.0]


def test_one_that_finds_an_idle_replica_is_served_though_it_cannot_keep_its_limit() -> None:
    """Rejection by exact times, as AlpaServe's, would go on for ever."""
    asked = [(0.0, 10), (50.0, 10)]
    assert words(run(asked, Slo(e2e_s=5.0))) == ["none", "none"]
    assert words(run(asked, Slo(e2e_s=5.0), forecasts=False)) == ["too late", "too late"]


def test_a_workers_start_makes_none_late() -> None:
    asked = [(0.0, 5)]
    assert words(run(asked, Slo(e2e_s=6.0), startup_s=3.0)) == ["none"]
    assert words(run(asked, Slo(e2e_s=6.0), startup_s=3.0, forecasts=False)) == ["too late"]


def test_a_replica_that_would_keep_it_is_taken() -> None:
    assert words(run([(0.0, 5), (0.0, 5), (0.0, 5)], Slo(e2e_s=6.0), replicas=2)) == ["none", "none", "too late"]


@pytest.mark.parametrize("told", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_whatever_the_plan_says_more_keep_their_slo_than_without(told: float, max_batch: int) -> None:
    """Twice what is served, for long."""
    asked = [(5.0 / 2 / max_batch * i, 3 + i % 5) for i in range(300)]
    slo = Slo(e2e_s=20.0)
    refusing = run(asked, slo, max_batch=max_batch, told=told).outcomes
    everybody = run(asked, Slo(e2e_s=1e9), max_batch=max_batch).outcomes
    met = kept(refusing, slo)
    assert met.sum() > 3 * kept(everybody, slo).sum()
    assert met.sum() > 0.8 * refusing.completed.sum()


def test_where_a_batch_slows_its_requests_it_keeps_more_than_exact_times_of_one_alone() -> None:
    """Four at once take 2.5 times as long as one.

    AlpaServe's rule, of requests alone, admits a request that is late in a batch.
    """
    steps = linear_steps(limits(4), step_s=0.5, sequence_s=0.5)
    deployer = OnTheFirstAsPlanned(4)
    deployer.steps = steps
    deployer.service = two_point_service(
        batch=4, input_tokens=1, output_tokens=5, ttft_s=1.0, tpot_s=1.0, full_tpot_s=2.5
    )
    slo = Slo(e2e_s=20.0)
    asked = [Request(1.5 * i, 1, 3 + i % 5, "a") for i in range(300)]

    def met(*, forecasts: bool) -> tuple[int, int]:
        scenario = Scenario(
            cluster=cluster(),
            actions=(Deploy(at_s=0.0, name="a", model="a"),),
            reject_late={"a": slo},
            rejects_by_forecast=forecasts,
        )
        outcomes = simulate(asked, scenario, Policies(deployer=deployer)).outcomes
        return int(kept(outcomes, slo).sum()), int(outcomes.completed.sum())

    by_forecast, served = met(forecasts=True)
    assert by_forecast > 1.2 * met(forecasts=False)[0]
    assert by_forecast > 0.9 * served


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 8)), min_size=1, max_size=25).map(sorted),
    st.floats(1, 20),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_each_is_served_or_rejected_and_the_first_is_always_served(
    asked: list[tuple[float, int]], e2e_s: float, max_batch: int, replicas: int
) -> None:
    result = run(asked, Slo(e2e_s=e2e_s), max_batch=max_batch, replicas=replicas)
    assert {Failure(failure) for failure in result.outcomes.failure} <= {Failure.NONE, Failure.TOO_LATE}
    assert result.outcomes.completed[0]


def test_without_planned_times_it_is_judged_by_exact_times() -> None:
    scenario = Scenario(
        cluster=cluster(),
        actions=(Deploy(at_s=0.0, name="a", model="a"),),
        service=Service.FCFS,
        reject_late={"a": Slo(e2e_s=5.0)},
        rejects_by_forecast=True,
    )
    result = simulate([Request(0.0, 1, 10, "a")], scenario, Policies(deployer=OnTheFirst(second_per_step())))
    assert words(result) == ["too late"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_start_makes_none_late_that_waits_for_a_place(replicas: int) -> None:
    """Requests of 5 s that arrive during a start of 30 s: for each replica two keep 11 s from then on."""
    asked = [(float(at_s), 5) for at_s in range(2 * replicas + 1)]
    found = words(run(asked, Slo(e2e_s=11.0), startup_s=30.0, replicas=replicas))
    assert found == ["none"] * 2 * replicas + ["too late"]


def test_nor_is_one_that_waits_for_a_deployment_that_is_scaled_to_zero() -> None:
    """Three requests of 5 s arrive while its node is away, and are served from 100 s on: two keep 11 s."""
    node = cluster().gpus[0].node_id
    away = NodeFails(at_s=55.0, node_id=node), NodeReturns(at_s=70.0, node_id=node)
    scenario = Scenario(
        cluster=cluster(),
        actions=(Deploy(at_s=0.0, name="a", model="a"), *away),
        service=Service.FCFS,
        reject_late={"a": Slo(e2e_s=11.0)},
        rejects_by_forecast=True,
        startup_s=30.0,
    )
    policy = Scripted((), (), (), (), (Scale(name="a", replicas=0),))
    deployer = OnTheFirstAsPlanned()
    deployer.size_bytes = cluster().gpus[0].free_bytes
    asked = [Request(at_s, 1, 5, "a") for at_s in (0.0, 60.0, 61.0, 62.0)]
    result = simulate(asked, scenario, Policies(deployer=deployer, cluster_policy=policy))
    assert result.outcomes.first_token_s[1] == 70.0 + 30.0 + 1.0
    assert words(result) == ["none", "none", "none", "too late"]
