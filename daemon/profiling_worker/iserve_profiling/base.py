"""Profiling of one engine at a time, started on a fingerprint and measured in bursts, whichever engine it is.

Runs in the engine's own interpreter (``daemon/profiling_worker`` on ``PYTHONPATH``), so it needs the standard
library alone.
"""

from __future__ import annotations

import os
import random
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from iserve_profiling.agreement import Span, alike, counted, difference, is_long, union_s
from iserve_profiling.kernel_caches import newest_kernel_s
from iserve_profiling.neighbours import Neighbours, own_family

LOAD_MARK = "iserve: starting the engine"  # as in daemon/profile_client.py, which cannot be imported here
_SAMPLE_S = 0.05  # between looks at clock and power
_STEP = ("tokens", "sequences", "prefill_tokens", "context_tokens", "attention_pairs")
_TIMES = ("gap_s", "lead_s", "forward_s", "tail_s")
_MOST_ONCE = 3  # bursts more than were asked for, at most
_MOST_WINDOWS = 6  # of bursts of one point, until they agree
_LONG_CALL_S = 2.0  # a call of which it is asked whether kernels are compiled
_RECENT_S = 15.0  # since a kernel was added to a cache, while more are compiled
_DIGITS = 9  # of times in seconds; a recording is kept, and CUDA events tell half a microsecond

