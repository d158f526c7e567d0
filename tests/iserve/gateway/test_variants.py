"""LoRA variants through a real gateway, at workers that keep the contract strictly (``adapter_worker``)."""

from __future__ import annotations

import http.client
import json
import random
from dataclasses import replace

import pytest

from daemon.process import read_record
from fingerprint.codec import from_json
from iserve.controller.variant_advice import load_of
from iserve.route_table import VARIANT_DEMAND_PATH, GatewayLimits, VariantDemand
from tests.golden_words import Golden
from tests.iserve.gateway.adapter_worker import BASE
from tests.iserve.gateway.variant_requests import A, B, C, frames, hold, route, said, statuses, variant
from tests.waiting import wait_until
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

SERIES = 'iserve_gateway_variant_{}{{variant="{}"}}'
pytestmark = pytest.mark.process


@pytest.fixture
def gateway(variant_gateway):
    return variant_gateway


@pytest.fixture
def make_worker(make_adapter_worker):
    return make_adapter_worker


class TestLoading:
    def test_fifty_requests_for_a_cold_variant_cause_one_load(self, gateway, make_worker, clients) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A, B)))
        worker.load_now.clear()
        answers = [clients.submit(gateway.complete, "a") for _ in range(50)]
        wait_until(lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 50, "all wait")
        assert said(gateway.complete()) == BASE  # a load holds up no request of the base
        worker.load_now.set()
        assert {said(answer.result()) for answer in answers} == {A.content_hash}
        assert worker.loads == [A.engine_name]
        assert worker.models.count(A.engine_name) == 50

    def test_a_load_holds_up_no_request_of_another_variant(self, gateway, make_worker, clients) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A, B)))
        assert said(gateway.complete("a")) == A.content_hash
        worker.load_now.clear()
        cold = clients.submit(gateway.complete, "b")
        wait_until(lambda: B.engine_name in worker.loads, "b is being loaded")
        assert said(gateway.complete("a")) == A.content_hash
        assert not cold.done()
        worker.load_now.set()
        assert said(cold.result()) == B.content_hash

    def test_a_full_worker_evicts_the_least_frequent(self, gateway, make_worker) -> None:
        worker = make_worker(slots=1, max_loaded=2)
        gateway.publish(route(worker, variants=(A, B, C)))
        before = gateway.metric(SERIES.format("evictions_total", "b"))
        for name in "aaabc":
            gateway.complete(name)
        assert worker.unloads == [B.engine_name]
        assert set(worker.loaded) == {A.engine_name, C.engine_name}
        assert gateway.metric(SERIES.format("evictions_total", "b")) == before + 1

    def test_a_pinned_variant_is_loaded_at_once_and_stays(self, gateway, make_worker) -> None:
        worker = make_worker(slots=1, max_loaded=2)
        pinned = variant("p", pinned=True)
        gateway.publish(route(worker, variants=(A, B, C, pinned)))
        wait_until(lambda: pinned.engine_name in worker.loaded, "it is loaded without a request")
        for name in "aabbccab":
            assert gateway.complete(name).status == 200
        assert pinned.engine_name in worker.loaded
        assert worker.loads.count(pinned.engine_name) == 1

    def test_a_pinned_variant_is_loaded_again_at_a_worker_that_was_restarted(self, gateway, make_worker) -> None:
        worker = make_worker()
        pinned = variant("p", pinned=True)
        gateway.publish(route(worker, variants=(A, pinned)))
        wait_until(lambda: pinned.engine_name in worker.loaded, "it is loaded")
        gateway.publish(route(worker, variants=(A, pinned), ready=False))
        worker.restart()
        gateway.publish(route(worker, variants=(A, pinned)))
        wait_until(lambda: pinned.engine_name in worker.loaded, "it is loaded again")

    def test_more_pinned_variants_than_places_leave_one_to_the_rest(self, gateway, make_worker) -> None:
        worker = make_worker(slots=1, max_loaded=2)
        gateway.publish(route(worker, variants=(*(variant(f"p{i}", pinned=True) for i in range(4)), A)))
        assert gateway.complete("a").status == 200
        assert gateway.complete("p3").status == 200

    def test_a_variant_is_loaded_while_its_request_waits_for_a_slot(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1, max_loaded=2)
        gateway.publish(route(worker, variants=(A, B)))
        (held,) = hold(gateway, clients, worker, A)
        waiting = clients.submit(gateway.complete, "b")
        wait_until(lambda: B.engine_name in worker.loaded, "b is loaded ahead")
        assert not waiting.done()
        worker.go_on.set()
        assert statuses([held, waiting]) == [200, 200]
        assert worker.loads == [A.engine_name, B.engine_name]

    def test_the_busiest_worker_that_has_it_is_taken(self, make_variant_gateway, make_worker, clients) -> None:
        """Policy of ISERVE_VARIANT_POLICY=busiest-loaded."""
        gateway = make_variant_gateway("--variant-policy", "busiest-loaded")
        workers = make_worker(), make_worker()
        gateway.publish(route(*workers, variants=(A, B)))
        gateway.complete("a")
        (first,) = [worker for worker in workers if worker.loaded]
        answers = hold(gateway, clients, first, A)
        answers += [clients.submit(gateway.complete, "a") for _ in range(5)]
        wait_until(lambda: first.in_flight[A.engine_name] == 6, "all go where it is loaded")
        first.go_on.set()
        assert statuses(answers) == [200] * 6
        assert sum(len(worker.loads) for worker in workers) == 1

    def test_a_hot_variant_gets_a_second_worker_while_that_has_less_to_do(
        self, gateway, make_worker, clients
    ) -> None:
        """Held requests: the second worker has nothing to do until the first has more than four."""
        workers = make_worker(), make_worker()
        for worker in workers:
            worker.held_models.add(A.engine_name)
        gateway.publish(route(*workers, variants=(A, B)))
        answers = [clients.submit(gateway.complete, "a") for _ in range(11)]
        wait_until(lambda: sum(one.in_flight[A.engine_name] for one in workers) == 11, "all are at a worker")
        assert sorted(one.in_flight[A.engine_name] for one in workers) == [5, 6]
        for worker in workers:
            worker.go_on.set()
        assert statuses(answers) == [200] * 11
        assert [worker.loads for worker in workers] == [[A.engine_name]] * 2


