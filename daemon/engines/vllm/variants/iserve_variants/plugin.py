"""Entry point of the plug-in, which vLLM calls in each of its processes (``vllm.general_plugins``)."""

from __future__ import annotations

from typing import Any

from iserve_variants.settings import (
    check_release,
    read_settings,
    wants_adapter_kernels,
    wants_background_adapters,
)

__all__ = ["register"]


def register() -> None:
    """Put our manager, layers and kernels before vLLM's, which are used where a configuration has no settings.

    Raises:
        RuntimeError: a release of vLLM that was not read.
    """
    import vllm

    check_release(vllm.__version__)
    from vllm.lora import lora_model, utils
    from vllm.v1.worker import lora_model_runner_mixin as mixin
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from iserve_variants.refusals import hide_refusals
    from iserve_variants.vllm_aside import AdapterFiles, AsideWorkerManager
    from iserve_variants.vllm_graphs import tell_kinds_apart
    from iserve_variants.vllm_layers import LAYERS
    from iserve_variants.vllm_manager import DeltaWorkerManager
    from iserve_variants.vllm_operators import register_operators
    from iserve_variants.vllm_places import SharingWorkerManager

    if LAYERS[0] in utils._all_lora_classes:
        return
    register_operators()
    hide_refusals()
    lora_model.safetensors = AdapterFiles

    def manager(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if wants_adapter_kernels(vllm_config.additional_config):
            from iserve_variants.vllm_adapters import use_adapter_kernels

            use_adapter_kernels()
        kind = SharingWorkerManager
        if read_settings(vllm_config.additional_config) is not None:
            kind = DeltaWorkerManager
        elif wants_background_adapters(vllm_config.additional_config):
            kind = AsideWorkerManager
        return kind(vllm_config, *args, **kwargs)

    their_load = LoRAModelRunnerMixin.load_lora_model

    def load_lora_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = their_load(self, *args, **kwargs)
        kinds = self.lora_manager.graph_kinds() if isinstance(self.lora_manager, DeltaWorkerManager) else None
        if kinds is not None:
            tell_kinds_apart(self, kinds)
        return model

    LoRAModelRunnerMixin.load_lora_model = load_lora_model
    mixin.LRUCacheWorkerLoRAManager = manager
    utils._all_lora_classes = (*LAYERS, *utils._all_lora_classes)
