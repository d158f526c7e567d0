"""The profiling routes: load fingerprints one after the other, run bursts, read memory and the machine.

A burst goes through the same scheduler and loop as every request, so that the host's part is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from aiohttp import web

from daemon.adapter_requests import variant_folder
from daemon.gpu_bench import bytes_per_s, flops_per_s
from daemon.nvml import driver_version
from daemon.profile_messages import ProfileError, ProfileLoad, ProfileRun, ProfileVariants
from daemon.torch_engine.api.adapters import check_variant
from daemon.torch_engine.api.streams import Streams
from daemon.torch_engine.driver import clock_and_power
from daemon.torch_engine.parallel.rank_device import RankDevice, cores_of
from daemon.torch_engine.runtime.engine import Engine
from daemon.torch_engine.runtime.sampling import SamplingParams
from daemon.torch_engine.runtime.sequences import Finish, SequenceRequest
from daemon.torch_engine.versions import component_versions
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import ADAPTER_RANKS
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    ConflictError,
    EngineError,
    IserveError,
    UnavailableError,
)
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import match_device
from fingerprint.measurements import MachineInfo, RunReading

__all__ = ["dummy_requests", "measure_device", "profile_routes"]

T = TypeVar("T")


def profile_routes(spec: WorkerSpec, engine: Engine, streams: Streams) -> Iterable[web.RouteDef]:
    """Return the routes of a worker that was started with ``profiling``.

    One of them at a time; a second gets 409.
    """
    busy = asyncio.Lock()

    def route(answer: Callable[[bytes], Awaitable[object]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                if busy.locked():
                    raise ConflictError("another profiling request is under way; send one at a time")
                async with busy:
                    return _json(await answer(await request.read()), 200)
            except IserveError as error:
                return _json(ProfileError(type(error).__name__, str(error)), _status(error))

        return handle

    async def load(body: bytes) -> object:
        await _load(spec, engine, from_json(body, ProfileLoad, what="the body"))
        return {}

    async def run(body: bytes) -> object:
        return await _run(engine, streams, from_json(body, ProfileRun, what="the body"))

    async def variants(body: bytes) -> object:
        return await _load_variants(engine, from_json(body, ProfileVariants, what="the body"))

    async def memory(body: bytes) -> object:
        return await _in_engine(engine.memory())

    async def machine(body: bytes) -> object:
        return await _in_engine(engine.call(lambda: _machine(spec)))

    return (
        web.post("/profile/load", route(load)),
        web.post("/profile/run", route(run)),
        web.post("/profile/variants", route(variants)),
        web.get("/profile/memory", route(memory)),
        web.get("/profile/machine", route(machine)),
    )


def dummy_requests(run: ProfileRun, vocab_size: int) -> list[SequenceRequest]:
    """Return random prompts, the same for the same run; greedy, and nothing ends them but their length."""
    random = np.random.default_rng((run.batch, run.input_tokens))
    prompts = random.integers(0, vocab_size, size=(run.batch, run.input_tokens))
    return [
        SequenceRequest(
            prompt=tuple(prompt),
            max_tokens=run.output_tokens,
            sampling=SamplingParams(temperature=0.0),
            adapter=_variant_name(index % run.active) if run.active else None,
        )
        for index, prompt in enumerate(prompts.tolist())
    ]


def _variant_name(number: int) -> str:
    return f"variant-{number}"


async def _load(spec: WorkerSpec, engine: Engine, order: ProfileLoad) -> None:
    if len(order.layers_per_stage) != spec.config.pp:
        raise ConfigError(f"layers for {len(order.layers_per_stage)} stages, the worker has pp={spec.config.pp}")
    stages = tuple(
        replace(stage, num_layers=layers)
        for stage, layers in zip(spec.stages, order.layers_per_stage, strict=True)
    )
    limits = replace(
        spec.limits,
        max_batch=order.max_batch,
        max_context_tokens=order.max_context_tokens,
        kv_tokens=order.max_batch * order.max_context_tokens,
    )
    config = order.in_slots(replace(spec.config, weights=order.weights, kv=order.kv))
    await _in_engine(engine.load(Path(order.checkpoint), config, stages, limits))


async def _load_variants(engine: Engine, order: ProfileVariants) -> tuple[float, ...]:
    """Load each as a client's order is: checked, read, switched to between two steps."""
    loads_s = []
    for number, path in enumerate(order.folders):
        folder = variant_folder(path, "folders")
        start_s = time.perf_counter()
        await asyncio.to_thread(check_variant, folder, ADAPTER_RANKS[-1])
        # A client that leaves cancels the wait, not the load, which has its place in the engine.
        loaded = asyncio.wrap_future(engine.load_adapter(_variant_name(number), folder))
        await _in_engine(asyncio.shield(loaded))
        loads_s.append(time.perf_counter() - start_s)
    return tuple(loads_s)


