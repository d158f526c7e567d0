"""A deployment that rejects late requests: a real gateway, and workers that are held for as long as it takes.

No worker is fast or slow here: what a request would take is what its route says, so that nothing hangs on time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from daemon.atomic_file import write_file_atomically
from fingerprint.service_model import ServiceModel
from iserve.route_table import Route, WorkerTarget
from planner.admission import AdmissionPolicy
from planner.intent import Slo
from tests.golden_words import Golden
from tests.iserve.gateway.conftest import Answer, FakeWorker, GatewayProcess, route
from tests.two_point_service import two_point_service
from tests.waiting import PATIENCE_S, wait_until

NAME = "late"
REFUSED = f'iserve_gateway_late_rejections_total{{deployment="{NAME}"}}'
# Two at once; a prompt takes 10 s, a token 1 s, and with another 2 s. An answer of unknown length has 11.
TIMES = {"input_tokens": 10, "output_tokens": 11, "ttft_s": 10.0, "tpot_s": 1.0, "full_tpot_s": 2.0}
SERVICE = two_point_service(batch=2, **TIMES)


def late_route(*workers: WorkerTarget, slots: int = 2, service: ServiceModel = SERVICE, **limits: float) -> Route:
    targets = tuple(replace(worker, max_outstanding=slots) for worker in workers)
    policy = AdmissionPolicy(slo=Slo(**limits), service=service, slots=slots)
    return replace(route(*targets, name=NAME), admission=policy)


@contextmanager
def held(gateway: GatewayProcess, *workers: FakeWorker, number: int = 1) -> Iterator[list[Answer]]:
    """So many requests, begun and at their workers; when it ends, their answers."""
    answers: list[Answer] = []
    before = sum(len(worker.bodies) for worker in workers)
    threads = [threading.Thread(target=lambda: answers.append(gateway.complete(NAME))) for _ in range(number)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(len(worker.bodies) for worker in workers) == before + number, "they are at work")
    try:
        yield answers
    finally:
        for worker in workers:
            worker.go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_who_would_be_late_is_refused_at_once_and_told_why_and_when_to_come(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker], golden: Golden
) -> None:
    worker = make_worker("wait")
    gateway.publish(late_route(worker.target(), slots=1, e2e_s=30.0))
    with held(gateway, worker) as answers:
        refused = gateway.complete(NAME)
        assert refused.status == 503
        assert (refused.error["code"], refused.error["type"]) == ("would_be_late", "server_error")
        words = refused.error["message"]
        assert "e2e=30 s" in words
        golden("rest-errors", words, numbers=False)
        assert "nobody before it" not in words
        # 20 s of the one before it, and 20 s of its own.
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert gateway.metric(REFUSED) == 1
        waiting = gateway.metric(f'iserve_gateway_waiting_requests{{deployment="{NAME}"}}')
        assert waiting == 0
    assert [answer.status for answer in answers] == [200]
    assert len(worker.bodies) == 1
    assert gateway.complete(NAME).status == 200, "nobody is before it now"


def test_one_that_asks_for_less_is_taken(gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]) -> None:
    worker = make_worker("wait")
    gateway.publish(late_route(worker.target(), slots=1, e2e_s=36.0))
    with held(gateway, worker):
        assert gateway.complete(NAME, max_tokens=500).status == 503
        answers: list[Answer] = []
        short = threading.Thread(target=lambda: answers.append(gateway.complete(NAME, max_tokens=3)))
        short.start()
        waits = f'iserve_gateway_waiting_requests{{deployment="{NAME}"}}'
        wait_until(lambda: gateway.metric(waits) == 1, "it waits for its turn")
    short.join(PATIENCE_S)
    assert [answer.status for answer in answers] == [200]


def test_an_idle_deployment_lets_one_through_that_it_cannot_serve_in_time(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker], golden: Golden
) -> None:
    """Requests are let through again and again, one at a time; with another running, one is asked not to wait."""
    worker = make_worker()
    gateway.publish(late_route(worker.target(), slots=1, e2e_s=0.001))
    assert [gateway.complete(NAME).status for _ in range(5)] == [200] * 5
    worker.mode = "wait"
    with held(gateway, worker):
        golden("rest-errors", gateway.complete(NAME).error["message"], numbers=False)


@pytest.mark.parametrize("slots", [1, 2])
def test_who_comes_again_when_the_answer_is_complete_finds_nobody_there(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker], slots: int
) -> None:
    """Though the worker has not yet ended its stream, which the gateway waits for to use the connection again."""
    worker = make_worker("done-hold")
    gateway.publish(late_route(worker.target(), slots=slots, e2e_s=0.001))
    assert [gateway.complete(NAME, stream=True).status for _ in range(3)] == [200] * 3


def test_it_goes_to_the_replica_where_it_keeps_its_limits(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    """A step with another one is too slow: each gets a replica of its own, the third is rejected."""
    first, second = make_worker("wait"), make_worker("wait")
    gateway.publish(late_route(first.target("w0"), second.target("w1"), tpot_s=1.5))
    with held(gateway, first, second, number=2) as answers:
        assert (len(first.bodies), len(second.bodies)) == (1, 1)
        refused = gateway.complete(NAME)
        assert refused.status == 503
        assert "time per token" in refused.error["message"]
    assert [answer.status for answer in answers] == [200, 200]


def test_fewest_requests_do_not_decide_where_only_another_keeps_the_limits(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    """A prompt behind another is too late: it goes to the fuller replica.

    One replica has a prompt under way; the other has two that have their first tokens.
    A prompt's token takes 100 s, by the plan; that first tokens arrive at once lowers this to some 40 s.
    """
    prompting, decoding = make_worker("wait"), make_worker("hold")
    service = two_point_service(batch=3, **(TIMES | {"ttft_s": 1000.0, "full_ttft_s": 3000.0}))
    gateway.publish(late_route(decoding.target("w1"), slots=3, service=service, ttft_s=800.0))
    begun = f'iserve_gateway_time_to_first_token_seconds_count{{deployment="{NAME}"}}'
    before = gateway.metric(begun)
    streams = []
    for number in (1, 2):
        streams.append(threading.Thread(target=lambda: gateway.complete(NAME, stream=True)))
        streams[-1].start()
        wait_until(lambda wanted=before + number: gateway.metric(begun) == wanted, "its first token has come")
    both = (prompting.target("w0"), decoding.target("w1"))
    gateway.publish(late_route(*both, slots=3, service=service, ttft_s=800.0))
    with held(gateway, prompting):
        answers: list[Answer] = []
        third = threading.Thread(target=lambda: answers.append(gateway.complete(NAME, stream=False)))
        third.start()
        wait_until(lambda: len(decoding.bodies) == 3, "it is at the fuller one")
        assert len(prompting.bodies) == 1
        decoding.go_on.set()
        third.join(PATIENCE_S)
    for stream in streams:
        stream.join(PATIENCE_S)
    assert [answer.status for answer in answers] == [200]


def test_who_calls_one_that_sleeps_is_not_late_for_its_start(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    """All waiting requests are kept while no worker is ready, however many, however short the limits.

    The first when one is ready is served.
    """
    worker = make_worker()
    asleep = replace(late_route(worker.target(ready=False), slots=2, ttft_s=0.001), ready_wait_s=60.0)
    gateway.publish(asleep)
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(gateway.complete(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    waits = f'iserve_gateway_waiting_requests{{deployment="{NAME}"}}'
    wait_until(lambda: gateway.metric(waits) == 3, "all wait")
    gateway.publish(late_route(worker.target(), slots=2, ttft_s=0.001))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(answer.status for answer in answers)[0] == 200
    assert len(answers) == 3


def test_without_the_option_nobody_is_refused(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    """All requests are accepted, as long as the queue has room."""
    worker = make_worker("wait")
    gateway.publish(route(worker.target(max_outstanding=1), name=NAME))
    before = gateway.metric(REFUSED)
    with held(gateway, worker):
        answers: list[Answer] = []
        second = threading.Thread(target=lambda: answers.append(gateway.complete(NAME, max_tokens=10**6)))
        second.start()
        waits = f'iserve_gateway_waiting_requests{{deployment="{NAME}"}}'
        wait_until(lambda: gateway.metric(waits) == 1, "it waits")
    second.join(PATIENCE_S)
    assert [answer.status for answer in answers] == [200]
    assert gateway.metric(REFUSED) == before


@pytest.mark.parametrize("ended", ["status-400", "die", "busy"])
def test_what_fails_leaves_the_judge_with_nobody(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker], ended: str
) -> None:
    worker = make_worker(ended)
    gateway.publish(late_route(worker.target(), slots=1, e2e_s=0.001))
    assert gateway.complete(NAME).status != 200
    worker.mode = "ok"
    assert gateway.complete(NAME).status == 200, "it is idle"


def test_a_table_with_a_pace_that_cannot_be_is_left_out(
    gateway: GatewayProcess, make_worker: Callable[..., FakeWorker]
) -> None:
    worker = make_worker()
    gateway.publish(late_route(worker.target(), slots=2, e2e_s=30.0))
    path, rejected = gateway.home / "run" / "routes.json", gateway.metric("iserve_gateway_rejected_routes_total")
    told = path.read_bytes()
    assert b'"slots":2' in told
    write_file_atomically(path, told.replace(b'"slots":2', b'"slots":0'))
    wait_until(lambda: gateway.metric("iserve_gateway_rejected_routes_total") == rejected + 1, "it is rejected")
    assert gateway.complete(NAME).status == 200, "the last one stays in force"
