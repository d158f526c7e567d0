"""Requests for deployments that are started when called, and what the gateway reports to the controller."""

from __future__ import annotations

import asyncio
import threading
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
