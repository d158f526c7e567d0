"""Answer to one request as it arrives: the times of its tokens, and how it ended.

Pure: the clock is the caller's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from fingerprint.errors import BadInputError
from iserve.replay.stream_events import error_code, error_words, read_piece
from iserve.sse import FrameBuffer, event_data
from traces.outcomes import Failure

__all__ = ["MAX_EVENT_BYTES", "InflightRequest"]

MAX_EVENT_BYTES = 256 * 2**10
_MAX_REFUSAL_BYTES = 64 * 2**10
_WOULD_BE_LATE = "would_be_late"  # how iServe's gateway says it
_SPARE_PIECES = 1000  # what an answer may have beyond two pieces for each token asked


class InflightRequest:
    """A request that was sent. ``first_s`` and ``last_s`` are 0 until they are known."""

    def __init__(self, row: int, asked_tokens: int, on_end: Callable[[InflightRequest], None]) -> None:
        self.row = row
        self.first_s = self.last_s = 0.0
        self.gaps = array("f")
        self.pieces = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.failure, self.message = Failure.NONE, ""
        self.done = False  # the server said that the answer is complete
        self.over = False  # the outcome is known, whatever the connection does
        self._on_end = on_end
        self._most_pieces = 2 * asked_tokens + _SPARE_PIECES
        self._status = 0  # 0: not known yet
        self._frames = FrameBuffer(MAX_EVENT_BYTES)
        self._refusal = bytearray()
        self._finished_s = 0.0

    def started(self, status: int, content_type: bytes) -> None:
        """Note the head of the answer."""
        self._status = status
        if status == 200 and content_type != b"text/event-stream":
            kind = content_type.decode("latin-1") or "nothing known"
            self.fail(Failure.MALFORMED, f"answered {kind} where a stream was asked for")

    def feed(self, body: bytes, now_s: float) -> None:
        """Process a part of the answer's body that arrived at ``now_s``."""
        if self.over:
            return
        if self._status != 200:
            self._refusal += body[: _MAX_REFUSAL_BYTES - len(self._refusal)]
            if len(self._refusal) >= _MAX_REFUSAL_BYTES:
                self._refused()
            return
        try:
            self._stream(body, now_s)
        except BadInputError as error:
            self.fail(Failure.MALFORMED, str(error))

    def ended(self) -> None:
        """Note that the answer is complete."""
        if self._status == 200:
            self.fail(Failure.CONNECTION_LOST, "the answer ended without [DONE]")
        elif not self.over:
            self._refused()

    def lost(self, error: Exception) -> None:
        """Note that the connection is gone."""
        where = "in the middle of the answer" if self._status else "before an answer"
        self.fail(Failure.CONNECTION_LOST, f"the connection ended {where}: {error}")

    def fail(self, failure: Failure, message: str) -> None:
        if not self.over:
            self.failure, self.message = failure, message
            self._end()

    def _stream(self, body: bytes, now_s: float) -> None:
        frames = self._frames.feed(body)
        if self._frames.broken_frame:
            kind = "an event" if b"\n" in frames else "a line"
            raise BadInputError(f"{kind} of more than {MAX_EVENT_BYTES} bytes in the event stream")
        for data in event_data(frames):
            if data == b"[DONE]":
                self._finish()
            else:
                self._piece(data, now_s)
            if self.over:
                return

    def _piece(self, data: bytes, now_s: float) -> None:
        piece = read_piece(data)
        if piece.error is not None:
            self.fail(Failure.ERROR_FRAME, error_words(piece.error))
            return
        if piece.usage is not None:
            self.prompt_tokens, self.completion_tokens = piece.usage.prompt_tokens, piece.usage.completion_tokens
        if not piece.choices:
            return
        choice = piece.choices[0]
        if choice.brings_token:
            if self.pieces:
                self.gaps.append(now_s - self.last_s)
            else:
                self.first_s = now_s
            self.last_s = now_s
            self.pieces += 1
            if self.pieces > self._most_pieces:
                raise BadInputError(f"more than {self._most_pieces} pieces, the answer does not end")
        elif choice.finish_reason is not None:
            self._finished_s = now_s

    def _finish(self) -> None:
        self.done = True
        if (
            self._finished_s and self.pieces < self.completion_tokens
        ):  # the closing piece held a token without text
            if self.pieces:
                self.gaps.append(self._finished_s - self.last_s)
            self.first_s = self.first_s or self._finished_s
            self.last_s = self._finished_s
            self.pieces += 1
        if not self.pieces:
            self.fail(Failure.NO_TOKENS, "an answer without tokens")
        else:
            self._end()

    def _refused(self) -> None:
        status = self._status
        kind = (
            Failure.RATE_LIMITED
            if status == 429
            else Failure.TOO_LATE
            if status == 503 and error_code(bytes(self._refusal)) == _WOULD_BE_LATE
            else Failure.SERVER_ERROR
            if status >= 500
            else Failure.BAD_REQUEST
            if status >= 400
            else Failure.MALFORMED
        )
        self.done = True  # the connection is as good as before
        self.fail(kind, f"{status} {error_words(bytes(self._refusal))}".strip())

    def _end(self) -> None:
        self.over = True
        self._on_end(self)
