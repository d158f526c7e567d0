"""Placers by the name of a placement policy: an order of GPUs for ``fit``, look-ahead, or the exact placer."""

from __future__ import annotations

from typing import Protocol

from fingerprint.errors import ConfigError
from fingerprint.extras import need_extra
from placement.fit import Placer
from placement.lookahead import LookAhead, look_ahead_price
from placement.policies import ILP, JOINT, LeastLoaded, make_policy, policy_names
from placement.types import BlockDemand, ClusterSnapshot, Placement, Refusal

__all__ = ["FindsPlaces", "check_placement", "make_placer", "need_solver"]


class FindsPlaces(Protocol):
    """Placer on one snapshot under one policy, for any number of demands."""

    def fit(self, demand: BlockDemand) -> Placement | Refusal: ...


def check_placement(name: str, *, sees_load: bool = True) -> None:
    """Check the name of a placement policy.

    Args:
        sees_load: whether snapshots tell what is deployed and its load, which look-ahead needs.

    Raises:
        ConfigError: there is no such policy, or not here.
    """
    price = look_ahead_price(name)
    if name not in policy_names() and (price is None or not sees_load):
        known = ", ".join(policy_names(sees_load=sees_load))
        raise ConfigError(f"there is no placement policy {name!r}; choose one of {known}")


def need_solver(name: str) -> None:
    """Raise MissingExtraError where policy ``name`` needs a solver that is not installed."""
    if name == ILP:
        need_extra("exact", f"placement policy {ILP}")


def make_placer(
    name: str, snapshot: ClusterSnapshot, *, threshold: float | None = None, link_group_size: int | None = None
) -> FindsPlaces:
    """Return the policy ``name`` on ``snapshot``; ``threshold`` is hybrid's load limit L, of no use to any other.

    Raises:
        ConfigError: an unknown name, or a snapshot that contradicts itself.
        MissingExtraError: the solver of exact placement is not installed.
    """
    check_placement(name)
    need_solver(name)
    price = look_ahead_price(name)
    if price is not None:
        return LookAhead(snapshot, gpu_price=price, link_group_size=link_group_size)
    if name == ILP:
        from placement.ilp_placer import (
            ExactPlacer,  # the solver takes 0.2 s to import, which a --help does not have
        )

        return ExactPlacer(snapshot, link_group_size=link_group_size)
    if name == JOINT:
        return Placer(snapshot, LeastLoaded(), link_group_size=link_group_size)
    policy = make_policy(name, threshold=threshold if name == "hybrid" else None)
    return Placer(snapshot, policy, link_group_size=link_group_size)
