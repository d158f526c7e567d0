"""Evaluation of worlds: metrics by hand, ratios, the oracle's promise, and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fingerprint.codec import from_json, to_json
from iserve.cli import main
from iserve.evaluation.arena import make_arena
from iserve.evaluation.contestants import CONTESTANTS, STANDARD, STRONG_RULE, make_contestant
from iserve.evaluation.document import EvaluationDocument, SeedResult, ratio
from iserve.evaluation.metrics import Metrics, Quantiles, metrics_of, quantile, score
from iserve.evaluation.oracle import rank_of, search
from iserve.evaluation.play import play
from iserve.evaluation.runner import WorldRun, evaluate
from iserve.evaluation.world import INTENTS, OracleBudget
from planner.intent import IntentKind
from tests.iserve.evaluation.worlds import small_world, world_values

NAN = float("nan")
NONE = Quantiles(p50_s=None, p95_s=None, p99_s=None)


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        pytest.param([3, 1, 2], 0.5, 2, id="median of three"),
        pytest.param([4, 1, 3, 2], 0.5, 2, id="lower median of four"),
        pytest.param([1, 2, 3, NAN], 0.75, 3, id="an unanswered one is last"),
        pytest.param([1, 2, 3, NAN], 0.95, None, id="and is the P95"),
        pytest.param([], 0.5, None, id="none"),
    ],
)
def test_quantile(values: list[float], fraction: float, expected: float | None) -> None:
    assert quantile(np.array(values, float), fraction) == expected


def made(**changed: Any) -> Metrics:
    plain = Metrics(
        requests=10,
        answered_fraction=1.0,
        e2e=Quantiles(p50_s=2.0, p95_s=4.0, p99_s=5.0),
        ttft=NONE,
        slo_fraction=0.8,
        gpu_hours=3.0,
        cost_gpu_s=7.0,
        cost_usd=None,
        guard_ratio=2.0,
        guard_kept=True,
    )
    return replace(plain, **changed)


@pytest.mark.parametrize(
    ("intent", "expected"),
    [("min-cost", 7.0), ("min-latency", 2.0), ("latency-slo", pytest.approx(0.2)), ("min-gpu-hours", 3.0)],
)
def test_score_is_the_metric_of_the_intent(intent: str, expected: float) -> None:
    assert score(made(), IntentKind(intent)) == expected


def test_cost_beyond_the_guard_and_hours_without_answers_are_lost() -> None:
    assert score(made(guard_kept=False), IntentKind.MIN_COST) is None
    assert score(made(answered_fraction=0.98), IntentKind.MIN_GPU_HOURS) is None


def test_ratio_is_a_geometric_mean_and_less_is_better() -> None:
    def seeds(*metrics: Metrics, intent: IntentKind) -> list[SeedResult]:
        return [SeedResult(seed=1, metrics=m, score=score(m, intent), plan=(), reasons=()) for m in metrics]

    cost = IntentKind.MIN_COST
    own, other = (
        seeds(made(), made(), intent=cost),
        seeds(made(cost_gpu_s=14.0), made(cost_gpu_s=3.5), intent=cost),
    )
    assert ratio(own, other, cost) == pytest.approx(1.0)  # of 1/2 and 2
    slo = IntentKind.LATENCY_SLO
    assert ratio(seeds(made(), intent=slo), seeds(made(slo_fraction=0.4), intent=slo), slo) == pytest.approx(0.5)
    assert ratio(own, seeds(made(), made(guard_kept=False), intent=cost), cost) is None


def test_requests_alone_take_what_they_take_alone() -> None:
    """At one request in ten minutes the strong rule's E2E is that of one request alone, and keeps every SLO."""
    lengths = {"input_mean_tokens": 400, "output_mean_tokens": 50}
    world = small_world(horizon_s=6000, requests={"lengths": lengths, "rate_per_s": 1 / 600})
    arena = make_arena(world, 1, Path())
    metrics = metrics_of(arena, play(arena, make_contestant(STRONG_RULE, arena), IntentKind.MIN_COST).result)
    assert metrics.slo_fraction == 1.0
    assert metrics.guard_ratio == pytest.approx(1.0, rel=1e-6)


