"""Content of one event of an OpenAI stream: whether it brings tokens, ends the answer, counts or fails. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fingerprint.errors import BadInputError

__all__ = ["Piece", "error_code", "error_words", "read_piece"]

_MAX_WORDS = 300


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_token(self) -> bool:
        """Empty text is a token too, of which the characters are not complete or are special.

        Not so the opening of a chat, which has a role, and a closing piece, which has a reason.
        """
        delta = self.delta
        if delta is None:
            return bool(self.text) or self.finish_reason is None
        if delta.content or delta.reasoning or delta.reasoning_content:
            return True
        return delta.content is not None and delta.role is None and self.finish_reason is None


class Piece(msgspec.Struct, gc=False):
    """Chunk of an answer, of one choice at most. ``error`` where the server says instead that it failed."""

    choices: list[_Choice] = []  # msgspec copies it
    usage: _Usage | None = None
    error: Any = None


_decode_piece = msgspec.json.Decoder(Piece).decode


def read_piece(data: bytes) -> Piece:
    """Return the data of one event.

    Raises:
        BadInputError: no chunk of an OpenAI stream.
    """
    try:
        return _decode_piece(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(f"{data[:80]!r} is no chunk of an answer: {error}") from error


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any] | str


def error_code(body: bytes) -> str | None:
    """Return ``code`` of an OpenAI error's body; None: it has none, or is none."""
    error = _error_of(body)
    return error.get("code") if isinstance(error, dict) else None


def error_words(error: bytes | Any) -> str:
    """Return the message in an error's body, or in the error of a frame; else the beginning of it."""
    error = _error_of(error) if isinstance(error, bytes) else error
    text = " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 1] + "…"


def _error_of(body: bytes) -> dict[str, Any] | str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:_MAX_WORDS].decode(errors="replace")
