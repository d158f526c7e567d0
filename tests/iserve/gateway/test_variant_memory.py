"""Workers whose memory holds fewer variants than they have places: idle ones are unloaded, or requests wait."""

from __future__ import annotations

import random

import pytest

from tests.daemon.engines.vllm_stand_in.deltas import Reader
from tests.iserve.gateway.test_variant_deltas import delta
from tests.iserve.gateway.variant_requests import A, B, C, hold, route, said, statuses, variant
from tests.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def gateway(variant_gateway):
    return variant_gateway


@pytest.fixture
def make_worker(make_adapter_worker):
    return make_adapter_worker


@pytest.mark.parametrize(
    "text",
    [
        "Call to add_lora method failed: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
        "capacity of 79.11 GiB of which 3.44 MiB is free.",
        "Call to add_lora method failed: CUDA error: out of memory",
        "rank 0 has no memory for /home/x: CUDA out of memory. Tried to allocate 2.00 MiB",
        "rank 1: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
        "rank 0 has no memory for /home/x: ",
    ],
)
def test_an_idle_variant_is_unloaded_where_memory_is_full(gateway, make_worker, text: str) -> None:
    """The load is tried again; from then on the worker counts no more places than its memory has."""
    worker = make_worker(slots=2, max_loaded=4, memory=1, no_memory=text)
    gateway.publish(route(worker, variants=(A, B)))
    assert [said(gateway.complete(name)) for name in "abab"] == [A.content_hash, B.content_hash] * 2
    a, b = A.engine_name, B.engine_name
    assert worker.loads == [a, b, b, a, b]
    assert worker.unloads == [a, b, a]


def test_one_variant_after_another_is_unloaded(gateway, make_worker) -> None:
    worker = make_worker(slots=2, max_loaded=4)
    gateway.publish(route(worker, variants=(A, B, C)))
    for name in "ab":
        gateway.complete(name)
    worker.memory = 1  # of another process, which has taken the rest since
    assert said(gateway.complete("c")) == C.content_hash
    assert worker.unloads == [A.engine_name, B.engine_name]
    assert set(worker.loaded) == {C.engine_name}


def test_a_request_waits_while_memory_is_full_of_variants_in_flight(gateway, make_worker, clients) -> None:
    worker = make_worker(slots=2, max_loaded=4, memory=1)
    gateway.publish(route(worker, variants=(A, B)))
    (held,) = hold(gateway, clients, worker, A)
    waiting = [clients.submit(gateway.complete, "b") for _ in range(3)]
    wait_until(
        lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 3, "all wait in the queue"
    )
    assert worker.loads == [A.engine_name, B.engine_name], "it is not tried again and again"
    assert said(gateway.complete("m")) == "served-base"
    worker.go_on.set()
    assert said(held.result()) == A.content_hash
    assert [said(one.result()) for one in waiting] == [B.content_hash] * 3
    assert set(worker.loaded) == {B.engine_name}


def test_a_pinned_variant_leaves_a_place_where_memory_holds_one(gateway, make_worker) -> None:
    worker = make_worker(slots=2, max_loaded=4, memory=1)
    pinned = variant("p", pinned=True)
    gateway.publish(route(worker, variants=(pinned, B)))
    wait_until(lambda: worker.loaded, "it is loaded")
    assert [said(gateway.complete(name)) for name in "bp"] == [B.content_hash, pinned.content_hash]


def test_memory_that_holds_no_variant_is_an_error(gateway, make_worker) -> None:
    worker = make_worker(memory=0)
    gateway.publish(route(worker, variants=(A,)))
    answer = gateway.complete("a")
    assert (answer.status, answer.error["code"]) == (503, "variant_load")
    assert worker.no_memory in answer.error["message"]
    assert gateway.complete("m").status == 200


def test_another_worker_takes_what_the_memory_of_one_does_not_hold(gateway, make_worker, clients) -> None:
    full, free = make_worker(slots=2, memory=1), make_worker(slots=2)
    gateway.publish(route(full, free, variants=(A, B, C)))
    held = hold(gateway, clients, full, A)
    assert [said(gateway.complete(name)) for name in "bc"] == [B.content_hash, C.content_hash]
    full.go_on.set()
    assert statuses(held) == [200]


def test_an_idle_delta_is_unloaded_where_memory_is_full_of_deltas(gateway, make_worker) -> None:
    """The worker reads a delta before memory is found to be full: it reads it again, and none in vain."""
    worker = make_worker(slots=3, max_loaded=3, memory=1, reader=Reader(3))
    one, two = delta("one"), delta("two")
    gateway.publish(route(worker, variants=(one, two)))
    wanted = [one.content_hash, two.content_hash] * 2
    assert [said(gateway.complete(name)) for name in ("one", "two") * 2] == wanted
    assert worker.unloads == [one.engine_name, two.engine_name, one.engine_name]
    assert not worker.violations


def test_requests_wait_while_memory_is_full_of_deltas_in_flight(gateway, make_worker, clients) -> None:
    worker = make_worker(slots=3, max_loaded=3, memory=1, reader=Reader(2))
    one, two = delta("one"), delta("two")
    gateway.publish(route(worker, variants=(one, two, A)))
    (held,) = hold(gateway, clients, worker, one)
    waiting = [clients.submit(gateway.complete, name) for name in ("two", "two", "a")]
    wait_until(
        lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 3, "all wait in the queue"
    )
    assert said(gateway.complete("m")) == "served-base"
    worker.go_on.set()
    assert said(held.result()) == one.content_hash
    assert [said(answer.result()) for answer in waiting] == [two.content_hash] * 2 + [A.content_hash]
    assert not worker.violations


def test_a_delta_that_no_memory_holds_is_an_error_and_the_base_is_served(gateway, make_worker) -> None:
    worker = make_worker(memory=0, reader=Reader(2))
    gateway.publish(route(worker, variants=(delta("large"),)))
    answer = gateway.complete("large")
    assert (answer.status, answer.error["code"]) == (503, "variant_load")
    assert worker.no_memory in answer.error["message"]
    assert gateway.complete("m").status == 200


def test_storm_of_deltas_on_workers_with_little_memory(gateway, make_worker, clients) -> None:
    workers = [
        make_worker(slots=3, max_loaded=3, service_s=0.002, memory=memory, reader=Reader(2)) for memory in (1, 2)
    ]
    variants = {f"z{index}": delta(f"z{index}") for index in range(8)}
    gateway.publish(route(*workers, variants=tuple(variants.values())))
    draw = random.Random(11)
    names = [draw.choice(list(variants)) for _ in range(80)]
    answers = [clients.submit(gateway.complete, name) for name in names]
    assert [said(answer.result()) for answer in answers] == [variants[name].content_hash for name in names]
    assert all(len(worker.loaded) <= (worker.memory or 0) for worker in workers)


def test_storm_on_workers_with_little_memory(gateway, make_worker, clients) -> None:
    workers = [make_worker(slots=3, max_loaded=5, service_s=0.002, memory=memory) for memory in (1, 2)]
    variants = {f"z{index}": variant(f"z{index}") for index in range(8)}
    gateway.publish(route(*workers, variants=tuple(variants.values())))
    draw = random.Random(7)
    names = [draw.choice(list(variants)) for _ in range(160)]
    answers = [clients.submit(gateway.complete, name) for name in names]
    assert [said(answer.result()) for answer in answers] == [variants[name].content_hash for name in names]
    assert all(len(worker.loaded) <= (worker.memory or 0) for worker in workers)
