"""Requests that could not keep their SLO any more are rejected at their turn, as by AlpaServe's runtime."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.routing import LeastOutstanding
from planner.intent import Slo
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, second_per_step
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.summary import kept

BOTH = pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])


def run(
    asked: Sequence[tuple[float, int]], slo: Slo | None, service: Service = Service.FCFS, **more: float
) -> SimulationResult:
    """(arrival, output tokens) of one deployment on a GPU of its own, a second a token."""
    scenario = Scenario(
        cluster=cluster(),
        actions=deploy_all("a"),
        service=service,
        reject_late={} if slo is None else {"a": slo},
        **more,  # type: ignore[arg-type]
    )
    policies = Policies(deployer=OnTheFirst(second_per_step()), router=LeastOutstanding())
    return simulate([Request(at_s, 1, tokens, "a") for at_s, tokens in asked], scenario, policies)


def words(result: SimulationResult) -> list[str]:
    return [Failure(failure).words for failure in result.outcomes.failure]


@BOTH
def test_who_would_end_too_late_makes_room_for_who_would_not(service: Service) -> None:
    """Two of 10 s at once, and one of 4: within 15 s the first and the third can end."""
    asked = [(0.0, 10), (0.0, 10), (0.0, 4)]
    result = run(asked, Slo(e2e_s=15.0), service)
    assert words(result) == ["none", "too late", "none"]
    assert result.outcomes.last_token_s[[0, 2]].tolist() == [10.0, 14.0]
    assert words(run(asked, None, service)) == ["none"] * 3


@BOTH
@pytest.mark.parametrize(
    ("slo", "refused"),
    [
        pytest.param(Slo(ttft_s=10.5), True, id="first token at 11 s"),
        pytest.param(Slo(ttft_s=11.0), False, id="just in time"),
        pytest.param(Slo(e2e_s=12.0), False, id="all of it at 12 s"),
        pytest.param(Slo(tpot_s=1.0), False, id="a second a token"),
    ],
)
def test_every_limit_counts(slo: Slo, refused: bool, service: Service) -> None:
    assert words(run([(0.0, 10), (0.0, 2)], slo, service)) == ["none", "too late" if refused else "none"]


def test_steps_that_are_too_slow_for_a_limit_refuse_everybody() -> None:
    assert words(run([(0.0, 3), (9.0, 1)], Slo(tpot_s=0.5))) == ["too late", "none"], "one token has no TPOT"


def test_the_workers_start_and_what_a_request_takes_beside_its_steps_count() -> None:
    assert words(run([(0.0, 5)], Slo(e2e_s=7.0), startup_s=2.0)) == ["none"]
    assert words(run([(0.0, 5)], Slo(e2e_s=7.0), startup_s=2.0, overhead_s=0.5)) == ["too late"]


def test_another_deployments_requests_are_not_judged() -> None:
    scenario = Scenario(cluster=cluster(), actions=deploy_all("a", "b"), reject_late={"a": Slo(e2e_s=1.0)})
    asked = [Request(0.0, 1, 5, name) for name in "ab"]
    result = simulate(asked, scenario, Policies(deployer=OnTheFirst(second_per_step())))
    assert words(result) == ["too late", "none"]


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 8)), min_size=1, max_size=25).map(sorted),
    st.floats(1, 20),
)
def test_alone_on_its_gpu_nobody_is_served_for_nothing_and_more_keep_their_slo(
    asked: list[tuple[float, int]], e2e_s: float
) -> None:
    slo = Slo(e2e_s=e2e_s)
    refusing, serving = run(asked, slo).outcomes, run(asked, None).outcomes
    late = refusing.e2e_s[refusing.completed] - e2e_s
    assert (late < 1e-6).all()
    assert {Failure(failure) for failure in refusing.failure} <= {Failure.NONE, Failure.TOO_LATE}
    assert refusing.completed.sum() >= kept(serving, slo).sum()
