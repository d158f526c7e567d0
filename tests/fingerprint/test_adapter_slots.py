"""Memory and time of adapter slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import MAX_ADAPTER_SLOTS, DeploymentConfig, SlotFormat, Workload
from fingerprint.delta import FORMATS, delta_bytes
from fingerprint.estimates import Estimate
from fingerprint.estimators.adapter_slots import (
    MOST_KERNEL_ROWS,
    WithAdapterSlots,
    added_prompt_share,
    added_step_s,
    kernel_step_s,
    variant_cost,
)
from fingerprint.estimators.delta_slots import added_delta_step_s, delta_prompt_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.gpus import gpu_spec
from fingerprint.lora.slot_bytes import reserved_bytes
from planner.adapter_slots import VariantLoad
from planner.space import slots_in_bounds
from tests.fingerprint.step_timed_machine import llama_7b

LLAMA = llama_7b()
PLAIN = RooflineEstimator(LLAMA, gpu_spec("h200-sxm"))


def with_slots(distinct: float = 1.0) -> WithAdapterSlots:
    return WithAdapterSlots(PLAIN, LLAMA, lambda requests: min(requests, distinct))


@given(
    engine=st.sampled_from(["vllm", "torch"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    slots=st.sampled_from([1, 8, 64]),
    rank=st.sampled_from([8, 16, 256]),
    batch=st.sampled_from([1, 32]),
)
def test_slots_take_their_bytes_and_never_make_a_step_faster(
    engine: str, tp: int, pp: int, slots: int, rank: int, batch: int
) -> None:
    config = DeploymentConfig(tp=tp, pp=pp, engine=engine, adapter_slots=slots, adapter_rank=rank)
    work = Workload(batch=batch, input_tokens=512, output_tokens=64)
    plain = PLAIN.estimate(replace(config, adapter_slots=0, adapter_rank=0), work)
    found = with_slots(8).estimate(config, work)
    layers = LLAMA.num_layers // pp
    more = found.memory.per_gpu_bytes((layers,) * pp) - plain.memory.per_gpu_bytes((layers,) * pp)
    assert more == pytest.approx(reserved_bytes(LLAMA, config, layers), rel=1e-6)
    assert found.memory.layer_kv_bytes == plain.memory.layer_kv_bytes
    assert found.config == config
    for now, before in ((found.tpot_s, plain.tpot_s), (found.ttft_s, plain.ttft_s)):
        assert now.low <= now.value <= now.high
        assert (now.value > before.value) == (engine == "vllm")
        assert now.low >= before.low


def test_without_slots_nothing_changes() -> None:
    work = Workload(batch=8, input_tokens=512, output_tokens=64)
    config = DeploymentConfig(engine="vllm")
    assert with_slots().estimate(config, work) == PLAIN.estimate(config, work)


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_slots_for_deltas_add_what_deltas_take(engine: str) -> None:
    """Time is added on vLLM alone, as none is known of the embedded engine; memory on both."""
    work = Workload(batch=32, input_tokens=512, output_tokens=64)
    config = DeploymentConfig(engine=engine, adapter_slots=8, adapter_rank=16, delta_mib=2000)
    plain, found = PLAIN.estimate(config.without_slots, work), with_slots(4).estimate(config, work)
    step_s = added_delta_step_s(2000 << 20, 32, 4) if engine == "vllm" else 0.0
    prompt_s = delta_prompt_s(2000 << 20, 512) if engine == "vllm" else 0.0
    assert found.tpot_s.value - plain.tpot_s.value == pytest.approx(step_s)
    assert found.ttft_s.value - plain.ttft_s.value == pytest.approx(prompt_s)
    assert found.tpot_s.low <= found.tpot_s.value <= found.tpot_s.high
    layers = (LLAMA.num_layers,)
    assert found.memory.per_gpu_bytes(layers) - plain.memory.per_gpu_bytes(layers) >= 8 * (2000 << 20)


@given(
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    slots=st.sampled_from([1, 8, 32]),
    rank=st.sampled_from([0, 16]),
    format_=st.sampled_from([one for one in SlotFormat if one is not SlotFormat.NONE]),
)
def test_slots_with_a_format_take_what_is_allocated_for_them(
    tp: int, pp: int, slots: int, rank: int, format_: SlotFormat
) -> None:
    work = Workload(batch=32, input_tokens=512, output_tokens=64)
    config = DeploymentConfig(
        tp=tp, pp=pp, engine="vllm", adapter_slots=slots, adapter_rank=rank, delta_format=format_
    )
    plain, found = PLAIN.estimate(config.without_slots, work), with_slots(4).estimate(config, work)
    layers = (LLAMA.num_layers // pp,) * pp
    more = found.memory.per_gpu_bytes(layers) - plain.memory.per_gpu_bytes(layers)
    assert more == pytest.approx(reserved_bytes(LLAMA, config, layers[0]), rel=1e-6)
    step_s = added_delta_step_s(delta_bytes(LLAMA, FORMATS[format_]), 32, min(4, slots))
    assert found.tpot_s.value - plain.tpot_s.value == pytest.approx(step_s)
    assert found.ttft_s.value > plain.ttft_s.value


def test_slots_for_deltas_are_bound_by_what_the_weights_leave() -> None:
    gpu = gpu_spec("h200")
    config = DeploymentConfig(engine="vllm", adapter_slots=64, delta_format=SlotFormat.INT4)
    free = gpu.memory_bytes - 2 * LLAMA.num_params
    found = slots_in_bounds(LLAMA, gpu, config)
    assert reserved_bytes(LLAMA, found, LLAMA.num_layers) <= free / 2
    twice = replace(found, adapter_slots=2 * found.adapter_slots)
    assert found == config or reserved_bytes(LLAMA, twice, LLAMA.num_layers) > free / 2
    assert slots_in_bounds(LLAMA, gpu_spec("t4"), config).adapter_slots < found.adapter_slots


@pytest.mark.parametrize(
    ("rows", "slots", "adapters", "added_ms"),
    [
        (32, 8, 1, 2.26),
        (32, 8, 8, 6.58),
        (32, 8, 100, 6.58),  # no more than there are slots
        (32, 32, 1, 3.39),
        (32, 32, 32, 23.17),
        (128, 8, 8, 15.69),
        (128, 32, 1, 13.20),
        (128, 32, 32, 52.08),
    ],
)
def test_what_was_measured_on_vllm_is_what_is_added(rows: int, slots: int, adapters: int, added_ms: float) -> None:
    """Llama-3.1-8B's 32 layers on an H200, vLLM 0.33, slots of rank 64."""
    work, config = Workload(rows, 512, 64), DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=64)
    plain_s = PLAIN.estimate(DeploymentConfig(engine="vllm"), work).tpot_s.value
    found = with_slots(adapters).estimate(config, work)
    assert found.tpot_s.value - plain_s == pytest.approx(1e-3 * added_ms * LLAMA.num_layers / 32, rel=0.06)


