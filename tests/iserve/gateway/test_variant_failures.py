"""Requests for LoRA variants when workers, folders, tables or the gateway itself fail or change."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iserve.route_table import GatewayLimits
from tests.golden_words import Golden
from tests.iserve.gateway.conftest import GatewayProcess
from tests.iserve.gateway.variant_requests import VARIANT_GATEWAY, A, B, C, frames, route, said, variant
from tests.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def gateway(variant_gateway):
    return variant_gateway


@pytest.fixture
def make_worker(make_adapter_worker):
    return make_adapter_worker


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
        gateway = GatewayProcess(tmp_path, VARIANT_GATEWAY).start()
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
        gateway = GatewayProcess(tmp_path, VARIANT_GATEWAY).start()
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("a")
        gateway.complete("b")
        gateway.kill()
        worker.loaded["old@0123456789abcdef"] = "/old"
        gateway.start()
        wait_until(lambda: set(worker.loaded) == {A.engine_name, B.engine_name}, "the old one is unloaded")
        gateway.stop()

    def test_the_workers_reason_is_given(self, gateway, make_worker, golden: Golden) -> None:
        reason = {"error": {"message": f"{A.engine_name}: rank 128 is more than 64", "type": "BadRequestError"}}
        worker = make_worker(refusals={A.engine_name: (400, reason)})
        gateway.publish(route(worker, variants=(A, B)))
        answer = gateway.complete("a")
        assert (answer.status, answer.error["param"]) == (400, "model")
        golden("rest-errors", answer.error["message"])
        assert said(gateway.complete("b")) == B.content_hash

    def test_a_refused_variant_costs_the_loaded_ones_nothing(self, gateway, make_worker) -> None:
        """A variant that cannot be loaded changes neither what is known to be loaded nor how popular it is."""
        worker = make_worker(refusals={A.engine_name: (400, {"error": {"message": "rank 128 is more than 64"}})})
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("b")
        lists = worker.lists
        for _ in range(3):
            assert gateway.complete("a").status == 400
            assert said(gateway.complete("b")) == B.content_hash
        assert worker.lists == lists

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

    @pytest.mark.parametrize("failure", ["dies", "fails"])
    def test_an_unload_that_fails_names_no_other_variant(self, gateway, make_worker, failure) -> None:
        worker = make_worker(slots=1, max_loaded=1, unload_failure=failure)
        gateway.publish(route(worker, variants=(A, B)))
        gateway.complete("a")
        answer = gateway.complete("b")
        assert answer.status == 503
        assert A.engine_name.encode() not in answer.body

    def test_errors_name_the_variant_that_was_asked_for(self, gateway, make_worker, clients) -> None:
        """Errors of a cut stream, of silence and of a full queue: none names the deployment, ``m``."""
        worker = make_worker(slots=1)
        gateway.publish(route(worker, variants=(A, B)), limits=GatewayLimits(max_queue=1, upstream_timeout_s=2.0))
        worker.held_models.add(B.engine_name)
        cut = frames(gateway.complete("a", prompt="cut", stream=True).body)[-1]
        errors = [json.loads(cut)["error"]]
        silent = clients.submit(gateway.complete, "b")
        wait_until(lambda: worker.in_flight[B.engine_name], "b is held")
        waiting = clients.submit(gateway.complete, "a")
        wait_until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "a waits")
        errors.append(gateway.complete("a").error)
        errors.append(silent.result().error)
        worker.go_on.set()
        assert waiting.result().status in (200, 503)
        assert [error["code"] for error in errors] == ["stream_cut", "queue_full", "upstream_timeout"]
        assert [name for error in errors for name in ("'a'", "'b'", "'m'") if name in error["message"]] == [
            "'a'",
            "'a'",
            "'b'",
        ]

    def test_a_worker_that_lists_nothing_is_no_name_for_clients(self, gateway, make_worker) -> None:
        worker = make_worker()
        target = replace(worker.target("secret-worker"), token="another")
        gateway.publish(replace(route(worker, variants=(A,)), workers=(target,)))
        answer = gateway.complete("a")
        assert (answer.status, answer.error["code"]) == (503, "no_ready_worker")
        assert "'a'" in answer.error["message"]
        assert b"secret-worker" not in answer.body
        worker.violations.clear()

    def test_a_damaged_folder_is_named(self, gateway, make_worker, golden: Golden) -> None:
        worker = make_worker()
        broken: Path = gateway.home / "variants" / f"{A.content_hash}.broken"
        gateway.publish(route(worker, variants=(A, B)))
        broken.parent.mkdir(exist_ok=True)
        broken.touch()
        answer = gateway.complete("a")
        assert (answer.status, answer.error["code"]) == (500, "variant_unusable")
        golden("rest-errors", answer.error["message"])  # its end is the store's
        assert "'a'" in answer.error["message"]
        assert str(gateway.home).encode() not in answer.body
        assert worker.loads == []
        assert said(gateway.complete("b")) == B.content_hash
        broken.unlink()
        assert said(gateway.complete("a")) == A.content_hash


class Forgetful(dict[str, str]):
    def __contains__(self, name: object) -> bool:
        return False

    def items(self) -> Any:
        return ()


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
