"""Advice to merge hot variants of a deployment that runs, by the requests that the gateway counted.

A node with an H200 and vLLM cannot be here: its observation and its profile are given, by datasheets.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import get_engine
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, SlotFormat
from fingerprint.errors import NotFoundError
from fingerprint.estimators.adapter_slots import variant_cost
from fingerprint.lora.slot_bytes import slot_bytes
from iserve.api_documents import MergeAdviceDocument, VariantCostDocument, VariantDocument
from iserve.controller.variant_advice import VariantAdvisor, load_of
from iserve.planning.merge_advice import merge_advice
from iserve.planning.pipeline import PlanOptions
from iserve.planning.variant_costs import variant_cost_document
from iserve.planning.words import rounded
from iserve.route_table import VariantDemand
from planner.adapter_slots import VariantLoad, VariantShares
from planner.intent import Traffic
from tests.golden_words import Golden
from tests.iserve.joint_plans import LLAMA, estimator_on, hardware_on, planned, source_of, wish, workers_of

HARDWARE = hardware_on("h200:1")
NAMES = "abcdefghijklmnopqrst"  # of variants
VARIANT = VariantDocument(
    name="style",
    base="chat",
    base_directory="/chat",
    content_hash="0" * 64,
    engine_name="style@0",
    rank=16,
    num_modules=1,
    size_bytes=1,
    new_bytes=None,
    disk_bytes=1,
    trained_on=None,
    pinned=False,
    created_at=0.0,
    deployments=("chat",),
    why_not_served=None,
)


def options_of(traffic: Traffic) -> PlanOptions:
    plain = wish()
    return replace(plain, intent=replace(plain.intent, traffic=traffic))


def advisor(
    demand: VariantDemand | None,
    options: PlanOptions,
    engine: str = "vllm",
    profiled: bool = True,
    registered: str = NAMES,
    has_slots: bool = True,
) -> VariantAdvisor:
    workers = workers_of(planned(HARDWARE, options), options)
    workers = tuple(replace(one, config=replace(one.config, engine=engine)) for one in workers)
    if not has_slots:
        workers = tuple(replace(one, config=one.config.without_slots) for one in workers)
    row = SimpleNamespace(name="chat", workers=to_json(workers), request=json.dumps({"model": "chat"}))
    profile = SimpleNamespace(machine=SimpleNamespace(device=HARDWARE.gpu)) if profiled else None
    profiler: Any = SimpleNamespace(
        stored=lambda *_, **__: profile, estimator=lambda *_: estimator_on(LLAMA, HARDWARE.gpu)
    )
    given: Any = SimpleNamespace(
        deployment=lambda name: row,
        options=lambda request: options,
        node=object(),
        variants=SimpleNamespace(all=lambda: [SimpleNamespace(name=name) for name in registered]),
    )
    return VariantAdvisor(
        given,
        profiler,
        given,
        lambda: given.node,
        lambda *_, **__: source_of(),
        lambda: () if demand is None else (demand,),
    )


def asked(per_s: float | None, *requests: int, base: int = 0) -> VariantDemand:
    return VariantDemand(
        deployment="chat",
        requests_per_s=per_s,
        requests=base + sum(requests),
        of_variants=tuple(zip(NAMES, requests, strict=False)),
    )


TRAFFIC = options_of(Traffic(variants=20))


def test_a_hot_variant_is_named_with_what_its_merge_saves(golden: Golden) -> None:
    demand = asked(80.0, 8000, 300, *[10] * 18, base=120)
    advice = advisor(demand, TRAFFIC).of(VARIANT)
    assert advice is not None
    golden("variant", advice.text)
    assert advice.names == ("a",)
    assert advice.variants == 1
    assert advice.request_share == pytest.approx(8000 / 8600)
    assert advice.rate_per_s == 80.0
    assert advice.gpus_held_on_slots is not None
    assert advice.gpus_held_merged <= 0.9 * advice.gpus_held_on_slots


def test_a_few_requests_make_no_advice() -> None:
    """Advice by the shares of a few requests would be chance."""
    one, few, enough = (asked(80.0, number) for number in (1, 29, 30))
    assert [advisor(demand, TRAFFIC).of(VARIANT) is None for demand in (one, few, enough)] == [True, True, False]


def test_a_variant_that_was_removed_is_neither_named_nor_counted() -> None:
    """The gateway counts its requests of the last 120 s."""
    both = asked(160.0, 9600, 8000, 300, *[10] * 17, base=1130)
    advice = advisor(both, TRAFFIC, registered=NAMES[1:]).of(VARIANT)
    assert advice is not None
    assert advice.names == ("b",)
    assert advice.request_share == pytest.approx(8000 / 9600)
    assert advice.rate_per_s == pytest.approx(160.0 * 9600 / 19_200)
    assert advisor(asked(80.0, 9600), TRAFFIC, registered=NAMES[1:]).of(VARIANT) is None


def test_a_deployment_keeps_its_slots_where_a_plan_takes_those_that_are_needed() -> None:
    """Four of its 32 slots would do for these variants: what the rest costs is counted with the 32."""
    load, config = load_of(asked(80.0, 9000, 300, 200, 100)), DeploymentConfig(engine="vllm")
    config = replace(config, adapter_slots=32, adapter_rank=16)

    def advice(keeps_slots: bool) -> MergeAdviceDocument:
        found = merge_advice(
            *("chat", source_of().spec, HARDWARE.gpu, estimator_on(LLAMA, HARDWARE.gpu), TRAFFIC, config),
            *(load, 80.0),
            keeps_slots=keeps_slots,
        )
        assert found is not None
        return found

    kept, needed = advice(True), advice(False)
    assert kept.gpus_held_on_slots is not None
    assert needed.gpus_held_on_slots is not None
    assert kept.gpus_held_on_slots > needed.gpus_held_on_slots
    assert kept.gpus_held_merged > needed.gpus_held_merged
    assert kept.names == ()


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.02844, 2, "0.028"),
        (3.04, 2, "3"),
        (80.0, 3, "80"),
        (99.7, 2, "100"),
        (127.4, 2, "127"),
        (999.7, 3, "1,000"),
        (1234.4, 3, "1,234"),
        (2e7, 3, "20,000,000"),
    ],
)
def test_large_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


def test_advice_at_a_high_rate_names_it_in_full() -> None:
    load, config = load_of(asked(80.0, 9000, 300)), DeploymentConfig(engine="vllm")
    config = replace(config, adapter_slots=4, adapter_rank=16)
    found = merge_advice(
        *("chat", source_of().spec, HARDWARE.gpu, estimator_on(LLAMA, HARDWARE.gpu), TRAFFIC, config),
        *(load, 1234.0),
    )
    assert found is not None
    assert "at 1,234 requests/s" in found.text


def test_it_is_said_where_only_merging_serves_the_rate(golden: Golden) -> None:
    """Figures in JSON are finite."""
    load = VariantShares(tuple(VariantLoad(1_000, 1.0).shares.tolist()))
    config = DeploymentConfig(engine="vllm", adapter_slots=4, adapter_rank=16)
    found = merge_advice(
        *("chat", source_of().spec, HARDWARE.gpu, estimator_on(LLAMA, HARDWARE.gpu), TRAFFIC, config, load),
        rate_per_s=150.0,
        keeps_slots=True,
    )
    assert found is not None
    assert (found.gpus_held_on_slots, found.gpu_s_per_request_on_slots) == (None, None)
    assert from_json(to_json(found), MergeAdviceDocument) == found
    golden("variant", found.text)


DELTAS = DeploymentConfig(engine="vllm", adapter_slots=4, adapter_rank=16, delta_format=SlotFormat.INT2)


def advice_on(
    config: DeploymentConfig, load: VariantShares, rate_per_s: float, names: tuple[str, ...] = ()
) -> MergeAdviceDocument | None:
    spec, gpu = source_of().spec, HARDWARE.gpu
    return merge_advice(
        "chat", spec, gpu, estimator_on(LLAMA, gpu), TRAFFIC, config, load, rate_per_s, names, True
    )


def test_a_hot_delta_is_to_be_a_deployment_of_its_own(golden: Golden) -> None:
    load = load_of(asked(80.0, 9000, 300))
    found, in_plan = (advice_on(DELTAS, load, 1234.0, names) for names in (("a", "b"), ()))
    assert found is not None
    assert in_plan is not None
    golden("variant", found.text)
    assert [command.split()[-2:] for command in found.commands] == [["deploy", "a"], ["deploy", "b"]]
    golden("variant", in_plan.commands[0], what="in a plan")
    assert found.gpus_held_merged <= 0.9 * (found.gpus_held_on_slots or float("inf"))


def test_what_slots_of_deltas_cost_grows_with_their_bytes() -> None:
    """Compare formats: merged, the model is the same whatever its delta's format was."""
    load = load_of(asked(80.0, 9000, 300))
    costs = []
    for format_ in (SlotFormat.INT1, SlotFormat.INT2, SlotFormat.INT3, SlotFormat.INT4):
        advice = advice_on(replace(DELTAS, delta_format=format_), load, 800.0)
        assert advice is not None
        assert advice.variants == 2
        costs.append((advice.gpu_s_per_request_on_slots, advice.gpu_s_per_request_merged))
    on_slots, merged = zip(*costs, strict=True)
    assert list(on_slots) == sorted(on_slots)
    assert on_slots[0] < on_slots[-1]
    assert len(set(merged)) == 1


