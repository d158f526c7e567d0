"""Held share of GPUs under load, and the cost that follows from it.

The held share of a GPU is what a deployment takes from the rest of the cluster there: the larger of its reserved
bytes / the GPU's bytes (spare KV room counts) and the share of the GPU's time that its steps take. Its integral
over time and GPUs, from the decision to deploy to the end of the simulation, is the GPU time that its requests
cost; a replica that starts or moves counts from the moment its memory is taken.

A step is busy or not at any moment, so the busy share is that of a window: 120 s from the beginning of the
simulation on, as the daemon's load is. While several workers run on a GPU its busy time is divided among them in
proportion to the share of their steps that they spend there; together they never take more than the GPU's own busy
time. Profiling jobs take their part, and no deployment is charged with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from traces.simulator.gpus import Gpu
    from traces.simulator.workers import Server

__all__ = [
    "HELD_WINDOW_S",
    "HeldGpu",
    "HeldLedger",
    "LoadCost",
    "SharedClock",
    "Tenants",
    "busy_share",
    "cost_under_load",
    "share_clocks",
]

HELD_WINDOW_S = 120.0

Tenants: TypeAlias = "tuple[tuple[Server, float], ...]"  # servers, each with the share of its step spent there
_Running: TypeAlias = Tenants  # those within a run


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldGpu:
    """Memory and time of one GPU that one deployment held, over the whole simulation."""

    deployment: str
    node_id: str
    device_id: str
    placed_s: float  # seconds in which it had memory there
    busy_s: float  # its part of the GPU's busy seconds
    reserved_byte_s: float  # integral of its reserved bytes
    held_gpu_s: float  # integral of the held share: GPU x seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCost:
    """Cost of serving under load.

    Figures per request are None without a completed one, dollars without a price.
    """

    gpu_s: float  # GPU x seconds held, idle time and all replicas included
    gpu_s_per_request: float | None  # of completed requests; those that failed cost the same and count for nothing
    usd: float | None
    usd_per_request: float | None
    requests_per_gpu_hour: float | None  # completed, by hours of whole GPUs on which anything was placed


def cost_under_load(
    held: Iterable[HeldGpu], completed: int, *, placed_gpu_s: float, usd_per_gpu_hour: float | None = None
) -> LoadCost:
    """Return the cost of ``completed`` requests on the GPUs that were ``held``.

    Args:
        placed_gpu_s: whole GPUs x seconds in which anything of the counted deployments was placed there.
        usd_per_gpu_hour: price of a whole GPU; None: not known.
    """
    gpu_s = sum(each.held_gpu_s for each in held)
    usd = None if usd_per_gpu_hour is None else gpu_s / 3600 * usd_per_gpu_hour
    return LoadCost(
        gpu_s=gpu_s,
        gpu_s_per_request=gpu_s / completed if completed else None,
        usd=usd,
        usd_per_request=None if usd is None or not completed else usd / completed,
        requests_per_gpu_hour=completed / placed_gpu_s * 3600 if placed_gpu_s > 0 else None,
    )


def busy_share(running: Iterable[float]) -> float:
    """Return the share of the time in which a GPU is busy while servers run that spend such shares of their steps
    there.

    The moments are not followed: ``1 - product of (1 - d)``.
    """
    idle = 1.0
    for share in running:
        idle *= 1.0 - share
    return 1.0 - idle


@dataclass(slots=True)
class _Holder:
    """Account of one deployment on one GPU. Names with ``window`` are of the window that is open."""

    reserved_bytes: int = 0
    placed_s: float = 0.0
    busy_s: float = 0.0
    reserved_byte_s: float = 0.0
    held_gpu_s: float = 0.0
    window_byte_s: float = 0.0
    window_busy_s: float = 0.0


class HeldLedger:
    """Ledger of one GPU: the bytes and the busy time of every deployment there."""

    __slots__ = ("_holders", "_total_bytes", "clock")

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._holders: dict[str, _Holder] = {}
        self.clock = SharedClock()
        self.clock.ledgers.append(self)

    def reserve(self, server: Server, size_bytes: int, now_s: float) -> None:
        """Reserve memory for ``server``, or give it back where ``size_bytes`` is negative."""
        if server.holder:
            self.clock.charge(now_s)
            self._holders.setdefault(server.holder, _Holder()).reserved_bytes += size_bytes

    def held(self, node_id: str, device_id: str) -> Iterator[HeldGpu]:
        """Yield what each deployment held of this GPU until the last window that was closed."""
        for name, holder in self._holders.items():
            yield HeldGpu(
                deployment=name,
                node_id=node_id,
                device_id=device_id,
                placed_s=holder.placed_s,
                busy_s=holder.busy_s,
                reserved_byte_s=holder.reserved_byte_s,
                held_gpu_s=holder.held_gpu_s,
            )

    def add(self, busy_s: Mapping[str, float], seconds: float) -> None:
        """Add so many ``seconds`` to the open window, of which each deployment ran ``busy_s``."""
        for name, holder in self._holders.items():
            if holder.reserved_bytes:
                holder.placed_s += seconds
                holder.window_byte_s += holder.reserved_bytes * seconds
            if name in busy_s:
                holder.window_busy_s += busy_s[name]

    def close_window(self) -> None:
        for holder in self._holders.values():
            holder.busy_s += holder.window_busy_s
            holder.reserved_byte_s += holder.window_byte_s
            holder.held_gpu_s += max(holder.window_byte_s / self._total_bytes, holder.window_busy_s)
            holder.window_byte_s = holder.window_busy_s = 0.0


class SharedClock:
    """Clock of GPUs that have the same tenants, which are therefore busy at the same times.

    As servers begin and fall idle, it adds up the seconds of every set of running servers; ledgers are charged at
    the end of a window, and when the tenants change.
    """

    __slots__ = ("_charged_s", "_now", "_seconds", "_since_s", "_window_end_s", "ledgers")

    def __init__(self, running: Mapping[Server, float] | None = None, now_s: float = 0.0) -> None:
        self.ledgers: list[HeldLedger] = []
        self._now = [0.0]  # the seconds of what runs now
        # Since the ledgers were charged, until ``_since_s``; lists of one number, which is cheap to add to.
        self._seconds: dict[_Running, list[float]] = {tuple((running or {}).items()): self._now}
        self._since_s = self._charged_s = now_s
        self._window_end_s = (now_s // HELD_WINDOW_S + 1) * HELD_WINDOW_S

    def turn(self, running: Mapping[Server, float], now_s: float) -> None:
        """Record that ``running`` servers run from now on, each with the share of its step spent there."""
        if now_s >= self._window_end_s:
            self.charge(now_s)
        self._now[0] += now_s - self._since_s
        self._since_s = now_s
        key = tuple(running.items())
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = [0.0]
        self._now = found

    def charge(self, now_s: float) -> None:
        """Charge the ledgers with all until ``now_s``, and close the windows that have ended by then."""
        if now_s >= self._window_end_s:
            self._add_until(self._window_end_s)
            self._close()
            window = now_s // HELD_WINDOW_S
            if (
                window * HELD_WINDOW_S > self._charged_s
            ):  # whole windows in which nothing changed: one share is the
                self._add_until(window * HELD_WINDOW_S)  # larger in all of them
                self._close()
            self._window_end_s = (window + 1) * HELD_WINDOW_S
        self._add_until(now_s)

    def end(self, now_s: float) -> None:
        """Charge the ledgers, and close the open window early: the simulation has ended."""
        self.charge(now_s)
        self._close()

    def _add_until(self, until_s: float) -> None:
        self._now[0] += until_s - self._since_s
        busy_s: dict[str, float] = {}
        for running, (in_state_s,) in self._seconds.items():
            whole = sum(share for _, share in running)
            rate = busy_share(share for _, share in running)
            for server, share in running:
                busy_s[server.holder] = busy_s.get(server.holder, 0.0) + in_state_s * rate * share / whole
        for ledger in self.ledgers:
            ledger.add(busy_s, until_s - self._charged_s)
        self._seconds = {running: cell for running, cell in self._seconds.items() if cell is self._now}
        self._now[0] = 0.0
        self._since_s = self._charged_s = until_s

    def _close(self) -> None:
        for ledger in self.ledgers:
            ledger.close_window()


def share_clocks(gpus: Iterable[Gpu], clocks: dict[Tenants, SharedClock], now_s: float) -> None:
    """Give ``gpus``, whose tenants have changed, the clock of the GPUs with the same tenants.

    Args:
        clocks: by tenants, of all GPUs of the cluster that have any; updated.
    """
    for gpu in gpus:
        ledger = gpu.ledger
        ledger.clock.charge(now_s)
        ledger.clock.ledgers.remove(ledger)
        tenants = tuple(gpu.tenants.items())
        clock = clocks.get(tenants)
        if clock is None or not clock.ledgers:
            clock = clocks[tenants] = SharedClock(gpu.demands, now_s)
        else:
            clock.charge(now_s)
        clock.ledgers.append(ledger)
        ledger.clock = clock
    for tenants in [tenants for tenants, clock in clocks.items() if not clock.ledgers]:
        del clocks[tenants]
