"""Plans for variants: their slots in the promise, in the launch and in what is said about them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from daemon.engines.registry import get_engine
from daemon.worker_spec import WorkerSpec
from fingerprint import load_time
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.estimators import adapter_slots
from fingerprint.estimators.adapter_slots import requests_within
from fingerprint.estimators.variant_loads import WithVariantLoads
from fingerprint.lora import reserved_bytes, slot_bytes
from fingerprint.lora.slot_bytes import adapter_bytes
from fingerprint.model_spec import ModelSpec
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment, too_few_slots
from iserve.planning.document import PlanDocument
from iserve.planning.pipeline import (
    PlanOptions,
    datasheet_estimator,
    make_plan,
    slots_of,
    space,
    variant_load,
    with_traffic,
)
from iserve.planning.verdict_text import plan_lines
from iserve.planning.words import gib
from iserve.planning.worker_launch import PlannedDeployment
from planner.adapter_slots import MOST_WITHOUT, VariantLoad
from planner.hot_variants import served_cost
from planner.intent import MOST_BASE_SHARE, Intent, IntentKind, Quality, Slo, Traffic
from tests.golden_words import Golden
from tests.iserve.joint_plans import (
    LLAMA,
    chosen,
    estimator_on,
    flags_of,
    hardware_on,
    planned,
    source_of,
    spec_of,
    wish,
    workers_of,
)

SPEC = spec_of(LLAMA)
WHOLE = SPEC.num_layers
PLAIN = DeploymentConfig(engine="tensorrt-llm")


def varied(traffic: Traffic, kind: IntentKind = IntentKind.MIN_COST, **options: object) -> PlanOptions:
    plain = wish(kind, **options)  # type: ignore[arg-type]
    return replace(plain, intent=replace(plain.intent, quality=Quality.EXACT, traffic=traffic))


def config_of(found: PlannedDeployment) -> DeploymentConfig:
    assert found.best is not None
    return found.best.config


def said(found: PlannedDeployment) -> str:
    """Return the sentence on slots of a plan."""
    (note,) = (one for one in found.document.notes if one.partition(" ")[2].startswith("adapter slots of rank"))
    return note


def held_bytes(worker: WorkerSpec, flags: dict[str, str], found: PlannedDeployment) -> tuple[int, int]:
    """Return what a GPU of ``worker`` holds without its KV cache, and the cache."""
    assert found.capacity is not None
    spec: ModelSpec = SPEC
    plain = estimator_on(LLAMA, hardware_on("h200:1").gpu)
    memory = plain.estimate(worker.config.without_slots, found.capacity.workload).memory
    layers = tuple(stage.num_layers for stage in worker.stages)
    rest = max(stage.total_bytes - stage.kv_bytes for stage in memory.stages(layers))
    return rest + reserved_bytes(spec, worker.config, max(layers)), int(flags["kv-cache-memory-bytes"])


@pytest.mark.parametrize(
    ("variants", "rank", "drafts"), [(1, 8, 0.0), (20, 16, 0.0), (1000, 64, 0.0), (20, 16, 0.8)]
)
def test_workers_are_started_with_the_slots_of_the_plan_and_fit_its_promise(
    variants: int, rank: int, drafts: float
) -> None:
    """Weights and steps without slots, and all slots by their formula, and the KV cache to the byte."""
    hardware = hardware_on("h200:1")
    options = varied(Traffic(variants=variants, variant_rank=rank, draft_acceptance=drafts))
    found = planned(hardware, options)
    config = config_of(found)
    assert config.adapter_slots
    assert config.adapter_rank == rank
    for worker in workers_of(found, options):
        assert worker.config == config
        flags = flags_of(worker, hardware, SPEC)
        assert int(flags["max-loras"]) == config.adapter_slots
        assert int(flags["max-lora-rank"]) == config.adapter_rank
        assert int(flags["max-cpu-loras"]) == config.loaded_adapters
        assert sum(held_bytes(worker, flags, found)) <= worker.limits.memory_bytes_per_device


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_a_plan_for_variants_promises_what_slots_take_and_no_more_kv_cache(engine: str) -> None:
    """Equal requests of one batch, on each configuration."""
    hardware, table = hardware_on("h200:1"), replace(get_engine(engine).capabilities(), unavailable=None)
    estimator = datasheet_estimator(SPEC, hardware.gpu, [table])
    alone, with_variants = (
        {
            one.config.without_slots: one
            for one in space(SPEC, hardware.gpu, 1, estimator, [table], varied(traffic, more_requests=False))
            if one.estimate is not None
        }
        for traffic in (Traffic(), Traffic(variants=50, variant_rank=32))
    )
    assert alone.keys() == with_variants.keys()
    for config, one in with_variants.items():
        plain = alone[config].estimate
        assert one.estimate is not None
        assert plain is not None
        more = one.estimate.memory.per_gpu_bytes((WHOLE,)) - plain.memory.per_gpu_bytes((WHOLE,))
        assert more == pytest.approx(reserved_bytes(SPEC, one.config, WHOLE), rel=1e-6)
        assert one.estimate.memory.layer_kv_bytes == plain.memory.layer_kv_bytes


@pytest.mark.parametrize(
    ("gpus", "traffic", "is_bounded"),
    [
        pytest.param("h200:1", Traffic(variants=20), False, id="all-that-are-needed"),
        pytest.param("h200:1", Traffic(variants=1000, variant_skew=0.0), False, id="all-alike"),
        pytest.param(
            "a6000:1", Traffic(variants=10_000, variant_rank=256, variant_skew=0.0), True, id="large-ones"
        ),
        pytest.param("a6000:1", Traffic(variants=50, variant_rank=64, variant_skew=1.5), True, id="popular-ones"),
        pytest.param("h200:1", Traffic(variants=20, base_share=0.5), False, id="base"),
    ],
)
def test_a_plan_says_its_own_slots_their_bytes_and_the_share_that_waits(
    gpus: str, traffic: Traffic, is_bounded: bool, golden: Golden
) -> None:
    """The share is that of the slots of the plan, of which a tenth of a GPU may hold fewer than are needed."""
    options = varied(traffic)
    found = planned(hardware_on(gpus), options)
    config, need = config_of(found), slots_of(options)
    assert need is not None
    load = VariantLoad(traffic.variants, traffic.variant_skew, traffic.base_share)
    share = float(load.without_slot(32)[config.adapter_slots])
    note = said(found)
    assert note.startswith(f"{config.adapter_slots} adapter slots of")
    assert f" rank {config.adapter_rank}," in note
    golden("variant", note)
    assert gib(slot_bytes(SPEC, config, WHOLE)) in note
    assert f"{share:.0%} of the variants" in note
    assert (config.adapter_slots < need.slots) == is_bounded == (share > MOST_WITHOUT)
    assert bool(re.search(rf"; {need.slots} take more than a tenth of a GPU$", note)) == is_bounded


def test_a_plan_with_requests_for_the_base_takes_less_time_and_says_what_is_not_measured(golden: Golden) -> None:
    """The configuration is the one of the plan without them, so that times compare."""
    hardware, table = hardware_on("h200:1"), replace(get_engine("vllm").capabilities(), unavailable=None)
    estimator = datasheet_estimator(SPEC, hardware.gpu, [table])
    config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16)
    times_s, notes = [], []
    for base_share in (0.0, 0.5, 0.9):
        options = varied(Traffic(variants=50, base_share=base_share))
        estimate = with_traffic(estimator, SPEC, options).estimate(config, options.workload)
        times_s.append(estimate.tpot_s.value)
        notes.append(set(planned(hardware, options).document.notes))
    assert times_s == sorted(times_s, reverse=True)
    assert len(set(times_s)) == 3
    golden("variant", notes[1] - notes[0])


@pytest.mark.parametrize(
    ("traffic", "rate", "is_advised"),
    [
        pytest.param(Traffic(variants=40, variant_skew=2.0), 80.0, True, id="hot"),
        pytest.param(Traffic(variants=1, variant_skew=2.0), 40.0, True, id="only-one"),
        pytest.param(Traffic(variants=200, variant_skew=0.0), 20.0, False, id="alike"),
        pytest.param(Traffic(variants=40, variant_skew=2.0), 0.1, False, id="rare"),
        pytest.param(Traffic(variants=40, variant_skew=2.0), None, False, id="no-rate"),
    ],
)
def test_a_plan_at_a_rate_advises_to_merge_hot_variants(
    traffic: Traffic, rate: float | None, is_advised: bool, golden: Golden
) -> None:
    """The cost on slots of the advice is that of the plan's own configuration."""
    hardware, options = hardware_on("h200:8"), varied(traffic, rate=rate)
    found = planned(hardware, options)
    advice = found.document.merge_advice
    assert (advice is not None) == is_advised
    if advice is None:
        assert not any("iserve variant merge" in note for note in found.document.notes)
        return
    assert advice.text in found.document.notes
    golden("variant", advice.text)
    assert advice.rate_per_s == rate
    assert advice.gpus_held_on_slots is not None
    assert advice.gpu_s_per_request_on_slots is not None
    assert advice.gpus_held_merged <= 0.9 * advice.gpus_held_on_slots
    assert advice.gpu_s_per_request_merged == pytest.approx(advice.gpus_held_merged / advice.rate_per_s)
    assert f"{1 - advice.gpu_s_per_request_merged / advice.gpu_s_per_request_on_slots:.0%} less" in advice.text
    assert not re.search(r"\d GPUs", advice.text), "the plan holds more of them by its own law"
    assert advice.request_share == pytest.approx(
        VariantLoad(traffic.variants, traffic.variant_skew).shares[: advice.variants].sum()
    )
    joint = found.document.joint
    assert joint is not None
    on_slots = served_cost(joint.service, advice.rate_per_s, hardware.gpu.memory_bytes)
    assert on_slots is not None
    assert on_slots.gpus_held == pytest.approx(advice.gpus_held_on_slots, rel=0.05)