@pytest.mark.parametrize("format_", [SlotFormat.INT1, SlotFormat.INT2, SlotFormat.INT4])
def test_deltas_without_load_or_alike_stay_on_slots(format_: SlotFormat) -> None:
    alike = VariantShares((1 / 400,) * 400)
    for load, rate_per_s in ((load_of(asked(80.0, 9000, 300)), 1e-4), (alike, 1.0)):
        assert advice_on(replace(DELTAS, delta_format=format_), load, rate_per_s) is None


@settings(max_examples=25, deadline=None)
@given(
    hot=st.floats(0.05, 0.95),
    rate_per_s=st.floats(0.1, 300.0),
    format_=st.sampled_from([SlotFormat.INT1, SlotFormat.INT2, SlotFormat.INT4]),
    slots=st.sampled_from([1, 4, 8]),
)
def test_a_delta_is_merged_only_where_that_costs_a_tenth_less(
    hot: float, rate_per_s: float, format_: SlotFormat, slots: int
) -> None:
    load = VariantShares((hot, *[(1 - hot) / 19] * 19))
    found = advice_on(replace(DELTAS, delta_format=format_, adapter_slots=slots), load, rate_per_s)
    if found is not None and found.gpus_held_on_slots is not None:
        assert found.gpus_held_merged <= 0.9 * found.gpus_held_on_slots


