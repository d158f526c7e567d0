"""Decisions from a kept order: those of the whole plan, on GPUs shared with deployments of known rates too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.planning.pipeline import FitsOn, Hardware, PlanOptions, make_plan
from iserve.planning.ranking_cache import RankedModel
from iserve.simulation.running import idle_cluster
from placement.replicas import Replicas
from placement.types import ClusterSnapshot, Placement
from planner.intent import CostModel, Intent, IntentKind, Slo
from planner.plan import NoRoom
from tests.fingerprint.half_measured import HalfMeasured
from tests.fingerprint.step_timed_machine import llama_7b

GIB = 2**30
A6000 = gpu_spec("a6000")
SPEC = llama_7b()
ESTIMATOR = RooflineEstimator(SPEC, A6000)
ENGINES = tuple(capabilities_for("auto"))
INTENTS = {
    "min-cost": Intent(),
    "min-latency": Intent(kind=IntentKind.MIN_LATENCY),
    "min-latency at a rate": Intent(kind=IntentKind.MIN_LATENCY, rate_per_s=0.2),
    "dollars": Intent(cost_model=CostModel.DOLLARS),
    "min-memory": Intent(kind=IntentKind.MIN_MEMORY),
    "slo": Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(tpot_s=0.02), rate_per_s=0.2),
}
MODELS = {
    name: RankedModel(SPEC, A6000, ESTIMATOR, ENGINES, PlanOptions(intent=intent, workload=Workload(1, 512, 128)))
    for name, intent in INTENTS.items()
}


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(MODELS)),
    free=st.lists(st.tuples(st.integers(0, 48), st.floats(0, 1)), min_size=1, max_size=16),
)
def test_it_chooses_what_the_whole_plan_chooses(name: str, free: list[tuple[int, float]]) -> None:
    idle = idle_cluster(A6000, len(free)).gpus
    gpus = tuple(
        replace(gpu, free_bytes=min(room * GIB, gpu.total_bytes), load_fraction=load)
        for gpu, (room, load) in zip(idle, free, strict=True)
    )
    snapshot, options = ClusterSnapshot(gpus), MODELS[name].options
    plan = make_plan(SPEC, Hardware(label="", gpu=A6000, snapshot=snapshot), ESTIMATOR, ENGINES, options)
    chosen = MODELS[name].choose(snapshot)
    if plan.best is None:
        assert chosen is None
    else:
        assert chosen is not None
        assert (chosen.config, chosen.placement) == (plan.best.config, plan.best.layout)
        assert chosen.estimate == plan.best.estimate


MIXED = {
    name: RankedModel(
        SPEC, A6000, HalfMeasured(ESTIMATOR), ENGINES, PlanOptions(intent=intent, workload=Workload(1, 512, 128))
    )
    for name, intent in INTENTS.items()
}


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(MIXED)),
    free=st.lists(st.tuples(st.integers(0, 48), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_where_some_are_measured_it_chooses_what_the_whole_plan_chooses(
    name: str, free: list[tuple[int, float]]
) -> None:
    model, idle = MIXED[name], idle_cluster(A6000, len(free)).gpus
    gpus = tuple(
        replace(gpu, free_bytes=min(room * GIB, gpu.total_bytes), load_fraction=load)
        for gpu, (room, load) in zip(idle, free, strict=True)
    )
    snapshot = ClusterSnapshot(gpus)
    plan = make_plan(
        SPEC, Hardware(label="", gpu=A6000, snapshot=snapshot), HalfMeasured(ESTIMATOR), ENGINES, model.options
    )
    chosen = model.choose(snapshot)
    assert (chosen and chosen.config) == (plan.best and plan.best.config)
    assert (chosen and chosen.placement) == (plan.best and plan.best.layout)


@pytest.mark.parametrize("name", sorted(MIXED))
def test_where_some_are_measured_only_those_that_may_win_are_asked_for_their_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On idle GPUs the first measured one and the first of its rivals."""
    answer, asked = FitsOn.__call__, list[DeploymentConfig]()

    def counted(self: FitsOn, estimate: Estimate) -> Placement | Replicas | NoRoom:
        asked.append(estimate.config)
        return answer(self, estimate)

    monkeypatch.setattr(FitsOn, "__call__", counted)
    assert MIXED[name].choose(idle_cluster(A6000, 8)) is not None
    assert len(asked) <= 2


def test_nothing_is_chosen_without_gpus_and_no_workload_beyond_the_context() -> None:
    assert MODELS["min-cost"].choose(ClusterSnapshot(())) is None
    with pytest.raises(ConfigError, match="context"):
        RankedModel(SPEC, A6000, ESTIMATOR, ENGINES, PlanOptions(workload=Workload(1, 4000, 4000)))
