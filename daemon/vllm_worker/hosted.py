"""One vLLM engine at a time, started on a fingerprint and measured in bursts. Runs in vLLM's interpreter."""

from __future__ import annotations

import gc
import math
import multiprocessing
import random
import threading
import time
from typing import Any

BLOCK_TOKENS = 16
LOAD_MARK = "iserve: starting the engine"  # as in daemon/profile_client.py, which cannot be imported here
_KV_DTYPE = {"16bit": "auto", "int8": "int8_per_token_head", "fp8": "fp8"}
_SAMPLE_S = 0.05  # between looks at clock and power
_END_S = 20.0  # for vLLM's processes to end by themselves
_STEP = ("tokens", "sequences", "prefill_tokens", "context_tokens", "attention_pairs")
_TIMES = ("gap_s", "lead_s", "forward_s", "tail_s")
_DIGITS = 9  # of times in seconds; a recording is kept, and CUDA events tell half a microsecond


class WorkError(Exception):
    """An error of iServe's tree by name, for the caller."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Hosted:
    """Holds at most one ``vllm.LLM``; calls come from one thread.

    Args:
        spec: a WorkerSpec as JSON; its limits hold for every load.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._llm: Any = None
        self._vocab = 0
        self._room_tokens = 0
        self._most = (0, 0)  # sequences, tokens of one

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start vLLM on a checkpoint with random weights. Answers the seconds that took.

        Raises:
            WorkError: vLLM did not start; nothing of it is left.
        """
        self.unload()
        from vllm import LLM

        kv_tokens = order["kv_tokens"] or order["max_batch"] * order["max_context_tokens"]
        begun = time.monotonic()
        print(LOAD_MARK, order["checkpoint"], order["weights"], order["kv"], flush=True)
        try:
            self._llm = LLM(**self._arguments(order, kv_tokens))
        except Exception as error:
            self.unload()
            raise WorkError("EngineError", f"vLLM did not start: {_root(error)}") from error
        self._vocab = self._llm.llm_engine.model_config.get_vocab_size()
        self._room_tokens = kv_tokens
        self._most = (order["max_batch"], order["max_context_tokens"])
        return {"start_s": f"{time.monotonic() - begun:.1f}"}

    def _arguments(self, order: dict[str, Any], kv_tokens: int) -> dict[str, Any]:
        config, limits = self._spec["config"], self._spec["limits"]
        tp, pp = config["tp"], config["pp"]
        # A sequence's last block is partly empty, and vLLM keeps one block for itself.
        blocks = math.ceil(kv_tokens / BLOCK_TOKENS) + order["max_batch"] + 1
        arguments: dict[str, Any] = {
            "model": order["checkpoint"],
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": order["max_context_tokens"],
            "max_num_seqs": order["max_batch"],
            "max_num_batched_tokens": limits["max_batched_tokens"],
            "gpu_memory_utilization": self._fraction(limits["memory_bytes_per_device"]),
            "num_gpu_blocks_override": blocks,
            "kv_cache_dtype": _KV_DTYPE[order["kv"]],
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "seed": 0,
        }
        if order["weights"] == "fp8":
            arguments["quantization"] = "fp8"
        if tp > 1:
            arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        return arguments

    def _fraction(self, memory_bytes: int) -> float:
        with _Nvml() as nvml:
            total = min(nvml.total_bytes())
        return math.floor(10_000 * min(1.0, memory_bytes / total)) / 10_000

    def unload(self) -> None:
        """End vLLM and every process of it. Safe to call when nothing is loaded."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
        gc.collect()
        end = time.monotonic() + _END_S
        for process in multiprocessing.active_children():
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _engine(self) -> Any:
        if self._llm is None:
            raise WorkError("UnavailableError", "nothing is loaded; POST /profile/load first")
        return self._llm

    def bursts(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Bursts back to back: readings as the client's RunReading, in order."""
        llm = self._engine()
        batch, input_tokens, output_tokens = order["batch"], order["input_tokens"], order["output_tokens"]
        self._check(batch, input_tokens + output_tokens)
        prompts = _prompts(batch, input_tokens, self._vocab)
        parameters = _greedy(output_tokens)
        runs: list[tuple[float, float]] = []
        try:
            llm.collective_rpc("iserve_timer_start", args=(order["repeat"], order["steps"]))
            with _Nvml() as nvml, _Sampler(nvml) as sampler:
                begun = time.perf_counter()
                while not runs or (len(runs) < order["most"] and runs[-1][1] - begun < order["until_s"]):
                    start = time.perf_counter()
                    done = llm.generate(prompts, parameters, use_tqdm=False)
                    runs.append((start, time.perf_counter()))
                    if any(len(one.outputs[0].token_ids) != output_tokens for one in done):
                        raise WorkError("EngineError", "vLLM ended a sequence before its length")
            rows = llm.collective_rpc("iserve_timer_read")
        except WorkError:
            raise
        except Exception as error:
            self.unload()
            raise WorkError("EngineError", f"vLLM failed in a run: {_root(error)}") from error
        return [_reading(start, end, rows, sampler) for start, end in runs]

    def _check(self, batch: int, tokens: int) -> None:
        most_sequences, most_tokens = self._most
        if batch > most_sequences or tokens > most_tokens or batch * tokens > self._room_tokens:
            raise WorkError(
                "ConfigError",
                f"{batch} sequences of {tokens} tokens do not fit what was loaded: {most_sequences} sequences, "
                f"{most_tokens} tokens each, {self._room_tokens} in the KV cache",
            )

    def memory(self) -> list[dict[str, Any]]:
        """RankMemory of every worker, as vLLM itself counted it."""
        tp = self._spec["config"]["tp"]
        return [_rank_memory(rank, rank // tp, counted) for rank, counted in enumerate(self._counted())]

    def _counted(self) -> list[dict[str, int]]:
        return list(self._engine().collective_rpc("iserve_memory"))


def _rank_memory(rank: int, stage: int, counted: dict[str, int]) -> dict[str, Any]:
    block_bytes = counted["kv_bytes"] // max(1, counted["blocks"])
    return {
        "rank": rank,
        "stage": stage,
        "weights_bytes": counted["weights"],
        "kv_bytes": counted["kv_bytes"],
        "activation_peak_bytes": counted["peak_activation_memory"],
        "pp_buffer_bytes": 0,  # inside the activations
        "runtime_bytes": counted["non_torch_memory"],
        "graph_bytes": counted["graphs"],
        "kv_room_tokens": counted["blocks"] * counted["block_tokens"],
        "kv_block_tokens": counted["block_tokens"],
        "kv_blocks": counted["available_kv"] // block_bytes if block_bytes else 0,
        "budget_bytes": counted["requested_memory"],
    }


def _prompts(batch: int, input_tokens: int, vocab: int) -> list[dict[str, list[int]]]:
    source = random.Random(batch * 1_000_003 + input_tokens)
    return [{"prompt_token_ids": [source.randrange(vocab) for _ in range(input_tokens)]} for _ in range(batch)]


def _greedy(output_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
    )


def _reading(start: float, end: float, rows: list[list[list[float]]], sampler: _Sampler) -> dict[str, Any]:
    """One burst: its steps are those that began within it (one clock for all processes of a machine).

    Of several ranks the one whose forwards took longest is kept.
    """
    by_rank = [[row for row in rank if start <= row[0] < end] for rank in rows]
    steps = max(by_rank, key=lambda rank: sum(row[8] for row in rank))
    device_s = sum(row[8] for row in steps)
    clock_mhz, power_w, held_bytes = sampler.mean(start, end)
    return {
        "e2e_s": round(end - start, _DIGITS),
        "device_s": round(device_s, _DIGITS),
        "host_s": round(max(0.0, end - start - device_s), _DIGITS),
        "sm_clock_mhz": clock_mhz,
        "power_w": power_w,
        "held_bytes": held_bytes,
        "steps": [
            {
                **{name: int(value) for name, value in zip(_STEP, row[1:6], strict=True)},
                **{name: round(value, _DIGITS) for name, value in zip(_TIMES, row[6:10], strict=True)},
            }
            for row in steps
        ],
    }


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class _Nvml:
    """The driver's view of the GPUs this process may see. Does not make a CUDA context."""

    def __enter__(self) -> _Nvml:
        from vllm.third_party import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in _visible(pynvml)]
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()

    def total_bytes(self) -> list[int]:
        return [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles]

    def look(self) -> tuple[float, float, int]:
        """SM clock in MHz and power in W, means over the GPUs; bytes in use, over all of them."""
        nvml, count = self._nvml, len(self._handles)
        clocks = sum(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) for handle in self._handles)
        watts = sum(nvml.nvmlDeviceGetPowerUsage(handle) for handle in self._handles) / 1e3
        held = sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        return clocks / count, watts / count, held


def _visible(nvml: Any) -> list[int]:
    import os

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if named and all(part.strip().isdigit() for part in named.split(",")):
        return [int(part) for part in named.split(",")]
    return list(range(nvml.nvmlDeviceGetCount()))


class _Sampler:
    """Looks at clock, power and memory now and then while bursts run, from a thread of its own."""

    def __init__(self, nvml: _Nvml) -> None:
        self._nvml = nvml
        self._seen: list[tuple[float, float, float, int]] = []
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

    def mean(self, start: float, end: float) -> tuple[float | None, float | None, int | None]:
        """Mean clock and power and most memory of what was seen within a burst; else of the nearest look."""
        within = [look for look in self._seen if start <= look[0] < end]
        if not within and self._seen:
            within = [min(self._seen, key=lambda look: abs(look[0] - start))]
        if not within:
            return None, None, None
        count = len(within)
        return sum(x[1] for x in within) / count, sum(x[2] for x in within) / count, max(x[3] for x in within)
