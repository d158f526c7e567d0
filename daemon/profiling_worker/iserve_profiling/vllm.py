"""Profiling worker around vLLM: one engine at a time, started on a fingerprint and measured in bursts.

``python -m iserve_profiling.vllm --spec FILE`` in vLLM's own interpreter.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import time
from typing import Any

from iserve_profiling.base import Nvml, ProfilingEngine, Rows, WorkError, random_prompts, root
from iserve_profiling.http import read_spec, serve

LEAST_RANK = 1  # of slots for deltas alone, as in fingerprint/lora/slot_bytes.py
_END_S = 20.0  # for vLLM's processes to end by themselves
_BEING_READ = "is still being read"  # of our plug-in: a delta has to be asked for again
_ASK_S = 0.02  # each refusal is a traceback in the log
_READ_S = 120.0  # that reading one may take
_COUNTED_TOKENS = 8192  # over which the choice of experts is counted; graphs, which are not counted, end far below


class VllmProfilingEngine(ProfilingEngine):
    """Holds at most one ``vllm.LLM``.

    Args:
        step_timer: whether the step timer is in vLLM's processes; without it bursts are timed by the wall clock.
    """

    engine = "vLLM"

    def __init__(self, spec: dict[str, Any], *, step_timer: bool = True) -> None:
        super().__init__(spec, step_timer=step_timer)
        self._llm: Any = None
        self._variants: list[Any] = []  # LoRARequest of each that is loaded

    @property
    def is_loaded(self) -> bool:
        return self._llm is not None

    def nvml(self) -> Any:
        from vllm.third_party import pynvml

        return pynvml

    def start(self, order: dict[str, Any], kv_tokens: int) -> int:
        from vllm import LLM

        self._llm = LLM(**self._arguments(order))
        return self._llm.llm_engine.model_config.get_vocab_size()

    def _arguments(self, order: dict[str, Any]) -> dict[str, Any]:
        config, limits = self.spec["config"], self.spec["limits"]
        tp, pp = config["tp"], config["pp"]
        sequences, length = order["max_batch"], order["max_context_tokens"]
        arguments: dict[str, Any] = {
            "model": order["checkpoint"],
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": length,
            "max_num_seqs": sequences,
            # More than the sequences hold is an illegal memory access in 0.33 (daemon/engines/vllm/launch.py).
            "max_num_batched_tokens": min(limits["max_batched_tokens"], sequences * length),
            "gpu_memory_utilization": self._fraction(limits["memory_bytes_per_device"]),
            "num_gpu_blocks_override": order["kv_blocks"],
            "block_size": order["kv_block_tokens"],  # as a deployment is started with; the default may be another
            "kv_cache_dtype": order["kv_dtype"],
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "seed": 0,
            "compilation_config": json.loads(order["graphs"]),
        }
        if order["text_only"]:
            arguments["language_model_only"] = True  # a shape has nothing that makes images into tokens
        if order["weights"] == "fp8":
            arguments["quantization"] = "fp8"
        if order["adapter_slots"]:
            arguments |= _slots(order)
        if self.spec["options"]["use"]["trust_remote_code"]:
            arguments["trust_remote_code"] = True
        if config.get("expert_parallel"):
            arguments["enable_expert_parallel"] = True
        if tp > 1:
            arguments["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
        return arguments

    def _fraction(self, memory_bytes: int) -> float:
        with Nvml(self.nvml()) as nvml:
            total = min(nvml.total_bytes())
        return math.floor(10_000 * min(1.0, memory_bytes / total)) / 10_000

    def unload(self) -> None:
        llm, self._llm = self._llm, None
        self._variants = []
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

    def set_timer(self, *, repeat: int, record: bool) -> None:
        self._llm.collective_rpc("iserve_timer_start", args=(repeat, record))

    def read_timer(self) -> list[Rows]:
        return list(self._llm.collective_rpc("iserve_timer_read"))

    def compilations(self) -> list[tuple[float, float]]:
        of_ranks = self._llm.collective_rpc("iserve_compilations")
        return [(begin, end) for of_rank in of_ranks for begin, end in of_rank]

    @property
    def num_variants(self) -> int:
        return len(self._variants)

    def load_variants(self, order: dict[str, Any]) -> list[float]:
        from vllm.lora.request import LoRARequest

        self.check_loaded()
        loads_s = []
        for folder in order["folders"]:
            number = len(self._variants) + 1
            request = LoRARequest(f"variant-{number}", number, folder)
            begun = time.perf_counter()
            try:
                while not self._is_there(request):
                    if time.perf_counter() - begun > _READ_S:
                        raise TimeoutError(f"it {_BEING_READ} after {_READ_S:g} s")
                    time.sleep(_ASK_S)
            except Exception as error:
                raise WorkError("EngineError", f"vLLM did not load {folder}: {root(error)}") from error
            loads_s.append(time.perf_counter() - begun)
            self._variants.append(request)
        return loads_s

    def _is_there(self, request: Any) -> bool:
        """Load a variant; return False where it is a delta that is still being read."""
        try:
            added = self._llm.llm_engine.add_lora(request)
        except Exception as error:
            if _BEING_READ not in str(error):
                raise
            return False
        if not added:
            raise RuntimeError("add_lora gave False")
        return True

    def generate(self, prompts: list[list[int]], output_tokens: int, active: int) -> list[int]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        variants = [self._variants[index % active] for index in range(len(asked))] if active else None
        done = self._llm.generate(asked, parameters, use_tqdm=False, lora_request=variants)
        return [len(one.outputs[0].token_ids) for one in done]

    def memory(self) -> list[dict[str, Any]]:
        self.check_loaded()
        tp, ranks = self.spec["config"]["tp"], self._counted()
        experts = self._count_experts() if any(rank["expert_routing"] for rank in ranks) else [None] * len(ranks)
        return [
            _rank_memory(rank, rank // tp, counted) | {"expert_count": experts[rank]}
            for rank, counted in enumerate(ranks)
        ]

    def _count_experts(self) -> list[dict[str, float] | None]:
        """Compute a few prompts, and return of each rank how their tokens fell on experts."""
        length = min(_COUNTED_TOKENS, self._most[1] - 1)
        batch = max(1, min(_COUNTED_TOKENS, self._room_tokens // 2) // length)
        prompts = random_prompts(min(batch, self._most[0]), length, self._vocab)
        self._llm.collective_rpc("iserve_count_experts", args=(True,))
        try:
            self.generate(prompts, 1, 0)
        finally:
            counted = self._llm.collective_rpc("iserve_count_experts", args=(False,))
        return list(counted)

    def reserved_bytes(self) -> int | None:
        return sum(int(counted["torch_reserved"]) for counted in self._counted())

    def _counted(self) -> list[dict[str, Any]]:
        return list(self._llm.collective_rpc("iserve_memory"))


def _slots(order: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for slots, as daemon/engines/vllm/launch.py has them; all that is loaded has a slot."""
    slots = order["adapter_slots"]
    arguments = {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": order["adapter_rank"] or LEAST_RANK,
        "max_cpu_loras": slots,
    }
    if order["additional_config"]:
        arguments["additional_config"] = json.loads(order["additional_config"])
    return arguments


