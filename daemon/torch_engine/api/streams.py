"""From the engine's thread to asyncio: events of a group of sequences as one async iterator, and their text.

Knows the engine and text, not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from daemon.torch_engine.api.tokenizer import Detokenizer, StopMatcher, TextCodec
from daemon.torch_engine.runtime.engine import Engine
from daemon.torch_engine.runtime.scoring import TokenScore
from daemon.torch_engine.runtime.sequences import Finish, SequenceRequest, TokenEvent

__all__ = ["Choice", "Streams"]


class Streams:
    """Hands each event of the engine to the asyncio task that waits for it. One per event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[int, asyncio.Queue[TokenEvent]] = {}

    def deliver(self, events: list[TokenEvent]) -> None:
        """Pass events to the event loop, once per step, from the engine's thread.

        After the loop has ended they are dropped.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.sequence_id)
            if queue is not None:
                queue.put_nowait(event)

    def open(self, engine: Engine, requests: Sequence[SequenceRequest]) -> Stream:
        """Submit ``requests``, all or none; raises what ``Engine.submit`` does. Call it in the event loop."""
        ids = engine.submit(requests)
        queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        for sequence_id in ids:  # before the loop can dispatch their first event
            self._queues[sequence_id] = queue
        return Stream(self, engine, ids, queue)

    def forget(self, ids: Sequence[int]) -> None:
        for sequence_id in ids:
            self._queues.pop(sequence_id, None)


class Stream:
    """The events of some sequences, until each has finished or was dropped."""

    def __init__(
        self, streams: Streams, engine: Engine, ids: tuple[int, ...], queue: asyncio.Queue[TokenEvent]
    ) -> None:
        self._streams, self._engine, self.ids, self._queue = streams, engine, ids, queue
        self._open = set(ids)

    async def events(self) -> AsyncIterator[TokenEvent]:
        while self._open:
            event = await self._queue.get()
            if event.sequence_id not in self._open:
                continue
            if event.finish is not None:
                self._open.remove(event.sequence_id)
            yield event

    def drop(self, sequence_id: int) -> None:
        """Drop a sequence that is complete (by a stop string): free its slot and ignore what is on the way."""
        self._open.discard(sequence_id)
        self._engine.cancel([sequence_id])

    def close(self) -> None:
        """Cancel what has not finished. Safe to call twice."""
        if self._open:
            self._engine.cancel(tuple(self._open))
            self._open.clear()
        self._streams.forget(self.ids)


@dataclass(slots=True)
class Choice:
    """Answer of one sequence as it grows."""

    request: SequenceRequest
    codec: TextCodec | None
    stops: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)  # of forced tokens
    finish: Finish | None = None
    first_at_s: float | None = None
    last_at_s: float | None = None
    _detokenizer: Detokenizer | None = None
    _matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._matcher = StopMatcher(self.stops)
        if self.codec is not None:
            self._detokenizer = self.codec.detokenizer(self.request.prompt)

    def push(self, event: TokenEvent) -> str:
        """Return the text to give out now. Sets ``finish``, to ``stop`` also when a stop string is complete."""
        assert event.token is not None
        self.tokens.append(event.token)
        if event.score is not None:
            self.scores.append(event.score)
        self.first_at_s = self.first_at_s or event.at_s
        self.last_at_s = event.at_s
        self.finish = event.finish
        if self._detokenizer is None:
            return ""
        text, stopped = "", False
        armed = len(self.tokens) > self.request.min_tokens
        if event.token not in self.request.end_ids:
            text, stopped = self._matcher.push(self._detokenizer.push(event.token), armed=armed)
        if not stopped and self.finish is not None:
            rest, stopped = self._matcher.push(self._detokenizer.flush(), armed=armed)
            text += rest
            if not stopped:
                text += self._matcher.flush()
        if stopped:
            self.finish = Finish.STOP
        return text
