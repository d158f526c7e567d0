"""vLLM's managers of LoRA adapters, which take deltas too: loading, slots and the mapping of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from iserve_variants.arena import Arena
from iserve_variants.background import BackgroundLoader, Pauses, SlotPlaces, empty_aside
from iserve_variants.folder import MANIFEST_FILE
from iserve_variants.kept_folders import KeptFolders, Loaded
from iserve_variants.placement import place_tensors
from iserve_variants.products import products_for
from iserve_variants.ranks import Ranks, Readiness, load_on_all
from iserve_variants.runtime import Runtime, building
from iserve_variants.settings import Settings, read_settings
from iserve_variants.step_routes import StepRoutes
from iserve_variants.vllm_aside import AsideModelManager, AsideWorkerManager, request_folder
from iserve_variants.vllm_filler import PlaceFiller
from iserve_variants.vllm_graphs import GraphKinds
from iserve_variants.vllm_layers import LinearWithDeltas
from iserve_variants.vllm_model import ModelParts
from iserve_variants.vllm_modules import EmbeddingWithDeltas, OutputWithDeltas
from iserve_variants.vllm_prompts import watch_prompts
from iserve_variants.warming import warm_up

__all__ = ["DeltaModel", "DeltaModelManager", "DeltaWorkerManager"]

_LOGGER = logging.getLogger("vllm.iserve_variants")
_MARK = "iserve_delta"  # what vLLM keeps of a delta: a tensor of no module


class DeltaModel(LoRAModel):
    """Delta as the LoRA path keeps it: its tensors are not in ``loras``, over which vLLM's activation loops."""

    def __init__(self, lora_id: int, folder: Path, pairs: Loaded, mark: LoRALayerWeights) -> None:
        super().__init__(lora_id, 1, {_MARK: mark})
        self.folder = folder
        self.pairs: Loaded | None = pairs
        """None: the arena has them, once a slot does; they are read from it, or its folder, for another slot."""


