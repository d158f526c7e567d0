"""Times every engine step inside a worker process, and can make a cut model run as deep as the whole one.

It needs torch and the standard library alone, because it runs in the interpreter of another engine.
vLLM loads it as a ``vllm.general_plugins`` entry point (``daemon/profiling_worker`` on ``PYTHONPATH``) in each of
its processes; TensorRT-LLM through ``iserve_profiling.tensorrt_llm_step_timer``. It does nothing unless
``ISERVE_STEP_TIMER`` is set; on vLLM to one of:

* ``rpc``: records are asked for through ``LLM.collective_rpc("iserve_timer_start" / "iserve_timer_read")``;
* ``memory``: nothing is timed; ``LLM.collective_rpc("iserve_memory")`` alone is answered, as it is with ``rpc``;
* a path: every process appends its records there as JSON lines, ``{pid}`` in the path filled in.

A step on the GPU's own timeline has three parts, told apart by CUDA events: ``lead`` (inputs are made),
``forward`` (the model: exactly the replay of its CUDA graph, or the call), ``tail`` (logits and sampling);
``gap`` is what lies between the last step's tail and this one's lead, when the GPU waited for the host.

**Repeating.** With ``repeat`` = r the forward of every step runs r times on the same inputs: keys and values are
written r times to the same places, so nothing but time changes. A fingerprint of k layers then takes the time of
k * r layers, with the overlap of host and GPU, the clocks and the power of the whole model, in a fingerprint's
memory. It holds while one layer's weights are larger than the GPU's cache (else a repeat finds them there).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from iserve_profiling.compile_watch import WATCH
from iserve_profiling.expert_routing import end_counting, expert_routing, start_counting
from iserve_profiling.random_words import install as install_random_words

COLUMNS = (
    "host_s",  # time.perf_counter() when the host began the step
    "tokens",  # scheduled, over all sequences
    "sequences",
    "prefill_tokens",
    "context_tokens",  # in the cache before the step, over all sequences
    "attention_pairs",  # query-key pairs that causal attention computes, one head, one layer
    "gap_s",
    "lead_s",
    "forward_s",
    "tail_s",
)
_LIMIT = 200_000  # steps kept; later ones are not recorded


def attention_pairs(scheduled: list[int], computed: list[int]) -> int:
    """Query-key pairs of causal attention: each new token sees all before it and itself."""
    return sum(q * c + q * (q + 1) // 2 for q, c in zip(scheduled, computed, strict=True))


class _Step:
    __slots__ = ("begin", "end", "facts", "forward_begin", "forward_end")

    def __init__(self, facts: tuple[float, ...]) -> None:
        self.facts = facts
        self.begin = self.forward_begin = self.forward_end = self.end = None


class StepTimer:
    """The timer of one worker process. All calls come from the thread that runs the model."""

    def __init__(self) -> None:
        self.repeat = 1
        self.recording = False
        self.in_step = False
        self._in_forward = False
        self._steps: list[_Step] = []
        self._current: _Step | None = None
        self._last_end: torch.cuda.Event | None = None  # of the step that was read last
        self._spare: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._reset()
        self.recording = True

    def stop(self) -> None:
        self.recording = False

    def _reset(self) -> None:
        for step in self._steps:
            self._give_back(step)
        self._steps.clear()
        self._current = None
        self._keep_end(None)

    def _give_back(self, step: _Step) -> None:
        events = (step.begin, step.forward_begin, step.forward_end, step.end)
        self._spare.extend(e for e in events if e is not None and e is not self._last_end)

    def _keep_end(self, event: torch.cuda.Event | None) -> None:
        """Until the next step is read, whose gap begins there."""
        if self._last_end is not None:
            self._spare.append(self._last_end)
        self._last_end = event

    def _event(self) -> torch.cuda.Event:
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self, facts: Callable[[], tuple[float, ...]]) -> None:
        """``facts``: the columns up to the times; asked for only when they are recorded."""
        self.in_step = True
        self._current = None
        if self.recording and len(self._steps) < _LIMIT:
            self._current = _Step(facts())
            self._current.begin = self._event()

    def run_forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """``forward``, timed as the step's forward and repeated; inside another forward just called."""
        if not self.in_step or self._in_forward or torch.cuda.is_current_stream_capturing():
            return forward(*args, **kwargs)
        self._in_forward = True
        step = self._current
        try:
            if step is not None:
                step.forward_begin = self._event()
            for _ in range(self.repeat):
                output = forward(*args, **kwargs)
            if step is not None:
                step.forward_end = self._event()
            return output
        finally:
            self._in_forward = False

    def end_step(self) -> None:
        step, self._current = self._current, None
        if step is not None and step.forward_end is not None:
            step.end = self._event()
            self._steps.append(step)

    def read(self, *, wait: bool = True) -> list[list[float]]:
        """Rows of :data:`COLUMNS` for the steps whose GPU work is done, which are then forgotten.

        The first step since the start has no gap. May be called from another thread than the model's.
        """
        if wait:
            torch.cuda.synchronize()
        # Not all that are done: while they are asked, one that was not may end, and the next one with it.
        done = list(itertools.takewhile(lambda step: step.end.query(), self._steps))
        rows, last_end = [], self._last_end
        for step in done:
            gap = 0.0 if last_end is None else last_end.elapsed_time(step.begin)
            lead = step.begin.elapsed_time(step.forward_begin)
            forward = step.forward_begin.elapsed_time(step.forward_end)
            tail = step.forward_end.elapsed_time(step.end)
            rows.append([*step.facts, *(ms / 1e3 for ms in (gap, lead, forward, tail))])
            last_end = step.end
        del self._steps[: len(done)]
        if done:
            self._keep_end(last_end)
        for step in done:
            self._give_back(step)
        return rows


