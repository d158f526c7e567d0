"""Hot variants that cost less merged, by the planner's law of load."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.adapter_slots import WithAdapterSlots
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.service_model import ServiceModel, service_model
from planner.adapter_slots import VariantLoad, VariantShares, slot_need
from planner.hot_variants import MOST_MERGED, HotVariants, ServedCost, hot_variants, served_cost
from planner.intent import MAX_REPLICAS
from tests.fingerprint.step_timed_machine import llama_7b

LLAMA, GPU = llama_7b(), gpu_spec("h200-sxm")
BASE, WORK = RooflineEstimator(LLAMA, GPU), Workload(batch=32, input_tokens=256, output_tokens=128)
PLAIN = service_model(BASE, DeploymentConfig(engine="vllm"), WORK)
ONE_PER_S = PLAIN.requests_per_s(256)  # of one replica without slots, about


@lru_cache(maxsize=4096)
def on_slots(load: VariantShares) -> ServiceModel:
    need = slot_need(load, 16, WORK.batch)
    config = DeploymentConfig(engine="vllm", adapter_slots=need.slots, adapter_rank=need.rank)
    return service_model(WithAdapterSlots(BASE, LLAMA, load.distinct, load.of_base), config, WORK)


def shares_of(variants: int, skew: float, base_share: float = 0.0) -> VariantShares:
    return VariantShares(tuple(VariantLoad(variants, skew, base_share).shares.tolist()))


def found(load: VariantShares, rate_per_s: float) -> HotVariants | None:
    return hot_variants(load, rate_per_s, on_slots, PLAIN, GPU.memory_bytes)


def cost_of(load: VariantShares, rate_per_s: float, merged: int) -> float:
    """Return the GPUs that are held with so many merged, each deployment asked for by itself."""
    services = [(PLAIN, share * rate_per_s) for share in load.of_variants[:merged]]
    left_per_s = (1 - sum(load.of_variants[:merged])) * rate_per_s
    if left_per_s > 1e-6 * rate_per_s:
        rest = load.without_first(merged)
        services.append((on_slots(rest) if rest.of_variants else PLAIN, left_per_s))
    costs = [served_cost(service, rate, GPU.memory_bytes) for service, rate in services]
    return sum(math.inf if one is None else one.gpus_held for one in costs)


LOADS = st.builds(shares_of, st.integers(1, 40), st.floats(0, 3), st.sampled_from([0.0, 0.3, 0.9]))
RATES = st.floats(0.001, 8.0).map(lambda times: times * ONE_PER_S)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(load=LOADS, rate_per_s=RATES)
def test_what_is_advised_is_cheaper_by_a_tenth_and_the_cheapest_number(
    load: VariantShares, rate_per_s: float
) -> None:
    advice, everything = found(load, rate_per_s), cost_of(load, rate_per_s, 0)
    numbers = range(1, min(MOST_MERGED, len(load.of_variants)) + 1)
    costs = {number: cost_of(load, rate_per_s, number) for number in numbers}
    if advice is None:
        assert everything == math.inf or min(costs.values()) >= 0.9 * everything * (1 - 1e-6)
        return
    assert advice.on_slots.gpus_held == pytest.approx(everything)
    assert advice.split.gpus_held == pytest.approx(costs[advice.merged])
    assert advice.split.gpus_held == pytest.approx(min(costs.values()))
    assert advice.split.gpu_s_per_request <= 0.9 * advice.on_slots.gpu_s_per_request
    assert advice.split.rate_per_s == pytest.approx(rate_per_s)
    assert advice.share == pytest.approx(sum(load.of_variants[: advice.merged]))


@pytest.mark.parametrize("variants", [64, 200, 1000])
@pytest.mark.parametrize("base_share", [0.0, 0.5])
def test_of_many_variants_alike_none_is_advised_while_a_few_replicas_serve_them(
    variants: int, base_share: float
) -> None:
    load = shares_of(variants, 0.0, base_share)
    for times in (0.001, 0.01, 0.1, 0.3, 1.0, 2.0):
        rate_per_s = times * ONE_PER_S
        everything = served_cost(on_slots(load), rate_per_s, GPU.memory_bytes)
        assert everything is not None
        if everything.replicas <= 16:
            assert found(load, rate_per_s) is None


def test_at_next_to_no_load_no_copy_of_the_weights_is_advised() -> None:
    for skew in (0.0, 1.0, 3.0):
        assert found(shares_of(8, skew), 1e-4) is None
        assert found(shares_of(8, skew, base_share=0.5), 1e-4) is None


def test_one_variant_that_has_all_requests_is_merged_alone() -> None:
    """The slots and the base without requests are left out."""
    advice = found(shares_of(1, 1.0), ONE_PER_S)
    assert advice is not None
    assert advice.merged == 1
    assert advice.split == served_cost(PLAIN, ONE_PER_S, GPU.memory_bytes)


def test_a_hot_variant_of_many_is_merged_at_a_rate_that_needs_several_replicas() -> None:
    advice = found(shares_of(40, 2.0), 2 * ONE_PER_S)
    assert advice is not None
    assert 1 <= advice.merged <= 4
    assert advice.split.replicas < advice.on_slots.replicas


@pytest.mark.parametrize(("rate_per_s", "is_served"), [(150.0, True), (200.0, False), (10_000.0, None)])
def test_merging_is_advised_where_it_alone_serves_the_rate(rate_per_s: float, is_served: bool | None) -> None:
    """Four slots for 1,000 variants: 64 replicas with all on slots serve 150 requests/s, and not 200."""
    four = DeploymentConfig(engine="vllm", adapter_slots=4, adapter_rank=16)

    def service(load: VariantShares) -> ServiceModel:
        return service_model(WithAdapterSlots(BASE, LLAMA, load.distinct, load.of_base), four, WORK)

    advice = hot_variants(shares_of(1_000, 1.0), rate_per_s, service, PLAIN, GPU.memory_bytes)
    if is_served is None:
        assert advice is None, "neither way serves it"
        return
    assert advice is not None
    assert advice.on_slots.is_served == is_served
    assert advice.split.is_served
    assert advice.merged >= 8


@given(rate_per_s=RATES, more=st.floats(1, 4))
def test_a_higher_rate_never_holds_less(rate_per_s: float, more: float) -> None:
    few, many = (served_cost(PLAIN, rate, GPU.memory_bytes) for rate in (rate_per_s, more * rate_per_s))
    if few is None:
        assert many is None
    elif many is not None:
        assert many.replicas >= few.replicas
        assert many.gpus_held >= few.gpus_held * (1 - 1e-6)


def test_what_has_no_room_or_needs_too_many_replicas_has_no_cost() -> None:
    assert served_cost(PLAIN, 1.0, PLAIN.fixed_bytes) is None
    most = served_cost(PLAIN, 1e6, GPU.memory_bytes)
    assert most is None
    assert MAX_REPLICAS == 64


@given(load=LOADS, number=st.integers(0, 40))
def test_the_rest_of_a_load_keeps_its_proportions(load: VariantShares, number: int) -> None:
    left = 1 - sum(load.of_variants[:number])
    if left > 1e-6:
        rest = load.without_first(number)
        assert rest.of_variants == pytest.approx([share / left for share in load.of_variants[number:]])
        assert rest.of_base == pytest.approx(load.of_base / left, abs=1e-6)


@pytest.mark.parametrize("requests", [1.5, 2.0, 2.2])
def test_where_memory_decides_it_has_twice_the_cache_of_the_requests_at_the_peak(requests: float) -> None:
    """Little's law gives the requests at 1.5 times the rate; a GPU of 20 GB is more full than busy with so few."""
    gpu_bytes = 20_000_000_000
    alone = BASE.estimate(DeploymentConfig(engine="vllm"), replace(WORK, batch=2))
    rate_per_s = requests / 1.5 / (alone.ttft_s.value + WORK.output_tokens * alone.tpot_s.value)
    cost = served_cost(PLAIN, rate_per_s, gpu_bytes)
    assert cost is not None
    assert cost.gpus_held > 1 - math.exp(-requests / 1.5)  # its busy share
    cache_bytes = cost.gpus_held * gpu_bytes - PLAIN.fixed_bytes
    held = cache_bytes / (PLAIN.kv_bytes_per_token * (WORK.input_tokens + WORK.output_tokens))
    assert held == pytest.approx(2 * requests, rel=0.1)


def test_costs_add_up() -> None:
    one = ServedCost(replicas=1, gpus_held=0.5, rate_per_s=2.0)
    both = one.plus(ServedCost(replicas=2, gpus_held=1.5, rate_per_s=6.0))
    assert both == ServedCost(replicas=3, gpus_held=2.0, rate_per_s=8.0)
    assert both.gpu_s_per_request == 0.25
