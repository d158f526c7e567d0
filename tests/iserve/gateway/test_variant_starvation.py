"""Starvation bound, and fairness between variants, of the gateway's own queue; its clock goes to the next timer.

``tests/placement/test_variant_routing.py`` has the same of the policies alone. Here requests go through a
deployment and its residency, which give the policy the time, when each variant was served, and whether an overdue
request goes on waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserve.gateway.variant_residency import VariantRequest
from iserve.route_table import Route, WorkerTarget
from placement.variant_routing import (
    STARVATION_BOUND_S,
    BusiestLoaded,
    DeltaZip,
    LeastLoaded,
    RoundRobin,
    VariantPolicy,
)
from tests.iserve.gateway.test_variant_queue_laws import VARIANTS, Line
from tests.iserve.gateway.timeless_loop import TimelessLoop

SKIPPING: tuple[Callable[[], VariantPolicy], ...] = (LeastLoaded, BusiestLoaded, RoundRobin)


def route(slots: int, max_outstanding: int) -> Route:
    return Route(
        name="m",
        model="org/base",
        created=1,
        max_context_tokens=10,
        workers=(
            WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True, max_outstanding=max_outstanding),
        ),
        adapter_slots=slots,
        loaded_adapters=len(VARIANTS),
        variants=VARIANTS,
    )


@dataclass
class Served:
    """Request, and the time at which it was given a worker."""

    name: str
    arrived_s: float
    began_s: float | None = None

    @property
    def waited_s(self) -> float:
        assert self.began_s is not None, f"{self.name} waits for ever"
        return self.began_s - self.arrived_s


@dataclass
class Traffic:
    """Requests at one worker whose loads take no time."""

    line: Line
    requests: list[Served] = field(default_factory=list)

    def send(self, name: str, service_s: float) -> Served:
        found = Served(name, asyncio.get_running_loop().time())
        self.requests.append(found)
        self.line.tasks.append(asyncio.create_task(self._request(found, len(self.requests), service_s)))
        return found

    async def _request(self, served: Served, ticket: int, service_s: float) -> None:
        deployment, loop = self.line.deployment, asyncio.get_running_loop()
        use = VariantRequest(next(one for one in VARIANTS if one.name == served.name), served.arrived_s)
        target = await deployment.acquire(ticket, use=use)
        served.began_s = loop.time()
        await self.line.residency.ready(use, target.url)
        await asyncio.sleep(service_s)
        deployment.release(target, use=use)


def serve(
    drive: Callable[[Traffic], Coroutine[Any, Any, None]],
    *,
    slots: int = 1,
    max_outstanding: int = 64,
    policy: VariantPolicy | None = None,
) -> list[Served]:
    """Return the requests that ``drive`` sends, each with the time at which it was given a worker."""

    async def main() -> list[Served]:
        line = Line(route(slots, max_outstanding), policy or LeastLoaded())
        line.loads.is_open = True
        await line.settle()
        traffic = Traffic(line)
        try:
            await drive(traffic)
            await asyncio.gather(*line.tasks)
            assert not line.deployment.num_waiting
        finally:
            line.deployment.close()
            for task in line.tasks:
                task.cancel()
            await asyncio.gather(*line.tasks, return_exceptions=True)
        return traffic.requests

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(main())


async def stream(traffic: Traffic, name: str, *, number: int, every_s: float, service_s: float) -> None:
    """Send requests that overlap, so that their slot is never free."""
    assert service_s > every_s
    for _ in range(number):
        traffic.send(name, service_s)
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("make", SKIPPING, ids=lambda make: make().name)
def test_a_stream_passes_a_request_until_the_bound_and_not_after_it(make: Callable[[], VariantPolicy]) -> None:
    """A stream of ``a`` never leaves the one slot free; ``b`` arrives after its first request."""
    service_s = 1.5

    async def drive(traffic: Traffic) -> None:
        streaming = asyncio.create_task(stream(traffic, "a", number=40, every_s=1.0, service_s=service_s))
        await asyncio.sleep(0.25)
        traffic.send("b", 1.0)
        await streaming

    requests = serve(drive, policy=make())
    (late,) = (one for one in requests if one.name == "b")
    assert STARVATION_BOUND_S <= late.waited_s <= STARVATION_BOUND_S + service_s
    bound_s = late.arrived_s + STARVATION_BOUND_S
    before = [one for one in requests if one.name == "a" and one.arrived_s < bound_s]
    assert {one.waited_s for one in before} == {0.0}, "they skip the line"
    after = [one for one in requests if one.name == "a" and one.arrived_s > bound_s]
    assert min(one.began_s or 0.0 for one in after) > (late.began_s or 0.0)


def test_past_the_bound_slots_are_emptied_one_by_one() -> None:
    """Two slots, two streams: ``a``, with the older slot, ends for ``c``; ``b`` goes on until ``d`` is next."""
    service_s = 1.5

    async def drive(traffic: Traffic) -> None:
        async with asyncio.TaskGroup() as streams:
            streams.create_task(stream(traffic, "a", number=30, every_s=1.0, service_s=service_s))
            streams.create_task(stream(traffic, "b", number=60, every_s=0.5, service_s=service_s))
            await asyncio.sleep(0.25)
            traffic.send("c", 1.0)
            traffic.send("d", 1.0)

    requests = serve(drive, slots=2)
    first, second = (next(one for one in requests if one.name == name) for name in "cd")
    assert STARVATION_BOUND_S <= first.waited_s <= STARVATION_BOUND_S + service_s
    assert first.waited_s < second.waited_s <= STARVATION_BOUND_S + 2 * service_s
    overdue_s, began_s = first.arrived_s + STARVATION_BOUND_S, first.arrived_s + first.waited_s
    meanwhile = {one.name for one in requests if overdue_s < one.arrived_s + one.waited_s < began_s}
    assert meanwhile == {"b"}


@pytest.mark.parametrize(
    ("oldest_s", "first"),
    [(4.0, "b"), (5.0, "c"), (9.0, "c"), (10.0, "b"), (12.0, "b")],
    ids=["before-half", "half", "before-the-bound", "bound", "past-the-bound"],
)
@pytest.mark.parametrize("both_served", [True, False], ids=["both-served", "one-served"])
def test_from_half_the_bound_on_the_variant_served_least_recently_is_next(
    oldest_s: float, first: str, *, both_served: bool
) -> None:
    """``c`` was served before ``b``, or never; both wait for the slot of ``a``, and ``b`` is at the head."""

    async def drive(traffic: Traffic) -> None:
        for name in ("c", "b") if both_served else ("b",):
            traffic.send(name, 1.0)
            await asyncio.sleep(2.0)
        began_s = asyncio.get_running_loop().time()
        traffic.send("a", oldest_s + 1.0)
        await asyncio.sleep(1.0)
        for name in ("b", "c"):  # in one moment, so that the bound is both's
            traffic.send(name, 1.0)
        await asyncio.gather(*traffic.line.tasks)
        assert asyncio.get_running_loop().time() == began_s + oldest_s + 3.0

    waited = [one for one in serve(drive) if one.waited_s]
    assert min(waited, key=lambda one: one.began_s or 0.0).name == first
    assert sorted(one.waited_s for one in waited) == [oldest_s, oldest_s + 1.0]


def test_a_long_line_of_one_variant_shares_a_worker_with_the_variants_behind_it() -> None:
    """Sixty of ``a`` wait before ``b`` and ``c``, one at a time; these go from half the bound on."""

    async def drive(traffic: Traffic) -> None:
        traffic.send("d", 6.0)
        await asyncio.sleep(0.5)
        for _ in range(60):
            traffic.send("a", 1.0)
        traffic.send("b", 1.0)
        traffic.send("c", 1.0)

    requests = serve(drive, max_outstanding=1)
    waits_s = {one.name: one.waited_s for one in requests if one.name in "bc"}
    assert all(wait_s < STARVATION_BOUND_S for wait_s in waits_s.values()), waits_s


def test_followers_of_a_parent_that_has_ended_pass_none() -> None:
    """DeltaZip: the parent of ``a`` ends while ``b`` waits, and what followed it lets no more of ``a`` pass."""

    async def drive(traffic: Traffic) -> None:
        traffic.send("a", 2.0)
        await asyncio.sleep(0.5)
        traffic.send("b", 1.0)
        await asyncio.sleep(0.5)
        traffic.send("a", 4.0)  # passes "b", with its parent
        await asyncio.sleep(2.0)
        traffic.send("a", 1.0)  # the parent has ended

    parent, late, follower, last = serve(drive, policy=DeltaZip())
    assert (parent.waited_s, follower.waited_s) == (0.0, 0.0)
    assert late.began_s == 5.0
    assert last.began_s == 6.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2),
    st.lists(st.tuples(st.sampled_from("aaabbcd"), st.integers(0, 8)), min_size=1, max_size=12),
)
def test_no_request_waits_longer_than_the_bound_and_a_turn_of_each_variant(
    slots: int, sent: list[tuple[str, int]]
) -> None:
    """Streams of ``a`` and ``b`` keep all slots, and rare requests arrive at any time."""
    service_s = 1.5

    async def drive(traffic: Traffic) -> None:
        async with asyncio.TaskGroup() as streams:
            for name in "ab"[:slots]:
                streams.create_task(stream(traffic, name, number=60, every_s=1.0, service_s=service_s))
            for name, pause in sent:
                await asyncio.sleep(pause / 2)
                traffic.send(name, service_s)

    requests = serve(drive, slots=slots)
    longest_s = STARVATION_BOUND_S + len(VARIANTS) * service_s
    assert all(one.waited_s <= longest_s for one in requests), Counter(one.name for one in requests)
