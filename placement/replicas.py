"""Several replicas of one configuration, each on GPUs of its own: two on one GPU would share its time, and neither
would take what was estimated of it.

They are placed one after the other, each as the policy says on the GPUs that those before it left. A replica
takes pp groups of tp GPUs, each group of one node. Where every GPU that is of any use has room for any stage (as
with one stage, and wherever GPUs are alike), each replica leaves all but pp of the groups there are: all find a
place when there is one. Pipelines on GPUs of unlike room may be refused though another arrangement exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.errors import ConfigError
from placement.fit import GIB, Placer, free_bytes
from placement.load_model import Key
from placement.placer_registry import FindsPlaces
from placement.types import BlockDemand, ClusterSnapshot, Placement, Refusal

__all__ = ["ReplicaPlacer", "Replicas"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Placements of all replicas; no two share a GPU. How many layers a stage has may differ between them."""

    placements: tuple[Placement, ...]

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers per stage of the first replica."""
        return self.placements[0].layers_per_stage


class ReplicaPlacer:
    """Placer of ``count`` replicas of a demand on one snapshot, for any number of demands.

    Args:
        placer_on: the policy on a snapshot, which is that of all GPUs or of those that are left.

    Raises:
        ConfigError: no replica at all.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, count: int, placer_on: Callable[[ClusterSnapshot], FindsPlaces]
    ) -> None:
        if count < 1:
            raise ConfigError(f"a deployment has at least one replica, got {count}")
        self._snapshot, self._count, self._placer_on = snapshot, count, placer_on
        self._placers: dict[frozenset[Key], FindsPlaces] = {}  # by the GPUs that are taken

    def fit(self, demand: BlockDemand) -> Replicas | Refusal:
        """Return where all of them go, or why they do not."""
        placed: list[Placement] = []
        num_taken, placer = 0, self._placer(frozenset())
        for _ in range(self._count):
            if num_taken and num_taken + demand.tp * demand.pp > len(self._snapshot.gpus):
                return self._refusal(demand, len(placed), None)
            answer = placer.fit(demand)
            if isinstance(answer, Refusal):
                return self._refusal(demand, len(placed), answer)
            placed.append(answer)
            num_taken += len(answer.device_ids)
            placer = self._after(placer, placed)
        return Replicas(tuple(placed))

    def _after(self, placer: FindsPlaces, placed: list[Placement]) -> FindsPlaces:
        """Return the placer for what the ``placed`` left, of which ``placer`` gave the last."""
        if isinstance(placer, Placer):
            return placer.without(placed[-1])
        return self._placer(
            frozenset((s.node_id, device) for one in placed for s in one.stages for device in s.device_ids)
        )

    def _placer(self, taken: frozenset[Key]) -> FindsPlaces:
        if taken not in self._placers:
            left = tuple(gpu for gpu in self._snapshot.gpus if (gpu.node_id, gpu.device_id) not in taken)
            self._placers[taken] = self._placer_on(ClusterSnapshot(left, self._snapshot.deployments))
        return self._placers[taken]

    def _refusal(self, demand: BlockDemand, placed: int, of_next: Refusal | None) -> Refusal:
        """Return the refusal with what would suffice for all replicas.

        So much memory on each GPU of the roomiest groups that any stage of the even split goes on any of them.
        With one stage that is also the least that would suffice.
        """
        if demand.pp > demand.num_layers:
            assert of_next is not None, "the first was refused, as every placer does"
            return of_next
        groups = self._count * demand.pp
        rooms = self._rooms(demand.tp)[:groups]
        longest = -(-demand.num_layers // demand.pp)
        need_bytes = max(demand.stage_bytes(stage, longest) for stage in range(demand.pp))
        have_bytes = rooms[-1] if len(rooms) == groups else 0
        degrees = f"tp={demand.tp},pp={demand.pp}"
        fitted = f"{placed} of {self._count} replicas of {degrees} fit, each on devices of its own"
        if of_next is None:
            num_gpus = len(self._snapshot.gpus)
            why = f"all take {groups * demand.tp} devices, there are {num_gpus}"
        elif placed == 0:
            why = of_next.reason
        else:
            why = (
                f"all need {need_bytes / GIB:.2f} GiB free on {groups * demand.tp} devices, in groups of "
                f"{demand.tp} on one node; the last of these has {have_bytes / GIB:.2f} GiB"
            )
        missing_gpus = (groups - len(rooms)) * demand.tp
        kind = next((gpu.kind for gpu in self._snapshot.gpus), "GPU")
        return Refusal(f"{fitted}: {why}", max(0, need_bytes - have_bytes), missing_gpus, kind)

    def _rooms(self, tp: int) -> list[int]:
        """Return the rooms of the roomiest groups of ``tp`` GPUs of one node, most first (``placement.fit``,
        Grouping).
        """
        by_node: dict[str, list[int]] = {}
        for gpu in self._snapshot.gpus:
            by_node.setdefault(gpu.node_id, []).append(free_bytes(gpu))
        rooms = [sorted(free, reverse=True)[tp - 1 :: tp] for free in by_node.values()]
        return sorted((room for of_node in rooms for room in of_node), reverse=True)