def test_cost_of_idle_gpus_is_what_is_reserved() -> None:
    """Two GPUs reserved by 95%, from the decision to the last answer."""
    lengths = {"input_mean_tokens": 400, "output_mean_tokens": 50}
    world = small_world(horizon_s=6000, requests={"lengths": lengths, "rate_per_s": 1 / 600})
    arena = make_arena(world, 1, Path())
    played = play(arena, make_contestant(STRONG_RULE, arena), IntentKind.MIN_COST)
    metrics = metrics_of(arena, played.result)
    assert metrics.cost_gpu_s is not None
    whole = metrics.cost_gpu_s * metrics.requests * metrics.answered_fraction
    assert whole == pytest.approx(2 * 0.95 * played.result.end_s, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("intent", INTENTS)
def test_oracle_is_never_worse_than_its_starts(intent: IntentKind) -> None:
    arena = make_arena(small_world(), 1, Path())
    played = [play(arena, make_contestant(name, arena), intent) for name in STANDARD]
    found = search(arena, intent, [one.replicas for one in played], OracleBudget(simulations=40))
    starts = [rank_of(metrics_of(arena, one.result), intent) for one in played]
    assert rank_of(found.metrics, intent) <= min(starts)


def test_oracle_within_its_simulations_repeats_itself() -> None:
    arena = make_arena(small_world(), 1, Path())
    starts = [play(arena, make_contestant(STRONG_RULE, arena), IntentKind.MIN_LATENCY).replicas]
    budget = OracleBudget(simulations=25)
    first, second = (search(arena, IntentKind.MIN_LATENCY, starts, budget, clock=lambda: 0.0) for _ in "ab")
    assert first == second
    assert first.simulations <= 25


@pytest.mark.slow
def test_document_is_read_back_and_best_is_one() -> None:
    document = evaluate([WorldRun(small_world(seeds=[1, 2]), Path())], contestants=("ours", STRONG_RULE))
    assert from_json(to_json(document), EvaluationDocument) == document
    for intent in INTENTS:
        ratios = [
            result.against_best
            for result in document.worlds[0].results
            if result.intent is intent and result.against_best is not None
        ]
        assert not ratios or min(ratios) == pytest.approx(1.0)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_document() -> None:
    runs = [WorldRun(small_world(seeds=[1, 2], horizon_s=5), Path())]
    alone, shared = (evaluate(runs, contestants=("ours", STRONG_RULE, "first-fit"), jobs=jobs) for jobs in (1, 2))
    assert replace(shared, seconds=alone.seconds) == alone


def test_information_none_hides_rates() -> None:
    for information, known in (("none", False), ("rates", True), ("trace", True)):
        arena = make_arena(small_world(information=information), 1, Path())
        assert (arena.asked("chat").rate_per_s is not None) is known


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit code of ``iserve evaluate``."""
    monkeypatch.setattr(sys, "argv", ["iserve", "evaluate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps(world_values(intents=["min-latency"])))
    return path


def test_command_prints_each_contestant_and_writes_json(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    names = ("--contestants", f"ours,{STRONG_RULE}")
    assert run(monkeypatch, str(world), *names, "--set", "truth.sharing=2", "--json", str(out)) == 0
    printed = capsys.readouterr().out
    assert "ours" in printed
    assert STRONG_RULE in printed
    document = from_json(out.read_bytes(), EvaluationDocument)
    assert document.worlds[0].truth.sharing == 2
    assert document.worlds[0].changed == ("truth.sharing=2",)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("--contestants", "best"), 2, id="unknown contestant"),
        pytest.param(("--seeds", "0"), 2, id="no seeds"),
        pytest.param(("--set", "truth.sharing"), 1, id="no value"),
        pytest.param(("--set", "trut.sharing=1"), 1, id="unknown field"),
        pytest.param(("--set", "cluster=h200:0"), 1, id="no GPU"),
        pytest.param(("--set", "requests.rate_per_s=1e-9"), 1, id="no request"),
        pytest.param(("--json", "/nowhere/x.json", "--contestants", "first-fit"), 1, id="no folder"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
) -> None:
    assert run(monkeypatch, str(world), *arguments) == code
    assert "Traceback" not in capsys.readouterr().err


def test_every_contestant_is_described() -> None:
    assert all(kind.about for kind in CONTESTANTS.values())
