"""Joint plans in the simulator: the replicas that a deploy with the same options would start."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from daemon.engines.registry import get_engine
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.controller.reconcile import planned_service
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.pipeline import Hardware, PlanOptions
from iserve.planning.worker_launch import PlannedDeployment
from iserve.simulation.running import PlannedDeployer, SimulatedModel, idle_cluster, roofline_model
from placement.types import ClusterSnapshot
from planner.intent import Intent, IntentKind
from traces.simulator.scenario import Deployed, NotDeployed

H200 = gpu_spec("h200")
RECORDED = Path(__file__).parents[1] / "fingerprint" / "recorded" / "public_models.json"
PUBLIC = json.loads(RECORDED.read_text(encoding="utf-8"))["models"]
LLAMA = "meta-llama/Llama-3.1-8B"
MODELS = (LLAMA, "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-2-9b")
GROWING = PlanOptions(more_requests=True, longer_requests=True, more_replicas=True)


@cache
def spec_of(name: str) -> ModelSpec:
    return read_spec(PUBLIC[name]["config"])


def wish(kind: IntentKind = IntentKind.MIN_COST, rate: float | None = None, **options: object) -> PlanOptions:
    return replace(GROWING, intent=Intent(kind=kind, rate_per_s=rate), **options)  # type: ignore[arg-type]


def model(options: PlanOptions, name: str = LLAMA) -> SimulatedModel:
    return roofline_model("chat", spec_of(name), H200, options, "vllm")


def deployer(options: PlanOptions, name: str = LLAMA) -> PlannedDeployer:
    return PlannedDeployer(H200, [model(options, name)])


def all_placed(found: Sequence[Deployed] | NotDeployed) -> Sequence[Deployed]:
    assert not isinstance(found, NotDeployed), found.reason
    return found


def devices(replicas: Iterable[Deployed]) -> Counter[str]:
    return Counter(device for replica in replicas for device in replica.placement.device_ids)


def left_by(cluster: ClusterSnapshot, replicas: Iterable[Deployed]) -> ClusterSnapshot:
    """Return the GPUs without a replica, as the simulator offers them for one more."""
    held = devices(replicas)
    return ClusterSnapshot(tuple(gpu for gpu in cluster.gpus if gpu.device_id not in held))


KINDS = (IntentKind.MIN_COST, IntentKind.MIN_LATENCY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [None, 0.5, 12.0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_are_so_many_replicas_on_gpus_of_their_own(
    kind: IntentKind, rate: float | None, count: int
) -> None:
    found = all_placed(deployer(wish(kind, rate)).several("chat", idle_cluster(H200, 4), count))
    assert len(found) == count
    assert set(devices(found).values()) == {1}
    assert len({replica.config for replica in found}) == 1
    assert all(replica.service is not None for replica in found)


def test_more_replicas_than_gpus_are_refused() -> None:
    assert isinstance(deployer(wish()).several("chat", idle_cluster(H200, 2), 3), NotDeployed)


@pytest.mark.parametrize("kind", KINDS)
def test_another_is_one_more_of_the_same_configuration_on_gpus_of_its_own(kind: IntentKind) -> None:
    cluster, planner = idle_cluster(H200, 8), deployer(wish(kind, 12.0))
    two = all_placed(planner.several("chat", cluster, 2))
    more = planner.another(two[0], "chat", left_by(cluster, two))
    assert isinstance(more, Deployed)
    assert more.config == two[0].config
    assert set(devices([*two, more]).values()) == {1}
    assert len(devices([more])) == len(devices(two)) / 2


def test_another_is_refused_where_no_gpu_is_left() -> None:
    cluster, planner = idle_cluster(H200, 2), deployer(wish())
    two = all_placed(planner.several("chat", cluster, 2))
    assert isinstance(planner.another(two[0], "chat", left_by(cluster, two)), NotDeployed)


def planned(cluster: ClusterSnapshot, options: PlanOptions, name: str) -> PlannedDeployment:
    asked = model(options, name)
    return planned_deployment(
        ModelSource(name="chat", directory=Path("/chat"), has_weights=False, spec=asked.spec),
        Hardware(label="4", gpu=H200, snapshot=cluster),
        asked.estimator,
        get_engine("vllm").capabilities(),
        options,
        devices=(),
        deployable_of=lambda config, replicas: DeployableDocument(here=True),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        *(wish(kind, rate) for kind in KINDS for rate in (None, 0.5, 20.0)),
        wish(IntentKind.MIN_GPU_HOURS, 20.0),
        wish(IntentKind.MIN_LATENCY, expect=3),
        wish(rate=2.0, replicas=2, more_replicas=False),
    ],
    ids=[*(f"{kind}-{rate}" for kind in KINDS for rate in (None, 0.5, 20.0)), "gpu-hours", "expect", "two"],
)
def test_all_replicas_are_those_of_a_deploy_on_the_same_hardware(name: str, options: PlanOptions) -> None:
    cluster = idle_cluster(H200, 4)
    found = all_placed(deployer(options, name).all_replicas("chat", cluster))
    deploy = planned(cluster, options, name)
    assert deploy.best is not None
    assert deploy.capacity is not None
    assert deploy.document.joint is not None
    config: DeploymentConfig = deploy.best.config
    assert {replica.config for replica in found} == {config}
    assert [replica.placement for replica in found] == list(deploy.capacity.placements)
    assert [replica.service for replica in found] == [deploy.document.joint.service] * len(found)
    assert {replica.forecast_service for replica in found} == {deploy.document.joint.service}
    times = planned_service(to_json(deploy.document).decode())
    assert times == deploy.document.joint.service, "by which its gateway forecasts"
    tokens = [replica.steps.limits.kv_tokens for replica in found]
    assert tokens == list(deploy.document.joint.kv_tokens)
    assert {replica.steps.limits.max_batch for replica in found} == {deploy.capacity.workload.batch}
    assert {replica.steps.limits.max_context_tokens for replica in found} == {
        deploy.capacity.workload.context_tokens
    }


def test_a_choice_that_is_made_again_is_the_same() -> None:
    """The second is made with what the first has tabulated."""
    cluster, planner = idle_cluster(H200, 4), deployer(wish(IntentKind.MIN_LATENCY, 12.0))
    first, second = (all_placed(planner.all_replicas("chat", cluster)) for _ in range(2))
    assert [replica.placement for replica in first] == [replica.placement for replica in second]


def test_one_is_the_first_of_a_deploy_with_one_replica() -> None:
    cluster, options = idle_cluster(H200, 4), wish(IntentKind.MIN_LATENCY, 12.0)
    one = deployer(options)("chat", cluster)
    (same,) = all_placed(deployer(replace(options, more_replicas=False)).all_replicas("chat", cluster))
    assert isinstance(one, Deployed)
    assert (one.config, one.placement) == (same.config, same.placement)
