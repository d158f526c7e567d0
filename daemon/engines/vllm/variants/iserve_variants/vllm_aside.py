"""Loads of LoRA adapters next to steps: a thread reads an adapter and copies it into a slot that no step uses.

vLLM reads, page-locks and copies an adapter between two steps. Here a load takes a slot at once, as an activation
does, and is refused with "is still being read" until the thread has filled it; the last call then copies nothing.
A step that needs the slot meanwhile takes it: the thread stops within one module, and the load ends as vLLM's do.
Nothing is page-locked: launches of steps wait while pages are (decision 48).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.lora import lora_model, lora_weights, model_manager
from vllm.lora.lora_model import LoRAModel

from iserve_variants.background import BackgroundLoader, Pauses
from iserve_variants.refusals import StillReadError
from iserve_variants.settings import wants_background_adapters
from iserve_variants.tensor_file import AdapterFile
from iserve_variants.vllm_places import SharingModelManager, SharingWorkerManager

__all__ = [
    "AdapterFiles",
    "AdapterLoads",
    "AsideModelManager",
    "AsideWorkerManager",
    "PausedModel",
    "request_folder",
]

_KEPT_S = 3.0  # clients of two adapters that ask in turns would each drop the one that was read for another
_pauses: ContextVar[Pauses | None] = ContextVar("iserve_pauses", default=None)  # of a thread next to steps


class PausedModel(LoRAModel):
    """Adapter that is read and joined with pauses where a thread does so next to steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        super().__init__(*args, **kwargs)
        if (pause := _pauses.get()) is not None:
            self.loras = _Paused(self.loras, pause)

    @classmethod
    def from_lora_tensors(cls, *args: Any, **kwargs: Any) -> LoRAModel:
        """Return vLLM's adapter of ``tensors``, each of which is converted."""
        if (pause := _pauses.get()) is not None:
            kwargs["tensors"] = _Paused(kwargs["tensors"], pause)
        return super().from_lora_tensors(*args, **kwargs)

    def get_lora(self, module_name: str) -> Any:
        """Return what the adapter has for a module; those that are one in the model are joined of several."""
        if (pause := _pauses.get()) is not None:
            pause()
        return super().get_lora(module_name)

    def end_pauses(self) -> None:
        """Take no more pauses: what the thread made is read by the one that steps."""
        self.loras = dict(self.loras)


class _Paused(dict[str, Any]):
    """Dictionary with a pause before each of its entries."""

    def __init__(self, entries: dict[str, Any], pause: Callable[[], None]) -> None:
        super().__init__(entries)
        self._pause = pause

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]  # all that vLLM does is to go through
        for name in self:
            self._pause()
            yield name, self[name]

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (value for _, value in self.items())


