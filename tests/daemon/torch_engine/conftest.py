"""A scripted runner, a worker around it in this process, and real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import iserve.demo
from daemon.torch_engine.api.server import Worker, make_app
from daemon.torch_engine.runner_types import StepPlan, StepResult
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig
from fingerprint.errors import EngineError
from fingerprint.measurements import RankMemory
from tests.waiting import PATIENCE_S

DEMO = Path(iserve.demo.__file__).parent / "model"
VOCAB = 258  # the demo's: bytes and two special tokens
ROOT = Path(__file__).parents[3]


class ScriptedRunner:
    """Runner that remembers what was written into each slot, and answers with the token that ``script`` gives for
    it.

    ``gate``: when set, a step waits for a permit, so that a test decides how far the engine gets.
    ``warming``: the steps of warming up may begin anywhere, on a cache of zeros; no other steps may.
    """

    vocab_size = VOCAB

    def __init__(self, script: Callable[[tuple[int, ...]], int | list[float]]) -> None:
        self.script = script
        self.slots: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.gate: threading.Semaphore | None = None
        self.fail_at_step: int | None = None
        self.fail_reading_memory = False
        self.warming = False
        self.closed = False
        self.adapters: dict[int, Path] = {}
        self.prepared: dict[int, Path] = {}
        self.preparing: list[Path] = []  # of all preparations that have begun
        self.preparation: threading.Semaphore | None = None  # each one takes one
        self.fail_loading_adapter: Exception | None = None

    def load(self, checkpoint: Path, config: DeploymentConfig, stages: Any, limits: WorkerLimits) -> None:
        self.slots.clear()

    def step(self, plan: StepPlan) -> StepResult:
        if self.gate is not None:
            self.gate.acquire()
        if len(self.plans) == self.fail_at_step:
            raise EngineError("rank 1 is gone")
        self.plans.append(plan)
        assert {item.adapter_id for item in plan.items} - {None} <= self.adapters.keys()
        rows = []
        for item in plan.items:
            cached = self.slots.setdefault(item.slot, [])
            if self.warming:
                cached += [0] * (item.start - len(cached))
            assert item.start in (0, len(cached)), "a slot is written from its start, or on from where it ends"
            cached[item.start :] = item.token_ids
            answer = self.script(tuple(cached))
            row = torch.zeros(VOCAB)
            if isinstance(answer, int):
                row[answer] = 100.0
            else:
                row[: len(answer)] = torch.tensor(answer)
            rows.append(row)
        return StepResult(torch.stack(rows), device_s=0.25, handover_s=0.0, busy_s=(0.25,))

    def prepare_adapter(self, adapter_id: int, folder: Path) -> None:
        self.preparing.append(folder)
        if self.preparation is not None:
            self.preparation.acquire()
        if self.fail_loading_adapter is not None:
            raise self.fail_loading_adapter
        assert adapter_id not in self.adapters
        self.prepared[adapter_id] = folder

    def switch_adapter(self, adapter_id: int) -> None:
        self.adapters[adapter_id] = self.prepared.pop(adapter_id)

    def unload_adapter(self, adapter_id: int) -> None:
        del self.adapters[adapter_id]

    def memory(self) -> tuple[RankMemory, ...]:
        if self.fail_reading_memory:
            raise EngineError("rank 1 is gone")
        return (
            RankMemory(
                rank=0,
                stage=0,
                weights_bytes=1,
                kv_bytes=2,
                activation_peak_bytes=3,
                pp_buffer_bytes=4,
                runtime_bytes=5,
            ),
        )

    def close(self) -> None:
        self.closed = True


def make_spec(**changes: Any) -> WorkerSpec:
    """A worker for the demo checkpoint: 4 slots of 128 tokens, 32 tokens a step."""
    limits = WorkerLimits(
        max_batch=4,
        max_batched_tokens=32,
        max_context_tokens=128,
        kv_tokens=4 * 128,
        memory_bytes_per_device=2**30,
    )
    spec = WorkerSpec(
        worker_id="w-1",
        served_model="demo",
        checkpoint=str(DEMO),
        config=DeploymentConfig(),
        stages=(StageAssignment(device_ids=("cpu:0",), num_layers=8),),
        limits=limits,
    )
    return replace(spec, **changes)


@dataclass
class Served:
    """A worker in a thread of this process, on a real socket."""

    url: str
    worker: Worker
    runner: ScriptedRunner
    failures: list[BaseException]

    def request(self, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
        status, raw = exchange(self.url, method, path, body, headers)
        return status, json.loads(raw)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first ``/stats`` that meets ``condition``."""
        return until(self.url, condition)


