"""Limits of a request: size, speed and depth. Reads and checks a body; forwards nothing.

The body is never re-serialised: the few fields that routing needs are looked at, the bytes go on as they arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from iserve.gateway.errors import ApiError

__all__ = [
    "BODY_TIMEOUT_S",
    "MAX_HEADER_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_PROMPTS",
    "BodyBudget",
    "ClientGoneError",
    "RequestHead",
    "check_headers",
    "num_prompts",
    "parse_head",
    "read_body",
    "too_deep",
]

MAX_HEADER_BYTES = 64 * 2**10
MAX_JSON_DEPTH = 64
MAX_PROMPTS = 128  # of one request, or answers to them: each takes a place in a batch
BODY_TIMEOUT_S = 10.0
_MIN_BODY_BYTES_PER_S = 64 * 2**10  # a body that keeps this pace may take longer than BODY_TIMEOUT_S
_MAX_CONTAINERS = 100_000  # objects and arrays of one body; bounds the work of the depth scan
_MAX_STRINGS = 1_000_000

Receive = Callable[[], Awaitable[Any]]
Headers = Iterable[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """Error: the client left before its request was complete. Not an answer: there is no client to read one."""


class RequestHead(msgspec.Struct):
    """The fields of an inference request that routing looks at; raw, as the client sent them."""

    model: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    n: Any = None
    best_of: Any = None
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None

    @property
    def longest_answer(self) -> int | None:
        """Tokens, where the client says a number; whether that can be is for the worker to say."""
        told = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return told if type(told) is int and told > 0 else None


class BodyBudget:
    """Bytes of request bodies that the whole gateway holds at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self.max_bytes:
            raise ApiError(
                503,
                f"requests in flight hold {self.held_bytes} bytes of {self.max_bytes}; try again soon",
                "overloaded",
                retry_after_s=1,
            )
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def check_headers(headers: Headers) -> None:
    """Bound all header bytes together; the HTTP parser bounds only what it has to hold unparsed."""
    total = sum(len(name) + len(value) for name, value in headers)
    if total > MAX_HEADER_BYTES:
        raise ApiError(431, f"the headers have {total} bytes, more than {MAX_HEADER_BYTES}", "headers_too_large")


def check_content_type(headers: Headers) -> None:
    """Refuse all but application/json: a web page can send only other types unasked to a loopback address."""
    for name, value in headers:
        if name == b"content-type" and value.split(b";")[0].strip().lower() == b"application/json":
            return
    raise ApiError(415, "send the body as 'Content-Type: application/json'", "unsupported_media_type")


async def read_body(receive: Receive, headers: Headers, *, max_body_bytes: int, budget: BodyBudget) -> bytes:
    """Return the whole body, counted as it arrives.

    The caller gives its length back to ``budget`` when done with it.

    Raises:
        ApiError: 413 larger than ``max_body_bytes`` (said or counted), 408 slower than ``BODY_TIMEOUT_S`` allows.
        ClientGoneError: the client left.
    """
    check_content_type(headers)
    for name, value in headers:
        if name == b"content-length" and int(value) > max_body_bytes:  # digits only: llhttp has checked
            raise _too_large(int(value), max_body_bytes)
    parts: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout_at(started + BODY_TIMEOUT_S) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                if size + len(part) > max_body_bytes:
                    raise _too_large(size + len(part), max_body_bytes)
                budget.take(len(part))
                size += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts) if len(parts) > 1 else part
                limit.reschedule(started + BODY_TIMEOUT_S + size / _MIN_BODY_BYTES_PER_S)
    except TimeoutError:
        budget.give_back(size)
        waited = loop.time() - started
        raise ApiError(
            408, f"{size} bytes of the body came in {waited:.0f} s; send it faster", "body_timeout"
        ) from None
    except BaseException:
        budget.give_back(size)
        raise


def parse_head(body: bytes) -> RequestHead:
    """Return the routing fields of a body, which is checked to be one JSON object, not too deep.

    Raises:
        ApiError: 400 with ``param`` where one field is at fault.
    """
    try:
        head = _decode_head(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}", "invalid_json") from None
    if too_deep(body, MAX_JSON_DEPTH):
        raise ApiError(
            400, f"the body nests deeper than {MAX_JSON_DEPTH} levels or has too many parts", "json_too_complex"
        )
    if not isinstance(head.model, str):
        what = "is missing" if head.model is None else f"must be a string, got {type(head.model).__name__}"
        raise ApiError(400, f"'model' {what}", "invalid_value", "model")
    if not (head.stream is None or isinstance(head.stream, bool)):
        raise ApiError(400, "'stream' must be true or false", "invalid_value", "stream")
    if not (head.stream_options is None or isinstance(head.stream_options, dict)):
        raise ApiError(400, "'stream_options' must be an object", "invalid_value", "stream_options")
    if (prompts := num_prompts(head.prompt)) > MAX_PROMPTS:
        message = f"'prompt' has {prompts} prompts; send at most {MAX_PROMPTS} in a request"
        raise ApiError(400, message, "too_many_prompts", "prompt")
    _check_answers(head, prompts)
    return head


def _check_answers(head: RequestHead, prompts: int) -> None:
    for name, answers in (("n", head.n), ("best_of", head.best_of)):
        if answers is None:
            continue
        if type(answers) is not int:  # a worker might take "9999", or 9999.0, for a number
            raise ApiError(400, f"{name!r} must be a whole number", "invalid_value", name)
        if prompts * answers > MAX_PROMPTS:
            message = (
                f"{name!r} asks for {answers} answers to {prompts} prompts; send for at most {MAX_PROMPTS} in all"
            )
            raise ApiError(400, message, "too_many_answers", name)


def num_prompts(prompt: msgspec.Raw) -> int:
    """Return the number of prompts in the valid JSON of ``prompt``: a text, a list of token ids, or a list of
    either.

    Only C loops over it, and nothing is built of it: a body has room for millions of empty prompts.
    """
    if bytes(memoryview(prompt)[:1]) != b"[":
        return 1
    unescaped = bytes(prompt).replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = unescaped.count(b'"') // 2
    if texts > MAX_PROMPTS:
        return texts
    token_lists = b"".join(unescaped.split(b'"')[::2]).count(b"[") - 1
    return max(1, texts + token_lists)


def too_deep(body: bytes, max_depth: int) -> bool:
    """Return whether valid JSON nests deeper than ``max_depth``, or has more parts than is worth counting.

    Only C loops over the body: brackets inside strings are dropped, then one level of brackets is peeled off
    at a time, at most ``max_depth`` times.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * _MAX_STRINGS:
        return True
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_strings.translate(_SAME_BRACKETS, _NOT_BRACKETS)
    if len(brackets) > 2 * _MAX_CONTAINERS:
        return True
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _too_large(num_bytes: int, max_body_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body has {num_bytes} bytes or more; the limit is {max_body_bytes}", "body_too_large"
    )


_decode_head = msgspec.json.Decoder(RequestHead).decode
_SAME_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
