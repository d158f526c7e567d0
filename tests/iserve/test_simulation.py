"""The simulator with the planner, placement, estimators and batching that decide in production."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.model_source import ModelSource
from iserve.planning.engine_choice import by_preference
from iserve.planning.pipeline import Hardware, PlanOptions, make_plan
from iserve.planning.worker_launch import worker_spec
from iserve.simulation.running import (
    PlannedDeployer,
    SimulatedModel,
    idle_cluster,
    launch_limits,
    measured_model,
    roofline_model,
    simulate_cluster,
)
from placement.rebalancer import Elastic
from placement.replicas import Replicas
from placement.routing import make_router
from placement.scaling import Scaling
from placement.types import Placement
from planner.intent import Intent, IntentKind, Slo
from tests.fingerprint.step_timed_machine import StepTimedMachine, llama_7b, take_depth_tied
from tests.golden_words import Golden
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import Deploy, Deployed, NodeFails, NotDeployed, Scenario, Service

A6000 = gpu_spec("a6000")
WORKLOAD = Workload(batch=8, input_tokens=512, output_tokens=128)


def model(
    name: str = "chat", spec: ModelSpec | None = None, engine: str = "auto", **options: object
) -> SimulatedModel:
    wish = PlanOptions(workload=WORKLOAD, **options)
    return roofline_model(name, spec or llama_7b(), A6000, wish, engine)


def run(
    requests: list[Request],
    *models: SimulatedModel,
    gpus: int = 2,
    service: Service = Service.CONTINUOUS,
    every_s: float = 0.0,
    failing: tuple[NodeFails, ...] = (),
    per_node: int = 8,
) -> SimulationResult:
    deploys = tuple(Deploy(at_s=every_s * i, name=m.name, model=m.name) for i, m in enumerate(models))
    scenario = Scenario(
        cluster=idle_cluster(A6000, gpus, per_node=per_node),
        actions=(*deploys, *failing),
        service=service,
        startup_s=0.0,
    )
    return simulate_cluster(requests, scenario, A6000, {m.name: m for m in models}, router=make_router())


def poisson(count: int, rate_per_s: float, *names: str, seed: int = 5) -> list[Request]:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        Request(
            float(t), int(rng.integers(10, 500)), int(rng.integers(1, 128)), names[int(rng.integers(len(names)))]
        )
        for t in times_s
    ]


def test_a_lone_request_takes_what_the_plan_said() -> None:
    """TTFT and E2E of the chosen configuration at batch 1, between knots of the table."""
    asked = model()
    plan = make_plan(
        asked.spec,
        Hardware(label="2", gpu=A6000, snapshot=idle_cluster(A6000, 2)),
        asked.estimator,
        asked.engines,
        asked.options,
    )
    assert plan.best is not None
    alone = asked.estimator.estimate(plan.best.config, replace(WORKLOAD, batch=1))
    for service in Service:
        outcomes = run([Request(3.0, 512, 128, "chat")], asked, service=service).outcomes
        assert outcomes.ttft_s[0] == pytest.approx(alone.ttft_s.value, rel=0.02)
        assert outcomes.e2e_s[0] == pytest.approx(alone.e2e_s.value, rel=0.02)


def test_the_engines_scheduler_gives_the_same_times() -> None:
    requests, asked = poisson(300, 4.0, "chat"), model(engine="torch")
    fast, true = (run(requests, asked, service=s) for s in (Service.CONTINUOUS, Service.STEPPED))
    np.testing.assert_allclose(fast.outcomes.first_token_s, true.outcomes.first_token_s, rtol=1e-9)
    np.testing.assert_allclose(fast.outcomes.last_token_s, true.outcomes.last_token_s, rtol=1e-9)


def test_a_deployment_goes_where_the_plan_for_the_same_cluster_says() -> None:
    deployer = PlannedDeployer(A6000, [model()])
    snapshot = idle_cluster(A6000, 8)
    decided = deployer("chat", snapshot)
    asked = model()
    hardware = Hardware(label="8", gpu=A6000, snapshot=snapshot)
    plan = make_plan(asked.spec, hardware, asked.estimator, asked.engines, asked.options)
    assert isinstance(decided, Deployed)
    assert plan.best is not None
    assert decided.placement == plan.best.layout
    assert str(plan.best.config) in decided.what


def test_limits_are_those_a_worker_is_launched_with() -> None:
    """The rule is the controller's; this holds the two together."""
    asked = model()
    plan = make_plan(
        asked.spec,
        Hardware(label="2", gpu=A6000, snapshot=idle_cluster(A6000, 2)),
        asked.estimator,
        asked.engines,
        asked.options,
    )
    assert plan.best is not None
    assert isinstance(plan.best.layout, Placement)
    source = ModelSource("chat", Path("chat"), True, asked.spec)
    free = {gpu.device_id: gpu.free_bytes for gpu in idle_cluster(A6000, 2).gpus}
    for workload in (WORKLOAD, Workload(1, 64, 32), Workload(64, 3000, 1000), Workload(4, 64, 32, 4000)):
        for step_tokens in (None, 2048):
            best = plan.best.config, plan.best.layout
            launched = worker_spec("chat", source, "w", *best, workload, free, step_tokens).limits
            assert launched is not None
            ours = launch_limits(workload, plan.best.config.engine, step_tokens)
            assert (ours.max_batch, ours.max_context_tokens, ours.max_batched_tokens, ours.kv_tokens) == (
                launched.max_batch,
                launched.max_context_tokens,
                launched.max_batched_tokens,
                launched.kv_tokens,
            )


