"""An endpoint whose truth is known: delays that are set, and notes of when it wrote each piece.

    python -m tests.bench.replay_stand_in TTFT_S GAP_S

A process of its own, just enough HTTP to be cheap. ``GET /truth`` gives the notes since the last such question:
they are what clients' figures are held against.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fingerprint.codec import from_json, to_json

__all__ = ["Notes", "endpoint", "notes"]

REPOSITORY = Path(__file__).resolve().parents[2]
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Notes:
    """Notes on each answer that was written to its end, in that order, and on all gaps between pieces.

    ``arrived_s``, by the server's clock, is when the whole request was there; the other times count from that.
    """

    arrived_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # a digest
    gaps_s: list[float] = field(default_factory=list)


class StandIn(asyncio.Protocol):
    """Answers a completion with ``max_tokens`` pieces at fixed delays."""

    ttft_s = gap_s = 0.0  # of the process, as its class is
    noted = Notes()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.data, self.loop = transport, b"", asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        size = int((re.search(rb"(?i)content-length: *(\d+)", head) or [b"", b"0"])[1])
        if len(body) < size:
            return
        self.data = body[size:]
        if head.startswith(b"GET /truth"):
            self._json(to_json(StandIn.noted))
            StandIn.noted = Notes()
        elif head.startswith(b"GET"):
            self._json(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        else:
            self._answer(body[:size])

    def _json(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def _answer(self, body: bytes) -> None:
        self.began_s = self.loop.time()
        asked = json.loads(body)
        self.left = asked["max_tokens"]
        prompt = asked["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": self.left}
        self.last = f'data: {{"id":"x","choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'.encode()
        self.prompt = hashlib.blake2s(json.dumps(prompt).encode(), digest_size=8).hexdigest()
        self.transport.write(HEAD)
        self.due_s = self.began_s + self.ttft_s
        self.loop.call_at(self.due_s, self._piece, True)

    def _piece(self, first: bool) -> None:
        if self.transport.is_closing():
            return
        now_s = self.loop.time()
        if first:
            self.first_s = now_s
        else:
            self.noted.gaps_s.append(now_s - self.wrote_s)
        self.wrote_s = now_s
        self.left -= 1
        more = b"" if self.left else b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.last), self.last)
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(CHUNK), CHUNK, more))
        if self.left:
            self.due_s += self.gap_s
            self.loop.call_at(self.due_s, self._piece, False)
        else:
            self._note()

    def _note(self) -> None:
        self.noted.arrived_s.append(self.began_s)
        self.noted.ttft_s.append(self.first_s - self.began_s)
        self.noted.e2e_s.append(self.wrote_s - self.began_s)
        self.noted.prompts.append(self.prompt)


async def serve(ttft_s: float, gap_s: float) -> None:
    StandIn.ttft_s, StandIn.gap_s = ttft_s, gap_s
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def endpoint(ttft_s: float, gap_s: float) -> Iterator[str]:
    """Yield its URL, while it runs."""
    command = [sys.executable, "-m", "tests.bench.replay_stand_in", str(ttft_s), str(gap_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def notes(url: str) -> Notes:
    """Return what it noted since the last call."""
    with urllib.request.urlopen(url + "/truth") as answer:
        return from_json(answer.read(), Notes, what="the stand-in's notes")


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2])))
