"""Decisions from a kept order: those of the whole plan, and what seeing the others changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import capabilities_for
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.planning import Hardware, PlanOptions, make_plan
from iserve.ranked_model import Chosen, RankedModel
from iserve.simulation import idle_cluster
from placement.load_model import LoadedCluster, Tenant, shares
from placement.types import ClusterSnapshot, DeploymentState, Placement, ReplicaState, StagePlacement
from planner.intent import CostModel, Intent, IntentKind, Slo
from tests.fingerprint.step_timed_machine import llama_7b

GIB = 2**30
A6000 = gpu_spec("a6000")
SPEC = llama_7b()
ESTIMATOR = RooflineEstimator(SPEC, A6000)
ENGINES = tuple(capabilities_for("auto"))
INTENTS = {
    "min-cost": Intent(),
    "min-latency": Intent(kind=IntentKind.MIN_LATENCY),
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


def test_nothing_is_chosen_without_gpus_and_no_workload_beyond_the_context() -> None:
    assert MODELS["min-cost"].choose(ClusterSnapshot(())) is None
    with pytest.raises(ConfigError, match="context"):
        RankedModel(SPEC, A6000, ESTIMATOR, ENGINES, PlanOptions(workload=Workload(1, 4000, 4000)))


def _beside(busy: float) -> ClusterSnapshot:
    """Eight GPUs, one deployment on all of them that is ``busy``."""
    idle = idle_cluster(A6000, 8)
    stage = StagePlacement(
        node_id="node0",
        device_ids=tuple(gpu.device_id for gpu in idle.gpus),
        first_layer=0,
        num_layers=32,
        bytes_per_gpu=2 * GIB,
    )
    replica = ReplicaState(
        replica_id="other#1", placement=Placement((stage,)), ready=True, outstanding=0, max_batch=1
    )
    other = DeploymentState(
        name="other", model="other", wanted=1, replicas=(replica,), moving=False, waiting=0,
        requests_per_s=busy, service_s=1.0, idle_s=0.0, steady_s=1000.0,
    )  # fmt: skip
    gpus = tuple(
        replace(gpu, free_bytes=gpu.free_bytes - 2 * GIB, load_fraction=min(busy, 1.0)) for gpu in idle.gpus
    )
    return ClusterSnapshot(gpus, (other,))


def test_beside_others_it_adds_least_to_the_time_of_all() -> None:
    """Compared with the eight best of different degrees that fit, each where the policy puts it."""
    model, snapshot, rate = MODELS["min-latency"], _beside(0.8), 0.5
    chosen = model.choose_beside(snapshot, rate)
    assert chosen is not None

    def added(one: Chosen) -> float:
        busy = rate * one.estimate.e2e_s.value
        return LoadedCluster.of(snapshot).cost_of_adding(Tenant(busy, shares(one.placement)), 0.0)

    best: dict[tuple[int, int], float] = {}
    for one in model._that_fit(snapshot):
        best.setdefault((one.config.tp, one.config.pp), added(one))
    assert len(best) > 8
    looked_at = list(best.values())[:8]
    assert added(chosen) == min(looked_at)
    assert added(chosen) < looked_at[0]  # the best alone is not the best here


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"min-latency"}))
def test_other_intents_do_not_see_the_others(name: str) -> None:
    assert MODELS[name].choose_beside(_beside(0.8), 0.5) == MODELS[name].choose(_beside(0.8))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_alone_or_uncalled_it_chooses_as_ever(name: str) -> None:
    idle = idle_cluster(A6000, 8)
    assert MODELS[name].choose_beside(idle, 1e-6) == MODELS[name].choose(idle)
    assert MODELS[name].choose_beside(_beside(0.8), 0.0) == MODELS[name].choose(_beside(0.8))
