"""A small OpenAI server whose delays are known, and whose faults are chosen by the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from aiohttp import web

from tests.waiting import PATIENCE_S

TTFT_S = 0.05
GAP_S = 0.02
SLOTS = 2  # of the model "slotted": more wait, first come first served
_HEAD = {"Content-Type": "text/event-stream"}


@dataclass
class StandIn:
    """Stand-in server.

    ``bodies`` are the requests received, ``clients`` their origin, ``left`` those without an answer.
    """

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    clients: set[tuple[str, int]] = field(default_factory=set)
    left: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert request.transport is not None
        self.clients.add(request.transport.get_extra_info("peername"))
        try:
            if body["model"] == "slotted":
                async with self.slots:
                    return await _served(request, body)
            return await _FAULTS.get(body["model"], _served)(request, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.left += 1
            raise


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: str = " a", finish: str | None = None) -> bytes:
    return event({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt_tokens: int, tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}})


def _prompt_tokens(body: dict) -> int:
    if "messages" in body:
        return len(body["messages"][0]["content"].split())
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_HEAD)
    await response.prepare(request)
    return response


async def _served(request: web.Request, body: dict, *, tokens: int | None = None) -> web.StreamResponse:
    """The first token after TTFT_S, each further one GAP_S after the one before, at the earliest."""
    count = body["max_tokens"] if tokens is None else tokens
    response = await _begin(request)
    await asyncio.sleep(TTFT_S)
    for number in range(count):
        if number:
            await asyncio.sleep(GAP_S)
        await response.write(piece(finish="length" if number == count - 1 else None))
    await response.write(usage(_prompt_tokens(body), count) + b"data: [DONE]\n\n")
    return response


async def _short(request: web.Request, body: dict) -> web.StreamResponse:
    return await _served(request, body, tokens=2)


async def _silent(request: web.Request, body: dict) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def _hangs_in_the_middle(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(piece())
    await asyncio.sleep(3600)
    return response


async def _slow_loris(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    for byte in piece() * 1000:
        await response.write(bytes([byte]))
        await asyncio.sleep(0.05)
    return response


async def _endless_line(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    while True:
        await response.write(b"data: " + b"x" * 30_000)


async def _endless_answer(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    while True:
        await response.write(piece() * 100)


async def _garbage(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(b"data: {not json\n\n")
    return response


async def _cut(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(piece())
    await asyncio.sleep(0.01)
    assert request.transport is not None
    request.transport.abort()
    return response


async def _no_done(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(piece(finish="stop"))
    return response


async def _error_frame(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(piece() + event({"error": {"message": "the engine died", "type": "server_error"}}))
    return response


async def _nothing(request: web.Request, body: dict) -> web.StreamResponse:
    response = await _begin(request)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _not_a_stream(request: web.Request, body: dict) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "whole"}]})


def _refusal(status: int, **more: str) -> Callable[[web.Request, dict], Awaitable[web.StreamResponse]]:
    async def refuse(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"told {status}", **more}}, status=status)

    return refuse


_FAULTS: dict[str, Callable[[web.Request, dict], Awaitable[web.StreamResponse]]] = {
    "short": _short,
    "silent": _silent,
    "hangs-in-the-middle": _hangs_in_the_middle,
    "slow-loris": _slow_loris,
    "endless-line": _endless_line,
    "endless-answer": _endless_answer,
    "garbage": _garbage,
    "cut": _cut,
    "no-done": _no_done,
    "error-frame": _error_frame,
    "nothing": _nothing,
    "not-a-stream": _not_a_stream,
    "429": _refusal(429),
    "400": _refusal(400),
    "500": _refusal(500),
    "503": _refusal(503),
    "late": _refusal(503, code="would_be_late"),
}


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """The server in a thread of its own, on a port that the system chose."""
    server, loop, ready = StandIn(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        try:
            await stopped.wait()
        finally:
            await runner.cleanup()

    stopped = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(PATIENCE_S)
        loop.close()