class AdapterFiles:
    """Opener of adapters' files, in the place of the module by which vLLM reads them."""

    @staticmethod
    def safe_open(file: str, *_args: Any, **_kwargs: Any) -> AdapterFile:
        """Return the file, read; one that pauses where a thread reads it next to steps."""
        if (pause := _pauses.get()) is not None:
            pause.take()  # the header is read in one call
        return AdapterFile(Path(file), pin=lora_model.PIN_MEMORY, pause=pause)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Load that was asked for; each time it is asked for again, vLLM gives it another number."""

    folder: Path
    request: Any = field(compare=False)


class AsideModelManager(SharingModelManager):
    """Manager of a model, a slot of which a thread may be filling."""

    filling: AdapterLoads | None = None

    def activate_adapter(self, lora_id: int) -> bool:
        """Give an adapter a slot; one that was filled with it needs no copy."""
        if self.filling is not None:
            self.filling.place(self.get_adapter(lora_id))
        return bool(super().activate_adapter(lora_id))

    def _deactivate_adapter(self, lora_id: int) -> None:
        """Empty a slot; a thread that fills it stops first."""
        if self.filling is not None:
            self.filling.give_up(lora_id)
        super()._deactivate_adapter(lora_id)

    def remove_all_adapters(self) -> None:
        """Empty all slots."""
        if self.filling is not None:
            self.filling.drop()
        super().remove_all_adapters()

    def _add_adapter(self, lora: LoRAModel) -> None:
        """Register an adapter, whose matrices were joined where a thread has read it."""
        if self.filling is not None and self.filling.is_joined(lora):
            self._registered_adapters[lora.id] = lora
        else:
            super()._add_adapter(lora)

    def join_matrices(self, lora: LoRAModel) -> None:
        """Join an adapter's matrices of modules that are one here; vLLM does so when it registers it."""
        self._create_merged_loras_inplace(lora)

    def reserve_slot(self, lora_id: int) -> int:
        """Give ``lora_id`` a slot, that of the oldest adapter where all are full; return its number."""
        if len(self._active_adapters) >= self.lora_slots:
            self._active_adapters.remove_oldest()
        slot = self.lora_index_to_id.index(None)
        self._active_adapters[lora_id] = None
        self.lora_index_to_id[slot] = lora_id
        return slot

    def release_slot(self, lora_id: int) -> None:
        """Empty the slot of an adapter that was not registered."""
        self.deactivate_adapter(lora_id)

    def rename_slot(self, slot: int, lora_id: int, new_id: int) -> None:
        """Make the slot of ``lora_id`` that of ``new_id``, with what it has."""
        self.lora_index_to_id[slot] = new_id
        self._active_adapters.pop(lora_id)  # it has no slot to empty
        self._active_adapters[new_id] = None

    def keep_slot(self, lora_id: int) -> None:
        """Count a slot as used just now, so that the rest go first."""
        if lora_id in self._active_adapters:
            self._active_adapters.touch(lora_id)

    def fill_module(self, name: str, slot: int, lora: LoRAModel) -> None:
        """Copy what an adapter has for a module into a slot of it, as vLLM's activation does."""
        weights = self._get_lora_layer_weights(lora, name)
        if weights:
            self.modules[name].set_lora(slot, weights.lora_a, weights.lora_b)
        else:
            self.modules[name].reset_lora(slot)


class AdapterLoads:
    """Load of one adapter at a time by a thread, into a slot of its own."""

    def __init__(self, manager: AsideModelManager, read: Callable[[Any], LoRAModel]) -> None:
        """Take a stream on a GPU; ``read`` returns the adapter of a request, and is called in the thread."""
        self._manager, self._read = manager, read
        self._loader = BackgroundLoader(self._joined, self._fill, self._begin, _KEPT_S)
        self._device = torch.device(manager.device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream, self._freed = torch.cuda.Stream(self._device), torch.cuda.Event()
        self._lock = threading.Lock()  # held while a module is filled
        self._lora_id: int | None = None  # of the slot that is being filled, or is full and not registered
        self._slot = 0
        self._last_joined: LoRAModel | None = None

    def is_ready(self, request: Any) -> bool:
        """Return whether the adapter was read, or start to; called by the thread that steps.

        Raises:
            Exception: what reading it raised; the next call starts again.
        """
        try:
            return self._loader.is_ready(_asked(request))
        except Exception:
            self.drop()
            raise

    def taken(self, request: Any) -> LoRAModel | None:
        """Return the adapter, under the number of ``request``, if it was read; None: it was not."""
        found = self._loader.taken(_asked(request))
        if found is not None:
            found.id = request.lora_int_id
        return found

    def place(self, lora: LoRAModel | None) -> None:
        """Give ``lora`` the slot that was filled with it, if one was."""
        if lora is not None and self._lora_id is not None and self._loader.holds(lora):
            filled, self._lora_id = self._lora_id, None
            self._manager.rename_slot(self._slot, filled, lora.id)

    def is_joined(self, lora: LoRAModel) -> bool:
        """Return whether the thread has joined the matrices of ``lora``."""
        return lora is self._last_joined

    def release(self, request: Any) -> None:
        """Forget an adapter that is registered now; the slot stays its own.

        One of the same folder under another number, which a step uses, is not what was read.
        """
        found = self._loader.taken(_asked(request))
        if found is not None and found.id == request.lora_int_id:
            self._last_joined = None
            self._loader.release()

    def keep(self) -> None:
        """Have the slot that is being filled be the last one that a step takes."""
        if self._lora_id is not None:
            self._manager.keep_slot(self._lora_id)

    def give_up(self, lora_id: int) -> None:
        """Stop filling the slot of ``lora_id``, which is empty or another's from now on."""
        if lora_id == self._lora_id:
            with self._lock:
                self._lora_id = None

    def drop(self) -> None:
        """Stop filling, and empty the slot."""
        if self._lora_id is not None:
            self._manager.release_slot(self._lora_id)

    def wait(self) -> None:
        """Wait for the thread."""
        self._loader.wait()

    def _begin(self, asked: _Asked) -> None:
        """Take a slot, in the thread that steps; the steps that are launched may still use it."""
        self.drop()
        self._slot, self._last_joined = self._manager.reserve_slot(asked.request.lora_int_id), None
        self._lora_id = asked.request.lora_int_id
        if self._stream is not None:
            self._freed.record()

    def _joined(self, asked: _Asked) -> LoRAModel:
        """Return the adapter, its matrices joined."""
        _pauses.set(Pauses())
        with torch.cuda.device(self._device) if self._stream is not None else nullcontext():
            lora = self._read(asked.request)
            self._manager.join_matrices(lora)
        if isinstance(lora, PausedModel):
            lora.end_pauses()
        self._last_joined = lora
        return lora

    def _fill(self, lora: LoRAModel) -> None:
        """Fill the slot, module by module; each is there before the next one is begun."""
        pause = Pauses()
        with torch.inference_mode():
            if self._stream is None:
                self._fill_modules(lora, pause)
                return
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._freed)
                self._fill_modules(lora, pause)

    def _fill_modules(self, lora: LoRAModel, pause: Callable[[], None]) -> None:
        for name in self._manager.modules:
            with self._lock:
                if self._lora_id is None:  # a step has taken the slot; no other load begins before this one ends
                    return
                self._manager.fill_module(name, self._slot, lora)
                if self._stream is not None:
                    self._stream.synchronize()
            pause()


