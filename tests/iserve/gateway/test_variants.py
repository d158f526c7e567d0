"""LoRA variants through a real gateway, at workers that keep the contract strictly (``adapter_worker``)."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from iserve.route_table import GatewayLimits, Route, VariantRoute
from tests.iserve.gateway.adapter_worker import BASE, AdapterWorker
from tests.iserve.gateway.conftest import Answer, GatewayProcess
from tests.waiting import wait_until
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

pytestmark = pytest.mark.process

MakeWorker = Callable[..., AdapterWorker]
SERIES = 'iserve_gateway_variant_{}{{variant="{}"}}'


def variant(name: str, content: str = "", *, pinned: bool = False) -> VariantRoute:
    content_hash = hashlib.sha256((content or name).encode()).hexdigest()
    return VariantRoute(
        name=name,
        engine_name=f"{name}@{content_hash[:16]}",
        content_hash=content_hash,
        created=1_700_000_001,
        num_bytes=1000,
        pinned=pinned,
    )


def route(*workers: AdapterWorker, variants: tuple[VariantRoute, ...], name: str = "m", **fields: Any) -> Route:
    return Route(
        name=name,
        model="org/base",
        created=1_700_000_000,
        max_context_tokens=2048,
        workers=tuple(worker.target(f"w{index}", **fields) for index, worker in enumerate(workers)),
        adapter_slots=min(worker.slots for worker in workers),
        loaded_adapters=min(worker.max_loaded for worker in workers),
        variants=variants,
    )


A, B, C, D, E = (variant(name) for name in "abcde")


@pytest.fixture(scope="module")
def variant_gateway_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("variants"), "tests.iserve.gateway.variant_gateway").start()
    yield process
    code = process.stop()
    assert code == 0, process.logged()
    assert "Traceback" not in process.logged()


@pytest.fixture
def gateway(variant_gateway_process: GatewayProcess) -> GatewayProcess:
    """The module's process; its table is that of the last test."""
    return variant_gateway_process


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    workers: list[AdapterWorker] = []
    with ExitStack() as stack:

        def make(**fields: Any) -> AdapterWorker:
            workers.append(AdapterWorker(**fields).start())
            stack.callback(workers[-1].stop)
            return workers[-1]

        yield make
    assert [worker.violations for worker in workers] == [[] for _ in workers]


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(80) as pool:
        yield pool


def said(answer: Answer) -> str:
    """Content hash of the adapter that answered, or the base's name."""
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["text"]
    return text.split()[0].rpartition("/")[2]


def statuses(answers: list[Future[Answer]]) -> list[int]:
    return [answer.result().status for answer in answers]


def hold(
    gateway: GatewayProcess, clients: ThreadPoolExecutor, worker: AdapterWorker, *held: VariantRoute
) -> list[Future[Answer]]:
    """Requests that the worker answers once ``go_on`` is set; all are at the worker when this returns."""
    worker.held_models |= {one.engine_name for one in held}
    answers = [clients.submit(gateway.complete, one.name) for one in held]
    wait_until(lambda: all(worker.in_flight[one.engine_name] for one in held), "all are held")
    return answers


def frames(body: bytes) -> list[str]:
    assert body.endswith(b"\n\n")
    return [frame.removeprefix("data: ") for frame in body.decode().strip().split("\n\n")]


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

    def test_the_busiest_worker_that_has_it_is_taken(self, gateway, make_worker, clients) -> None:
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

    def test_errors_of_the_worker_have_the_public_name(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        answer = gateway.complete("a", prompt="too long")
        assert (answer.status, answer.json["error"]["message"]) == (400, "the prompt is too long for `a`")
        last = frames(gateway.complete("a", prompt="fail", stream=True).body)[-1]
        assert json.loads(last)["error"]["message"] == "`a` ran out of pages"

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
            "root": "org/base",
            "parent": "m",
        }
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


