"""Laws of a deployment's queue with variants, for any order of arrivals, releases, loads and refusals.

Whenever the event loop has nothing left to do, no request waits that some worker could take: a change after which
one could is never missed. And once all loads succeed and all requests leave, none is left waiting.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserve.gateway.dispatch import Deployment
from iserve.gateway.errors import ApiError
from iserve.gateway.variant_loader import VariantLoader
from iserve.gateway.variant_residency import NoPlaceError, VariantRequest, VariantResidency
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import NotReachedError
from iserve.route_table import Route, WorkerTarget
from placement.variant_routing import DeltaZip, FirstComeFirstServed, LeastLoaded, VariantPolicy
from tests.iserve.gateway.variant_requests import variant

VARIANTS = tuple(variant(name) for name in "abcd")
FAILURES: tuple[Callable[[], Exception], ...] = (
    lambda: ApiError(503, "the worker has no memory for it", "variant_load"),
    lambda: NotBegunError("the worker ended", ApiError(503, "try again", "worker_lost")),
    lambda: NotReachedError("no connection"),
)
POLICIES: tuple[VariantPolicy, ...] = (
    LeastLoaded(bound_s=math.inf),  # how long a request has waited is the clock's, and has laws of its own
    FirstComeFirstServed(),
    DeltaZip(),
)


@dataclass
class Loads(VariantLoader):
    """Loads and unloads that wait for the test's word."""

    held: list[asyncio.Future[None]] = field(default_factory=list)
    is_open: bool = False  # they succeed at once

    async def _hold(self) -> None:
        if not self.is_open:
            self.held.append(asyncio.get_running_loop().create_future())
            await self.held[-1]

    async def folder(self, variant: Any) -> Path:
        return Path("/")

    async def load(self, *arguments: Any) -> None:
        await self._hold()

    async def unload(self, *arguments: Any) -> None:
        await self._hold()

    async def loaded(self, target: Any) -> frozenset[str]:
        return frozenset()


class Metrics:
    def loaded(self, variant: str, seconds: float) -> None: ...

    def evicted(self, variant: str) -> None: ...


