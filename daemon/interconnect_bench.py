"""Measurement of the links between GPUs: all-reduces of groups of 2, 4 and 8, and sends, at four message sizes.

As a script (``python interconnect_bench.py SECONDS``) it takes the first GPUs of those visible, one process each,
and prints one JSON object on its last line; ``--gloo N`` measures N processes on the CPU. It runs in an engine's
own Python, so it imports torch and the standard library only. It ends itself if a GPU hangs or its parent dies,
and its processes with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["GROUP_SIZES", "SIZES_BYTES"]

SIZES_BYTES = (8 * 2**10, 128 * 2**10, 2 * 2**20, 32 * 2**20)  # a decode step of one sequence to a prefill chunk
GROUP_SIZES = (2, 4, 8)
_CALLS = {"nccl": (100, 100, 20, 5), "gloo": (5, 5, 2, 1)}  # in a row, of each size: their launch is hidden
_WARM_UPS = 3
_LEAST_REPEATS, _MOST_REPEATS = 3, 50
_LIMIT_S = 120  # of the script, torch's import and the GPUs' start included
_PR_SET_PDEATHSIG = 1
# NVLink multicast stays off, as in the engines that are launched (``daemon.engines.vllm.launch``).
# Ranks are of one node: nothing listens beyond it.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}


class _Rank:
    """Rank of the measurement: its device, and a control group on the CPU for all that is not measured."""

    def __init__(self, backend: str, rank: int, world: int, port: int) -> None:
        self.backend, self.rank, self.world = backend, rank, world
        self.captures = backend == "nccl"
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT_S)
        )
        self.control = dist.new_group(backend="gloo") if backend == "nccl" else dist.group.WORLD
        self.groups = {size: dist.new_group(list(range(size))) for size in GROUP_SIZES if size <= world}
        self.control_of = {size: dist.new_group(list(range(size)), backend="gloo") for size in self.groups}

    def agreed(self, value: float, op: dist.ReduceOp.RedOpType, size: int) -> float:
        """Return the least, or the most, of all values of a group's ranks."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, op=op, group=self.control_of[size])
        return shared.item()

    def call_s(self, call: Callable[[], object], calls: int, size: int, seconds: float) -> float:
        """Return the median time of one call, of ``calls`` in a row on the slowest rank of a group."""
        for _ in range(_WARM_UPS):
            call()
        run = self._captured(call, calls, size) if self.backend == "nccl" else None
        run = run or (lambda: [call() for _ in range(calls)])
        first = self.agreed(self._timed(run, call, size), dist.ReduceOp.MAX, size)
        repeats = min(max(int(seconds / max(first, 1e-6)), _LEAST_REPEATS), _MOST_REPEATS)
        times = [self.agreed(self._timed(run, call, size), dist.ReduceOp.MAX, size) for _ in range(repeats)]
        return statistics.median(times) / calls

    def _captured(self, call: Callable[[], object], calls: int, size: int) -> Callable[[], object] | None:
        """Return the replay of a CUDA graph of the calls; None: a rank of the group could not capture them."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            if self.captures:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(calls):
                        call()
        except RuntimeError as error:
            print(f"rank {self.rank} captures no CUDA graph: {error}", file=sys.stderr)
            self.captures = False
        self.captures = self.agreed(float(self.captures), dist.ReduceOp.MIN, size) == 1.0
        return graph.replay if self.captures else None

    def _timed(self, run: Callable[[], object], call: Callable[[], object], size: int) -> float:
        dist.barrier(group=self.control_of[size])
        if self.device.type == "cpu":
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        call()  # the ranks' GPUs meet here, closer than at a barrier of the CPU
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def measure(self, size: int, seconds: float) -> dict[str, object]:
        """Return the times of the first ``size`` ranks; of the sends those over the middle of the group."""
        all_reduce_s, send_s = [], []
        each = seconds / (2 * len(SIZES_BYTES))
        sender = size // 2 - 1
        for size_bytes, calls in zip(SIZES_BYTES, _CALLS[self.backend], strict=True):
            message = torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device=self.device)
            group = self.groups[size]

            def add_up(message: torch.Tensor = message, group: dist.ProcessGroup | None = group) -> None:
                dist.all_reduce(message, group=group)

            def hand_over(message: torch.Tensor = message, group: dist.ProcessGroup | None = group) -> None:
                if self.rank == sender:
                    dist.send(message, sender + 1, group=group)
                elif self.rank == sender + 1:
                    dist.recv(message, sender, group=group)
                else:
                    message.zero_()  # a CUDA graph of nothing is none

            all_reduce_s.append(self.call_s(add_up, calls, size, each))
            send_s.append(self.call_s(hand_over, calls, size, each))
        return {"gpus": size, "all_reduce_s": all_reduce_s, "send_s": send_s}


def _run_rank(backend: str, seconds: float, rank: int, world: int, port: int) -> None:
    one = _Rank(backend, rank, world, port)
    groups = []
    for size in one.groups:
        if rank < size:
            groups.append(one.measure(size, seconds / len(one.groups)))
        dist.barrier(group=one.control)  # GPUs outside a group wait idle
    if rank == 0:
        kind = {"backend": backend, "captured": one.captures, "torch": torch.__version__}
        print(json.dumps(kind | {"sizes_bytes": SIZES_BYTES, "groups": groups}), flush=True)
    os._exit(0)  # captured graphs hold the communicators: an orderly end may hang


def _run_all(backend: str, seconds: float, count: int) -> None:
    """Start the ranks, and end all of them as soon as one fails."""
    world = max(size for size in GROUP_SIZES if size <= count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, master_listen_fd=os.dup(listener.fileno())
        )
    given = ["--world", world, "--port", port, "--parent", os.getpid(), *(["--gloo"] if backend == "gloo" else [])]
    command = [sys.executable, "-I", __file__, str(seconds), *map(str, given)]
    environment = os.environ | _ENVIRONMENT
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(world)]
    while ranks:
        pid, status = os.wait()
        if status != 0:
            for rank in ranks:
                if rank.pid != pid:
                    os.kill(rank.pid, signal.SIGKILL)
            sys.exit(f"a rank of the measurement ended with status {os.waitstatus_to_exitcode(status)}")
        ranks = [rank for rank in ranks if rank.pid != pid]
    del store


def main() -> None:
    signal.alarm(_LIMIT_S)
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--gloo", type=int, nargs="?", const=2)
    parser.add_argument("--parent", type=int, help="process whose death ends the measurement")
    for name in ("rank", "world", "port"):  # of one of the processes that it starts
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if given.parent not in (None, os.getppid()):  # it died before the kernel was asked to end this process with it
        sys.exit("the measurement was ended")
    backend = "nccl" if given.gloo is None else "gloo"
    if given.rank is not None:
        return _run_rank(backend, given.seconds, given.rank, given.world, given.port)
    count = given.gloo or torch.cuda.device_count()
    if count < GROUP_SIZES[0]:
        sys.exit(f"torch {torch.__version__} sees {count} GPUs; links need {GROUP_SIZES[0]}")
    return _run_all(backend, given.seconds, count)


if __name__ == "__main__":
    main()