async def _run(engine: Engine, streams: Streams, run: ProfileRun) -> RunReading:
    """Run a burst: all of it is queued at once; its end is when the engine had sampled the last token."""
    _check_room(engine, run)
    requests = dummy_requests(run, engine.vocab_size)
    before = await _in_engine(engine.call(lambda: engine.totals))  # behind a step of a run that was given up
    start_s = end_s = time.perf_counter()
    stream = streams.open(engine, requests)
    try:
        async for event in stream.events():
            if event.finish is Finish.ERROR:
                raise EngineError(f"the run broke off: {event.error}")
            end_s = event.at_s
    finally:
        stream.close()
    after = engine.totals
    e2e_s, device_s = end_s - start_s, after.device_s - before.device_s
    sm_clock_mhz, power_w = clock_and_power()
    return RunReading(
        e2e_s=e2e_s,
        device_s=device_s,
        host_s=max(0.0, e2e_s - device_s),
        handover_s=after.handover_s - before.handover_s,
        sm_clock_mhz=sm_clock_mhz,
        power_w=power_w,
    )


def _check_room(engine: Engine, run: ProfileRun) -> None:
    limits = engine.limits
    if limits is None:
        raise UnavailableError("nothing is loaded; POST /profile/load first")
    if run.batch > limits.max_batch:
        raise ConfigError(f"a burst of {run.batch} does not run at once: loaded with max_batch={limits.max_batch}")
    if run.input_tokens + run.output_tokens > limits.max_context_tokens:
        raise ConfigError(
            f"{run.input_tokens} + {run.output_tokens} tokens exceed the {limits.max_context_tokens} "
            "that was loaded for"
        )
    if engine.has_work:
        raise ConflictError("the engine is not idle")


async def _in_engine(future: Awaitable[T] | object) -> T:
    """Return the result of a call in the engine's thread, torch's own errors as EngineError."""
    try:
        return await asyncio.wrap_future(future)  # type: ignore[arg-type]
    except (MemoryError, RuntimeError) as error:
        raise EngineError(f"{type(error).__name__}: {error}") from error


def _machine(spec: WorkerSpec) -> MachineInfo:
    device_ids = [device for stage in spec.stages for device in stage.device_ids]
    RankDevice(device_ids[0], 0, None)  # pins this process to its share, as a load would
    return MachineInfo(
        device=measure_device(memory_bytes=spec.limits.memory_bytes_per_device),
        num_devices=len(device_ids),
        cores_per_device=len(cores_of(device_ids[0])) or len(os.sched_getaffinity(0)),
        cpu_model=_cpu_model(),
        driver=driver_version(),
        versions=(*component_versions(), ("python", platform.python_version())),
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _json(value: object, status: int) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def _status(error: IserveError) -> int:
    for kind, status in ((BadInputError, 400), (ConflictError, 409), (UnavailableError, 503)):
        if isinstance(error, kind):
            return status
    return 500


_SECONDS = 0.1  # per figure
_ALL = 2**20


def measure_device(*, memory_bytes: int) -> GpuSpec:
    """Return datasheet figures of a known GPU; measure anything else, in about half a second on a CPU.

    A CPU share is measured with the cores this process may use: pinned, and otherwise idle. The figures are what
    torch reaches, so they are lower than the hardware's peaks, and efficiencies over them near 1.

    Args:
        memory_bytes: what a worker may use of it (a CPU share has no driver to ask).

    Returns:
        On a CPU ``name`` is "cpu"; the link between two shares is a copy through memory, which reads and
        writes, so its bandwidth is taken as half the memory's (not measured over gloo, whose latency is larger).
    """
    if torch.cuda.is_available():
        known = match_device(torch.cuda.get_device_name())
        if known is not None:
            return known
        return _measured("cuda", torch.cuda.get_device_name(), memory_bytes)
    return _measured("cpu", "cpu", memory_bytes)


def _measured(kind: str, name: str, memory_bytes: int) -> GpuSpec:
    bandwidth = bytes_per_s(kind, _SECONDS)
    return GpuSpec(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bandwidth,
        flops_16bit_per_s=flops_per_s(kind, _SECONDS),
        flops_8bit_per_s=None,
        flops_fp8_per_s=None,
        compute_capability=torch.cuda.get_device_capability() if kind == "cuda" else None,
        link_bytes_per_s=bandwidth / 2,
        link_group_size=_ALL if kind == "cpu" else 1,  # all shares of a CPU reach each other through memory
        pcie_bytes_per_s=bandwidth / 2,
    )