def test_a_plan_for_the_fewest_requests_of_variants_that_may_be_given_succeeds() -> None:
    """Shares that are left of the popular ones' merge are lost next to 1."""
    traffic = Traffic(variants=40, variant_skew=10.0, base_share=MOST_BASE_SHARE)
    assert planned(hardware_on("h200:1"), varied(traffic, rate=20.0)).best is not None


def planned_on_tensorrt_llm(*, has_adapters: bool) -> PlannedDeployment:
    table = replace(get_engine("tensorrt-llm").capabilities(), adapters=has_adapters)
    hardware, options = hardware_on("h200:1"), varied(Traffic(variants=20))
    estimator, here = datasheet_estimator(SPEC, hardware.gpu, [table]), DeployableDocument(here=True)
    given = (source_of(), hardware, estimator, table, options)
    return planned_deployment(*given, devices=(), deployable_of=lambda *_: here)


def test_an_engine_without_slots_plans_none_and_says_nothing_of_them(golden: Golden) -> None:
    found = planned_on_tensorrt_llm(has_adapters=False)
    assert found.best is None
    assert not any("adapter slots" in note for note in found.document.notes)
    (plain,) = (one for one in found.document.candidates if one.config.without_slots == PLAIN)
    golden("variant", plain.reason or "")


