"""Late requests for variants, rejected by a real gateway that knows what a load takes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from fingerprint.load_waits import OneLoad
from iserve.route_table import Route
from planner.admission import AdmissionPolicy
from planner.intent import Slo
from tests.golden_words import Golden
from tests.iserve.gateway.adapter_worker import BASE
from tests.iserve.gateway.conftest import Answer
from tests.iserve.gateway.variant_requests import A, B, C, hold, route, said, statuses
from tests.two_point_service import two_point_service
from tests.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def gateway(variant_gateway):
    return variant_gateway


@pytest.fixture
def make_worker(make_adapter_worker):
    return make_adapter_worker


class TestRejectingLate:
    """Plans in which a prompt takes 10 s, a token 1 s and a load 100 s, whatever the stand-in takes."""

    def test_a_request_is_judged_with_the_load_of_its_variant(
        self, gateway, make_worker, clients, golden: Golden
    ) -> None:
        """Next to a request of `a`, `b` is rejected until it is loaded, which an idle worker does."""
        worker = make_worker()
        gateway.publish(rejecting(worker, ttft_s=60.0))
        assert said(gateway.complete("a")) == A.content_hash, "the worker is idle"
        held = hold(gateway, clients, worker, A)
        refused = gateway.complete("b")
        assert (refused.status, refused.error["code"]) == (503, "would_be_late")
        golden("rest-errors", refused.error["message"], numbers=False)
        assert said(gateway.complete()) == BASE
        assert worker.loads == [A.engine_name], "nothing is loaded for a request that is rejected"
        worker.go_on.set()
        assert statuses(held) == [200]
        assert said(gateway.complete("b")) == B.content_hash
        worker.go_on.clear()
        held = hold(gateway, clients, worker, A)
        assert said(gateway.complete("b")) == B.content_hash, "it is loaded"
        worker.go_on.set()
        assert statuses(held) == [200]

    def test_a_load_under_way_is_before_the_next(self, gateway, make_worker, clients) -> None:
        """Within 150 s there is time for one load: requests for the variant that is being loaded wait for it."""
        worker = make_worker()
        gateway.publish(rejecting(worker, ttft_s=150.0))
        worker.load_now.clear()
        cold = [clients.submit(gateway.complete, "a")]
        wait_until(lambda: A.engine_name in worker.loads, "a is being loaded")
        cold.append(clients.submit(gateway.complete, "a"))
        wait_until(lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 2, "both wait")
        assert gateway.complete("b").status == 503
        worker.load_now.set()
        assert statuses(cold) == [200, 200]

    def test_loads_of_a_worker_that_died_count_no_more(self, gateway, make_worker, clients) -> None:
        """Within 250 s there is time for two loads, before and after the worker died in the midst of two."""
        worker = make_worker(slots=4)
        gateway.publish(rejecting(worker, ttft_s=250.0, variants=(A, B, C)))
        retries_s = list[int]()
        for dies in (True, False):
            worker.load_now.clear()
            cold = list[Future[Answer]]()
            for one in (A, B):
                cold.append(clients.submit(gateway.complete, one.name))
                wait_until(lambda one=one: one.engine_name in worker.loading, f"{one.name} is being loaded")
            assert gateway.metric('iserve_gateway_pending_loads{deployment="m"}') == 2
            late = gateway.complete("c")
            assert (late.status, late.error["code"]) == (503, "would_be_late")
            retries_s.append(int(late.headers["retry-after"]))
            worker.dies_on_load = dies
            worker.load_now.set()
            assert statuses(cold) == ([503, 503] if dies else [200, 200])
            assert gateway.metric('iserve_gateway_pending_loads{deployment="m"}') == 0
            worker.dies_on_load = False
            worker.restart()
        assert 0 < min(retries_s) <= max(retries_s) <= 60, "310 s but for 250 and what the first has run"


def rejecting(worker, variants=(A, B), **limits: float) -> Route:
    """Route of ``variants`` that rejects late requests, by a plan that knows what a load takes."""
    service = two_point_service(batch=4, input_tokens=10, output_tokens=11, ttft_s=10.0, tpot_s=1.0)
    planned = replace(service, one_load=OneLoad(load_s=100.0, stops_steps=False))
    policy = AdmissionPolicy(slo=Slo(**limits), service=planned, slots=4)
    return replace(route(worker, variants=variants), admission=policy)
