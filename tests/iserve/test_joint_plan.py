"""Joint plans by datasheet: what they promise, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.engines.registry import get_engine
from fingerprint.capability import EngineCapabilities
from fingerprint.config import Workload
from fingerprint.estimates import Estimator
from fingerprint.gpus import gpu_spec
from iserve.cli.render import print_plan
from iserve.evaluation.truth import true_links
from iserve.evaluation.world import Truth
from iserve.planning.joint_plan import chosen_plan
from iserve.planning.joint_promise import misses_too_many
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
    datasheet_estimator,
    hypothetical_hardware,
    make_plan,
    with_more,
)
from iserve.planning.verdict_text import plan_lines
from placement.policies import POLICIES
from placement.types import ClusterSnapshot
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import LimitKind, Plan, Relaxation
from tests.fingerprint.synthetic_machine import CPU
from tests.golden_words import Golden
from tests.iserve.joint_plans import (
    GROWING,
    KINDS,
    LLAMA,
    MODELS,
    VLLM,
    choice_of,
    chosen,
    estimator_on,
    fits_what_is_promised,
    flags_of,
    hardware_on,
    held_by,
    planned,
    spec_of,
    wish,
    workers_of,
)

MIXTURES = (
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V2-Lite",
    "Qwen/Qwen3-235B-A22B",
    "zai-org/GLM-4.5-Air",
)

# --- GPUs of mixtures


@pytest.mark.parametrize("name", MIXTURES)
def test_a_cheap_plan_of_a_mixture_holds_the_fewest_gpus_at_any_number_of_them(name: str) -> None:
    """Hold no further GPUs for 2.3 times the time of a request alone, which no plan keeps."""
    fewest = {count: choice_of(hardware_on(f"h200:{count}"), wish(), name) for count in (2, 4, 8)}
    least = spec_of(name).num_params * 1.1 > gpu_spec("h200").memory_bytes  # in fp8
    assert {choice.config.num_gpus for choice in fewest.values()} == {2 if least else 1}
    assert {len(choice.placements) for choice in fewest.values()} == {1}


@pytest.mark.parametrize("name", MIXTURES[:4])
def test_a_cheap_plan_of_a_mixture_takes_more_gpus_for_a_rate_that_needs_them(name: str) -> None:
    hardware = hardware_on("h200:8")
    alone = choice_of(hardware, wish(rate=1.0), name)
    assert (alone.config.num_gpus, len(alone.placements)) == (1, 1)
    most = 1.5 * alone.service.requests_per_s(alone.service.knee_batch)
    loaded = choice_of(hardware, wish(rate=most), name)
    assert loaded.config.num_gpus * len(loaded.placements) > 1


# --- memory


@pytest.mark.parametrize("taken", [0.0, 0.5])
@pytest.mark.parametrize("gpus", ["h200:4", "a6000:8", "h100:1"])
@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)
def test_what_vllm_is_started_with_fits_what_is_promised(name: str, gpus: str, taken: float) -> None:
    """Weights, the largest step, and the KV cache to the byte."""
    hardware = hardware_on(gpus, taken=taken)
    for options in (wish(), wish(IntentKind.MIN_LATENCY, 3.0)):
        assert fits_what_is_promised(name, hardware, options)


@pytest.mark.parametrize("taken", [0.0, 0.5])
@pytest.mark.parametrize("gpus", ["a6000:8", "h100:1"])
@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)
def test_what_vllm_is_started_with_for_long_requests_fits_what_is_promised(
    name: str, gpus: str, taken: float
) -> None:
    """Prompts are longer than the windows of a model that has some."""
    fits_what_is_promised(name, hardware_on(gpus, taken=taken), wish(workload=Workload(1, 6000, 1000)))


@pytest.mark.parametrize(
    "options",
    [
        wish(more_requests=False),
        wish(longer_requests=False),
        wish(more_requests=False, longer_requests=False, workload=Workload(16, 2000, 300)),
        wish(IntentKind.MIN_LATENCY, expect=3),
        wish(IntentKind.MIN_LATENCY, rate=20.0),
        wish(replicas=2, more_replicas=False),
    ],
    ids=["batch", "context", "both", "expect", "fast", "two"],
)
@pytest.mark.parametrize("name", [LLAMA, MODELS["states"], MODELS["windows"]], ids=["dense", "states", "windows"])
def test_what_vllm_is_started_with_under_other_options_fits_what_is_promised(
    name: str, options: PlanOptions
) -> None:
    assert fits_what_is_promised(name, hardware_on("h200:4", taken=0.5), options)


def test_sizes_that_are_given_are_those_of_the_launch() -> None:
    hardware, options = hardware_on("h200:4"), replace(wish(workload=Workload(16, 2000, 300)), more_requests=False)
    options = replace(options, longer_requests=False)
    (worker, *_) = workers_of(planned(hardware, options), options)
    flags = flags_of(worker, hardware, spec_of(LLAMA))
    assert (flags["max-num-seqs"], flags["max-model-len"]) == ("16", "2300")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_is_full_takes_no_room_from_the_rest(kind: IntentKind) -> None:
    hardware = hardware_on("h200:4")
    first, *rest = hardware.snapshot.gpus
    full = replace(hardware, snapshot=ClusterSnapshot((replace(first, free_bytes=0), *rest)))
    choice = choice_of(full, wish(kind))
    assert first.device_id not in held_by(choice)


# --- rates


def test_a_rate_that_the_gpus_serve_is_feasible() -> None:
    for kind in KINDS:
        plan, choice = chosen(hardware_on("h200:4"), wish(kind, 12.0))
        assert choice is not None
        assert plan.best is not None
        assert choice.forecast.utilisation < 1
        assert choice.rate_per_s == 12.0
        assert plan.served is not None


def relaxation(plan: Plan, limit: LimitKind) -> Relaxation:
    return next(one for one in plan.why_not.relaxations if one.limit is limit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_is_too_high_is_refused_with_one_that_is_served(kind: IntentKind) -> None:
    hardware = hardware_on("h200:4")
    plan, choice = chosen(hardware, wish(kind, 10_000.0))
    assert (plan.best, choice) == (None, None)
    advice = relaxation(plan, LimitKind.RATE)
    assert 12.0 < advice.needed < 10_000.0
    assert choice_of(hardware, wish(kind, advice.needed)).rate_per_s == advice.needed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", ["h200:1", "a6000:2"])
def test_the_rate_as_it_is_advised_is_served(kind: IntentKind, gpus: str) -> None:
    """The option that the advice names has three digits."""
    plan, _ = chosen(hardware_on(gpus), wish(kind, 10_000.0))
    advised = float(relaxation(plan, LimitKind.RATE).text.split()[1])
    choice_of(hardware_on(gpus), wish(kind, advised))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", ["h200:4", "a6000:2"])
def test_the_highest_rate_is_that_of_the_best_plan(kind: IntentKind, gpus: str) -> None:
    """Rates that are higher than the advice by 5% are refused."""
    hardware = hardware_on(gpus)
    highest = relaxation(chosen(hardware, wish(kind, 10_000.0))[0], LimitKind.RATE).needed
    assert chosen(hardware, wish(kind, 1.05 * highest))[1] is None


@pytest.mark.parametrize("rate", [19.0, 22.0, 23.5])
def test_a_rate_that_one_intent_serves_is_refused_by_none(rate: float) -> None:
    """Two A6000 carry 23.8 requests/s as two replicas."""
    kinds = (*KINDS, IntentKind.MIN_GPU_HOURS)
    served = {kind: chosen(hardware_on("a6000:2"), wish(kind, rate))[1] is not None for kind in kinds}
    assert len(set(served.values())) == 1, served


@pytest.mark.parametrize(("kind", "rate"), [*zip(KINDS, (600.0, 330.0), strict=True)])
def test_a_rate_that_more_gpus_serve_is_refused_with_their_number(kind: IntentKind, rate: float) -> None:
    """Four H200s carry 314 requests/s."""
    hardware = hardware_on("h200:4")
    plan, choice = chosen(hardware, wish(kind, rate))
    assert (plan.best, choice) == (None, None)
    advice = relaxation(plan, LimitKind.GPUS)
    assert 4 < advice.needed <= 8
    wider = with_more(hardware, int(advice.needed) - 4)
    assert choice_of(wider, wish(kind, rate)).config == advice.config


@pytest.mark.parametrize(
    ("gpus", "rate", "name"),
    [
        pytest.param("a6000:1", 60.0, LLAMA, id="several-times-as-many"),
        pytest.param("h100:1", 20.0, "meta-llama/Llama-3.1-70B", id="split-over-gpus-of-which-there-is-one"),
        pytest.param("h100:4", 5.0, "meta-llama/Llama-3.1-405B", id="does-not-fit-without-the-rate"),
        pytest.param("a6000:3", 9.0, "meta-llama/Llama-3.1-70B", id="no-room-for-the-longest-request"),
    ],
)
def test_gpus_that_are_advised_with_a_rate_serve_it_and_one_less_does_not(
    gpus: str, rate: float, name: str
) -> None:
    kind = gpus.partition(":")[0]
    plan, choice = chosen(hardware_on(gpus), wish(rate=rate), name)
    assert (plan.best, choice) == (None, None)
    advice = relaxation(plan, LimitKind.GPUS)
    assert choice_of(hardware_on(f"{kind}:{advice.needed:.0f}"), wish(rate=rate), name).config == advice.config
    assert chosen(hardware_on(f"{kind}:{advice.needed - 1:.0f}"), wish(rate=rate), name)[1] is None


def test_advice_of_an_slo_at_a_rate_holds_at_that_rate() -> None:
    """A looser limit admits one request on one H100, and not 20 a second, which several serve in time."""
    name, slow = "meta-llama/Llama-3.1-70B", replace(wish(rate=20.0), longer_requests=False)
    intent = Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(e2e_s=4.0), rate_per_s=20.0)
    options = replace(slow, intent=intent)
    plan, choice = chosen(hardware_on("h100:1"), options, name)
    assert (plan.best, choice) == (None, None)
    assert LimitKind.E2E not in {one.limit for one in plan.why_not.relaxations}
    advice = relaxation(plan, LimitKind.GPUS)
    wide, found = chosen(hardware_on(f"h100:{advice.needed:.0f}"), options, name)
    assert found is not None
    assert wide.served is not None
    assert not misses_too_many(wide.served)


def test_no_more_free_memory_is_advised_than_a_gpu_has() -> None:
    """A quarter of 405B in fp8 is beyond any H100; what is in use on one may be freed."""
    plan, _ = chosen(hardware_on("h100:4"), wish(), "meta-llama/Llama-3.1-405B")
    assert {one.limit for one in plan.why_not.relaxations} == {LimitKind.GPUS}
    taken, _ = chosen(hardware_on("h100:1", taken=0.95), wish())
    needed = relaxation(taken, LimitKind.MEMORY).needed
    assert 0 < needed < 0.95 * gpu_spec("h100").memory_bytes


def test_a_rate_that_no_number_of_gpus_tried_serves_has_no_advice_to_add_some() -> None:
    plan, _ = chosen(hardware_on("h200:4"), wish(rate=10_000.0))
    assert LimitKind.GPUS not in {one.limit for one in plan.why_not.relaxations}


# --- replicas


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("rate", [None, 12.0])
@pytest.mark.parametrize("kind", [*KINDS, IntentKind.MIN_GPU_HOURS])
def test_a_number_of_replicas_that_is_given_is_kept_each_on_gpus_of_its_own(
    kind: IntentKind, rate: float | None, number: int
) -> None:
    choice = choice_of(hardware_on("h200:4"), wish(kind, rate, replicas=number, more_replicas=False))
    assert len(choice.replicas) == number
    assert set(held_by(choice).values()) == {1}
    assert len(held_by(choice)) == number * choice.config.num_gpus


@pytest.mark.parametrize("rate", [None, 0.5])
def test_more_replicas_than_gpus_are_refused(rate: float | None) -> None:
    plan, choice = chosen(hardware_on("h200:4"), wish(rate=rate, replicas=5, more_replicas=False))
    assert (plan.best, choice) == (None, None)


def test_as_many_replicas_as_the_rate_is_worth_where_none_are_given() -> None:
    few, many = (choice_of(hardware_on("h200:4"), wish(rate=rate)) for rate in (0.5, 100.0))
    assert len(few.replicas) == 1
    assert len(many.replicas) > 1


# --- latency-slo


def slo_wish(slo: Slo, rate: float | None) -> PlanOptions:
    return replace(GROWING, intent=Intent(kind=IntentKind.LATENCY_SLO, slo=slo, rate_per_s=rate))


@pytest.mark.parametrize(("rate", "times"), [(1.0, 3.0), (6.0, 2.0), (20.0, 3.0), (20.0, 6.0)])
def test_an_slo_at_a_rate_is_kept_with_no_more_gpus_than_the_fastest_plan_holds(rate: float, times: float) -> None:
    """``times``: the SLO over the time of a request alone on one GPU."""
    hardware = hardware_on("h200:4")
    fastest = choice_of(hardware, wish(IntentKind.MIN_LATENCY, rate))
    slo_s = times * choice_of(hardware, wish(rate=rate)).service.alone_s
    choice = choice_of(hardware, slo_wish(Slo(e2e_s=slo_s), rate))
    assert choice.forecast.e2e_s is not None
    assert choice.forecast.e2e_s <= slo_s
    assert choice.forecast.gpus_held <= fastest.forecast.gpus_held + 1e-9


@pytest.mark.parametrize(
    ("name", "gpus", "rate"), [("meta-llama/Llama-3.1-70B", "h200:8", 5.0), ("Qwen/Qwen3-30B-A3B", "h200:4", 30.0)]
)
def test_a_looser_slo_takes_no_more_gpus(name: str, gpus: str, rate: float) -> None:
    """The next is not the fastest at once where the cheapest plan misses it too often."""
    taken = []
    for limit_s in (10.0, 5.0, 3.0):
        _, choice = chosen(hardware_on(gpus), slo_wish(Slo(e2e_s=limit_s), rate), name)
        assert choice is not None
        taken.append(len(held_by(choice)))
    assert taken == sorted(taken)
    assert taken[0] == 2


def test_an_slo_that_no_plan_keeps_under_load_has_the_fastest_plan() -> None:
    """At 250 of the 314 requests/s that four H200s carry, a request takes three times as long as alone."""
    hardware, rate = hardware_on("h200:4"), 250.0
    fastest = choice_of(hardware, wish(IntentKind.MIN_LATENCY, rate))
    choice = choice_of(hardware, slo_wish(Slo(e2e_s=2.0 * fastest.service.alone_s), rate))
    assert choice.goal == "latency"
    assert (choice.config, choice.placements) == (fastest.config, fastest.placements)
    assert choice.forecast == fastest.forecast


@pytest.mark.parametrize(
    ("slo", "rate"), [(Slo(ttft_s=1.0), 6.0), (Slo(e2e_s=10.0), None), (Slo(tpot_s=0.1), 6.0)]
)
def test_an_slo_that_one_gpu_keeps_takes_one_gpu(slo: Slo, rate: float | None) -> None:
    choice = choice_of(hardware_on("h200:4"), slo_wish(slo, rate))
    assert choice.goal == "cost"
    assert [len(placement.device_ids) for placement in choice.placements] == [1]


def test_an_slo_that_more_requests_miss_than_may_is_planned_for_the_fastest_and_says_so(golden: Golden) -> None:
    """E2E within 1 s of 95% at 20 requests/s, by the roofline's wide interval, is not kept by any plan."""
    hardware = hardware_on("h200:4")
    options = slo_wish(Slo(ttft_s=0.2, e2e_s=1.0), 20.0)
    plan, choice = chosen(hardware, options)
    assert choice is not None
    assert choice.goal == "latency"
    assert plan.served is not None
    assert plan.served.miss_probability is not None
    assert plan.served.miss_probability > 0.05
    said = " ".join(text for _, text in plan_lines(planned(hardware, options).document))
    golden("controller", said)


