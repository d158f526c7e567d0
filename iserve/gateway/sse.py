"""Server-sent events as they pass through: whole frames only, and what the last ones said.

Only whole frames are passed on, so that a stream cut in the middle of one can still end in a well-formed error.
"""

from __future__ import annotations

from collections import deque

import msgspec

from iserve.gateway.errors import error_body

__all__ = ["FrameBuffer", "Usage", "error_frame", "usage_of"]

_ENDS = (b"\n\n", b"\r\n\r\n")
_MAX_HELD_BYTES = 2**20  # of a frame still incomplete; a longer one is passed on in pieces
_TAIL_BYTES = 16 * 2**10  # what is kept of the past: the usage chunk and [DONE] are far smaller


class Usage(msgspec.Struct):
    """Token counts as the worker gives them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: Usage | None = None


class FrameBuffer:
    """Cuts a byte stream at frame ends, and remembers its tail."""

    def __init__(self) -> None:
        self._held = b""  # the beginning of a frame whose end has not arrived
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.broken_frame = False  # a piece of an overlong frame was passed on without its end

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; return those that may go on now; empty while no frame is complete."""
        data = self._held + chunk if self._held else chunk
        if data.endswith(_ENDS):
            self._held, self.broken_frame = b"", False
        else:
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            if end > 3:  # rfind gives -1: 1 and 3 mean none
                data, self._held, self.broken_frame = data[:end], data[end:], False
            elif len(data) > _MAX_HELD_BYTES:
                self._held, self.broken_frame = b"", True
            else:
                self._held = data
                return b""
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        return data

    def is_plain(self, chunk: bytes) -> bool:
        """Return whether ``feed`` would give it back as it is, and the stream cannot end with it."""
        return not self._held and chunk.endswith(_ENDS) and b"[DONE]" not in chunk

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
