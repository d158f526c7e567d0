"""Our step timer in TensorRT-LLM's rank processes (PyTorch backend, 1.2). Read in its sources, never run.

TensorRT-LLM has no plug-ins for processes, but it has models from outside its tree: a class that is registered
with ``register_auto_model`` in the process that makes the ``LLM`` is sent, by name, to every rank it spawns, and
the rank imports the module that the name stands in. This is such a module: import it before the ``LLM`` is made.
Its class is no model; what counts is that it is imported. The folder must be on the import path, which the ranks
are given.

It does nothing unless ``ISERVE_STEP_TIMER`` is ``unix:NAME``. Then every rank answers on the abstract socket of
:func:`address`, one JSON object per line, to processes of the same user on this machine alone: ``{"call":
"start", "repeat", "record"}``, ``{"call": "read"}``, ``{"call": "memory"}``; the answer has ``value`` or
``error``.

**Repeating.** The model's forward has the last norm and the logits in it here, so these are repeated too. They are
the same at every depth, so part of what a repeat costs outside its layers, which two depths show. The forward
reads positions and cache lengths that were set before it and advances neither, so that a repeat writes keys and
values to the same places (without speculative decoding, which we never ask for).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import socket
import struct
import threading
import time
from typing import Any

import torch
from tensorrt_llm._torch.models.modeling_utils import register_auto_model

from iserve_profiling import step_timer as core
from iserve_profiling.step_timer import TIMER, attention_pairs

_PREFIX = "unix:"
_READY_S = 30.0  # by when a rank is ready once the first one is
_STEP = threading.RLock()  # held by a step of the model's thread, and by the thread that starts or reads the timer


@register_auto_model("IserveStepTimer")
class StepTimerCarrier:
    """Takes this module along into each rank. No config.json names it."""


def address(name: str, rank: int) -> str:
    """Return the address of a rank's socket: abstract, so that nothing is left of it when the rank ends."""
    return f"\0iserve-step-timer-{name}-{rank}"


class _Counted:
    """Bytes of this rank, as the engine's own dry run of the largest step leaves them."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}


COUNTED = _Counted()


def register() -> None:
    """Hook the classes that this file was written for.

    Raises:
        ImportError: a release in which they differ.
    """
    asked = os.environ.get("ISERVE_STEP_TIMER", "")
    if not asked.startswith(_PREFIX):
        return
    from tensorrt_llm._torch.pyexecutor._util import KvCacheCreator
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

    if hasattr(PyExecutor, "iserve_hooked"):
        return
    _check(PyExecutor, "_forward_step", ["self", "scheduled_requests", "new_tensors_device"])
    _check(PyExecutor, "_forward_step_inter_pp", ["self", "scheduled_batch"])
    _check(PyExecutor, "_sample_async", ["self", "scheduled_batch", "batch_outputs"])
    _check(KvCacheCreator, "configure_kv_cache_capacity", ["self", "py_executor"])
    if not hasattr(PyExecutor, "is_warmup"):
        raise ImportError("iserve's step timer does not know this TensorRT-LLM: PyExecutor has no is_warmup")
    _hook_memory(KvCacheCreator)
    _hook_steps(PyExecutor)
    _hook_start(PyExecutor, asked.removeprefix(_PREFIX))
    core.hook_replay()
    PyExecutor.iserve_hooked = True


def _check(owner: type, name: str, parameters: list[str]) -> None:
    method = getattr(owner, name, None)
    found = [] if method is None else list(inspect.signature(method).parameters)[: len(parameters)]
    if found != parameters:
        told = f"takes ({', '.join(found)})" if found else "is not there"
        raise ImportError(
            f"iserve's step timer does not know this TensorRT-LLM: {owner.__name__}.{name} {told}, expected "
            f"({', '.join(parameters)})"
        )


def _hook_steps(executor_class: Any) -> None:
    forward_step, inter_pp = executor_class._forward_step, executor_class._forward_step_inter_pp
    sample_async = executor_class._sample_async

    @functools.wraps(forward_step)
    def timed_forward_step(
        self: Any, scheduled_requests: Any, new_tensors_device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self.is_warmup:
            return forward_step(self, scheduled_requests, new_tensors_device, *args, **kwargs)
        with _STEP:
            TIMER.begin_step(functools.partial(_facts, scheduled_requests, new_tensors_device is not None))
            try:
                return forward_step(self, scheduled_requests, new_tensors_device, *args, **kwargs)
            finally:
                TIMER.in_step = False

    @functools.wraps(inter_pp)
    def timed_inter_pp(self: Any, scheduled_batch: Any) -> Any:
        with _STEP:
            state = inter_pp(self, scheduled_batch)
            TIMER.end_step()  # not the last pipeline stage: nothing is sampled here
        return state

    @functools.wraps(sample_async)
    def timed_sample(self: Any, scheduled_batch: Any, batch_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with _STEP:
            state = sample_async(self, scheduled_batch, batch_outputs, *args, **kwargs)
            TIMER.end_step()
        return state

    executor_class._forward_step = timed_forward_step
    executor_class._forward_step_inter_pp = timed_inter_pp
    executor_class._sample_async = timed_sample


def _facts(batch: Any, ahead: bool) -> tuple[float, ...]:
    """Return the start and the work of a step, from TensorRT-LLM's ``ScheduledRequests``.

    Args:
        ahead: the step before was not read back yet, so a request that was in it has a token more than it knows.
    """
    scheduled = [request.context_chunk_size for request in batch.context_requests]
    computed = [request.context_current_position for request in batch.context_requests]
    prefill = sum(scheduled)
    for request in batch.generation_requests:
        unread = ahead and not request.is_dummy and request.py_batch_idx is not None
        computed.append(request.max_beam_num_tokens - (0 if unread else 1))
        scheduled.append(1)
    pairs = attention_pairs(scheduled, computed)
    return (time.perf_counter(), sum(scheduled), len(scheduled), prefill, sum(computed), pairs)


def _hook_memory(creator_class: Any) -> None:
    """Around the engine's own dry run, which measures how much a step of ``max_num_tokens`` takes."""
    configure = creator_class.configure_kv_cache_capacity

    @functools.wraps(configure)
    def counted_configure(self: Any, py_executor: Any) -> Any:
        weights = torch.cuda.memory_allocated()
        result = configure(self, py_executor)  # resets the peak when it begins
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        dry_run_kv = _kv_stats(py_executor).allocated_bytes
        COUNTED.values = {
            "weights": weights,
            "activation_peak": max(0, torch.cuda.max_memory_allocated() - weights),
            # CUDA context, graphs, communication; and what other processes have of this GPU
            "outside": max(0, total_bytes - free_bytes - torch.cuda.memory_allocated() - dry_run_kv),
        }
        return result

    creator_class.configure_kv_cache_capacity = counted_configure


