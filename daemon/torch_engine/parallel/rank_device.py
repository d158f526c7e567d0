"""The device one rank computes on: its cores or its GPU, its clock, and what is known of its memory."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from daemon.torch_engine.driver import own_gpu_bytes
from fingerprint.errors import ConfigError, EngineError

__all__ = ["CORES_VARIABLE", "RankDevice", "cores_of", "release_memory"]

CORES_VARIABLE = "ISERVE_DEVICE_CORES"


def cores_of(device_id: str, text: str | None = None) -> tuple[int, ...]:
    """Return a CPU device's cores by ``text``, else by the environment.

    Either is ``cpu:0=0,1;cpu:1=2`` or ``{"cpu:0": [0, 1]}``. Empty when nothing is said of the device: it is then
    not pinned.

    Raises:
        ConfigError: the value is neither.
    """
    text = os.environ.get(CORES_VARIABLE, "") if text is None else text
    try:
        if text.lstrip().startswith("{"):
            table = {str(key): value for key, value in json.loads(text).items()}
        else:
            pairs = (part.split("=", 1) for part in text.split(";") if part.strip())
            table = {key.strip(): value.split(",") for key, value in pairs}
        cores = tuple(int(core) for core in table.get(device_id, ()))
        if any(core < 0 for core in cores):
            raise ValueError("a core is negative")
        return cores
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{CORES_VARIABLE}={text!r} is not like 'cpu:0=0,1;cpu:1=2'") from error


class RankDevice:
    """A share of the CPU if it is named so (``cpu:0``), else a GPU.

    Args:
        threads: of torch, on a CPU device of which no cores are given; None leaves torch's setting.

    Raises:
        EngineError: the device is a GPU and torch sees none.
    """

    def __init__(self, device_id: str, rank: int, threads: int | None) -> None:
        self.is_cuda = not device_id.startswith("cpu")
        visible = torch.cuda.device_count() if self.is_cuda else 0
        if self.is_cuda and visible <= rank:
            raise EngineError(
                f"rank {rank} is to run on {device_id}, torch {torch.__version__} sees {visible} GPUs"
            )
        # The launcher lists a worker's GPUs in CUDA_VISIBLE_DEVICES in the order of its ranks.
        self.torch_device = torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")
        self._side_stream: torch.cuda.Stream | None = None
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)
            self._side_stream = torch.cuda.Stream(self.torch_device)
            return
        cores = cores_of(device_id)
        if cores:
            _pin_process(cores)
            threads = len(cores)
        if threads:
            torch.set_num_threads(threads)

    @property
    def counts_memory(self) -> bool:
        """True where torch's allocator keeps the peak; on a CPU it does not."""
        return self.is_cuda

    @property
    def backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    def start_clock(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | float:
        if not self.is_cuda:
            return time.perf_counter()
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        return events

    def stop_clock(self, clock: tuple[torch.cuda.Event, torch.cuda.Event] | float) -> float:
        """Return device time in seconds since ``start_clock``; all work of the device is done afterwards."""
        if isinstance(clock, float):
            return time.perf_counter() - clock
        begin, end = clock
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    @contextmanager
    def next_to_steps(self) -> Iterator[None]:
        """Let the device do this thread's work next to the steps; all of it is done at the end of the block.

        On CUDA that is a stream of its own. What is allocated within the block and freed between two steps can be
        allocated within it again: a step has no kernel left that reads it.
        """
        if self._side_stream is None:
            yield
            return
        with torch.cuda.stream(self._side_stream):
            yield
        self._side_stream.synchronize()

    def limit_memory(self, num_bytes: int) -> None:
        """Let torch's allocator take no more than the plan's bytes (CUDA only; a CPU's allocator has no limit)."""
        if self.is_cuda:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.torch_device)

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self, held_bytes: int) -> int:
        """Return the most that was allocated since ``reset_peak``, beyond ``held_bytes`` (CUDA only)."""
        return max(0, torch.cuda.max_memory_allocated(self.torch_device) - held_bytes)

    def runtime_bytes(self, held_bytes: int) -> int:
        """Return what the process takes in addition to its counted tensors.

        On CUDA that is the context and libraries (its use of the device less what torch reserved), on a CPU the
        resident rest. Where the driver does not list processes separately, everything on the GPU that torch did
        not reserve counts: too much when the GPU is shared.
        """
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            own = own_gpu_bytes(f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}")
            used = total - free if own is None else own
            return max(0, used - torch.cuda.memory_reserved(self.torch_device))
        return max(0, psutil.Process().memory_info().rss - held_bytes)


def release_memory() -> None:
    """Give freed tensors back to the system: collect cycles, empty CUDA's cache, trim glibc's heap."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _pin_process(cores: tuple[int, ...]) -> None:
    """Pin all threads, those that libraries have started already too."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread ended between the listing and now
        except OSError as error:
            raise ConfigError(f"cannot pin to cores {cores}: {error.strerror}") from error
