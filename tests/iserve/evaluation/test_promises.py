"""SLOs that plans promise at a known rate, and those that the simulation keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from iserve.evaluation.arena import make_arena
from iserve.evaluation.contestants import OURS, STRONG_RULE, make_contestant
from iserve.evaluation.document import MISSED_AT_MOST, ContestantResult, Promise
from iserve.evaluation.metrics import metrics_of, missed_of
from iserve.evaluation.play import play
from iserve.evaluation.runner import WorldRun, evaluate
from iserve.evaluation.world import Information, World
from planner.intent import IntentKind
from tests.iserve.evaluation.worlds import small_world

HERE = Path()


def world(information: Information, slo_multiple: float = 5.0) -> World:
    return replace(
        small_world(),
        information=information,
        intents=(IntentKind.LATENCY_SLO, IntentKind.MIN_LATENCY),
        slo_multiple=slo_multiple,
        seeds=(1,),
    )


def results(of: World) -> dict[tuple[str, IntentKind], ContestantResult]:
    document = evaluate([WorldRun(of, HERE)], contestants=(OURS, STRONG_RULE))
    return {(one.contestant, one.intent): one for one in document.worlds[0].results}


@pytest.mark.slow
def test_only_a_plan_with_a_rate_and_an_slo_promises_anything() -> None:
    found = results(world(Information.RATES))
    (seed,) = found[OURS, IntentKind.LATENCY_SLO].seeds
    assert {one.deployment for one in seed.promises} == set(small_world().names)
    assert all(0 <= one.forecast <= 1 and 0 <= one.simulated <= 1 for one in seed.promises)
    (faster,), (rule,) = (
        found[OURS, IntentKind.MIN_LATENCY].seeds,
        found[STRONG_RULE, IntentKind.LATENCY_SLO].seeds,
    )
    assert faster.promises == rule.promises == ()
    unknown = results(world(Information.NONE))
    assert unknown[OURS, IntentKind.LATENCY_SLO].seeds[0].promises == ()


@pytest.mark.parametrize("multiple", [1.0, 20.0])
def test_the_time_of_one_request_alone_is_not_promised_and_a_wide_limit_is(multiple: float) -> None:
    (seed,) = results(world(Information.RATES, multiple))[OURS, IntentKind.LATENCY_SLO].seeds
    assert any(one.is_given for one in seed.promises) == (multiple > 1)
    assert all(one.is_kept for one in seed.promises if one.is_given)


def test_the_missed_are_those_of_all_requests_by_deployment() -> None:
    arena = make_arena(world(Information.RATES, 1.5), 1, HERE)
    result = play(arena, make_contestant(STRONG_RULE, arena), IntentKind.LATENCY_SLO).result
    missed, number = missed_of(arena, result), np.bincount(result.outcomes.deployment)
    of_all = sum(missed[name] * number[at] for at, name in enumerate(result.outcomes.deployments))
    assert of_all / len(arena.requests) == pytest.approx(1 - metrics_of(arena, result).slo_fraction)


def test_a_promise_is_for_the_percentile_of_an_intent() -> None:
    assert pytest.approx(0.05) == MISSED_AT_MOST
    assert Promise(deployment="a", forecast=0.05, simulated=0.06).is_given
    assert not Promise(deployment="a", forecast=0.05, simulated=0.06).is_kept
