"""Simulations of one deployment with adapter slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from placement.types import ClusterSnapshot
from placement.variant_routing import VariantPolicy, make_variant_policy
from tests.traces.simulator.worlds import OnTheFirst, cluster
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult, VariantFigures
from traces.simulator.scenario import Action, Deploy, Deployed, NotDeployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel

BASE = ""


class WithSlots(OnTheFirst):
    """Replicas with adapter slots, each on the first GPU that has room for it."""

    def __init__(self, steps: StepModel, cost: AdapterCost, size_bytes: int = 60) -> None:
        super().__init__(steps, size_bytes)
        self.cost = cost

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = super().__call__(model, snapshot)
        return replace(found, adapters=self.cost) if isinstance(found, Deployed) else found


def serve_variants(
    requests: Iterable[Request],
    steps: StepModel,
    cost: AdapterCost,
    *,
    replicas: int = 1,
    policy: VariantPolicy | None = None,
    outstanding_per_slot: int = 2,
    more: tuple[Action, ...] = (),
    **policies,
) -> SimulationResult:
    """Simulate the deployment ``BASE``, each of its replicas on a GPU of its own."""
    deploy = Deploy(at_s=0.0, name=BASE, model=BASE, replicas=replicas, variants=True)
    scenario = Scenario(
        cluster=cluster(8, per_node=1),
        actions=(deploy, *more),
        service=Service.CONTINUOUS,
        most_waiting=10**9,
        outstanding_per_slot=outstanding_per_slot,
    )
    return simulate(
        requests,
        scenario,
        Policies(deployer=WithSlots(steps, cost), variant_policy=policy or make_variant_policy(), **policies),
    )


def variants_of(result: SimulationResult) -> VariantFigures:
    (deployment,) = result.deployments
    assert deployment.variants is not None
    return deployment.variants
