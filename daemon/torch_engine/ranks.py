"""Rank 0's side and the other ranks' side of running one model on several processes.

Each further rank is ``python -m daemon.torch_engine.ranks``, a child of rank 0 in its process group. Orders and
answers go over a socket pair as length-prefixed JSON (never pickle), tensors between ranks over torch.distributed.
A child whose parent is gone ends at once: it holds the reading end of a pipe that only rank 0 can close.
"""

from __future__ import annotations

import torch

from daemon.torch_engine.rank_device import RankDevice
from daemon.torch_engine.stage import RankTiming, Stage
from daemon.torch_engine.steps import StepPlan
from daemon.torch_engine.topology import LoadOrder, RankPlace, make_groups
from fingerprint.errors import EngineError
from fingerprint.measurements import RankMemory

__all__ = ["RankGroup"]


class RankGroup:
    def __init__(self, place: RankPlace, device_ids: tuple[str, ...]) -> None:
        if place.tp * place.pp > 1:
            raise EngineError("several ranks are on their way")
        self.serves = (place.tp, place.pp, device_ids)
        self._place = place
        self._device = RankDevice(device_ids[0], 0, torch.get_num_threads())
        self._groups = make_groups(place)

    def load(self, order: LoadOrder) -> Stage:
        return Stage(order, self._place, self._groups, self._device)

    def step(self, stage: Stage, plan: StepPlan) -> tuple[torch.Tensor, tuple[RankTiming, ...]]:
        logits, timing = stage.step(plan)
        assert logits is not None
        return logits, (timing,)

    def memory(self, stage: Stage) -> tuple[RankMemory, ...]:
        return (stage.memory(),)

    def unload(self) -> None: ...

    def close(self) -> None: ...
