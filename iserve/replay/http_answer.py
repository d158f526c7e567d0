"""Parser of one HTTP/1.1 answer and the server-sent events in it. Pure; every buffer has a bound.

Not a library's parser: with thousands of streams of small chunks, what the usual clients put around theirs (a
future and a task's turn for each chunk) costs more than the parsing and makes the sender late (docs/replay.md).
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["EventLines", "HttpAnswer", "MalformedError"]

MAX_HEAD_BYTES = 64 * 2**10  # of a status line with its headers; of a chunk's size line; of the trailers
MAX_EVENT_BYTES = 256 * 2**10  # of one event, and of a line without an end
_SMALL_SIZES = {b"%x" % size: size for size in range(1, 2**12)}
_HEX = frozenset(b"0123456789abcdefABCDEF")
_MAX_HEX_DIGITS = 12


class MalformedError(Exception):
    """The bytes are not what they should be; nothing after them can be trusted."""


class _Part(Enum):
    HEAD = auto()
    COUNTED = auto()  # a body of known length
    UNTIL_CLOSE = auto()
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    COMPLETE = auto()


class HttpAnswer:
    """Fed with what the connection gives, hands out the body."""

    __slots__ = ("_held", "_held_total", "_left", "_part", "content_type", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0  # 0: not known yet
        self.content_type = ""
        self.keep_alive = True  # the connection can carry another request once this answer is complete
        self._part = _Part.HEAD
        self._held = bytearray()
        self._held_total = 0
        self._left = 0

    @property
    def complete(self) -> bool:
        return self._part is _Part.COMPLETE

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in ``data``.

        Raises:
            MalformedError: not HTTP/1.1, or a line without an end.
        """
        if self._part is _Part.HEAD:
            data = self._head(data)
        if self._part is _Part.UNTIL_CLOSE:
            return data
        if self._part is _Part.COUNTED:
            return self._counted(data)
        if self._part is _Part.COMPLETE:
            if data:
                self.keep_alive = False  # unasked-for bytes
            return b""
        return b"" if self._part is _Part.HEAD else self._chunks(data)

    def end(self) -> None:
        """Note that the connection is closed.

        Raises:
            MalformedError: in the middle of the answer.
        """
        if self._part is _Part.UNTIL_CLOSE:
            self._part = _Part.COMPLETE
        if self._part is not _Part.COMPLETE:
            raise MalformedError("the connection ended in the middle of the answer")

    def _head(self, data: bytes) -> bytes:
        """Return the bytes after the head, once it is complete. An interim answer (1xx) is skipped."""
        self._held += data
        while True:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                if len(self._held) > MAX_HEAD_BYTES:
                    raise MalformedError(f"a head of more than {MAX_HEAD_BYTES} bytes")
                return b""
            head, rest = bytes(self._held[:end]), bytes(self._held[end + 4 :])
            self._held.clear()
            status, headers = _parse_head(head)
            if status >= 200:
                break
            self._held += rest
        self.status = status
        self.content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        self.keep_alive = head.startswith(b"HTTP/1.1") and b"close" not in headers.get(b"connection", b"").lower()
        self._begin_body(headers)
        return rest

    def _begin_body(self, headers: dict[bytes, bytes]) -> None:
        if self.status in (204, 304):
            self._part = _Part.COMPLETE
        elif headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._part = _Part.CHUNK_SIZE
        elif (length := headers.get(b"content-length")) is not None:
            if not length.isdigit():
                raise MalformedError(f"a content-length of {length[:40]!r}")
            self._left = int(length)
            self._part = _Part.COUNTED if self._left else _Part.COMPLETE
        else:
            self.keep_alive = False
            self._part = _Part.UNTIL_CLOSE

    def _counted(self, data: bytes) -> bytes:
        if len(data) > self._left:
            self.keep_alive = False
            data = data[: self._left]
        self._left -= len(data)
        if not self._left:
            self._part = _Part.COMPLETE
        return data

    def _chunks(self, data: bytes) -> bytes:
        body: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._part is _Part.CHUNK_SIZE and not self._held:  # nearly always: a whole chunk
                end = data.find(b"\r\n", at, at + 8)
                stop = end + 2 + _SMALL_SIZES.get(data[at:end], size)
                if end > 0 and data[stop : stop + 2] == b"\r\n":
                    body.append(data[end + 2 : stop])
                    at = stop + 2
                    continue
            if self._part is _Part.CHUNK:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._part = _Part.CHUNK_END
                continue
            if self._part is _Part.COMPLETE:
                self.keep_alive = False
                break
            end = data.find(b"\n", at)
            line = data[at:] if end < 0 else data[at:end]
            if end < 0 or self._held:
                self._hold(line)
                if end < 0:
                    break
                line = bytes(self._held)
                self._held.clear()
            at = end + 1
            self._line(line.removesuffix(b"\r"))
        return body[0] if len(body) == 1 else b"".join(body)

    def _hold(self, line: bytes) -> None:
        self._held += line
        if len(self._held) > MAX_HEAD_BYTES:
            raise MalformedError(f"a chunk's size line of more than {MAX_HEAD_BYTES} bytes")

    def _line(self, line: bytes) -> None:
        """Take a line between chunks."""
        if self._part is _Part.CHUNK_END:
            if line:
                raise MalformedError(f"a chunk is longer than it said, by {line[:40]!r}")
            self._part = _Part.CHUNK_SIZE
        elif self._part is _Part.TRAILERS:
            self._held_total += len(line)
            if self._held_total > MAX_HEAD_BYTES:
                raise MalformedError(f"trailers of more than {MAX_HEAD_BYTES} bytes")
            if not line:
                self._part = _Part.COMPLETE
        else:
            digits = line.partition(b";")[0].strip()
            if not 0 < len(digits) <= _MAX_HEX_DIGITS or not _HEX.issuperset(digits):
                raise MalformedError(f"{line[:40]!r} is no chunk's size")
            self._left = int(digits, 16)
            self._part = _Part.CHUNK if self._left else _Part.TRAILERS


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Return status and headers; a header given twice keeps its last value."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit() or int(code) < 100:
        raise MalformedError(f"{first[:80]!r} is no HTTP/1.1 answer")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise MalformedError(f"{line[:80]!r} is no header")
        headers[name.strip().lower()] = value.strip()
    return int(code), headers


