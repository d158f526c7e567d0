"""Proxy of one inference request: to a worker, and its answer back. Decides on retries and on reporting failures.

Three promises. Nothing is sent twice to a worker once a byte of its answer has gone to the client. A stream that
cannot be finished ends in an error frame. A client that leaves takes its request off the worker at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace

import msgspec

from iserve.gateway.dispatch import READY_WAIT_S, Deployment
from iserve.gateway.errors import ApiError, error_body
from iserve.gateway.metrics import GatewayMetrics, VariantRequestMetrics
from iserve.gateway.reply import Reply
from iserve.gateway.sse import FrameRelay, Usage, error_frame, usage_of
from iserve.gateway.variant_names import RenamedReply, with_model
from iserve.gateway.variant_residency import NoPlaceError, VariantRequest
from iserve.gateway.worker_http import CONNECT_S, NotBegunError, origin_of, worker_headers, worker_lost
from iserve.http_stream import AnswerLostError, NotReachedError, StreamAnswer, StreamClient
from iserve.route_table import WorkerTarget
from planner.admission import InFlightRequest

__all__ = ["InferenceRequest", "forward"]

_LINGER_S = 1.0  # for the worker's end of a stream that is complete, so that its connection can be used again
_MAX_ANSWER_BYTES = 256 * 2**20  # of an answer that is not streamed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceRequest:
    """Inference request that was checked, ready to be sent on as it arrived."""

    endpoint: str  # "/v1/chat/completions"
    model: str  # as the client named it: the deployment, or one of its variants
    body: bytes
    wants_usage: bool  # streamed, with stream_options.include_usage
    ticket: int  # rises with arrival
    arrived_s: float  # on the event loop's clock
    request_id: bytes
    in_flight: InFlightRequest | None = None  # of a deployment that rejects late requests
    variant: VariantRequest | None = None
    model_span: tuple[int, int] = (0, 0)  # of a variant's request, where its body names the model


class _ModelUnknownError(Exception):
    """The worker does not know the engine name that it was sent: it was restarted since it loaded it."""


async def forward(
    request: InferenceRequest,
    deployment: Deployment,
    workers: StreamClient,
    reply: Reply,
    metrics: GatewayMetrics,
) -> None:
    """Answer ``request`` from a worker of ``deployment``.

    A worker that takes no connection is passed over, for up to ``READY_WAIT_S`` in all (a restart fits in that).
    One that goes away before any of its answer was passed on costs the request one more try, elsewhere if it can;
    so does one that fails to load the request's variant.

    Raises:
        ApiError: nothing of an answer was sent, and this is why.
    """
    name, model = deployment.route.name, request.model
    loop = asyncio.get_running_loop()
    avoid, give_up_s = "", math.inf
    failed_before = False
    while True:
        variant = request.variant
        target = await deployment.acquire(request.ticket, avoid, request.in_flight, variant)
        answer: StreamAnswer | None = None
        try:
            if variant is None:
                answer = await _attempt(request, name, target, deployment, workers, reply, metrics)
            else:
                answer = await _attempt_variant(request, variant, target, deployment, workers, reply, metrics)
        except NotReachedError:
            deployment.mark_down(target)
            give_up_s = min(give_up_s, loop.time() + READY_WAIT_S)
            if loop.time() >= give_up_s:
                raise ApiError.no_ready_worker(model, math.ceil(READY_WAIT_S)) from None
        except NoPlaceError:
            pass
        except NotBegunError as error:
            _log.warning("%s: worker %s %s before it answered", name, target.worker_id, error.reason)
            if failed_before:
                raise error.answer from None
            failed_before = True
        finally:
            deployment.release(target, request.in_flight, variant)
        if answer is not None:  # its slot is free: no request waits, or is late, for the connection's sake
            await answer.finish(_LINGER_S)
            return
        avoid = target.url
        metrics.retried(name)


async def _attempt_variant(
    request: InferenceRequest,
    variant: VariantRequest,
    target: WorkerTarget,
    deployment: Deployment,
    workers: StreamClient,
    reply: Reply,
    metrics: GatewayMetrics,
) -> StreamAnswer:
    """Try one worker once it has loaded the variant; once more if it turns out to have been restarted."""
    residency, admitted = deployment.variants, variant.admitted
    assert residency is not None
    assert admitted is not None
    sent = replace(request, body=with_model(request.body, request.model_span, admitted.engine_name))
    renamed = RenamedReply(reply, admitted)
    its_metrics = metrics.of_variant(admitted.name)
    for _ in range(2):
        epoch = await residency.ready(variant, target.url)
        deployment.record_loaded(target, request.in_flight)
        try:
            name = deployment.route.name
            return await _attempt(sent, name, target, deployment, workers, renamed, its_metrics)
        except _ModelUnknownError:
            residency.forget(target.url, epoch)
    message = f"a worker does not know the variant {admitted.name!r} that it has loaded; try again"
    raise NotBegunError(
        f"does not know {admitted.engine_name}", ApiError(503, message, "variant_lost", retry_after_s=1)
    )


async def _attempt(
    request: InferenceRequest,
    name: str,
    target: WorkerTarget,
    deployment: Deployment,
    workers: StreamClient,
    reply: Reply | RenamedReply,
    metrics: GatewayMetrics | VariantRequestMetrics,
) -> StreamAnswer:
    """Try one worker; the caller finishes what it answered.

    ``max_wait_s`` bounds the longest silence of the worker, not the longest answer.
    """
    silence_s, seen = deployment.max_wait_s, _Seen(deployment, request.in_flight)
    try:
        response = await workers.post(
            origin_of(target.url),
            request.endpoint,
            b"%bX-Request-Id: %b\r\n" % (worker_headers(target.token), request.request_id),
            request.body,
            silence_s=silence_s,
            connect_s=CONNECT_S,
        )
    except TimeoutError as error:
        raise ApiError(504, f"{request.model!r} gave no sign of an answer in time", "upstream_timeout") from error
    except AnswerLostError as error:
        raise NotBegunError(f"failed ({error})", worker_lost(request.model)) from error
    try:
        if response.content_type == b"text/event-stream" and response.status == 200:
            await _relay_stream(request, name, response, silence_s, reply, metrics, seen)
        else:
            await _relay_whole(request, name, response, silence_s, reply, metrics, seen)
    except BaseException:
        response.close()  # ends the worker's side at once; it must not generate without a reader
        raise
    return response


class _Seen:
    """Observer of an answer's progress for admission control, if there is any."""

    __slots__ = ("_admission", "_request")

    def __init__(self, deployment: Deployment, request: InFlightRequest | None) -> None:
        self._request = request
        self._admission = None if request is None else deployment.admission

    def frames(self, data: bytes) -> None:
        """Count each frame as a token: engines send one for each step."""
        if self._admission is not None and self._request is not None:
            frames = data.count(b"\n\n") or data.count(b"\r\n\r\n")
            self._admission.record_tokens(self._request, frames - data.count(b"[DONE]"))

    def whole(self, usage: Usage | None) -> None:
        if self._admission is not None and self._request is not None:
            self._admission.record_end(self._request, usage)


