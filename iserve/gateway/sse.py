"""Server-sent events as they pass through: whole frames only, and what the last ones said.

Only whole frames are passed on, so that a stream cut in the middle of one can still end in a well-formed error.
"""

from __future__ import annotations

from collections import deque

import msgspec

from iserve.gateway.errors import error_body
from iserve.sse import FrameBuffer

__all__ = ["FrameRelay", "Usage", "error_frame", "usage_of"]

_TAIL_BYTES = 16 * 2**10  # what is kept of the past: the usage chunk and [DONE] are far smaller


class Usage(msgspec.Struct):
    """Token counts as the worker gives them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: Usage | None = None


class FrameRelay(FrameBuffer):
    """Frames on their way to a client; remembers the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        if data := super().feed(chunk):
            self.note(data)
        return data

    def note(self, data: bytes) -> None:
        """Remember what was passed on."""
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def is_done(self) -> bool:
        """True when the stream said that it is complete."""
        return self._last_data() == b"[DONE]"

    @property
    def ended_in_error(self) -> bool:
        """True when the worker itself put an error frame last."""
        return self._last_data().startswith(b'{"error"')

    def usage(self) -> Usage | None:
        """Return token counts of the last frame that has them."""
        for line in reversed(b"".join(self._tail).splitlines()):
            if line.startswith(b"data:") and b'"usage"' in line:
                usage = usage_of(line[5:])
                if usage is not None:
                    return usage
        return None

    def _last_data(self) -> bytes:
        if not self._tail:
            return b""
        line = self._tail[-1].rstrip().rpartition(b"\n")[2]
        return line[5:].strip() if line.startswith(b"data:") else b""


def usage_of(answer: bytes) -> Usage | None:
    """Return the ``usage`` of a completion body or chunk; None when it has none or is no JSON."""
    try:
        return _decode_answer(answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def error_frame(message: str, *, code: str, after_broken_frame: bool = False) -> bytes:
    """Return the last frame of a stream that could not be finished."""
    return (b"\n\n" if after_broken_frame else b"") + b"data: " + error_body(500, message, code=code) + b"\n\n"


_decode_answer = msgspec.json.Decoder(_Answer).decode
