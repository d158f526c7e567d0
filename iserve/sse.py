"""Server-sent events as they arrive: whole frames cut from a byte stream, and the data of their events. Pure."""

from __future__ import annotations

from fingerprint.errors import BadInputError

__all__ = ["FrameBuffer", "event_data"]

_ENDS = (b"\n\n", b"\r\n\r\n")
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")


class FrameBuffer:
    """Cuts a byte stream at frame ends; holds at most ``max_held_bytes`` of a frame that is incomplete."""

    def __init__(self, max_held_bytes: int = 2**20) -> None:
        self._held = bytearray()  # the beginning of a frame whose end has not arrived
        self._max_held_bytes = max_held_bytes
        self.broken_frame = False  # a piece of an overlong frame was passed on without its end

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; return those that may go on now; empty while no frame is complete."""
        if not self._held and chunk.endswith(_ENDS):  # nearly always
            self.broken_frame = False
            return chunk
        first = max(0, len(self._held) - 3)  # an end may begin in what is held
        self._held += chunk
        end = max(self._held.rfind(b"\n\n", first) + 2, self._held.rfind(b"\r\n\r\n", first) + 4)
        if end > 3:  # rfind gives -1: 1 and 3 mean none
            self.broken_frame = False
        elif len(self._held) > self._max_held_bytes:
            end, self.broken_frame = len(self._held), True
        else:
            return b""
        data = bytes(self._held[:end])
        del self._held[:end]
        return data

    def is_plain(self, chunk: bytes) -> bool:
        """Return whether ``feed`` would give it back as it is, and the stream cannot end with it."""
        return not (self._held or self.broken_frame) and chunk.endswith(_ENDS) and b"[DONE]" not in chunk


def event_data(frames: bytes) -> list[bytes]:
    """Return the data of each event in whole ``frames``.

    Raises:
        BadInputError: a line of no known kind.
    """
    if frames.startswith(b"data: ") and frames.find(b"\n") == len(frames) - 2 and b"\r" not in frames:
        return [frames[6:-2]]  # nearly always: one event of one line
    found, lines = [], []
    for line in frames.split(b"\n"):
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line and not line.startswith(_OTHER_FIELDS):
            raise BadInputError(f"{line[:80]!r} is no line of an event stream")
        elif lines and not line:
            found.append(b"\n".join(lines))
            lines.clear()
    return found