class TestQueue:
    def test_requests_wait_while_all_slots_are_taken_and_followers_pass(
        self, gateway, make_worker, clients
    ) -> None:
        worker = make_worker(slots=2)
        gateway.publish(route(worker, variants=(A, B, C)))
        held = hold(gateway, clients, worker, A, B)
        waiting = clients.submit(gateway.complete, "c")
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "c waits")
        assert said(gateway.complete()) == BASE
        follower = clients.submit(gateway.complete, "a")
        wait_until(lambda: worker.in_flight[A.engine_name] == 2, "a request of a passes")
        assert not waiting.done()
        worker.go_on.set()
        assert statuses([*held, waiting, follower]) == [200] * 4
        assert worker.most_in_flight == 2

    def test_the_queue_is_bounded(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1)
        gateway.publish(route(worker, variants=(A, B)), limits=GatewayLimits(max_queue=3))
        held = hold(gateway, clients, worker, A)
        waiting = [clients.submit(gateway.complete, "b") for _ in range(3)]
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 3, "three wait")
        refused = gateway.complete("b")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert said(gateway.complete()) == BASE  # needs no slot
        worker.go_on.set()
        assert statuses([*held, *waiting]) == [200] * 4

    def test_a_client_that_leaves_gives_its_slot_back(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1)
        worker.held_models.add(A.engine_name)
        gateway.publish(route(worker, variants=(A, B)))
        body = json.dumps({"model": "a", "prompt": "x"})
        client = http.client.HTTPConnection("127.0.0.1", gateway.port)
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: worker.in_flight[A.engine_name], "it is at the worker")
        client.close()
        assert said(gateway.complete("b")) == B.content_hash

    def test_demand_counts_requests_of_variants(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1)
        gateway.publish(route(worker, variants=(A, B)))
        held = hold(gateway, clients, worker, A)
        waiting = clients.submit(gateway.complete, "b")
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "b waits")
        assert gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 1
        worker.go_on.set()
        assert statuses([*held, waiting]) == [200, 200]


