"""A real gateway process, and workers that misbehave on request, all on real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from daemon.atomic_file import write_file_atomically
from daemon.process import ProcessRecord, read_record
from fingerprint.codec import to_json
from iserve.route_table import ApiKeyRecord, GatewayLimits, Route, RouteTable, WorkerTarget
from tests.iserve.gateway.adapter_worker import AdapterWorker
from tests.iserve.gateway.threaded_server import ThreadedServer
from tests.waiting import PATIENCE_S, wait_until

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
REPO = Path(__file__).parents[3]


@dataclass
class FakeWorker(ThreadedServer):
    """An OpenAI server whose next answers are of one ``mode``. Runs on a thread with a loop of its own."""

    mode: str = "ok"
    words: tuple[str, ...] = ("one ", "two ", "three")
    bodies: list[bytes] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    header_names: list[set[str]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    cancelled: int = 0  # requests whose connection went away before they were answered
    url: str = ""
    # "hold", "wait" and further modes wait for this.
    go_on: threading.Event = field(default_factory=threading.Event)

    def start(self) -> FakeWorker:
        self.serve()
        return self

    def stop(self) -> None:
        self.go_on.set()
        self.end()

    def target(self, worker_id: str = "w0", *, ready: bool = True, max_outstanding: int = 256) -> WorkerTarget:
        return WorkerTarget(worker_id=worker_id, url=self.url, ready=ready, max_outstanding=max_outstanding)

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.header_names.append({name.lower() for name in request.headers})
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        self.authorizations.append(request.headers.get("Authorization"))
        try:
            return await self._behave(request, json.loads(body))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _behave(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        mode = self.mode
        if mode == "die":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if mode == "busy":
            return web.json_response({"error": {"message": "draining"}}, status=503)
        if mode == "html":
            return web.Response(status=500, text="<h1>oops</h1>", content_type="text/html")
        if mode.startswith("status-"):
            return web.json_response({"error": {"message": "as it says"}}, status=int(mode[7:]))
        if mode == "bad-request":
            error = {"message": "the prompt is too long", "type": "invalid_request_error", "param": "prompt"}
            return web.json_response({"error": {**error, "code": "context_length_exceeded"}}, status=400)
        if mode == "wait":
            await self._held()
        if asked.get("stream"):
            return await self._stream(request, asked, mode)
        text = "".join(self.words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if "chat" in request.path else {"text": text}
        kind = "chat.completion" if "chat" in request.path else "text_completion"
        answer = {"id": "x", "object": kind, "created": 1, "model": asked["model"], "choices": [choice]}
        return web.json_response({**answer, "usage": USAGE})

    async def _stream(self, request: web.Request, asked: dict[str, Any], mode: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if mode == "die-before-frame":
            return self._abort(request, response)
        chat = "chat" in request.path
        head = {"id": "x", "created": 1, "model": asked["model"]}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        for index, word in enumerate(self.words):
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": word}} if chat else {"text": word}
            await response.write(_frame({**head, "choices": [choice]}))
            if index == 0:
                if mode == "hold":
                    await self._held()
                while mode == "trickle":
                    await asyncio.sleep(0.02)
                    await response.write(_frame({**head, "choices": [choice]}))
                if mode == "die-mid-stream":
                    await asyncio.sleep(0.05)  # let the first frame out
                    return self._abort(request, response)
                if mode == "die-mid-frame":
                    await response.write(b'data: {"id": "x", "choi')
                    await asyncio.sleep(0.05)
                    return self._abort(request, response)
        if (asked.get("stream_options") or {}).get("include_usage"):
            await response.write(_frame({**head, "choices": [], "usage": USAGE}))
        if mode == "bad-chunk":
            assert request.transport is not None
            await self._held()  # apart from the frames: read together with them they would be lost too
            request.transport.write(b"no length\r\n")
            await asyncio.sleep(PATIENCE_S)
        if mode == "own-error":
            await response.write(_frame({"error": {"message": "out of pages", "type": "server_error"}}))
        elif mode != "no-done":
            await response.write(b"data: [DONE]\n\n")
        if mode == "done-hold":
            await self._held()
        return response

    async def _held(self) -> None:
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)

    @staticmethod
    def _abort(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return response


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass
class Answer:
    """A complete HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class GatewayProcess:
    """``python -m iserve.gateway`` over a home of its own, and the pen that writes its route table."""

    def __init__(self, home: Path, module: str = "iserve.gateway") -> None:
        self.home = home
        self.module = module
        self.version = 0
        self.port = 0
        (home / "run").mkdir(parents=True, exist_ok=True)

    def start(self, *options: str, wrapper: tuple[str, ...] = ()) -> GatewayProcess:
        argv = [*wrapper, sys.executable, "-m", self.module]
        argv += ["--home", str(self.home), "--port", str(self.port), *options]
        self.log = (self.home / "gateway.log").open("ab")
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        self.process = subprocess.Popen(argv, stderr=self.log, cwd=self.home, env=env)
        record = wait_until(self._own_record, "the gateway has written its record")
        self.url = record.url
        self.port = int(record.url.rpartition(":")[2])
        return self

    def _own_record(self) -> ProcessRecord | None:
        assert self.process.poll() is None, self.logged()
        record = read_record(self.home / "run" / "gateway.json")
        return record if record is not None and record.pid == self.process.pid else None

    def logged(self) -> str:
        return (self.home / "gateway.log").read_text()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.log.close()
        return self.process.wait()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def publish(
        self,
        *routes: Route,
        keys: tuple[ApiKeyRecord, ...] = (),
        auth_required: bool = False,
        limits: GatewayLimits | None = None,
        patience_s: float = PATIENCE_S,
    ) -> RouteTable:
        """Write the next table and return once the gateway serves by it."""
        self.version += 1
        table = RouteTable(
            version=self.version,
            auth_required=auth_required,
            routes=routes,
            keys=keys,
            limits=limits or GatewayLimits(),
        )
        write_file_atomically(self.home / "run" / "routes.json", to_json(table))
        wait_until(
            lambda: self.serves_version() == self.version, f"version {self.version} is in force", patience_s
        )
        return table

    def serves_version(self) -> int | None:
        answer = self.ask("GET", "/readyz")
        return answer.json["routes_version"] if answer.status == 200 else None

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Answer:
        """Send one request on a connection of its own; a ``body`` that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def complete(self, model: str = "m", **fields: Any) -> Answer:
        return self.ask("POST", "/v1/completions", {"model": model, "prompt": "hello", **fields})

    def metric(self, series: str) -> float:
        """The value of one series of /metrics; 0 when it is not there."""
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


def route(*workers: WorkerTarget, name: str = "m") -> Route:
    return Route(name=name, model="org/base", created=1_700_000_000, max_context_tokens=2048, workers=workers)


@pytest.fixture(scope="session")
def gateway_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway")).start()
    yield process
    code = process.stop()
    assert code == 0, process.logged()
    assert "Traceback" not in process.logged()


@pytest.fixture
def gateway(gateway_process: GatewayProcess) -> GatewayProcess:
    """The shared process; its table is that of the last test."""
    return gateway_process


@pytest.fixture
def own_gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """Yield a gateway that the test may kill."""
    process = GatewayProcess(tmp_path).start()
    yield process
    process.stop()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., FakeWorker]]:
    with ExitStack() as stack:

        def make(mode: str = "ok", **fields: Any) -> FakeWorker:
            worker = FakeWorker(mode=mode, **fields).start()
            stack.callback(worker.stop)
            return worker

        yield make


@pytest.fixture(scope="session")
def variant_gateway_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("variants"), "tests.iserve.gateway.variant_gateway").start()
    yield process
    code = process.stop()
    assert code == 0, process.logged()
    assert "Traceback" not in process.logged()


@pytest.fixture
def make_variant_gateway(tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Yield a maker of gateways like ``variant_gateway``, each with options of its own."""
    with ExitStack() as stack:

        def make(*options: str) -> GatewayProcess:
            process = GatewayProcess(tmp_path / "gateway", "tests.iserve.gateway.variant_gateway").start(*options)
            stack.callback(process.stop)
            return process

        yield make


@pytest.fixture
def variant_gateway(variant_gateway_process: GatewayProcess) -> GatewayProcess:
    """The shared process over stand-ins for the folders of variants; its table is that of the last test."""
    return variant_gateway_process


@pytest.fixture
def make_adapter_worker() -> Iterator[Callable[..., AdapterWorker]]:
    """Make workers that fail the test where the gateway broke the contract of their routes."""
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
    pool = ThreadPoolExecutor(80)
    yield pool
    pool.shutdown(
        wait=False, cancel_futures=True
    )  # of a test that failed, some wait for a worker that is still held


@pytest.fixture
def make_route() -> Callable[..., Route]:
    return route


@pytest.fixture
def until() -> Callable[[Callable[[], Any], str], Any]:
    return wait_until
