"""Variants of several deployments in one simulation: names are kept apart, and each has slots of its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, NotFoundError, PolicyError
from placement.variant_routing import make_variant_policy
from planner.intent import Slo
from tests.golden_words import Golden
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.variant_worlds import WithSlots
from tests.traces.simulator.worlds import OnTheFirst, cluster, limits
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deploy, Policies, Scenario, Service
from traces.simulator.simulation import simulate

STEPS = linear_steps(limits(4, 200, 64), step_s=0.05, sequence_s=0.01, prompt_token_s=0.001)
COST = AdapterCost(slots=2, max_loaded=4, load_s=0.3, added_s=lambda rows, active: 0.01 * active)
VARIANTS = {f"{name}/{index}": name for name in "ab" for index in range(1, 5)}
NAMES = st.sampled_from(["a", "b", *VARIANTS])
POLICIES = pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "fcfs", "deltazip"])


def run(requests: list[Request], scenario: Scenario, policy: str) -> SimulationResult:
    deployer = WithSlots(STEPS, COST)
    return simulate(requests, scenario, Policies(deployer=deployer, variant_policy=make_variant_policy(policy)))


def scenario(*names: str, **fields) -> Scenario:
    actions = tuple(Deploy(at_s=0.0, name=name, model=name, replicas=2) for name in names)
    variants = {variant: of for variant, of in VARIANTS.items() if of in names}
    given = {"cluster": cluster(4, per_node=1), "actions": actions, "variants": variants, "startup_s": 0.0}
    return Scenario(**(given | fields))


def requests_of(asked: list[tuple[float, int, int, str]]) -> list[Request]:
    at_s = itertools.accumulate(gap_s for gap_s, *_ in asked)
    return [Request(at, *lengths, model=name) for at, (_, *lengths, name) in zip(at_s, asked, strict=True)]


@POLICIES
@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60), st.integers(1, 30), NAMES), min_size=1))
def test_deployments_on_gpus_of_their_own_do_not_know_of_one_another(policy: str, asked) -> None:
    """Two deployments in one simulation fare as each does in a simulation of its own."""
    requests = requests_of(asked)
    both = run(requests, scenario("a", "b"), policy)
    of = np.array([VARIANTS.get(one.model, one.model) for one in requests])
    assert both.outcomes.completed.all()
    for index, name in enumerate("ab"):
        own = [one for one, its in zip(requests, of, strict=True) if its == name]
        assert both.deployments[index].arrived == len(own)
        if not own:
            continue
        alone = run(own, scenario(name), policy)
        assert both.deployments[index].variants == alone.deployments[0].variants
        np.testing.assert_array_equal(both.outcomes.last_token_s[of == name], alone.outcomes.last_token_s)


@POLICIES
@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60), st.integers(1, 30), NAMES), min_size=1))
def test_named_variants_fare_as_any_other_name_of_one_deployment(policy: str, asked) -> None:
    requests = [replace(one, model=one.model.replace("b", "a")) for one in requests_of(asked)]
    any_name = (Deploy(at_s=0.0, name="a", model="a", replicas=2, variants=True),)
    named, unnamed = scenario("a"), scenario(actions=any_name, variants={})
    one, other = run(requests, named, policy), run(requests, unnamed, policy)
    assert one.deployments[0].variants == other.deployments[0].variants
    np.testing.assert_array_equal(one.outcomes.last_token_s, other.outcomes.last_token_s)


def test_a_name_that_is_no_variant_is_never_deployed(golden: Golden) -> None:
    with golden.raises("simulator-errors", NotFoundError):
        run([Request(0.0, 1, 1, model="a/9")], scenario("a"), "fcfs")


def test_a_replica_without_slots_for_named_variants_is_its_policys_fault(golden: Golden) -> None:
    """Else it would serve each as its base."""
    with golden.raises("simulator-errors", PolicyError):
        simulate([Request(0.0, 1, 1, model="a/1")], scenario("a"), Policies(deployer=OnTheFirst(STEPS)))


class TestRefused:
    @pytest.mark.parametrize(
        "variants",
        [
            pytest.param({"b": "a"}, id="the name of a deployment"),
            pytest.param({"c/1": "c"}, id="of what is never deployed"),
        ],
    )
    def test_a_variant_without_a_place(self, golden: Golden, variants: dict[str, str]) -> None:
        with golden.raises("simulator-errors", ConfigError):
            scenario("a", "b", variants=variants)

    def test_named_variants_next_to_any_name(self, golden: Golden) -> None:
        any_name = (Deploy(at_s=0.0, name="a", model="a", variants=True),)
        with golden.raises("simulator-errors", ConfigError):
            scenario(actions=any_name, variants={"x": "a"})

    def test_a_service_without_adapters(self) -> None:
        with pytest.raises(ConfigError, match="variants need continuous"):
            scenario("a", service=Service.FCFS)

    def test_rejecting_late_requests(self) -> None:
        with pytest.raises(ConfigError, match="leave reject_late out"):
            scenario("a", reject_late={"a": Slo(ttft_s=1.0)})
