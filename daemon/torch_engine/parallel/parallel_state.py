"""Places of the ranks of one model, and the order that all of them receive at a load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from daemon.worker_spec import WorkerLimits
from fingerprint.config import DeploymentConfig

__all__ = ["AdapterOrder", "Groups", "LoadOrder", "RankPlace", "make_groups"]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Order to load a model, of which every rank loads its part. Crosses processes as JSON."""

    checkpoint: str
    config: DeploymentConfig
    layers_per_stage: tuple[int, ...]
    room_bytes_per_stage: tuple[int, ...]  # of each of its ranks
    limits: WorkerLimits
    dtype: str | None = None  # "float32" in tests of token equality; None: the checkpoint's 16-bit type

    @property
    def path(self) -> Path:
        return Path(self.checkpoint)


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Order to prepare an adapter, of which every rank prepares its part."""

    adapter_id: int
    folder: str


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Ranks are numbered stage by stage: rank = stage * tp + tp_index."""

    rank: int
    tp: int
    pp: int

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_index(self) -> int:
        return self.rank % self.tp


@dataclass(frozen=True, slots=True)
class Groups:
    """Neighbours of one rank. Hidden states go from each rank to its like in the next stage."""

    tensor: dist.ProcessGroup | None
    leader_rank: int  # of this stage
    previous_rank: int
    next_rank: int


def make_groups(place: RankPlace) -> Groups:
    """Make the process groups; all ranks call this together, once the default group is there (if several ranks).

    A single stage is the default group: another one of the same ranks would be a second communicator, with buffers
    of its own on each GPU, and a second one to abort.
    """
    own = dist.group.WORLD if place.tp > 1 else None
    if place.tp > 1 and place.pp > 1:
        for stage in range(place.pp):  # every rank takes part in making every group
            group = dist.new_group(list(range(stage * place.tp, (stage + 1) * place.tp)))
            own = group if stage == place.stage else own
    return Groups(own, place.stage * place.tp, place.rank - place.tp, place.rank + place.tp)