def test_slots_that_were_never_run_are_planned_and_said_to_be(golden: Golden) -> None:
    found = planned_on_tensorrt_llm(has_adapters=True)
    assert found.best is not None
    assert found.best.config.adapter_slots
    (chosen,) = (one for one in found.document.candidates if one.config == found.best.config)
    notes = (*found.document.notes, *chosen.conditions)
    golden("variant", "\n".join(note for note in notes if "dapter" in note))


@pytest.mark.parametrize(
    ("traffic", "rate", "stays"),
    [
        pytest.param(Traffic(variants=1000, variant_rank=64), 4.0, False, id="some-missing"),
        pytest.param(Traffic(variants=1000, variant_rank=64), None, False, id="no-rate"),
        pytest.param(Traffic(variants=20, variant_rank=64), 4.0, True, id="all-stay"),
    ],
)
def test_a_plan_says_which_share_of_a_workers_time_loads_take(
    traffic: Traffic, rate: float | None, stays: bool, golden: Golden
) -> None:
    options = varied(traffic, rate=rate)
    found = planned(hardware_on("h200:8"), options)
    (note,) = (one for one in found.document.notes if one.startswith("loads: "))
    golden("variant", note)
    config, load = config_of(found), VariantLoad(traffic.variants, traffic.variant_skew)
    missed = load.missed(config.loaded_adapters)
    assert (missed == 0) == stays
    assert (f"{missed:.1%} of the requests" in note) != stays
    assert ("of its time" in note) == (rate is not None and not stays)


