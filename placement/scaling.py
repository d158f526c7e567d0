"""Scaling: how many replicas a deployment needs for its load; more when they are too busy, none without requests.

Going up and going down have limits of their own (``target`` above ``low``), so that a load between them changes
nothing: once n replicas were asked for at the work w, there are fewer only after it fell below
``w * low / target``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.errors import ConfigError
from placement.actions import Scale
from placement.types import ClusterSnapshot, DeploymentState

__all__ = ["MIN_IDLE_S", "Scaling", "replicas_for", "scale"]

MIN_IDLE_S = 1.0  # less is the pause between two requests of one client


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Limits of the decision.

    Raises:
        ConfigError: ``low`` is not below ``target``, or a value out of its range.
    """

    target: float = 0.7  # busy fraction that a replica is sized for; at more, there are too few
    low: float = 0.45  # there are too many when one fewer would still be at most this busy
    drain_s: float = 60.0  # in which a backlog is to be worked off
    hold_s: float = (
        120.0  # without a change, before there are fewer: the window that the load is seen over. Before
    )
    # there is none, ``idle_s`` where that is shorter
    idle_s: float | None = 300.0  # without a request, before there is none; None: one always stays
    min_replicas: int = 1  # of a deployment that is awake
    max_replicas: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.low < self.target <= 1:
            raise ConfigError(f"scaling needs 0 < low < target <= 1, got {self.low} and {self.target}")
        if not self.drain_s > 0 or not self.hold_s >= 0:
            raise ConfigError(f"scaling needs a time to drain above 0 s and to hold from 0 s, got {self}")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"scaling needs 1 <= min_replicas <= max_replicas, got {self.min_replicas} and {self.max_replicas}"
            )
        if self.idle_s is not None and not self.idle_s >= MIN_IDLE_S:
            raise ConfigError(
                f"scaling to nothing needs an idle time of {MIN_IDLE_S:g} s or more, got {self.idle_s}"
            )

    def within(self, replicas: int) -> int:
        """Return the nearest number that may be."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


def replicas_for(state: DeploymentState, rule: Scaling) -> int:
    """Return how many replicas ``state`` is to have; as many as it has where nothing is to change."""
    now = state.wanted
    if now == 0:
        return rule.min_replicas if state.waiting > 0 else 0
    if rule.idle_s is not None and state.idle_s >= rule.idle_s and state.steady_s >= min(rule.hold_s, rule.idle_s):
        return 0
    work = (state.requests_per_s + state.waiting / rule.drain_s) * state.service_s
    at_least = rule.within(_above(work / rule.target))
    if at_least > now:
        return at_least
    at_most = rule.within(_above(work / rule.low))
    if at_most < now and state.steady_s >= rule.hold_s and not state.moving:
        return at_most
    return now


def scale(snapshot: ClusterSnapshot, rule: Scaling) -> tuple[Scale, ...]:
    """Return an action for every deployment that is to have another number of replicas."""
    wanted = ((state, replicas_for(state, rule)) for state in snapshot.deployments)
    return tuple(Scale(name=state.name, replicas=number) for state, number in wanted if number != state.wanted)


def _above(work: float) -> int:
    return max(1, math.ceil(work - 1e-9))
