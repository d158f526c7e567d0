"""Loads and evictions of a deployment's variants, and where each is loaded, for the controller to ask."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from iserve.gateway.variant_worker import VariantWorker
from iserve.route_table import VariantChange, VariantPlace, VariantRoute

__all__ = ["VariantChanges", "variant_places"]

_KEPT = 500  # changes, of which the controller asks every few seconds


class VariantChanges:
    """Last changes, numbered upwards, across restarts of the gateway too."""

    def __init__(self) -> None:
        self._kept: deque[VariantChange] = deque(maxlen=_KEPT)
        self._number = 0

    def add(self, kind: str, variant: str, worker_id: str, took_s: float | None = None) -> None:
        """Note a change; ``took_s``: of a load."""
        at_s = time.time()
        self._number = max(self._number + 1, int(1000 * at_s))
        self._kept.append(
            VariantChange(
                number=self._number, at=at_s, kind=kind, variant=variant, worker_id=worker_id, took_s=took_s
            )
        )

    def __iter__(self) -> Iterator[VariantChange]:
        return iter(self._kept)


def variant_places(
    workers: Iterable[VariantWorker], current: Mapping[str, VariantRoute], *, loads_on_gpu: bool
) -> tuple[VariantPlace, ...]:
    """Return where the variants of the table are loaded.

    Args:
        current: variants by engine name.
        loads_on_gpu: whether all that is loaded lies on the GPUs; else those that have a slot do, the last used.
    """
    found = []
    for worker in workers:
        in_slots = worker.state.loaded if loads_on_gpu else worker.state.in_slots
        for name in worker.state.loaded:
            if name in current:
                place = "loading" if name in worker.loads else "gpu" if name in in_slots else "host"
                found.append(
                    VariantPlace(variant=current[name].name, worker_id=worker.target.worker_id, place=place)
                )
    return tuple(found)
