"""Late requests for variants rejected by the gateway's controller, which knows their loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import PolicyError
from fingerprint.load_waits import OneLoad
from placement.actions import ClusterPolicy, Drain
from placement.types import ClusterSnapshot
from planner.admission import AdmissionController, AdmissionPolicy, LearnedRatio
from planner.intent import Slo
from tests.golden_words import Golden
from tests.traces.simulator.test_refusing_late import words
from tests.traces.simulator.test_steering import Scripted
from tests.traces.simulator.variant_worlds import BASE, WithSlots, variants_of
from tests.traces.simulator.worlds import cluster, second_per_step
from tests.two_point_service import two_point_service
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate

_LATE, _KEPT = "too late", "none"
BATCH = 4


class Planned(WithSlots):
    """A second a prompt and a token, with the load that the plan knows; None: it knows none."""

    def __init__(self, cost: AdapterCost, load: OneLoad | None, *, has_times: bool = True) -> None:
        super().__init__(second_per_step(BATCH), cost)
        service = two_point_service(batch=BATCH, input_tokens=1, output_tokens=5, ttft_s=1.0, tpot_s=1.0)
        self.service = replace(service, one_load=load) if has_times else None

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = super().__call__(model, snapshot)
        return replace(found, forecast_service=self.service) if isinstance(found, Deployed) else found


def run(
    asked: Sequence[tuple[float, int, str]],
    slo: Slo | None,
    *,
    load_s: float = 10.0,
    planned_s: float | None = None,
    stops_steps: bool = False,
    knows: bool = True,
    slots: int = 4,
    replicas: int = 1,
    has_times: bool = True,
    startup_s: float = 0.0,
    cluster_policy: ClusterPolicy | None = None,
) -> SimulationResult:
    """Simulate requests at a time, of so many tokens, for a variant."""
    cost = AdapterCost(slots=slots, max_loaded=4 * slots, load_s=load_s, stops_steps=stops_steps)
    planned_s = load_s if planned_s is None else planned_s
    load = OneLoad(load_s=planned_s, stops_steps=stops_steps) if knows else None
    scenario = Scenario(
        cluster=cluster(8, per_node=1),
        actions=(Deploy(at_s=0.0, name=BASE, model=BASE, replicas=replicas, variants=True),),
        service=Service.CONTINUOUS,
        reject_late={} if slo is None else {BASE: slo},
        rejects_by_forecast=True,
        outstanding_per_slot=1,
        startup_s=startup_s,
    )
    deployer = Planned(cost, load, has_times=has_times)
    requests = [Request(at_s, 1, tokens, model=name) for at_s, tokens, name in asked]
    return simulate(requests, scenario, Policies(deployer=deployer, cluster_policy=cluster_policy))


@pytest.mark.parametrize("stops_steps", [False, True])
def test_one_whose_limit_is_shorter_than_its_load_is_rejected_at_once(stops_steps: bool) -> None:
    """The first finds an idle worker, and waits for its load; so another does when the worker is idle again."""
    asked = [(0.0, 20, "a"), (15.0, 2, "b"), (15.0, 2, "a"), (15.0, 2, BASE), (100.0, 2, "b")]
    result = run(asked, Slo(ttft_s=9.0), stops_steps=stops_steps)
    assert words(result) == [_KEPT, _LATE, _KEPT, _KEPT, _KEPT]
    assert variants_of(result).loads == 2
    assert words(run(asked, Slo(ttft_s=9.0), stops_steps=stops_steps, knows=False)) == [_KEPT] * 5


def test_loads_before_its_own_count() -> None:
    """A load of 10 s each, one at a time, within 25 s: the third variant would wait for 30."""
    asked = [(0.0, 9, "a"), (0.1, 9, "b"), (0.2, 9, "c"), (0.3, 9, "b")]
    result = run(asked, Slo(ttft_s=25.0))
    assert words(result) == [_KEPT, _KEPT, _LATE, _KEPT]
    assert result.outcomes.first_token_s[1] == result.outcomes.first_token_s[3] == pytest.approx(21.0, abs=1.1)


def test_a_start_makes_no_load_look_shorter() -> None:
    """Two requests wait for a start and their loads. Later a third variant would have its load in 30 s, not 25."""
    asked = [(0.0, 2, "a"), (0.1, 2, "b"), (100.0, 9, "c"), (100.1, 9, "d"), (100.2, 9, "e")]
    for startup_s in (0.0, 30.0):
        assert words(run(asked, Slo(ttft_s=25.0), startup_s=startup_s)) == [_KEPT] * 4 + [_LATE]


@pytest.mark.parametrize("stops_steps", [False, True])
@pytest.mark.parametrize("waiting", [1, 4])
def test_a_load_is_learned_once_for_all_requests_that_wait_for_it(
    waiting: int, stops_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads take twice what is planned."""
    controllers = list[AdmissionController]()

    def keep(policy: AdmissionPolicy) -> AdmissionController:
        controllers.append(AdmissionController(policy))
        return controllers[-1]

    monkeypatch.setattr("traces.simulator.admission.AdmissionController", keep)
    asked = [(0.0, 2, "a")] * waiting + [(50.0, 2, "b")] * waiting
    result = run(asked, Slo(ttft_s=900.0), load_s=20.0, planned_s=10.0, stops_steps=stops_steps)
    assert words(result) == [_KEPT] * len(asked)
    assert variants_of(result).loads == 2
    assert [one._load_ratio for one in controllers] == [LearnedRatio().updated(2.0).updated(2.0)]


