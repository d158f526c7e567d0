"""Events of loads and evictions of variants, which the gateway makes and the controller records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from iserve.controller.variant_serving import variant_servers
from iserve.route_table import VariantChange, VariantDemand
from iserve.state.store import DeploymentRow, Store

__all__ = ["VariantEvents"]

_LOOK_S = 5.0
_ALONE = 5  # changes of a look that have an event each; more have one for each kind and worker: 10,000 are kept
_NAMED = 5  # variants that such an event names


class VariantEvents:
    """Record of what the gateway did since it was last asked. Used by one thread.

    Args:
        demand: of the deployments and their variants, as the gateway has it.
        clock: seconds since the epoch; changes of before the first look are not recorded.
    """

    def __init__(
        self,
        store: Store,
        demand: Callable[[], tuple[VariantDemand, ...]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._demand, self._clock = store, demand, clock
        self._looked_s = 0.0
        self._begun = int(1000 * clock())  # number of the last change that is not recorded
        self._last: dict[str, int] = {}  # number of the last one that is, by deployment

    def look(self, rows: Iterable[DeploymentRow]) -> None:
        """Ask the gateway, at most every few seconds, and only where a deployment serves variants."""
        now_s, rows = self._clock(), tuple(rows)
        if now_s - self._looked_s < _LOOK_S or not variant_servers(rows):
            return
        self._looked_s = now_s
        for demand in self._demand():
            last = self._last.get(demand.deployment, self._begun)
            new = [one for one in demand.changes if one.number > last]
            self._last[demand.deployment] = max([last, *(one.number for one in new)])
            for kind, message in _messages(new):
                self._store.add_event(None, kind, message)  # not among those of a deployment, which are few


def _messages(changes: list[VariantChange]) -> Iterable[tuple[str, str]]:
    """Yield kinds and words of events."""
    if len(changes) <= _ALONE:
        for one in changes:
            took = "" if one.took_s is None else f", in {one.took_s:.2f} s"
            yield f"variant-{one.kind}", f"{one.variant}: {one.kind} at {one.worker_id}{took}"
        return
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in changes:
        groups[one.kind, one.worker_id].append(one.variant)
    for (kind, worker_id), names in groups.items():
        shown = ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        yield f"variant-{kind}", f"{len(names)} {kind} at {worker_id}: {shown}"
