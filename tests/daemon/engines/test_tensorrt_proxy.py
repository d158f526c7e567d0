"""The proxy before ``trtllm-serve``: what it answers itself, what it rewords, how it takes the engine's ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from daemon.engines.tensorrt_llm.proxy import OpenAIProxy
from fingerprint.config import DeploymentConfig
from tests.daemon.engines.tensorrt_environment import make_checkpoint, make_spec
from tests.daemon.engines.tensorrt_stand_in.engine import Behaviour, Engine
from tests.daemon.engines.tensorrt_stand_in.flags import parse
from tests.daemon.engines.tensorrt_stand_in.options import merged
from tests.daemon.engines.tensorrt_stand_in.server import serve
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

OPTIONS = "max_num_tokens: 60\nmax_seq_len: 100\nenable_iter_perf_stats: true"


@dataclass
class Pair:
    """A proxy, and the stand-in behind it."""

    proxy: OpenAIProxy
    engine: Engine
    url: str
    client: aiohttp.ClientSession

    async def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        call = self.client.get(self.url + path) if body is None else self.client.post(self.url + path, data=data)
        async with call as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def stats(self) -> Any:
        async with self.client.get(f"{self.url}/stats") as answer:
            assert answer.status == 200
            return TensorRtLlmEngine().read_stats(make_spec(Path("/m")), await answer.read())


@contextlib.asynccontextmanager
async def pair(
    folder: Path,
    *,
    listening: bool = True,
    options: str = OPTIONS,
    config: DeploymentConfig | None = None,
    **behaviour: object,
) -> AsyncIterator[Pair]:
    made = Behaviour(**{"metrics_wait_s": 0.05} | behaviour)
    engine = Engine(make_checkpoint(folder / "m"), merged(parse(["m"])[2], options), made)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler, bind_and_activate=False)
    server.server_bind()  # the port is taken; no process listens yet
    server.daemon_threads = True
    thread = threading.Thread(target=serve, args=(server, engine))
    spec = make_spec(folder / "m", **({} if config is None else {"config": config}))
    proxy = OpenAIProxy(spec, f"http://127.0.0.1:{server.server_port}")
    runner = proxy.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    if listening:
        server.server_activate()
        thread.start()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        try:
            yield Pair(proxy, engine, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
        finally:
            await runner.cleanup()
            if listening:
                await asyncio.to_thread(server.shutdown)
                thread.join()
            server.server_close()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


def test_an_engine_that_loads_is_not_ready(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pair(tmp_path, listening=False) as it:
            assert await it.ask("/health") == (503, {"status": "loading"})
            status, answer = await it.ask("/v1/completions", {"prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "loading")

    play(scene)


def test_a_face_that_drains_takes_nothing_new(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pair(tmp_path) as it:
            assert await it.ask("/health") == (200, {"status": "ok"})
            it.proxy.draining = True
            assert await it.ask("/health") == (503, {"status": "draining"})
            status, answer = await it.ask("/v1/completions", {"prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "draining")

    play(scene)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("completions", b"{", 400, None),
        ("completions", b"\xff\xfe", 400, None),
        ("completions", b"[" * 100_000, 400, None),
        ("completions", {"prompt": 7}, 400, None),
        ("completions", {"prompt": ""}, 400, None),
        ("completions", {"prompt": "a", "model": "other"}, 404, "model_not_found"),
        ("chat/completions", {"messages": [], "model": "other"}, 404, "model_not_found"),
        ("completions", {"prompt": [1] * 99, "max_tokens": 2}, 400, "context_length_exceeded"),
        ("completions", {"prompt": [[1], [1] * 100]}, 400, "context_length_exceeded"),
        ("completions", {"prompt": "a " * 61}, 400, "context_length_exceeded"),
        ("completions", {"prompt": "a", "top_k": -1}, 400, None),
        ("chat/completions", {"messages": [], "guided_json": 1}, 400, None),
    ],
)
def test_every_refusal_is_an_openai_error(tmp_path, path, body, status, code, golden: Golden) -> None:
    async def scene() -> None:
        async with pair(tmp_path) as it:
            got, answer = await it.ask(f"/v1/{path}", body)
            assert (got, answer["error"]["code"]) == (status, code)
            golden("engines", answer["error"]["message"])
            assert set(answer["error"]) == {"message", "type", "param", "code"}

    play(scene)


def test_a_stream_that_breaks_off_does_not_look_whole(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pair(tmp_path, break_after=3) as it:
            wish = json.dumps({"prompt": "a", "max_tokens": 9, "stream": True})
            got = b""
            async with it.client.post(f"{it.url}/v1/completions", data=wish) as answer:
                broke = False
                try:
                    async for piece in answer.content.iter_any():
                        got += piece
                except aiohttp.ClientError:
                    broke = True
            assert broke
            assert got.count(b"data: ") == 3
            assert b"[DONE]" not in got
            assert (await it.ask("/health"))[0] == 200

    play(scene)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_off_the_engine(tmp_path: Path, stream: bool) -> None:
    async def scene() -> None:
        async with pair(tmp_path, token_s=0.05) as it:
            asked = asyncio.create_task(
                it.ask("/v1/completions", {"prompt": "a", "max_tokens": 90, "stream": stream})
            )
            async with asyncio.timeout(PATIENCE_S):
                while (await it.ask("/stats"))[0] != 200:  # until it has begun
                    await asyncio.sleep(0.01)
            asked.cancel()
            assert await asyncio.to_thread(it.engine.cut.wait, PATIENCE_S)

    play(scene)


def test_an_idle_engine_is_not_asked_for_its_statistics(tmp_path: Path) -> None:
    """The engine would wait 2 s for a record that does not arrive; and the next look knows what the last one
    drained.
    """

    async def scene() -> None:
        async with pair(tmp_path) as it:
            assert (await it.ask("/stats"))[0] == 503
            assert it.engine.looks == 0
            await it.ask("/v1/completions", {"prompt": [1] * 5, "max_tokens": 3})
            first = await it.stats()
            assert (first.prompt_tokens, first.output_tokens, first.steps) == (5, 3, 3)
            assert it.engine.looks == 1
            assert await it.stats() == first
            assert it.engine.looks == 1

    play(scene)


def test_a_long_answer_shows_in_the_statistics_while_it_runs(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pair(tmp_path, token_s=0.03) as it:
            asked = asyncio.create_task(it.ask("/v1/completions", {"prompt": "a", "max_tokens": 80}))
            seen: list[int] = []
            async with asyncio.timeout(PATIENCE_S):
                while len(seen) < 3:
                    status, stats = await it.ask("/stats")
                    if status == 200 and stats["steps"] not in seen:
                        seen.append(stats["steps"])
                        assert (stats["running"], stats["kv_tokens_total"] - stats["kv_tokens_free"]) == (1, 32)
                    await asyncio.sleep(0.01)
            assert seen == sorted(seen)
            assert not asked.done()
            await asked
            assert (await it.stats()).steps == 80

    play(scene)


def test_several_readers_at_once_see_every_record_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with pair(tmp_path) as it:
            for _ in range(5):
                await asyncio.gather(
                    *(it.ask("/v1/completions", {"prompt": [1] * 5, "max_tokens": 3}) for _ in range(4)),
                    *(it.ask("/stats") for _ in range(4)),
                )
            async with asyncio.timeout(PATIENCE_S):
                while (stats := await it.stats()).steps < 60:
                    await asyncio.sleep(0.01)
            assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (100, 60, 60)

    play(scene)


def test_statistics_that_make_no_sense_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    async def scene() -> None:
        async with pair(tmp_path) as it:
            it.engine.drain_records = lambda: {"not": "a list"}  # type: ignore[method-assign,assignment,return-value]
            await it.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert (await it.ask("/stats"))[0] == 503
            assert (await it.ask("/v1/completions", {"prompt": "a", "max_tokens": 3}))[0] == 200

    play(scene)
    golden("engines", capsys.readouterr().err)
