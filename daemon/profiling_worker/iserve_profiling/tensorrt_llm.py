"""Profiling worker around TensorRT-LLM: one engine at a time, started on a fingerprint and measured in bursts.

``python -m iserve_profiling.tensorrt_llm --spec FILE`` in its interpreter. Written from its documentation and
sources, never run. The options are those of a deployment (``daemon/engines/tensorrt_llm/options.py``, which cannot
be imported here), but for the cache of earlier prompts: it is off, because bursts repeat theirs.
"""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

from iserve_profiling.base import Nvml, ProfilingEngine, Rows, WorkError
from iserve_profiling.http import read_spec, serve
from iserve_profiling.neighbours import family, own_family
from iserve_profiling.tensorrt_llm_rank import Rank

TOKENS_PER_BLOCK = 32
_KV_FRACTION_OF_REST = 0.95
_KV_DTYPE = {"16bit": "auto", "fp8": "fp8"}
_EXTRA_TOKENS = 2  # that its scheduler keeps room for in addition to each sequence, one step ahead
_LOOK_S = 0.2  # between looks whether all ranks live
_END_S = 90.0  # for all of it to end by itself: MPI alone may take 60


class TensorRtLlmProfilingEngine(ProfilingEngine):
    """Holds at most one ``tensorrt_llm.LLM``.

    Args:
        timer: the name that the ranks' step timers answer to.
    """

    engine = "TensorRT-LLM"

    def __init__(self, spec: dict[str, Any], timer: str) -> None:
        super().__init__(spec)
        self._timer = timer
        self._llm: Any = None
        self._ranks: list[Rank] = []
        self._memory: list[dict[str, Any]] = []
        self._watch: _Watch | None = None

    @property
    def is_loaded(self) -> bool:
        return self._llm is not None

    def nvml(self) -> Any:
        import pynvml

        return pynvml

    def start(self, order: dict[str, Any], kv_tokens: int) -> int:
        from tensorrt_llm import LLM

        from iserve_profiling import tensorrt_llm_step_timer  # noqa: F401  # goes along into the ranks

        config = _read_config(Path(order["checkpoint"]))
        _check_formats(order, config)
        _check_kinds(config)
        with Nvml(self.nvml()) as nvml:
            others = nvml.used_bytes()
        self._llm = LLM(**self._arguments(order, kv_tokens))
        tp, pp = self.spec["config"]["tp"], self.spec["config"]["pp"]
        for number in range(tp * pp):
            self._ranks.append(Rank(self._timer, number))
        counted = [rank.call("memory") for rank in self._ranks]
        self._memory = [
            _rank_memory(number, number // tp, each, others[number]) for number, each in enumerate(counted)
        ]
        for rank, each in zip(self._ranks, counted, strict=True):
            rank.pid = each["pid"]
        self._watch = _Watch(self._ranks)
        return int(config["vocab_size"])

    def _arguments(self, order: dict[str, Any], kv_tokens: int) -> dict[str, Any]:
        from tensorrt_llm.llmapi import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig

        config, limits = self.spec["config"], self.spec["limits"]
        most, longest = order["max_batch"], order["max_context_tokens"]
        step_tokens = limits["max_batched_tokens"]
        # Room for every sequence's partly empty block; and for the dry run of a whole step, or it measures less.
        tokens = max(kv_tokens, step_tokens) + _EXTRA_TOKENS * most
        blocks = math.ceil(tokens / TOKENS_PER_BLOCK) + most
        return {
            "model": order["checkpoint"],
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_batch_size": most,
            "max_num_tokens": step_tokens,
            "max_seq_len": longest,
            "max_input_len": longest,
            "max_beam_width": 1,
            "tensor_parallel_size": config["tp"],
            "pipeline_parallel_size": config["pp"],
            "enable_chunked_prefill": step_tokens < longest,
            "kv_cache_config": KvCacheConfig(
                dtype=_KV_DTYPE[order["kv"]],
                tokens_per_block=TOKENS_PER_BLOCK,
                max_tokens=blocks * TOKENS_PER_BLOCK,
                free_gpu_memory_fraction=_KV_FRACTION_OF_REST,
                enable_block_reuse=False,
            ),
            "scheduler_config": SchedulerConfig(
                capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
            ),
            "cuda_graph_config": CudaGraphConfig(max_batch_size=most),
        }

    def unload(self) -> None:
        llm, self._llm = self._llm, None
        ranks, self._ranks, self._memory = self._ranks, [], []
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        for rank in ranks:
            rank.close()
        if llm is not None:
            deadline = threading.Timer(_END_S, _give_up, ("it did not end",))  # of a rank that died it may wait on
            deadline.daemon = True
            deadline.start()
            llm.shutdown()
            deadline.cancel()
            del llm
        gc.collect()

    def own_processes(self) -> set[int]:
        return own_family().union(*(family(rank.pid) for rank in self._ranks))

    def set_timer(self, *, repeat: int, record: bool) -> None:
        for rank in self._ranks:
            rank.call("start", repeat=repeat, record=record)

    def read_timer(self) -> list[Rows]:
        return [rank.call("read") for rank in self._ranks]

    def compilations(self) -> list[tuple[float, float]]:
        return [(begin, end) for rank in self._ranks for begin, end in rank.call("compilations")]

    def generate(self, prompts: list[list[int]], output_tokens: int, active: int) -> list[int]:
        from tensorrt_llm import SamplingParams

        # Without a tokenizer it wants an end; which one does not matter where none is minded.
        parameters = SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, detokenize=False, end_id=0, pad_id=0
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._llm.generate(asked, parameters, use_tqdm=False)
        return [len(one.outputs[0].token_ids) for one in done]

    def check_steps(self, rows: list[Rows], *, batch: int, input_tokens: int, output_tokens: int) -> None:
        """Check the counts of the steps: each token but a sequence's last is computed once and sees all before it
        and itself.

        If the sources were read wrongly, or another release counts differently, these sums would differ.
        """
        length = input_tokens + output_tokens - 1
        expected = (batch * length, batch * length * (length + 1) // 2)
        for number, steps in enumerate(rows):
            counted = (int(sum(row[1] for row in steps)), int(sum(row[5] for row in steps)))
            if counted != expected:
                raise WorkError(
                    "EngineError",
                    f"rank {number} of TensorRT-LLM recorded {counted[0]} tokens and {counted[1]} pairs of a "
                    f"burst of {expected[0]} tokens and {expected[1]} pairs; iServe does not read this release "
                    "rightly, so nothing is kept of it",
                )

    def memory(self) -> list[dict[str, Any]]:
        self.check_loaded()
        return self._memory


class _Watch:
    """Until :meth:`end`, the death of a rank ends this process: the engine may wait for its answer for ever."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks, self._over = list(ranks), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="ranks")
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            for rank in self._ranks:
                if not rank.lives():
                    if self._over.wait(_LOOK_S * 5):  # it says so itself
                        return
                    _give_up(f"its rank process {rank.pid} died")


def _give_up(why: str) -> None:
    """End this process; the wrapper ends what is left of the engine."""
    print(f"EngineError: TensorRT-LLM: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def _check_formats(order: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise WorkError if the weights asked for are not those that TensorRT-LLM would make of this checkpoint."""
    stored = config.get("quantization_config") or (Path(order["checkpoint"]) / "hf_quant_config.json").exists()
    if (order["weights"] != "16bit") != bool(stored):
        raise WorkError(
            "ConfigError",
            f"weights={order['weights']} of a checkpoint that is {'' if stored else 'not '}quantized: "
            "TensorRT-LLM takes the format from the checkpoint and quantizes nothing while loading",
        )
    if order["kv"] not in _KV_DTYPE:
        raise WorkError("ConfigError", f"TensorRT-LLM has no kv={order['kv']}; take {' or '.join(_KV_DTYPE)}")


def _check_kinds(config: dict[str, Any]) -> None:
    """Raise WorkError for layers that look back differently far."""
    if len(set(config.get("layer_types") or ())) > 1 or config.get("sliding_window_pattern"):
        raise WorkError(
            "ConfigError",
            "how TensorRT-LLM keeps the cache of layers of several kinds was not read, so its memory would be "
            "guessed; take another engine for this model",
        )


def _rank_memory(rank: int, stage: int, counted: dict[str, int], others_bytes: int) -> dict[str, Any]:
    """Return a rank's memory.

    ``outside`` is seen on the whole GPU: what other processes had of it before is not counted.
    """
    return {
        "rank": rank,
        "stage": stage,
        "weights_bytes": counted["weights"],
        "kv_bytes": counted["kv_bytes"],
        "activation_peak_bytes": counted["activation_peak"],
        "pp_buffer_bytes": 0,  # inside the activations
        "runtime_bytes": max(0, counted["outside"] - others_bytes),
        "graph_bytes": 0,  # inside the runtime's
        "kv_room_tokens": counted["blocks"] * counted["block_tokens"],
        "kv_block_tokens": counted["block_tokens"],
        "kv_blocks": 0,  # it was given the number
        "budget_bytes": 0,  # it knows no other limit than the cache's
    }


def main() -> None:
    """Serve the profiling routes until SIGTERM."""
    spec, machine, _ = read_spec(__doc__)
    name = secrets.token_hex(8)
    # Before the import: MPI hands the ranks the environment that it found when it was loaded.
    os.environ["ISERVE_STEP_TIMER"] = f"unix:{name}"
    import tensorrt_llm  # noqa: F401  # takes seconds; before the first answer, so that ready means ready

    serve(TensorRtLlmProfilingEngine(spec, name), machine)


if __name__ == "__main__":  # ranks are spawned, and import this module again
    main()
