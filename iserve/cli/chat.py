"""Conversation with a deployment, streamed from the OpenAI API with the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import TextIO
from urllib.parse import urlsplit

from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from fingerprint.errors import BadInputError, NotFoundError, UnavailableError
from iserve.replay.stream_events import error_words, read_piece
from iserve.sse import FrameBuffer, event_data

__all__ = ["ChatLine", "needs_key"]

_MAX_EVENT_BYTES = 1 << 20
_LOOK_S = 5.0


class ChatLine:
    """Messages go to ``name`` at ``url``; each is a conversation of its own."""

    def __init__(
        self, url: str, name: str, *, key: str | None, max_tokens: int | None, temperature: float
    ) -> None:
        self._url, self._name, self._key = urlsplit(url), name, key
        self._max_tokens, self._temperature = max_tokens, temperature

    def say(self, message: str, out: TextIO) -> None:
        """Print the answer as it arrives.

        Raises:
            NotFoundError, BadInputError, UnavailableError: what the endpoint said.
        """
        for piece in self._answer(message):
            out.write(piece)
            out.flush()
        out.write("\n")

    def _answer(self, message: str) -> Iterator[str]:
        body: dict[str, object] = {
            "model": self._name,
            "messages": [{"role": "user", "content": message}],
            "stream": True,
            "temperature": self._temperature,
        }
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        headers = {"Content-Type": "application/json"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise BadInputError("the API key (--key, OPENAI_API_KEY) holds characters that no key has")
            headers["Authorization"] = f"Bearer {self._key}"
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port or 80, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _failure(response.status, response.read(_MAX_EVENT_BYTES))
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"the gateway at {self._url.geturl()} does not answer: {error}") from error
        finally:
            connection.close()


def needs_key(url: str, key: str | None) -> bool:
    """Return True if the gateway at ``url`` refuses ``key``, or a request without one; False while it is away."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return exchange(url, "GET", "/v1/models", headers=headers, timeout_s=_LOOK_S, max_bytes=1)[0] == 401
    except (*EXCHANGE_ERRORS, ValueError):  # ValueError: a key that no header can hold
        return False


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    frames = FrameBuffer(_MAX_EVENT_BYTES)
    try:
        while (chunk := response.read1(_MAX_EVENT_BYTES)) and not frames.broken_frame:
            for data in event_data(frames.feed(chunk)):
                if data == b"[DONE]":
                    return
                piece = read_piece(data)
                if piece.error is not None:
                    raise UnavailableError(f"the answer was cut: {error_words(piece.error)}")
                yield "".join(choice.delta.content or "" for choice in piece.choices if choice.delta)
    except BadInputError as error:
        raise UnavailableError(f"the answer was cut: {error}") from error
    raise UnavailableError("the answer was cut without a word")


def _failure(status: int, answer: bytes) -> BadInputError | UnavailableError:
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {status}"
    if status == 404:
        return NotFoundError(message)
    if status == 401:
        return BadInputError(f"{message}; give it with --key or in OPENAI_API_KEY")
    return UnavailableError(message) if status >= 500 or status == 429 else BadInputError(message)
