"""What `iserve replay` can hold, and whether its figures are right: against known delays, and beside guidellm.

    python tests/bench/replay_compare.py [--json out.json] [--guidellm /path/to/its/python] [--streams 500 2000]

The endpoint is a stand-in in a process of its own whose delays are set, and which notes when it wrote each piece;
its notes are the truth that clients' figures are held against. Everything runs on one machine, and what that does
to both sides is in the figures. guidellm is never a dependency: name the Python that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from traces.replay.endpoint import resolve_endpoint
from traces.replay.runner import Replay, ReplayOptions
from traces.replay.schedule import ScheduleOptions, make_schedule
from traces.request import Request
from traces.summary import Percentiles, percentiles, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER = REPOSITORY / "iserve" / "demo" / "model"
TTFT_S, GAP_S = 0.08, 0.025
RATE, SECONDS, INPUT, OUTPUT = 10, 30, 128, 32
STREAM_GAP_S, STREAM_TOKENS = 0.05, 300
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
CHAT_CHUNK = CHUNK.replace(b'"text":" word"', b'"delta":{"content":" word"}')
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


# The stand-in


class StandIn(asyncio.Protocol):
    """Answers a completion with ``max_tokens`` pieces at fixed delays; just enough HTTP to be cheap."""

    ttft_s = TTFT_S
    gap_s = GAP_S
    ttfts_s: list[float] = []  # noqa: RUF012 of the process, as its class is
    gaps_s: list[float] = []  # noqa: RUF012

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
            self._json({"ttft": self.ttfts_s, "gaps": self.gaps_s})
            self.ttfts_s.clear()
            self.gaps_s.clear()
        elif head.startswith(b"GET"):
            self._json({"object": "list", "data": [{"id": "m", "object": "model"}]})
        else:
            self._answer(body[:size], chat=head.startswith(b"POST /v1/chat/"))

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def _answer(self, body: bytes, *, chat: bool) -> None:
        asked = json.loads(body)
        self.left = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        prompt = asked.get("prompt", "")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": self.left}
        self.last = f'data: {{"id":"x","choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'.encode()
        self.chunk = CHAT_CHUNK if chat else CHUNK
        self.transport.write(HEAD)
        self.began_s = self.wrote_s = self.loop.time()
        self.due_s = self.began_s + self.ttft_s
        self.loop.call_at(self.due_s, self._piece, True)

    def _piece(self, first: bool) -> None:
        if self.transport.is_closing():
            return
        now_s = self.loop.time()
        (self.ttfts_s if first else self.gaps_s).append(now_s - self.wrote_s)
        self.wrote_s = now_s
        self.left -= 1
        more = b"" if self.left else b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.last), self.last)
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(self.chunk), self.chunk, more))
        if self.left:
            self.due_s += self.gap_s
            self.loop.call_at(self.due_s, self._piece, False)


async def serve(ttft_s: float, gap_s: float) -> None:
    StandIn.ttft_s, StandIn.gap_s = ttft_s, gap_s
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def endpoint(ttft_s: float, gap_s: float) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", str(ttft_s), str(gap_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def truth(url: str) -> dict[str, list[float]]:
    with urllib.request.urlopen(url + "/truth") as answer:
        return json.load(answer)


# The clients


@dataclass(frozen=True)
class Result:
    """One case. Times in milliseconds, because that is how they are read."""

    case: str
    figures: dict[str, float]


def ms(name: str, found: Percentiles | None) -> dict[str, float]:
    assert found is not None
    return {f"{name}_p50_ms": found.p50_s * 1e3, f"{name}_p99_ms": found.p99_s * 1e3}


def replayed(url: str, trace: list[Request]) -> dict[str, float]:
    schedule = make_schedule(trace, ("m",), ScheduleOptions())
    run = Replay(schedule, resolve_endpoint(url), ReplayOptions(timeout_s=120, max_in_flight=4000))
    busy_s = time.process_time()
    outcomes = asyncio.run(run.run())
    busy_s = time.process_time() - busy_s
    found = summarize(outcomes)
    return {
        "requests": found.requests,
        "completed": found.completed,
        **ms("lateness", found.lateness),
        "lateness_max_ms": found.lateness.max_s * 1e3 if found.lateness else 0.0,
        **ms("ttft", found.ttft_from_send),
        **ms("ttft_from_schedule", found.ttft),
        **ms("tpot", found.tpot),
        **ms("itl", found.itl),
        **ms("e2e", found.e2e_from_send),
        "cpu_share": busy_s / run.elapsed_s,
        "cpu_us_per_token": busy_s / max(int(outcomes.output_tokens.sum()), 1) * 1e6,
    }


def hold(streams: int) -> Result:
    """All begin within four seconds; each has 20 tokens a second for 15 s, so that all are open together."""
    trace = [Request(4 * i / streams, 64, STREAM_TOKENS) for i in range(streams)]
    with endpoint(STREAM_GAP_S, STREAM_GAP_S) as url:
        figures = replayed(url, trace)
        notes = truth(url)
    found = percentiles(np.array(notes["gaps"]))
    return Result(
        f"{streams} streams of 20 tokens/s", figures | {f"server_{k}": v for k, v in ms("itl", found).items()}
    )


def server_notes(url: str) -> dict[str, float]:
    notes = truth(url)
    return {
        **ms("ttft", percentiles(np.array(notes["ttft"]))),
        **ms("itl", percentiles(np.array(notes["gaps"]))),
    }


def compare(guidellm: Path | None) -> list[Result]:
    """The same load from both, one after the other; beside each what the server noted during it."""
    name = f"{RATE} requests/s for {SECONDS} s, {INPUT} in, {OUTPUT} out"
    results = []
    with endpoint(TTFT_S, GAP_S) as url:
        trace = [Request(i / RATE, INPUT, OUTPUT) for i in range(RATE * SECONDS)]
        figures = replayed(url, trace)
        results += [Result(f"{name}: iserve replay", figures), Result("  the server's notes", server_notes(url))]
        if guidellm is not None:
            figures = guided(guidellm, url)
            results += [Result(f"{name}: guidellm", figures), Result("  the server's notes", server_notes(url))]
    return results


def guided(python: Path, url: str) -> dict[str, float]:
    """guidellm's own figures for such a load."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "benchmarks.json"
        command = [
            *(str(python.parent / "guidellm"), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={url},model=m"),
            *("--profile", f"kind=constant,rate={RATE}"),
            *("--constraint", f"kind=max_requests,count={RATE * SECONDS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={output}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode or not output.exists():
            raise SystemExit(f"guidellm failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = json.loads(output.read_text())["benchmarks"][0]["metrics"]
    figures = {"completed": found["request_totals"]["successful"]}
    for name, metric, scale in (
        ("ttft", "time_to_first_token_ms", 1),
        ("tpot", "inter_token_latency_ms", 1),  # its TPOT is E2E over all tokens, its ITL our TPOT
        ("e2e", "request_latency", 1e3),
    ):
        parts = found[metric]["successful"]["percentiles"]
        figures |= {f"{name}_p50_ms": parts["p50"] * scale, f"{name}_p99_ms": parts["p99"] * scale}
    return figures


def machine() -> dict[str, str]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{cpu[1] if cpu else '?'}, {os.cpu_count()} cores",
        "load_before": load,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[500, 2000])
    parser.add_argument("--guidellm", type=Path, help="the Python of an environment that has guidellm")
    parser.add_argument("--serve", type=float, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(*args.serve))
        return
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results = []
    for result in [*(hold(count) for count in args.streams), *compare(args.guidellm)]:
        results.append(result)
        print(result.case)
        for name, value in result.figures.items():
            print(f"    {name:<28} {value:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": [asdict(r) for r in results]}, indent=2))


if __name__ == "__main__":
    main()
