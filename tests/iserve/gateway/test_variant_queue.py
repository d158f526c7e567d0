"""The queue of a deployment with variants: when it is looked through, and requests that leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iserve.gateway.dispatch import Deployment
from iserve.gateway.errors import ApiError
from iserve.gateway.variant_loader import VariantLoader
from iserve.gateway.variant_residency import VariantRequest, VariantResidency
from iserve.route_table import Route, VariantRoute, WorkerTarget
from placement.variant_routing import FirstComeFirstServed
from tests.iserve.gateway.variant_requests import A, B, variant


class Loads(VariantLoader):
    """Loads that succeed at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []  # names of variants

    async def folder(self, variant: Any) -> Path:
        return Path("/")

    async def load(self, target: Any, variant: VariantRoute, folder: Path) -> None:
        self.begun.append(variant.name)

    async def unload(self, *arguments: Any) -> None: ...

    async def loaded(self, target: Any) -> frozenset[str]:
        return frozenset()


class Metrics:
    def loaded(self, variant: str, seconds: float) -> None: ...

    def evicted(self, variant: str) -> None: ...


WORKER = WorkerTarget(worker_id="w", url="http://127.0.0.1:9", ready=True, max_outstanding=3)
ROUTE = Route(
    name="m",
    model="org/base",
    created=1,
    max_context_tokens=10,
    workers=(WORKER,),
    adapter_slots=1,
    loaded_adapters=2,
    variants=(A, B),
)


def in_line(test: Callable[[Deployment], Awaitable[None]]) -> None:
    """Run ``test`` with a worker of one slot and room for three requests."""

    async def main() -> None:
        residency = partial(VariantResidency, loader=Loads(), observer=Metrics(), policy=FirstComeFirstServed())
        line = Deployment(ROUTE, 10, 60.0, residency)
        try:
            await test(line)
        finally:
            line.close()

    asyncio.run(main())


async def is_quiet(line: Deployment) -> None:
    """Wait until no worker is asked for anything, after which the queue is looked through."""
    assert line.variants is not None
    while any(one.asking or one.loads or one.unloads for one in line.variants._workers.values()):
        await asyncio.sleep(0)


def test_those_behind_a_request_that_leaves_are_offered_its_worker() -> None:
    async def test(line: Deployment) -> None:
        await line.acquire(0, use=VariantRequest(A, 0.0))
        of_b = asyncio.create_task(line.acquire(1, use=VariantRequest(B, 0.0)))
        of_a = asyncio.create_task(line.acquire(2, use=VariantRequest(A, 0.0)))
        while line.num_waiting < 2:
            await asyncio.sleep(0)
        await is_quiet(line)
        of_b.cancel()
        assert (await asyncio.wait_for(of_a, 30)).worker_id == "w"

    in_line(test)


def test_a_long_queue_is_looked_through_once_for_each_release(monkeypatch: Any) -> None:
    """Neither arrivals that no worker has a slot for, nor the loads that a release starts, look through it."""

    async def test(line: Deployment) -> None:
        of_a = VariantRequest(A, 0.0)
        await line.acquire(0, use=of_a)
        assert line.variants is not None
        await is_quiet(line)
        for _ in range(3):  # turns of the loop: the task's callback, then its round
            await asyncio.sleep(0)
        rounds = 0
        serve = line._serve

        def count() -> None:
            nonlocal rounds
            rounds += 1
            serve()

        monkeypatch.setattr(line, "_serve", count)
        monkeypatch.setattr(line.variants, "_changed", count)
        waiting = [asyncio.create_task(line.acquire(turn, use=VariantRequest(B, 0.0))) for turn in (1, 2, 3)]
        while line.num_waiting < 3:
            await asyncio.sleep(0)
        await is_quiet(line)
        assert rounds == 0
        line.release(WORKER, use=of_a)
        assert {one.worker_id for one in await asyncio.gather(*waiting)} == {"w"}
        await is_quiet(line)
        for _ in range(3):
            await asyncio.sleep(0)
        assert rounds == 1

    in_line(test)


def test_a_request_of_the_base_that_ends_where_there_was_room_leaves_the_queue_alone(monkeypatch: Any) -> None:
    async def test(line: Deployment) -> None:
        of_a = VariantRequest(A, 0.0)
        await line.acquire(0, use=of_a)
        waiting = asyncio.create_task(line.acquire(1, use=VariantRequest(B, 0.0)))
        while not line.num_waiting:
            await asyncio.sleep(0)
        await line.acquire(2)
        await line.acquire(3)  # the worker is full
        rounds = 0
        serve = line._serve

        def count() -> None:
            nonlocal rounds
            rounds += 1
            serve()

        monkeypatch.setattr(line, "_serve", count)
        line.release(WORKER)
        assert rounds == 1
        line.release(WORKER)
        assert rounds == 1
        line.release(WORKER, use=of_a)
        assert rounds == 2
        assert (await asyncio.wait_for(waiting, 60)).worker_id == "w"

    in_line(test)


@pytest.mark.parametrize(
    ("slots", "room", "in_flight"),
    [
        pytest.param(1, 3, 1, id="no-slot"),
        pytest.param(2, 1, 1, id="no-room"),
        pytest.param(2, 2, 2, id="neither"),
    ],
)
def test_nothing_is_loaded_for_a_request_that_the_queue_has_no_place_for(
    slots: int, room: int, in_flight: int
) -> None:
    variants = tuple(variant(f"v{number}") for number in range(8))
    route = replace(
        ROUTE,
        workers=(replace(WORKER, max_outstanding=room),),
        variants=variants,
        adapter_slots=slots,
        loaded_adapters=6,
    )

    async def main() -> None:
        loads = Loads()
        residency = partial(VariantResidency, loader=loads, observer=Metrics(), policy=FirstComeFirstServed())
        line = Deployment(route, 2, 60.0, residency)
        assert line.variants is not None
        for number in range(in_flight):
            use = VariantRequest(variants[number], 0.0)
            await line.variants.ready(use, (await line.acquire(number, use=use)).url)
        waiting = [
            asyncio.create_task(line.acquire(number, use=VariantRequest(variants[number], 0.0)))
            for number in range(in_flight, in_flight + 2)
        ]
        while line.num_waiting < 2:
            await asyncio.sleep(0)
        await is_quiet(line)
        for number in range(in_flight + 2, 8):
            with pytest.raises(ApiError) as error:
                await line.acquire(number, use=VariantRequest(variants[number], 0.0))
            assert error.value.status == 429
            await is_quiet(line)
        expected = [one.name for one in variants[: in_flight + 2]]
        assert loads.begun == expected
        assert list(line.variants._wanted) == [one.engine_name for one in variants[in_flight : in_flight + 2]]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not line.variants._wanted
        line.close()

    asyncio.run(main())
