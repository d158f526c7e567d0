"""Adapters over HTTP: loaded, named by requests, unloaded while they run, refused. The model is scripted."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fingerprint.config import DeploymentConfig
from fingerprint.errors import CheckpointError, EngineError
from tests.daemon.tiny_adapters import write_tiny_adapter
from tests.waiting import wait_until

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 32)}
CONFIG = DeploymentConfig(adapter_slots=1, adapter_rank=8)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ANSWER = 42


@pytest.fixture
def served(serve):
    return serve(lambda history: ANSWER, config=CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapter(tmp_path_factory.mktemp("adapters") / "good", SHAPES, 2, seed=1)


def post(served, http_exchange, path: str, body: Any) -> tuple[int, Any]:
    """Return the status, and the error of a refusal."""
    status, raw = http_exchange(served.url, "POST", path, body)
    return status, None if status == 200 else json.loads(raw)["error"]


@pytest.fixture
def load(served, folder, http_exchange):
    def ask(name: str, path: Path | str = folder) -> tuple[int, Any]:
        return post(served, http_exchange, LOAD, {"lora_name": name, "lora_path": str(path)})

    return ask


@pytest.fixture
def unload(served, http_exchange):
    return lambda name: post(served, http_exchange, UNLOAD, {"lora_name": name})


def complete(served, model: str | None, **changes: Any) -> tuple[int, Any]:
    body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "return_token_ids": True, "model": model}
    return served.request("POST", "/v1/completions", body | changes)


def names(served) -> list[str]:
    return [model["id"] for model in served.request("GET", "/v1/models")[1]["data"]]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_a_worker_without_slots_has_no_such_route(path: str, serve, folder) -> None:
    served = serve(lambda history: ANSWER)
    status, body = served.request("POST", path, {"lora_name": "poet", "lora_path": str(folder)})
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")


def test_a_loaded_adapter_is_a_model_of_its_own(served, load, folder) -> None:
    assert load("poet@0123") == (200, None)
    base, adapter = served.request("GET", "/v1/models")[1]["data"]
    assert (base["id"], adapter["id"]) == ("demo", "poet@0123")
    assert (adapter["root"], adapter["parent"], adapter["object"]) == (str(folder), "demo", "model")
    assert served.runner.adapters == {1: folder}
    for model, adapter_id in (("poet@0123", 1), ("demo", None), (None, None)):
        served.runner.plans.clear()
        status, body = complete(served, model)
        assert (status, body["model"]) == (200, model or "demo")
        assert body["choices"][0]["token_ids"] == [ANSWER] * 3
        assert {item.adapter_id for plan in served.runner.plans for item in plan.items} == {adapter_id}


def test_chats_and_streams_name_what_was_asked(served, load, http_exchange) -> None:
    assert load("poet")[0] == 200
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "poet"}
    assert served.request("POST", "/v1/chat/completions", chat)[1]["model"] == "poet"
    _, raw = http_exchange(served.url, "POST", "/v1/chat/completions", chat | {"stream": True})
    frames = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: {")]
    assert {json.loads(frame)["model"] for frame in frames} == {"poet"}


def test_an_unknown_model_is_answered_with_404_and_what_there_is(served, load) -> None:
    assert load("poet")[0] == 200
    status, body = complete(served, "novelist")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "'demo', 'poet'" in body["error"]["message"]


def test_names_that_are_taken_and_more_than_may_be_loaded_are_refused(served, load, unload) -> None:
    """A worker of one slot holds four."""
    for name in "abcd":
        assert load(name) == (200, None)
    for name, words in (("a", "loaded already"), ("demo", "base itself"), ("e", "at most 4")):
        status, error = load(name)
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "lora_name")
        assert words in error["message"]
    assert names(served) == ["demo", *"abcd"]
    assert unload("b") == (200, None)
    wait_until(lambda: load("e")[0] == 200, "the place of b is free")
    assert names(served) == ["demo", *"acde"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        {},
        {"lora_name": "x"},
        {"lora_path": "/tmp"},
        {"lora_name": 7, "lora_path": "/tmp"},
        {"lora_name": "", "lora_path": "/tmp"},
        {"lora_name": "x" * 513, "lora_path": "/tmp"},
        {"lora_name": "x\n", "lora_path": "/tmp"},
        {"lora_name": "x", "lora_path": ""},
        {"lora_name": "x", "lora_path": "relative"},
        {"lora_name": "x", "lora_path": "/there/is/none"},
        {"lora_name": "x", "lora_path": "/etc/passwd"},
        {"lora_name": "x", "lora_path": "/tmp\0"},
        {"lora_name": "x", "lora_path": "/" + "y" * 4000},
        {"lora_name": "x", "lora_path": "/" + "y" * 5000},
        {"lora_name": "x", "lora_path": "/"},
    ],
)
def test_bodies_that_cannot_be_used_are_refused(body: Any, served, http_exchange) -> None:
    status, error = post(served, http_exchange, LOAD, body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert served.runner.adapters == {}
    assert complete(served, "demo")[0] == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 9}, "at most 8"),
        ({"size": float("nan")}, "NaN"),
        ({"size": float("inf")}, "infinite"),
    ],
)
def test_an_adapter_that_no_slot_takes_is_refused_before_the_engine(
    changes: dict[str, Any], words: str, served, load, tmp_path: Path
) -> None:
    bad = write_tiny_adapter(tmp_path / "bad", SHAPES, **({"rank": 2, "seed": 1} | changes))
    served.runner.fail_loading_adapter = AssertionError("asked")
    status, error = load("x", bad)
    assert (status, error["param"]) == (400, "lora_path")
    assert words in error["message"]


def test_what_the_ranks_refuse_leaves_its_name_free(served, load) -> None:
    served.runner.fail_loading_adapter = CheckpointError("of another base")
    for _ in range(6):  # more often than there are places
        status, error = load("poet")
        assert (status, error["message"]) == (400, "of another base")
    assert names(served) == ["demo"]
    assert complete(served, "poet")[0] == 404
    served.runner.fail_loading_adapter = None
    assert load("poet") == (200, None)
    assert complete(served, "poet")[0] == 200


def test_a_rank_that_is_gone_at_a_load_ends_the_worker(served, load) -> None:
    served.runner.fail_loading_adapter = EngineError("rank 1 is gone")
    served.runner.fail_reading_memory = True
    assert load("poet")[0] == 503
    wait_until(lambda: served.failures, "the worker has ended")
    assert served.request("GET", "/health")[0] == 503
    assert load("poet")[0] == 503


def test_no_memory_for_an_adapter_is_no_end(served, load) -> None:
    served.runner.fail_loading_adapter = EngineError("no memory")
    assert load("poet")[0] == 503
    served.runner.fail_loading_adapter = None
    assert load("poet")[0] == 200
    assert not served.failures


class TestUnloading:
    def test_an_idle_adapter_is_freed_at_once(self, served, load, unload) -> None:
        assert load("poet")[0] == 200
        assert unload("poet") == (200, None)
        wait_until(lambda: not served.runner.adapters, "it is freed")
        assert names(served) == ["demo"]
        assert complete(served, "poet")[0] == 404
        status, error = unload("poet")
        assert (status, error["code"]) == (404, "model_not_found")

    def test_requests_that_run_or_wait_get_their_answers_first(self, serve, folder, http_exchange) -> None:
        """Meanwhile no new ones are admitted, and the name can be given to another adapter."""
        gate = threading.Semaphore(0)
        served = serve(lambda history: ANSWER, config=CONFIG, prepare=lambda r: setattr(r, "gate", gate))
        order = {"lora_name": "poet", "lora_path": str(folder)}
        assert post(served, http_exchange, LOAD, order)[0] == 200
        with ThreadPoolExecutor(6) as pool:
            running: list[Future] = [pool.submit(complete, served, "poet") for _ in range(6)]  # of 4 slots
            served.until(lambda stats: stats["running"] + stats["waiting"] == 6)
            assert post(served, http_exchange, UNLOAD, {"lora_name": "poet"})[0] == 200
            assert complete(served, "poet")[0] == 404
            assert 1 in served.runner.adapters
            reloading = pool.submit(post, served, http_exchange, LOAD, order)
            gate.release(10_000)
            assert reloading.result() == (200, None)
            for each in running:
                status, body = each.result()
                assert (status, body["choices"][0]["token_ids"]) == (200, [ANSWER] * 3)
        wait_until(lambda: served.runner.adapters.keys() == {2}, "the first is freed")
        assert complete(served, "poet")[0] == 200
        assert {item.adapter_id for item in served.runner.plans[-1].items} == {2}

    def test_a_client_that_leaves_frees_the_last_use(self, serve, folder, http_exchange) -> None:
        gate = threading.Semaphore(0)
        served = serve(lambda history: ANSWER, config=CONFIG, prepare=lambda r: setattr(r, "gate", gate))
        order = {"lora_name": "poet", "lora_path": str(folder)}
        assert post(served, http_exchange, LOAD, order)[0] == 200
        ids = served.worker.engine.submit(_endless("poet"))
        gate.release()
        served.until(lambda stats: stats["running"] == 1)
        assert post(served, http_exchange, UNLOAD, {"lora_name": "poet"})[0] == 200
        served.worker.engine.cancel(ids)
        gate.release(10_000)
        wait_until(lambda: not served.runner.adapters, "it is freed")


def _endless(adapter: str) -> list[Any]:
    from daemon.torch_engine.runtime.sampling import SamplingParams
    from daemon.torch_engine.runtime.sequences import SequenceRequest

    sampling = SamplingParams(temperature=0.0)
    return [SequenceRequest(prompt=(1,), max_tokens=100, sampling=sampling, adapter=adapter)]


def test_more_adapters_than_slots_take_turns(serve, folder, http_exchange) -> None:
    """Four adapters and the base share one slot: each step is of one adapter at most, and all are answered."""
    served = serve(lambda history: ANSWER, config=CONFIG)
    for name in "abcd":
        order = {"lora_name": name, "lora_path": str(folder)}
        assert post(served, http_exchange, LOAD, order)[0] == 200
    with ThreadPoolExecutor(10) as pool:
        done = list(pool.map(lambda model: complete(served, model), ["a", "b", "demo", "c", "d"] * 2))
    assert [status for status, _ in done] == [200] * 10
    assert all(len({item.adapter_id for item in plan.items} - {None}) <= 1 for plan in served.runner.plans)


def test_the_metrics_count_the_loaded(served, load, unload, http_exchange) -> None:
    def count() -> float:
        text = http_exchange(served.url, "GET", "/metrics")[1].decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return families["iserve_worker_adapters"].samples[0].value

    assert count() == 0
    assert load("poet")[0] == load("novelist")[0] == 200
    assert count() == 2
    assert unload("poet")[0] == 200
    assert count() == 1