def _rank_memory(rank: int, stage: int, counted: dict[str, Any]) -> dict[str, Any]:
    block_bytes = counted["kv_bytes"] // max(1, counted["blocks"])
    # A block is of one tensor for every layer that shares it: as if each layer had the room of all tokens.
    room = counted["blocks"] * counted["block_tokens"] * counted["kv_tensors"] // max(1, counted["kv_layers"])
    return {
        "rank": rank,
        "stage": stage,
        "weights_bytes": counted["weights"],
        "kv_bytes": counted["kv_bytes"],
        "activation_peak_bytes": counted["peak_activation_memory"],
        "pp_buffer_bytes": 0,  # inside the activations
        "runtime_bytes": counted["non_torch_memory"],
        "graph_bytes": counted["graphs"],
        "kv_room_tokens": room,
        "kv_block_tokens": counted["block_tokens"],
        "kv_blocks": counted["available_kv"] // block_bytes if block_bytes else 0,
        "budget_bytes": counted["requested_memory"],
        "expert_routing": counted["expert_routing"],
        "layer_caches": [
            {"layer": layer, "token_bytes": token_bytes, "state_bytes": state_bytes, "window": window}
            for layer, token_bytes, state_bytes, window in counted["kept"]
        ],
    }


def main() -> None:
    """Serve the profiling routes until SIGTERM."""
    spec, machine, step_timer = read_spec(__doc__)
    os.environ["ISERVE_STEP_TIMER"] = "rpc" if step_timer else "memory"
    import vllm  # noqa: F401  # takes seconds; before the first answer, so that ready means ready

    serve(VllmProfilingEngine(spec, step_timer=step_timer), machine)


if __name__ == "__main__":
    main()
