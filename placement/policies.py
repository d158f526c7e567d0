"""Orders of preference among GPUs: least-loaded, packing, hybrid. Whether anything fits is for ``fit``.

A new policy is a class with ``name``, ``places_on`` and ``tiers``, one line in ``POLICIES``, and a subclass of the
conformance suite (tests/placement/policy_conformance.py); help and pages are made from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fingerprint.errors import ConfigError
from placement.types import GpuState, PlacementPolicy

__all__ = [
    "DEFAULT_LOAD_THRESHOLD",
    "DEFAULT_POLICY",
    "ILP",
    "JOINT",
    "POLICIES",
    "Hybrid",
    "LeastLoaded",
    "NamedPolicy",
    "Packing",
    "make_policy",
    "policy_names",
]

JOINT = "joint"  # decided with the configuration (``placement.fleet``); where that cannot be, spread out
ILP = "ilp"  # exact
DEFAULT_POLICY = "hybrid"
DEFAULT_LOAD_THRESHOLD = 0.2  # hybrid's L: docs/decisions/0019-hybrid-threshold.md
_FREE_STEPS = 20  # free memory breaks ties in steps of 5%: a few MiB of driver noise must not scatter a model


def _free_step(gpu: GpuState) -> int:
    return gpu.free_bytes * _FREE_STEPS // gpu.total_bytes if gpu.total_bytes > 0 else 0


def _least_loaded_key(gpu: GpuState) -> tuple[float, int, str, int, str]:
    return (gpu.load_fraction, -_free_step(gpu), gpu.node_id, gpu.gpu_index, gpu.device_id)


def _packing_key(gpu: GpuState) -> tuple[float, int, str, int, str]:
    return (-gpu.load_fraction, _free_step(gpu), gpu.node_id, gpu.gpu_index, gpu.device_id)


class NamedPolicy(PlacementPolicy, Protocol):
    """Placement policy that users choose by its name.

    Attributes:
        places_on: the GPUs that it prefers, as docs/placement.md says it.
    """

    places_on: ClassVar[str]


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Lowest load first; of equals the emptiest, then node and index. Spreads models to avoid contention."""

    places_on: ClassVar[str] = "the least busy GPUs, of equals the emptiest"
    name: str = "least-loaded"

    def tiers(self, gpus: tuple[GpuState, ...]) -> tuple[tuple[GpuState, ...], ...]:
        return (tuple(sorted(gpus, key=_least_loaded_key)),)


@dataclass(frozen=True, slots=True)
class Packing:
    """Highest load first; of equals the fullest, then node and index. Keeps models on few GPUs."""

    places_on: ClassVar[str] = "the busiest GPUs that have room, of equals the fullest"
    name: str = "packing"

    def tiers(self, gpus: tuple[GpuState, ...]) -> tuple[tuple[GpuState, ...], ...]:
        return (tuple(sorted(gpus, key=_packing_key)),)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Pack among the GPUs with load < ``threshold`` if memory suffices there, else least-loaded among the rest.

    The rest are the GPUs at or above the threshold (paper, section 6). Where neither alone has the memory but
    both together do, ``fit`` takes them together in this order, as it does for every policy: packable ones
    first, then as few and as lightly loaded further ones as it takes.

    Raises:
        ConfigError: a threshold outside 0 to 1.
    """

    places_on: ClassVar[str] = (
        "GPUs whose load of the last 120 s is below a threshold (`ISERVE_LOAD_THRESHOLD`, "
        f"{DEFAULT_LOAD_THRESHOLD:g}), packed; above it, the least busy"
    )
    threshold: float = DEFAULT_LOAD_THRESHOLD
    name: str = "hybrid"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and 0 <= self.threshold <= 1):
            raise ConfigError(f"the hybrid policy's load threshold must be between 0 and 1, got {self.threshold}")

    def tiers(self, gpus: tuple[GpuState, ...]) -> tuple[tuple[GpuState, ...], ...]:
        packable = sorted((g for g in gpus if g.load_fraction < self.threshold), key=_packing_key)
        rest = sorted((g for g in gpus if not g.load_fraction < self.threshold), key=_least_loaded_key)
        return tuple(tuple(tier) for tier in (packable, rest) if tier)


POLICIES: dict[str, Callable[[], NamedPolicy]] = {
    "hybrid": Hybrid,
    "packing": Packing,
    "least-loaded": LeastLoaded,
}


def policy_names(*, sees_load: bool = False) -> tuple[str, ...]:
    """Return what can be given as the name of a policy.

    Args:
        sees_load: whether snapshots tell what is deployed and its load, which look-ahead needs.
    """
    return (JOINT, *POLICIES, ILP, *(["look-ahead[:PRICE]"] if sees_load else []))


def make_policy(name: str = DEFAULT_POLICY, *, threshold: float | None = None) -> PlacementPolicy:
    """Return the policy of that name; ``threshold`` is hybrid's load limit L.

    Raises:
        ConfigError: an unknown name, or a threshold for a policy that has none.
    """
    if name not in POLICIES:
        raise ConfigError(f"there is no placement policy {name!r}; choose one of {', '.join(POLICIES)}")
    if threshold is None:
        return POLICIES[name]()
    if name != "hybrid":
        raise ConfigError(f"the {name} policy has no load threshold; only hybrid has")
    return Hybrid(threshold)
