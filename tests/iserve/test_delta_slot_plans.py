"""Slots for deltas in plans: an outcome of step times and of the KV cache that slots leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate
from fingerprint.estimators.adapter_slots import variant_cost, variant_load_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.gpus import gpu_spec
from fingerprint.lora.slot_bytes import reserved_bytes
from iserve.planning import delta_slots
from iserve.planning.delta_slots import chooses_by_steps, delta_step_time, room_rows, slots_by_steps
from iserve.planning.pipeline import PlanOptions
from planner.adapter_slots import VariantLoad, slot_need
from planner.delta_slots import flow_with_slots
from planner.hot_variants import USABLE
from planner.intent import Quality, Traffic
from tests.golden_words import Golden
from tests.iserve.joint_plans import LLAMA, hardware_on, planned, spec_of, wish

SPEC, H200 = spec_of(LLAMA), gpu_spec("h200-sxm")
FORMATS = (SlotFormat.INT1, SlotFormat.INT2, SlotFormat.INT4)
ONE = DeploymentConfig(engine="vllm", adapter_slots=1, delta_format=SlotFormat.INT2)


def engine_of(config: DeploymentConfig) -> str:
    return "vllm"


def most_at_once(slots: int, format_: SlotFormat) -> int:
    """Return the most requests of 4,096 tokens that a plan admits at once on one GPU next to so many slots."""
    traffic = Traffic(variants=64, variant_rank=0, delta_format=format_)

    def admits(batch: int) -> bool:
        work = Workload(batch=batch, input_tokens=3840, output_tokens=256)
        options = PlanOptions(adapter_slots=slots, workload=work, policy="hybrid")
        options = replace(options, intent=replace(options.intent, traffic=traffic, quality=Quality.EXACT))
        best = planned(hardware_on("h200:1"), options).best
        return best is not None and best.config.adapter_slots == slots

    low, high = 1, 512
    assert admits(low)
    assert not admits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    return low


@pytest.mark.parametrize("format_", FORMATS)
def test_more_slots_leave_less_kv_cache(format_: SlotFormat) -> None:
    """Plans admit fewer requests at once by the bytes of the slots, at 512 MiB of KV cache a request."""
    most = {slots: most_at_once(slots, format_) for slots in (1, 2, 4, 8)}
    for fewer, more in pairwise(most):
        taken = reserved(format_, more) - reserved(format_, fewer)
        assert most[fewer] - most[more] == pytest.approx(taken / 2**29, abs=1.5, rel=0.1)


def reserved(format_: SlotFormat, slots: int) -> int:
    """Return the bytes of slots on one GPU."""
    return reserved_bytes(SPEC, replace(ONE, delta_format=format_, adapter_slots=slots), SPEC.num_layers)


LOADS = st.builds(VariantLoad, st.integers(1, 60), st.sampled_from([0.0, 1.0, 1.5]), st.sampled_from([0.0, 0.4]))


@settings(max_examples=25, deadline=None)
@given(
    load=LOADS,
    requests=st.integers(1, 96),
    format_=st.sampled_from(FORMATS),
    gib=st.integers(12, 141),
    tokens=st.tuples(st.integers(16, 8192), st.integers(16, 1024)),
)
def test_slots_are_within_memory_and_decode_most(
    load: VariantLoad, requests: int, format_: SlotFormat, gib: int, tokens: tuple[int, int]
) -> None:
    gpu = replace(H200, memory_bytes=gib << 30)
    base = RooflineEstimator(SPEC, gpu)
    work = Workload(batch=requests, input_tokens=tokens[0], output_tokens=tokens[1])
    need = slot_need(load, 0, requests, delta_format=format_)
    found = slots_by_steps(need, load, SPEC, gpu, base, engine_of, work, requests)
    assert replace(found, slots=need.slots) == need
    config = replace(ONE, delta_format=format_)
    rows = room_rows(SPEC, gpu, base, config, work)
    if rows(1) < 1:  # several GPUs hold the base
        return
    numbers = [1 << power for power in range(7)]
    assert all(rows(more) < rows(fewer) for fewer, more in pairwise(numbers))
    memory = base.estimate(config.without_slots, replace(work, batch=1)).memory.stage(0, SPEC.num_layers)
    if found.slots > 1:
        assert memory.total_bytes + reserved(format_, found.slots) <= USABLE * gpu.memory_bytes
    cost = variant_cost(base, SPEC, config)
    assert cost is not None
    step_s, load_s = delta_step_time(base, config, cost, work), variant_load_s(cost, SPEC, config)

    def per_s(slots: int) -> float:
        """Tokens a second by steps, and by loads, one after another, that requests wait for."""
        most = max(1.0, min(requests, rows(slots)))
        by_steps = flow_with_slots(load, requests, slots, step_s, steps=work.output_tokens, max_rows=most)
        loads_s = load.missed(slots) * load_s
        return min(by_steps.rows_per_s, work.output_tokens / loads_s if loads_s else float("inf"))

    enough = next(number for number in numbers if number >= load.variants)
    fewer = [number for number in numbers if number < found.slots and number <= enough]
    assert all(per_s(number) < per_s(found.slots) for number in fewer)


def test_with_memory_to_spare_all_that_are_asked_for_have_one() -> None:
    gpu = replace(H200, memory_bytes=2**42)
    for variants in (1, 3, 8, 30):
        load = VariantLoad(variants, 0.0)
        need = slot_need(load, 0, 4 * variants, delta_format=SlotFormat.INT2)
        work = Workload(batch=4 * variants, input_tokens=512, output_tokens=128)
        base = RooflineEstimator(SPEC, gpu)
        found = slots_by_steps(need, load, SPEC, gpu, base, engine_of, work, 4 * variants)
        assert found.slots >= 0.9 * variants


def test_slots_that_were_asked_for_and_those_of_adapters_stay() -> None:
    load, base = VariantLoad(20, 1.0), RooflineEstimator(SPEC, H200)
    work = Workload(batch=32, input_tokens=512, output_tokens=128)
    for need in (
        slot_need(load, 0, 32, 3, delta_format=SlotFormat.INT2),
        slot_need(load, 16, 32),
        slot_need(load, 16, 32, delta_mib=2000),  # on the embedded engine, whose times are not known
    ):
        engine = "torch" if need.delta_mib else "vllm"
        found = slots_by_steps(need, load, SPEC, H200, base, lambda config, engine=engine: engine, work, 32)
        assert found == need


def test_a_plan_says_how_it_chose(golden: Golden) -> None:
    options = replace(wish(), workload=Workload(batch=64, input_tokens=2048, output_tokens=256))
    traffic = Traffic(variants=100, variant_rank=0, variant_skew=1.0, delta_format=SlotFormat.INT4)
    options = replace(options, intent=replace(options.intent, traffic=traffic), more_requests=False)
    for gpus in ("h200:1", "l40s:1"):
        notes = planned(hardware_on(gpus), options).document.notes
        golden("variant", next(note for note in notes if "wait for a slot" in note), what=gpus)


class NoSteps(RooflineEstimator):
    """Estimator that knows no time of the model without slots, but the memory."""

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if workload.output_tokens == UNKNOWN:
            raise NotMeasuredError("no such answers were measured")
        return super().estimate(config, workload)


UNKNOWN = 77


class TimedPrompts(RooflineEstimator):
    """Estimator of variants of any kind whose prompts are timed, as profiles have them of adapters too."""

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        return variant_cost(None, SPEC, replace(ONE, adapter_slots=config.adapter_slots))


def test_the_law_tells_where_it_did_not_choose() -> None:
    """The number alone does not tell, as its slots may be those that were needed."""
    load, base = VariantLoad(20, 1.0), RooflineEstimator(SPEC, H200)
    work = Workload(batch=32, input_tokens=512, output_tokens=128)
    need = slot_need(load, 0, 32, delta_format=SlotFormat.INT2)
    assert chooses_by_steps(need, SPEC, H200, base, engine_of, work)
    chosen = slots_by_steps(need, load, SPEC, H200, base, engine_of, work, 32).slots
    unknown = replace(work, output_tokens=UNKNOWN)
    small = replace(H200, memory_bytes=2**30)  # no number of GPUs holds the base
    for asked, gpu, estimator, there in (
        (slot_need(load, 0, 32, chosen, delta_format=SlotFormat.INT2), H200, base, work),
        (slot_need(load, 16, 32), H200, TimedPrompts(SPEC, H200), work),
        (need, H200, NoSteps(SPEC, H200), unknown),
        (need, small, RooflineEstimator(SPEC, small), work),
    ):
        assert not chooses_by_steps(asked, SPEC, gpu, estimator, engine_of, there)
        assert slots_by_steps(asked, load, SPEC, gpu, estimator, engine_of, there, 32) == asked


def test_a_plan_says_so_only_where_the_law_chose(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no step time with deltas is known to the law, though the plan itself has one."""

    def not_known(*given: object) -> None:
        raise NotMeasuredError("no such step was measured")

    monkeypatch.setattr(delta_slots, "delta_step_time", not_known)
    options = replace(wish(), workload=Workload(batch=64, input_tokens=2048, output_tokens=256))
    traffic = Traffic(variants=100, variant_rank=0, variant_skew=1.0, delta_format=SlotFormat.INT4)
    options = replace(options, intent=replace(options.intent, traffic=traffic), more_requests=False)
    notes = planned(hardware_on("h200:1"), options).document.notes
    found = next(note for note in notes if "wait for a slot" in note)
    assert "decode most" not in found
    golden("variant", found)
