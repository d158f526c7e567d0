"""Stands in front of ``trtllm-serve``: the worker API as every engine has it, over what this engine answers.

``python -m daemon.engines.tensorrt_llm.proxy SPEC.json COMMAND...``: starts COMMAND on a port of its own, listens
on the spec's, and ends as it ends. What it makes up for: the engine checks no model name, refuses in flat bodies,
cuts an answer that is too long without a word, has no loads of adapters (``lora``), and gives each of its
statistics to one reader only. The bytes of the base's answers pass through unread. It knows no leases, and ends
nothing but COMMAND: the wrapper does the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from daemon.adapter_requests import (
    LOAD_PATH,
    UNLOAD_PATH,
    AdapterBodyError,
    LoadBody,
    UnloadBody,
    parse_body,
    variant_folder,
)
from daemon.bounded_http import BoundedRunner
from daemon.engines.tensorrt_llm.iterations import Iterations
from daemon.engines.tensorrt_llm.lora import (
    AdapterTable,
    NamedAdapter,
    RenamedAnswer,
    checked_content,
    with_adapter,
)
from daemon.engines.wrapper import end_like
from daemon.exit_codes import PORT_IN_USE
from daemon.file_limit import most_connections, raise_file_limit
from daemon.http_log import log_bad_requests_in_one_line
from daemon.port_owner import free_port
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import OPEN_PATHS, carries, read_token
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConflictError, NotFoundError

__all__ = ["OpenAIProxy", "error_body", "main", "openai_error"]

_MAX_BODY_BYTES = 32 * 2**20
_MAX_CONNECTIONS = 1024  # each with one to the engine
_ARRIVE_S = 60.0  # for the head of a request, and again for its body
_HEALTH_S = 1.5  # less than a probe waits
_STATS_S = 1.0
_COULD_NOT_START = 127
_MAX_REASON_BYTES = 2000
_PASSED_ON = ("Content-Type", "Cache-Control")


class _Asked(msgspec.Struct):
    """Fields of a request that are checked here; all further ones are the engine's to check."""

    model: str | None = None
    prompt: str | list[object] | None = None  # a text, token ids, or several of either
    max_tokens: int | None = None
    lora_request: msgspec.Raw = msgspec.Raw()


