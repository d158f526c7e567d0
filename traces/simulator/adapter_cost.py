"""Adapter slots of a worker as a simulation knows them: how many there are, and what adapters take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.errors import ConfigError

__all__ = ["AdapterCost"]


def _no_time(rows: int, active: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCost:
    """Slots of a worker, and the time that adapters or deltas take. Zeros where an engine's were not measured.

    With ``prompt_s`` (deltas, which are merged for prompts) adapters of prompts are none of a step's ``added_s``.

    Raises:
        ConfigError: fewer loaded adapters than slots, no slot, or a negative time.
    """

    slots: int  # adapters in flight at once
    max_loaded: int
    load_s: float = 0.0  # of one adapter
    stops_steps: bool = True  # for as long as that; else a load holds up the requests for its adapter alone
    added_s: Callable[[int, int], float] = _no_time  # to a step, by its sequences and its adapters, one at least
    prompt_share: float = 0.0  # of a prompt's time
    prompt_s: Callable[[int], float] | None = None  # more for an adapter's prompts in a step, by their tokens

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= self.max_loaded:
            raise ConfigError(
                f"a worker needs 1 <= slots <= loaded adapters, got {self.slots} and {self.max_loaded}"
            )
        if not (0 <= self.load_s < float("inf") and 0 <= self.prompt_share < float("inf")):
            raise ConfigError(f"adapters take no negative time, got {self.load_s} s and {self.prompt_share}")

    def step_s(self, rows: int, active: int) -> float:
        """Return what ``active`` adapters add to a step in which ``rows`` sequences decode."""
        return self.added_s(rows, active) if rows and active else 0.0
