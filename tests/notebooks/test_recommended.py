"""AIConfigurator's recommendations are deployed as recorded, and nothing where it was not asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserve.planning.pipeline import PlanOptions
from iserve.simulation.baselines import World
from iserve.simulation.running import SimulatedModel, roofline_model
from notebooks.figures.h200 import H200_SITE, MODELS
from notebooks.figures.load import PAPER_SITE, Site, world_of
from notebooks.figures.recommended import recommendations, recommended
from notebooks.figures.recordings import recording_of
from planner.intent import Intent, IntentKind, Quality
from traces.request import Request
from traces.simulator.scenario import Deployed, NotDeployed


def by_roofline(name: str, options: PlanOptions) -> SimulatedModel:
    """Return a model by the roofline: what is deployed does not depend on its predicted speed."""
    return roofline_model(name, recording_of(name).profile.spec, H200_SITE.gpu, options, "vllm")


def world(site: Site, *models: str) -> World:
    whole = world_of(site, models, [Request(0.0, 100, 10)], deploy_every_s=0.0)
    return World(gpu=site.gpu, models=whole.models(lambda model: Intent()), scenario=whole.scenario)


def test_mistral_is_refused_by_its_name_and_answered_by_its_shape() -> None:
    own = [answer for answer in recommendations().answers if "Mistral" in answer.asked.model]
    assert {answer.asked.architecture for answer in own if answer.advice} == {"LlamaForCausalLM"}
    assert all("not supported" in str(answer.reason) for answer in own if answer.asked.architecture is None)


@pytest.mark.parametrize("model", dict.fromkeys(MODELS))
@pytest.mark.parametrize(
    ("kind", "quality", "what"),
    [
        (IntentKind.MIN_COST, Quality.EXACT, "tp=1,pp=1,weights=16bit,kv=16bit"),
        (IntentKind.MIN_LATENCY, Quality.EXACT, "tp=2,pp=1,weights=16bit,kv=16bit"),
        (IntentKind.MIN_COST, Quality.NEAR, "tp=1,pp=1,weights=fp8,kv=fp8"),
    ],
)
def test_a_recommendation_is_deployed_as_it_says(
    model: str, kind: IntentKind, quality: Quality, what: str
) -> None:
    here = world(replace(H200_SITE, model=by_roofline), model)
    found = recommended(here, kind, quality)(model, here.scenario.cluster)
    assert isinstance(found, Deployed)
    assert found.what.startswith(what)
    batch = int(found.what.rpartition(" ")[2])
    assert batch in {answer.advice.batch for answer in recommendations().answers if answer.advice}


def test_what_was_not_asked_is_not_deployed() -> None:
    here = world(PAPER_SITE, "Llama-2-7b-hf")
    found = recommended(here, IntentKind.MIN_COST, Quality.EXACT)("Llama-2-7b-hf", here.scenario.cluster)
    assert isinstance(found, NotDeployed)
    assert "no recommendation for Llama-2-7b-hf" in found.reason
