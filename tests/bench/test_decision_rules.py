"""Decision regret: what is asked, what the choosers pick, and what a pick costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.estimates import Estimate
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from planner.intent import IntentKind
from tests.bench.decision_rules import (
    Cell,
    Measured,
    Metric,
    Outcome,
    PlannerChooser,
    Verdict,
    Wish,
    judge,
    other_end,
    predicted_chooser,
    roomy_rule,
    rule,
    summarize,
    wishes,
)
from tests.golden_words import Golden
from tests.planner.candidates import estimate

SPEC = read_spec(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
WORK = Workload(batch=4, input_tokens=128, output_tokens=11)
TP1, TP2, TP4 = (DeploymentConfig(tp=tp) for tp in (1, 2, 4))
FASTEST = Wish(kind=IntentKind.MIN_LATENCY, metric=Metric.E2E)
CHEAPEST = Wish(kind=IntentKind.MIN_GPU_HOURS, metric=Metric.GPU_SECONDS)


def cell(*alternatives: Measured, gpu: str = "h100", saturated: bool = False) -> Cell:
    return Cell(
        table="made up",
        engine="vLLM",
        model="llama",
        spec=SPEC,
        gpu=gpu_spec(gpu),
        workload=WORK,
        alternatives=alternatives,
        saturated=saturated,
    )


def timed(config: DeploymentConfig, ttft_s: float, tpot_s: float) -> Measured:
    return Measured(config=config, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=ttft_s + 10 * tpot_s)


# e2e 8, 5, 4 s; GPU-seconds per request 2, 2.5, 4
USUAL = cell(timed(TP1, 3.0, 0.5), timed(TP2, 2.0, 0.3), timed(TP4, 1.0, 0.3))


def estimated(of: Cell, config: DeploymentConfig, *, spread: float = 0.0) -> Estimate:
    """The truth as an estimate with ``spread`` to both sides. Fits anywhere."""
    own = truth(of, config)
    times = {"ttft_s": own.ttft_s, "tpot_s": own.tpot_s}
    return estimate(config, gib_per_gpu=0.01, spread=spread, workload=of.workload, **times)


def truth(of: Cell, config: DeploymentConfig) -> Measured:
    return next(a for a in of.alternatives if a.config == config)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    degrees = st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2)])
    seconds = st.floats(0.001, 10)
    chosen = draw(st.lists(degrees, min_size=2, max_size=7, unique=True))
    return cell(*(timed(DeploymentConfig(tp=tp, pp=pp), draw(seconds), draw(seconds)) for tp, pp in chosen))


@pytest.mark.parametrize(
    ("wish", "picked", "expected"),
    [
        pytest.param(FASTEST, TP4, 0.0, id="best"),
        pytest.param(FASTEST, TP1, 1.0, id="twice as slow"),
        pytest.param(CHEAPEST, TP2, 0.25, id="a quarter dearer"),
    ],
)
def test_regret(wish: Wish, picked: DeploymentConfig, expected: float) -> None:
    assert judge(USUAL, wish, picked) == Verdict(Outcome.PICKED, pytest.approx(expected))


def test_regret_of_what_is_maximised_is_what_the_best_would_have_given_more() -> None:
    of = cell(Measured(config=TP1, tokens_per_s=100.0), Measured(config=TP2, tokens_per_s=150.0), saturated=True)
    most = Wish(kind=IntentKind.MAX_THROUGHPUT, metric=Metric.TOKENS)
    assert judge(of, most, TP1).regret == pytest.approx(0.5)
    # 11 tokens a request: 0.11 s of one GPU, 2 x 0.0733 of two
    assert judge(of, CHEAPEST, TP2).regret == pytest.approx(2 / 1.5 - 1)


def test_a_limit_decides_what_counts_as_best() -> None:
    within_6_s = Wish(
        kind=IntentKind.LATENCY_SLO, metric=Metric.GPU_SECONDS, limited=Metric.E2E, limit=6.0
    )  # tp=1 is cheaper and misses it
    assert judge(USUAL, within_6_s, TP2) == Verdict(Outcome.PICKED, 0.0)
    assert judge(USUAL, within_6_s, TP4).regret == pytest.approx(4 / 2.5 - 1)
    assert judge(USUAL, within_6_s, TP1) == Verdict(Outcome.MISSED)
    assert judge(USUAL, within_6_s, None) == Verdict(Outcome.REFUSED)


def test_only_what_was_measured_is_asked() -> None:
    saturated = cell(
        Measured(config=TP1, tokens_per_s=1.0), Measured(config=TP2, tokens_per_s=2.0), saturated=True
    )
    assert {w.name for w in wishes(saturated)} == {"max-throughput", "min-gpu-hours"}
    assert {w.name for w in wishes(USUAL)} == {
        "min-latency",
        "min-gpu-hours",
        "latency-slo",
        "latency-slo (ttft)",
        "latency-slo (tpot)",
        "cost-slo",
    }
    half = cell(*USUAL.alternatives[:2], replace(USUAL.alternatives[2], ttft_s=None))
    assert "latency-slo (ttft)" not in {w.name for w in wishes(half)}


@given(cells())
def test_who_knows_the_truth_regrets_nothing(of: Cell) -> None:
    oracle = predicted_chooser(truth)
    for wish in wishes(of):
        assert judge(of, wish, oracle(of, wish)) == Verdict(Outcome.PICKED, 0.0)


@pytest.mark.slow
@given(cells())
def test_the_planner_regrets_nothing_when_its_estimates_are_the_truth(of: Cell) -> None:
    """So whatever it regrets on a table comes from its estimates, not from how the question was put to it."""
    choose = PlannerChooser(estimated)
    for wish in wishes(of):
        if _on_the_edge(of, wish):
            continue  # the limit is a measured value: rounding decides
        assert judge(of, wish, choose(of, wish)) == Verdict(Outcome.PICKED, pytest.approx(0.0, abs=1e-9))


def _on_the_edge(of: Cell, wish: Wish) -> bool:
    if wish.limited is None:
        return False
    return any(a.value(wish.limited, of.workload) == pytest.approx(wish.limit, rel=1e-6) for a in of.alternatives)


def test_limits_are_kept_by_the_upper_end() -> None:
    """Between 5 s of tp=2 and 8 s of tp=1: with intervals up to 30% above, tp=2 may take 6.5 s and is refused."""
    within_6_s = Wish(kind=IntentKind.LATENCY_SLO, metric=Metric.GPU_SECONDS, limited=Metric.E2E, limit=6.0)

    def wide(of: Cell, config: DeploymentConfig) -> Estimate:
        return estimated(of, config, spread=0.3)

    assert PlannerChooser(wide)(USUAL, within_6_s) == TP4
    assert PlannerChooser(wide, at_value=True)(USUAL, within_6_s) == TP2


def test_the_planner_tells_why_it_did_not_pick_the_best(golden: Golden) -> None:
    within_6_s = Wish(kind=IntentKind.LATENCY_SLO, metric=Metric.GPU_SECONDS, limited=Metric.E2E, limit=6.0)

    def swapped(of: Cell, config: DeploymentConfig) -> Estimate | None:
        if config == TP4:
            return None
        return replace(estimated(of, TP1 if config == TP2 else TP2), config=config)

    golden("reports", [PlannerChooser(swapped).cause(USUAL, wish) for wish in (FASTEST, CHEAPEST, within_6_s)])


def test_the_planner_tells_that_it_was_cautious(golden: Golden) -> None:
    within_6_s = Wish(kind=IntentKind.LATENCY_SLO, metric=Metric.GPU_SECONDS, limited=Metric.E2E, limit=6.0)

    def wide(of: Cell, config: DeploymentConfig) -> Estimate:
        return estimated(of, config, spread=0.3)

    golden("reports", PlannerChooser(wide).cause(USUAL, within_6_s))


def test_what_cannot_hold_one_request_is_not_picked() -> None:
    def small(of: Cell, config: DeploymentConfig) -> Estimate | None:
        return None if config == TP4 else estimated(of, config)

    assert PlannerChooser(small)(USUAL, FASTEST) == TP2


@pytest.mark.parametrize(
    ("kind", "metric", "end", "other"),
    [
        (IntentKind.MIN_LATENCY, Metric.E2E, TP4, TP1),
        (IntentKind.MIN_GPU_HOURS, Metric.GPU_SECONDS, TP1, TP4),
        (IntentKind.LATENCY_SLO, Metric.GPU_SECONDS, TP4, TP1),
        (IntentKind.COST_SLO, Metric.E2E, TP1, TP4),
    ],
)
def test_the_rule(kind: IntentKind, metric: Metric, end: DeploymentConfig, other: DeploymentConfig) -> None:
    wish = Wish(kind=kind, metric=metric)
    assert rule(USUAL, wish) == end
    assert other_end(USUAL, wish) == other


def test_the_rule_with_room_takes_no_gpu_that_the_weights_fill_by_half() -> None:
    """13.5 GB of weights: more than half of an A10G's 24 GB, less than half of an A100's 40 GB."""
    assert roomy_rule(replace(USUAL, gpu=gpu_spec("a10g")), CHEAPEST) == TP2
    assert roomy_rule(replace(USUAL, gpu=gpu_spec("a100-40gb")), CHEAPEST) == TP1
    assert roomy_rule(replace(USUAL, gpu=gpu_spec("a10g")), FASTEST) == TP4


def test_the_rule_splits_tensors_before_stages_and_takes_the_narrowest_format_the_gpu_multiplies() -> None:
    fp8 = replace(TP2, weights=WeightFormat.FP8, kv=KvFormat.FP8)
    stages = DeploymentConfig(pp=2)
    alternatives = [timed(config, 1.0, 1.0) for config in (stages, TP2, fp8)]
    assert rule(cell(*alternatives), FASTEST) == rule(cell(*alternatives), CHEAPEST) == fp8
    assert rule(cell(*alternatives, gpu="a100"), FASTEST) == rule(cell(*alternatives, gpu="a100"), CHEAPEST) == TP2


def test_summary_counts_refusals_and_misses_as_not_best() -> None:
    regrets = [Verdict(Outcome.PICKED, value) for value in (0.0, 0.01, 0.5)]
    found = summarize([*regrets, Verdict(Outcome.REFUSED), Verdict(Outcome.MISSED)])
    assert (found.count, found.refused, found.missed) == (5, 1, 1)
    assert (found.best, found.near_best) == (0.2, 0.4)
    assert (found.median, found.mean, found.worst) == (0.01, 0.17, 0.5)
    assert summarize([Verdict(Outcome.REFUSED)]).mean is None