@pytest.mark.parametrize(("adapters", "added_s"), [(1, 2.60e-3), (8, 5.30e-3), (100, 5.30e-3)])
def test_the_interval_holds_what_another_release_and_rank_added(adapters: int, added_s: float) -> None:
    """Llama-3.1-8B, 32 rows on an H200, of a prototype on vLLM 0.24 with 8 slots of rank 16."""
    work, config = Workload(32, 512, 64), DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16)
    plain = PLAIN.estimate(DeploymentConfig(engine="vllm"), work).tpot_s
    found = with_slots(adapters).estimate(config, work).tpot_s
    added = added_s * LLAMA.num_layers / 32
    assert found.low - plain.low <= added <= found.high - plain.high
    assert found.value - plain.value == pytest.approx(added, rel=0.25)


SLOTS, ROWS, ACTIVE = st.integers(1, MAX_ADAPTER_SLOTS), st.floats(1, 1000), st.floats(0, 256)


@given(rows=ROWS, more_rows=st.floats(0, 1000), active=ACTIVE, more_active=ACTIVE, slots=SLOTS, more_slots=SLOTS)
def test_more_rows_adapters_or_slots_never_take_less_time(
    rows: float, more_rows: float, active: float, more_active: float, slots: int, more_slots: int
) -> None:
    found = added_step_s(32, rows, active, slots)
    assert found > 0
    more = (
        added_step_s(32, rows + more_rows, active, slots),
        added_step_s(32, rows, active + more_active, slots),
        added_step_s(32, rows, active, slots + more_slots),
    )
    assert min(more) >= found * (1 - 1e-12)


@given(rows=ROWS, active=ACTIVE, base_share=st.floats(0, 1))
def test_no_slots_add_nothing(rows: float, active: float, base_share: float) -> None:
    assert added_step_s(32, rows, active, 0) == 0
    assert added_prompt_share(0, base_share) == 0


