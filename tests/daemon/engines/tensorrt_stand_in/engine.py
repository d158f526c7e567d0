"""Engine of the stand-in in place of a model: reads the checkpoint's files, sizes a KV cache, says "tok tok"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .adapters import Adapters
from .refusal import RefusedError

# tensorrt_llm/_torch/models, as documented
_ARCHITECTURES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Starcoder2ForCausalLM",
}
_QUANT_ALGOS = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "NVFP4", "W8A16", "W4A16", "W4A16_AWQ"}
_ADVICE = "reduce max_batch_size or max_num_tokens"
# What it says when hardware fails, which no hardware does here.
FAILURES = {
    "out-of-memory": [
        "RuntimeError: Executor creation failed due to insufficient GPU memory.",
        f"The following component could not be created: Model. Free GPU memory: 1.02 GiB. {_ADVICE}",
    ],
    "cuda-malloc": ["[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMalloc: out of memory"],
    "worker-died": [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: Executor worker died during initialization",
    ],
    "worker-error": ["RuntimeError: Executor worker returned error"],
    "unknown": ["ImportError: libmpi.so.40: cannot open shared object file"],
}
_RANK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """``stand_in.json``. A ``once`` of true removes the file when it has been read."""

    load_s: float = 0.0
    fail: str | None = None  # a key of FAILURES, after loading
    free_bytes: int = 1 << 34  # of each GPU, once weights and activations are there
    no_metrics: bool = False  # as in the one report of an empty list
    metrics_wait_s: float = 2.0  # for new records, as documented
    break_after: int | None = None  # tokens of a stream, after which the connection ends
    token_s: float = 0.0
    port_is_stolen: bool = False  # between the wrapper's look and the bind
    once: bool = False

    @classmethod
    def of(cls, directory: Path) -> Behaviour:
        file = directory / "stand_in.json"
        if not file.exists():
            return cls()
        behaviour = cls(**json.loads(file.read_text()))
        if behaviour.once:
            file.unlink()
        return behaviour


class Engine:
    """Loaded model. Requests take their turn."""

    def __init__(self, directory: Path, options: dict[str, object], behaviour: Behaviour) -> None:
        self.options, self.behaviour = options, behaviour
        self._directory = directory
        self.name = directory.name  # the reported id
        config = json.loads((directory / "config.json").read_text())
        _check_checkpoint(directory, config)
        self._config = config
        self.adapters = Adapters(options, config)
        self.tp, self.pp = int(options["tensor_parallel_size"]), int(options["pipeline_parallel_size"])  # type: ignore[call-overload]
        self.stages = self._split()
        self.max_seq_len = min(options["max_seq_len"] or config["max_position_embeddings"], _context(config))
        self.block_tokens, self.num_blocks = self._kv_room(behaviour.free_bytes)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._turn = threading.Lock()
        self._records: list[dict[str, object]] = []
        self._there = threading.Condition()
        self._iterations = 0
        self.in_flight = 0
        self.looks = 0  # at the statistics
        self.cut = threading.Event()  # a client has left in the middle of its answer

    def _split(self) -> list[int]:
        layers, given = self._config["num_hidden_layers"], self.options["pp_partition"]
        if given is not None:
            if len(given) != self.pp or sum(given) != layers:  # type: ignore[arg-type]
                raise RefusedError(
                    f"ValueError: pp_partition {given} does not fit pp_size {self.pp}, {layers} layers"
                )
            return list(given)  # type: ignore[call-overload]
        return [layers // self.pp + (stage < layers % self.pp) for stage in range(self.pp)]

    def _kv_room(self, free_bytes: int) -> tuple[int, int]:
        """Tokens of a block, and blocks: the smallest limit wins. Too few for one sequence shrink its length."""
        kv, config = self.options["kv_cache_config"], self._config
        assert isinstance(kv, dict)
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        element = 1 if kv["dtype"] == "fp8" else 2
        token_bytes = max(self.stages) * 2 * max(1, heads // self.tp) * head_dim * element
        limits = [int(kv["free_gpu_memory_fraction"] * free_bytes) // token_bytes]
        if kv["max_gpu_total_bytes"]:
            limits.append(kv["max_gpu_total_bytes"] // token_bytes)
        if kv["max_tokens"] is not None:
            limits.append(kv["max_tokens"])
        blocks = min(limits) // kv["tokens_per_block"]
        tokens = blocks * kv["tokens_per_block"]
        if tokens < self.max_seq_len:
            print(
                f"[TRT-LLM] [W] Attention window size {self.max_seq_len} exceeds upper bound {tokens} for "
                f"available blocks. Reducing to {tokens}",
                flush=True,
            )
            self.max_seq_len = tokens
        return kv["tokens_per_block"], blocks

    def spawn_ranks(self) -> None:
        """Start one process per rank, even for one GPU, in its own session; they outlive a careless parent."""
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if len(visible) < self.tp * self.pp:
            raise RefusedError(
                f"RuntimeError: Only {len(visible)} GPUs are available, but {self.tp * self.pp} are required."
            )
        for _ in range(self.tp * self.pp):
            self.ranks.append(subprocess.Popen([sys.executable, "-S", "-E", "-c", _RANK], start_new_session=True))
        folder = Path(os.environ.get("ISERVE_WORKER_FOLDER", self._directory))  # never a user's checkpoint
        (folder / "ranks").write_text(" ".join(str(rank.pid) for rank in self.ranks))
        time.sleep(self.behaviour.load_s)
        if self.behaviour.fail is not None:
            lines = FAILURES[self.behaviour.fail]
            raise RefusedError("\n".join(lines))

    def end_ranks(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def generate(self, prompt_tokens: int, output_tokens: int, adapter: str = "") -> Iterator[str]:
        """Yield one token per iteration, each with its record; ``adapter``: the content of which they are."""
        chunk = int(self.options["max_num_tokens"])  # type: ignore[call-overload]
        with self._turn:
            left = prompt_tokens
            while left > 0:
                taken = min(left, chunk)
                left -= taken
                self._note(prompt_tokens=taken, active=1)
            token = f"tok{adapter} "
            yield token
            for _ in range(output_tokens - 1):
                time.sleep(self.behaviour.token_s)
                self._note(prompt_tokens=0, active=1)
                yield token

    def _note(self, *, prompt_tokens: int, active: int) -> None:
        """Every documented key. Each iteration says it took 1 ms."""
        self._iterations += 1
        limits = {"Static": 1, "TunerRecommended": 0, "Runtime": 1}
        used = 1
        record = {
            "timestamp": "11-21-2026 12:00:00.000000",
            "iter": self._iterations,
            "iterLatencyMS": 1.0,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": int(prompt_tokens > 0),
            "numActiveRequests": active,
            "numQueuedRequests": 0,
            "numCompletedRequests": 0,
            "maxNumActiveRequests": self.options["max_batch_size"],
            "gpuMemUsage": 1 << 30,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            **{f"maxBatchSize{name}": self.options["max_batch_size"] * part for name, part in limits.items()},  # type: ignore[operator]
            **{f"maxNumTokens{name}": self.options["max_num_tokens"] * part for name, part in limits.items()},  # type: ignore[operator]
            "kvCacheStats": {
                "maxNumBlocks": self.num_blocks,
                "freeNumBlocks": self.num_blocks - used,
                "usedNumBlocks": used,
                "tokensPerBlock": self.block_tokens,
                "allocTotalBlocks": used,
                "allocNewBlocks": used,
                "reusedBlocks": 0,
                "missedBlocks": used,
                "cacheHitRate": 0.0,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": 1,
                "numContextRequests": int(prompt_tokens > 0),
                "numGenRequests": int(prompt_tokens == 0),
                "numPausedRequests": 0,
                "numCtxTokens": prompt_tokens,
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 1.0,
            },
        }
        with self._there:
            self._records.append(record)
            self._there.notify_all()

    def drain_records(self) -> list[dict[str, object]]:
        """New records, each given once; waits a while for the first."""
        self.looks += 1
        if not self.options["enable_iter_perf_stats"] or self.behaviour.no_metrics:
            return []
        with self._there:
            self._there.wait_for(lambda: self._records, timeout=self.behaviour.metrics_wait_s)
            drained, self._records = self._records, []
        return drained


def _context(config: dict[str, int]) -> int:
    return config["max_position_embeddings"]


def _check_checkpoint(directory: Path, config: dict[str, object]) -> None:
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise RefusedError(f"OSError: no tokenizer files in {directory}")
    name = str(config["architectures"][0])  # type: ignore[index]
    if name not in _ARCHITECTURES:
        raise RefusedError(f"ValueError: Unknown architecture for AutoModelForCausalLM: {name}")
    modelopt = directory / "hf_quant_config.json"
    if modelopt.exists():
        algorithm = json.loads(modelopt.read_text())["quantization"]["quant_algo"]
        if algorithm not in _QUANT_ALGOS:
            raise RefusedError(f"ValueError: unsupported quant mode: {algorithm}")
        return
    quantization = config.get("quantization_config")
    if not quantization:
        return
    assert isinstance(quantization, dict)
    method = quantization["quant_method"]
    block = quantization.get("weight_block_size") == [128, 128]
    if not (method in ("mxfp4", "compressed-tensors") or (method == "fp8" and block)):
        raise RefusedError(f"NotImplementedError: Unsupported quantization_config: {quantization}")
