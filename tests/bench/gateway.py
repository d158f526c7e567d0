"""Cost of the gateway: added latency, requests/s, and the rhythm of many streams. About 50 s a round.

    python tests/bench/gateway.py [--json out.json] [--streams 200 1000] [--rounds 3]

Gateway (keys, usage counts and metrics on), stand-in worker and load generator are three processes of one machine,
so they share its cores: the figures compare, they do not promise. "direct" is the same load without the gateway,
in turn with it. Printed is the median over the rounds [least, most]. What the machine's other processes took is
said with each case; the gateway's CPU time depends on them least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil

from daemon.atomic_file import write_file_atomically
from daemon.process import read_record
from fingerprint.codec import to_json
from iserve.gateway.event_loop import event_loop
from iserve.keys import new_key
from iserve.route_table import GatewayLimits, Route, RouteTable, WorkerTarget

WORDS = "the quick brown fox jumps over the lazy dog again and " * 27  # about 300 words
CHUNKS_PER_STREAM = 60
CHUNK_INTERVAL_S = 0.05
HEAD = b'{"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"word "}]'
CHUNK = b"data: " + HEAD + b"}\n\n"
USAGE = b'{"prompt_tokens":300,"completion_tokens":60,"total_tokens":360}'
LAST = b'data: {"id":"x","choices":[],"usage":' + USAGE + b"}\n\ndata: [DONE]\n\n"
WHOLE = HEAD + b',"usage":' + USAGE + b"}"


class StandInWorker(asyncio.Protocol):
    """Stand-in worker with just enough HTTP/1.1 to be cheap next to what is measured."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.first = b""  # the head and the first of the body
        self.missing = 0  # bytes of the body

    def data_received(self, data: bytes) -> None:
        if self.missing:
            self.missing -= len(data)
        else:
            self.first += data
            head, end, body = self.first.partition(b"\r\n\r\n")
            if not end:
                return
            self.missing = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]) - len(body)
        if self.missing > 0:
            return
        streamed, self.first = b'"stream":true' in self.first[:1000], b""
        if streamed:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self.due_s = asyncio.get_running_loop().time()
            self._next(0)
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
            self.transport.write(head + WHOLE)

    def _next(self, sent: int) -> None:
        if self.transport.is_closing():
            return
        if sent == CHUNKS_PER_STREAM:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST))
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        self.due_s += CHUNK_INTERVAL_S
        asyncio.get_running_loop().call_at(self.due_s, self._next, sent + 1)