@dataclass
class Line:
    """A deployment, its requests, and what the test may do to them."""

    route: Route
    policy: VariantPolicy
    loads: Loads = field(default_factory=Loads)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # of requests, in order of arrival
    held: list[tuple[WorkerTarget, VariantRequest | None]] = field(default_factory=list)  # at a worker
    served: int = 0

    def __post_init__(self) -> None:
        residency = partial(VariantResidency, loader=self.loads, observer=Metrics(), policy=self.policy)
        self.variants = self.route.variants
        self.deployment = Deployment(self.route, 1000, 600.0, residency)

    @property
    def residency(self) -> VariantResidency:
        assert self.deployment.variants is not None
        return self.deployment.variants

    def arrive(self, number: int) -> None:
        """A request of one of the variants in the table, or of the base."""
        known = self.deployment.route.variants
        index = number % (len(known) + 1)
        use = VariantRequest(known[index], asyncio.get_running_loop().time()) if index < len(known) else None
        self.tasks.append(asyncio.create_task(self._request(len(self.tasks), use)))

    async def _request(self, ticket: int, use: VariantRequest | None) -> None:
        try:
            target = await self.deployment.acquire(ticket, use=use)
        except ApiError as error:
            if error.status != 404:  # its variant has left the table
                raise
            return
        if use is not None:
            try:
                await self.residency.ready(use, target.url)
            except (NoPlaceError, ApiError, NotBegunError, NotReachedError, asyncio.CancelledError):
                self.deployment.release(target, use=use)
                return
        self.served += 1
        self.held.append((target, use))

    def leave(self, number: int) -> None:
        """A request that a worker has answered."""
        if self.held:
            target, use = self.held.pop(number % len(self.held))
            self.deployment.release(target, use=use)

    def cancel(self, number: int) -> None:
        """A client that leaves while its request waits for a worker or a load."""
        going = [task for task in self.tasks if not task.done()]
        if going:
            going[number % len(going)].cancel()

    def finish_load(self, number: int) -> None:
        held = [future for future in self.loads.held if not future.done()]
        if held:
            held[number % len(held)].set_result(None)

    def fail_load(self, number: int) -> None:
        held = [future for future in self.loads.held if not future.done()]
        if held:
            held[number // len(FAILURES) % len(held)].set_exception(FAILURES[number % len(FAILURES)]())

    def change_table(self, number: int) -> None:
        """Let a variant leave the table, or enter it again."""
        changed = self.variants[number % len(self.variants)]
        variants = self.deployment.route.variants
        rest = tuple(one for one in variants if one is not changed)
        now = rest if len(rest) < len(variants) else (*variants, changed)
        self.deployment.update(replace(self.deployment.route, variants=now), 1000, 600.0)

    def change_worker(self, number: int) -> None:
        """Let a worker become ready, or not."""
        workers = list(self.deployment.route.workers)
        index = number % len(workers)
        workers[index] = replace(workers[index], ready=not workers[index].ready)
        self.deployment.update(replace(self.deployment.route, workers=tuple(workers)), 1000, 600.0)

    def forget(self, number: int) -> None:
        """A sign that a worker was restarted."""
        workers = self.deployment.route.workers
        self.residency.forget(workers[number % len(workers)].url)

    async def settle(self) -> None:
        """Let the event loop do all that it can without a further event."""
        for _ in range(25):  # a task, its callbacks, a round, the loads that it begins, the unloads before them
            await asyncio.sleep(0)

    def check(self) -> None:
        states = {url: worker.state for url, worker in self.residency._workers.items()}
        for state in states.values():
            assert len(state.in_flight) <= state.slots
            assert state.taken <= state.max_loaded
        with_room = [
            states[target.url]
            for target in self.deployment.route.workers
            if target.ready and self.deployment._outstanding.get(target.url, 0) < target.max_outstanding
        ]
        now_s = asyncio.get_running_loop().time()
        waiting = list(self.deployment._waiting)
        if isinstance(self.policy, FirstComeFirstServed):
            of_variants = [one for one in waiting if one.use is not None]
            waiting = [*of_variants[:1], *(one for one in waiting if one.use is None)]
        for one in waiting:
            name = one.variant
            possible = [
                state
                for state in with_room
                if name is None or (state.has_slot(name) and state.evictions(name, now_s) is not None)
            ]
            assert not possible, f"{name or 'the base'} waits, and {len(possible)} workers could take it"


ACTIONS = (
    *(Line.arrive,) * 8,
    *(Line.leave,) * 3,
    Line.cancel,
    *(Line.finish_load,) * 4,
    Line.fail_load,
    Line.change_table,
    Line.change_worker,
    Line.forget,
)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    slots = draw(st.integers(1, 2))
    pinned = draw(st.sets(st.sampled_from(range(len(VARIANTS))), max_size=2))
    workers = tuple(
        WorkerTarget(worker_id=f"w{port}", url=f"http://127.0.0.1:{port}", ready=True, max_outstanding=3)
        for port in range(1, 1 + draw(st.integers(1, 2)))
    )
    return Route(
        name="m",
        model="org/base",
        created=1,
        max_context_tokens=10,
        workers=workers,
        adapter_slots=slots,
        loaded_adapters=slots + draw(st.integers(0, 1)),
        variants=tuple(
            replace(one, pinned=index in pinned, place_share=draw(st.sampled_from((1.0, 0.5, 0.125))))
            for index, one in enumerate(VARIANTS)
        ),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    routes(),
    st.sampled_from(POLICIES),
    st.lists(
        st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 29)), min_size=1, max_size=3),
        min_size=20,
        max_size=40,
    ),
)
def test_no_request_waits_that_a_worker_could_take(
    route: Route, policy: VariantPolicy, turns: list[list[tuple[Callable[[Line, int], None], int]]]
) -> None:
    async def main() -> None:
        line = Line(route, policy)
        try:
            await line.settle()
            for turn in turns:
                for act, number in turn:  # in one turn of the loop
                    act(line, number)
                await line.settle()
                line.check()
            line.loads.is_open = True
            ready = tuple(replace(worker, ready=True) for worker in line.deployment.route.workers)
            line.deployment.update(replace(line.deployment.route, workers=ready), 1000, 600.0)
            for _ in range(2 * len(line.tasks) + 2):
                while any(not future.done() for future in line.loads.held):
                    line.finish_load(0)
                await line.settle()
                line.check()
                line.leave(0)
            assert not line.deployment.num_waiting
            assert not line.deployment.num_outstanding
        finally:
            line.deployment.close()
            for task in line.tasks:
                task.cancel()
            ended = await asyncio.gather(*line.tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended), ended

    asyncio.run(main())


def test_a_request_that_a_pinned_variant_kept_waiting_is_offered_a_worker_that_was_forgotten() -> None:
    """A turn of the law above that random ones seldom reach: ``a`` is pinned, ``b`` in flight, ``c`` waits."""
    worker = WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True, max_outstanding=3)
    variants = (replace(VARIANTS[0], pinned=True), *VARIANTS[1:])

    async def main() -> None:
        route = Route(
            name="m",
            model="org/base",
            created=1,
            max_context_tokens=10,
            workers=(worker,),
            adapter_slots=2,
            loaded_adapters=2,
            variants=variants,
        )
        line = Line(route, FirstComeFirstServed())
        line.loads.is_open = True
        await line.settle()
        line.arrive(1)
        await line.settle()
        line.arrive(2)
        await line.settle()
        assert (line.served, line.deployment.num_waiting) == (1, 1)
        line.forget(0)
        await line.settle()
        line.check()
        assert (line.served, line.deployment.num_waiting) == (2, 0)
        line.deployment.close()

    asyncio.run(main())
