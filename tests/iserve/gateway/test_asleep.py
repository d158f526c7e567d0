"""Requests for deployments that are started when called, and what the gateway reports to the controller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from daemon.process import read_record
from fingerprint.codec import from_json
from iserve.gateway import dispatch
from iserve.gateway.dispatch import Deployment
from iserve.gateway.errors import ApiError
from iserve.route_table import DEMAND_PATH, Demand, DeploymentDemand, WorkerTarget
from tests.golden_words import Golden
from tests.iserve.gateway.conftest import Answer, FakeWorker, GatewayProcess, route
from tests.iserve.gateway.timeless_loop import TimelessLoop
from tests.waiting import PATIENCE_S, wait_until


def demand(gateway: GatewayProcess) -> Demand:
    record = read_record(gateway.home / "run" / "gateway.json")
    assert record is not None
    answer = gateway.ask("GET", DEMAND_PATH, headers={"Authorization": f"Bearer {record.token}"})
    assert answer.status == 200
    return from_json(answer.body, Demand)


def in_background(gateway: GatewayProcess) -> Callable[[], Answer]:
    """Begin one request and see it wait; return a call for its answer."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.complete()))
    thread.start()
    wait_until(lambda: demand(gateway).deployments[0].waiting, "the request waits")

    def end() -> Answer:
        thread.join(PATIENCE_S)
        return answers[0]

    return end


def test_a_request_is_held_until_its_worker_is_started(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    worker = make_worker()
    asleep = replace(route(worker.target(ready=False)), ready_wait_s=60.0)
    gateway.publish(asleep)
    answer = in_background(gateway)
    (now,) = demand(gateway).deployments
    rate = now.requests_per_s  # None until it has counted for 30 s, and this gateway may be older
    assert now == DeploymentDemand(name="m", waiting=1, outstanding=0, idle_s=0.0, requests_per_s=rate)
    gateway.publish(route(worker.target()))
    assert answer().status == 200
    (then,) = demand(gateway).deployments
    assert (then.waiting, then.outstanding) == (0, 0)
    assert then.idle_s > 0


def test_it_is_held_for_longer_than_for_a_worker_that_is_merely_not_ready(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(dispatch, "READY_WAIT_S", 0.02)
    target = WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=False)

    async def run() -> None:
        line = Deployment(route(target), max_queue=1, max_wait_s=60.0)
        with golden.raises("rest-errors", ApiError):
            await line.acquire(1)
        line.update(replace(route(target), ready_wait_s=60.0), 1, 60.0)
        held = asyncio.create_task(line.acquire(2))
        await asyncio.sleep(0.1)
        assert not held.done()
        ready = replace(target, ready=True)
        line.update(route(ready), 1, 60.0)
        assert await held == ready

    asyncio.run(run())


def test_patience_begins_when_the_last_worker_becomes_unready(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    """A request that has waited for its turn for longer than that is held no less than one that arrives now."""
    worker = make_worker("wait")
    full = replace(route(worker.target(max_outstanding=1)), ready_wait_s=1.0)
    asleep = replace(route(worker.target(ready=False), name="z"), ready_wait_s=1.5)
    gateway.publish(full, asleep)
    served = threading.Thread(target=gateway.complete)
    served.start()
    wait_until(lambda: worker.bodies, "the worker is full")
    answer = in_background(gateway)
    assert gateway.complete("z").status == 503  # after 1.5 s of the gateway's clock
    began_s = time.monotonic()
    gateway.publish(replace(full, workers=(worker.target(ready=False, max_outstanding=1),)), asleep)
    assert (answer().status, answer().json["error"]["code"]) == (503, "no_ready_worker")
    assert time.monotonic() - began_s > 0.9
    worker.go_on.set()
    served.join(PATIENCE_S)


@pytest.mark.parametrize("ready_s", [0.0, 4.9, 7.0, 23.0])
def test_short_times_without_a_ready_worker_end_no_request(ready_s: float) -> None:
    """The table has none for 4.8 s and a connection is refused, three times, at any age of the request."""
    target = WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True, max_outstanding=1)

    async def run() -> None:
        loop, line = asyncio.get_running_loop(), Deployment(route(target), max_queue=1, max_wait_s=600.0)
        assert await line.acquire(1) == target
        waiting = asyncio.create_task(line.acquire(2))
        for _ in range(3):
            await asyncio.sleep(ready_s)
            line.update(route(replace(target, ready=False)), 1, 600.0)
            await asyncio.sleep(dispatch.READY_WAIT_S - 0.2)
            line.update(route(target), 1, 600.0)
            await asyncio.sleep(ready_s)
            line.mark_down(target)
            await asyncio.sleep(dispatch.DOWN_S + 0.1)
        assert not waiting.done()
        line.mark_down(target)
        line.update(route(replace(target, ready=False)), 1, 600.0)
        unready_s = loop.time()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.code == "no_ready_worker"
        assert loop.time() - unready_s == pytest.approx(dispatch.READY_WAIT_S, abs=0.051)  # a timer may be early

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        runner.run(run())


def test_it_is_told_when_that_takes_too_long_or_cannot_be(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker], golden: Golden
) -> None:
    asleep = replace(route(make_worker().target(ready=False)), ready_wait_s=0.3)
    gateway.publish(asleep)
    late = gateway.complete()
    assert (late.status, late.json["error"]["code"]) == (503, "no_ready_worker")
    assert int(late.headers["retry-after"]) > 0
    gateway.publish(replace(asleep, ready_wait_s=60.0))
    answer = in_background(gateway)
    gateway.publish(replace(asleep, refusal="no room", retry_after_s=10))
    for told in (answer(), gateway.complete()):  # the one that waited, and a new one
        assert (told.status, told.headers["retry-after"]) == (503, "10")
        golden("rest-errors", told.json["error"]["message"])


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}])
def test_only_the_controller_is_told_who_asks(gateway: GatewayProcess, given: dict[str, str]) -> None:
    gateway.publish()
    assert gateway.ask("GET", DEMAND_PATH, headers=given).status == 401
