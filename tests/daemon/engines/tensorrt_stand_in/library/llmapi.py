"""``tensorrt_llm.llmapi``: settings that refuse what they do not know, as pydantic's do."""

from enum import StrEnum
from typing import ClassVar


class CapacitySchedulerPolicy(StrEnum):
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"
    STATIC_BATCH = "STATIC_BATCH"


class _Strict:
    DEFAULTS: ClassVar[dict]

    def __init__(self, **given):
        for name in given:
            if name not in self.DEFAULTS:
                raise ValueError(
                    f"1 validation error for {type(self).__name__}\n{name}\n  Extra inputs are not permitted"
                )
        self.__dict__.update(self.DEFAULTS | given)


class KvCacheConfig(_Strict):
    DEFAULTS: ClassVar[dict] = {
        "enable_block_reuse": True,
        "enable_partial_reuse": True,
        "max_tokens": None,
        "free_gpu_memory_fraction": 0.9,
        "max_gpu_total_bytes": 0,
        "max_attention_window": None,
        "host_cache_size": None,
        "tokens_per_block": 32,
        "event_buffer_max_size": 0,
        "dtype": "auto",
    }


class CudaGraphConfig(_Strict):
    DEFAULTS: ClassVar[dict] = {"batch_sizes": None, "max_batch_size": 0, "enable_padding": False}

    def sizes(self):
        """Return its own choice up to the largest, without padding."""
        most = self.max_batch_size or 128
        sizes = {*range(1, 32), 32, 64, 128, *(2**power for power in range(8, most.bit_length())), most}
        return sorted(size for size in sizes if size <= most)


class SchedulerConfig(_Strict):
    DEFAULTS: ClassVar[dict] = {
        "capacity_scheduler_policy": CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        "context_chunking_policy": None,
        "dynamic_batch_config": None,
    }

    def __init__(self, **given):
        super().__init__(**given)
        if not isinstance(self.capacity_scheduler_policy, CapacitySchedulerPolicy):
            raise ValueError(f"capacity_scheduler_policy: {self.capacity_scheduler_policy!r}")