class OpenAIProxy:
    """The HTTP side, for one event loop."""

    def __init__(self, spec: WorkerSpec, engine_url: str, token: str | None = None) -> None:
        self._spec, self._url, self._token = spec, engine_url, token
        self._adapters = AdapterTable(spec.served_model, spec.config.loaded_adapters)
        self._client: aiohttp.ClientSession
        self._iterations = Iterations()
        self._drain: asyncio.Task[None] | None = None
        self._has_news = False  # a request ran since the statistics were last drained
        self._in_flight = 0
        self.draining = False

    def runner(self) -> web.AppRunner:
        """Make the server's runner; a client that leaves cancels its handler, which takes the request off the
        engine.
        """
        return BoundedRunner(
            self._app(),
            most=most_connections(_MAX_CONNECTIONS, files_each=2),
            wait_s=_ARRIVE_S,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._check_token])
        app.cleanup_ctx.append(self._open_client)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/stats", self._stats),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._infer),
                web.post("/v1/chat/completions", self._infer),
            ]
        )
        if self._spec.config.adapter_slots:  # else the engine would leave an adapter out without an error
            app.add_routes([web.post(LOAD_PATH, self._load), web.post(UNLOAD_PATH, self._unload)])
        return app

    async def _open_client(self, _app: web.Application):  # type: ignore[no-untyped-def]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._client:
            yield
            if self._drain is not None:
                self._drain.cancel()

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization")
        if self._token is None or request.path in OPEN_PATHS or carries(header, self._token):
            return await handler(request)
        return _refuse(401, "this worker answers its gateway; ask iServe's OpenAI API", code="invalid_api_key")

    # --- how it is -----------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        """Answer ``/health``; no connection means loading: the engine binds its port before it listens."""
        state = "draining" if self.draining else "loading"
        if not self.draining:
            try:
                timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
                async with self._client.get(f"{self._url}/health", timeout=timeout) as answer:
                    state = "ok" if answer.status == 200 else "failed"
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
        return web.json_response({"status": state}, status=200 if state == "ok" else 503)

    async def _version(self, _request: web.Request) -> web.Response:
        async with self._client.get(f"{self._url}/version") as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    async def _models(self, _request: web.Request) -> web.Response:
        base = self._spec.served_model
        shared = {"object": "model", "owned_by": "iserve", "max_model_len": self._spec.limits.max_context_tokens}
        models = [{"id": base, "created": 0} | shared]
        models += [
            {"id": one.name, "created": one.created, "root": str(one.folder), "parent": base} | shared
            for one in self._adapters
        ]
        return web.json_response({"object": "list", "data": models})

    async def _stats(self, _request: web.Request) -> web.Response:
        """Answer ``WorkerStats``; 503 before the first iteration, of which alone the engine tells its KV room."""
        if self._has_news and self._drain is None:
            self._has_news = self._in_flight > 0
            self._drain = asyncio.create_task(self._drain_records())
            self._drain.add_done_callback(self._drained)
        if self._drain is not None:
            # an answer takes up to 2 s when there is no record; it is waited for by the next look then
            await asyncio.wait((self._drain,), timeout=_STATS_S)
        stats = self._iterations.stats(self._spec, idle=self._in_flight == 0)
        if stats is None:
            return web.json_response(
                {"error": "EngineError", "message": "no iteration was reported yet"}, status=503
            )
        return web.Response(body=to_json(stats), content_type="application/json")

    async def _drain_records(self) -> None:
        async with self._client.get(f"{self._url}/metrics") as answer:
            self._iterations.add(await answer.read())

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._drain = None
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            print(f"proxy: the engine's statistics cannot be read: {error}", file=sys.stderr, flush=True)

    # --- what it does --------------------------------------------------------------------------------------------

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self.draining:
            return _stopping()
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _refuse(400, f"the request cannot be read: {error}")
        adapter = self._adapters.get(asked.model)
        refusal = self._refusal(asked, adapter)
        if refusal is not None:
            return refusal
        if adapter is not None:
            body = with_adapter(body, adapter)
        try:
            async with self._posted(request.path, body) as answer:
                return await self._relay(request, answer, adapter)
        except aiohttp.ClientError as error:
            return _lost(error)

    @asynccontextmanager
    async def _posted(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the engine, and count the request as one that is in flight."""
        self._in_flight += 1
        self._has_news = True
        try:
            headers = {"Content-Type": "application/json"}
            async with self._client.post(self._url + path, data=body, headers=headers) as answer:
                yield answer
        finally:
            self._in_flight -= 1
            self._has_news = True

    def _refusal(self, asked: _Asked, adapter: NamedAdapter | None) -> web.Response | None:
        """Return the refusal of a request that the engine would take and the worker API does not."""
        name, limit = self._spec.served_model, self._spec.limits.max_context_tokens
        if asked.model not in (None, name) and adapter is None:
            message = f"the model {str(asked.model)[:200]!r} does not exist; this worker serves {name!r}"
            return _refuse(404, message, code="model_not_found", param="model")
        if bytes(asked.lora_request):
            message = "lora_request names a folder of the server; load the adapter, and name it in 'model'"
            return _refuse(400, message, param="lora_request")
        if asked.prompt is not None and len(asked.prompt) == 0:
            return _refuse(400, "prompt must not be empty", param="prompt")
        tokens = _longest(asked.prompt)
        if tokens + (asked.max_tokens or 1) > limit:
            message = (
                f"{tokens} prompt tokens and max_tokens={asked.max_tokens} are more than the {limit} tokens that "
                "a sequence may have here; shorten one of them"
            )
            return _refuse(400, message, code="context_length_exceeded", param="prompt")
        return None

    async def _load(self, request: web.Request) -> web.Response:
        """Check an adapter, and have the engine read it by a request for one token."""
        if self.draining:
            return _stopping()
        try:
            body = parse_body(await request.read(), LoadBody)
            with self._adapters.place(body.lora_name):
                folder = variant_folder(body.lora_path, "lora_path")
                content = await asyncio.to_thread(checked_content, folder, self._spec.config.adapter_rank)
                adapter = self._adapters.numbered(body.lora_name, folder, content)
                refusal = await self._read_by_engine(adapter)
                if refusal is not None:
                    return refusal
                if await asyncio.to_thread(checked_content, folder, self._spec.config.adapter_rank) != content:
                    return _refuse(
                        400, "the adapter changed while it was loaded; load it again", param="lora_path"
                    )
                self._adapters.add(adapter, content)
        except AdapterBodyError as error:
            return _refuse(400, str(error), param=error.field)
        except ConflictError as error:
            return _refuse(400, str(error), param="lora_name")
        except (BadInputError, OSError) as error:
            return _refuse(400, str(error), param="lora_path")
        return web.Response(text=f"the adapter {body.lora_name!r} is loaded")

    async def _read_by_engine(self, adapter: NamedAdapter) -> web.Response | None:
        """Return why the engine answers no request with ``adapter``; None where it does."""
        asked = {"model": self._spec.served_model, "prompt": [0], "max_tokens": 1, "lora_request": adapter.field}
        try:
            async with self._posted("/v1/completions", msgspec.json.encode(asked)) as answer:
                said = await answer.read()
        except aiohttp.ClientError as error:
            return _lost(error)
        if answer.status == 200:
            return None
        message = f"the engine failed with the adapter {adapter.name!r}: {_reason(said)}"
        return _refuse(500, message, code="engine_error")

    async def _unload(self, request: web.Request) -> web.Response:
        """Take the name away; the engine itself keeps what it has read."""
        try:
            body = parse_body(await request.read(), UnloadBody)
            self._adapters.remove(body.lora_name)
        except AdapterBodyError as error:
            return _refuse(400, str(error), param=error.field)
        except NotFoundError as error:
            return _refuse(404, str(error), code="model_not_found", param="lora_name")
        return web.Response(text=f"the adapter {body.lora_name!r} is unloaded")

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, adapter: NamedAdapter | None
    ) -> web.StreamResponse:
        if answer.status != 200:
            said = await answer.read()
            if adapter is not None and not adapter.folder.is_dir():  # which the engine asks for each time
                message = f"the files of {adapter.name!r} are gone; load it again"
                return _refuse(404, message, code="model_not_found", param="model")
            reworded = openai_error(said)
            if reworded is None:
                reworded = error_body(f"the engine answered {answer.status}", code="engine_error")
            return web.Response(status=answer.status, body=reworded, content_type="application/json")
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        renamed = None if adapter is None else RenamedAnswer(_engine_name(self._spec), adapter)
        try:
            async for piece in answer.content.iter_any():
                if shown := piece if renamed is None else renamed.whole_lines(piece):
                    await reply.write(shown)
            if renamed is not None and (shown := renamed.rest()):
                await reply.write(shown)
        except aiohttp.ClientError:
            if request.transport is not None:  # an answer that broke off must not look whole
                request.transport.abort()
        return reply


def _longest(prompt: str | list[object] | None) -> int:
    """Return the tokens of the longest prompt given as token ids; 0 for text, which only the engine can count."""
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    return max((len(part) for part in prompt if isinstance(part, list)), default=0)


def _stopping() -> web.Response:
    return _refuse(503, "the worker is being stopped", code="draining")


def _lost(error: aiohttp.ClientError) -> web.Response:
    """Return the answer to a request that the engine took no part in, or did not end."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _refuse(503, "the model is still loading", code="loading")
    message = f"the engine went away before it answered: {type(error).__name__}"
    return _refuse(502, message, code="worker_lost")


def _refuse(status: int, message: str, *, code: str | None = None, param: str | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.Response(
        status=status, body=error_body(message, code=code, param=param, kind=kind), content_type="application/json"
    )


# --- the process -------------------------------------------------------------------------------------------------


def _engine_name(spec: WorkerSpec) -> str:
    """Return the name that answers of the engine have: that of its model's folder."""
    name = spec.served_model
    return Path(spec.checkpoint).resolve().name if "/" in name or name in ("", ".", "..") else name


def _named(spec: WorkerSpec) -> Path:
    """Return the checkpoint under the name that clients use, for the engine calls a model by its folder's name."""
    name = spec.served_model
    checkpoint = Path(spec.checkpoint).resolve()
    if _engine_name(spec) != name:
        return checkpoint
    folder = Path("model")
    folder.mkdir(exist_ok=True)
    link = folder / name
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint)
    return link.absolute()


async def _run(spec: WorkerSpec, argv: Sequence[str], token: str | None) -> int:
    """Run until the engine has ended; return its return code."""
    port = free_port(spec.host)
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    proxy = OpenAIProxy(spec, f"http://{host}:{port}", token)
    log_bad_requests_in_one_line()
    runner = proxy.runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, spec.host, spec.port).start()
    except OSError as error:
        print(f"port {spec.port} of {spec.host} is in use: {error}", file=sys.stderr, flush=True)
        return PORT_IN_USE
    command = [word.replace("{model}", str(_named(spec))) for word in argv]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        engine = await asyncio.create_subprocess_exec(
            *command, "--host", spec.host, "--port", str(port), env=env, process_group=0
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return _COULD_NOT_START

    def stop() -> None:  # once: a second signal would make the engine drop what it still answers
        if not proxy.draining and engine.returncode is None:
            proxy.draining = True
            engine.send_signal(signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop)
    status = await engine.wait()
    await runner.cleanup()
    return status


def main(argv: list[str]) -> int:
    """Run the proxy; return the engine's exit status, 98 when the port is in use, 127 when it cannot be started.

    Args:
        argv: the worker's spec.json, then the engine's command; ``{model}`` in it becomes the checkpoint.
    """
    raise_file_limit()
    spec = from_json(Path(argv[0]).read_bytes(), WorkerSpec, what=argv[0])
    return end_like(asyncio.run(_run(spec, argv[1:], read_token(Path(argv[0]).parent))))


class _Flat(msgspec.Struct, frozen=True):
    """Refusal as it arrives."""

    object: str
    message: str
    param: str | None = None


_MEANINGS = (  # sign, code, what to change
    (
        re.compile(r"should not exceed max_num_tokens"),
        "context_length_exceeded",
        "the prompt is longer than this deployment takes; shorten it, or deploy for longer ones",
    ),
    (
        re.compile(r"default_max_tokens.*must be greater than 0", re.DOTALL),
        "context_length_exceeded",
        "the prompt leaves no room in the deployment's context; shorten it, or deploy for longer ones",
    ),
    (
        re.compile(r"Request beam width .* is not equal to max_beam_width", re.DOTALL),
        "unsupported_value",
        "beam search is not served; leave out use_beam_search and best_of",
    ),
    (
        re.compile(r"No chat template found"),
        "no_chat_template",
        "the model has no chat template; use /v1/completions, or give its tokenizer one",
    ),
)


def openai_error(body: bytes) -> bytes | None:
    """Return ``{"error": {"message", "type", "param", "code"}}`` for a flat body; None for anything else.

    The engine's error bodies are flat (``tensorrt_llm/serve/openai_server.py``), nearly all of them 400
    ``BadRequestError``, and its wording speaks of its own options.

    A refusal that is not one of the documented ones keeps its message and has no code.
    """
    try:
        flat = msgspec.json.decode(body, type=_Flat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if flat.object != "error":
        return None
    message, code = flat.message, None
    for sign, its_code, meaning in _MEANINGS:
        if sign.search(message):
            message, code = f"{meaning} (the engine said: {message})", its_code
            break
    return error_body(message, code=code, param=flat.param)


def _reason(body: bytes) -> str:
    """Return the message of a refusal as it arrived, or its first bytes."""
    try:
        return msgspec.json.decode(body, type=_Flat).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:_MAX_REASON_BYTES].decode(errors="replace")


def error_body(
    message: str, *, code: str | None = None, param: str | None = None, kind: str = "invalid_request_error"
) -> bytes:
    """Return the body that OpenAI clients parse."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
