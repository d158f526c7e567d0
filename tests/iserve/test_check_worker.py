"""Requests of a check and what it believes of a worker, against one that answers as configured."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from daemon.engines.registry import get_engine
from daemon.status import WorkerState, WorkerStats, WorkerStatus
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import EngineError, NotFoundError
from fingerprint.measurements import RankMemory
from iserve.verify.bursts import BurstClient
from iserve.verify.worker_client import CheckedWorker
from tests.fingerprint.synthetic_machine import llama
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

WORK = Workload(batch=3, input_tokens=5, output_tokens=7)
STATS = WorkerStats(
    model="m",
    running=0,
    waiting=0,
    kv_tokens_total=64,
    kv_tokens_free=64,
    prompt_tokens=0,
    output_tokens=0,
    steps=0,
    busy=(),
    memory=(),
)


class Worker:
    """Takes completions of token ids, strictly, and counts what it served."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = self.served
        self.stats: WorkerStats | None = STATS
        self.others_tokens = 0  # served to other clients in each request
        self._lock = threading.Lock()
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/stats" and worker.stats is not None
                self.send(200 if known else 503, to_json(worker.stats) if known else b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (self.path, self.headers["Content-Type"]) == ("/v1/completions", "application/json")
                with worker._lock:
                    worker.bodies.append(body)
                    status, answer = worker.answer(body)
                self.send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

            def send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def served(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body.keys() == {"model", "prompt", "max_tokens", "temperature", "ignore_eos"}
        assert (body["temperature"], body["ignore_eos"]) == (0, True)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        used = sum(map(len, prompts))
        if self.stats is not None:
            self.stats = replace(self.stats, prompt_tokens=self.stats.prompt_tokens + used + self.others_tokens)
        return 200, {"usage": {"prompt_tokens": used, "completion_tokens": len(prompts) * body["max_tokens"]}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def client(worker: Worker, vocab_size: int = 11) -> BurstClient:
    return BurstClient(worker.url, "m", vocab_size, timeout_s=PATIENCE_S, seed=1)


def test_a_burst_is_one_request_of_as_many_prompts_as_the_batch_none_like_another(worker: Worker) -> None:
    bursts = client(worker, vocab_size=1000)
    assert bursts.burst(WORK) > 0
    bursts.burst(WORK)
    first, second = (body["prompt"] for body in worker.bodies)
    assert [len(prompt) for prompt in first] == [5, 5, 5]
    assert all(0 <= token < 1000 for prompt in first for token in prompt)
    assert len({tuple(prompt) for prompt in first + second}) == 6
    assert [body["max_tokens"] for body in worker.bodies] == [7, 7]


def test_one_prompt_is_sent_as_one(worker: Worker) -> None:
    client(worker).burst(replace(WORK, batch=1))
    assert len(worker.bodies[0]["prompt"]) == 5


def test_a_batch_beyond_what_one_request_may_hold_is_several_at_once(worker: Worker) -> None:
    client(worker).burst(Workload(batch=300, input_tokens=2, output_tokens=1))
    assert sorted(len(body["prompt"]) for body in worker.bodies) == [44, 128, 128]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, {"usage": {"prompt_tokens": 15, "completion_tokens": 20}}),
        (200, {"usage": {"prompt_tokens": 16, "completion_tokens": 21}}),
        (200, {"choices": []}),
        (200, b"<html>"),
        (400, {"error": {"message": "prompt is too long"}}),
        (500, b""),
        (503, {"detail": "no"}),
    ],
    ids=repr,
)
def test_an_answer_that_is_not_what_was_asked_for_is_no_time(
    worker: Worker, status: int, answer: Any, golden: Golden
) -> None:
    worker.answer = lambda _body: (status, answer)
    with golden.raises("controller", EngineError):
        client(worker).burst(WORK)


def test_a_worker_that_is_gone_is_an_error_of_the_engine(worker: Worker, golden: Golden) -> None:
    worker.close()
    with golden.raises("controller", EngineError):
        client(worker).burst(WORK)


