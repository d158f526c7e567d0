"""Costs and objectives of one request, worked out by hand.

A: tp=2, 10 GiB on each of 2 GPUs, TTFT 0.4 s, TPOT 0.02 s, batch 4, 101 output tokens, 250 W per GPU. So e2e is
0.4 + 100 * 0.02 = 2.4 s, 20 GiB in all, 2 * 2.4 / 4 = 1.2 GPU-seconds a request.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import MemoryEstimate, Source
from planner.costs import COSTS, OBJECTIVES, Prices, figures, objective_of, total_bytes
from planner.intent import CostModel, Intent, IntentKind, Slo
from tests.planner.candidates import estimate

A = estimate(
    DeploymentConfig(tp=2),
    workload=Workload(batch=4, input_tokens=512, output_tokens=101),
    spread=0.1,
    power_w=250.0,
)


@pytest.mark.parametrize(
    ("model", "prices", "unit", "expected"),
    [
        pytest.param("memory-latency", Prices(), "GiB*s", 20 * 2.4 / 4, id="memory-latency"),
        pytest.param("memory", Prices(), "GiB", 20.0, id="memory"),
        pytest.param("gpu-hours", Prices(), "GPU-seconds", 1.2, id="gpu-hours"),
        pytest.param("dollars", Prices(usd_per_gpu_hour=3.6), "USD", 0.0012, id="dollars"),
    ],
)
def test_cost_of_a_request(model: str, prices: Prices, unit: str, expected: float) -> None:
    cost = COSTS[CostModel(model)]
    assert cost.unit == unit
    assert cost.of(figures([A]), prices).tolist() == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("kind", "unit", "expected"),
    [
        ("min-latency", "s", 2.4),
        ("min-cost", "GiB*s", 12.0),
        ("min-memory", "GiB", 20.0),
        ("min-gpu-hours", "GPU-seconds", 1.2),
        ("max-throughput", "output tokens/s", 4 * 101 / 2.4),
        ("min-energy", "J", 300.0),
        ("latency-slo", "GiB*s", 12.0),
        ("cost-slo", "s", 2.4),
    ],
)
def test_objective(kind: str, unit: str, expected: float) -> None:
    objective = objective_of(Intent(kind=IntentKind(kind), slo=Slo(ttft_s=1.0), budget=1.0))
    assert objective.unit == unit
    assert objective.of(figures([A]), Prices()).tolist() == [pytest.approx(expected)]
    assert objective.maximize == (kind == "max-throughput")


def test_every_kind_and_model_is_registered() -> None:
    assert set(OBJECTIVES) == set(IntentKind)
    for kind in IntentKind:
        objective = objective_of(Intent(kind=kind, slo=Slo(ttft_s=1.0), budget=1.0))
        assert all((objective.unit, objective.unknown, objective.words)), kind
    assert set(COSTS) == set(CostModel)


def test_what_is_not_known_is_nan_and_never_guessed() -> None:
    on_cpu = figures([estimate(DeploymentConfig(), power_w=None)])
    assert math.isnan(objective_of(Intent(kind=IntentKind.MIN_ENERGY)).of(on_cpu, Prices())[0])
    assert math.isnan(COSTS[CostModel.DOLLARS].of(on_cpu, Prices())[0])


def test_figures_agree_with_the_estimate_s_own() -> None:
    row = figures([A])
    assert row.e2e_s.tolist() == [pytest.approx(A.e2e_s.value)]
    assert row.e2e_high_s.tolist() == [pytest.approx(A.e2e_s.high)]
    assert row.service_s.tolist() == [pytest.approx(2.64 / 4)], "the upper end of the interval, per request"


@given(
    pp=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4, 8]),
    split=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    sizes=st.lists(st.integers(0, 10**10), min_size=7, max_size=7),
)
def test_total_bytes_is_that_of_every_split(pp: int, tp: int, split: list[int], sizes: list[int]) -> None:
    """Ranking needs no placement: the total does not depend on where the layers are cut."""
    layers = tuple(split[:pp])
    memory = MemoryEstimate(
        tp=tp,
        pp=pp,
        num_layers=sum(layers),
        layer_weight_bytes=sizes[0],
        layer_kv_bytes=sizes[1],
        first_stage_bytes=sizes[2],
        last_stage_bytes=sizes[3],
        activation_bytes=sizes[4],
        pp_buffer_bytes=sizes[5],
        runtime_bytes=sizes[6],
        relative_error=0.1,
        source=Source.ROOFLINE,
    )
    assert total_bytes(memory) == memory.total_bytes(layers)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(ConfigError, match="price"):
        Prices(usd_per_gpu_hour=price)