def _facts(scheduler_output: Any) -> tuple[float, ...]:
    """Return what a step computes, from vLLM's scheduler output (one that has tokens)."""
    by_request = scheduler_output.num_scheduled_tokens
    tokens, sequences = scheduler_output.total_num_scheduled_tokens, len(by_request)
    cached = scheduler_output.scheduled_cached_reqs
    new = scheduler_output.scheduled_new_reqs
    context = sum(cached.num_computed_tokens) + sum(r.num_computed_tokens for r in new)
    if tokens == sequences and not new:  # decode alone, the common step: one token each
        return (time.perf_counter(), tokens, sequences, 0, context, context + tokens)
    scheduled = [by_request[r] for r in cached.req_ids] + [by_request[r.req_id] for r in new]
    computed = [*cached.num_computed_tokens, *(r.num_computed_tokens for r in new)]
    decoding = sum(q == 1 for q in scheduled[: len(cached.req_ids)])
    pairs = attention_pairs(scheduled, computed)
    return (time.perf_counter(), tokens, sequences, tokens - decoding, context, pairs)


TIMER = StepTimer()


def register() -> None:
    """Entry point for vLLM. Does nothing unless asked; safe to call again."""
    asked = os.environ.get("ISERVE_STEP_TIMER")
    if not asked:
        return
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "iserve_memory"):
        return
    _count_memory(Worker)
    install_random_words()
    if asked == "memory":
        return
    _time_steps(Worker)
    if asked != "rpc":
        _write_to(Path(asked.replace("{pid}", str(os.getpid()))))


def _count_memory(worker_class: Any) -> None:
    """Keep what the engine counts at its start and tells no caller: bytes of graphs, layout of the KV cache."""
    load_model, initialize = worker_class.load_model, worker_class.initialize_from_config

    @functools.wraps(load_model)
    def load_model_then_watch_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        capture, self.iserve_graph_bytes = self.model_runner.capture_model, None

        def capture_model(*args: Any, **kwargs: Any) -> Any:
            captured = capture(*args, **kwargs)
            if not kwargs.get("profile_only", False):  # 0.30: the newer runner captures some first, to estimate
                self.iserve_graph_bytes = captured
            return captured

        self.model_runner.capture_model = capture_model
        return result

    @functools.wraps(initialize)
    def initialize_from_config(self: Any, kv_cache_config: Any) -> Any:
        self.iserve_kv = kv_layout(kv_cache_config)
        self.iserve_kept = kept_by_layer(kv_cache_config)
        return initialize(self, kv_cache_config)

    worker_class.load_model = load_model_then_watch_graphs
    worker_class.initialize_from_config = initialize_from_config
    worker_class.iserve_memory = _rpc_memory
    worker_class.iserve_count_experts = _rpc_count_experts


