"""Requests that slots for variants let run at once, from the estimate to the law of load."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.adapter_slots import WithAdapterSlots, requests_within
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_loads import WithVariantLoads
from fingerprint.gpus import gpu_spec
from fingerprint.queueing import ServiceColumns
from fingerprint.service_model import service_model
from iserve.planning.verdict import figures_of
from planner.adapter_slots import VariantLoad
from planner.attainment import Attainment
from planner.costs import COSTS, OBJECTIVES, Prices, figures
from planner.intent import CostModel, IntentKind, Traffic
from tests.fingerprint.step_timed_machine import llama_7b

LLAMA, H200 = llama_7b(), gpu_spec("h200-sxm")
WORK = Workload(batch=64, input_tokens=512, output_tokens=128)
_LOADS = st.builds(
    VariantLoad, st.integers(2, 500), st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.sampled_from([0.0, 0.3])
)


def with_slots(load: VariantLoad) -> WithVariantLoads:
    inner = WithAdapterSlots(RooflineEstimator(LLAMA, H200), LLAMA, load.distinct, load.of_base)
    return WithVariantLoads(inner, LLAMA, load.missed, load.load_waits)


def slots_of(number: int) -> DeploymentConfig:
    return DeploymentConfig(engine="vllm", adapter_slots=number, adapter_rank=16)


def test_two_slots_for_four_variants_by_hand() -> None:
    """4 (1 - exp(-n / 4)) = 2."""
    assert requests_within(VariantLoad(4, 0.0).distinct, 2) == pytest.approx(4 * math.log(2))


@settings(deadline=None)
@given(load=_LOADS, slots=st.integers(1, 64))
def test_so_many_requests_ask_for_as_many_variants_as_there_are_slots(load: VariantLoad, slots: int) -> None:
    found = requests_within(load.distinct, slots)
    if load.variants <= slots:
        assert found is None
        return
    assert found is not None
    assert load.distinct(found) == pytest.approx(slots)
    more = requests_within(load.distinct, slots + 1)
    assert more is None or more > found >= slots


def test_the_law_of_load_runs_no_more_at_once() -> None:
    """8 slots, 1,000 variants by Zipf's law: of services and of estimates alike."""
    load, config = VariantLoad(1_000, 1.0), slots_of(8)
    within = requests_within(load.distinct, 8)
    assert within is not None
    assert 8 < within < 10
    estimator = with_slots(load)
    service = service_model(estimator, config, WORK)
    columns = ServiceColumns.of([service, service], np.array([64.0, 4.0]))
    assert columns.most.tolist() == [pytest.approx(within), 4.0]
    full = figures([estimator.estimate(config, WORK)])
    alone = estimator.estimate(config, Workload(batch=1, input_tokens=512, output_tokens=128))
    assert full.most_at_once.tolist() == [pytest.approx(within)]
    served = Attainment.of_estimates(full, [alone], Traffic())
    at_once = service.requests_per_s(within)
    assert 1 / served.service_s[0] == pytest.approx(at_once, rel=0.2)  # steps on a line from 1 request to 64
    assert at_once < 0.6 * service.requests_per_s(64)


def test_a_slot_for_each_variant_bounds_nothing() -> None:
    """The law is as if requests never waited for one, and so it is of a base without slots."""
    load = VariantLoad(8, 1.0)
    for config in (slots_of(8), DeploymentConfig(engine="vllm")):
        estimate = with_slots(load).estimate(config, WORK)
        assert estimate.most_at_once is None
        assert figures([estimate]).most_at_once.tolist() == [64.0]


@settings(max_examples=30, deadline=None)
@given(load=_LOADS, slots=st.integers(1, 32), rate_per_s=st.floats(0.1, 20.0))
def test_fewer_at_once_never_wait_less(load: VariantLoad, slots: int, rate_per_s: float) -> None:
    """The same service with and without the bound of its slots: the mean is no less with it."""
    estimator, config = with_slots(load), slots_of(slots)
    bound = figures([estimator.estimate(config, WORK)])
    alone = [estimator.estimate(config, Workload(batch=1, input_tokens=512, output_tokens=128))]
    free = replace(bound, most_at_once=bound.batch)
    with_bound, without = (Attainment.of_estimates(one, alone, Traffic()) for one in (bound, free))
    assert with_bound.mean_e2e(rate_per_s)[0] >= without.mean_e2e(rate_per_s)[0] * (1 - 1e-9)


def test_figures_and_objectives_are_of_the_requests_that_find_slots() -> None:
    """2 slots, 1,000 even variants: 2.002 of the 64 run at once, by 1,000 (1 - exp(-n / 1,000)) = 2."""
    estimate = with_slots(VariantLoad(1_000, 0.0)).estimate(slots_of(2), WORK)
    e2e_s = estimate.e2e_s.value
    per_s = -1_000 * math.log(1 - 2 / 1_000) / e2e_s
    shown = figures_of(estimate, H200)
    assert shown.requests_per_s == pytest.approx(per_s)
    assert shown.output_tokens_per_s == pytest.approx(128 * per_s)
    assert H200.price_usd_per_gpu_hour is not None
    price = H200.price_usd_per_gpu_hour / 3600
    assert shown.usd_per_million_output_tokens == pytest.approx(price / (128 * per_s) * 1e6)
    row, prices = figures([estimate]), Prices(usd_per_gpu_hour=H200.price_usd_per_gpu_hour)
    assert COSTS[CostModel.DOLLARS].of(row, prices)[0] == pytest.approx(price / per_s)
    assert COSTS[CostModel.GPU_HOURS].of(row, prices)[0] == pytest.approx(1 / per_s)
    held = COSTS[CostModel.MEMORY].of(row, prices)[0]
    assert COSTS[CostModel.MEMORY_LATENCY].of(row, prices)[0] == pytest.approx(held / per_s)
    throughput = OBJECTIVES[IntentKind.MAX_THROUGHPUT]
    assert throughput is not None
    assert throughput.of(row, prices)[0] == pytest.approx(128 * per_s)
    assert 1 / row.service_s[0] == pytest.approx(per_s * e2e_s / estimate.e2e_s.high)


@settings(max_examples=60, deadline=None)
@given(load=_LOADS, slots=st.integers(1, 32), more=st.integers(1, 32))
def test_more_slots_serve_more_where_steps_take_no_longer(load: VariantLoad, slots: int, more: int) -> None:
    """Compare the figure that a plan shows: more as long as fewer than the batch find slots, and never fewer."""
    few, many = (with_slots(load).estimate(slots_of(number), WORK) for number in (slots, slots + more))
    few_per_s = figures_of(few, H200).requests_per_s
    no_longer = replace(many, ttft_s=few.ttft_s, tpot_s=few.tpot_s)
    many_per_s = figures_of(no_longer, H200).requests_per_s
    assert many_per_s >= few_per_s
    if few.most_at_once is not None and few.most_at_once < WORK.batch:
        assert many_per_s > few_per_s