# Bits of NVML's clocks event reasons that lower a clock; an idle GPU's and the pace of a group are none.
_SLOWED_BY = {
    0x02: "clock setting",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

Rows = list[list[float]]  # of the step timer's COLUMNS, of one rank


class WorkError(Exception):
    """An error of iServe's tree by name, for the caller."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class ProfilingEngine(ABC):
    """Holds at most one engine; calls come from one thread.

    Args:
        spec: a WorkerSpec as JSON; its limits hold for every load.
        step_timer: whether the engine's processes carry the step timer.
    """

    engine: str  # as it is called in messages

    def __init__(self, spec: dict[str, Any], *, step_timer: bool = True) -> None:
        self.spec, self.step_timer = spec, step_timer
        self._vocab = 0
        self._room_tokens = 0
        self._most = (0, 0)  # sequences, tokens of one
        self._neighbours: Neighbours | None = None
        self._visit: _Visit | None = None  # under way, or the last one

    @property
    @abstractmethod
    def is_loaded(self) -> bool: ...

    @abstractmethod
    def start(self, order: dict[str, Any], kv_tokens: int) -> int:
        """Start the engine on a checkpoint with random weights; answers the size of its vocabulary."""

    @abstractmethod
    def unload(self) -> None:
        """End the engine and every process of it. Safe to call when nothing is loaded."""

    @abstractmethod
    def set_timer(self, *, repeat: int, record: bool) -> None: ...

    @abstractmethod
    def read_timer(self) -> list[Rows]:
        """Return the recorded steps of every rank, and end the recording."""

    @abstractmethod
    def compilations(self) -> list[Span]:
        """Return when a rank compiled a kernel since the last call, on the clock of ``time.perf_counter``."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], output_tokens: int, active: int) -> list[int]:
        """Generate greedily, end-of-sequence ignored. Answers how many tokens each got.

        Args:
            active: distinct variants, the first loaded ones, that the prompts are for in turn; 0: the base.
        """

    @abstractmethod
    def memory(self) -> list[dict[str, Any]]:
        """RankMemory of every rank, as the engine itself counted it."""

    @abstractmethod
    def nvml(self) -> Any:
        """Return the NVML binding that ships with the engine."""

    def own_processes(self) -> set[int]:
        """Return the engine's processes, this one among them."""
        return own_family()

    def reserved_bytes(self) -> int | None:
        """Return the bytes that the engine's allocators hold on its GPUs now; None: it does not tell."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the client's CallState of the calls under way, or of the last ones; asked by another thread."""
        visit, compiling = self._visit, False
        began = None if visit is None else visit.call_began
        if began is not None and time.time() > began + _LONG_CALL_S:
            compiling = newest_kernel_s() > max(began, time.time() - _RECENT_S)
        compile_s = 0.0 if visit is None else union_s(visit.compilations)
        return {"compiling": compiling, "compile_s": round(compile_s, _DIGITS)}

    def load_variants(self, order: dict[str, Any]) -> list[float]:
        """Load the variants in the order's folders one after the other. Answers the seconds of each."""
        raise WorkError("ConfigError", f"the profiling worker of {self.engine} serves no variants")

    @property
    def num_variants(self) -> int:
        """Variants that are loaded."""
        return 0

    def check_steps(  # noqa: B027  # what the client checks is enough of an engine that was seen to count rightly
        self, rows: list[Rows], *, batch: int, input_tokens: int, output_tokens: int
    ) -> None:
        """Raises WorkError: these steps of one burst cannot be all of it."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the engine anew. Answers the seconds that took.

        Raises:
            WorkError: it did not start; nothing of it is left.
        """
        self.unload()
        kv_tokens = order["kv_tokens"] or order["max_batch"] * order["max_context_tokens"]
        begun = time.monotonic()
        print(LOAD_MARK, order["checkpoint"], order["weights"], order["kv"], flush=True)
        try:
            with Nvml(self.nvml()) as nvml:
                before = nvml.processes()
            self._vocab = self.start(order, kv_tokens)
            with Nvml(self.nvml()) as nvml:
                self._neighbours = Neighbours(nvml, before, self.own_processes(), self.reserved_bytes())
        except WorkError:
            self.unload()
            raise
        except Exception as error:
            self.unload()
            raise WorkError("EngineError", f"{self.engine} did not start: {root(error)}") from error
        self._room_tokens = kv_tokens
        self._most = (order["max_batch"], order["max_context_tokens"])
        return {"start_s": f"{time.monotonic() - begun:.1f}"}

    def check_loaded(self) -> None:
        """Raises WorkError: nothing is."""
        if not self.is_loaded:
            raise WorkError("UnavailableError", "nothing is loaded; POST /profile/load first")

    def bursts(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Bursts back to back: readings as the client's RunReading, in order.

        Those in which the engine compiled a kernel, or did something else only once, are left out, and further
        bursts run in their place. Where ``agree_within`` is given they go on until they agree.

        Raises:
            WorkError: bursts do not agree within the seconds given (NotMeasuredError), do not fit what is loaded,
                or failed.
        """
        self.check_loaded()
        if not self.step_timer and (order["steps"] or order["repeat"] != 1):
            raise WorkError(
                "ConfigError",
                f"this {self.engine} runs without the step timer, which steps={order['steps']} and "
                f"repeat={order['repeat']} need; ask for steps=false and repeat=1",
            )
        batch, input_tokens, output_tokens = order["batch"], order["input_tokens"], order["output_tokens"]
        self._check_fits(batch, input_tokens + output_tokens)
        if order["active"] > self.num_variants:
            raise WorkError(
                "ConfigError", f"a burst for {order['active']} variants, of which {self.num_variants} are loaded"
            )
        visit = self._visit = _Visit(self, order, random_prompts(batch, input_tokens, self._vocab))
        try:
            with Nvml(self.nvml()) as nvml:
                others = self._others(nvml)
                with _Sampler(nvml) as sampler:
                    visit.run()
                others = self._others(nvml, self.reserved_bytes()) or others
        except WorkError:
            raise
        except Exception as error:
            self.unload()
            raise WorkError("EngineError", f"{self.engine} failed in a run: {root(error)}") from error
        runs = visit.counted()
        steps = [visit.steps(run) for run in runs]
        if order["steps"]:
            for of_run in steps:
                self.check_steps(of_run, batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)
        return [{**_reading(run, of, sampler), "others": others} for run, of in zip(runs, steps, strict=True)]

    def _others(self, nvml: Nvml, reserved_bytes: int | None = None) -> list[dict[str, Any]]:
        if self._neighbours is None:
            return []
        return self._neighbours.appeared(nvml, self.own_processes(), reserved_bytes)

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run one burst by the wall clock; all of its time counts as the model's (``RunReading.device_s``)."""
        burst = {**order, "repeat": 1, "most": 1, "until_s": 0.0, "steps": False, "agree_within": None}
        reading = self.bursts(burst)[0]
        return {**reading, "device_s": reading["e2e_s"], "host_s": 0.0}

    def _check_fits(self, batch: int, tokens: int) -> None:
        most_sequences, most_tokens = self._most
        if batch > most_sequences or tokens > most_tokens or batch * tokens > self._room_tokens:
            raise WorkError(
                "ConfigError",
                f"{batch} sequences of {tokens} tokens do not fit what was loaded: {most_sequences} sequences, "
                f"{most_tokens} tokens each, {self._room_tokens} in the KV cache",
            )


def random_prompts(batch: int, input_tokens: int, vocab: int) -> list[list[int]]:
    source = random.Random(batch * 1_000_003 + input_tokens)
    return [[source.randrange(vocab) for _ in range(input_tokens)] for _ in range(batch)]


class _Visit:
    """Bursts of one point, in windows of at most so many or so long, until they agree."""

    def __init__(self, engine: ProfilingEngine, order: dict[str, Any], prompts: list[list[int]]) -> None:
        self._engine, self._order, self._prompts = engine, order, prompts
        self._runs: list[Span] = []
        self.compilations: list[Span] = []
        self.call_began: float | None = None  # by ``time.time``; None: no call is under way
        self._rows: list[Rows] = []  # of each rank

    def run(self) -> None:
        """Raises WorkError: they do not agree."""
        order, begun = self._order, time.perf_counter()
        self._window()
        tolerance = order["agree_within"]
        if tolerance is None:
            return
        for _ in range(1, _MOST_WINDOWS):
            if self._difference() <= tolerance or time.perf_counter() > begun + order["agree_limit_s"]:
                break
            self._window()
        apart = self._difference()
        if apart > tolerance:
            raise WorkError("NotMeasuredError", self._why_not(apart, time.perf_counter() - begun))

    def _window(self) -> None:
        order, engine = self._order, self._engine
        if engine.step_timer:
            engine.set_timer(repeat=order["repeat"], record=order["steps"])
        runs: list[Span] = []
        begun = time.perf_counter()
        while not _is_enough(runs, order["most"], begun + order["until_s"]):
            self.call_began = time.time()
            start = time.perf_counter()
            made = engine.generate(self._prompts, order["output_tokens"], order["active"])
            runs.append((start, time.perf_counter()))
            if any(count != order["output_tokens"] for count in made):
                raise WorkError("EngineError", f"{engine.engine} ended a sequence before its length")
        self.call_began = None
        self._runs += runs
        if engine.step_timer:
            rows = engine.read_timer()
            self._rows = [before + new for before, new in zip(self._rows or [[] for _ in rows], rows, strict=True)]
            self.compilations += engine.compilations()

    def counted(self) -> list[Span]:
        """Return the bursts that count; where something was compiled in each of them, those that are alike."""
        return counted(self._runs, self.compilations) or alike(self._runs)

    def steps(self, run: Span) -> list[Rows]:
        """Return the steps of ``run``, by rank."""
        return [_within(rank, run) for rank in self._rows]

    def _difference(self) -> float:
        runs = counted(self._runs, self.compilations)
        if not self._order["steps"]:
            return difference([end - begin for begin, end in runs])
        return difference([max(_forward_s(rank) for rank in self.steps(run)) for run in runs])

    def _why_not(self, apart: float, took_s: float) -> str:
        order, runs = self._order, len(self._runs)
        what = f"batch {order['batch']} with {order['input_tokens']} in and {order['output_tokens']} out"
        if not counted(self._runs, self.compilations):
            return (
                f"{what}: {self._engine.engine} compiled a kernel in each of {runs} calls, {took_s:.1f} s in all"
            )
        return (
            f"{what}: calls do not agree, their earlier and later half differ by {apart:.0%} after {runs} calls "
            f"in {took_s:.1f} s; {order['agree_within']:.0%} was asked for"
        )


def _forward_s(rows: Rows) -> float:
    return sum(row[8] for row in rows)


def _is_enough(runs: list[Span], most: int, until: float) -> bool:
    """Return whether no further burst is to begin: there are ``most``, or it is late and one has its like.

    A lone burst is taken as it is where no more is wanted, or where it was too short to hold what is done once.
    """
    if not runs:
        return False
    similar = len(alike(runs))
    if similar < most and runs[-1][1] < until:
        return len(runs) >= 2 * most + _MOST_ONCE  # never the same time: no more of it will help
    return most == 1 or similar > 1 or not is_long(runs) or len(runs) > _MOST_ONCE


def _within(rows: Rows, run: Span) -> Rows:
    """The steps that began within a burst: one clock for all processes of a machine."""
    start, end = run
    return [row for row in rows if start <= row[0] < end]


def _reading(run: Span, by_rank: list[Rows], sampler: _Sampler) -> dict[str, Any]:
    """Return the reading of one burst, of several ranks the one whose forwards took longest."""
    start, end = run
    steps = max(by_rank, key=_forward_s, default=[])
    device_s = _forward_s(steps)
    clock_mhz, power_w, held_bytes, slowed_by = sampler.mean(start, end)
    return {
        "e2e_s": round(end - start, _DIGITS),
        "device_s": round(device_s, _DIGITS),
        "host_s": round(max(0.0, end - start - device_s), _DIGITS),
        "sm_clock_mhz": clock_mhz,
        "power_w": power_w,
        "held_bytes": held_bytes,
        "slowed_by": [name for bit, name in _SLOWED_BY.items() if slowed_by & bit],
        "steps": [
            {
                **{name: int(value) for name, value in zip(_STEP, row[1:6], strict=True)},
                **{name: round(value, _DIGITS) for name, value in zip(_TIMES, row[6:10], strict=True)},
            }
            for row in steps
        ],
    }


def root(error: BaseException) -> str:
    """Return the text of the error that ``error`` was raised from, at the beginning."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class Nvml:
    """The driver's view of the GPUs this process may see. Does not make a CUDA context."""

    def __init__(self, binding: Any) -> None:
        self._nvml = binding

    def __enter__(self) -> Nvml:
        self._nvml.nvmlInit()
        self._handles = _visible(self._nvml)
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()

    def total_bytes(self) -> list[int]:
        return [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles]

    def used_bytes(self) -> list[int]:
        """Return the bytes in use on each GPU, by all processes."""
        return [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles]

    def processes(self) -> dict[int, int | None] | None:
        """Return the bytes of each compute process on the GPUs, None where a process's are not reported.

        None: no driver's list; in a container it may be empty.
        """
        nvml, found = self._nvml, {}
        try:
            for handle in self._handles:
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    used = process.usedGpuMemory
                    former = found.get(process.pid, 0)
                    found[int(process.pid)] = None if used is None or former is None else used + former
        except nvml.NVMLError:
            return None
        return found

    def _slowed_by(self) -> int:
        """Return the driver's reasons for a lower clock, those of all the GPUs; 0: none, or not reported."""
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        reasons = 0
        try:
            for handle in self._handles if ask is not None else ():
                reasons |= int(ask(handle))
        except nvml.NVMLError:
            return 0
        return reasons

    def look(self) -> tuple[float, float, int, int]:
        """SM clock in MHz and power in W, means over the GPUs; bytes in use, and reasons for a lower clock, of all
        of them.
        """
        nvml, count = self._nvml, len(self._handles)
        clocks = sum(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) for handle in self._handles)
        watts = sum(nvml.nvmlDeviceGetPowerUsage(handle) for handle in self._handles) / 1e3
        return clocks / count, watts / count, sum(self.used_bytes()), self._slowed_by()


def _visible(nvml: Any) -> list[Any]:
    """Handles in the order of ``CUDA_VISIBLE_DEVICES``, which names indexes or UUIDs; all where it is not set."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not names:
        return handles
    if all(name.isdigit() for name in names):
        return [handles[int(name)] for name in names]
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    return [by_uuid[name] for name in names]


class _Sampler:
    """Looks at clock, power and memory now and then while bursts run, from a thread of its own."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._seen: list[tuple[float, float, float, int, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="clock-and-power")

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._end.is_set():
            self._seen.append((time.perf_counter(), *self._nvml.look()))
            self._end.wait(_SAMPLE_S)

    def mean(self, start: float, end: float) -> tuple[float | None, float | None, int | None, int]:
        """Mean clock and power, most memory and all reasons of what was seen within a burst; else of the nearest
        look.
        """
        within = [look for look in self._seen if start <= look[0] < end]
        if not within and self._seen:
            within = [min(self._seen, key=lambda look: abs(look[0] - start))]
        if not within:
            return None, None, None, 0
        count, reasons = len(within), 0
        for look in within:
            reasons |= look[4]
        clock_mhz, power_w = sum(x[1] for x in within) / count, sum(x[2] for x in within) / count
        return clock_mhz, power_w, max(x[3] for x in within), reasons
