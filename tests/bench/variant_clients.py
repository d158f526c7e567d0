"""Clients of an OpenAI server that ask for models by name and keep when the words of each answer arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

__all__ = ["Answer", "Asked", "answer_all", "at_times", "in_a_loop", "p"]

_SAID = 300  # characters of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Request for a completion."""

    model: str
    prompt: tuple[int, ...]
    tokens: int
    ends: bool = False  # at the end that the model says, not after ``tokens`` alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to a request; times from its being sent."""

    row: int  # of the request
    model: str
    sent_s: float  # from the begin of all
    first_s: float  # until the first token; -1: none arrived
    last_s: float
    tokens: int  # that arrived, one in each event
    text: str
    error: str
    is_whole: bool


async def answer_all(session: aiohttp.ClientSession, url: str, asked: Sequence[Asked]) -> list[Answer]:
    """Send the requests one after the other."""
    begun = time.monotonic()
    return [await _answer(session, url, row, one, begun) for row, one in enumerate(asked)]


async def in_a_loop(
    url: str,
    asked: Sequence[Asked],
    clients: int,
    seconds: float,
    ending: asyncio.Event | None = None,
) -> list[Answer]:
    """Let ``clients`` each send the next request once its last one is answered.

    After ``seconds``, or once ``ending`` is set, the rest is cut off; what had arrived counts. Connections are new
    ones: a server may end an idle one at the moment that it is used again.
    """
    begun = time.monotonic()
    rows = iter(enumerate(asked))
    found: list[Answer] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for row, one in rows:
            found.append(await _answer(session, url, row, one, begun, begun + seconds, ending))
            if time.monotonic() >= begun + seconds or (ending is not None and ending.is_set()):
                return

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return found


async def at_times(url: str, asked: Sequence[Asked], at_s: Sequence[float]) -> list[Answer]:
    """Send each request at its time from now; return the answers in the order of the requests."""
    begun = time.monotonic()

    async def client(session: aiohttp.ClientSession, row: int) -> Answer:
        await asyncio.sleep(begun + at_s[row] - time.monotonic())
        return await _answer(session, url, row, asked[row], begun)

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(client(session, row) for row in range(len(asked)))))


async def _answer(
    session: aiohttp.ClientSession,
    url: str,
    row: int,
    asked: Asked,
    begun_s: float,
    until_s: float = float("inf"),
    ending: asyncio.Event | None = None,
) -> Answer:
    body = {
        "model": asked.model,
        "prompt": asked.prompt,
        "max_tokens": asked.tokens,
        "temperature": 0.0,
        "ignore_eos": not asked.ends,
        "stream": True,
    }
    sent = time.monotonic()
    first = last = -1.0
    words: list[str] = []
    error, is_whole = "", False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                error = f"{response.status}: {(await response.text())[:_SAID]}"
            async for line in response.content:
                now = time.monotonic()
                if line.startswith(b"data: [DONE]"):
                    is_whole = True
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = json.dumps(event["error"])[:_SAID]
                    elif event["choices"] and (text := event["choices"][0]["text"]):
                        first = now if first < 0 else first
                        last = now
                        words.append(text)
                if now > until_s or (ending is not None and ending.is_set()):
                    break
    except (aiohttp.ClientError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:_SAID]
    return Answer(
        row=row,
        model=asked.model,
        sent_s=round(sent - begun_s, 5),
        first_s=round(first - sent, 5) if first >= 0 else -1.0,
        last_s=round(last - sent, 5) if last >= 0 else -1.0,
        tokens=len(words),
        text="".join(words),
        error=error,
        is_whole=is_whole,
    )


def p(values: Iterable[float], percent: float) -> float:
    """Return the percentile, 0 of no values."""
    found = list(values)
    return float(np.percentile(found, percent)) if found else 0.0