async def serve_stand_in() -> None:
    server = await asyncio.get_running_loop().create_server(StandInWorker, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Client(asyncio.Protocol):
    """Connection with one request at a time; notes when pieces of the answer arrived."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    async def ask(self, request: bytes) -> None:
        self.arrivals: list[float] = []
        self.pieces: list[bytes] = []
        self.sent_s = time.perf_counter()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self.done

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(time.perf_counter())
        self.pieces.append(data)
        if data.endswith((b"0\r\n\r\n", b"}")) and self._is_complete() and self.done and not self.done.done():
            self.done.set_result(None)

    @property
    def answer(self) -> bytes:
        return b"".join(self.pieces)

    def _is_complete(self) -> bool:
        head, _, body = self.answer.partition(b"\r\n\r\n")
        if b"content-length" in head:
            return len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return body.endswith(b"\r\n0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError(f"connection lost: {exc}"))


Figures = dict[str, float]


@dataclass(frozen=True)
class BenchResult:
    """Case with a value per round of each figure."""

    case: str
    figures: dict[str, list[float]]


@dataclass(frozen=True)
class Rig:
    gateway_port: int
    worker_port: int
    key: str
    gateway: psutil.Process
    worker: psutil.Process

    def request(self, *, stream: bool, prompt: str = WORDS) -> bytes:
        fields = {"model": "m", "stream": stream, "prompt": prompt}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        body = json.dumps(fields, separators=(",", ":")).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b" % (self.key.encode(), len(body), body)
        )

    def cpu_s(self) -> float:
        times = self.gateway.cpu_times()
        return times.user + times.system


async def connect(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(count):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
    return clients


def close(clients: Iterable[Client]) -> None:
    for client in clients:
        client.transport.close()


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def latency(rig: Rig, request: bytes, per_s: float, seconds: float) -> Figures:
    """Open loop; direct and gateway take turns, so that both see the same machine."""
    times: dict[int, list[float]] = {rig.worker_port: [], rig.gateway_port: []}
    idle = {port: await connect(port, 4) for port in times}
    cpu_before = rig.cpu_s()

    async def one(port: int) -> None:
        client = idle[port].pop() if idle[port] else (await connect(port, 1))[0]
        await client.ask(request)
        assert client.answer.startswith(b"HTTP/1.1 200"), client.answer[:300]
        times[port].append((client.arrivals[0] - client.sent_s) * 1e3)
        idle[port].append(client)

    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), []
    for number in range(int(per_s * seconds)):
        for half, port in enumerate(times):
            await asyncio.sleep(max(0.0, start + (number + half / 2) / per_s - loop.time()))
            tasks.append(asyncio.create_task(one(port)))
    await asyncio.gather(*tasks)
    close(client for clients in idle.values() for client in clients)
    direct, ours = times[rig.worker_port], times[rig.gateway_port]
    figures = {}
    for percent in (50, 99):
        low, high = percentile(direct, percent), percentile(ours, percent)
        figures |= {
            f"direct_p{percent}_ms": low,
            f"gateway_p{percent}_ms": high,
            f"added_p{percent}_ms": high - low,
        }
    return {**figures, "gateway_cpu_us_per_request": (rig.cpu_s() - cpu_before) / len(ours) * 1e6}


async def throughput(rig: Rig, concurrency: int, seconds: float) -> Figures:
    """Closed loop of short answers that are not streamed: direct, then through the gateway."""
    request = rig.request(stream=False)
    figures = {}
    for name, port in (("direct", rig.worker_port), ("gateway", rig.gateway_port)):
        clients = await connect(port, concurrency)
        start, cpu_before = time.perf_counter(), rig.cpu_s()

        async def until(client: Client, end_s: float) -> int:
            count = 0
            while time.perf_counter() < end_s:
                await client.ask(request)
                count += 1
            return count

        count = sum(await asyncio.gather(*(until(client, start + seconds) for client in clients)))
        figures[f"{name}_requests_per_s"] = count / (time.perf_counter() - start)
        if name == "gateway":
            figures["gateway_cpu_us_per_request"] = (rig.cpu_s() - cpu_before) / count * 1e6
        close(clients)
    return figures


async def streams(rig: Rig, count: int) -> Figures:
    """Direct, then through the gateway. All begin within a second; the ideal gap of their 60 chunks is 50 ms."""
    figures = {}
    for name, port in (("direct", rig.worker_port), ("gateway", rig.gateway_port)):
        rss, cpu = rig.gateway.memory_info().rss, rig.cpu_s()
        clients, failed, peak = await _stream_all(rig, port, count)
        ttft = [(client.arrivals[0] - client.sent_s) * 1e3 for client in clients if client.arrivals]
        gaps = [
            (b - a) * 1e3 for client in clients for a, b in zip(client.arrivals, client.arrivals[1:], strict=False)
        ]
        figures |= {
            f"{name}_failed": float(failed),
            f"{name}_ttft_p50_ms": percentile(ttft, 50),
            f"{name}_ttft_p99_ms": percentile(ttft, 99),
            f"{name}_gap_p99_ms": percentile(gaps, 99),
            f"{name}_gap_max_ms": max(gaps),
        }
        if name == "gateway":
            figures["added_gap_p99_ms"] = figures["gateway_gap_p99_ms"] - figures["direct_gap_p99_ms"]
            figures["gateway_cpu_us_per_chunk"] = (rig.cpu_s() - cpu) / (count * CHUNKS_PER_STREAM) * 1e6
            figures["gateway_rss_kb_per_stream"] = (peak - rss) / count / 1024
            figures["gateway_peak_rss_mb"] = peak / 2**20
        await asyncio.sleep(0.3)  # the other side's connections end too
    return figures


async def _stream_all(rig: Rig, port: int, count: int) -> tuple[list[Client], int, int]:
    """The clients with what they noted, how many streams failed, and the gateway's largest RSS meanwhile."""
    request = rig.request(stream=True)
    clients = await connect(port, count)
    peak = rig.gateway.memory_info().rss

    async def one(client: Client, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await client.ask(request)

    tasks = [asyncio.create_task(one(client, i / count)) for i, client in enumerate(clients)]
    pending = set(tasks)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=0.5)
        peak = max(peak, rig.gateway.memory_info().rss)
    failed = sum(
        task.exception() is not None
        or client.answer.count(CHUNK[:30]) != CHUNKS_PER_STREAM
        or b"[DONE]" not in client.answer
        for task, client in zip(tasks, clients, strict=True)
    )
    close(clients)
    return clients, failed, peak


class Neighbours:
    """Meter of the cores that the machine spent on other processes since the last look."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self.cores()

    def cores(self) -> float:
        now_s, machine = time.monotonic(), psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        ours = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        before = getattr(self, "_before", (now_s - 1, busy, ours))
        self._before = (now_s, busy, ours)
        return max(0.0, ((busy - before[1]) - (ours - before[2])) / (now_s - before[0]))


async def measure(rig: Rig, stream_counts: list[int], rounds: int) -> list[BenchResult]:
    await throughput(rig, 8, 1.0)  # warm-up, not reported
    small, large = rig.request(stream=False), rig.request(stream=False, prompt=WORDS * (2**20 // len(WORDS)))
    cases: dict[str, Callable[[], Awaitable[Figures]]] = {
        "not streamed, 50 requests/s": lambda: latency(rig, small, 50, 8),
        "1 MiB prompt, 10 requests/s": lambda: latency(rig, large, 10, 10),
        "not streamed, 32 at once": lambda: throughput(rig, 32, 3.0),
    }
    for count in stream_counts:
        cases[f"{count} streams at 20 chunks/s"] = partial(streams, rig, count)
    taken: dict[str, list[Figures]] = {case: [] for case in cases}
    neighbours = Neighbours([psutil.Process(), rig.gateway, rig.worker])
    for _ in range(rounds):
        for case, run in cases.items():
            neighbours.cores()
            figures = await run()
            taken[case].append({**figures, "cores_used_by_others": neighbours.cores()})
    return [
        BenchResult(case, {name: [figures[name] for figures in rows] for name in rows[0]})
        for case, rows in taken.items()
    ]


def start_rig(home: Path) -> tuple[Rig, list[subprocess.Popen]]:
    worker = subprocess.Popen([sys.executable, __file__, "--stand-in"], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    worker_port = int(worker.stdout.readline())
    key, record = new_key()
    target = WorkerTarget(
        worker_id="w", url=f"http://127.0.0.1:{worker_port}", ready=True, max_outstanding=100_000
    )
    route = Route(name="m", model="m", created=0, max_context_tokens=4096, workers=(target,))
    table = RouteTable(version=1, auth_required=True, routes=(route,), keys=(record,), limits=GatewayLimits())
    (home / "run").mkdir()
    write_file_atomically(home / "run" / "routes.json", to_json(table))
    gateway = subprocess.Popen([sys.executable, "-m", "iserve.gateway", "--home", str(home), "--port", "0"])
    deadline = time.monotonic() + 20
    while (found := read_record(home / "run" / "gateway.json")) is None:
        if time.monotonic() > deadline or gateway.poll() is not None:
            gateway.kill()
            worker.kill()
            raise SystemExit("the gateway did not start")
        time.sleep(0.02)
    rig = Rig(
        int(found.url.rpartition(":")[2]),
        worker_port,
        key,
        psutil.Process(gateway.pid),
        psutil.Process(worker.pid),
    )
    return rig, [gateway, worker]


def ask_for_priority() -> str:
    """For this process and those it starts, as far as the system allows: only root may.

    Linux shares the processor between sessions first, where it groups by them, and by nice only within one.
    """
    with suppress(OSError):
        os.nice(-5)
        Path("/proc/self/autogroup").write_text("-5")
    return f"{os.nice(0)}"


def machine() -> dict[str, str]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    packages = {name: version(name) for name in ("uvicorn", "httptools", "msgspec")}
    packages["event_loop"] = event_loop().text
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "load_before": load,
        "nice": ask_for_priority(),
        "python": platform.python_version(),
        **packages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[200, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stand_in:
        asyncio.run(serve_stand_in())
        return
    facts = machine()
    with tempfile.TemporaryDirectory() as home:
        rig, processes = start_rig(Path(home))
        try:
            results = asyncio.run(measure(rig, args.streams, args.rounds))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for result in results:
        print(result.case)
        for name, values in result.figures.items():
            print(f"    {name:<28} {statistics.median(values):10.2f}   [{min(values):.2f}, {max(values):.2f}]")
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": [asdict(r) for r in results]}, indent=2))


if __name__ == "__main__":
    main()
