"""Small clusters, step times that are easy to follow by hand, and a planner that places as configured."""

from __future__ import annotations

from collections.abc import Iterable

from iserve.simulation.running import EngineBatcher
from placement.types import ClusterSnapshot, GpuState, Placement, StagePlacement
from tests.traces.simulator.linear_steps import linear_steps
from traces.request import Request
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Action, Deploy, Deployed, NotDeployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits, StepModel

GPU_BYTES = 100


def cluster(num_gpus: int = 1, *, per_node: int = 8) -> ClusterSnapshot:
    return ClusterSnapshot(
        tuple(
            GpuState(
                device_id=f"gpu{i}",
                node_id=f"node{i // per_node}",
                gpu_index=i % per_node,
                total_bytes=GPU_BYTES,
                free_bytes=GPU_BYTES,
            )
            for i in range(num_gpus)
        )
    )


def limits(max_batch: int = 4, max_context_tokens: int = 4096, max_batched_tokens: int = 512) -> Limits:
    return Limits(
        max_batch=max_batch, max_context_tokens=max_context_tokens, max_batched_tokens=max_batched_tokens
    )


def second_per_step(max_batch: int = 1) -> StepModel:
    """Every step takes one second: a request of n output tokens has n seconds of service when it is alone."""
    return linear_steps(limits(max_batch), step_s=1.0)


def placed_on(*device_ids: str, node_id: str = "node0", size_bytes: int = 10, pp: int = 1) -> Placement:
    """``pp`` stages of four layers, the GPUs divided over them."""
    tp = len(device_ids) // pp
    return Placement(
        tuple(
            StagePlacement(
                node_id=node_id,
                device_ids=device_ids[i * tp : (i + 1) * tp],
                first_layer=4 * i,
                num_layers=4,
                bytes_per_gpu=size_bytes,
            )
            for i in range(pp)
        )
    )


class OnTheFirst:
    """Every replica on the first GPU of the snapshot that has ``size_bytes`` free."""

    name = "on-the-first"

    def __init__(self, steps: StepModel, size_bytes: int = 10) -> None:
        self.steps, self.size_bytes = steps, size_bytes
        self.seen: list[ClusterSnapshot] = []

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        self.seen.append(snapshot)
        for gpu in snapshot.gpus:
            if gpu.free_bytes >= self.size_bytes:
                place = placed_on(gpu.device_id, node_id=gpu.node_id, size_bytes=self.size_bytes)
                return Deployed(placement=place, steps=self.steps, what=f"{model} on {gpu.device_id}")
        return NotDeployed(reason=f"no GPU has {self.size_bytes} bytes free")


class AsTold(OnTheFirst):
    """Each model where ``places`` says."""

    name = "as-told"

    def __init__(self, steps: StepModel, places: dict[str, Placement]) -> None:
        super().__init__(steps)
        self.places = places

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        self.seen.append(snapshot)
        return Deployed(placement=self.places[model], steps=self.steps, what=model)


def deploy_all(*names: str, at_s: float = 0.0) -> tuple[Action, ...]:
    return tuple(Deploy(at_s=at_s, name=name, model=name) for name in names)


def serve(
    requests: Iterable[Request],
    steps: StepModel,
    *,
    service: Service = Service.CONTINUOUS,
    num_gpus: int = 1,
    actions: tuple[Action, ...] | None = None,
) -> SimulationResult:
    """Simulate one deployment, "", on the first GPU, unless ``actions`` say otherwise."""
    return simulate(
        requests,
        Scenario(
            cluster=cluster(num_gpus),
            actions=deploy_all("") if actions is None else actions,
            service=service,
            most_waiting=10**9,
        ),
        Policies(deployer=OnTheFirst(steps), make_batcher=EngineBatcher),
    )
