"""A placement that was decided beforehand, as the simulator deploys it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.types import ClusterSnapshot
from traces.simulator.scenario import Deployed, NotDeployed

__all__ = ["Fixed"]


class Fixed:
    """Deployer of each model's replicas on the GPUs they were given, in their order (implements ``Deployer``).

    A replica whose node failed returns to the same GPUs once they are there again, and to no other.
    """

    def __init__(self, name: str, replicas: Mapping[str, Sequence[Deployed]]) -> None:
        self.name = name
        self._replicas = replicas
        self._standing: dict[tuple[str, int], Deployed] = {}

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        planned = self._replicas.get(model, ())
        if not planned:
            return NotDeployed(reason=f"{self.name} leaves it out")
        free = {(gpu.node_id, gpu.device_id): gpu.free_bytes for gpu in snapshot.gpus}
        used = {(gpu.node_id, gpu.device_id): gpu.total_bytes - gpu.free_bytes for gpu in snapshot.gpus}
        # Where less memory is in use than a replica was given, or the GPU is gone, the replica is not there now.
        self._standing = {
            key: replica
            for key, replica in self._standing.items()
            if all(used.get(device, -1) >= size_bytes for device, size_bytes in _memory(replica))
        }
        for number, replica in enumerate(planned):
            fits = all(free.get(device, -1) >= size_bytes for device, size_bytes in _memory(replica))
            if fits and (model, number) not in self._standing:
                self._standing[model, number] = replica
                return replica
        return NotDeployed(reason=f"the GPUs that {self.name} gave it are not free")


def _memory(replica: Deployed) -> list[tuple[tuple[str, str], int]]:
    return [
        ((stage.node_id, device), stage.bytes_per_gpu)
        for stage in replica.placement.stages
        for device in stage.device_ids
    ]
