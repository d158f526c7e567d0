"""Agreement of the GPUs of one worker on a load: all make it between the same two steps, or none does.

vLLM runs a load on every rank, in one order with the steps. Each rank reads in a thread of its own, and these end
at different times, so the ranks exchange what they have found before one of them changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from iserve_variants.refusals import StillReadError

__all__ = ["Ranks", "Readiness", "load_on_all"]


class Readiness(IntEnum):
    """State of what a rank is asked to load."""

    READING = 0
    READY = 1
    """In the spare place."""
    IMMEDIATE = 2
    """Loaded by the call itself: an adapter, what is loaded already, or a delta where nothing is read ahead."""


class Ranks:
    """Ranks of one worker, in the order in which vLLM collects their answers."""

    def __init__(self, groups: Sequence[Any], *, is_last: bool) -> None:
        """Keep the groups.

        Args:
            groups: process groups for objects of the host, whose product has each rank once: those of tensor and
                pipeline parallelism. Empty: one rank.
            is_last: whether this rank's answer is collected last.
        """
        self._groups, self.is_last = groups, is_last

    def gathered(self, answer: Any) -> list[Any]:
        """Return the answers of all ranks; every rank calls it, and waits for all."""
        found = [answer]
        for group in self._groups:
            lists: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(lists, found, group=group)
            found = [one for each in lists for one in each]
        return found


def load_on_all(
    ranks: Ranks,
    name: str,
    readiness: Callable[[], Readiness],
    load: Callable[[], bool],
    undo: Callable[[], object],
) -> bool:
    """Load on all ranks or on none; return whether it was loaded.

    A refusal is raised on the last rank alone, and the rest return False: vLLM stops collecting answers at the
    first error, and would take the errors of later ranks, which it left, for answers to its next call.

    Args:
        ranks: of the worker.
        name: of what is loaded, for messages.
        readiness: returns this rank's state, or raises what reading raised.
        load: loads it on this rank; raises where it cannot.
        undo: unloads what this rank has of it, where one of them failed.

    Raises:
        ValueError: a refusal; it is still being read, ranks see different folders, or another rank's error.
        Exception: this rank's error.
    """
    error, state = _tried(readiness)
    answers = ranks.gathered((state, None if error is None else str(error)))
    if error is None:
        error = _refusal(name, [one for one, _ in answers], [said for _, said in answers if said is not None])
    loaded = False
    if error is None:
        error, loaded = _tried(load)
        said = ranks.gathered(None if error is None else str(error))
        if (why := next((one for one in said if one is not None), None)) is not None:
            _tried(undo)
            error, loaded = error or ValueError(why), False
    if error is not None and ranks.is_last:
        raise error
    return bool(loaded)


def _tried(call: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Return what ``call`` raises, or what it returns."""
    try:
        return None, call()
    except Exception as error:  # noqa: BLE001 - every rank takes part in what follows; the last one raises it
        return error, None


def _refusal(name: str, states: Sequence[Readiness | None], said: Sequence[str]) -> ValueError | None:
    """Return why no rank loads, by the states and errors of all; None: all do."""
    if said:
        return ValueError(said[0])
    if len(set(states)) > 1 and Readiness.IMMEDIATE in states:
        return ValueError(
            f"the GPUs of this worker disagree on {name}, by its folder or by what is loaded; start it anew"
        )
    if Readiness.READING in states:
        return StillReadError("delta", name)
    return None
