"""Joint plans by datasheet of traffic whose prompts are partly cached, or whose tokens are drafted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from daemon.engines.registry import get_engine
from fingerprint.config import Workload
from iserve.planning import joint_plan
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.pipeline import ExpectedSpec, PlanOptions, datasheet_estimator, hypothetical_hardware
from planner.intent import Intent, IntentKind, Quality, Slo, Traffic
from tests.fingerprint.synthetic_machine import CPU
from tests.golden_words import Golden
from tests.iserve.joint_plans import (
    GROWING,
    LLAMA,
    VLLM,
    chosen,
    fits_what_is_promised,
    flags_of,
    hardware_on,
    planned,
    source_of,
    spec_of,
    wish,
    workers_of,
)


@pytest.mark.parametrize("rate", [None, 4.0])
def test_prompts_in_the_prefix_cache_take_less_of_a_joint_plan(rate: float | None, golden: Golden) -> None:
    hardware = hardware_on("h200:2")
    whole = wish(IntentKind.MIN_LATENCY, rate, workload=Workload(input_tokens=8000))
    cached = replace(whole, intent=replace(whole.intent, traffic=Traffic(prefix_hits=0.75)))
    found, plain = planned(hardware, cached), planned(hardware, whole)
    assert found.document.joint is not None
    assert plain.document.joint is not None
    service, usual = found.document.joint.service, plain.document.joint.service
    assert service.config == usual.config
    assert 0.25 * usual.prompt_s < service.prompt_s < 0.5 * usual.prompt_s
    assert service.step_s == usual.step_s
    assert found.document.joint.forecast.e2e_s < plain.document.joint.forecast.e2e_s
    golden("controller", found.document.notes)


@pytest.mark.parametrize("policy", ["joint", "packing"])
def test_a_limit_that_the_cache_alone_keeps_is_kept_wherever_a_plan_is_judged(policy: str) -> None:
    """The estimator is that of whole prompts, as where an engine is chosen."""
    intent = Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=0.3))
    whole = replace(GROWING, intent=intent, policy=policy, workload=Workload(input_tokens=16_000))
    cached = replace(whole, intent=replace(intent, traffic=Traffic(prefix_hits=0.9)))
    of_whole, of_cached = (chosen(hardware_on("h200:1"), one)[0] for one in (whole, cached))
    assert (of_whole.best is None, of_cached.best is None) == (True, False)


def test_models_to_follow_have_the_prompts_of_the_same_share() -> None:
    follows = (ExpectedSpec(LLAMA, 1.0, spec_of(LLAMA)),)
    whole = wish(IntentKind.MIN_LATENCY, 1.0, workload=Workload(input_tokens=8000), expected_models=follows)
    cached = replace(whole, intent=replace(whole.intent, traffic=Traffic(prefix_hits=0.75)))
    with_hits, without = (joint_plan._expected(hardware_on("h200:2"), [VLLM], one) for one in (cached, whole))
    assert with_hits[0].services[0].prompt_s < 0.5 * without[0].services[0].prompt_s


def drafting(acceptance: float, rate: float | None, **options: object) -> PlanOptions:
    plain = wish(IntentKind.MIN_LATENCY, rate, **options)
    intent = replace(plain.intent, quality=Quality.EXACT, traffic=Traffic(draft_acceptance=acceptance))
    return replace(plain, intent=intent)


def test_the_more_load_the_fewer_drafts_are_verified(golden: Golden) -> None:
    """A token that is verified costs next to nothing where steps wait for weights, and as any other where not."""
    hardware = hardware_on("h200:2")
    drafts = []
    for rate in (1.0, 10.0, 30.0, 60.0, 100.0):
        found, plain = planned(hardware, drafting(0.6, rate)), planned(hardware, drafting(0.0, rate))
        assert found.document.joint is not None
        assert plain.document.joint is not None
        assert plain.best.config.draft_tokens == 0
        drafts.append(found.best.config.draft_tokens)
        assert found.document.joint.forecast.e2e_s <= plain.document.joint.forecast.e2e_s * 1.02
        assert found.document.joint.rule.config.draft_tokens == 0
        assert found.document.joint.rule == plain.document.joint.rule
    assert drafts == sorted(drafts, reverse=True)
    assert (drafts[0], drafts[-1]) == (8, 0)
    golden("controller", [note for note in found.document.notes if "n-gram" in note])
    assert not any("n-gram" in one for one in plain.document.notes)


def test_drafts_of_the_plan_are_those_that_workers_are_started_with() -> None:
    hardware, options = hardware_on("h200:2"), drafting(0.8, 2.0)
    found = planned(hardware, options)
    assert found.best.config.draft_tokens
    for worker in workers_of(found, options):
        told = json.loads(flags_of(worker, hardware, spec_of(LLAMA))["speculative-config"])
        assert told["num_speculative_tokens"] == found.best.config.draft_tokens
    assert fits_what_is_promised(LLAMA, hardware, options)
    assert f"{found.best.config.draft_tokens} n-gram drafts" in found.document.verdict.sentence


def test_a_limit_that_drafts_alone_keep_is_kept() -> None:
    slo, hardware = Slo(tpot_s=0.004), hardware_on("h200:1")
    plain = drafting(0.0, 1.0)
    plain = replace(plain, intent=replace(plain.intent, kind=IntentKind.LATENCY_SLO, slo=slo))
    told = replace(plain, intent=replace(plain.intent, traffic=Traffic(draft_acceptance=0.6)))
    of_plain, of_told = (chosen(hardware, one)[0] for one in (plain, told))
    assert of_plain.best is None
    assert of_told.best is not None
    assert of_told.best.config.draft_tokens


def test_another_engine_drafts_nothing_and_says_so(golden: Golden) -> None:
    table, hardware = get_engine("tensorrt-llm").capabilities(), hardware_on("h200:1")
    found = planned_deployment(
        source_of(),
        hardware,
        datasheet_estimator(spec_of(LLAMA), hardware.gpu, [table]),
        table,
        drafting(0.6, 1.0),
        devices=(),
        deployable_of=lambda config, replicas: DeployableDocument(here=True),
    )
    golden("controller", found.document.notes)
    assert found.best is not None
    assert not found.best.config.draft_tokens


def test_an_engine_without_a_prefix_cache_says_so() -> None:
    traffic = Traffic(prefix_hits=0.5)
    options = wish(IntentKind.MIN_LATENCY, policy="packing")
    torch, hardware = get_engine("torch").capabilities(), hypothetical_hardware(CPU, 1)
    found = planned_deployment(
        source_of(),
        hardware,
        datasheet_estimator(spec_of(LLAMA), CPU, [torch]),
        torch,
        replace(options, intent=replace(options.intent, traffic=traffic)),
        devices=(),
        deployable_of=lambda config, replicas: DeployableDocument(here=True),
    )
    assert any("keeps no prefixes" in note for note in found.document.notes)
