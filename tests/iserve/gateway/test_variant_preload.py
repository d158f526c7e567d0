"""Loads of variants before they are asked for: a real gateway at workers that keep the contract strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.iserve.gateway.adapter_worker import BASE
from tests.iserve.gateway.variant_requests import A, B, C, hold, route, said, statuses, variant
from tests.waiting import wait_until

D = variant("d")
pytestmark = pytest.mark.process


@pytest.fixture
def gateway(make_variant_gateway):
    return make_variant_gateway("--preload")


@pytest.fixture
def make_worker(make_adapter_worker):
    return make_adapter_worker


def names(*variants):
    return [one.engine_name for one in variants]


def test_free_slots_are_filled_one_load_at_a_time_and_nothing_more(gateway, make_worker) -> None:
    """Places beyond the slots stay free for what is asked for."""
    worker = make_worker(slots=2, max_loaded=4)
    worker.load_now.clear()
    gateway.publish(route(worker, variants=(A, B, C)))
    wait_until(lambda: worker.loads, "the first is being loaded")
    assert said(gateway.complete()) == BASE
    assert worker.loads == names(A)
    worker.load_now.set()
    wait_until(lambda: set(worker.loaded) == set(names(A, B)), "both slots are filled")
    assert [said(gateway.complete(one)) for one in ("a", "b", "m")] == [A.content_hash, B.content_hash, BASE]
    assert worker.loads == names(A, B)
    assert worker.unloads == []


def test_a_load_that_a_request_waits_for_is_first(gateway, make_worker, clients) -> None:
    worker = make_worker(slots=3)
    worker.load_now.clear()
    gateway.publish(route(worker, variants=(A, B, C)))
    wait_until(lambda: worker.loads == names(A), "the first is being loaded")
    answer = clients.submit(gateway.complete, "c")
    wait_until(lambda: worker.loads == names(A, C), "it is loaded next to it, before the second")
    worker.load_now.set()
    assert said(answer.result()) == C.content_hash
    wait_until(lambda: worker.loads == names(A, C, B), "the rest follows")


def test_a_request_for_what_is_being_loaded_causes_no_further_load(gateway, make_worker, clients) -> None:
    worker = make_worker(slots=1)
    worker.load_now.clear()
    gateway.publish(route(worker, variants=(A,)))
    wait_until(lambda: worker.loads, "it is being loaded")
    answer = clients.submit(gateway.complete, "a")
    wait_until(lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 1, "it waits")
    worker.load_now.set()
    assert said(answer.result()) == A.content_hash
    assert worker.loads == names(A)


@pytest.mark.parametrize("model", ["m", "a"], ids=["of-the-base", "of-a-variant"])
def test_a_busy_worker_loads_nothing_ahead(gateway, make_worker, clients, model: str) -> None:
    worker = make_worker(slots=2)
    worker.load_now.clear()
    gateway.publish(route(worker, variants=(A,)))
    wait_until(lambda: worker.loads, "the first is being loaded")
    worker.held_models |= {BASE, A.engine_name}
    held = clients.submit(gateway.complete, model)
    wait_until(lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 1, "it is sent")
    worker.load_now.set()
    wait_until(lambda: A.engine_name in worker.loaded and sum(worker.in_flight.values()), "it runs")
    gateway.publish(route(worker, variants=(A, B)))
    assert worker.loads == names(A)
    worker.go_on.set()
    assert held.result().status == 200
    wait_until(lambda: worker.loads == names(A, B), "the rest follows once it is idle")


def test_nothing_is_evicted_for_it(gateway, make_worker) -> None:
    worker = make_worker(slots=1, max_loaded=1)
    gateway.publish(route(worker, variants=(A,)))
    wait_until(lambda: worker.loaded, "the slot is filled")
    gateway.publish(route(worker, variants=(A, B)))
    for _ in range(3):
        assert said(gateway.complete("a")) == A.content_hash
        assert said(gateway.complete()) == BASE
    assert worker.unloads == []


def test_workers_share_what_is_loaded_ahead(gateway, make_worker) -> None:
    workers = make_worker(slots=2), make_worker(slots=2)
    gateway.publish(route(*workers, variants=(A, B, C, D)))
    wait_until(lambda: all(len(one.loaded) == 2 for one in workers), "all slots are filled")
    assert sorted(workers[0].loads + workers[1].loads) == sorted(names(A, B, C, D))


def test_what_was_asked_for_last_is_back_first_at_a_restarted_worker(gateway, make_worker) -> None:
    worker = make_worker(slots=2)
    variants = (A, B, C, D)
    gateway.publish(route(worker, variants=variants))
    wait_until(lambda: len(worker.loaded) == 2, "the slots are filled")
    for name in "cd":
        assert gateway.complete(name).status == 200
    gateway.publish(route(worker, variants=variants, ready=False))
    worker.restart()
    worker.loads.clear()
    gateway.publish(route(worker, variants=variants))
    wait_until(lambda: set(worker.loaded) == set(names(C, D)), "both are back without a request")
    assert worker.loads == names(D, C)


def test_pinned_variants_are_first(gateway, make_worker) -> None:
    worker, pinned = make_worker(slots=2), variant("p", pinned=True)
    gateway.publish(route(worker, variants=(A, B, pinned)))
    wait_until(lambda: len(worker.loaded) == 2, "the slots are filled")
    assert worker.loads == names(pinned, A)


def test_a_gateway_that_is_killed_in_a_load_goes_on_after_its_start(gateway, make_worker) -> None:
    worker = make_worker(slots=3)
    worker.load_now.clear()
    gateway.publish(route(worker, variants=(A, B, C)))
    wait_until(lambda: worker.loads == names(A), "the first is being loaded")
    gateway.kill()
    gateway.start("--preload")
    worker.load_now.set()
    wait_until(lambda: set(worker.loaded) == set(names(A, B, C)), "all are loaded")
    assert said(gateway.complete("a")) == A.content_hash
    assert set(worker.violations) <= {f"{A.engine_name} is loaded twice"}  # which the killed one had begun
    worker.violations.clear()


class TestFailures:
    @pytest.mark.parametrize("failure", ["refused", "failed", "died", "damaged"])
    def test_one_that_cannot_be_loaded_is_left_out_and_harms_nothing(
        self, gateway, make_worker, failure: str
    ) -> None:
        """The load is tried once ahead, and again by a request."""
        worker = make_worker(slots=2)
        broken: Path = gateway.home / "variants" / f"{A.content_hash}.broken"
        broken.parent.mkdir(exist_ok=True)
        if failure == "damaged":
            broken.touch()
        elif failure == "died":
            worker.dies_on_load = True
        else:
            worker.refusals[A.engine_name] = (400 if failure == "refused" else 500, {"message": "no such file"})
        gateway.publish(route(worker, variants=(A,)))
        tried = [] if failure == "damaged" else names(A)
        wait_until(lambda: "load of a@" in gateway.logged(), "the load has failed")
        assert said(gateway.complete()) == BASE, "the worker serves"
        assert gateway.serves_version()
        worker.dies_on_load = False
        gateway.publish(route(worker, variants=(A, B)))
        wait_until(lambda: B.engine_name in worker.loaded, "the next one is loaded")
        assert worker.loads == [*tried, B.engine_name]
        worker.refusals.clear()
        broken.unlink(missing_ok=True)
        assert said(gateway.complete("a")) == A.content_hash

    def test_all_that_failed_is_tried_again_at_a_restarted_worker(self, gateway, make_worker) -> None:
        worker = make_worker(slots=2)
        worker.refusals[A.engine_name] = (500, {"message": "out of memory"})
        gateway.publish(route(worker, variants=(A,)))
        wait_until(lambda: "load of a@" in gateway.logged(), "the load has failed")
        gateway.publish(route(worker, variants=(A,), ready=False))
        worker.refusals.clear()
        gateway.publish(route(worker, variants=(A,)))
        wait_until(lambda: A.engine_name in worker.loaded, "it is loaded")


def test_a_slot_that_requests_hold_is_not_waited_for(gateway, make_worker, clients) -> None:
    """Variants that were loaded ahead are evicted for requests as any other."""
    worker = make_worker(slots=2, max_loaded=2)
    gateway.publish(route(worker, variants=(A, B, C, D)))
    wait_until(lambda: len(worker.loaded) == 2, "the slots are filled")
    held = hold(gateway, clients, worker, C, D)
    worker.go_on.set()
    assert statuses(held) == [200, 200]
    assert set(worker.loaded) == set(names(C, D))
