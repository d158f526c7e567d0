"""Learning of the times of loads by the gateway: once of each, however many requests wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fingerprint.load_waits import OneLoad
from iserve.gateway.errors import ApiError
from iserve.gateway.variant_residency import NoPlaceError, VariantRequest
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import NotReachedError
from iserve.route_table import Route, WorkerTarget
from placement.variant_routing import LeastLoaded
from planner.admission import AdmissionPolicy, Rejection
from planner.intent import Slo
from planner.pending_loads import LoadsAhead
from tests.iserve.gateway.test_variant_queue_laws import Line
from tests.iserve.gateway.timeless_loop import TimelessLoop
from tests.iserve.gateway.variant_requests import A, B
from tests.two_point_service import two_point_service

LOAD_S = 100.0
WORKER = WorkerTarget(worker_id="w0", url="http://127.0.0.1:1", ready=True, token="t", max_outstanding=64)
SERVICE = two_point_service(batch=8, input_tokens=10, output_tokens=11, ttft_s=10.0, tpot_s=1.0)
ROUTE = Route(
    name="m",
    model="org/base",
    created=1_700_000_000,
    max_context_tokens=2048,
    workers=(WORKER,),
    adapter_slots=4,
    loaded_adapters=4,
    variants=(A, B),
    admission=AdmissionPolicy(
        slo=Slo(ttft_s=1e6), service=replace(SERVICE, one_load=OneLoad(load_s=LOAD_S, stops_steps=False)), slots=8
    ),
)


async def request(line: Line, ticket: int, variant: int) -> None:
    """Acquire a worker for a request of the variant, and wait for its load, as the proxy does."""
    deployment, use = line.deployment, VariantRequest(ROUTE.variants[variant], 0.0)
    known = deployment.new_request(100, 10, is_streamed=True)
    target = await deployment.acquire(ticket, request=known, use=use)
    try:
        await line.residency.ready(use, target.url)
        deployment.record_loaded(target, known)
    except (NoPlaceError, ApiError, NotBegunError, NotReachedError):
        pass
    deployment.release(target, known, use)


def learned_load_s(line: Line) -> float:
    """Return what a further load is forecast to take: that of the rejection of a request next to another."""
    admission = line.deployment.admission
    assert admission is not None
    admission._controller._slo = Slo(ttft_s=0.1)
    admission.record_start(admission.new_request(100, 10, is_streamed=True), WORKER.url)
    late = admission.new_request(100, 10, is_streamed=True)
    rejection = admission.check_start(late, WORKER.url, LoadsAhead(1))
    assert isinstance(rejection, Rejection)
    return rejection.loads_s


def check_ended(line: Line) -> None:
    """Check that each load that has ended is forgotten; variants may be loaded ahead."""
    left = [load for worker in line.residency._workers.values() for load in worker.loads.values()]
    assert not any(load.done() for load in left)
    assert line.residency.num_pending_loads == len(left)


def learned_of(*waiting: int, fails: bool = False, last_first: bool = False) -> float:
    """Return what a load is forecast to take after those of `a` and `b`, which so many requests wait for.

    Loads take no time by the clock of the test: as a ratio to the plan's, the least that is believed, an eighth.
    """

    async def run() -> float:
        line = Line(ROUTE, LeastLoaded())
        await line.settle()
        tasks = [
            asyncio.create_task(request(line, 10 * variant + index, variant))
            for variant, number in enumerate(waiting)
            for index in range(number)
        ]
        await line.settle()
        assert len(line.loads.held) == len(waiting), "one load for all requests of a variant"
        for _ in waiting:
            line.fail_load(0) if fails else line.finish_load(-1 if last_first else 0)
            await line.settle()
        await asyncio.gather(*tasks)
        check_ended(line)
        learned_s = learned_load_s(line)
        line.deployment.close()
        return learned_s

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(run())


_ONCE_S = LOAD_S * (1 + 1 / 8) / 2  # the mean of the plan's and of one load


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_load_is_learned_once_for_all_requests_that_wait_for_it(number: int) -> None:
    assert learned_of(number) == pytest.approx(_ONCE_S)


@pytest.mark.parametrize("numbers", [(1, 1), (5, 1), (1, 5)])
def test_each_of_two_loads_is_learned_once(numbers: tuple[int, int]) -> None:
    assert learned_of(*numbers) == pytest.approx(LOAD_S * (1 + 1 / 8 + 1 / 8) / 3)


def test_a_load_that_overtakes_another_is_learned_with_it() -> None:
    """The second ends first, and is in the time of the first."""
    assert learned_of(1, 1, last_first=True) == pytest.approx(_ONCE_S)


def test_a_load_that_fails_is_not_learned() -> None:
    assert learned_of(1, fails=True) == LOAD_S


def test_a_load_of_a_deployment_that_rejects_no_late_requests_ends() -> None:
    async def run() -> None:
        line = Line(replace(ROUTE, admission=None), LeastLoaded())
        await line.settle()
        task = asyncio.create_task(request(line, 0, 0))
        await line.settle()
        line.finish_load(0)
        await line.settle()
        await task
        check_ended(line)
        line.deployment.close()

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        runner.run(run())