@pytest.mark.parametrize("kind", [IntentKind.MIN_COST, IntentKind.MIN_LATENCY])
@pytest.mark.parametrize(("gpus", "name", "pp"), [("a6000:6", "Qwen/Qwen3-32B", 2), ("h200:2", LLAMA, 1)])
def test_a_joint_plan_says_which_loads_its_mean_e2e_counts(
    gpus: str, name: str, pp: int, kind: IntentKind, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """All loads of pipelines: were none spared, the mean of two replicas would be the same to the bit."""
    options = varied(Traffic(variants=1000, variant_rank=64), kind, rate=0.4, replicas=2, more_replicas=False)
    hardware, means_s, notes = hardware_on(gpus), [], []
    for shares in (WithVariantLoads._shares_spared, lambda self, places: ()):
        monkeypatch.setattr(WithVariantLoads, "_shares_spared", shares)
        found = planned(hardware, options, name)
        assert config_of(found).pp == pp
        assert found.document.joint is not None
        means_s.append(found.document.joint.forecast.e2e_s or 0.0)
        notes += [one for one in found.document.notes if one.startswith("loads: ")]
    assert 0 < means_s[0] <= means_s[1]
    note = notes[0]
    golden("variant", note)
    assert (means_s[0] == means_s[1]) == ("counts all loads" in note) == (pp > 1)
    assert ("counts a share" in note) == (pp == 1)


def test_loads_change_no_plan_without_variants_and_make_those_with_missing_ones_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit: a load is made to take a hundred seconds."""
    hardware = hardware_on("h200:8")
    cases = {
        "none": varied(Traffic(), rate=4.0),
        "no rate": varied(Traffic(), IntentKind.MIN_LATENCY),
        "missing": varied(Traffic(variants=1000, variant_rank=64), rate=4.0),
    }
    before = {name: planned(hardware, options).document for name, options in cases.items()}
    monkeypatch.setattr(load_time, "_LOAD_S", 100.0)
    after = {name: planned(hardware, options).document for name, options in cases.items()}
    assert to_json(after["none"]) == to_json(before["none"])
    assert to_json(after["no rate"]) == to_json(before["no rate"])
    assert to_json(after["missing"]) != to_json(before["missing"])
    chosen = [
        next(one.estimate for one in found["missing"].candidates if one.estimate is not None)
        for found in (before, after)
    ]
    assert chosen[1].ttft_s.value > chosen[0].ttft_s.value + 10


def without_spared(found: PlanDocument) -> bytes:
    """Return the document without the loads that more replicas would be spared."""
    assert found.joint is not None
    service = replace(found.joint.service, spared_loads_s=())
    return to_json(replace(found, joint=replace(found.joint, service=service)))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_joint", [True, False])
def test_a_plan_of_one_replica_is_spared_no_load_to_the_bit_and_one_of_two_is_faster(
    is_joint: bool, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their replicas have a GPU each."""
    hardware, found = hardware_on(f"h200:{replicas}"), []
    options = varied(Traffic(variants=1000, variant_rank=64), IntentKind.MIN_LATENCY, rate=0.5 * replicas)
    options = replace(options, more_requests=is_joint, replicas=replicas)
    for is_spared in (True, False):
        if not is_spared:
            monkeypatch.setattr(WithVariantLoads, "_shares_spared", lambda self, places: ())
        found.append(planned(hardware, options).document)
    with_spared, without = found
    assert (without_spared(with_spared) == without_spared(without)) == (replicas == 1)
    means_s = [one.joint.forecast.e2e_s or 0.0 for one in found if one.joint is not None]
    assert 0 < means_s[0] <= means_s[1]
    assert (means_s[0] < 0.99 * means_s[1]) == (replicas == 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_times_of_a_plan_by_one_batch_are_spared_loads_where_there_are_several_replicas(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, hardware = get_engine("vllm").capabilities(), hardware_on("h200:2")
    options = varied(Traffic(variants=1000, variant_rank=64), IntentKind.MIN_LATENCY, rate=0.5 * replicas)
    options = replace(options, more_requests=False, replicas=replicas, workload=Workload(16, 512, 128))
    estimator, means_s = datasheet_estimator(SPEC, hardware.gpu, [table]), []
    for is_spared in (True, False):
        if not is_spared:
            monkeypatch.setattr(WithVariantLoads, "_shares_spared", lambda self, places: ())
        plan = make_plan(SPEC, hardware, estimator, [replace(table, unavailable=None)], options)
        means_s.append([one.objective or 0.0 for one in plan.candidates if one.feasible])
    assert means_s[0]
    assert (means_s[0] == means_s[1]) == (replicas == 1)
    assert means_s[0] <= means_s[1]


class AllLoaded(VariantLoad):
    """Variants that all stay loaded."""

    def missed(self, places: int) -> float:
        return 0.0


@pytest.mark.parametrize("hits", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("input_tokens", [1, 512, 32_000])
@pytest.mark.parametrize("acceptance", [0.0, 0.5])
def test_a_load_takes_its_time_however_much_of_a_prompt_is_cached(
    hits: float, input_tokens: int, acceptance: float
) -> None:
    traffic = Traffic(variants=1000, variant_rank=64, prefix_hits=hits, draft_acceptance=acceptance)
    table = get_engine("vllm").capabilities()
    plain = datasheet_estimator(SPEC, hardware_on("h200:1").gpu, [table])
    config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=64)
    load, work = VariantLoad(1000, 1.0), Workload(4, input_tokens, 64)
    found, none = (
        with_traffic(plain, SPEC, varied(traffic), one).estimate(config, work).ttft_s
        for one in (load, AllLoaded(1000, 1.0))
    )
    load_s = adapter_slots.load_s(adapter_bytes(SPEC, 64))
    assert found.value - none.value == pytest.approx(4 * load.missed(32) * load_s)
    assert found.low == none.low


@pytest.mark.parametrize(("rate", "slots"), [(5.5, 16), (1.0, None), (50.0, None)])
def test_it_is_said_with_how_many_slots_a_rate_is_served(rate: float, slots: int | None, golden: Golden) -> None:
    """8 slots for 1,000 variants: the rate is served with 16; with 8; and with none."""
    options = varied(Traffic(variants=1_000, variant_rank=16), IntentKind.MIN_LATENCY, rate=rate)
    options = replace(options, adapter_slots=8, workload=replace(options.workload, batch=64))
    hardware = hardware_on("h200:1")
    found = planned(hardware, options)
    notes = [note for note in found.document.notes if "not served with" in note]
    assert (found.best is not None) == (rate == 1.0)
    if slots is None:
        assert not notes
        return
    golden("variant", notes)
    assert planned(hardware, replace(options, adapter_slots=slots)).best is not None


@pytest.mark.parametrize(
    ("slots", "base_share", "most"), [(8, 0.0, 64), (8, 0.0, 8), (16, 0.92, 256), (16, 0.92, 64)]
)
def test_slots_are_said_to_bound_only_what_they_do(
    slots: int, base_share: float, most: int, golden: Golden
) -> None:
    """8.9 and 242 requests find slots; each is said where it is fewer than a replica would run."""
    traffic = Traffic(variants=1_000, variant_rank=16, base_share=base_share)
    options = varied(traffic, IntentKind.MIN_LATENCY, rate=50.0)
    options = replace(options, adapter_slots=slots, workload=replace(options.workload, batch=64))
    hardware = hardware_on("h200:1")
    (refused, _), served = chosen(hardware, options), chosen(hardware, replace(options, intent=Intent()))
    assert refused.best is None
    assert served[0].best is not None
    said = too_few_slots(refused, options, most, lambda more: served)
    within = requests_within(variant_load(traffic).distinct, slots)
    assert within is not None
    assert bool(said) == (within < most)
    if said:
        golden("variant", said)


@pytest.mark.parametrize(
    ("slots", "batch", "rate"), [(8, 64, None), (1, 64, None), (8, 64, 1.0), (8, 8, None), (64, 64, None)]
)
def test_the_first_screen_says_how_many_requests_find_slots(
    slots: int, batch: int, rate: float | None, golden: Golden
) -> None:
    """8.9 find one of 8 slots, and 102 of 64; of a smaller batch all requests run."""
    options = varied(Traffic(variants=1_000, variant_rank=16), IntentKind.MIN_LATENCY, rate=rate)
    options = replace(options, adapter_slots=slots, workload=replace(options.workload, batch=batch))
    options = replace(options, intent=replace(options.intent, slo=Slo(e2e_s=100.0)))
    options = replace(options, replicas=2, more_requests=False)
    document = planned(hardware_on("h200:2"), options).document
    within = requests_within(variant_load(options.intent.traffic).distinct, slots)
    assert within is not None
    assert document.verdict is not None
    assert document.verdict.figures is not None
    assert document.verdict.figures.requests_at_once == min(batch, within)
    lines = dict(plan_lines(document))
    said = [lines["At this load"], lines["Serves"], lines[""]]
    of_one = dict(plan_lines(replace(document, joint=None)))["At this load"]
    bounded = [", of which" in line for line in (lines["Serves"], of_one)]
    assert bounded == [within < batch, within < batch]
    golden("variant", [*said, of_one])


@pytest.mark.parametrize(("rate", "rank"), [(0.2, 0), (1.0, 0), (None, 0), (0.2, 16)])
def test_it_is_said_how_busy_loads_next_to_the_steps_are(rate: float | None, rank: int, golden: Golden) -> None:
    """64 int2 deltas, of which 8 stay loaded: 7 of 8 requests need a load; and adapters in the same slots."""
    traffic = Traffic(variants=64, variant_rank=rank, variant_skew=0.0, delta_format=SlotFormat.INT2)
    options = replace(varied(traffic, IntentKind.MIN_LATENCY, rate=rate), adapter_slots=8)
    found = planned(hardware_on("h200:1"), options)
    assert found.best is not None
    golden("variant", [note for note in found.document.notes if "next to the steps" in note])


@pytest.mark.parametrize("policy", ["joint", "hybrid"])
def test_a_forecast_at_a_rate_counts_what_requests_wait_for_loads_next_to_the_steps(policy: str) -> None:
    """Compare 64 even deltas, of which 8 stay loaded, with 8: the mean request waits for 0.88 x 2.3 s."""
    few, every = (
        planned(
            hardware_on("h200:1"),
            replace(varied(traffic, IntentKind.MIN_LATENCY, rate=0.2), policy=policy, adapter_slots=8),
        ).document
        for traffic in (
            Traffic(variants=number, variant_rank=0, variant_skew=0.0, delta_format=SlotFormat.INT2)
            for number in (64, 8)
        )
    )
    assert few.load_forecast is not None
    assert few.load_forecast.load_wait is not None
    waits = few.load_forecast.load_wait
    assert (waits.share, waits.mean_s) == pytest.approx((0.88, 2.3), rel=0.02)
    assert every.load_forecast is not None
    assert every.load_forecast.load_wait is None
    means = [
        one.joint.forecast.e2e_s if one.joint else one.candidates[one.chosen or 0].objective
        for one in (few, every)
    ]
    assert means[0] is not None
    assert means[1] is not None
    assert means[0] - means[1] == pytest.approx(waits.share * waits.mean_s, rel=0.1)
    late_s, early_s = few.load_forecast.ttft.quantile_s, every.load_forecast.ttft.quantile_s
    assert late_s is not None
    assert early_s is not None
    assert late_s - early_s > 1.8


@pytest.mark.parametrize("variants", [8, 1_000])
def test_a_joint_plan_is_read_back(variants: int) -> None:
    """A slot for each variant, where they bound nothing, and fewer."""
    found = planned(hardware_on("h200:2"), varied(Traffic(variants=variants, variant_skew=0.0), rate=1.0))
    assert found.document.joint is not None
    assert (found.document.joint.service.most_at_once is None) == (variants == 8)
    assert from_json(to_json(found.document), PlanDocument) == found.document