@pytest.mark.parametrize("stops_steps", [False, True])
def test_a_load_of_a_replica_that_drains_is_not_learned(
    stops_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load that its request waits for is made once more, by the other replica."""
    controllers = list[AdmissionController]()

    def keep(policy: AdmissionPolicy) -> AdmissionController:
        controllers.append(AdmissionController(policy))
        return controllers[-1]

    monkeypatch.setattr("traces.simulator.admission.AdmissionController", keep)
    asked = [(0.0, 60, "a"), (0.0, 60, "a2"), (30.0, 2, "b"), (30.0, 2, "b2")]
    drain = [Drain(name=BASE, replica_id="#1")]
    for script, loads in (((), 4), (drain, 5)):
        found = run(
            asked,
            Slo(ttft_s=900.0),
            replicas=2,
            load_s=20.0,
            planned_s=10.0,
            stops_steps=stops_steps,
            cluster_policy=Scripted(script, every_s=32.0),
        )
        assert words(found) == [_KEPT] * 4
        assert variants_of(found).loads == loads
        assert controllers[-1]._load_ratio.number - 1 == 4


def test_a_replica_that_has_it_loaded_is_taken_and_another_with_fewer_loads() -> None:
    """Within 15 s each of two replicas has time for one load."""
    asked = [(0.0, 60, "a"), (0.1, 60, "b"), (30.0, 2, "a"), (30.0, 2, "b"), (30.1, 2, "c"), (30.2, 2, "d")]
    asked.append((30.3, 2, "e"))
    result = run(asked, Slo(ttft_s=15.0), replicas=2)
    assert words(result) == [_KEPT] * 6 + [_LATE]


def test_one_that_waits_for_a_slot_is_judged_with_the_loads_before_it() -> None:
    """Two slots for 25 s: a variant that waits behind two cold ones would have its load in 30 s."""
    first = [(0.0, 15, "a"), (0.1, 15, "b")]
    for names, said in (("c", [_KEPT]), ("cd", [_KEPT, _KEPT]), ("cde", [_KEPT, _KEPT, _LATE])):
        asked = [*first, *((20.5 + 0.1 * index, 2, name) for index, name in enumerate(names))]
        assert words(run(asked, Slo(ttft_s=28.0), slots=2))[2:] == said


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 9)), min_size=1, max_size=20),
    st.floats(1.0, 20.0),
    st.floats(0.0, 20.0),
)
def test_requests_of_the_base_alone_fare_as_if_loads_were_not_known(
    asked: list[tuple[float, int]], limit_s: float, load_s: float
) -> None:
    """To the bit."""
    requests = [(at_s, tokens, BASE) for at_s, tokens in sorted(asked)]
    known, unknown = (run(requests, Slo(e2e_s=limit_s), load_s=load_s, knows=knows) for knows in (True, False))
    assert words(known) == words(unknown)
    assert known.outcomes.last_token_s.tobytes() == unknown.outcomes.last_token_s.tobytes()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 40.0), st.integers(1, 9), st.sampled_from(["", *"abcdef"])),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.0, 10.0),
    st.booleans(),
    st.integers(1, 2),
)
def test_limits_that_none_can_miss_reject_none(
    asked: list[tuple[float, int, str]], load_s: float, stops_steps: bool, slots: int
) -> None:
    """All requests end as they do without admission control."""
    requests = sorted(asked)
    found, free = (
        run(requests, slo, load_s=load_s, stops_steps=stops_steps, slots=slots) for slo in (Slo(e2e_s=1e9), None)
    )
    assert words(found) == words(free) == [_KEPT] * len(asked)
    assert found.outcomes.last_token_s.tobytes() == free.outcomes.last_token_s.tobytes()


def test_a_deployer_that_knows_no_times_is_at_fault(golden: Golden) -> None:
    with golden.raises("simulator-errors", PolicyError):
        run([(0.0, 2, "a")], Slo(e2e_s=9.0), has_times=False)
