"""``tensorrt_llm._torch.pyexecutor.resource_manager``."""

from enum import Enum
from types import SimpleNamespace


class ResourceManagerType(Enum):
    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"


class KVCacheManager:
    def __init__(self, blocks, tokens_per_block, token_bytes):
        self.blocks_in_primary_pool, self.tokens_per_block = blocks, tokens_per_block
        self._bytes = blocks * tokens_per_block * token_bytes

    def get_kv_cache_stats(self):
        return SimpleNamespace(
            max_num_blocks=self.blocks_in_primary_pool,
            tokens_per_block=self.tokens_per_block,
            allocated_bytes=self._bytes,
        )


class ResourceManager:
    def __init__(self, manager):
        self.resource_managers = {ResourceManagerType.KV_CACHE_MANAGER: manager}
