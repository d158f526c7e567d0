"""Simulated GPU: memory promised, and how busy it has been.

Busy is the union of the times in which any worker executes a step here. A pipeline stage executes a share of its
worker's step and the moments are not followed, so while servers with the shares d run, the GPU counts as busy for
``1 - product of (1 - d)`` of the time: all of it when one of them has it alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

from fingerprint.errors import ConfigError
from traces.simulator.held import HeldLedger, busy_share

if TYPE_CHECKING:
    from traces.simulator.workers import Server

__all__ = ["LOAD_WINDOW_S", "Gpu"]

LOAD_WINDOW_S = 120.0  # as the daemon's load is over
_SAMPLE_S = 1.0  # and as finely


class Gpu:
    """``demands``: the share of its steps that each running server spends here."""

    __slots__ = (
        "_busy_s",
        "_held_s",
        "_held_since_s",
        "_rate",
        "_samples",
        "_since_s",
        "demands",
        "device_id",
        "index",
        "ledger",
        "node_id",
        "peak_bytes",
        "tenants",
        "total_bytes",
        "used_bytes",
    )

    def __init__(self, device_id: str, node_id: str, index: int, total_bytes: int) -> None:
        self.device_id, self.node_id, self.index, self.total_bytes = device_id, node_id, index, total_bytes
        self.used_bytes = self.peak_bytes = 0
        self.demands: dict[Server, float] = {}
        self.tenants: dict[Server, float] = {}  # of all that have memory here, running or not
        self.ledger = HeldLedger(total_bytes)
        self._busy_s = 0.0
        self._held_s = self._held_since_s = 0.0
        self._rate = 0.0
        self._since_s = 0.0
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # (time, busy seconds until then)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def check_room(self, size_bytes: int) -> None:
        """Raise ConfigError where less memory is free; a placement policy must not ask for more."""
        if size_bytes > self.free_bytes:
            raise ConfigError(
                f"{size_bytes / 2**30:.2f} GiB were placed on {self.device_id}, which has "
                f"{self.free_bytes / 2**30:.2f} GiB free"
            )

    def take(self, size_bytes: int) -> None:
        """Take memory. Raises ConfigError: more than is free."""
        self.check_room(size_bytes)
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes

    def enter(self, server: Server, share: float, now_s: float) -> None:
        """Place ``server`` here from now on."""
        if not self.tenants:
            self._held_since_s = now_s
        self.tenants[server] = share

    def leave(self, server: Server, now_s: float) -> None:
        del self.tenants[server]
        if not self.tenants:
            self._held_s += now_s - self._held_since_s

    def held_s(self, now_s: float) -> float:
        """Return the seconds in which any worker was placed here."""
        return self._held_s + (now_s - self._held_since_s if self.tenants else 0.0)

    def start(self, server: Server, share: float, now_s: float) -> None:
        """Let ``server`` run from now on."""
        self.demands[server] = share
        self._turn_to(self._busy_rate(), now_s)

    def stop(self, server: Server, now_s: float) -> None:
        self.demands.pop(server, None)
        self._turn_to(self._busy_rate(), now_s)

    def busy_s(self, now_s: float) -> float:
        """Return the busy seconds since the beginning."""
        return self._busy_s + (now_s - self._since_s) * self._rate

    def load_fraction(self, now_s: float) -> float:
        """Return the load of the last 120 s, or of the time since the beginning where that is shorter."""
        begin_s = max(0.0, now_s - LOAD_WINDOW_S)
        if now_s <= begin_s:
            return 0.0
        return min(1.0, max(0.0, (self.busy_s(now_s) - self._busy_until(begin_s, now_s)) / (now_s - begin_s)))

    def _busy_until(self, at_s: float, now_s: float) -> float:
        """Return busy seconds between samples, and from the last one to now, as if busy evenly."""
        position = bisect_right(self._samples, (at_s, float("inf")))
        before_s, busy_before_s = self._samples[max(position - 1, 0)]
        if position < len(self._samples):
            after_s, busy_after_s = self._samples[position]
        else:
            after_s, busy_after_s = now_s, self.busy_s(now_s)
        if after_s <= before_s:
            return busy_before_s
        return busy_before_s + (busy_after_s - busy_before_s) * (at_s - before_s) / (after_s - before_s)

    def _turn_to(self, rate: float, now_s: float) -> None:
        if rate == self._rate:  # between samples it is taken to be even, which it is
            return
        self._busy_s += (now_s - self._since_s) * self._rate
        self._since_s, self._rate = now_s, rate
        samples = self._samples
        if now_s - samples[-1][0] >= _SAMPLE_S:
            samples.append((now_s, self._busy_s))
            horizon_s = now_s - LOAD_WINDOW_S
            while len(samples) > 2 and samples[1][0] <= horizon_s:
                samples.popleft()

    def _busy_rate(self) -> float:
        shares = self.demands.values()
        return 1.0 if 1.0 in shares else busy_share(shares)
