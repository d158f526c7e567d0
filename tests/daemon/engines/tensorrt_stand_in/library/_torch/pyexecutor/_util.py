"""``tensorrt_llm._torch.pyexecutor._util``: the cache is sized after a dry run of the largest step."""

import torch
from tensorrt_llm import costs
from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager, ResourceManager

_BYTES = {"auto": 2, "fp8": 1}


class KvCacheCreator:
    def __init__(self, engine, args, config, behaviour):
        kv = args.kv_cache_config
        if kv.dtype not in (*_BYTES, "nvfp4"):
            raise ValueError(f"Overriding KV cache quantization with an invalid type {kv.dtype!r}")
        heads = max(1, config["num_key_value_heads"] // args.tensor_parallel_size)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self._token_bytes = engine.model.layers * 2 * heads * head_dim * _BYTES[kv.dtype]
        self._kv, self._args, self._behaviour = kv, args, behaviour
        self._held = 0

    def build_managers(self, estimating):
        tokens = (
            self._kv.max_tokens if not estimating else min(self._kv.max_tokens, self._args.max_num_tokens + 64)
        )
        blocks = tokens // self._kv.tokens_per_block
        if not estimating and self._behaviour.get("no_memory_for_kv"):
            raise RuntimeError(
                "Executor creation failed due to insufficient GPU memory.\nThe following component could not be "
                "created: KV cache\nTotal GPU memory (GiB): 48.00\nFree GPU memory before component creation "
                "attempt (GiB): 1.02\n\nPrevious usage"
            )
        held = blocks * self._kv.tokens_per_block * self._token_bytes
        torch.memory.outside += held - self._held
        self._held = held
        return ResourceManager(KVCacheManager(blocks, self._kv.tokens_per_block, self._token_bytes))

    def configure_kv_cache_capacity(self, py_executor):
        torch.memory.reset_peak()
        torch.memory.outside += costs.CONTEXT_BYTES
        py_executor.is_warmup = True
        torch.memory.allocate(costs.ACTIVATION_BYTES)
        py_executor.generate([self._args.max_num_tokens], 1)
        torch.memory.allocate(-costs.ACTIVATION_BYTES)
        py_executor.is_warmup = False
