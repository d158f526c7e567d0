"""Loads ahead of need: those that fail, those of several workers at once, and what is evicted of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from iserve.gateway import variant_residency
from iserve.gateway.errors import ApiError
from iserve.gateway.failed_loads import FailedLoads
from iserve.gateway.variant_loader import LoadFailedError, VariantLoader
from iserve.gateway.variant_residency import VariantRequest, VariantResidency
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import NotReachedError
from iserve.route_table import Route, VariantRoute, WorkerTarget
from placement.variant_routing import Admission
from tests.iserve.gateway.timeless_loop import TimelessLoop
from tests.iserve.gateway.variant_requests import variant

A, B, C, D, E = (variant(name) for name in "abcde")
WORKER, OTHER = (
    WorkerTarget(worker_id=f"w{port}", url=f"http://127.0.0.1:{port}", ready=True, max_outstanding=3)
    for port in (1, 2)
)
REFUSED = ApiError(400, "no such file", "variant_load")
FAILED = LoadFailedError("answered 500", ApiError(503, "out of memory", "variant_load"))
LOST = NotBegunError("failed", ApiError(503, "try again", "worker_lost"))


def route(*variants: VariantRoute, workers: Sequence[WorkerTarget] = (WORKER,), slots: int = 4) -> Route:
    return Route(
        name="m",
        model="org/base",
        created=1,
        max_context_tokens=10,
        workers=tuple(workers),
        adapter_slots=slots,
        loaded_adapters=slots,
        variants=variants,
    )


class Loads(VariantLoader):
    """Loads that end as the test says: with an error, or once the test lets them."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}  # by name
        self.held: dict[str, asyncio.Future[None]] = {}
        self.begun: list[tuple[str, str]] = []  # worker and variant
        self.begun_s: list[float] = []
        self.unloaded: list[str] = []
        self.asked = 0

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.begun]

    async def folder(self, variant: Any) -> Path:
        return Path("/")

    async def load(self, target: WorkerTarget, variant: VariantRoute, folder: Path) -> None:
        self.begun.append((target.worker_id, variant.name))
        self.begun_s.append(asyncio.get_running_loop().time())
        if (held := self.held.get(variant.name)) is not None:
            await held
        if (error := self.errors.get(variant.name)) is not None:
            raise error

    async def unload(self, target: Any, engine_name: str) -> None:
        self.unloaded.append(engine_name.partition("@")[0])

    async def loaded(self, target: Any) -> frozenset[str]:
        self.asked += 1
        return frozenset()


class Metrics:
    def loaded(self, variant: str, seconds: float) -> None: ...
    def evicted(self, variant: str) -> None: ...


def run(test: Callable[[VariantResidency, Loads], Awaitable[None]], table: Route, **errors: Exception) -> None:
    """Run ``test`` once all workers of ``table`` have loaded ahead what they can."""

    async def main() -> None:
        loads = Loads()
        loads.errors |= errors
        residency = VariantResidency(table, lambda: None, loads, Metrics())
        try:
            await settle()
            await test(residency, loads)
        finally:
            residency.close()

    asyncio.run(main())