@given(
    shares=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(sorted),
    batch=st.integers(1, 256),
    slots=st.sampled_from([1, 8, 64]),
    variants=st.integers(1, 200),
    skew=st.floats(0, 3),
)
def test_more_requests_for_the_base_never_take_more_time(
    shares: list[float], batch: int, slots: int, variants: int, skew: float
) -> None:
    """From those that all ask for an adapter down to a base alone with empty slots, which still cost time."""
    config = DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=16)
    work = Workload(batch=batch, input_tokens=512, output_tokens=64)

    def found(base_share: float) -> Estimate:
        load = VariantLoad(variants, skew, base_share)
        return WithAdapterSlots(PLAIN, LLAMA, load.distinct, base_share).estimate(config, work)

    few, many = (found(share) for share in shares)
    plain = PLAIN.estimate(config.without_slots, work)
    empty_s = added_step_s(LLAMA.num_layers, batch, 0, slots)
    for now, more, alone in ((many.tpot_s, few.tpot_s, plain.tpot_s), (many.ttft_s, few.ttft_s, plain.ttft_s)):
        assert alone.value < now.value <= more.value * (1 + 1e-9)
        assert alone.low <= now.low <= more.low * (1 + 1e-9)
        assert now.low <= now.value <= now.high <= more.high * (1 + 1e-9)
    assert many.tpot_s.value >= plain.tpot_s.value + empty_s * (1 - 1e-9)


@pytest.mark.parametrize("base_share", [1 - 2**-53, 1.0])
@pytest.mark.parametrize("batch", [1, 32])
def test_a_share_of_variants_that_is_lost_in_rounding_costs_empty_slots(base_share: float, batch: int) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16)
    work = Workload(batch=batch, input_tokens=512, output_tokens=64)
    found = WithAdapterSlots(PLAIN, LLAMA, VariantLoad(40, 1.0, base_share).distinct, base_share)
    plain = PLAIN.estimate(config.without_slots, work).tpot_s
    added_s = found.estimate(config, work).tpot_s.value - plain.value
    assert added_s == pytest.approx(added_step_s(LLAMA.num_layers, batch, 0, 8), abs=1e-9)


def with_our_kernels(config: DeploymentConfig) -> tuple[VariantCost, VariantCost]:
    """Return what variants take on an engine that has our kernels of adapters, and on one that has not."""
    ours = RooflineEstimator(LLAMA, gpu_spec("h200-sxm"), adapter_kernels=frozenset({"vllm"}))
    found = [variant_cost(one, LLAMA, config) for one in (ours, PLAIN)]
    assert None not in found
    return found[0], found[1]


@given(rows=st.integers(1, 2 * MOST_KERNEL_ROWS), active=st.floats(0, 64), rank=st.sampled_from([8, 16, 32, 64]))
def test_steps_of_adapters_are_those_of_our_kernels_where_these_serve_them(
    rows: int, active: float, rank: int
) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=64, adapter_rank=rank)
    mine, theirs = with_our_kernels(config)
    found = mine.step_s(rows, active)
    if rows > MOST_KERNEL_ROWS:
        assert found == theirs.step_s(rows, active)
    else:
        assert found.value == kernel_step_s(LLAMA.num_layers, rows, active, rank)
        assert found.low == found.value / 2
        assert found.high == found.value * 2
    for more in (mine.step_s(rows, active + 1), mine.step_s(min(rows + 1, MOST_KERNEL_ROWS), active)):
        assert more.value >= found.value or rows >= MOST_KERNEL_ROWS
    work = Workload(batch=2, input_tokens=3000, output_tokens=1)
    assert mine.prompts_s(work, 0.1, 0.5, 2.0) == theirs.prompts_s(work, 0.1, 0.5, 2.0)
    assert mine.load_s(10**8) == theirs.load_s(10**8)


@pytest.mark.parametrize(
    "config",
    [
        DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=128),
        DeploymentConfig(engine="vllm", adapter_slots=8, delta_format=SlotFormat.INT2),
        DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16, delta_format=SlotFormat.INT2),
    ],
)
def test_variants_that_our_kernels_do_not_serve_take_what_they_took(config: DeploymentConfig) -> None:
    mine, theirs = with_our_kernels(config)
    for rows, active in ((1, 1), (32, 8)):
        assert mine.step_s(rows, active) == theirs.step_s(rows, active)


def test_another_engine_has_none_of_our_kernels() -> None:
    ours = RooflineEstimator(LLAMA, gpu_spec("h200-sxm"), adapter_kernels=frozenset({"vllm"}))
    config = DeploymentConfig(engine="torch", adapter_slots=8, adapter_rank=16)
    assert variant_cost(ours, LLAMA, config) is None