def _kv_stats(executor: Any) -> Any:
    from tensorrt_llm._torch.pyexecutor.resource_manager import ResourceManagerType

    manager = executor.resource_manager.resource_managers.get(ResourceManagerType.KV_CACHE_MANAGER)
    return manager.get_kv_cache_stats()


def _hook_start(executor_class: Any, name: str) -> None:
    initialize = executor_class.__init__
    started: list[_Answers] = []

    @functools.wraps(initialize)
    def initialize_then_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)  # warms up and captures graphs: before the forward is hooked
        model = self.model_engine.model
        if not hasattr(model, "iserve_timed"):
            model.forward = functools.partial(TIMER.run_forward, model.forward)
            model.iserve_timed = True
        if not started:  # a rank makes two, the first for the dry run
            started.append(_Answers(name, self.dist.rank, torch.cuda.current_device()))
            started[0].start()
        if COUNTED.values:
            started[0].serves_with(self)

    executor_class.__init__ = initialize_then_hook


class _Answers:
    """Answers the profiling worker, from a thread of its own; one caller at a time."""

    def __init__(self, name: str, rank: int, device: int) -> None:
        self._executor: Any = None
        self._serves = threading.Event()
        self._device = device
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address(name, rank))
        self._listener.listen(1)

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True, name="iserve-step-timer").start()

    def serves_with(self, executor: Any) -> None:
        """Note the executor made after the dry run; the first rank may have it before the other ranks."""
        self._executor = executor
        self._serves.set()

    def _serve(self) -> None:
        torch.cuda.set_device(self._device)  # a thread begins on the first
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if _user_of(connection) == os.getuid():
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rw") as stream:
                for line in stream:
                    stream.write(json.dumps(self._answer(line)) + "\n")
                    stream.flush()
        except OSError:  # it left
            return

    def _answer(self, line: str) -> dict[str, Any]:
        try:
            return {"value": self._call(**json.loads(line))}
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets it
            return {"error": f"{type(error).__name__}: {error}"}

    def _call(self, call: str, **given: Any) -> Any:
        if call == "memory":
            return self._memory()
        with _STEP:
            if call == "start":
                return core.start(**given)
            if call == "read":
                return core.read()
            if call == "compilations":
                return core.compilations()
        raise ValueError(f"no call {call!r}")

    def _memory(self) -> dict[str, int]:
        if not self._serves.wait(_READY_S):
            raise RuntimeError("TensorRT-LLM made no dry run of its largest step, so it counted no memory")
        stats = _kv_stats(self._executor)
        return {
            **COUNTED.values,
            "pid": os.getpid(),
            "kv_bytes": stats.allocated_bytes,
            "blocks": stats.max_num_blocks,
            "block_tokens": stats.tokens_per_block,
        }


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


register()
