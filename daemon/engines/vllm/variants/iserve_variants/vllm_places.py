"""vLLM's managers of LoRA adapters, with places in the host's memory that adapters of small ranks share.

``--max-cpu-loras`` counts copies of adapters, whatever their ranks are. Here it counts those of the slots' rank:
two of half of that rank take one's place, eight of an eighth, and so on no further (``PER_PLACE``). The gateway
counts the same shares (``DeploymentConfig.place_share``).
"""

from __future__ import annotations

from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from iserve_variants.settings import PER_PLACE, place_share

__all__ = ["SharingModelManager", "SharingWorkerManager"]


class SharingModelManager(LRUCacheLoRAModelManager):
    """Manager of a model that keeps copies of as many adapters as share the places."""

    per_place = PER_PLACE
    """Adapters that share a place at most; 1: each has one of its own."""

    @property
    def capacity(self) -> int:
        """Adapters that are kept at most."""
        return self.per_place * int(super().capacity)

    def add_adapter(self, lora: LoRAModel) -> bool:
        """Keep an adapter; those that were not used for longest make room for it."""
        if self.per_place > 1 and lora.id not in self._registered_adapters:
            while self._registered_adapters and self._taken() + self._share(lora) > super().capacity:
                self.remove_oldest_adapter()
        return bool(super().add_adapter(lora))

    def _taken(self) -> float:
        """Return the places that are taken; vLLM's view of what is kept changes nothing of its order."""
        return sum(map(self._share, self._registered_adapters.cache.values()))

    def _share(self, lora: LoRAModel) -> float:
        return place_share(lora.rank, self.lora_config.max_lora_rank)


class SharingWorkerManager(LRUCacheWorkerLoRAManager):
    """Worker's manager that finds the adapters of a step without a copy of the list of all that are loaded.

    vLLM makes one for each of them, in a time that grows with the loaded ones.
    """

    _manager_cls = SharingModelManager

    def add_adapter(self, lora_request: Any) -> bool:
        """Load an adapter; one that has a slot is counted as used."""
        manager, lora_id = self._adapter_manager, lora_request.lora_int_id
        has_slot = lora_id in manager._registered_adapters and lora_id in manager._active_adapters
        if lora_request.load_inplace or not has_slot:
            return bool(super().add_adapter(lora_request))
        manager.get_adapter(lora_id)
        manager.activate_adapter(lora_id)
        return True

    def list_adapters(self) -> set[int]:
        """Return the ids of all that are loaded."""
        return set(self._adapter_manager._registered_adapters)
