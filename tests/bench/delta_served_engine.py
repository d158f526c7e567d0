"""vLLM with deltas in this process, stepped by hand."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.bench.delta_served_files import VARIANTS, Files

__all__ = ["Served", "facts_of", "random_tokens"]

GRAPH_ROWS = 512
MOST_ROWS = 64


class Served:
    """Engine of vLLM in this process."""

    def __init__(
        self,
        model: Path,
        files: Files,
        *,
        engine: str,
        slots: int,
        small: bool,
        eager: bool = False,
        tp: int = 1,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled at the first start: 75 s
        self.files, self._small, self._number = files, small, 0
        arguments = _arguments(model, engine, slots, small, settings) | {
            "enforce_eager": eager,
            "tensor_parallel_size": tp,
        }
        if tp > 1:  # as workers are started: no multicast of NVLink
            os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0", VLLM_ALLREDUCE_USE_FLASHINFER="0")
            arguments["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
        begin = time.perf_counter()
        from vllm import LLM

        self.engine = LLM(**arguments).llm_engine
        self.start_s = time.perf_counter() - begin

    def num_compiled(self) -> int:
        """Return the kernels of deltas that this process has compiled or loaded; 0: the engine has none."""
        found = [sys.modules.get(f"iserve_variants.{name}") for name in ("kernels", "merge")]
        kernels = [getattr(one, name, None) for one in found for name in ("add_products", "_merge")]
        caches = [cache for one in kernels if one is not None for cache in one.device_caches.values()]
        return sum(len(cache[0]) for cache in caches)

    def request(self, number: int) -> Any:
        """Return what vLLM is asked with for delta or adapter ``number``; None: the base."""
        from vllm.lora.request import LoRARequest

        if not number:
            return None
        make = self.files.delta if number > 0 else self.files.adapter
        folder = make(abs(number), small=self._small)
        identity = number if number > 0 else 1000 - number
        return LoRARequest(lora_name=folder.name, lora_int_id=identity, lora_path=str(folder))

    def add(self, prompt: Sequence[int], number: int, output: int, *, logprobs: int | None = None) -> str:
        """Add a request; return its name."""
        from vllm import SamplingParams

        self._number += 1
        parameters = SamplingParams(
            max_tokens=output, min_tokens=output, ignore_eos=True, temperature=0.0, detokenize=False,
            logprobs=logprobs,
        )  # fmt: skip
        name = str(self._number)
        self.engine.add_request(
            name, {"prompt_token_ids": list(prompt)}, parameters, lora_request=self.request(number)
        )
        return name

    def finish(self, between: Callable[[int], None] = lambda step: None) -> tuple[dict[str, Any], list[float]]:
        """Run until all requests have ended; return their outputs by name, and each step's seconds.

        Args:
            between: called before each step with its number; its time is that step's.
        """
        done: dict[str, Any] = {}
        steps: list[float] = []
        last = time.perf_counter()
        while self.engine.has_unfinished_requests():
            between(len(steps))
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0]
            now = time.perf_counter()
            steps.append(now - last)
            last = now
        return done, steps

    def load(self, number: int) -> bool:
        """Ask for a delta to be loaded; return False where it is still being read."""
        try:
            self.engine.add_lora(self.request(number))
        except Exception as error:
            if "is still being read" not in str(error):
                raise
            return False
        return True

    def pin_copies(self, copies: int) -> Callable[[int], None]:
        """Return what copies one of ``copies`` whole models, which lie in page-locked memory, into the weights."""
        import torch

        def weights(worker: Any) -> list[Any]:
            return [weight.data for weight in worker.model_runner.model.parameters()]

        (targets,) = self.engine.collective_rpc(weights)
        pinned = [
            [torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one) for one in targets]
            for _ in range(copies)
        ]

        def swap(number: int) -> None:
            for target, source in zip(targets, pinned[number % copies], strict=True):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return swap


def _arguments(model: Path, engine: str, slots: int, small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "safetensors" if small else "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "max_num_seqs": MOST_ROWS,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 6 * 2**30,
        "gpu_memory_utilization": 0.3 if small else 0.95,  # several small ones share a GPU
        "seed": 0,
        "compilation_config": {"max_cudagraph_capture_size": GRAPH_ROWS},
    }
    if engine == "plain":
        return arguments
    if VARIANTS not in sys.path:
        sys.path.insert(0, VARIANTS)  # with its entry point, as on PYTHONPATH
    from iserve_variants.settings import Settings

    whole = {"embedding_format": "int4", "output_format": "int2", "norms": True} if small else {}
    settings = Settings(**{"adapters": engine == "mixed", "background": True, **whole, **given})
    return arguments | {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots + 4,
        "max_lora_rank": 16 if engine == "mixed" else 1,
        "additional_config": settings.to_config(),
    }


def random_tokens(seed: int, count: int) -> list[int]:
    """Return ``count`` tokens drawn by ``seed``."""
    return random.Random(seed).choices(range(10, 128000), k=count)


def facts_of(**known: Any) -> dict[str, Any]:
    """Return what a measurement was made with."""
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"), **known,
    }  # fmt: skip