class AsideWorkerManager(SharingWorkerManager):
    """Worker's manager that loads adapters next to steps, where the configuration asks for it."""

    _manager_cls = AsideModelManager
    _waits = False
    loads: AdapterLoads | None = None

    def create_lora_manager(self, model: Any, vllm_config: Any) -> Any:
        """Make the manager of the model, and what loads next to its steps.

        Raises:
            ValueError: what adapters are not loaded next to.
        """
        self._lora_model_cls = PausedModel
        made = super().create_lora_manager(model, vllm_config)
        if wants_background_adapters(vllm_config.additional_config):
            if vllm_config.parallel_config.world_size > 1:
                raise ValueError(
                    "iserve_adapter_loads: threads of several GPUs end at different times; leave it out"
                )
            if not self._adapter_manager.is_pooling_model:
                lora_model.PIN_MEMORY = lora_weights.PIN_MEMORY = model_manager.PIN_MEMORY = False
                self.loads = AdapterLoads(self._adapter_manager, super()._load_adapter)
                self._adapter_manager.filling = self.loads
        return made

    def reads_aside(self, lora_request: Any) -> bool:
        """Return whether the thread reads an adapter; not one that is loaded in the place of another."""
        return self.loads is not None and not lora_request.load_inplace

    def add_adapter(self, lora_request: Any) -> bool:
        """Load an adapter.

        Raises:
            StillReadError: its thread has not ended.
        """
        is_there = lora_request.lora_int_id in self._adapter_manager._registered_adapters
        is_aside = self.reads_aside(lora_request) and not is_there
        if is_aside and not self._waits and not self.loads.is_ready(lora_request):  # type: ignore[union-attr]
            raise StillReadError("adapter", lora_request.lora_name)
        added = super().add_adapter(lora_request)
        if self.loads is not None:
            self.loads.release(lora_request)
        return bool(added)

    def _apply_adapters(self, lora_requests: Any) -> None:
        """Load what a step needs, which waits for it."""
        if self.loads is not None:
            self.loads.keep()
        self._waits = True
        try:
            super()._apply_adapters(lora_requests)
        finally:
            self._waits = False

    def _load_adapter(self, lora_request: Any) -> LoRAModel:
        if self.reads_aside(lora_request) and (found := self.loads.taken(lora_request)) is not None:  # type: ignore[union-attr]
            return found
        return super()._load_adapter(lora_request)


def request_folder(lora_request: Any) -> Path:
    """Return the folder that a request of vLLM names."""
    return Path(lora_request.lora_path).expanduser()


def _asked(request: Any) -> _Asked:
    return _Asked(request_folder(request), request)