class TestNames:
    @pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
    def test_whole_answers_and_frames_have_the_public_name(self, gateway, make_worker, separators) -> None:
        worker = make_worker(separators=separators)
        gateway.publish(route(worker, variants=(A,)))
        said_text = f'says "model":"{A.engine_name}"'  # of the model: passed on as it is
        answer = gateway.complete("a")
        assert answer.json["model"] == "a"
        assert said_text in answer.json["choices"][0]["text"]
        *chunks, done = frames(gateway.complete("a", stream=True, stream_options={"include_usage": True}).body)
        assert done == "[DONE]"
        assert [json.loads(chunk)["model"] for chunk in chunks] == ["a"] * 4
        assert said_text in json.loads(chunks[0])["choices"][0]["text"]

    def test_errors_of_the_worker_have_the_public_name(self, gateway, make_worker, golden: Golden) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        answer = gateway.complete("a", prompt="too long")
        assert answer.status == 400
        golden("rest-errors", answer.json["error"]["message"])
        last = frames(gateway.complete("a", prompt="fail", stream=True).body)[-1]
        golden("rest-errors", json.loads(last)["error"]["message"])

    def test_only_the_name_in_the_body_changes(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        body = b'{ "tools": [{"model":"a"}],\n"prompt": "\\"model\\":\\"a\\"", "mod\\u0065l" : "a" , "x": 1.00}'
        assert gateway.ask("POST", "/v1/completions", body).status == 200
        assert worker.bodies == [body.replace(b' : "a" ,', f' : "{A.engine_name}" ,'.encode())]

    def test_a_body_that_names_the_model_twice_is_refused(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        answer = gateway.ask("POST", "/v1/completions", b'{"model": "b", "prompt": "x", "model": "a"}')
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert worker.models == []

    def test_models_are_listed(self, gateway, make_worker) -> None:
        gateway.publish(route(make_worker(), variants=(A, B)))
        models = {model["id"]: model for model in gateway.ask("GET", "/v1/models").json["data"]}
        assert list(models) == ["m", "a", "b"]
        assert models["a"] == {
            "id": "a",
            "object": "model",
            "created": A.created,
            "owned_by": "iserve",
            "max_model_len": 2048,
            "root": A.engine_name,
            "parent": "m",
        }
        assert "root" not in models["m"]
        assert gateway.ask("GET", "/v1/models/b").json == models["b"]
        assert gateway.ask("GET", "/v1/models/c").status == 404

    def test_engine_names_are_not_served(self, gateway, make_worker) -> None:
        gateway.publish(route(make_worker(), variants=(A,)))
        assert gateway.complete(A.engine_name).error["code"] == "model_not_found"


class TestTable:
    def test_a_removed_variant_is_unloaded_after_its_last_request(self, gateway, make_worker, clients) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("b")
        (held,) = hold(gateway, clients, worker, A)
        gateway.publish(route(worker, variants=()))
        assert gateway.complete("a").status == 404
        wait_until(lambda: B.engine_name not in worker.loaded, "b, which is idle, is unloaded")
        assert A.engine_name in worker.loaded
        worker.go_on.set()
        assert said(held.result()) == A.content_hash
        wait_until(lambda: not worker.loaded, "a is unloaded after its request")

    def test_waiting_requests_of_a_removed_variant_are_refused(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1)
        gateway.publish(route(worker, variants=(A, B)))
        (held,) = hold(gateway, clients, worker, A)
        waiting = clients.submit(gateway.complete, "b")
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "b waits")
        gateway.publish(route(worker, variants=(A,)))
        assert waiting.result().error["code"] == "model_not_found"
        worker.go_on.set()
        assert held.result().status == 200

    def test_another_content_under_the_same_name_gives_no_stale_answer(
        self, gateway, make_worker, clients
    ) -> None:
        worker = make_worker(slots=2)
        gateway.publish(route(worker, variants=(A,)))
        (held,) = hold(gateway, clients, worker, A)
        new = variant("a", "another content")
        gateway.publish(route(worker, variants=(new,)))
        assert [said(gateway.complete("a")) for _ in range(5)] == [new.content_hash] * 5
        worker.go_on.set()
        assert said(held.result()) == A.content_hash
        wait_until(lambda: set(worker.loaded) == {new.engine_name}, "the old content is unloaded")

    def test_waiting_requests_take_the_new_content(self, gateway, make_worker, clients) -> None:
        worker = make_worker(slots=1)
        gateway.publish(route(worker, variants=(A, B)))
        (held,) = hold(gateway, clients, worker, A)
        waiting = clients.submit(gateway.complete, "b")
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "b waits")
        new = variant("b", "another content")
        gateway.publish(route(worker, variants=(A, new)))
        worker.go_on.set()
        assert said(waiting.result()) == new.content_hash
        assert held.result().status == 200

    def test_a_table_without_places_is_rejected(self, gateway, make_worker) -> None:
        rejected = gateway.metric("iserve_gateway_rejected_routes_total")
        with pytest.raises(AssertionError):
            gateway.publish(route(make_worker(slots=0), variants=(A,)), patience_s=0.0)
        wait_until(
            lambda: gateway.metric("iserve_gateway_rejected_routes_total") == rejected + 1, "it is rejected"
        )

    def test_series_are_of_variants_in_the_table(self, gateway, make_worker) -> None:
        worker = make_worker()
        old, kept = variant("old"), variant("kept")
        gateway.publish(route(worker, variants=(old, kept)))
        for name in ("old", "kept", "kept"):
            gateway.complete(name, stream=True, stream_options={"include_usage": True})
        wait_until(lambda: gateway.metric(SERIES.format("requests_total", "kept")) == 2, "both are counted")
        assert gateway.metric(SERIES.format("completion_tokens_total", "kept")) == 10
        assert gateway.metric(SERIES.format("time_to_first_token_seconds_count", "kept")) == 2
        assert gateway.metric(SERIES.format("load_seconds_count", "kept")) == 1
        gateway.publish(route(worker, variants=(kept,)))
        page = gateway.ask("GET", "/metrics").body
        assert b'variant="old"' not in page
        assert b'variant="kept"' in page


