"""The worker's HTTP face: health, stats, metrics and the OpenAI routes over one engine.

Knows requests and answers; what a body means is ``openai_api``'s business, what runs is the engine's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from daemon.torch_engine.api import openai_api
from daemon.torch_engine.api.adapters import adapter_routes, model_list
from daemon.torch_engine.api.metrics import Reading, WorkerMetrics
from daemon.torch_engine.api.openai_api import ApiError, Generation, Usage
from daemon.torch_engine.api.profile_api import profile_routes
from daemon.torch_engine.api.prompt_scores import scored_choice, scoring_requests
from daemon.torch_engine.api.streams import Choice, Stream, Streams
from daemon.torch_engine.api.tokenizer import TextCodec, TextTooLongError, end_token_ids, load_text_codec
from daemon.torch_engine.runner_types import Runner
from daemon.torch_engine.runtime.engine import Engine, EngineState
from daemon.torch_engine.runtime.sequences import SequenceRequest, TokenEvent
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import OPEN_PATHS, carries
from fingerprint.codec import to_json
from fingerprint.errors import EngineError, IserveError, NotFoundError, UnavailableError

__all__ = ["MAX_BODY_BYTES", "Worker", "make_app"]

MAX_BODY_BYTES = 32 * 2**20
_BODY_TIMEOUT_S = 60.0
_LONG_TEXT_CHARS = 4096  # longer prompts are tokenized outside the event loop
_CHAT_THREADS = 4  # of their own: a template that takes long keeps no other prompt waiting


class Worker:
    """Engine with its HTTP streams and codec. Lives in one event loop.

    Args:
        failed: called in the engine's thread when it has ended by an error.
    """

    def __init__(
        self, spec: WorkerSpec, runner: Runner, failed: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self.spec = spec
        self.streams = Streams(asyncio.get_running_loop())
        self.engine = Engine(runner, deliver=self.streams.deliver, failed=failed)
        self.metrics = WorkerMetrics(self._read_metrics)
        self.codec: TextCodec | None = None
        self.end_ids: frozenset[int] = frozenset()
        self.created = int(time.time())
        self._chats = ThreadPoolExecutor(_CHAT_THREADS, thread_name_prefix="chat")

    def _read_metrics(self) -> Reading:
        return Reading(self.engine.stats(self.spec.served_model), self.engine.totals, len(self.engine.adapters))

    async def start(self) -> None:
        """Start the engine's thread and, unless profiling, load the spec's checkpoint.

        Raises:
            CheckpointError, EngineError: as ``Runner.load``; also a tokenizer that cannot be read.
        """
        self.engine.start()
        if not self.spec.profiling:
            checkpoint = Path(self.spec.checkpoint)
            self.codec = await asyncio.to_thread(load_text_codec, checkpoint)
            self.end_ids = end_token_ids(checkpoint, self.codec)
            await asyncio.wrap_future(
                self.engine.load(checkpoint, self.spec.config, self.spec.stages, self.spec.limits)
            )
            await asyncio.wrap_future(self.engine.warm_up())
        self.engine.ready()

    async def drain(self, limit_s: float) -> None:
        """Admit nothing more and wait for what runs, ``limit_s`` at most."""
        self.engine.begin_drain()
        end_s = time.monotonic() + limit_s
        while self.engine.has_work and time.monotonic() < end_s:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End what the codec runs; the engine has its own ``close``."""
        if self.codec is not None:
            await asyncio.to_thread(self.codec.close)
        self._chats.shutdown(wait=False, cancel_futures=True)

    # Requests.

    async def prepare(self, generation: Generation) -> list[SequenceRequest]:
        """Return token ids, ends and lengths of each prompt of a request.

        Raises:
            ApiError: unknown model, no tokenizer, ids out of range, longer than the context.
        """
        adapter = None if generation.model in (None, self.spec.served_model) else generation.model
        if adapter is not None and adapter not in self._adapter_names():
            raise self._unknown(adapter)
        if self.engine.state is not EngineState.OK:
            raise UnavailableError(f"the worker is {self.engine.state}")
        if self.spec.profiling:
            raise UnavailableError("this worker profiles; it serves no requests")
        ends = frozenset(generation.stop_token_ids)
        if not generation.ignore_eos:
            ends |= self.end_ids
        requests = []
        for prompt in await self._encode(generation):
            max_tokens = self._max_tokens(generation, len(prompt))
            requests.append(
                SequenceRequest(
                    prompt=prompt,
                    max_tokens=max_tokens,
                    min_tokens=min(generation.min_tokens, max_tokens),
                    sampling=generation.sampling,
                    end_ids=ends,
                    adapter=adapter,
                )
            )
        return requests if generation.score_top is None else scoring_requests(requests, generation.score_top)

    async def _encode(self, generation: Generation) -> list[tuple[int, ...]]:
        prompts: list[tuple[int, ...]]
        if generation.token_lists:
            prompts = list(generation.token_lists)
            vocab_size = self.engine.vocab_size
            for prompt in prompts:
                self._max_tokens(generation, len(prompt))  # before millions of ids are looked at
                bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
                if bad is not None:
                    raise openai_api.bad_request(f"token id {bad} is not in 0 to {vocab_size - 1}", "prompt")
        else:
            codec = self.codec
            if codec is None:
                raise openai_api.bad_request(
                    "this checkpoint has no tokenizer; send prompts to /v1/completions as lists of token ids",
                    generation.prompt_param,
                )

            context = self.spec.limits.max_context_tokens

            try:
                if generation.chat:
                    loop = asyncio.get_running_loop()
                    chat = loop.run_in_executor(self._chats, codec.encode_chat, generation.messages, context)
                    prompts = [tuple(await chat)]
                else:
                    prompts = await self._encode_texts(codec, generation.texts, context)
            except TextTooLongError as error:
                raise openai_api.bad_request(
                    str(error), generation.prompt_param, openai_api.CONTEXT_EXCEEDED
                ) from error
        if any(not prompt for prompt in prompts):
            raise openai_api.bad_request("the prompt is empty", generation.prompt_param)
        return prompts

    async def _encode_texts(
        self, codec: TextCodec, texts: Sequence[str], max_tokens: int
    ) -> list[tuple[int, ...]]:
        def encode() -> list[tuple[int, ...]]:
            return [tuple(codec.encode(text, max_tokens)) for text in texts]

        is_long = sum(map(len, texts)) > _LONG_TEXT_CHARS
        return await asyncio.to_thread(encode) if is_long else encode()

    def _max_tokens(self, generation: Generation, prompt_tokens: int) -> int:
        context = self.spec.limits.max_context_tokens
        asked = generation.max_tokens
        if prompt_tokens >= context or (asked is not None and prompt_tokens + asked > context):
            raise openai_api.context_error(prompt_tokens, asked or 0, context, generation.prompt_param)
        if asked is not None:
            return asked
        room = context - prompt_tokens
        return room if generation.chat else min(openai_api.DEFAULT_COMPLETION_TOKENS, room)

    def open(self, requests: list[SequenceRequest]) -> Stream:
        try:
            return self.streams.open(self.engine, requests)
        except NotFoundError as error:  # unloaded since it was prepared
            raise self._unknown(requests[0].adapter or "") from error
        except UnavailableError as error:
            if self.engine.state is EngineState.OK:
                raise ApiError(429, str(error), "rate_limit_error", None, "queue_full") from error
            raise

    def _unknown(self, model: str) -> ApiError:
        served = ", ".join(repr(name) for name in (self.spec.served_model, *self._adapter_names()))
        return ApiError(
            404,
            f"there is no model {model[:200]!r} here; this worker serves {served}",
            "invalid_request_error",
            "model",
            "model_not_found",
        )

    def _adapter_names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.engine.adapters)


