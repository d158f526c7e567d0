"""Choice of the GPU that lends spare memory and time to a profile: the quietest that has the room."""

from __future__ import annotations

from placement.policies import LeastLoaded
from placement.types import ClusterSnapshot, GpuState

__all__ = ["HARVESTED_SHARE", "spare_gpu"]

HARVESTED_SHARE = 0.9  # of what a GPU has free: the rest stays for what its workers did not foresee


def spare_gpu(snapshot: ClusterSnapshot, need_bytes: int) -> GpuState | None:
    """Return the least loaded GPU, of equals the emptiest, with ``need_bytes`` within its share; None: there is
    none.
    """
    tiers = LeastLoaded().tiers(snapshot.gpus)
    quietest = (gpu for tier in tiers for gpu in tier)
    return next((gpu for gpu in quietest if need_bytes <= gpu.free_bytes * HARVESTED_SHARE), None)