@pytest.mark.parametrize(
    ("demand", "given"),
    [
        pytest.param(None, {}, id="gateway-away"),
        pytest.param(asked(None, 8000), {}, id="counted-too-short"),
        pytest.param(asked(0.0), {}, id="no-requests"),
        pytest.param(asked(80.0, base=9600), {}, id="base-alone"),
        pytest.param(asked(20.0, *[120] * 20), {}, id="alike"),
        pytest.param(asked(80.0, 9600), {"profiled": False}, id="no-profile"),
        pytest.param(asked(80.0, 9600), {"engine": "torch"}, id="engine-not-timed"),
    ],
)
def test_no_advice_is_given_where_it_is_not_known_or_not_cheaper(
    demand: VariantDemand | None, given: dict[str, Any]
) -> None:
    assert advisor(demand, TRAFFIC, **given).of(VARIANT) is None


def test_a_variant_that_nothing_serves_has_no_advice() -> None:
    assert advisor(asked(80.0, 9600), TRAFFIC).of(replace(VARIANT, deployments=())) is None


def test_a_deployment_that_has_gone_has_no_advice() -> None:
    found = advisor(asked(80.0, 9600), TRAFFIC)

    def gone(name: str) -> None:
        raise NotFoundError(name)

    found._store = SimpleNamespace(deployment=gone)  # type: ignore[assignment]
    assert found.of(VARIANT) is None


