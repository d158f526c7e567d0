"""Loads of adapters next to decoding, over HTTP: steps go on while one is prepared. The model is scripted."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConflictError
from tests.daemon.tiny_adapters import write_tiny_adapter
from tests.daemon.torch_engine.conftest import Served
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S, wait_until

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 32)}
CONFIG = DeploymentConfig(adapter_slots=1, adapter_rank=8)
ANSWER = 42


class Holding:
    """A worker whose preparations of adapters wait for ``preparation.release()``."""

    def __init__(self, served: Served, clients: ThreadPoolExecutor, folder: Path) -> None:
        self.served, self.folder, self._clients = served, folder, clients
        self.preparation = threading.Semaphore(0)
        served.runner.preparation = self.preparation

    def begin(self, name: str) -> Future[tuple[int, bytes]]:
        """Ask for a load, and return once it is being prepared."""
        begun = len(self.served.runner.preparing)
        answer = self.ask(name)
        wait_until(lambda: len(self.served.runner.preparing) > begun, "it is being prepared")
        return answer

    def ask(self, name: str) -> Future[tuple[int, bytes]]:
        return self._clients.submit(self._post, {"lora_name": name, "lora_path": str(self.folder)})

    def _post(self, body: dict[str, str]) -> tuple[int, bytes]:
        connection = self.connect(body)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def connect(self, body: dict[str, str]) -> http.client.HTTPConnection:
        port = int(self.served.url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/load_lora_adapter", json.dumps(body).encode(), headers)
        return connection

    def complete(self, model: str) -> int:
        body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "model": model}
        return self.served.request("POST", "/v1/completions", body)[0]

    def names(self) -> list[str]:
        return [model["id"] for model in self.served.request("GET", "/v1/models")[1]["data"]]


@pytest.fixture
def holding(serve: Callable[..., Served], tmp_path: Path) -> Iterator[Holding]:
    folder = write_tiny_adapter(tmp_path / "good", SHAPES, 2, seed=1)
    served = serve(lambda history: ANSWER, config=CONFIG)
    with ThreadPoolExecutor(8) as clients:
        held = Holding(served, clients, folder)
        yield held
        held.preparation.release(10_000)


def test_steps_go_on_while_an_adapter_is_prepared(holding: Holding) -> None:
    """Steps of the base and of loaded adapters; no request and no list names the new one until the switch."""
    holding.preparation.release()
    assert holding.begin("first").result()[0] == 200
    load = holding.begin("poet")
    for model in ("demo", "first", "demo"):
        steps = len(holding.served.runner.plans)
        assert holding.complete(model) == 200
        assert len(holding.served.runner.plans) == steps + 3
    assert holding.complete("poet") == 404
    assert holding.names() == ["demo", "first"]
    assert not load.done()
    holding.preparation.release()
    assert load.result()[0] == 200
    assert holding.complete("poet") == 200
    assert holding.names() == ["demo", "first", "poet"]


def test_one_adapter_is_prepared_at_a_time_and_all_have_their_places(holding: Holding) -> None:
    """A worker of one slot holds four, those that are being loaded included."""
    loads = [holding.begin("a"), *(holding.ask(name) for name in "bcd")]
    wait_until(lambda: holding.served.worker.engine._adapters.num_loading == 4, "all have their places")
    assert len(holding.served.runner.preparing) == 1
    status, raw = holding.ask("e").result()
    assert (status, "at most 4" in json.loads(raw)["error"]["message"]) == (400, True)
    status, raw = holding.ask("a").result()
    assert (status, "loaded already" in json.loads(raw)["error"]["message"]) == (400, True)
    holding.preparation.release(4)
    assert {load.result()[0] for load in loads} == {200}
    assert sorted(holding.names()) == ["a", "b", "c", "d", "demo"]


def test_a_client_that_leaves_during_a_load_leaves_a_whole_adapter(holding: Holding) -> None:
    connection = holding.connect({"lora_name": "poet", "lora_path": str(holding.folder)})
    wait_until(lambda: holding.served.runner.preparing, "it is being prepared")
    connection.close()
    assert holding.complete("demo") == 200
    holding.preparation.release()
    wait_until(lambda: "poet" in holding.names(), "it is loaded")
    assert holding.complete("poet") == 200


def test_an_adapter_that_is_being_loaded_cannot_be_unloaded(holding: Holding) -> None:
    load = holding.begin("poet")
    status, body = holding.served.request("POST", "/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    holding.preparation.release()
    assert load.result()[0] == 200
    assert holding.served.runner.adapters == {1: holding.folder}


def test_no_model_is_replaced_while_an_adapter_is_prepared_for_it(holding: Holding, golden: Golden) -> None:
    load = holding.begin("poet")
    engine, spec = holding.served.worker.engine, holding.served.worker.spec
    with golden.raises("daemon", ConflictError):
        engine.load(Path("unused"), spec.config, spec.stages, spec.limits).result(PATIENCE_S)
    assert holding.complete("demo") == 200
    holding.preparation.release()
    assert load.result()[0] == 200
    assert holding.complete("poet") == 200


def test_an_engine_that_ends_answers_a_load_that_is_being_prepared(holding: Holding) -> None:
    load = holding.begin("poet")
    assert holding.served.worker.engine.close(PATIENCE_S)
    holding.preparation.release()
    status, raw = load.result()
    assert (status, "engine has ended" in json.loads(raw)["error"]["message"]) == (503, True)
    assert holding.served.runner.adapters == {}


def test_a_bug_in_the_switch_ends_the_worker_and_answers_the_load(holding: Holding, monkeypatch: Any) -> None:
    def fail(adapter_id: int) -> None:
        raise KeyError(adapter_id)

    monkeypatch.setattr(holding.served.runner, "switch_adapter", fail)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the engine's thread ends by it
    holding.preparation.release()
    assert holding.ask("poet").result()[0] == 503
    wait_until(lambda: holding.served.failures, "the worker has ended")
