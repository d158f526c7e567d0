"""Simulated GPUs and what runs on them: memory, which workers share a GPU, busy times, and the queue of events.

Knows servers and their runs, nothing of requests or deployments.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from fingerprint.errors import NotFoundError
from placement.types import ClusterSnapshot, GpuState, Placement
from traces.simulator.contention import Contention, StageDemand
from traces.simulator.gpus import Gpu
from traces.simulator.held import HeldGpu, SharedClock, Tenants, share_clocks
from traces.simulator.policy_errors import PolicyFault, ask
from traces.simulator.workers import Server, Stage

__all__ = ["Cluster", "Event"]

Event = tuple[
    float, int, int, Server
]  # (time, number, the server's version, server); of equal times the older first


class Cluster:
    """``events`` is a heap of the ends of runs (or their beginnings, where a server is idle)."""

    def __init__(self, snapshot: ClusterSnapshot, contention: Contention) -> None:
        self._states = {(gpu.node_id, gpu.device_id): gpu for gpu in snapshot.gpus}
        self.gpus = {
            key: Gpu(state.device_id, state.node_id, state.gpu_index, state.free_bytes)
            for key, state in self._states.items()
        }
        self.dead_nodes: set[str] = set()
        self._contention = contention
        self.events: list[Event] = []
        self._number = 0
        self._clocks: dict[Tenants, SharedClock] = {}
        self._held: dict[Server, tuple[tuple[Gpu, int], ...]] = {}

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """Return what placement sees: the living GPUs, their free memory, their load over the last 120 s."""
        return ClusterSnapshot(
            tuple(
                replace(self._states[key], free_bytes=gpu.free_bytes, load_fraction=gpu.load_fraction(now_s))
                for key, gpu in self.gpus.items()
                if gpu.node_id not in self.dead_nodes
            )
        )

    def stages(self, placement: Placement) -> list[Stage]:
        """Return the stages, each with the share of a step that it has by its layers.

        Raises:
            NotFoundError: a GPU that is not there, or whose node has failed.
        """
        layers = sum(stage.num_layers for stage in placement.stages)
        return [
            Stage(
                tuple(self._living(stage.node_id, d) for d in stage.device_ids),
                stage.num_layers / layers,
                is_group=len(stage.device_ids) > 1,
            )
            for stage in placement.stages
        ]

    def _living(self, node_id: str, device_id: str) -> Gpu:
        gpu = self.gpus.get((node_id, device_id))
        if gpu is None or node_id in self.dead_nodes:
            raise NotFoundError(f"there is no GPU {device_id} on {node_id} now")
        return gpu

    def gpu(self, state: GpuState) -> Gpu:
        return self.gpus[state.node_id, state.device_id]

    def memory(self, placement: Placement) -> tuple[tuple[Gpu, int], ...]:
        """Return the GPUs of a placement, each with the bytes that it takes there.

        Raises:
            NotFoundError: a GPU that is not there, or whose node has failed.
        """
        return tuple(
            (self._living(stage.node_id, device), stage.bytes_per_gpu)
            for stage in placement.stages
            for device in stage.device_ids
        )

    @staticmethod
    def check_room(memory: Iterable[tuple[Gpu, int]]) -> None:
        """Raise ConfigError where a GPU has less free than is asked of it in all."""
        asked: Counter[Gpu] = Counter()
        for gpu, size_bytes in memory:
            asked[gpu] += size_bytes
        for gpu, size_bytes in asked.items():
            gpu.check_room(size_bytes)

    def add(self, server: Server, memory: Iterable[tuple[Gpu, int]], now_s: float) -> None:
        """Give ``server`` its memory; it begins at its ``ready_s``.

        Raises:
            ConfigError: a GPU has less free; nothing is taken.
        """
        held = tuple(memory)
        self.check_room(held)
        for gpu, size_bytes in held:
            gpu.take(size_bytes)
            gpu.ledger.reserve(server, size_bytes, now_s)
        for gpus, share, _ in server.stages:
            for gpu in gpus:
                gpu.enter(server, share, now_s)
        self._held[server] = held
        self._mark_shared(held)
        share_clocks(dict.fromkeys(gpu for gpu, _ in held), self._clocks, now_s)
        self.schedule(server, server.ready_s)

    def remove(self, server: Server, now_s: float) -> None:
        """Remove a server: its memory is free again, and a run of it ends."""
        if server.busy:
            self.stop(server, now_s)
        server.version += 1
        held = self._held.pop(server)
        for gpu, size_bytes in held:
            gpu.give_back(size_bytes)
            gpu.ledger.reserve(server, -size_bytes, now_s)
            gpu.leave(server, now_s)
        self._mark_shared(held)
        share_clocks(dict.fromkeys(gpu for gpu, _ in held), self._clocks, now_s)

    def held(self, now_s: float) -> tuple[HeldGpu, ...]:
        """Return what every deployment held of every GPU until ``now_s``, the end of the simulation."""
        for clock in {gpu.ledger.clock: None for gpu in self.gpus.values()}:
            clock.end(now_s)
        return tuple(held for gpu in self.gpus.values() for held in gpu.ledger.held(gpu.node_id, gpu.device_id))

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers in the order in which they were added."""
        return tuple(self._held)

    def on_node(self, server: Server, node_id: str) -> bool:
        return any(gpu.node_id == node_id for gpu, _ in self._held[server])

    def schedule(self, server: Server, at_s: float) -> None:
        """Schedule the one event of ``server`` at ``at_s``; any earlier one is void."""
        server.version += 1
        server.queued = True
        self._number += 1
        heapq.heappush(self.events, (at_s, self._number, server.version, server))

    def go_on(self, server: Server, now_s: float) -> None:
        """Begin the next run of ``server``, or let it fall idle."""
        in_flight = server.in_flight
        work_s = server.begin()
        if work_s > 0:
            if not server.busy or server.in_flight != in_flight:
                self._start(server, now_s)
            server.work_s = server.left_s = work_s
            server.at_s = server.begun_s = now_s
            server.version += 1
            server.queued = True
            self._number += 1
            heapq.heappush(self.events, (now_s + work_s / server.speed, self._number, server.version, server))
        else:
            server.queued = False
            if server.busy:
                self.stop(server, now_s)

    def cut(self, server: Server, now_s: float) -> None:
        """Cut a run that a request has joined, which may now end sooner."""
        done_s = server.done_s(now_s)
        work_s = server.cut(done_s)
        if work_s < server.work_s:
            server.work_s = work_s
            server.left_s = max(0.0, work_s - done_s)
            server.at_s = now_s
            self.schedule(server, now_s + server.left_s / server.speed)

    def _start(self, server: Server, now_s: float) -> None:
        server.busy = True
        for gpus, share, _ in server.stages:
            for gpu in gpus:
                gpu.start(server, min(1.0, share * server.in_flight), now_s)
        self._turn_clocks(server, now_s)
        server.speed = 1.0
        if server.shared:
            server.speed = self._speed(server)
            self._slow_others(server, now_s)

    def stop(self, server: Server, now_s: float) -> None:
        server.busy = False
        for gpus, _, _ in server.stages:
            for gpu in gpus:
                gpu.stop(server, now_s)
        self._turn_clocks(server, now_s)
        if server.shared:
            self._slow_others(server, now_s)

    @staticmethod
    def _turn_clocks(server: Server, now_s: float) -> None:
        for gpus, _, _ in server.meets:
            for gpu in gpus:
                gpu.ledger.clock.turn(gpu.demands, now_s)

    def _slow_others(self, server: Server, now_s: float) -> None:
        """Update the speed of each server that shares a GPU with ``server``."""
        others: dict[Server, float] = {}
        for gpus, _, _ in server.meets:
            for gpu in gpus:
                others |= gpu.demands
        others.pop(server, None)
        for other in others:
            speed = self._speed(other)
            if speed != other.speed:
                other.left_s = max(0.0, other.left_s - (now_s - other.at_s) * other.speed)
                other.at_s = now_s
                other.speed = speed
                self.schedule(other, now_s + other.left_s / speed)

    def _speed(self, server: Server) -> float:
        demands = [
            StageDemand(
                share, [max(0.0, sum(gpu.demands.values()) - gpu.demands[server]) for gpu in gpus], is_group
            )
            for gpus, share, is_group in server.meets
        ]
        speed = ask("contention", lambda: self._contention(demands))
        if not 0 < speed <= 1:
            raise PolicyFault("contention", f"gave {server.name} the speed {speed}; it is above 0 and at most 1")
        return speed

    @staticmethod
    def _mark_shared(held: Iterable[tuple[Gpu, int]]) -> None:
        """Mark the servers that contention affects, and where: one of GPUs with equal tenants suffices."""
        affected: dict[Server, None] = {}
        for gpu, _ in held:
            affected.update(dict.fromkeys(gpu.tenants))
        for server in affected:
            server.shared = any(len(gpu.tenants) > 1 for gpus, _, _ in server.stages for gpu in gpus)
            server.meets = tuple(
                Stage(tuple({tuple(gpu.tenants.items()): gpu for gpu in gpus}.values()), share, is_group)
                for gpus, share, is_group in server.stages
            )
