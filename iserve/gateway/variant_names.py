"""Names of LoRA variants on their way: public to clients, with the content's hash to workers.

A request's body is not re-serialised: the bytes of its ``model`` value are replaced. Of an answer the exact bytes
``"model":"ENGINE_NAME"`` are replaced, with or without a space; no JSON string has them, as its quotes are
escaped. In an error each mention of the engine name is replaced.
"""

from __future__ import annotations

import msgspec

from iserve.gateway.errors import ApiError
from iserve.gateway.reply import Reply
from iserve.route_table import VariantRoute

__all__ = ["RenamedReply", "model_span", "with_model"]


class _Model(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


def model_span(body: bytes) -> tuple[int, int]:
    """Return where the value of the top-level ``model`` begins and ends.

    Takes two parses and a few copies of the body, whatever is in it: other requests wait meanwhile.

    Args:
        body: valid JSON, an object with a ``model`` (``request_body.parse_head``).

    Raises:
        ApiError: 400 the object has ``model`` twice.
    """
    text = bytearray(body)
    value = memoryview(_decode(text).model)
    begin = _begin(value, text)
    text[:] = body
    # The last letter of the key, or the last digit of its escape: the key has another name then.
    text[body.rindex(b'"', 0, body.rindex(b":", 0, begin)) - 1] = ord("0")
    if bytes(_decode(text).model):
        raise ApiError(400, "'model' is given twice; give it once", "invalid_value", "model")
    return begin, begin + len(value)


def _begin(view: memoryview, text: bytearray) -> int:
    """Return where ``view``, a part of ``text``, begins; overwrites ``text``.

    The parser passes a value as a view of what it parses, and does not say where that is. What is written to one
    half of ``text`` changes the view, or it begins in the other half.
    """
    first, last = 0, len(text)
    while last - first > 1:
        middle, mark = (first + last) // 2, view[0] ^ 1
        text[first:middle] = bytes((mark,)) * (middle - first)
        if view[0] == mark:
            last = middle
        else:
            first = middle
    return first


def with_model(body: bytes, span: tuple[int, int], name: str) -> bytes:
    """Return ``body`` with another ``model``."""
    return b"%b%b%b" % (body[: span[0]], msgspec.json.encode(name), body[span[1] :])


class RenamedReply:
    """``reply`` for one attempt at a variant's request: the engine name becomes the public name on its way out.

    Takes the place of ``reply`` in ``proxy.forward``, so that requests of the base do without it.
    """

    __slots__ = ("_fields", "_names", "_reply")

    def __init__(self, reply: Reply, variant: VariantRoute) -> None:
        self._reply = reply
        engine, public = msgspec.json.encode(variant.engine_name), msgspec.json.encode(variant.name)
        self._fields = tuple((key + engine, key + public) for key in (b'"model":', b'"model": '))
        self._names = engine[1:-1], public[1:-1]

    @property
    def started(self) -> bool:
        return self._reply.started

    async def whole(self, status: int, body: bytes) -> None:
        body = self._of_answer(body) if status < 400 else body.replace(*self._names)
        await self._reply.whole(status, body)

    async def begin_stream(self, status: int, content_type: bytes) -> None:
        await self._reply.begin_stream(status, content_type)

    async def piece(self, data: bytes) -> None:
        await self._reply.piece(self._of_frames(data))

    def piece_now(self, data: bytes) -> bool:
        return self._reply.piece_now(self._of_frames(data))

    async def end(self) -> None:
        await self._reply.end()

    def _of_answer(self, data: bytes) -> bytes:
        for engine, public in self._fields:
            data = data.replace(engine, public)
        return data

    def _of_frames(self, data: bytes) -> bytes:
        """Return whole frames renamed."""
        data = self._of_answer(data)
        if b'{"error"' in data:  # in no string: its quote would be escaped
            lines = data.split(b"\n")
            data = b"\n".join(line.replace(*self._names) if b'{"error"' in line else line for line in lines)
        return data


_decode = msgspec.json.Decoder(_Model).decode
