"""The decisions of a running cluster together: scale, consolidate, move, in this order and one kind at a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.errors import ConfigError
from placement.actions import ClusterAction
from placement.consolidation import consolidate
from placement.migration import Migration, best_move
from placement.scaling import Scaling, scale
from placement.types import ClusterSnapshot

__all__ = ["Elastic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """A cluster policy (``actions.ClusterPolicy``) of the parts that are given.

    Raises:
        ConfigError: an interval that is not above 0.
    """

    scaling: Scaling | None = None
    consolidates: bool = False  # of replicas too many, the one goes that frees GPUs; its requests move
    migration: Migration | None = None
    link_group_size: int | None = None
    every_s: float = 10.0
    name: str = "elastic"

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ConfigError(f"a cluster policy looks at intervals above 0 s, got {self.every_s}")

    def __call__(self, snapshot: ClusterSnapshot) -> Sequence[ClusterAction]:
        if self.scaling is not None:
            drains = consolidate(snapshot, self.scaling) if self.consolidates else ()
            going = {drain.name for drain in drains}
            scales = [each for each in scale(snapshot, self.scaling) if each.name not in going]
            if drains or scales:
                return (*scales, *drains)
        if self.migration is None:
            return ()
        move = best_move(snapshot, self.migration, link_group_size=self.link_group_size)
        return () if move is None else (move,)