def kv_layout(config: Any) -> dict[str, int]:
    """Bytes, blocks, tensors and layers of vLLM's ``KVCacheConfig``.

    Until 0.28 each tensor has its own size and is shared by layers; from 0.29 on every entry carries the size of
    the one allocation (``KVCacheTensor(size, layers, layer_stride, block_stride, offset)``).

    Raises:
        AttributeError: the config has neither form.
    """
    tensors = [tensor for tensor in config.kv_cache_tensors if not getattr(tensor, "host_resident", False)]
    if all(hasattr(tensor, "shared_by") for tensor in tensors):
        kv_bytes = sum(tensor.size for tensor in tensors)
    else:
        kv_bytes = max(tensor.size for tensor in tensors if tensor.layers is not None)
    groups = [len(group.layer_names) for group in config.kv_cache_groups]
    return {
        "kv_bytes": kv_bytes,
        "blocks": config.num_blocks,
        "kv_tensors": max(groups),  # layers that a block holds
        "kv_layers": sum(groups),
    }


def kept_by_layer(config: Any) -> list[list[Any]]:
    """Return rows of layer index, bytes of a token, bytes of a sequence's state, and window (None: no window).

    Read from the specification that vLLM itself made of each layer's cache, without what is padded.

    Raises:
        AttributeError: a specification says neither what a block nor what a state takes.
    """
    rows: dict[int, list[Any]] = {}
    for group in config.kv_cache_groups:
        of_each = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # layers that differ but share tables
        for name in group.layer_names:
            spec = group.kv_cache_spec if of_each is None else of_each[name]
            index = next(map(int, re.findall(r"\d+", str(name))), 0)
            row = rows.setdefault(index, [index, 0.0, 0, None])
            if hasattr(spec, "shapes"):
                states = zip(spec.shapes, spec.dtypes, strict=True)
                row[2] += sum(math.prod(shape) * dtype.itemsize for shape, dtype in states)
                continue
            names = ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes")
            unpadded = next((known for known in names if hasattr(spec, known)), names[-1])
            row[1] += getattr(spec, unpadded) / spec.block_size
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            row[3] = row[3] or window
    return [rows[index] for index in sorted(rows)]


def _time_steps(worker_class: Any) -> None:
    load_model = worker_class.load_model
    execute, sample = worker_class.execute_model, worker_class.sample_tokens

    @functools.wraps(load_model)
    def load_model_then_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        _refuse_broken_graphs()
        model = self.model_runner.get_model()
        model.forward = functools.partial(TIMER.run_forward, model.forward)
        return result

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return execute(self, scheduler_output)
        TIMER.begin_step(functools.partial(_facts, scheduler_output))
        try:
            output = execute(self, scheduler_output)
        finally:
            TIMER.in_step = False
        if output is not None:  # not the last pipeline stage: nothing is sampled here
            TIMER.end_step()
        return output

    @functools.wraps(sample)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = sample(self, grammar_output)
        TIMER.end_step()
        return output

    hook_replay()
    worker_class.load_model = load_model_then_hook
    worker_class.execute_model = execute_model
    worker_class.sample_tokens = sample_tokens
    worker_class.iserve_timer_start = _rpc_start
    worker_class.iserve_timer_read = _rpc_read
    worker_class.iserve_compilations = _rpc_compilations


def _refuse_broken_graphs() -> None:
    """Raise where one step is several replays outside the model's forward, each of which would count as a forward.

    vLLM 0.24 to 0.33 all have the function that says so; 0.30 and later run some architectures in this way.

    Raises:
        RuntimeError: breakable CUDA graphs are on, or this release does not tell.
    """
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError as error:
        raise RuntimeError(
            f"this vLLM does not tell the step timer whether it uses breakable CUDA graphs ({error}), whose steps "
            "would be timed wrongly"
        ) from error
    if is_breakable_cudagraph_enabled():
        raise RuntimeError("the step timer cannot time breakable CUDA graphs, which vLLM uses for this model")


