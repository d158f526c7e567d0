"""Variants of a simulated deployment: which requests wait, are lost or refused, and laws of loads and policies."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, NotFoundError
from placement.actions import ClusterAction, Drain, Move, Scale
from placement.variant_routing import VARIANT_POLICIES, PreemptingDeltaZip, make_variant_policy
from planner.intent import Slo
from tests.golden_words import Golden
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.test_steering import Scripted
from tests.traces.simulator.variant_worlds import BASE, WithSlots, serve_variants, variants_of
from tests.traces.simulator.worlds import cluster, deploy_all, limits, placed_on, second_per_step, serve
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deploy, NodeFails, NodeReturns, Policies, Remove, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits

STEPS = linear_steps(limits(4, 200, 64), step_s=0.05, sequence_s=0.01, prompt_token_s=0.001)
POLICIES = pytest.mark.parametrize("policy", ["least-loaded", "busiest-loaded"])
_REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 60), st.integers(1, 40), st.sampled_from(["", *"abcdefgh"])),
    min_size=1,
    max_size=60,
)


def cost(slots: int = 2, max_loaded: int = 4, load_s: float = 0.3, *, stops_steps: bool = True) -> AdapterCost:
    return AdapterCost(
        slots=slots,
        max_loaded=max_loaded,
        load_s=load_s,
        stops_steps=stops_steps,
        added_s=lambda rows, active: 0.01 * active,
        prompt_share=0.5,
    )


def requests_of(asked: list[tuple[float, int, int, str]]) -> list[Request]:
    at_s = itertools.accumulate(gap_s for gap_s, *_ in asked)
    return [
        Request(at, inputs, outputs, model=name)
        for at, (_, inputs, outputs, name) in zip(at_s, asked, strict=True)
    ]


def zipf(count: int, variants: int, gap_s: float, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    weights = [1 / (1 + rank) for rank in range(variants)]
    at_s = itertools.accumulate(rng.expovariate(1 / gap_s) for _ in range(count))
    names = rng.choices([f"v{number}" for number in range(variants)], weights, k=count)
    return [
        Request(at, rng.randint(1, 60), rng.randint(1, 40), model=name)
        for at, name in zip(at_s, names, strict=True)
    ]


def times(result: SimulationResult) -> tuple[list[float], list[float]]:
    return result.outcomes.first_token_s.tolist(), result.outcomes.last_token_s.tolist()


class TestByHand:
    def test_a_variant_without_a_slot_waits_and_is_loaded_meanwhile(self) -> None:
        """Load "b" while "a" has the one slot, which stops "a" for a second; begin it when "a" has ended."""
        requests = [Request(0.0, 5, 5, model="a"), Request(2.5, 5, 2, model="b")]
        result = serve_variants(requests, second_per_step(2), cost(slots=1, max_loaded=2, load_s=1.0))
        # Steps of 1 s, 0.01 s for each adapter that decodes, and half a second for an adapter's prompt.
        assert result.outcomes.first_token_s.tolist() == pytest.approx([2.5, 9.04])
        assert result.outcomes.last_token_s.tolist() == pytest.approx([7.54, 10.05])
        found = variants_of(result)
        assert (found.loads, found.hits, found.evictions) == (2, 1, 0)
        assert found.waiting is not None
        assert found.waiting.max_s == pytest.approx(7.54 - 2.5)

    def test_warm_and_cold_requests_are_told_apart(self) -> None:
        requests = [Request(at_s, 5, 1, model="a") for at_s in (0.0, 0.5, 20.0, 40.0)]
        found = variants_of(serve_variants(requests, second_per_step(2), cost(load_s=1.0)))
        assert found.ttft_cold is not None
        assert found.ttft_warm is not None
        assert (found.ttft_cold.count, found.ttft_warm.count) == (2, 2)
        assert found.ttft_warm.max_s == pytest.approx(1.5)
        assert found.ttft_cold.max_s == pytest.approx(1.0 + 1.5)

    def test_requests_of_the_base_need_no_slot(self) -> None:
        requests = [Request(0.0, 5, 9, model="a"), Request(0.1, 5, 9, model="b"), Request(0.2, 5, 9)]
        result = serve_variants(requests, STEPS, cost(slots=1, max_loaded=1))
        first = result.outcomes.first_token_s
        assert first[2] < result.outcomes.last_token_s[0] < first[1]

    def test_an_engine_whose_loads_are_not_known_loads_in_no_time(self) -> None:
        free = AdapterCost(slots=2, max_loaded=4)
        requests = zipf(60, 8, 0.5)
        found = serve_variants(requests, STEPS, free)
        assert found.outcomes.completed.all()
        assert variants_of(found).loads >= len({request.model for request in requests})
        assert variants_of(found).load_s == 0.0

    def test_a_policy_that_takes_requests_back_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="replay"):
            serve_variants([Request(0.0, 5, 4, model="a")], STEPS, cost(), policy=PreemptingDeltaZip())

    def test_the_queue_has_its_bound(self) -> None:
        requests = [Request(0.0, 5, 40, model=name) for name in "abcde"]
        scenario = Scenario(
            cluster=cluster(),
            actions=(Deploy(at_s=0.0, name=BASE, model=BASE, variants=True),),
            max_waiting=2,
        )
        result = simulate(requests, scenario, Policies(deployer=WithSlots(STEPS, cost(slots=1, max_loaded=1))))
        assert result.outcomes.failure.tolist() == [0, 0, 0, Failure.RATE_LIMITED, Failure.RATE_LIMITED]

    def test_a_request_that_is_too_long_is_refused(self) -> None:
        requests = [Request(0.0, 190, 20, model="a"), Request(0.0, 10, 2, model="b")]
        result = serve_variants(requests, STEPS, cost())
        assert result.outcomes.failure.tolist() == [Failure.BAD_REQUEST, 0]


class TestLaws:
    @pytest.mark.parametrize("policy", VARIANT_POLICIES)
    @settings(max_examples=60, deadline=None)
    @given(
        asked=_REQUESTS,
        replicas=st.integers(1, 3),
        slots=st.integers(1, 3),
        spare=st.integers(0, 3),
        preempts=st.booleans(),
        stops=st.booleans(),
    )
    def test_no_request_is_lost(
        self, policy: str, asked, replicas: int, slots: int, spare: int, preempts, stops
    ) -> None:
        bounds = Limits(
            max_batch=4,
            max_context_tokens=200,
            max_batched_tokens=64,
            kv_tokens=120 if preempts else None,
            preempts=preempts,
        )
        steps = linear_steps(bounds, step_s=0.05, sequence_s=0.01, prompt_token_s=0.001)
        requests = requests_of(asked)
        own = cost(slots, slots + spare, stops_steps=stops)
        result = serve_variants(requests, steps, own, replicas=replicas, policy=make_variant_policy(policy))
        found, names = variants_of(result), {request.model for request in requests if request.model}
        assert result.outcomes.completed.all()
        assert found.asked_for == len(names)
        assert found.requests == sum(1 for request in requests if request.model)
        assert found.hits + found.loads >= found.requests
        assert found.loads >= len(names)
        assert 0 <= found.loads - found.evictions <= replicas * (slots + spare)
        counted = [0 if ttft is None else ttft.count for ttft in (found.ttft_warm, found.ttft_cold)]
        assert sum(counted) == found.requests

    @POLICIES
    @settings(max_examples=40, deadline=None)
    @given(
        asked=_REQUESTS,
        orders=st.lists(
            st.sampled_from(
                [
                    (),
                    (Scale(name=BASE, replicas=0),),
                    (Scale(name=BASE, replicas=1),),
                    (Scale(name=BASE, replicas=3),),
                ]
            ),
            max_size=5,
        ),
        failing=st.none() | st.floats(0.0, 40.0),
        stops=st.booleans(),
    )
    def test_no_request_is_lost_as_replicas_change(self, policy: str, asked, orders, failing, stops) -> None:
        faults = (
            ()
            if failing is None
            else (NodeFails(at_s=failing, node_id="node0"), NodeReturns(at_s=failing + 5, node_id="node0"))
        )
        result = serve_variants(
            requests_of(asked),
            STEPS,
            cost(stops_steps=stops),
            replicas=2,
            policy=make_variant_policy(policy),
            more=faults,
            cluster_policy=Scripted(*orders),
        )
        outcomes = result.outcomes
        lost = outcomes.failure == Failure.CONNECTION_LOST
        unserved = outcomes.failure == Failure.NOT_SERVED
        assert (outcomes.completed | lost | unserved).all()
        if failing is None:
            assert outcomes.completed.all()

    @POLICIES
    @pytest.mark.parametrize("stops", [True, False])
    def test_a_replica_that_drains_or_moves_gives_its_requests_back(self, policy: str, stops: bool) -> None:
        requests = zipf(80, 8, 0.1)
        moving = Move(
            name=BASE,
            replica_id="#1",
            placement=placed_on("gpu4", node_id="node4", size_bytes=60),
            load_s=3.0,
        )
        scripts: list[list[ClusterAction]] = [
            [Drain(name=BASE, replica_id="#1", evict=True)],
            [Drain(name=BASE, replica_id="#2")],
            [moving],
        ]
        for script in scripts:
            result = serve_variants(
                requests,
                STEPS,
                cost(stops_steps=stops),
                replicas=2,
                policy=make_variant_policy(policy),
                cluster_policy=Scripted(script, every_s=2.0),
            )
            assert result.outcomes.completed.all()
            assert variants_of(result).requests == len(requests)

    def test_a_removal_serves_none_that_wait(self) -> None:
        requests = [Request(0.0, 5, 40, model=name) for name in "abc"]
        result = serve_variants(requests, STEPS, cost(slots=1, max_loaded=2), more=(Remove(at_s=1.0, name=BASE),))
        assert (result.outcomes.failure == Failure.NOT_SERVED).all()

    @POLICIES
    def test_the_same_again_is_the_same(self, policy: str) -> None:
        one, two = (
            serve_variants(zipf(300, 30, 0.05), STEPS, cost(), replicas=2, policy=make_variant_policy(policy))
            for _ in range(2)
        )
        assert times(one) == times(two)
        assert variants_of(one) == variants_of(two)

    @pytest.mark.parametrize("policy", VARIANT_POLICIES)
    @settings(max_examples=30, deadline=None)
    @given(asked=_REQUESTS, seed=st.integers(0, 100))
    def test_names_do_not_matter(self, policy: str, asked, seed: int) -> None:
        letters = list("abcdefgh")
        named = dict(zip(letters, random.Random(seed).sample(letters, len(letters)), strict=True)) | {"": ""}
        renamed = [(gap_s, inputs, outputs, named[name]) for gap_s, inputs, outputs, name in asked]
        one, two = (
            serve_variants(requests_of(rows), STEPS, cost(), replicas=2, policy=make_variant_policy(policy))
            for rows in (asked, renamed)
        )
        assert times(one) == times(two)
        assert variants_of(one) == variants_of(two)

    @settings(max_examples=60, deadline=None)
    @given(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60))
    def test_loads_are_those_of_least_recently_used_and_never_fall_with_fewer_places(self, names) -> None:
        """Twenty minutes apart, frequencies have decayed so far that the last use decides: LRU has inclusion."""
        requests = [Request(1200.0 * row, 5, 3, model=name) for row, name in enumerate(names)]
        loads = []
        for places in range(1, 8):
            found = variants_of(serve_variants(requests, STEPS, cost(slots=1, max_loaded=places)))
            loads.append(found.loads)
            assert found.loads == misses(names, places)
            assert found.hits == len(names) - found.loads
        assert loads == sorted(loads, reverse=True)

    @POLICIES
    def test_loads_do_not_fall_with_fewer_slots_under_load(self, policy: str) -> None:
        """Hold on these traces what is no law of this policy, whose frequencies are of what is loaded."""
        for seed in range(3):
            loads = [
                variants_of(
                    serve_variants(
                        zipf(400, 40, 0.3, seed),
                        STEPS,
                        cost(slots, 4 * slots),
                        replicas=2,
                        policy=make_variant_policy(policy),
                    )
                ).loads
                for slots in (1, 2, 4, 8)
            ]
            assert loads == sorted(loads, reverse=True)

    def test_a_load_never_makes_anything_sooner_for_one_request_at_a_time(self) -> None:
        requests = [Request(60.0 * row, 5, 20, model=f"v{row % 5}") for row in range(20)]
        ends = [
            serve_variants(requests, STEPS, cost(load_s=load_s)).outcomes.last_token_s
            for load_s in (0.1, 0.5, 2.0)
        ]
        assert (np.diff(ends, axis=0) >= 0).all()


def misses(names: list[str], places: int) -> int:
    """Return the misses of a cache that evicts the least recently used."""
    cache: OrderedDict[str, None] = OrderedDict()
    count = 0
    for name in names:
        if name in cache:
            cache.move_to_end(name)
            continue
        count += 1
        if len(cache) == places:
            cache.popitem(last=False)
        cache[name] = None
    return count


class TestRefused:
    def scenario(self, **fields) -> Scenario:
        deploy = Deploy(at_s=0.0, name="a", model="a", variants=True)
        return Scenario(**({"cluster": cluster(), "actions": (deploy,)} | fields))

    def test_a_second_model(self, golden: Golden) -> None:
        both = (Deploy(at_s=0.0, name="a", model="a", variants=True), *deploy_all("b"))
        with golden.raises("simulator-errors", ConfigError):
            self.scenario(actions=both)

    @pytest.mark.parametrize("service", [one for one in Service if one is not Service.CONTINUOUS])
    def test_a_service_whose_adapters_are_not_simulated(self, service: Service) -> None:
        with pytest.raises(ConfigError, match="variants need continuous"):
            self.scenario(service=service)

    def test_rejecting_late_requests(self) -> None:
        with pytest.raises(ConfigError, match="leave reject_late out"):
            self.scenario(reject_late={"a": Slo(ttft_s=1.0)})

    def test_a_name_that_is_no_deployment_without_variants(self) -> None:
        with pytest.raises(NotFoundError, match="never deployed"):
            serve([Request(0.0, 1, 1, model="a")], STEPS)