def test_a_batch_that_is_given_has_room_and_a_larger_one_than_a_joint_plan_knows_is_ranked() -> None:
    hardware = hardware_on("h200:1")
    given = replace(wish(), workload=Workload(batch=64), more_requests=False, longer_requests=False)
    choice = choice_of(hardware, given)
    assert [(one.requests_at_once, one.kv_tokens >= 64 * 640) for one in choice.replicas] == [(64, True)]
    plan, none = chosen(hardware, replace(given, workload=Workload(batch=512)))
    assert none is None
    assert plan.best is not None


def test_gpus_that_are_no_aligned_neighbours_still_make_a_pair() -> None:
    hardware = hardware_on("h200:4")
    middle = tuple(gpu for gpu in hardware.snapshot.gpus if gpu.gpu_index in (1, 2))
    few = replace(hardware, snapshot=ClusterSnapshot(middle))
    exact = wish(IntentKind.MIN_COST)
    exact = replace(exact, intent=replace(exact.intent, quality=Quality.EXACT))
    choice = choice_of(few, exact, "meta-llama/Llama-3.1-70B")
    assert [len(placement.device_ids) for placement in choice.placements] == [2]


# --- pipelines


@pytest.mark.parametrize("rate", [None, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_only_a_pipeline_holds_has_a_joint_plan(kind: IntentKind, rate: float | None) -> None:
    """Llama-3.1-405B at 16 bits is too large for four H200, and seven are no TP group."""
    asked, hardware, name = wish(kind, rate), hardware_on("h200:7"), "meta-llama/Llama-3.1-405B"
    exact = replace(asked, intent=replace(asked.intent, quality=Quality.EXACT))
    choice = choice_of(hardware, exact, name)
    assert choice.config.pp > 1
    assert choice.rule.config == choice.config
    (placement,) = choice.placements
    assert [stage.first_layer for stage in placement.stages] == list(range(0, 126, 126 // choice.config.pp))
    assert sum(stage.num_layers for stage in placement.stages) == 126
    assert len(set(placement.device_ids)) == choice.config.num_gpus
    assert choice.context_tokens >= 32_768
    assert fits_what_is_promised(name, hardware, exact) == 1


def test_a_pipeline_takes_free_gpus_wherever_they_are() -> None:
    """Three of eight GPUs have 32 GiB free, and no two have room for half of Qwen3-32B each."""
    hardware = hardware_on("a6000:8")
    free = (0, 3, 5)
    states = (
        replace(gpu, free_bytes=32 * 2**30 if gpu.gpu_index in free else 0) for gpu in hardware.snapshot.gpus
    )
    crowded = replace(hardware, snapshot=ClusterSnapshot(tuple(states)))
    asked = wish(IntentKind.MIN_LATENCY, 0.05)
    exact = replace(asked, intent=replace(asked.intent, quality=Quality.EXACT))
    choice = choice_of(crowded, exact, "Qwen/Qwen3-32B")
    assert (choice.config.tp, choice.config.pp) == (1, 3)
    assert {device.split(":")[1] for device in choice.placements[0].device_ids} == {"0", "3", "5"}


@pytest.mark.parametrize(("slower", "stages"), [(1.0, 1), (7.0, 1), (30.0, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_takes_the_place_of_tp_where_all_reduces_are_slow(
    kind: IntentKind, slower: float, stages: int
) -> None:
    """Qwen3-32B takes two A6000: by TP at the links' speed, by stages where communication is 30 times as slow."""
    hardware, spec, asked = hardware_on("a6000:8"), spec_of("Qwen/Qwen3-32B"), wish(kind, 1.0)
    linked = replace(hardware.gpu, interconnect=true_links(hardware.gpu, 8, Truth(all_reduce=slower)))
    exact = replace(asked, intent=replace(asked.intent, quality=Quality.EXACT))
    estimator = datasheet_estimator(spec, linked, [VLLM])
    _, choice = chosen_plan(spec, hardware, estimator, [VLLM.unprepared()], exact)
    assert choice is not None
    assert choice.config.pp == stages
    assert choice.rule.config.pp == 1


# --- what is no joint choice


def is_not_joint(
    hardware: Hardware, estimator: Estimator, tables: list[EngineCapabilities], options: PlanOptions
) -> None:
    spec = spec_of(LLAMA)
    plan, choice = chosen_plan(spec, hardware, estimator, tables, options)
    assert choice is None
    assert plan == make_plan(spec, hardware, estimator, tables, options)


@pytest.mark.parametrize(
    "options",
    [
        *(wish(policy=policy) for policy in (*POLICIES, "look-ahead")),
        wish(IntentKind.MIN_MEMORY),
        wish(IntentKind.MAX_THROUGHPUT),
        wish(IntentKind.MIN_ENERGY),
        wish(rate=2.0, policy="hybrid", replicas=2),
        replace(GROWING, intent=Intent(cost_model=CostModel.MEMORY)),
        replace(GROWING, intent=Intent(kind=IntentKind.COST_SLO, budget=1e9)),
    ],
)
def test_other_policies_and_intents_have_the_plan_of_one_batch(options: PlanOptions) -> None:
    hardware = hardware_on("h200:4")
    is_not_joint(hardware, estimator_on(LLAMA, hardware.gpu), [VLLM], options)


def test_the_embedded_engine_and_cpus_have_the_plan_of_one_batch() -> None:
    hardware, spec = hardware_on("h200:4"), spec_of(LLAMA)
    embedded = get_engine("torch").capabilities()
    is_not_joint(hardware, datasheet_estimator(spec, hardware.gpu, [embedded]), [embedded], GROWING)
    cpu = replace(CPU, name="cpu", memory_bytes=200 * 2**30)
    on_cpu = hypothetical_hardware(cpu, 1)
    for table in embedded, VLLM:
        is_not_joint(on_cpu, datasheet_estimator(spec, cpu, [table]), [table], GROWING)


# --- the table


@pytest.mark.parametrize(("gpus", "rate", "moved"), [("h100:8", 20.0, True), ("h100:2", 5.0, False)])
def test_a_table_says_that_its_first_row_is_by_the_load(
    gpus: str, rate: float, capsys: pytest.CaptureFixture[str], golden: Golden, *, moved: bool
) -> None:
    document = planned(hardware_on(gpus), wish(rate=rate), "meta-llama/Llama-3.1-70B").document
    print_plan(document)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("row 1")]
    golden("planning", "\n".join(said) or "nothing of a row")
    assert bool(said) is moved