class TestCosts:
    """``iserve variant add`` says what a variant takes on the deployments that serve it."""

    HELD = replace(VARIANT, size_bytes=26 * 2**20, disk_bytes=20 * 2**20)

    def costs(self, **given: Any) -> VariantCostDocument:
        (found,) = advisor(None, TRAFFIC, **given).costs(self.HELD)
        assert from_json(to_json(found), VariantCostDocument) == found
        return found

    def test_they_are_those_that_plans_count(self, golden: Golden) -> None:
        found, spec = self.costs(), source_of().spec
        (worker,) = {one.config for one in workers_of(planned(HARDWARE, TRAFFIC), TRAFFIC)}
        estimator = estimator_on(LLAMA, HARDWARE.gpu)
        law = variant_cost(estimator, spec, worker)
        assert law is not None
        assert found.step_s == law.step_s(found.requests, 1)
        assert found.slot_bytes == slot_bytes(spec, worker, spec.num_layers)
        assert found.load_s == law.load_s(self.HELD.size_bytes, 2 * self.HELD.num_modules)
        assert (found.host_bytes, found.disk_bytes) == (self.HELD.size_bytes, self.HELD.disk_bytes)
        assert found.load_stops_steps
        alone = replace(TRAFFIC.workload, batch=1)
        ttft_s = estimator.estimate(worker.without_slots, alone).ttft_s.value
        assert found.prompt_s == law.prompts_s(alone, ttft_s, 0.0, 1.0)
        golden("variant", found.text)

    def test_without_a_profile_the_prompt_is_not_known(self, golden: Golden) -> None:
        found = self.costs(profiled=False)
        assert found.prompt_s is None
        assert found.step_s == self.costs().step_s
        golden("variant", found.text)

    def test_without_a_law_no_time_is_known(self, golden: Golden) -> None:
        found = self.costs(engine="torch")
        assert (found.step_s, found.prompt_s, found.load_s) == (None, None, None)
        assert found.host_bytes == 0  # loaded adapters are on the device
        assert not found.load_stops_steps
        golden("variant", found.text)

    @pytest.mark.parametrize("format_", [SlotFormat.INT1, SlotFormat.INT4])
    def test_they_are_those_of_the_variants_kind(self, format_: SlotFormat, golden: Golden) -> None:
        """Slots with a format for deltas hold adapters too, whose steps and loads are those of adapters."""
        mixed = replace(DELTAS, delta_format=format_)
        adapters = replace(DELTAS, delta_format=SlotFormat.NONE)
        on_mixed, on_own = self.of_kind(VARIANT, mixed), self.of_kind(VARIANT, adapters)
        assert on_mixed.slot_bytes > on_own.slot_bytes
        assert replace(on_mixed, slot_bytes=0, text="") == replace(on_own, slot_bytes=0, text="")
        assert on_mixed.load_stops_steps
        delta = self.of_kind(replace(VARIANT, rank=0), mixed)
        assert not delta.load_stops_steps
        assert delta.step_s != on_mixed.step_s
        assert delta.slot_bytes == on_mixed.slot_bytes
        if format_ is SlotFormat.INT4:
            golden("variant", on_mixed.text)

    def test_settings_of_adapters_change_them(self, golden: Golden) -> None:
        """Our kernels compute them faster, and the thread that loads them stops no step; of deltas all stays."""
        mixed = replace(DELTAS, adapter_rank=16)
        plain = self.of_kind(VARIANT, mixed)
        found = self.of_kind(VARIANT, mixed, adapter_kernels=True, adapters_aside=True)
        assert plain.step_s is not None
        assert found.step_s is not None
        assert found.step_s.value < plain.step_s.value
        assert (plain.load_stops_steps, found.load_stops_steps) == (True, False)
        golden("variant", found.text)
        assert self.of_kind(VARIANT, replace(mixed, tp=2), adapters_aside=True).load_stops_steps
        delta = replace(VARIANT, rank=0)
        assert self.of_kind(delta, mixed, adapter_kernels=True, adapters_aside=True) == self.of_kind(delta, mixed)

    @staticmethod
    def of_kind(variant: VariantDocument, config: DeploymentConfig, **table: bool) -> VariantCostDocument:
        held = replace(variant, size_bytes=88 << 20, disk_bytes=80 << 20)
        found = replace(get_engine("vllm").capabilities(), adapter_kernels=False, adapters_aside=False)
        work = replace(TRAFFIC.workload, batch=32)
        spec = source_of().spec
        return variant_cost_document(held, "chat", spec, config, work, None, replace(found, **table))  # type: ignore[arg-type]

    def test_each_deployment_has_its_own(self) -> None:
        both = replace(self.HELD, deployments=("chat", "chat-2"))
        assert [one.deployment for one in advisor(None, TRAFFIC).costs(both)] == ["chat", "chat-2"]
        assert advisor(None, TRAFFIC).costs(replace(self.HELD, deployments=())) == ()

    def test_a_deployment_without_slots_has_none(self) -> None:
        """The variant's own, of its merged checkpoint."""
        assert advisor(None, TRAFFIC, has_slots=False).costs(self.HELD) == ()

    def test_one_that_has_gone_has_none(self) -> None:
        found = advisor(None, TRAFFIC)

        def gone(name: str) -> None:
            raise NotFoundError(name)

        found._store = SimpleNamespace(deployment=gone)  # type: ignore[assignment]
        assert found.costs(self.HELD) == ()
