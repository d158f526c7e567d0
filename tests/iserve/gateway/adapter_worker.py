"""Worker that serves a base and its LoRA adapters over real HTTP, and keeps the contract of those routes strictly.

What the gateway must not do is written to ``violations``: load beyond the limit or what is loaded, unload what is
not loaded or is in flight, send a name that is not loaded, or more distinct adapters at once than there are slots.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from iserve.route_table import WorkerTarget
from tests.daemon.engines.vllm_stand_in.deltas import BEING_READ, MANIFEST_FILE, Reader
from tests.iserve.gateway.threaded_server import ThreadedServer

BASE = "served-base"
TOKEN = "worker-token"
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@dataclass
class AdapterWorker(ThreadedServer):
    """Runs on a thread with a loop of its own; requests are answered with the content hash of their adapter."""

    slots: int = 2
    max_loaded: int = 4
    separators: tuple[str, str] = (",", ":")  # of its JSON
    service_s: float = 0.0
    refusals: dict[str, tuple[int, Any]] = field(default_factory=dict)  # answers to loads, by engine name
    loaded: dict[str, str] = field(default_factory=dict)  # paths by engine name
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # of all requests, as they were sent
    bodies: list[bytes] = field(default_factory=list)
    lists: int = 0  # of models
    violations: list[str] = field(default_factory=list)
    is_forgetful: bool = False  # it was restarted: a name that is not loaded is no violation
    dies_on_load: bool = False
    unload_failure: str = ""  # "dies" or "fails"
    busy_loads: int = 0  # loads that find no place yet
    memory: int | None = None  # adapters that it holds, where those are fewer than ``max_loaded``
    no_memory: str = "Call to add_lora method failed: CUDA out of memory. Tried to allocate 20.00 MiB."
    reader: Reader | None = None  # of a worker that reads deltas before it has them
    loading: set[str] = field(default_factory=set)
    most_in_flight: int = 0
    url: str = ""
    held_models: set[str] = field(default_factory=set)  # whose requests wait for ``go_on``
    go_on: threading.Event = field(default_factory=threading.Event)
    load_now: threading.Event = field(default_factory=threading.Event)  # set: loads are not held

    def start(self) -> AdapterWorker:
        self.load_now.set()
        self.in_flight: Counter[str] = Counter()
        self.serve()
        return self

    def stop(self) -> None:
        self.go_on.set()
        self.load_now.set()
        self.end()

    def restart(self) -> None:
        """Lose all that is loaded, as a worker started again at the same address."""
        self.loaded.clear()
        self.is_forgetful = True

    def target(self, worker_id: str = "w0", *, ready: bool = True, max_outstanding: int = 256) -> WorkerTarget:
        return WorkerTarget(
            worker_id=worker_id, url=self.url, ready=ready, token=TOKEN, max_outstanding=max_outstanding
        )

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20, middlewares=[self._check_token])
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        return app

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.violations.append(f"{request.path} without the token")
            return self._error(401, "no token")
        return await handler(request)

    async def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        data = [{"id": BASE, "object": "model", "root": "/models/base", "parent": None}]
        data += [
            {"id": name, "object": "model", "root": path, "parent": BASE} for name, path in self.loaded.items()
        ]
        return self._json({"object": "list", "data": data})

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert set(asked) == {"lora_name", "lora_path"}, asked
        name, path = asked["lora_name"], Path(asked["lora_path"])
        self.loads.append(name)
        if name in self.loaded or name in self.loading:
            self.violations.append(f"{name} is loaded twice")
            return self._error(400, f"The lora adapter '{name}' has already been loaded.", "lora_name")
        if self.busy_loads:
            self.busy_loads -= 1
            return self._error(400, "4 adapters are loaded, 1 of them until its last request ends", "lora_name")
        is_delta = (path / MANIFEST_FILE).exists()
        if is_delta and self.reader is not None and not self.reader.is_ready(str(path)):
            self.violations += [f"{one} is read and dropped" for one in self.reader.dropped]
            return self._error(500, f"Call to add_lora method failed: {BEING_READ.format(name)}")
        if not path.is_absolute() or not path.is_dir() or name.partition("@")[2] != path.name[:16]:
            self.violations.append(f"{name} is loaded from {path}")
        if len(self.loaded) + len(self.loading) >= self.max_loaded:
            self.violations.append(f"{name} is loaded beyond the limit of {self.max_loaded}")
            return self._error(400, "no place is left")
        self.loading.add(name)
        try:
            if not self.dies_on_load:
                await self._until(self.load_now)
        finally:
            self.loading.discard(name)
        if self.dies_on_load:  # before the load, or within it
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.memory is not None and len(self.loaded) >= self.memory:
            return self._error(500, self.no_memory)
        if name in self.refusals:
            status, body = self.refusals[name]
            return self._json(body, status)
        self.loaded[name] = str(path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = asked["lora_name"]
        self.unloads.append(name)
        if self.unload_failure == "fails":
            return self._error(500, f"{name} is stuck")
        if self.unload_failure:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.in_flight[name]:
            self.violations.append(f"{name} is unloaded in flight")
        if name not in self.loaded:
            if not self.is_forgetful:
                self.violations.append(f"{name} is unloaded and was not loaded")
            return self._error(404, f"The lora adapter '{name}' cannot be found.")
        del self.loaded[name]
        return web.Response(text="Success")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = json.loads(body)
        name = asked["model"]
        self.models.append(name)
        self.bodies.append(body)
        if name != BASE and name not in self.loaded:
            if "@" not in name:
                name = BASE  # the gateway passes the base's requests on as they are
            elif self.is_forgetful:
                return self._error(404, f"The model `{name}` does not exist.")
            else:
                self.violations.append(f"{name} is not loaded")
                return self._error(404, f"The model `{name}` does not exist.")
        self.in_flight[name] += 1
        adapters = sum(1 for one, count in self.in_flight.items() if count and one != BASE)
        self.most_in_flight = max(self.most_in_flight, adapters)
        if adapters > self.slots:
            self.violations.append(f"{adapters} adapters in flight, and {self.slots} slots")
        try:
            return await self._behave(request, asked, name, self.loaded.get(name, BASE))
        finally:
            self.in_flight[name] -= 1

    async def _behave(
        self, request: web.Request, asked: dict[str, Any], name: str, path: str
    ) -> web.StreamResponse:
        if self.service_s:
            await asyncio.sleep(self.service_s)
        text = f'{path} says "model":"{name}"'
        choice = {"index": 0, "finish_reason": "stop", "text": text}
        head = {"id": "x", "object": "text_completion", "created": 1, "model": asked["model"]}
        if not asked.get("stream"):
            if name in self.held_models:
                await self._until(self.go_on)
            if asked.get("prompt") == "too long":
                return self._error(400, f"the prompt is too long for `{name}`")
            return self._json({**head, "choices": [choice], "usage": USAGE})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(self._frame({**head, "choices": [choice]}))
        if name in self.held_models:
            await self._until(self.go_on)
        await response.write(self._frame({**head, "choices": [choice]}) * 2)
        if asked.get("prompt") == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        if asked.get("prompt") == "fail":
            await response.write(self._frame({"error": {"message": f"`{name}` ran out of pages"}}))
            return response
        if (asked.get("stream_options") or {}).get("include_usage"):
            await response.write(self._frame({**head, "choices": [], "usage": USAGE}))
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _until(event: threading.Event) -> None:
        while not event.is_set():
            await asyncio.sleep(0.005)

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(chunk, separators=self.separators).encode() + b"\n\n"

    def _json(self, body: Any, status: int = 200) -> web.Response:
        text = json.dumps(body, separators=self.separators)
        return web.Response(text=text, status=status, content_type="application/json")

    def _error(self, status: int, message: str, param: str | None = None) -> web.Response:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": status}
        return self._json({"error": error}, status)