def test_a_thousand_variants_share_thirty_two_slots(gateway, make_worker, clients) -> None:
    """Popularity after Zipf; the strict worker fails the test where a limit is exceeded."""
    worker = make_worker(slots=32, max_loaded=128, service_s=0.01)
    variants = tuple(variant(f"v{index}") for index in range(1000))
    gateway.publish(route(worker, variants=variants))
    drawn = random.Random(7).choices(variants, [1 / (rank + 1) for rank in range(1000)], k=1500)
    answers = [clients.submit(gateway.complete, one.name) for one in drawn]
    assert [said(answer.result()) for answer in answers] == [one.content_hash for one in drawn]
    assert worker.most_in_flight <= 32
    assert len(worker.loads) < len(drawn)


def test_the_controller_learns_where_variants_are_and_what_was_loaded_and_evicted(gateway, make_worker) -> None:
    """Two slots and three places: of those loaded the two that were used last lie on the GPU."""
    worker, d = make_worker(slots=2, max_loaded=3), variant("d")
    gateway.publish(route(worker, variants=(A, B, C, d)))
    record = read_record(gateway.home / "run" / "gateway.json")
    assert record is not None
    asked = {"Authorization": f"Bearer {record.token}"}

    def learned() -> VariantDemand:
        answer = gateway.ask("GET", VARIANT_DEMAND_PATH, headers=asked)
        (found,) = from_json(answer.body, tuple[VariantDemand, ...])
        return found

    before = max((one.number for one in learned().changes), default=0)  # of tests that had the deployment
    for name in "abcacad":
        assert gateway.complete(name).status == 200
    wait_until(lambda: {one.place for one in learned().places} <= {"gpu", "host"}, "no load is under way")
    found = learned()
    changes = [one for one in found.changes if one.number > before]
    assert {(one.variant, one.place) for one in found.places} == {("a", "gpu"), ("c", "host"), ("d", "gpu")}
    assert {one.worker_id for one in (*found.places, *changes)} == {"w0"}
    evicted = [one.variant for one in changes if one.kind == "evicted"]
    loaded = [one for one in changes if one.kind == "loaded"]
    assert evicted == ["b"]
    assert {one.variant for one in loaded} == set("abcd")
    assert all(one.took_s is not None and one.took_s >= 0 for one in loaded)  # a clock of milliseconds
    numbers = [one.number for one in changes]
    assert numbers == sorted(set(numbers))
    for name, workers in (("a", 1), ("d", 1)):
        assert gateway.metric(f'iserve_gateway_variant_workers{{place="gpu",variant="{name}"}}') == workers
    assert gateway.metric('iserve_gateway_loaded_variants{deployment="m",place="host",worker="w0"}') == 1
    gateway.publish(replace(route(worker, variants=(A, B, C, d)), loads_on_gpu=True))
    wait_until(lambda: {one.place for one in learned().places} == {"gpu"}, "all are on the GPU")


