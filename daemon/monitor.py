"""A node's devices as placement may use them: what is free after all promises, and how busy they were.

Joins the readings of a device source with what the supervisor knows of its workers. Asks no worker itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from daemon.devices import Device, DeviceReading, DeviceSource
from daemon.status import DeviceBusy, DeviceHeld, DeviceStatus
from daemon.utilization import BusyCounter, LoadWindow, union_fraction

__all__ = ["Monitor", "WorkerUse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUse:
    """Use of the node's devices by one worker."""

    worker_id: str
    pid: int | None  # with the id, tells a relaunched worker from the one before
    slots: Mapping[str, int]  # ranks per device id
    promised_bytes: Mapping[str, int]  # per device id: the limits that its ranks there were launched with
    resident_bytes: int | None = None  # of the whole process group; None: not looked at
    pids: frozenset[int] = frozenset()  # those of its processes that a device lists
    ready: bool = False
    busy: tuple[DeviceBusy, ...] | None = None  # its own counters, just read; None: it did not answer

    @property
    def num_ranks(self) -> int:
        return sum(self.slots.values())


class Monitor:
    """Call :meth:`read` once a second, outside the event loop; then :meth:`observe`; then ask :meth:`statuses`."""

    def __init__(
        self, source: DeviceSource, *, window_s: float = 120.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._clock = source, clock
        self.devices: Mapping[str, Device] = {device.device_id: device for device in source.devices}
        self.driver = source.driver
        self._readings: Mapping[str, DeviceReading] = {}
        self.read_at_s: float | None = None  # on the clock
        self._windows = {device_id: LoadWindow(window_s) for device_id in self.devices}
        self._counters: dict[tuple[str, int | None, str], BusyCounter] = {}
        self._observed_until_s = clock()

    def read(self) -> None:
        """Look at every device now; may block in a driver."""
        readings = self._source.read()
        self._readings, self.read_at_s = readings, self._clock()

    def reading(self, device_id: str) -> DeviceReading:
        """Return the last look at a device."""
        return self._readings.get(device_id, DeviceReading(free_bytes=None, error="not read yet"))

    def observe(self, uses: Sequence[WorkerUse]) -> None:
        """Add the time since the last call to each device's load."""
        now_s = self._clock()
        from_s, self._observed_until_s = self._observed_until_s, now_s
        fractions = self._busy_fractions(uses, now_s)
        if now_s <= from_s:
            return
        for device_id, window in self._windows.items():
            fraction = self._device_fraction(device_id, [f for (_, d), f in fractions.items() if d == device_id])
            if fraction is not None:
                window.add(from_s, now_s, fraction)

    def _busy_fractions(self, uses: Sequence[WorkerUse], now_s: float) -> dict[tuple[str, str], float | None]:
        """Return, by worker and device, the busy part of the time since its counters were last read; None:
        unknown.
        """
        fractions: dict[tuple[str, str], float | None] = {}
        live = set()
        for use in uses:
            if not use.ready:
                continue  # loads its model: executes no step
            reported = {busy.device_id: busy.busy_s for busy in use.busy or ()}
            for device_id in use.slots:
                key = (use.worker_id, use.pid, device_id)
                live.add(key)
                counter = self._counters.setdefault(key, BusyCounter())
                busy_s = reported.get(device_id)
                fractions[use.worker_id, device_id] = (
                    None if busy_s is None else counter.fraction_since_last(now_s, busy_s)
                )
        self._counters = {key: counter for key, counter in self._counters.items() if key in live}
        return fractions

    def _device_fraction(self, device_id: str, fractions: Sequence[float | None]) -> float | None:
        """Return the load by the workers' own account where all gave one; else by the driver; else unknown.

        On a device without workers of ours the driver's figure counts too: other programs may be using it.
        """
        known = [fraction for fraction in fractions if fraction is not None]
        driver = self.reading(device_id).utilisation_fraction
        if len(known) == len(fractions) and (known or driver is None):
            return union_fraction(known)
        if driver is None:
            return None
        return max(union_fraction(known), min(1.0, max(0.0, driver)))

    def statuses(self, uses: Sequence[WorkerUse]) -> tuple[DeviceStatus, ...]:
        """Return every device, as of the last look, with the promises to ``uses`` taken off."""
        now_s = self._clock()
        return tuple(self._status(device, uses, now_s) for device in self.devices.values())

    def _status(self, device: Device, uses: Sequence[WorkerUse], now_s: float) -> DeviceStatus:
        reading = self.reading(device.device_id)
        free_bytes = self._cpu_free if device.kind == "cpu" else self._gpu_free
        return DeviceStatus(
            device_id=device.device_id,
            index=device.index,
            kind=device.kind,
            name=device.name,
            total_bytes=device.total_bytes,
            free_bytes=free_bytes(device, reading, uses),
            load_fraction=self._windows[device.device_id].load_fraction(now_s),
            cores=device.cores,
            power_w=reading.power_w,
            sm_clock_mhz=reading.sm_clock_mhz,
            used_bytes=None
            if device.kind == "cpu" or reading.free_bytes is None
            else device.total_bytes - reading.free_bytes,
        )

    def held(self, use: WorkerUse) -> tuple[DeviceHeld, ...]:
        """Return what the worker holds of each GPU as of the last look, where the driver lists its processes'
        sizes.
        """
        found = []
        for device_id in use.slots:
            by_pid = self.reading(device_id).process_bytes or {}
            sizes = [size for pid, size in by_pid.items() if pid in use.pids]
            if sizes and None not in sizes:
                found.append(DeviceHeld(device_id=device_id, held_bytes=sum(filter(None, sizes))))
        return tuple(found)

    def _cpu_free(self, device: Device, reading: DeviceReading, uses: Sequence[WorkerUse]) -> int:
        """Return the share, less the use of the machine by other programs, less the larger of promise and use."""
        if reading.free_bytes is None:
            return 0
        ours_bytes = sum(use.resident_bytes or 0 for use in uses)
        without_ours_bytes = min(device.total_bytes, reading.free_bytes + ours_bytes // len(self.devices))
        for use in uses:
            slots = use.slots.get(device.device_id, 0)
            resident_bytes = (use.resident_bytes or 0) * slots // max(1, use.num_ranks)
            without_ours_bytes -= max(use.promised_bytes.get(device.device_id, 0), resident_bytes)
        return max(0, without_ours_bytes)

    def _gpu_free(self, device: Device, reading: DeviceReading, uses: Sequence[WorkerUse]) -> int:
        """Return what the driver calls free, less what was promised and is not in use yet."""
        if reading.free_bytes is None:
            return 0
        free_bytes = reading.free_bytes
        for use in uses:
            promised_bytes = use.promised_bytes.get(device.device_id, 0)
            free_bytes -= max(0, promised_bytes - self._used_on_gpu(reading, use, promised_bytes))
        return max(0, free_bytes)

    @staticmethod
    def _used_on_gpu(reading: DeviceReading, use: WorkerUse, promised_bytes: int) -> int:
        """Return the bytes the worker holds, by the driver's process list.

        Where that does not show it (containers hide process ids), a ready worker has taken all it was promised and
        a loading one nothing.
        """
        by_pid = reading.process_bytes or {}
        listed = [size for pid, size in by_pid.items() if pid in use.pids and size is not None]
        if listed:
            return sum(listed)
        return promised_bytes if use.ready else 0