class _Answer:
    """Answer to one request on its way: its choices, filled from the engine's events."""

    def __init__(self, worker: Worker, generation: Generation, requests: list[SequenceRequest]) -> None:
        self.worker, self.generation, self.requests = worker, generation, requests
        self.id = ("chatcmpl-" if generation.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self.start_s = time.perf_counter()
        self.choices = [Choice(request, worker.codec, generation.stops) for request in requests]
        self.stream = worker.open(requests)  # last: from here on it must be closed
        self._index = {sequence_id: index for index, sequence_id in enumerate(self.stream.ids)}

    def push(self, event: TokenEvent) -> tuple[int, str]:
        """Take an event; return its choice and its new text.

        Raises:
            ApiError: the sequence has ended by an error, or the tokenizer fails on its tokens.
        """
        if event.token is None:
            raise ApiError(500, event.error or "the engine failed", "server_error", None, "engine_error")
        index = self._index[event.sequence_id]
        choice = self.choices[index]
        try:
            text = choice.push(event)
        except EngineError as error:
            raise ApiError(500, str(error), "server_error", None, "engine_error") from error
        if choice.finish is not None:
            self.stream.drop(event.sequence_id)
            assert choice.first_at_s is not None
            self.worker.metrics.observe_sequence(self.start_s, choice.first_at_s, event.at_s, len(choice.tokens))
        return index, text

    def usage(self) -> Usage:
        forced = sum(len(request.forced) for request in self.requests)
        scored = self.generation.score_top is not None
        return Usage(
            sum(len(request.prompt) for request in self.requests) + forced,
            0 if scored else sum(len(choice.tokens) for choice in self.choices),
        )

    def body(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        name = self.generation.model or self.worker.spec.served_model
        return msgspec.json.encode(
            openai_api.response(self.generation, self.id, name, choices, usage, created=self.created)
        )

    async def whole(self) -> bytes:
        texts = [""] * len(self.choices)
        async for event in self.stream.events():
            index, text = self.push(event)
            texts[index] += text
        if self.generation.score_top is not None:
            return await asyncio.to_thread(self._scored)
        choices = [
            openai_api.choice_body(
                self.generation, index, texts[index], str(choice.finish), choice.request.prompt, choice.tokens
            )
            for index, choice in enumerate(self.choices)
        ]
        return self.body(choices, self.usage())

    def _scored(self) -> bytes:
        scored = [scored_choice(self.generation, index, choice) for index, choice in enumerate(self.choices)]
        return self.body(scored, self.usage())

    async def pieces(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the answer as server-sent events; the last is ``[DONE]``, or an error."""
        generation = self.generation
        unsent: list[list[int]] = [[] for _ in self.choices]
        opened = not generation.chat
        async for event in self.stream.events():
            index, text = self.push(event)
            if not opened:  # only now: a failure before the first token can still get a status of its own
                opened = True
                await write(self.body([openai_api.choice_chunk(generation, 0, "", None, [], first=True)], None))
            finish = self.choices[index].finish
            unsent[index].append(self.choices[index].tokens[-1])
            if not (text or finish or generation.return_token_ids):
                continue
            chunk = openai_api.choice_chunk(generation, index, text, finish, unsent[index])
            unsent[index] = []
            await write(self.body([chunk], None))
        if generation.include_usage:
            await write(self.body([], self.usage()))
        await write(b"[DONE]")


async def _read_body(request: web.Request) -> bytes:
    if "Content-Type" not in request.headers or request.content_type != "application/json":
        kind = request.headers.get("Content-Type", "missing")
        raise ApiError(
            415,
            f"Content-Type is {kind[:80]!r}, send application/json",
            "invalid_request_error",
            None,
            "unsupported_media_type",
        )
    if (request.content_length or 0) > MAX_BODY_BYTES:  # known before a byte of it is read
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time", "invalid_request_error") from error


def _generate_route(
    worker: Worker, route: str, parse: Callable[[bytes], Generation]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        outcome = "cancelled"
        stream: Stream | None = None
        try:
            generation = parse(await _read_body(request))
            answer = _Answer(worker, generation, await worker.prepare(generation))
            stream = answer.stream
            if generation.stream:
                outcome, response = await _stream(request, answer)
                return response
            body = await answer.whole()
            outcome = "ok"
            return web.Response(body=body, content_type="application/json")
        except IserveError:
            outcome = "refused" if stream is None else "error"
            raise
        finally:  # also when the client leaves: the handler is cancelled then
            if stream is not None:
                stream.close()
            worker.metrics.requests.labels(route, outcome).inc()

    return handle


async def _stream(request: web.Request, answer: _Answer) -> tuple[str, web.StreamResponse]:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)

    async def write(data: bytes) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"data: " + data + b"\n\n")

    outcome = "ok"
    try:
        await answer.pieces(write)
    except ConnectionError:  # the client has left
        return "cancelled", response
    except Exception as error:  # a cut stream ends in an error frame, whatever cut it
        if not response.prepared:
            raise
        outcome = "error"
        known = isinstance(error, ApiError)
        told = error if known else ApiError(500, "the worker has failed", "server_error", None, "internal_error")
        await write(msgspec.json.encode(openai_api.error_body(told)))
        if not known:
            raise
    await response.write_eof()
    return outcome, response


def _error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(openai_api.error_body(error)),
        content_type="application/json",
        headers=headers,
    )


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give every refusal an OpenAI body."""
    try:
        return await handler(request)
    except IserveError as error:
        return _error_response(openai_api.as_api_error(error))
    except web.HTTPRequestEntityTooLarge:
        limit = f"the body is larger than {MAX_BODY_BYTES} bytes"
        return _error_response(ApiError(413, limit, "invalid_request_error", None, "body_too_large"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = f"{request.method} {request.path}: {error.reason}"
        return _error_response(ApiError(error.status, text, "invalid_request_error"))
    except web.RequestPayloadError as error:
        return _error_response(openai_api.bad_request(f"the body could not be read: {error}"))


def _authentication(token: str) -> Middleware:
    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not carries(request.headers.get("Authorization"), token):
            raise ApiError(
                401,
                "this worker answers its gateway; send the request to the OpenAI API of iServe",
                "invalid_request_error",
                None,
                "invalid_api_key",
            )
        return await handler(request)

    return check


def make_app(worker: Worker, token: str | None = None) -> web.Application:
    """Return all routes of a worker; the profiling ones only with ``spec.profiling``.

    Args:
        token: wanted for every route but ``/health``; None: for none.
    """
    checks = [] if token is None else [_authentication(token)]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, *checks])

    async def close(app: web.Application) -> None:
        await worker.close()

    app.on_cleanup.append(close)

    async def health(request: web.Request) -> web.Response:
        state = worker.engine.state
        body: dict[str, Any] = {"status": str(state)}
        if worker.engine.error is not None:
            body["error"] = worker.engine.error
        return web.json_response(body, status=200 if state is EngineState.OK else 503)

    async def stats(request: web.Request) -> web.Response:
        body = to_json(worker.engine.stats(worker.spec.served_model))
        return web.Response(body=body, content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=worker.metrics.text(), headers=headers)

    async def models(request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": model_list(worker.spec, worker.engine, worker.created)}
        )

    completion = _generate_route(worker, "completions", openai_api.parse_completion)
    chat = _generate_route(worker, "chat_completions", openai_api.parse_chat)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/stats", stats),
            web.get("/metrics", metrics),
            web.get("/v1/models", models),
            web.post("/v1/completions", completion),
            web.post("/v1/chat/completions", chat),
        ]
    )
    if worker.spec.config.adapter_slots and not worker.spec.profiling:
        app.add_routes(adapter_routes(worker.spec, worker.engine, _read_body))
    if worker.spec.profiling:
        app.add_routes(profile_routes(worker.spec, worker.engine, worker.streams))
    return app