class EventLines:
    """Cuts the body of an event stream into the data of its events."""

    __slots__ = ("_data", "_data_bytes", "_held")

    def __init__(self) -> None:
        self._held = bytearray()  # a line without its end
        self._data: list[bytes] = []  # lines of an event without its end
        self._data_bytes = 0

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that ``body`` completes.

        Raises:
            MalformedError: a line of no known kind, or an event of more than ``MAX_EVENT_BYTES``.
        """
        if not self._held and not self._data and body[-2:] == b"\n\n" and body[:6] == b"data: ":
            only = body[6:-2]
            if b"\n" not in only and b"\r" not in only:  # nearly always: one whole event
                return [only]
        found: list[bytes] = []
        *lines, rest = body.split(b"\n")
        for line in lines:
            if self._held:
                self._held += line
                line = bytes(self._held)
                self._held.clear()
            self._line(line.removesuffix(b"\r"), found)
        self._held += rest
        if len(self._held) > MAX_EVENT_BYTES:
            raise MalformedError(f"a line of more than {MAX_EVENT_BYTES} bytes in the event stream")
        return found

    def _line(self, line: bytes, found: list[bytes]) -> None:
        if not line:
            if self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._data_bytes += len(line)
            if self._data_bytes > MAX_EVENT_BYTES:
                raise MalformedError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise MalformedError(f"{line[:80]!r} is no line of an event stream")
