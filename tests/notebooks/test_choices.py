"""Figures 11 to 13: an intent's choice is the best of what it may choose, in the figure's own metric."""

from __future__ import annotations

import pytest

from notebooks.figures.choices import METRICS, RULES, plan_of
from notebooks.figures.setting import INTENTS, MODELS
from planner.intent import IntentKind


@pytest.mark.parametrize("kind", INTENTS)
@pytest.mark.parametrize("model", ["falcon-7b", "Llama-2-13b-hf"])
def test_the_choice_is_the_least_of_the_feasible_in_the_figures_metric(model: str, kind: IntentKind) -> None:
    plan = plan_of(model, kind)
    values = [METRICS[kind].of(c.estimate) for c in plan.candidates if c.feasible and c.estimate is not None]
    assert plan.best is not None
    assert plan.best.estimate is not None
    assert METRICS[kind].of(plan.best.estimate) == min(values)


@pytest.mark.parametrize("model", MODELS)
def test_rules_split_as_far_as_the_shape_allows_and_change_no_answers(model: str) -> None:
    tensor, pipeline = (rule(model) for rule in RULES.values())
    assert (tensor.tp, tensor.pp) == ((1, 1) if model == "falcon-7b" else (8, 1))  # 71 heads
    assert (pipeline.tp, pipeline.pp) == (1, 8)
    assert {tensor.weights, pipeline.weights} == {"16bit"}
