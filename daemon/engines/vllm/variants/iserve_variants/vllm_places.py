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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        self._share_of: dict[int, float] = {}  # by id, of those that are kept and maybe more
        super().__init__(*args, **kwargs)

    def add_adapter(self, lora: LoRAModel) -> bool:
        """Keep an adapter; those that were not used for longest make room for it."""
        if self.per_place > 1 and lora.id not in self._registered_adapters:
            share = place_share(_rank(lora), self.lora_config.max_lora_rank)
            while self._registered_adapters and self._taken() + share > super().capacity:
                self.remove_oldest_adapter()
            self._share_of = {one: self._share_of[one] for one in self._registered_adapters} | {lora.id: share}
        return bool(super().add_adapter(lora))

    def _taken(self) -> float:
        """Return the places that are taken."""
        return sum(self._share_of[one] for one in self._registered_adapters)


def _rank(lora: LoRAModel) -> int:
    """Return the largest rank of an adapter's matrices, joined ones of modules that are one among them."""
    factors = (weights.lora_a for weights in lora.loras.values())
    each = (one for a in factors for one in (a if isinstance(a, list) else [a]))
    return max((int(one.shape[-2]) for one in each if one is not None), default=1)


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
