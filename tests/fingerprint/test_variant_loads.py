"""Loads of variants in estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.engines import TRAITS
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.adapter_slots import WithAdapterSlots, load_s, loads_stop_steps
from fingerprint.estimators.prefix_hits import WithPrefixHits
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.estimators.variant_loads import WithVariantLoads
from fingerprint.gpus import gpu_spec
from fingerprint.load_time import RECORDED_TENSORS
from fingerprint.load_waits import OneLoad
from fingerprint.lora.slot_bytes import adapter_bytes, largest_delta_bytes
from fingerprint.service_model import service_model
from planner.adapter_slots import VariantLoad
from tests.fingerprint.step_timed_machine import llama_7b

LLAMA = llama_7b()
PLAIN = RooflineEstimator(LLAMA, gpu_spec("h200-sxm"))


def with_slots(load: VariantLoad) -> WithAdapterSlots:
    return WithAdapterSlots(PLAIN, LLAMA, load.distinct, load.base_share)


@given(
    batch=st.sampled_from([1, 32]),
    base_share=st.sampled_from([0.0, 0.4]),
    rank=st.sampled_from([16, 256]),
    places=st.sampled_from([4, 32]),
)
def test_loads_in_steady_state_are_added_to_prompts(batch: int, base_share: float, rank: int, places: int) -> None:
    """Each request of a batch adds the mean time of its load; steps are as they were.

    The share of requests that wait for one is an upper bound, so that the interval begins at none. Loads of deltas
    stop nothing.
    """
    config = DeploymentConfig(engine="vllm", adapter_slots=places // 4, adapter_rank=rank)
    work, load = Workload(batch=batch, input_tokens=512, output_tokens=64), VariantLoad(100, 1.0, base_share)
    none = with_slots(load).estimate(config, work)
    found = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits).estimate(config, work)
    expected_s = batch * load.missed(places) * (0.0533 + adapter_bytes(LLAMA, rank) / 1.274e9)
    assert found.ttft_s.value - none.ttft_s.value == pytest.approx(expected_s)
    assert found.ttft_s.low == none.ttft_s.low
    assert found.ttft_s.high - none.ttft_s.high == pytest.approx(2 * expected_s)
    assert (found.tpot_s, found.memory) == (none.tpot_s, none.memory)


def test_loads_take_no_time_on_an_engine_that_they_do_not_stop_and_where_all_stay_loaded() -> None:
    work, load = Workload(batch=8, input_tokens=512, output_tokens=64), VariantLoad(32, 1.0)
    for engine, slots in (("torch", 1), ("vllm", 8)):
        config = DeploymentConfig(engine=engine, adapter_slots=slots, adapter_rank=16)
        none = with_slots(load).estimate(config, work)
        assert (
            WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits).estimate(config, work) == none
        )


class _Measured(VariantCost):
    """Cost whose loads take 3 s."""

    def step_s(self, rows: float, active: float) -> Quantity:
        return Quantity(0.0, 0.0, 0.0, Source.MEASURED)

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        return Quantity(0.0, 0.0, 0.0, Source.MEASURED)

    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        return 3.0


class _WithMeasured(RooflineEstimator):
    def variant_cost(self, config: DeploymentConfig) -> VariantCost:
        return _Measured()


@pytest.mark.parametrize(("engine", "added_s"), [("vllm", 0.5 * 8 * 3.0), ("torch", 0.0)])
def test_a_measured_load_is_the_one_that_counts_where_it_stops_steps(engine: str, added_s: float) -> None:
    base = _WithMeasured(LLAMA, gpu_spec("h200-sxm"))
    config = DeploymentConfig(engine=engine, adapter_slots=1, adapter_rank=16)
    work = Workload(batch=8, input_tokens=512, output_tokens=64)
    inner = WithAdapterSlots(base, LLAMA, lambda requests: 1.0)
    found = WithVariantLoads(inner, LLAMA, lambda places: 0.5, lambda slots, places, load_s: None).estimate(
        config, work
    )
    assert found.ttft_s.value - inner.estimate(config, work).ttft_s.value == pytest.approx(added_s)


@given(hits=st.floats(0, 0.999), input_tokens=st.integers(1, 64_000), batch=st.sampled_from([1, 32]))
def test_a_prefix_cache_spares_no_load(hits: float, input_tokens: int, batch: int) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=1, adapter_rank=16)
    work, load = Workload(batch, input_tokens, 64), VariantLoad(100, 1.0)
    none = WithPrefixHits(with_slots(load), hits)
    found = WithVariantLoads(none, LLAMA, load.missed, load.load_waits).estimate(config, work)
    expected_s = batch * load.missed(4) * load_s(adapter_bytes(LLAMA, 16))
    assert found.ttft_s.value - none.estimate(config, work).ttft_s.value == pytest.approx(expected_s, rel=1e-6)


def test_loads_stop_the_steps_of_vllm_alone() -> None:
    assert [name for name, traits in TRAITS.items() if traits.loads_stop_steps] == ["vllm"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("deltas", [{"delta_format": SlotFormat.INT2}, {"adapter_rank": 8, "delta_mib": 2_000}])
def test_deltas_are_loaded_next_to_the_steps_of_one_gpu_and_of_several(deltas: dict[str, Any], tp: int) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=1, tp=tp, **deltas)
    work, load = Workload(batch=8, input_tokens=512, output_tokens=64), VariantLoad(100, 1.0)
    none = with_slots(load).estimate(config, work)
    found = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits).estimate(config, work)
    assert not loads_stop_steps(config)
    assert found.ttft_s.value == none.ttft_s.value
    assert found.load_waits is not None


def test_waits_for_loads_next_to_the_steps_are_in_no_time_and_go_on_to_services() -> None:
    """64 deltas in 8 slots: all but the waits is as without; none waits where each has a slot."""
    work, load = Workload(batch=8, input_tokens=512, output_tokens=64), VariantLoad(64, 1.0)
    for slots in (8, 64):
        config = DeploymentConfig(engine="vllm", adapter_slots=slots, delta_format=SlotFormat.INT2)
        estimator = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits)
        none, found = with_slots(load).estimate(config, work), estimator.estimate(config, work)
        seconds = load_s(largest_delta_bytes(LLAMA, config))
        assert seconds == pytest.approx(0.0533 + largest_delta_bytes(LLAMA, config) / 1.274e9)
        assert found.load_waits == (load.load_waits(8, 8, seconds) if slots == 8 else None)
        assert replace(found, load_waits=None) == none
        assert service_model(estimator, config, work).load_waits == found.load_waits


@pytest.mark.parametrize("slots", [1, 64])
@pytest.mark.parametrize(
    ("kind", "stops"), [({"adapter_rank": 16}, True), ({"delta_format": SlotFormat.INT2}, False)]
)
def test_an_estimate_knows_what_a_load_takes_and_services_what_prompts_count_of_it(
    kind: dict[str, Any], stops: bool, slots: int
) -> None:
    """All of 64 variants stay loaded in 64 slots."""
    config = DeploymentConfig(engine="vllm", adapter_slots=slots, **kind)
    work, load = Workload(batch=8, input_tokens=512, output_tokens=64), VariantLoad(64, 1.0)
    estimator = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits)
    seconds = load_s(largest_delta_bytes(LLAMA, config) or adapter_bytes(LLAMA, 16))
    counted_s = load.missed(config.loaded_adapters) * seconds if stops else 0.0
    one_load = OneLoad(load_s=seconds, stops_steps=stops, counted_s=counted_s)
    assert estimator.estimate(config, work).one_load == one_load
    service = service_model(estimator, config, work)
    assert service.one_load == one_load
    assert service.counted_loads_s(2 * 512) == pytest.approx(2 * counted_s)
    assert service.slowed(3.0, 1.0).counted_loads_s(512) == pytest.approx(3 * counted_s)
    assert service_model(with_slots(load), config, work).prompt_s == pytest.approx(service.prompt_s - counted_s)
    assert estimator.estimate(config.without_slots, work).one_load is None


def test_an_engine_whose_loads_take_a_measured_time_has_its_waits() -> None:
    base, load = _WithMeasured(LLAMA, gpu_spec("h200-sxm")), VariantLoad(64, 1.0)
    config = DeploymentConfig(engine="torch", adapter_slots=2, adapter_rank=16)
    inner = WithAdapterSlots(base, LLAMA, load.distinct, 0.0)
    found = WithVariantLoads(inner, LLAMA, load.missed, load.load_waits).estimate(
        config, Workload(batch=8, input_tokens=512, output_tokens=64)
    )
    assert found.load_waits == load.load_waits(2, 8, 3.0)


@given(places=st.sampled_from([4, 32]), variants=st.sampled_from([100, 1_000]), batch=st.sampled_from([1, 32]))
def test_replicas_are_spared_the_loads_that_the_places_of_all_save(places: int, variants: int, batch: int) -> None:
    """A lone replica is spared none, more never less; 16 count as all that there may be."""
    config = DeploymentConfig(engine="vllm", adapter_slots=places // 4, adapter_rank=16)
    work, load = Workload(batch=batch, input_tokens=512, output_tokens=64), VariantLoad(variants, 1.0)
    found = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits).estimate(config, work)
    spared_s, seconds = found.spared_loads_s, load_s(adapter_bytes(LLAMA, 16))
    assert len(spared_s) == min(16, -(-variants // places))
    assert spared_s[0] == 0.0
    assert list(spared_s) == sorted(spared_s)
    assert spared_s[1] == pytest.approx(seconds * (load.missed(places) - load.missed(2 * places)))
    assert spared_s[-1] <= seconds * load.missed(places)
    if len(spared_s) < 16:
        assert spared_s[-1] == pytest.approx(seconds * load.missed(places))


def test_a_service_model_slows_spared_loads_as_its_prompts_and_spares_none_where_stages_are_filled() -> None:
    load, work = VariantLoad(100, 1.0), Workload(batch=1, input_tokens=512, output_tokens=64)
    estimator = WithVariantLoads(with_slots(load), LLAMA, load.missed, load.load_waits)
    plain, filled = (
        service_model(estimator, DeploymentConfig(pp=pp, engine="vllm", adapter_slots=4, adapter_rank=16), work)
        for pp in (1, 2)
    )
    assert len(plain.spared_loads_s) == 7
    assert plain.slowed(2.0, 1.0).spared_loads_s == tuple(2 * one for one in plain.spared_loads_s)
    assert filled.spared_loads_s == ()
