"""The verdict of a plan says what is true, in the figures and in the words that surround them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec, parse_gpus
from iserve.cli import connection
from iserve.cli.render import print_plan
from iserve.cli.replay import _deployed
from iserve.demo import demo_model_path
from iserve.model_source import resolve
from iserve.planning.deployability import deployable
from iserve.planning.document import PlanDocument
from iserve.planning.offline import plan_for_gpus
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
    hypothetical_hardware,
    make_plan,
    ranked_anywhere,
    space,
)
from iserve.planning.verdict import VerdictDocument, figures_of, verdict
from iserve.planning.words import spoken
from planner.intent import Intent, IntentKind, Slo
from planner.plan import Plan, RefusedFor
from tests.golden_words import Golden
from tests.iserve.command_line import model

__all__ = ["model"]


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (DeploymentConfig(tp=2, weights=WeightFormat.INT8, engine="vllm"), {}),
        (DeploymentConfig(engine="torch"), {}),
        (DeploymentConfig(tp=4, pp=2, kv=KvFormat.INT8, engine="tensorrt-llm"), {"layers_per_stage": (41, 39)}),
        (
            DeploymentConfig(weights=WeightFormat.FP8, kv=KvFormat.FP8, pruning=Pruning.WANDA, engine="vllm"),
            {"num_gpus": 1},
        ),
        (
            DeploymentConfig(pp=2, engine="torch"),
            {"gpu": "cpu", "num_gpus": 4, "replicas": 2, "layers_per_stage": (4, 4)},
        ),
    ],
)
def test_the_choice_is_one_line_that_a_person_says_aloud(
    config: DeploymentConfig, more: dict[str, object], golden: Golden
) -> None:
    golden("reports", spoken("M", config, **{"gpu": "a6000", "num_gpus": 8, **more}))  # type: ignore[arg-type]


Planned = tuple[Plan, VerdictDocument, Hardware]


@pytest.fixture
def judged(model: Callable[[str], Path]) -> Callable[..., Planned]:
    """``judged(name, gpus, batch, ...)``: a plan on vLLM, its verdict, and the hardware of both."""

    def make(name: str = "Llama-2-13b", gpus: str = "h200:8", batch: int = 8, **wish: object) -> Planned:
        source = resolve(str(model(name)), {}, need_weights=False)
        gpu, count = parse_gpus(gpus)
        hardware, estimator = hypothetical_hardware(gpu, count), RooflineEstimator(source.spec, gpu)
        options = PlanOptions(intent=Intent(**wish), workload=Workload(batch=batch))  # type: ignore[arg-type]
        plan = make_plan(source.spec, hardware, estimator, capabilities_for("vllm"), options)
        said = verdict(plan, model=source.name, hardware=hardware, estimator=estimator, options=options)
        return plan, said, hardware

    return make


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_runner_up_is_chosen_over_the_chosen_one_at_the_batches_that_are_named(
    judged: Callable[..., Planned], batch: int
) -> None:
    plan, said, _ = judged(batch=batch)
    rival = said.runner_up
    assert plan.best is not None
    assert rival is not None

    def order_at(other: int) -> list[DeploymentConfig]:
        both = {plan.best.config, rival.config} if plan.best is not None else set()
        return [one.config for one in judged(batch=other)[0].candidates if one.config in both]

    won = rival.wins_at_batch
    assert (won is not None) == (batch > 1)  # of these, which the test is to hold both kinds of
    if won is None:
        assert all(order_at(other)[0] == plan.best.config for other in (16, 256))
        return
    assert order_at(won.first)[0] == order_at(won.last)[0] == rival.config
    assert not won.first <= batch <= won.last
    assert order_at(won.first // 2 if won.first > batch else won.last * 2)[0] == plan.best.config


@pytest.mark.parametrize("kind", [IntentKind.MIN_COST, IntentKind.MIN_LATENCY, IntentKind.MAX_THROUGHPUT])
@pytest.mark.parametrize(
    "limits",
    [{}, {"rate_per_s": 0.5}, {"slo": Slo(e2e_s=2.0)}, {"rate_per_s": 0.5, "slo": Slo(ttft_s=3.0, tpot_s=0.02)}],
)
def test_the_runner_up_is_ahead_under_the_intents_that_are_named_and_under_no_other(
    judged: Callable[..., Planned], kind: IntentKind, limits: dict[str, Any]
) -> None:
    """The intents keep the limits and the rate that the plan was made for."""
    plan, said, _ = judged(kind=kind, **limits)
    rival = said.runner_up
    assert plan.best is not None
    assert rival is not None
    leads = {lead.intent: lead for lead in rival.wins_by}
    assert leads or kind is not IntentKind.MIN_COST
    for other in set(IntentKind) - {IntentKind.LATENCY_SLO, IntentKind.COST_SLO, kind}:
        ranked = {one.config: one for one in judged(kind=other, **limits)[0].candidates}
        mine, chosen = ranked[rival.config].objective, ranked[plan.best.config].objective
        assert mine is not None
        assert chosen is not None
        ahead = mine > 1.01 * chosen if other is IntentKind.MAX_THROUGHPUT else mine < 0.99 * chosen
        assert ahead == (str(other) in leads)
        if ahead:
            lead = leads[str(other)]
            assert (lead.value, lead.chosen_value) == (pytest.approx(mine), pytest.approx(chosen))


def test_configurations_with_the_same_figures_are_no_runner_up(judged: Callable[..., Planned]) -> None:
    plan, said, _ = judged("Llama-2-7b", batch=32)
    assert said.runner_up is not None
    estimates = {one.config: one.estimate for one in plan.candidates}
    assert plan.best is not None
    assert plan.best.estimate is not None
    assert said.runner_up.equivalent
    for config in said.runner_up.equivalent:
        same = estimates[config]
        assert same is not None
        assert (same.ttft_s, same.tpot_s, same.memory) == (
            plan.best.estimate.ttft_s,
            plan.best.estimate.tpot_s,
            plan.best.estimate.memory,
        )
    other = estimates[said.runner_up.config]
    assert other is not None
    assert other.tpot_s != plan.best.estimate.tpot_s


def test_rates_and_dollars_are_those_of_the_planned_load(judged: Callable[..., Planned]) -> None:
    plan, said, hardware = judged(batch=8)
    assert plan.best is not None
    assert plan.best.estimate is not None
    figures, price = said.figures, hardware.gpu.price_usd_per_gpu_hour
    assert figures is not None
    assert price is not None
    batch_s = plan.best.estimate.e2e_s.value
    assert figures.requests_per_s == pytest.approx(8 / batch_s)
    per_token = price * plan.best.config.num_gpus * batch_s / 3600 / (8 * 128)
    assert figures.usd_per_million_output_tokens == pytest.approx(1e6 * per_token)
    no_price = figures_of(plan.best.estimate, replace(hardware.gpu, price_usd_per_gpu_hour=None))
    assert (no_price.usd_per_million_output_tokens, no_price.usd_per_gpu_hour) == (None, None)
    assert no_price.requests_per_s == figures.requests_per_s


def test_with_a_rate_the_gpus_are_paid_whether_or_not_requests_come(judged: Callable[..., Planned]) -> None:
    plan, said, hardware = judged(batch=8, rate_per_s=0.25)
    figures = said.figures
    assert figures is not None
    assert plan.served is not None
    assert plan.best is not None
    assert figures.requests_per_s == plan.served.highest_rate_per_s > 0.25
    assert figures.output_tokens_per_s == 0.25 * 128
    usd_per_s = (hardware.gpu.price_usd_per_gpu_hour or 0.0) * plan.best.config.num_gpus / 3600
    assert figures.usd_per_million_output_tokens == pytest.approx(1e6 * usd_per_s / (0.25 * 128))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({}, {RefusedFor.QUALITY, RefusedFor.ENGINE}),
        ({"kind": IntentKind.COST_SLO, "budget": 0.5}, {RefusedFor.BUDGET}),
        ({"slo": Slo(tpot_s=0.02)}, {RefusedFor.LATENCY}),
        ({"rate_per_s": 3.0}, {RefusedFor.RATE}),
        ({"gpus": "a6000:1"}, {RefusedFor.MEMORY}),
    ],
)
def test_every_refused_configuration_is_counted_once_by_its_first_reason(
    judged: Callable[..., Planned], wish: dict[str, object], expected: set[RefusedFor], golden: Golden
) -> None:
    plan, said, _ = judged("Llama-2-70b", **{"gpus": "a6000:8", "batch": 1, **wish})
    counts = {refusal.reason: refusal.count for refusal in said.refusals}
    assert counts == Counter(one.refused_for for one in plan.candidates if not one.feasible)
    assert sum(counts.values()) == sum(not one.feasible for one in plan.candidates)
    assert expected <= counts.keys()
    for one in plan.candidates:
        assert (one.refused_for is None) == one.feasible
    golden("reports", {one.reason or "" for one in plan.candidates if one.refused_for is RefusedFor.QUALITY})


def test_a_figure_that_is_not_known_is_no_engines_refusal(judged: Callable[..., Planned]) -> None:
    """Without a known power draw no configuration has an energy, whichever engine runs it."""
    plan, *_ = judged("Llama-2-7b", kind=IntentKind.MIN_ENERGY)
    assert all(one.refused_for is not RefusedFor.UNKNOWN for one in plan.candidates)
    spec, gpu = resolve(str(demo_model_path()), {}).spec, replace(gpu_spec("h200"), tdp_w=None)
    made = make_plan(
        spec,
        hypothetical_hardware(gpu, 1),
        RooflineEstimator(spec, gpu),
        capabilities_for("vllm"),
        PlanOptions(intent=Intent(kind=IntentKind.MIN_ENERGY)),
    )
    kinds = Counter(one.refused_for for one in made.candidates)
    assert kinds.keys() == {RefusedFor.UNKNOWN, RefusedFor.ENGINE}


def test_where_nothing_is_feasible_the_first_advice_is_that_of_the_nearest(
    judged: Callable[..., Planned], golden: Golden
) -> None:
    plan, said, _ = judged("Llama-2-70b", "a6000:1", batch=1)
    golden("reports", said.sentence)
    assert (said.figures, said.runner_up, said.deployable) == (None, None, None)
    assert plan.why_not.nearest is not None
    (own,) = (r.text for r in plan.why_not.relaxations if r.config == plan.why_not.nearest.config)
    assert said.first_relaxation == own


def test_what_is_missing_here_is_said_and_nothing_else(golden: Golden) -> None:
    source = resolve(str(demo_model_path()), {})
    gpu, config = gpu_spec("a6000"), DeploymentConfig(tp=2, engine="vllm")
    (table,) = capabilities_for("vllm")
    installed = replace(table, unavailable=None)
    found = deployable(source.spec, config, gpu, [installed], {"a6000": 2}, has_weights=True)
    assert (found.here, found.missing) == (True, ())
    few = deployable(source.spec, config, gpu, [installed], {"a6000": 3}, replicas=2, has_weights=True)
    golden("reports", few.missing)
    other = deployable(source.spec, config, gpu, [installed], {"h200-sxm": 8}, has_weights=False)
    golden("reports", other.missing)
    away = replace(table, unavailable="vllm is not installed")
    none = deployable(source.spec, config, gpu, [away], {}, has_weights=True)
    golden("reports", none.missing)
    assert not none.here
    prepared = replace(config, weights=WeightFormat.INT4)
    needs = deployable(source.spec, prepared, gpu, [installed], {"a6000": 2}, has_weights=True)
    assert any("beforehand" in text or "checkpoint" in text for text in needs.missing)


def test_a_deployments_plan_that_was_stored_without_a_verdict_is_still_read_and_printed(
    model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, count = parse_gpus("a6000:2")
    document = plan_for_gpus(str(model("Llama-2-7b")), gpu, count, PlanOptions(), "vllm")
    print_plan(replace(document, verdict=None))
    assert "configurations would work" in capsys.readouterr().out


def test_the_rate_that_would_be_served_is_that_of_all_replicas() -> None:
    """Two replicas miss at twice the rate what one misses, by twice as much."""
    limits = {"slo": Slo(tpot_s=1.0), "engine": "vllm"}
    one, two = (planned("h200:8", replicas=count, rate_per_s=1000.0 * count, **limits) for count in (1, 2))
    assert one.chosen is two.chosen is None
    ((needed, told),) = {(r.needed, r.text) for r in two.why_not.relaxations if r.limit == "rate"}
    (needed_of_one,) = {r.needed for r in one.why_not.relaxations if r.limit == "rate"}
    assert needed == pytest.approx(2 * needed_of_one, rel=0.02)
    assert told.startswith(f"rate=2000 -> {needed:g} requests/s would admit")
    reasons = [c.reason for c in two.candidates if c.refused_for is RefusedFor.RATE]
    assert reasons
    assert all("rate=2000" in str(reason) for reason in reasons)


def planned(gpus: str, *, replicas: int = 1, more_requests: bool = False, **wish: Any) -> PlanDocument:
    gpu, count = parse_gpus(gpus)
    engine = wish.pop("engine", "vllm")
    """A plan of the bundled model on vLLM, placed by a policy."""
    intent = Intent(**wish)
    options = PlanOptions(intent=intent, replicas=replicas, more_requests=more_requests, policy="hybrid")
    return plan_for_gpus(str(demo_model_path()), gpu, count, options, engine)


def test_expected_deployments_are_judged_by_one_replicas_share_of_the_rate() -> None:
    source, (gpu, count) = resolve(str(demo_model_path()), {}), parse_gpus("h200:2")
    estimator = RooflineEstimator(source.spec, gpu)
    intent = Intent(kind=IntentKind.MIN_LATENCY)
    made = space(source.spec, gpu, count, estimator, capabilities_for("vllm"), PlanOptions(intent=intent))
    most = ranked_anywhere(made, PlanOptions(intent=replace(intent, rate_per_s=0.001)), gpu).served
    assert most is not None
    rate = 1.5 * most.highest_rate_per_s

    def feasible(replicas: int, rate_per_s: float) -> set[DeploymentConfig]:
        options = PlanOptions(intent=replace(intent, rate_per_s=rate_per_s), replicas=replicas)
        return {one.config for one in ranked_anywhere(made, options, gpu).candidates if one.feasible}

    assert feasible(2, rate) == feasible(1, rate / 2) != feasible(1, rate)


def test_a_replay_says_the_rate_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    document = planned("h200:8", replicas=2, rate_per_s=0.5)
    asked = SimpleNamespace(get=lambda path, kind: document)
    monkeypatch.setattr(connection, "client", lambda *, start: asked)
    (told,) = _deployed(("m",))
    assert "0.5 requests/s" in told
