"""Deployments that run as a fleet has them: what is known of each, and what of them the plan may not take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.service_model import ServiceModel
from placement.fleet.running import RunningFleet, running_fleet
from placement.fleet.types import Fleet, FleetPlan
from placement.types import (
    ClusterSnapshot,
    DeploymentState,
    GpuState,
    Placement,
    ReplicaState,
    StagePlacement,
)
from tests.placement.fleet.fleets import GIB, option

TOTAL_BYTES = 80 * GIB


def gpu(number: int, *, free_gib: int = 60, load: float = 0.0, node: str = "node0") -> GpuState:
    return GpuState(
        device_id=f"gpu{number}",
        node_id=node,
        gpu_index=number,
        total_bytes=TOTAL_BYTES,
        free_bytes=free_gib * GIB,
        load_fraction=load,
    )


def replica(
    *devices: str, kv_tokens: int | None = 50_000, max_batch: int = 8, node: str = "node0"
) -> ReplicaState:
    stage = StagePlacement(node_id=node, device_ids=devices, first_layer=0, num_layers=32, bytes_per_gpu=20 * GIB)
    return ReplicaState(
        replica_id="-".join(devices),
        placement=Placement((stage,)),
        ready=True,
        outstanding=0,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
    )


def state(
    *replicas: ReplicaState,
    name: str = "chat",
    rate: float = 2.0,
    steady_s: float = 600.0,
    service: ServiceModel | None = None,
) -> DeploymentState:
    return DeploymentState(
        name=name,
        model=name,
        wanted=len(replicas),
        replicas=replicas,
        moving=False,
        waiting=0,
        requests_per_s=rate,
        service_s=0.1,
        idle_s=0.0,
        steady_s=steady_s,
        service=service,
    )


def running(*states: DeploymentState, gpus: tuple[GpuState, ...] = (), first: int = 1) -> RunningFleet:
    snapshot = ClusterSnapshot(gpus or tuple(gpu(number) for number in range(4)), states)
    return running_fleet(snapshot, usable_fraction=0.95, first=first)


def test_a_deployment_with_a_service_model_keeps_its_option_replicas_and_kv_cache() -> None:
    service = option(2)
    two = state(replica("gpu2", "gpu3"), replica("gpu0", "gpu1", kv_tokens=70_000), service=service)
    found = running(two)
    (deployment,) = found.deployments
    assert deployment.name == "chat"
    assert deployment.options == (service,)
    assert [(one.deployment, one.option, one.gpus, one.kv_tokens) for one in deployment.fixed] == [
        (1, 0, (2, 3), 50_000.0),
        (1, 0, (0, 1), 70_000.0),
    ]
    assert deployment.most_replicas == 2
    assert found.rates_per_s == (2.0,)


def test_deployments_are_numbered_from_the_first_number_in_their_order() -> None:
    found = running(
        state(replica("gpu0"), name="a", service=option()),
        state(replica("gpu1"), name="unknown"),
        state(replica("gpu2"), name="b", service=option()),
        first=3,
    )
    assert [(one.name, one.fixed[0].deployment) for one in found.deployments] == [("a", 3), ("b", 4)]


def test_a_replica_whose_kv_cache_is_not_known_holds_its_largest_batch_of_mean_requests() -> None:
    (deployment,) = running(state(replica("gpu0", kv_tokens=None, max_batch=8), service=option())).deployments
    assert deployment.fixed[0].kv_tokens == 8 * option().mean_tokens


def one_of(found: RunningFleet) -> tuple[Fleet, FleetPlan]:
    """Return the fleet of what runs alone, and its plan."""
    fleet = Fleet(found.deployments, found.gpus)
    return fleet, FleetPlan(tuple(one for deployment in found.deployments for one in deployment.fixed))


def test_one_of_which_nothing_is_known_is_left_out_and_its_gpus_are_busy_by_their_load() -> None:
    gpus = (gpu(0, load=0.7), gpu(1, load=0.4), gpu(2))
    known, unknown = state(replica("gpu1"), name="known", service=option()), state(replica("gpu0"))
    found = running(unknown, known, gpus=gpus)
    assert [one.name for one in found.deployments] == ["known"]
    assert found.rates_per_s == (2.0,)
    assert [one.busy for one in found.gpus] == [0.7, 0.0, 0.0]


def test_gpus_of_known_deployments_are_busy_by_their_forecast_alone() -> None:
    found = running(state(replica("gpu0", "gpu1"), service=option(2)), gpus=(gpu(0, load=0.9), gpu(1, load=0.8)))
    assert [one.busy for one in found.gpus] == [0.0, 0.0]


@pytest.mark.parametrize(("steady_s", "rate"), [(0.0, None), (119.9, None), (120.0, 2.0), (3600.0, 2.0)])
def test_a_rate_that_was_counted_for_less_than_two_minutes_is_unknown(steady_s: float, rate: float | None) -> None:
    found = running(state(replica("gpu0"), service=option(), steady_s=steady_s))
    assert found.rates_per_s == (rate,)
    assert len(found.deployments) == 1


def test_a_deployment_that_had_no_request_for_long_has_a_rate_of_zero() -> None:
    assert running(state(replica("gpu0"), service=option(), rate=0.0)).rates_per_s == (0.0,)


def test_replicas_outside_the_snapshot_are_left_out_with_their_part_of_the_rate() -> None:
    elsewhere = replica("gpu0", node="node7")
    asked = state(replica("gpu0"), elsewhere, replica("gpu1"), service=option(), rate=6.0)
    found = running(asked)
    assert [one.gpus for one in found.deployments[0].fixed] == [(0,), (1,)]
    assert found.deployments[0].most_replicas == 2
    assert found.rates_per_s == (4.0,)


def test_a_replica_that_is_only_partly_in_the_snapshot_is_outside_of_it() -> None:
    asked = state(replica("gpu3", "gpu4"), replica("gpu0", "gpu1"), service=option(2), rate=6.0)
    found = running(asked)
    assert [one.gpus for one in found.deployments[0].fixed] == [(0, 1)]
    assert found.rates_per_s == (3.0,)


def test_a_deployment_without_any_replica_here_is_left_out() -> None:
    found = running(state(replica("gpu9"), service=option()), state(service=option(), name="starts"))
    assert (found.deployments, found.rates_per_s) == ((), ())


def test_usable_memory_is_what_is_free_less_the_part_that_is_kept() -> None:
    found = running(gpus=(gpu(0, free_gib=60), gpu(1, free_gib=80)))
    kept_bytes = 0.05 * TOTAL_BYTES
    assert [one.usable_bytes for one in found.gpus] == pytest.approx(
        [60 * GIB - kept_bytes, 80 * GIB - kept_bytes]
    )
    assert [one.total_bytes for one in found.gpus] == [TOTAL_BYTES] * 2


def test_the_order_of_gpus_never_matters() -> None:
    gpus = tuple(gpu(number, free_gib=50 + number) for number in range(4))
    asked = state(replica("gpu2", "gpu3"), service=option(2))
    usual, turned = running(asked, gpus=gpus), running(asked, gpus=gpus[::-1])
    for found in usual, turned:
        held = [found.gpus[number].device_id for number in found.deployments[0].fixed[0].gpus]
        assert held == ["gpu2", "gpu3"]
    assert usual.gpus == turned.gpus[::-1]
    assert turned.deployments[0] == replace(usual.deployments[0], fixed=turned.deployments[0].fixed)