def test_models_that_arrive_later_see_the_memory_that_is_left() -> None:
    """Each takes about 8 GiB with int8 weights; 48 GiB are full after some, and the next are refused."""
    names = [f"m{i}" for i in range(12)]
    one_gpu = [model(name) for name in names]
    result = run(poisson(50, 1.0, *names), *one_gpu, gpus=1, every_s=10.0)
    kinds = [change.kind for change in result.changes]
    placed = kinds.count(ChangeKind.DEPLOYED)
    assert 2 <= placed < 12
    assert kinds == [ChangeKind.DEPLOYED] * placed + [ChangeKind.REFUSED] * (12 - placed)
    assert "GiB" in result.changes[-1].text
    assert result.gpus[0].peak_bytes <= A6000.memory_bytes


def devices(result: SimulationResult) -> list[tuple[str, ...]]:
    return [change.device_ids for change in result.changes if change.kind is ChangeKind.DEPLOYED]


def replicated(count: int, scenario: Scenario, cluster_policy: Elastic | None = None) -> SimulationResult:
    """``count`` replicas of one model, which is asked for more than one of them serves."""
    asked = model()
    scenario = replace(scenario, actions=(Deploy(at_s=0.0, name="chat", model="chat", replicas=count),))
    requests = poisson(400, 40.0, "chat")
    return simulate_cluster(
        requests, scenario, A6000, {"chat": asked}, router=make_router(), cluster_policy=cluster_policy
    )


FOUR = Scenario(cluster=idle_cluster(A6000, 4), actions=(), startup_s=0.0)


def test_replicas_go_where_a_plan_for_so_many_says() -> None:
    """The replicas are of one configuration, no two on one GPU, and so faster; one alone takes all GPUs."""
    four = replicated(4, FOUR)
    asked = model(replicas=4)
    hardware = Hardware(label="4", gpu=A6000, snapshot=FOUR.cluster)
    plan = make_plan(asked.spec, hardware, asked.estimator, asked.engines, asked.options)
    assert plan.best is not None
    assert isinstance(plan.best.layout, Replicas)
    expected = [tuple(d for s in p.stages for d in s.device_ids) for p in plan.best.layout.placements]
    assert devices(four) == expected
    assert len({device for each in expected for device in each}) == sum(map(len, expected))
    one = replicated(1, FOUR)
    assert len(devices(one)[0]) == 4
    assert np.median(four.outcomes.e2e_s) < np.median(one.outcomes.e2e_s) / 1.5


def test_so_many_that_not_all_have_room_are_refused_as_by_a_deploy() -> None:
    result = replicated(3, replace(FOUR, cluster=idle_cluster(A6000, 2)))
    assert devices(result) == []
    assert "replicas" in next(c.text for c in result.changes if c.kind is ChangeKind.REFUSED)