async def settle() -> None:
    """Let the event loop do all that it can without a further event."""
    for _ in range(40):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker rests for no time after a failed load."""
    monkeypatch.setattr(variant_residency, "_RETRY_S", 0.0)


async def restart(residency: VariantResidency, table: Route) -> None:
    down = tuple(replace(worker, ready=False) for worker in table.workers)
    for now in (replace(table, workers=down), replace(table, workers=down), table):
        residency.update(now)
        await settle()


async def serve(residency: VariantResidency, one: VariantRoute, target: WorkerTarget = WORKER) -> None:
    request = VariantRequest(one, asyncio.get_running_loop().time())
    state = residency._workers[target.url].state
    evicted = state.evictions(one.engine_name, asyncio.get_running_loop().time())
    assert evicted is not None
    residency.admit(request, target, Admission(index=0, evicted=evicted))
    try:
        await residency.ready(request, target.url)
    finally:
        residency.release(request, target.url)
    residency.preload()  # as its deployment has it do
    await settle()


@pytest.mark.parametrize("error", [LOST, NotReachedError("no connection")])
def test_a_load_without_an_answer_is_not_tried_after_a_restart_until_a_request_has_done_so(
    error: Exception,
) -> None:
    table = route(A)

    async def test(residency: VariantResidency, loads: Loads) -> None:
        for _ in range(3):
            await restart(residency, table)
        assert loads.names == ["a"]
        loads.errors.clear()
        await serve(residency, A)
        assert loads.names == ["a", "a"]
        await restart(residency, table)
        assert loads.names == ["a", "a", "a"], "it has not ended its worker, and is back without a request"

    run(test, table, a=error)


def test_what_has_ended_one_worker_is_not_loaded_ahead_at_the_next() -> None:
    alone, both = route(A), route(A, workers=(WORKER, OTHER))

    async def test(residency: VariantResidency, loads: Loads) -> None:
        residency.update(replace(both, workers=(replace(WORKER, ready=False), OTHER)))
        await settle()
        assert loads.names == ["a"]

    run(test, alone, a=LOST)


@pytest.mark.parametrize("error", [REFUSED, FAILED])
def test_a_load_that_was_refused_is_tried_after_one_restart_and_not_after_each(error: Exception) -> None:
    table = route(A)

    async def test(residency: VariantResidency, loads: Loads) -> None:
        assert loads.names == ["a"]
        for _ in range(3):
            await restart(residency, table)
        assert loads.names == ["a", "a"]

    run(test, table, a=error)


def test_a_pinned_variant_that_never_loads_keeps_nothing_else_from_it() -> None:
    """Retry that begins just as the rest could be loaded; it is held here."""
    pinned = variant("p", pinned=True)
    table = route(A, pinned)

    async def main() -> None:
        loads = Loads()
        loads.errors["p"] = REFUSED
        residency = VariantResidency(replace(table, variants=(pinned,)), lambda: None, loads, Metrics())
        while not residency._workers[WORKER.url].failed.names:
            await asyncio.sleep(0)
        loads.held["p"] = asyncio.get_running_loop().create_future()
        residency.update(table)
        await settle()
        assert loads.names[-2:] == ["p", "a"]
        loads.held["p"].set_result(None)
        residency.close()
        await settle()

    asyncio.run(main())


class TestPinnedVariantsThatNeverLoad:
    """Seconds are those of an event loop that waits for no time."""

    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch: pytest.MonkeyPatch, no_quiet: None) -> None:
        monkeypatch.setattr(variant_residency, "_RETRY_S", 5.0)

    def run(self, table: Route, seconds: float, **errors: Exception) -> Loads:
        loads = Loads()
        loads.errors |= errors

        async def main() -> None:
            residency = VariantResidency(table, lambda: None, loads, Metrics())
            await asyncio.sleep(seconds)
            residency.close()

        with asyncio.Runner(loop_factory=TimelessLoop) as runner:
            runner.run(main())
        return loads

    @pytest.mark.parametrize("error", [REFUSED, FAILED, LOST])
    def test_one_is_tried_after_pauses_that_double_up_to_five_minutes(self, error: Exception) -> None:
        loads = self.run(route(variant("p", pinned=True)), 2000.0, p=error)
        pauses_s = [after - before for before, after in pairwise(loads.begun_s)]
        assert pauses_s == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300], abs=0.1)

    @pytest.mark.parametrize("slots", [4, 8])
    def test_the_rest_is_loaded_between_two_of_its_tries(self, slots: int) -> None:
        loads = self.run(route(A, B, C, variant("p", pinned=True), slots=slots), 12.0, p=REFUSED)
        assert loads.names == ["p", "p", "a", "b", "c"]

    def test_it_holds_no_slot_of_the_rest(self) -> None:
        loads = self.run(route(A, B, variant("p", pinned=True), slots=2), 12.0, p=REFUSED)
        assert loads.names == ["p", "p", "a", "b"]

    def test_many_keep_no_pinned_one_from_being_loaded(self) -> None:
        """Two loads fail, which are all that a worker has at once, and are first in its order of pinned ones."""
        pinned = {one.engine_name: one for one in (variant(name, pinned=True) for name in "pqr")}
        *bad, good = (pinned[name].name for name in frozenset(pinned))
        loads = self.run(route(*pinned.values()), 7.0, **dict.fromkeys(bad, REFUSED))
        assert loads.names[:3] == [*bad, good]

    def test_pauses_begin_anew_after_a_load_and_with_another_table(self) -> None:
        failed = FailedLoads()
        for _ in range(3):
            failed.fail("p", answered=True, ahead=False, now_s=100.0)
        assert failed.retry_s("p", 5.0) == 120.0
        failed.succeed("p")
        assert failed.retry_s("p", 5.0) == 0.0
        failed.fail("p", answered=True, ahead=False, now_s=200.0)
        assert failed.retry_s("p", 5.0) == 205.0
        failed.keep({"q"})
        assert failed.retry_s("p", 5.0) == 0.0

    @pytest.mark.parametrize(("answered", "retry_s"), [(True, 0.0), (False, 110.0)])
    def test_one_that_may_have_ended_the_worker_waits_at_the_next_start_as_well(
        self, answered: bool, retry_s: float
    ) -> None:
        failed = FailedLoads()
        for _ in range(2):
            failed.fail("p", answered=answered, ahead=False, now_s=100.0)
        failed.restart()
        assert failed.retry_s("p", 5.0) == retry_s


class TestFailuresInARow:
    def test_none_follows_three_until_a_load_succeeds(self) -> None:
        table = route(A, B, C, D, E)

        async def test(residency: VariantResidency, loads: Loads) -> None:
            assert loads.names == ["a", "b", "c"]
            await serve(residency, D)
            assert loads.names == ["a", "b", "c", "d", "e"]

        run(test, table, a=REFUSED, b=FAILED, c=REFUSED)

    def test_none_follows_three_until_a_restart(self) -> None:
        table = route(A, B, C, D)

        async def test(residency: VariantResidency, loads: Loads) -> None:
            assert loads.names == ["a", "b", "c"]
            loads.errors.clear()
            await restart(residency, table)
            assert loads.names == ["a", "b", "c", "a", "b", "c", "d"]

        run(test, table, a=REFUSED, b=FAILED, c=REFUSED)

    def test_three_that_may_have_ended_the_worker_are_enough_for_all_restarts(self) -> None:
        failed = FailedLoads()
        for name in "abc":
            assert failed.allows_preload
            failed.fail(name, answered=False, ahead=True, now_s=100.0)
            failed.restart()
        assert not failed.allows_preload
        failed.succeed("d")
        assert failed.allows_preload

    def test_loads_that_requests_wait_for_do_not_count(self) -> None:
        failed = FailedLoads()
        for name in "abcd":
            failed.fail(name, answered=True, ahead=False, now_s=100.0)
        assert failed.allows_preload


def test_a_load_ahead_that_the_worker_fails_at_forgets_nothing_and_a_lost_one_all() -> None:
    table = route(A)

    async def test(residency: VariantResidency, loads: Loads) -> None:
        await serve(residency, A)
        epoch = residency._workers[WORKER.url].epoch
        loads.errors = {"b": FAILED, "c": LOST}
        residency.update(route(A, B))
        await settle()
        assert loads.names == ["a", "b"]
        assert (residency._workers[WORKER.url].epoch, loads.asked) == (epoch, 1)
        residency.update(route(A, C))
        await settle()
        assert residency._workers[WORKER.url].epoch == epoch + 1

    run(test, table)


def test_a_failure_of_what_has_left_the_table_is_forgotten() -> None:
    async def test(residency: VariantResidency, loads: Loads) -> None:
        residency.update(route(B))
        await settle()
        assert not residency._workers[WORKER.url].failed.names

    run(test, route(A), a=LOST)


def test_one_of_several_ready_workers_loads_nothing_ahead_at_any_time() -> None:
    third = replace(OTHER, worker_id="w3", url="http://127.0.0.1:3")

    async def test(residency: VariantResidency, loads: Loads) -> None:
        for one in (A, B, C, D):
            loads.held[one.name] = asyncio.get_running_loop().create_future()
        residency.update(route(A, B, C, D, workers=(WORKER, OTHER)))
        await settle()
        assert len(loads.begun) == 1
        residency.update(route(A, B, C, D, workers=(WORKER, OTHER, third)))
        await settle()
        assert len({worker for worker, _ in loads.begun}) == len(loads.begun) == 2
        loads.held["a"].set_result(None)
        await settle()
        assert len(loads.begun) == 3
        for name in "bcd":
            loads.held[name].set_result(None)
        await settle()
        assert sorted(loads.names) == ["a", "b", "c", "d"]
        assert len({worker for worker, _ in loads.begun}) == 3, "each in its turn"

    run(test, route(workers=(WORKER, OTHER)))


def test_of_what_was_loaded_ahead_the_least_wanted_goes_first() -> None:
    """Order of registration counts where no variant was asked for: the first is wanted most."""

    async def test(residency: VariantResidency, loads: Loads) -> None:
        assert loads.names == ["a", "b", "c"]
        await serve(residency, D)
        await serve(residency, E)
        assert loads.unloaded == ["c", "b"]

    run(test, route(A, B, C, D, E, slots=3))


def test_the_table_is_not_looked_through_while_no_slot_is_free() -> None:
    class Untouched(dict[str, VariantRoute]):
        def __iter__(self) -> Any:
            raise AssertionError

    async def test(residency: VariantResidency, loads: Loads) -> None:
        residency._current = Untouched(residency._current)
        residency.preload()
        residency._workers[WORKER.url].state.unload(A.engine_name)
        with pytest.raises(AssertionError):
            residency.preload()

    run(test, route(A, B, slots=2))