async def _relay_whole(
    request: InferenceRequest,
    name: str,
    response: StreamAnswer,
    silence_s: float,
    reply: Reply | RenamedReply,
    metrics: GatewayMetrics | VariantRequestMetrics,
    seen: _Seen,
) -> None:
    try:
        body = await _read_bounded(response, request.model, silence_s)
    except TimeoutError as error:
        raise ApiError(
            504, f"{request.model!r} stopped in the middle of its answer", "upstream_timeout"
        ) from error
    except AnswerLostError as error:
        raise NotBegunError(f"failed ({error})", worker_lost(request.model)) from error
    status = response.status
    if status in (401, 503):  # 401: not its token, in a route table that is behind
        raise NotBegunError("is not serving", ApiError.no_ready_worker(request.model, math.ceil(READY_WAIT_S)))
    if status == 404 and request.variant is not None:
        raise _ModelUnknownError
    if status == 200:
        usage = usage_of(body)
        metrics.tokens(name, usage)
        seen.whole(usage)
    elif not (400 <= status < 600 and _is_openai_error(body)):
        status = status if 400 <= status < 600 else 502
        message = f"a worker of {request.model!r} answered {response.status}"
        body = error_body(status, message, code="upstream_error")
    await reply.whole(status, body)


async def _read_bounded(response: StreamAnswer, model: str, silence_s: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await response.read(silence_s):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise ApiError(502, f"{model!r} answered more than {_MAX_ANSWER_BYTES} bytes", "answer_too_large")
    return b"".join(parts)


async def _relay_stream(
    request: InferenceRequest,
    name: str,
    response: StreamAnswer,
    silence_s: float,
    reply: Reply | RenamedReply,
    metrics: GatewayMetrics | VariantRequestMetrics,
    seen: _Seen,
) -> None:
    frames = FrameRelay()
    failure = "the worker went away"

    def pass_on(chunk: bytes) -> bool:
        """Pass on whole frames of a stream that has begun, to a client that keeps up, as nearly all do."""
        if not frames.is_plain(chunk) or not reply.piece_now(chunk):
            return False
        frames.note(chunk)
        seen.frames(chunk)
        return True

    try:
        while chunk := await response.read(silence_s, pass_on):
            data = frames.feed(chunk)
            if not data:
                continue
            seen.frames(data)
            if not reply.started:
                metrics.first_token(name, asyncio.get_running_loop().time() - request.arrived_s)
                await reply.begin_stream(200, b"text/event-stream; charset=utf-8")
            await reply.piece(data)
            if b"[DONE]" in data and frames.is_done:  # complete, whatever the connection does now
                break
    except TimeoutError:
        failure = "the worker fell silent"
    except AnswerLostError:
        failure = "the connection to the worker broke"
    except asyncio.CancelledError:
        if reply.started:  # of use when the gateway itself is being stopped; a client that left reads nothing
            await _cut(frames, request, name, "the gateway is shutting down", reply, metrics)
        raise
    if not reply.started:
        raise NotBegunError("ended the stream", worker_lost(request.model))
    usage = frames.usage() if request.wants_usage else None
    metrics.tokens(name, usage)
    if frames.is_done:
        seen.whole(usage)
        await reply.end()
    elif frames.ended_in_error:
        metrics.cut(name)
        await reply.end()
    else:
        _log.warning("%s: a stream was cut: %s", name, failure)
        response.close()
        await _cut(frames, request, name, failure, reply, metrics)


async def _cut(
    frames: FrameRelay,
    request: InferenceRequest,
    name: str,
    failure: str,
    reply: Reply | RenamedReply,
    metrics: GatewayMetrics | VariantRequestMetrics,
) -> None:
    metrics.cut(name)
    message = f"{failure} before the answer of {request.model!r} was complete; send the request again"
    await reply.piece(error_frame(message, code="stream_cut", after_broken_frame=frames.broken_frame))
    await reply.end()


def _is_openai_error(body: bytes) -> bool:
    try:
        return "error" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