def test_one_more_is_like_the_others_and_on_gpus_of_its_own(golden: Golden) -> None:
    grows = Elastic(scaling=Scaling(min_replicas=2, max_replicas=3, idle_s=None))
    result = replicated(2, replace(FOUR, cluster=idle_cluster(A6000, 3, per_node=1)), grows)
    assert sorted(devices(result)) == [("a6000:0",), ("a6000:1",), ("a6000:2",)]
    assert len({c.text for c in result.changes if c.kind is ChangeKind.DEPLOYED}) == 1
    crowded = replicated(1, FOUR, replace(grows, scaling=Scaling(max_replicas=3, idle_s=None)))
    assert len(devices(crowded)) == 1
    told = next(c.text for c in crowded.changes if c.kind is ChangeKind.REFUSED)
    golden("controller", told)
    wide = replace(FOUR, cluster=idle_cluster(A6000, 2, per_node=1))
    full = replicated(2, wide, Elastic(scaling=Scaling(min_replicas=2, max_replicas=3, idle_s=None)))
    assert len(devices(full)) == 2


def test_a_lost_replica_comes_back_like_the_others_on_a_gpu_without_any() -> None:
    scenario = replace(FOUR, cluster=idle_cluster(A6000, 3, per_node=1))
    deploys = (Deploy(at_s=0.0, name="chat", model="chat", replicas=2), NodeFails(at_s=5.0, node_id="node0"))
    result = simulate_cluster(
        poisson(200, 4.0, "chat"),
        replace(scenario, actions=deploys),
        A6000,
        {"chat": model()},
        router=make_router(),
    )
    assert devices(result) == [("a6000:0",), ("a6000:1",), ("a6000:2",)]
    assert len({c.text for c in result.changes if c.kind is ChangeKind.DEPLOYED}) == 1


def test_co_located_models_slow_one_another() -> None:
    requests = poisson(200, 2.0, "a", "b")
    together = run(requests, model("a"), model("b"), gpus=1)
    alone = run([r for r in requests if r.model == "a"], model("a"), gpus=1)
    shared = together.outcomes.select(together.outcomes.deployment == 0)
    assert np.asarray(shared.e2e_s).mean() > 1.1 * np.asarray(alone.outcomes.e2e_s).mean()


def test_a_failed_node_is_planned_around() -> None:
    result = run(
        poisson(200, 2.0, "chat"), model(), gpus=2, per_node=1, failing=(NodeFails(at_s=30.0, node_id="node0"),)
    )
    placed = [change for change in result.changes if change.kind is ChangeKind.DEPLOYED]
    assert [change.at_s for change in placed] == [0.0, 30.0]
    assert placed[1].device_ids == ("a6000:1",)
    assert set(result.outcomes.failure.tolist()) <= {Failure.NONE, Failure.CONNECTION_LOST}


def test_what_cannot_be_deployed_says_what_comes_nearest() -> None:
    hopeless = model(intent=Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(tpot_s=1e-9)))
    decided = PlannedDeployer(A6000, [hopeless])("chat", idle_cluster(A6000, 2))
    assert isinstance(decided, NotDeployed)
    assert "comes nearest" in decided.reason


def test_a_workload_beyond_the_models_context_is_not_simulated(golden: Golden) -> None:
    asked = replace(model(), options=PlanOptions(workload=Workload(1, 4000, 1000)))
    with golden.raises("controller", ConfigError):
        PlannedDeployer(A6000, [replace(asked, spec=replace(asked.spec, max_context_tokens=4096))])


def test_measured_step_times_are_used_where_there_are_any(golden: Golden) -> None:
    profile = take_depth_tied(StepTimedMachine())
    gpu = profile.machine.device
    measured = measured_model("chat", profile, gpu, PlanOptions(workload=Workload(4, 512, 128)))
    decided = PlannedDeployer(gpu, [measured])("chat", idle_cluster(gpu, 1))
    assert isinstance(decided, Deployed)
    roofline = SimulatedModel(
        name="chat",
        spec=profile.spec,
        estimator=RooflineEstimator(profile.spec, gpu),
        engines=by_preference(capabilities_for(profile.engine), gpu),
        options=measured.options,
    )
    by_datasheet = PlannedDeployer(gpu, [roofline])("chat", idle_cluster(gpu, 1))
    assert isinstance(by_datasheet, Deployed)
    assert decided.steps.decode_s(4, 512) != by_datasheet.steps.decode_s(4, 512)
    with golden.raises("controller", ConfigError):
        measured_model("chat", profile, gpu_spec("t4" if gpu.name != "t4" else "a6000"), PlanOptions())


@pytest.mark.parametrize(("count", "per_node"), [(0, 8), (4, 0), (-1, 8)])
def test_a_cluster_without_gpus_is_refused(count: int, per_node: int, golden: Golden) -> None:
    with golden.raises("controller", ConfigError):
        idle_cluster(A6000, count, per_node=per_node)