# --- the worker as the daemon sees it --------------------------------------------------------------------------


class Daemon:
    """Daemon that reports the one worker as configured."""

    def __init__(self, status: WorkerStatus | None) -> None:
        self.status = status

    def worker(self, worker_id: str) -> WorkerStatus:
        if self.status is None:
            raise NotFoundError(worker_id)
        return self.status


SPEC = WorkerSpec(
    worker_id="verify-1",
    served_model="m",
    checkpoint="/m",
    config=DeploymentConfig(pp=2),
    stages=(StageAssignment(device_ids=("a",), num_layers=16), StageAssignment(device_ids=("b",), num_layers=16)),
    limits=WorkerLimits(
        max_batch=3,
        max_batched_tokens=64,
        max_context_tokens=12,
        kv_tokens=36,
        memory_bytes_per_device=1,
    ),
)


def ready(url: str) -> WorkerStatus:
    return WorkerStatus(spec=SPEC, state=WorkerState.READY, url=url, pid=1, restarts=0, started_at="")


@pytest.fixture
def checked(worker: Worker) -> tuple[CheckedWorker, Daemon]:
    daemon = Daemon(ready(worker.url))
    return CheckedWorker(SPEC, get_engine("torch"), worker.url, lambda: daemon, llama()), daemon  # type: ignore[arg-type,return-value]


def test_a_burst_is_alone_when_the_worker_counts_its_prompts_only(worker: Worker, checked: Any) -> None:
    assert checked[0].burst(WORK).alone
    worker.others_tokens = 1
    assert not checked[0].burst(WORK).alone


@pytest.mark.parametrize("others", [{"running": 1}, {"waiting": 1}])
def test_a_burst_that_meets_others_is_not_alone(worker: Worker, checked: Any, others: dict[str, int]) -> None:
    worker.stats = replace(STATS, **others)
    assert not checked[0].burst(WORK).alone


def test_a_worker_that_tells_nothing_is_taken_to_be_alone(worker: Worker, checked: Any) -> None:
    worker.stats = None
    assert checked[0].burst(WORK).alone
    assert checked[0].stats() is None


def test_the_fullest_device_counts_with_all_that_it_holds(checked: Any) -> None:
    def rank(number: int, weights_bytes: int) -> RankMemory:
        return RankMemory(
            rank=number,
            stage=number,
            weights_bytes=weights_bytes,
            kv_bytes=20,
            activation_peak_bytes=3,
            pp_buffer_bytes=4,
            runtime_bytes=500,
            graph_bytes=6000,
        )

    assert checked[0].held_bytes(replace(STATS, memory=(rank(0, 10), rank(1, 90)))) == 90 + 20 + 3 + 4 + 500 + 6000
    both_on_one = replace(SPEC, stages=(SPEC.stages[0], SPEC.stages[0]))
    shared = CheckedWorker(both_on_one, get_engine("torch"), "http://127.0.0.1:1", lambda: None, llama())  # type: ignore[arg-type,return-value]
    assert shared.held_bytes(replace(STATS, memory=(rank(0, 10), rank(1, 90)))) == 100 + 2 * 6527
    assert checked[0].held_bytes(STATS) == 0


@pytest.mark.parametrize(
    "fate",
    [
        None,
        {"state": WorkerState.RESTARTING, "error": "ended by signal 9"},
        {"restarts": 1},
    ],
)
def test_what_became_of_the_worker_is_told_also_when_every_burst_was_answered(
    checked: Any, fate: dict[str, Any] | None, golden: Golden
) -> None:
    worker, daemon = checked
    with golden.raises("controller", EngineError), worker.watched():
        daemon.status = None if fate is None else replace(daemon.status, **fate)


def test_a_check_of_a_worker_that_lives_on_fails_for_its_own_reason(
    checked: Any, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("iserve.verify.worker_client._DEATH_S", 0.0)
    with golden.raises("controller", EngineError), checked[0].watched():
        raise EngineError("of other lengths")