class TestFailures:
    def test_a_restarted_worker_loads_again(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("a")
        gateway.complete("b")
        worker.restart()
        assert said(gateway.complete("a")) == A.content_hash
        assert B.content_hash.encode() in gateway.complete("b", stream=True).body
        assert worker.loads == [A.engine_name, B.engine_name] * 2

    def test_a_worker_that_forgets_all_it_loads_is_an_error(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        worker.is_forgetful = True
        worker.loaded = Forgetful()
        answer = gateway.complete("a")
        assert (answer.status, answer.error["code"]) == (503, "variant_lost")

    def test_a_restarted_gateway_asks_what_is_loaded(self, make_worker, tmp_path) -> None:
        worker = make_worker(slots=1, max_loaded=2)
        gateway = GatewayProcess(tmp_path, "tests.iserve.gateway.variant_gateway").start()
        gateway.publish(route(worker, variants=(A, B, C)))
        gateway.complete("a")
        gateway.complete("b")
        gateway.kill()
        lists = worker.lists
        gateway.start()
        assert [said(gateway.complete(name)) for name in "abab"] == [A.content_hash, B.content_hash] * 2
        assert worker.loads == [A.engine_name, B.engine_name]
        assert worker.lists == lists + 1
        assert said(gateway.complete("c")) == C.content_hash  # in the place of one that it has not loaded itself
        gateway.stop()

    def test_a_restarted_gateway_unloads_what_has_left_the_table(self, make_worker, tmp_path) -> None:
        worker = make_worker()
        gateway = GatewayProcess(tmp_path, "tests.iserve.gateway.variant_gateway").start()
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("a")
        gateway.complete("b")
        gateway.kill()
        worker.loaded["old@0123456789abcdef"] = "/old"
        gateway.start()
        wait_until(lambda: set(worker.loaded) == {A.engine_name, B.engine_name}, "the old one is unloaded")
        gateway.stop()

    def test_the_workers_reason_is_given(self, gateway, make_worker) -> None:
        reason = {"error": {"message": f"{A.engine_name}: rank 128 is more than 64", "type": "BadRequestError"}}
        worker = make_worker(refusals={A.engine_name: (400, reason)})
        gateway.publish(route(worker, variants=(A, B)))
        answer = gateway.complete("a")
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert answer.error["message"].endswith("a: rank 128 is more than 64")
        assert said(gateway.complete("b")) == B.content_hash

    def test_loaded_already_is_as_good_as_loaded(self, gateway, make_worker) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        wait_until(lambda: worker.lists, "the worker was asked")
        worker.loaded[A.engine_name] = A.content_hash  # behind the gateway's back
        assert said(gateway.complete("a")) == A.content_hash
        assert worker.violations.pop() == f"{A.engine_name} is loaded twice"

    def test_a_place_that_is_free_in_a_moment_is_waited_for(self, gateway, make_worker) -> None:
        """The embedded engine keeps the place of an unloaded adapter until its last request has ended."""
        worker = make_worker(busy_loads=2)
        gateway.publish(route(worker, variants=(A,)))
        assert said(gateway.complete("a")) == A.content_hash
        assert worker.loads == [A.engine_name] * 3

    def test_a_load_that_a_killed_gateway_began_is_waited_for(self, gateway, make_worker, clients) -> None:
        worker = make_worker()
        gateway.publish(route(worker, variants=(A,)))
        worker.loading.add(A.engine_name)
        answer = clients.submit(gateway.complete, "a")
        wait_until(lambda: len(worker.loads) == 2, "it is asked again")
        assert not answer.done()
        worker.loaded[A.engine_name] = A.content_hash
        assert said(answer.result()) == A.content_hash
        assert set(worker.violations) == {f"{A.engine_name} is loaded twice"}
        worker.violations.clear()

    @pytest.mark.parametrize("failure", ["dies", "fails"])
    def test_a_load_that_fails_is_tried_at_another_worker(self, gateway, make_worker, failure) -> None:
        bad, good = make_worker(), make_worker()
        bad.dies_on_load = failure == "dies"
        bad.refusals = {one.engine_name: (500, {"error": {"message": "out of memory"}}) for one in (A, B)}
        gateway.publish(route(bad, good, variants=(A, B)))
        for one in (A, B):
            assert said(gateway.complete(one.name)) == one.content_hash
        assert set(good.loaded) == {A.engine_name, B.engine_name}

    def test_a_load_that_fails_everywhere_is_503(self, gateway, make_worker) -> None:
        failures = {A.engine_name: (500, {"message": "out of memory"})}
        gateway.publish(route(make_worker(refusals=failures), make_worker(refusals=failures), variants=(A,)))
        answer = gateway.complete("a")
        assert (answer.status, answer.error["type"]) == (503, "server_error")
        assert "out of memory" in answer.error["message"]

    def test_a_damaged_folder_is_named(self, gateway, make_worker) -> None:
        worker = make_worker()
        broken: Path = gateway.home / "variants" / f"{A.content_hash}.broken"
        gateway.publish(route(worker, variants=(A, B)))
        broken.parent.mkdir(exist_ok=True)
        broken.touch()
        answer = gateway.complete("a")
        assert (answer.status, answer.error["code"]) == (500, "variant_unusable")
        assert "'a'" in answer.error["message"]
        assert worker.loads == []
        assert said(gateway.complete("b")) == B.content_hash
        broken.unlink()
        assert said(gateway.complete("a")) == A.content_hash


class Forgetful(dict[str, str]):
    def __contains__(self, name: object) -> bool:
        return False

    def items(self) -> Any:
        return ()


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


@pytest.mark.parametrize("restarts", [False, True])
def test_storm_of_new_contents_and_restarts(gateway, make_worker, clients, restarts) -> None:
    """All requests are answered, by no content that was replaced before they were sent."""
    workers = [make_worker(slots=2, max_loaded=3, service_s=0.002) for _ in range(2)]
    contents = {f"z{index}": [variant(f"z{index}")] for index in range(8)}
    draw, is_over = random.Random(11), threading.Event()

    def publish() -> None:
        gateway.publish(route(*workers, variants=tuple(history[-1] for history in contents.values())))

    def ask(seed: int) -> int:
        own, asked = random.Random(seed), 0
        while not is_over.is_set():
            name = own.choice(list(contents))
            newest = in_force[name]
            answer = gateway.complete(name)
            asked += 1
            assert said(answer) in [one.content_hash for one in contents[name][newest:]]
        return asked

    in_force = dict.fromkeys(contents, 0)
    publish()
    asking = [clients.submit(ask, seed) for seed in range(16)]
    for version in range(1, 13):
        name = draw.choice(list(contents))
        contents[name].append(variant(name, f"{name} {version}"))
        publish()
        in_force[name] = len(contents[name]) - 1
        if restarts:
            draw.choice(workers).restart()
    is_over.set()
    assert sum(done.result() for done in asking) > 50
    current = {history[-1].engine_name for history in contents.values()}
    wait_until(lambda: all(set(worker.loaded) <= current for worker in workers), "old contents are unloaded")