def exchange(url: str, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=PATIENCE_S)
    try:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def until(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        stats = json.loads(exchange(url, "GET", "/stats")[1])
        if condition(stats):
            return stats
        assert time.monotonic() < end_s, f"never came true: {stats}"
        time.sleep(0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(script, **spec changes)``: a worker around a :class:`ScriptedRunner`."""
    ends: list[Callable[[], None]] = []

    def start(
        script: Callable[[tuple[int, ...]], int | list[float]],
        *,
        prepare: Callable[[ScriptedRunner], None] = lambda runner: None,
        **changes: Any,
    ) -> Served:
        runner = ScriptedRunner(script)
        failures: list[BaseException] = []
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def begin() -> tuple[str, Worker, web.AppRunner]:
            worker = Worker(make_spec(**changes), runner, failed=failures.append)
            app = web.AppRunner(make_app(worker), handler_cancellation=True, shutdown_timeout=1.0)
            await app.setup()
            site = web.TCPSite(app, "127.0.0.1", 0)
            await site.start()
            runner.warming = True
            await worker.start()
            runner.warming = False
            runner.slots.clear()
            runner.plans.clear()
            prepare(runner)
            return f"http://127.0.0.1:{app.addresses[0][1]}", worker, app

        url, worker, app = asyncio.run_coroutine_threadsafe(begin(), loop).result(PATIENCE_S)

        def end() -> None:
            if runner.gate is not None:
                runner.gate.release(10_000)
            assert worker.engine.close(PATIENCE_S)
            asyncio.run_coroutine_threadsafe(app.cleanup(), loop).result(PATIENCE_S)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

        ends.append(end)
        return Served(url, worker, runner, failures)

    yield start
    for end in ends:
        end()


@dataclass
class Launched:
    """A worker process."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    token: str | None = None

    def failure(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"exit code {code}: {self.log()[-500:]}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_ready(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end_s, self.log()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if exchange(self.url, "GET", "/health")[0] == 200:
                    return
            time.sleep(0.05)


_FLOAT32_MAIN = """
import sys
from daemon.torch_engine.__main__ import main

def runner():
    import torch
    from daemon.torch_engine.parallel.runner import LocalRunner
    return LocalRunner(torch.float32)

sys.exit(main(sys.argv[1:], runner))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_SLOW_LOAD_MAIN = """
import sys, time
from daemon.torch_engine import __main__ as worker

def runner():
    from daemon.torch_engine.parallel.runner import LocalRunner

    class SlowRunner(LocalRunner):
        def load(self, *model):
            print("loading", flush=True)
            time.sleep(600)

    return SlowRunner()

worker._CLOSE_LIMIT_S = 0.2
sys.exit(worker.main(sys.argv[1:], runner))
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launched]]:
    """``launch(spec)``: ``python -m daemon.torch_engine`` on that spec.

    ``float32``: computing in that type; ``slow_load``: loading for as long as the test waits.
    """
    launched: list[Launched] = []

    def start(
        spec: WorkerSpec, *, float32: bool = False, slow_load: bool = False, lease: Path | None = None
    ) -> Launched:
        folder = tmp_path_factory.mktemp("worker")
        spec = spec if spec.port else replace(spec, port=free_port())
        (folder / "spec.json").write_bytes(to_json(spec))
        program = ["-m", "daemon.torch_engine"]
        if float32 or slow_load:
            program = ["-c", _FLOAT32_MAIN if float32 else _SLOW_LOAD_MAIN]
        argv = [sys.executable, *program, "--spec", str(folder / "spec.json")]
        if lease is not None:
            argv += ["--lease", str(lease)]
        with open(folder / "log", "wb") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            process = subprocess.Popen(argv, cwd=ROOT, stderr=log, stdout=log, env=environment)
        launched.append(Launched(f"http://127.0.0.1:{spec.port}", process, folder))
        return launched[-1]

    yield start
    for each in launched:
        each.stop()


@pytest.fixture
def spec() -> Callable[..., WorkerSpec]:
    return make_spec


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    return DEMO


@pytest.fixture
def http_exchange() -> Callable[..., tuple[int, bytes]]:
    return exchange


@pytest.fixture
def stats_until() -> Callable[..., dict[str, Any]]:
    return until


@pytest.fixture
def scripted_runner() -> type[ScriptedRunner]:
    return ScriptedRunner


@pytest.fixture(scope="session")
def module_spec() -> Callable[..., WorkerSpec]:
    return make_spec