def hook_replay() -> None:
    """The replay of a CUDA graph within a step is its forward, unless a forward around it is."""
    replay = torch.cuda.CUDAGraph.replay

    @functools.wraps(replay)
    def timed_replay(self: Any) -> None:
        TIMER.run_forward(replay, self)

    torch.cuda.CUDAGraph.replay = timed_replay


def start(repeat: int, record: bool) -> None:
    """Repeat every forward ``repeat`` times from now on, and record when asked."""
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, got {repeat}")
    WATCH.install()
    TIMER.repeat = repeat
    if record:
        TIMER.start()
    else:
        TIMER.stop()


def read() -> list[list[float]]:
    """End the recording; its rows."""
    TIMER.stop()
    return TIMER.read()


def compilations() -> list[tuple[float, float]]:
    """Return begin and end of every compilation since the last call."""
    return WATCH.read()


def _rpc_start(_worker: Any, repeat: int, record: bool) -> None:
    start(repeat, record)


def _rpc_read(_worker: Any) -> list[list[float]]:
    return read()


def _rpc_compilations(_worker: Any) -> list[tuple[float, float]]:
    return compilations()


def _rpc_memory(worker: Any) -> dict[str, Any]:
    """Bytes as vLLM itself counted them when it sized the KV cache (``Worker.determine_available_memory``).

    Raises:
        AttributeError: this release does not keep one of them; a missing figure is never 0.
        RuntimeError: it did not tell what its CUDA graphs take.
    """
    weights, estimate = int(worker.model_runner.model_memory_usage), int(worker.cudagraph_memory_estimate)
    activations = int(worker.peak_activation_memory)
    if hasattr(worker, "total_consumed"):  # 0.27.1 on: weights and non-torch in one, graphs among the activations
        runtime = int(worker.total_consumed) - weights
        activations -= estimate if _estimates_graphs() else 0
    else:
        runtime = int(worker.non_torch_memory)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "weights": weights,
        "peak_activation_memory": activations,
        "non_torch_memory": runtime,
        "cudagraph_memory_estimate": estimate,
        "requested_memory": int(worker.requested_memory),
        "available_kv": int(worker.available_kv_cache_memory_bytes),
        "graphs": _graph_bytes(worker),
        **worker.iserve_kv,
        "kept": worker.iserve_kept,
        "expert_routing": expert_routing(worker.model_runner.get_model()),
        "block_tokens": int(worker.cache_config.block_size),
        "torch_reserved": torch.cuda.memory_reserved(),
        "device_used": total_bytes - free_bytes,
        "device_total": total_bytes,
    }


def _rpc_count_experts(worker: Any, begin: bool) -> dict[str, float] | None:
    model = worker.model_runner.get_model()
    return start_counting(model) if begin else end_counting(model)


def _graph_bytes(worker: Any) -> int:
    """Return the bytes of the captured CUDA graphs; 0 where the engine captures none by its own settings.

    Raises:
        RuntimeError: nothing was captured in the way that is watched, or its bytes were not reported.
    """
    captured = worker.iserve_graph_bytes
    if captured is None and worker.model_config.enforce_eager:
        return 0
    if not isinstance(captured, int):
        raise RuntimeError(
            "vLLM did not tell what its CUDA graphs take: capture_model of "
            f"{type(worker.model_runner).__name__} gave {captured!r}"
        )
    return captured


def _estimates_graphs() -> bool:
    from vllm import envs

    return bool(envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)


def _write_to(path: Path, interval_s: float = 1.0) -> None:
    """Append finished steps to ``path`` every second, from a thread of its own."""
    lock = threading.Lock()

    def flush(*, wait: bool) -> None:
        with lock:
            rows = TIMER.read(wait=wait)
            if rows:
                with path.open("a") as file:
                    file.writelines(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows)

    def loop() -> None:
        while True:
            time.sleep(interval_s)
            flush(wait=False)

    TIMER.recording = True
    atexit.register(flush, wait=True)
    threading.Thread(target=loop, daemon=True, name="iserve-step-timer").start()
