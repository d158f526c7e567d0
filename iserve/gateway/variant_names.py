"""Names of LoRA variants on their way: public to clients, with the content's hash to workers.

A request's body is not re-serialised: the bytes of its ``model`` value are replaced. Of an answer the exact bytes
``"model":"ENGINE_NAME"`` are replaced, with or without a space; no JSON string has them, as its quotes are
escaped. In an error each mention of the engine name is replaced.
"""

from __future__ import annotations

import re
from itertools import islice

import msgspec

from iserve.gateway.errors import ApiError
from iserve.gateway.reply import Reply
from iserve.route_table import VariantRoute

__all__ = ["RenamedReply", "model_span", "with_model"]

_MAX_KEYS = 10_000  # of that name, at any depth of a body; each is looked at
# The key as any JSON writer may put it. A quote that no backslash precedes begins or ends a string, and after an
# end no text follows: a match is a key, never a part of a string. It begins with the quote itself, for which a
# large body is searched many times faster than for what precedes one.
_KEY = re.compile(
    rb'"(?<!\\")(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(l|\\u006[cC])"'
    rb"[ \t\r\n]*:[ \t\r\n]*"
)


class _Model(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


def model_span(body: bytes) -> tuple[int, int]:
    """Return where the value of the top-level ``model`` begins and ends.

    Args:
        body: valid JSON, an object with a ``model`` (``request_body.parse_head``).

    Raises:
        ApiError: 400 the object has ``model`` twice, or too many of its parts have one.
    """
    keys = list(islice(_KEY.finditer(body), _MAX_KEYS + 1))
    if len(keys) > _MAX_KEYS:
        raise ApiError(400, f"the body has more than {_MAX_KEYS} keys named 'model'", "json_too_complex", "model")
    first, last = 0, len(keys)
    while last - first > 1:  # parts of the body have a "model" as well: halve them until the top-level one is left
        middle = (first + last) // 2
        if not _model_without(body, keys[first:middle]):
            last = middle
        else:
            first = middle
    if len(keys) > 1 and _model_without(body, keys[first:last]):
        raise ApiError(400, "'model' is given twice; give it once", "invalid_value", "model")
    begin = keys[first].end()
    return begin, begin + len(_model_without(body, []))


def _model_without(body: bytes, keys: list[re.Match[bytes]]) -> bytes:
    """Return the object's ``model`` as it would be if ``keys`` were of another name; empty: it has none then."""
    if keys:
        renamed = bytearray(body)
        for key in keys:
            renamed[key.end(1) - 1] = ord("0")  # the last letter, or the last digit of its escape
        body = bytes(renamed)
    return bytes(_decode(body).model)


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