def test_the_controller_learns_how_often_each_variant_is_asked_for(gateway, make_worker) -> None:
    """Asked with the token of the gateway's record alone; a variant without a request takes no place."""
    worker = make_worker()
    gateway.publish(route(worker, variants=(A, B, C), name="counted"))
    for name in "aabaa":
        assert gateway.complete(name).status == 200
    gateway.complete("counted")
    gateway.complete("nothing")  # no model
    record = read_record(gateway.home / "run" / "gateway.json")
    assert record is not None
    asked = {"Authorization": f"Bearer {record.token}"}
    answer = gateway.ask("GET", VARIANT_DEMAND_PATH, headers=asked)
    (found,) = from_json(answer.body, tuple[VariantDemand, ...])
    assert (found.deployment, found.requests, found.of_variants) == ("counted", 6, (("a", 4), ("b", 1)))
    assert load_of(found).of_variants == pytest.approx((4 / 6, 1 / 6))
    for given in ({}, {"Authorization": "Bearer x"}):
        assert gateway.ask("GET", VARIANT_DEMAND_PATH, headers=given).status == 401


def test_the_simulator_counts_what_the_gateway_does(gateway, make_worker) -> None:
    """Loads and evictions depend on the policy alone where requests are sent in turn."""
    worker = make_worker(slots=2, max_loaded=8)
    variants = tuple(variant(f"s{index}") for index in range(40))
    gateway.publish(route(worker, variants=variants))
    drawn = random.Random(3).choices(variants, [1 / (rank + 1) for rank in range(40)], k=300)
    for one in drawn:
        assert said(gateway.complete(one.name)) == one.content_hash
    arrivals = [
        VariantArrival(arrived_s=turn / 100, variant=one.engine_name, service_s=0.001)
        for turn, one in enumerate(drawn)
    ]
    workers = VariantWorkers(
        num_workers=1, slots=2, max_loaded=8, variant_bytes=1000, load_bytes_per_s=1_000_000.0
    )
    replay = replay_variants(arrivals, workers)
    assert len(worker.loads) == pytest.approx(replay.loads, rel=0.1)
    assert len(worker.unloads) == pytest.approx(replay.evictions, rel=0.1)
    assert len(drawn) - replay.hits == replay.loads