class DeltaModelManager(AsideModelManager):
    """Manager of a model whose slots hold adapters and deltas."""

    per_place = 1

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        super()._init_punica_wrapper(max_num_batched_tokens, vllm_config)
        settings = read_settings(vllm_config.additional_config)
        assert settings is not None  # the plug-in makes this manager for such configurations alone
        watch_prompts()
        _check(self, vllm_config)
        graph_rows = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        places = SlotPlaces(self.lora_slots, has_spare=settings.background)
        routes = StepRoutes(
            slots=places.count,
            max_rows=max(self.max_num_batched_tokens, self.max_num_seqs),
            device=torch.device(self.device),
            graph_rows=graph_rows,
            merged_from_rows=settings.merged_from_rows,
        )
        self.runtime = Runtime(settings, routes, places)
        self.ranks = _ranks(vllm_config.parallel_config)

    def _create_lora_modules(self) -> None:
        with building(self.runtime):
            super()._create_lora_modules()
        parts = ModelParts(self.model, self.modules, self.packed_modules, self.runtime)
        for name, module in parts.made.items():
            module.set_mapping(self.punica_wrapper_mapping[_wrapper_key(self)])
            self.register_module(name, module)
        self.places = parts.places
        self._take_buffers()
        mark = torch.zeros(1, dtype=torch.int16, device=self.device)  # what is on the CPU is page-locked by vLLM
        self._mark = LoRALayerWeights(_MARK, 1, 1, mark, mark)
        self._adapters_key: object = None
        self.filler = PlaceFiller(self.modules, self.packed_modules, self.runtime, torch.device(self.device))
        self.folders = self._kept_folders()
        self.loader = (
            BackgroundLoader(self._read_aside, self.filler.fill_spare) if self.settings.background else None
        )

    @property
    def settings(self) -> Settings:
        """Contents of slots."""
        return self.runtime.settings

    def _take_buffers(self) -> None:
        """Take the kernels' buffers and compile what no captured graph does."""
        runtime, routes = self.runtime, self.runtime.routes
        linears = [one for one in self.modules.values() if isinstance(one, LinearWithDeltas) and one.deltas]
        slots = [one.deltas for one in linears]
        vocabularies = (EmbeddingWithDeltas, OutputWithDeltas)
        slots += [one.deltas for one in self.modules.values() if isinstance(one, vocabularies)]
        if not runtime.merges:
            routes.merged_from_rows = None
        merged = 0
        if routes.merged_from_rows is not None:
            merged = max((one.base_layer.weight.numel() for one in linears), default=0)
        runtime.products = products_for(
            torch.device(self.device),
            max_segments=len(routes.token_route.segments),
            max_tiles=max((one.codes.shape[1] for one in slots), default=1),
            merged_elements=merged,
        )
        outputs = [one.deltas for one in self.modules.values() if isinstance(one, vocabularies)]
        merges = routes.merged_from_rows is not None
        warm_up(runtime.products, routes, [one.deltas for one in linears], outputs, merges=merges)
        taken = sum(one.codes.nbytes + one.scales.nbytes for one in slots)
        _LOGGER.info("%d slots of deltas take %d MiB", runtime.places.count, taken // 2**20)

    def activate_adapter(self, lora_id: int) -> bool:
        """Give an adapter or a delta a slot; a delta in the spare place costs no work for each module.

        A slot and its place are independent: rows of a delta are those of no adapter to the adapters' kernels, and
        rows of an adapter are not routed. So nothing of a former adapter or delta is cleared.
        """
        adapter = self.get_adapter(lora_id)
        if not isinstance(adapter, DeltaModel):
            changed = super().activate_adapter(lora_id)
        elif changed := lora_id not in self._active_adapters:
            self._activate_delta(adapter)
        else:
            self._active_adapters.touch(lora_id)
        if changed:
            self._last_mapping = None  # the same ids may mean other slots, or a slot another kind
        return changed

    def _activate_delta(self, delta: DeltaModel) -> None:
        if delta.pairs is None:  # before a slot is taken, as its folder may have gone
            delta.pairs = self._read_pairs(delta.folder)
        if len(self._active_adapters) >= self.lora_slots:
            self._active_adapters.remove_oldest()
        slot, places = self.lora_index_to_id.index(None), self.runtime.places
        if self.loader is not None and self.loader.holds(delta.pairs):
            places.exchange(slot)
            self.filler.free_spare()
            self.loader.release()
            _freed_aside(delta)
        else:
            self.filler.put(places.of(slot), delta.pairs)
        if delta.pairs.is_in_arena:  # which gives its memory to what is loaded next, else it were full of these
            delta.pairs = None
        self._active_adapters[delta.id] = None
        self.lora_index_to_id[slot] = delta.id

    def _set_adapter_mapping(self, mapping: Any) -> None:
        """Route deltas, and give the rest of the mapping to the kernels of adapters, whose rows these are not."""
        slot_of_delta = {
            lora_id: self.runtime.places.of(slot)
            for slot, lora_id in enumerate(self.lora_index_to_id)
            if lora_id is not None and isinstance(self.get_adapter(lora_id), DeltaModel)
        }
        self.runtime.routes.update(mapping.index_mapping, mapping.prompt_mapping, slot_of_delta)
        if slot_of_delta:
            mapping = type(mapping)(
                tuple(0 if one in slot_of_delta else one for one in mapping.index_mapping),
                tuple(0 if one in slot_of_delta else one for one in mapping.prompt_mapping),
                is_prefill=mapping.is_prefill,
                type=mapping.type,
            )
        of_adapters = [one if one not in slot_of_delta else None for one in self.lora_index_to_id]
        if self._adapters_key != (mapping, of_adapters):  # a delta that takes a slot changes nothing of theirs
            super()._set_adapter_mapping(mapping)
            self._adapters_key = mapping, of_adapters

    def read_delta(self, folder: Path, lora_id: int) -> DeltaModel:
        """Return the delta in ``folder``, placed in this model.

        Raises:
            ValueError: a tensor that has no place here, or a folder that is not what its manifest says.
            OSError: a file that cannot be read.
        """
        pairs = self.loader.taken(folder) if self.loader is not None else None
        if pairs is None:
            made = DeltaModel(lora_id, folder, self._read_pairs(folder), self._mark)
            if self.loader is not None:
                _freed_aside(made)
            return made
        return DeltaModel(lora_id, folder, pairs, self._mark)

    def _read_aside(self, folder: Path) -> Loaded:
        """Read next to steps, in a thread: with pauses, in which theirs takes the interpreter."""
        return self._read_pairs(folder, Pauses())

    def _read_pairs(self, folder: Path, pause: Callable[[], None] = lambda: None) -> Loaded:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper()._map_name if mapper is not None else lambda name: name
        return self.folders.load(folder, lambda delta: place_tensors(delta, self.places, rename, pause), pause)

    def _kept_folders(self) -> KeptFolders:
        """Take the memory that keeps deltas; without it each load reads its folder."""
        is_cuda, num_bytes = torch.device(self.device).type == "cuda", self.settings.arena_mib * 2**20
        # Page-locking gigabytes holds up other threads' launches, so it is done at the start alone.
        pins = is_cuda and not self.settings.background
        try:
            return KeptFolders(Arena(num_bytes, pin=is_cuda, before_reuse=self.filler.settle), pins=pins)
        except RuntimeError as error:
            _LOGGER.warning("no %d MiB of memory for deltas that are loaded again: %s", num_bytes >> 20, error)
            return KeptFolders(Arena(0, pin=False), pins=pins)


def _freed_aside(delta: DeltaModel) -> None:
    """Free the tensors of a delta, whose only owner it is, in a thread once vLLM has dropped it."""
    if delta.pairs is not None and not delta.pairs.is_in_arena:
        finalize(delta, empty_aside, delta.pairs).atexit = False


class DeltaWorkerManager(AsideWorkerManager):
    """Worker's manager, which tells the folder of a delta from that of an adapter."""

    _manager_cls = DeltaModelManager

    def add_adapter(self, lora_request: Any) -> bool:
        """Load an adapter or a delta.

        Raises:
            ValueError: a delta that is still being read, which has to be asked for again; one with no place here.
        """
        add = super().add_adapter
        if self._waits:  # for what a step needs: each rank reads it before it goes on
            return add(lora_request)
        lora_id = lora_request.lora_int_id
        was_there = lora_id in self.list_adapters()
        return load_on_all(
            self._adapter_manager.ranks,
            lora_request.lora_name,
            lambda: self._readiness(lora_request),
            lambda: add(lora_request),
            lambda: not was_there and lora_id in self.list_adapters() and self.remove_adapter(lora_id),
        )

    def graph_kinds(self) -> GraphKinds | None:
        """Return what tells steps apart for graphs; None where one graph is to serve all."""
        manager = self._adapter_manager
        if not (manager.settings.adapters and manager.settings.graphs_by_kind):
            return None

        def is_delta(lora_request: Any) -> bool:
            adapter = manager.get_adapter(lora_request.lora_int_id)
            if adapter is None:  # the step loads it
                return _is_delta(request_folder(lora_request))
            return isinstance(adapter, DeltaModel)

        def forget() -> None:
            manager._last_mapping = None

        return GraphKinds(manager.runtime.routes, is_delta, forget)

    def _readiness(self, lora_request: Any) -> Readiness:
        folder, loader = request_folder(lora_request), self._adapter_manager.loader
        is_new = lora_request.lora_int_id not in self.list_adapters()
        if loader is None or not is_new or not _is_delta(folder):
            return Readiness.IMMEDIATE
        return Readiness.READY if loader.is_ready(folder) else Readiness.READING

    def reads_aside(self, lora_request: Any) -> bool:
        """Return whether an adapter is read by the thread of adapters: deltas have one of their own."""
        served = self._adapter_manager.settings.adapters and not _is_delta(request_folder(lora_request))
        return bool(served and super().reads_aside(lora_request))

    def _load_adapter(self, lora_request: Any) -> LoRAModel:
        folder, manager = request_folder(lora_request), self._adapter_manager
        if _is_delta(folder):
            return manager.read_delta(folder, lora_request.lora_int_id)
        if not manager.settings.adapters:
            raise ValueError(
                f"{folder} has no {MANIFEST_FILE}, and this worker was started for deltas alone; start one that "
                "serves adapters too"
            )
        return super()._load_adapter(lora_request)


def _is_delta(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def _check(manager: Any, vllm_config: Any) -> None:
    """Refuse what deltas are not served with, at the start."""
    why = ""
    if manager.supports_mm:
        why = "of a multimodal model"
    elif manager.lora_config.fully_sharded_loras:
        why = "with --fully-sharded-loras"
    elif vllm_config.model_config.dtype is not torch.bfloat16:
        why = f"in {vllm_config.model_config.dtype}, bfloat16 alone"
    elif vllm_config.speculative_config is not None:
        why = "with drafts (--speculative-config)"
    if why:
        raise ValueError(f"iserve_deltas: deltas are not served {why}; start the worker without them")


def _ranks(parallel_config: Any) -> Ranks:
    """Return the ranks of the worker, and this one's place among them.

    Raises:
        ValueError: ranks beyond those of tensor and pipeline parallelism.
    """
    if parallel_config.world_size == 1:
        return Ranks((), is_last=True)
    tensor, pipeline = get_tp_group(), get_pp_group()
    if tensor.world_size * pipeline.world_size != parallel_config.world_size:
        raise ValueError(
            "iserve_deltas: deltas are not served with parallelism beyond tensor and pipeline; start the worker "
            "without it"
        )
    return Ranks((tensor.cpu_group, pipeline.cpu_group), is_last=tensor.is_last_rank and pipeline.is_last_rank)


def _wrapper_key(manager: Any) -> str:
    (key,) = manager.punica_wrapper_mapping  # one: multimodal models are refused
    return key
