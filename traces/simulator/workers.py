"""Server: a user of GPUs by steps, the part that all kinds of workers and jobs have in common.

A server works in *runs*: stretches of work whose content is settled when they begin (one step, or many alike). A
run has a length in seconds of a GPU of its own; on a shared one it goes at ``speed`` below 1. The content of a run
is the business of the subclasses, which see work only and no clock but the times they are given:

    begin() -> work        the next run; 0: nothing to do
    finish(now_s)          the run has ended: record what it did
    submit(row, ...)       a request joins the queue
    cut(done_s) -> work    a request has joined during a run: where it ends now
    clear() -> (running, waiting)   rows that it held, as its node dies
    give_back() -> waiting rows     that it holds no longer, as it drains; running ones stay
    evict(done_s) -> rows           of running requests that it holds no longer, each with the input and output
                                    tokens that are left of it elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from traces.simulator.gpus import Gpu
from traces.simulator.kv_use import KvMeter

__all__ = ["Job", "Server", "Stage"]


class Stage(NamedTuple):
    """A pipeline stage: its GPUs, and the share of every step that runs there."""

    gpus: tuple[Gpu, ...]
    share: float
    is_group: bool


class Server:
    """Base of all. ``busy``: within a run. ``queued``: an event is under way that will begin or end a run."""

    __slots__ = (
        "at_s", "begun_s", "busy", "holder", "in_flight", "kv", "last_turn", "left_s", "longest", "max_batch",
        "max_outstanding", "meets", "name", "outstanding", "queued", "ready_s", "shared", "speed", "stages",
        "version", "work_s",
    )  # fmt: skip

    cuts = False  # whether a request that joins can end a run early

    def __init__(self, name: str, stages: Sequence[Stage], ready_s: float) -> None:
        self.name = name
        self.holder = ""  # deployment that is charged with its memory and time; empty: none is
        self.stages = tuple(stages)
        self.ready_s = ready_s
        self.max_batch = 1
        self.max_outstanding = 0
        self.outstanding = 0  # requests that it has, running and waiting
        self.last_turn = -1  # of the request that it was given last
        self.longest = 0  # tokens of a prompt and its answer; more are refused
        self.speed = 1.0
        self.shared = False  # another server is placed on one of its GPUs
        self.meets = self.stages  # where: of GPUs with the same tenants one
        self.in_flight = 1.0  # steps that go through its stages in the time of one: how much it asks of them
        self.kv: KvMeter | None = None  # of a cache whose tokens are bounded
        self.busy = False
        self.queued = False
        self.version = 0  # of its event: older ones are void
        self.work_s = self.left_s = self.at_s = 0.0  # of the run: whole, and left at ``at_s``
        self.begun_s = 0.0  # of the run

    @property
    def at_once(self) -> int:
        """Requests that may run together, in one step or in several."""
        return self.max_batch

    def done_s(self, now_s: float) -> float:
        """Return the work of the run that is behind it."""
        return self.work_s - self.left_s + (now_s - self.at_s) * self.speed

    def begin(self) -> float:
        raise NotImplementedError

    def finish(self, now_s: float) -> None:
        raise NotImplementedError

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        raise NotImplementedError

    def cut(self, done_s: float) -> float:
        """Return the whole length of the run now that a request has joined; by default it is not cut."""
        return self.work_s

    def clear(self) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def give_back(self) -> list[int]:
        """Return no rows, by default: the server ends them all."""
        return []

    def evict(self, done_s: float) -> list[tuple[int, int, int]]:
        """Return no rows, by default: the server ends them all.

        The current run is lost; the caller removes the server.
        """
        return []


class Job(Server):
    """Work that is no request: a fingerprint's profile on spare memory."""

    __slots__ = ("_remaining_s", "ended_s")

    def __init__(self, name: str, stages: Sequence[Stage], ready_s: float, work_s: float) -> None:
        super().__init__(name, stages, ready_s)
        self._remaining_s = work_s
        self.ended_s: float | None = None

    def begin(self) -> float:
        return self._remaining_s

    def finish(self, now_s: float) -> None:
        self._remaining_s = 0.0
        self.ended_s = now_s

    def clear(self) -> tuple[list[int], list[int]]:
        return [], []
