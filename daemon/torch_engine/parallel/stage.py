"""Rank at work: its part of the model, its KV cache and buffers, and the clock on each step.

Knows its neighbours in the pipeline, and nothing of how steps are decided.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daemon.torch_engine.model.adapters import Factors, Part, read_into, tensors_of
from daemon.torch_engine.model.batch import FlatBatch
from daemon.torch_engine.model.delta_parts import on_device, read_delta_updates
from daemon.torch_engine.model.kv_cache import KvCache, kv_cache_bytes
from daemon.torch_engine.model.stage_model import StageModel, StageShape, read_source, tensor_bytes
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.parallel.parallel_state import AdapterOrder, Groups, LoadOrder, RankPlace
from daemon.torch_engine.parallel.rank_device import RankDevice, release_memory
from daemon.torch_engine.runner_types import StepPlan
from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import BaseHashes, is_delta, open_delta
from fingerprint.errors import EngineError, UnsupportedAdapterError
from fingerprint.lora import read_adapter, require_supported, slot_bytes
from fingerprint.lora.adapter import open_weights
from fingerprint.measurements import RankMemory

__all__ = ["ActivationMeter", "RankTiming", "Stage"]


@dataclass(frozen=True, slots=True)
class RankTiming:
    """Timing of one rank's step.

    Instants are of the machine's monotonic clock, so ranks of one node can be compared.
    """

    forward_s: float  # its own part; waiting for the stage before is not in it
    input_ready_at: float  # hidden states have arrived (first stage: the step began)
    output_begun_at: float  # began to send hidden states on (last stage: the forward ended)


class _CacheSizes(TypedDict):
    layer_tokens: list[int]
    slots: int
    kv_heads: int
    head_dim: int


class Stage:
    """A loaded stage. Made anew for each load; dropping it gives every byte back.

    Raises:
        EngineError: the plan's bytes exceed the limit per device, or the format or split is refused.
        CheckpointError, UnsupportedModelError: as ``stage_model``.
    """

    def __init__(self, order: LoadOrder, place: RankPlace, groups: Groups, device: RankDevice) -> None:
        self._place, self._groups, self._device, self._limits = place, groups, device, order.limits
        config = order.config
        dtype = getattr(torch, order.dtype) if order.dtype else None
        source = read_source(order.path, device.torch_device, dtype)
        layers = order.layers_per_stage
        if sum(layers) != source.spec.num_layers:
            raise EngineError(f"the stages hold {sum(layers)} layers, the checkpoint has {source.spec.num_layers}")
        shape = StageShape(
            first_layer=sum(layers[: place.stage]),
            num_layers=layers[place.stage],
            is_first=place.stage == 0,
            is_last=place.stage == config.pp - 1,
        )
        parallel = TensorParallel(config.tp, place.tp_index, {}, groups.tensor)
        self.model = StageModel(source, shape, config.weights, parallel)
        self.vocab_size = source.spec.vocab_size
        self._spec, self._dtype, self._shape = source.spec, source.dtype, shape
        self._config = config
        adapter = slot_bytes(source.spec, replace(config, delta_mib=0), shape.num_layers)  # in 16 bits
        self._slot_bytes = max(adapter * source.dtype.itemsize // 2, config.delta_mib << 20)
        self._held = threading.Lock()  # while the held bytes change, or are compared with the device's
        self._peak_bytes = 0
        self._metered = (0, 0, 0)
        room_bytes = order.room_bytes_per_stage[place.stage]
        self._check_room(room_bytes)
        device.limit_memory(room_bytes)
        self.model.load(device.torch_device)
        release_memory()  # what quantizing one tensor after the other freed would count as runtime
        # Hashed by one rank, at the first delta; all read their parts of a delta meanwhile.
        has_deltas = place.rank == 0 and config.adapter_slots > 0
        self._base = BaseHashes(Checkpoint.open(order.path)) if has_deltas else None
        self._cache = KvCache(**self._cache_sizes(), dtype=self._dtype, device=device.torch_device)
        self._inbox = self._make_inbox()
        device.reset_peak()

    def _cache_sizes(self) -> _CacheSizes:
        first, context = self._shape.first_layer, self._limits.max_context_tokens
        windows = self._spec.windows[first : first + self._shape.num_layers]
        return {
            "layer_tokens": [min(window or context, context) for window in windows],
            "slots": self._limits.max_batch,
            "kv_heads": self._spec.num_kv_heads // self.model.parallel.tp,
            "head_dim": self._spec.head_dim,
        }

    def _make_inbox(self) -> torch.Tensor | None:
        """Return the buffer in which hidden states of the stage before arrive: the pipeline's only one."""
        if self._shape.is_first:
            return None
        size = (1, self._limits.max_batched_tokens, self._spec.hidden_size)
        return torch.zeros(size, dtype=self._dtype, device=self._device.torch_device)

    def _check_room(self, room: int) -> None:
        weights = self.model.planned_bytes()
        kv = kv_cache_bytes(**self._cache_sizes(), element_bytes=self._dtype.itemsize)
        rows = 0 if self._shape.is_first else self._limits.max_batched_tokens
        buffers = rows * self._spec.hidden_size * self._dtype.itemsize
        adapters = self._config.loaded_adapters * self._slot_bytes
        need = weights + kv + buffers + adapters
        if need > room:
            of_adapters = f"{adapters:,} of {self._config.loaded_adapters} adapters, " if adapters else ""
            fewer = "have fewer adapter slots, " if adapters else ""
            raise EngineError(
                f"stage {self._place.stage} needs {weights:,} bytes of weights, {kv:,} of KV cache and "
                f"{buffers:,} of buffers, {of_adapters}{need:,} in all; its limit is {room:,} per device: "
                f"lower max_batch or the context, {fewer}or use more devices"
            )

    def prepare_adapter(self, order: AdapterOrder) -> None:
        """Read, check and hold this rank's part of an adapter or a delta, in any thread, next to steps.

        No step may name it yet. One that is refused leaves nothing.

        Raises:
            BadInputError: it cannot be read, is more than a plain LoRA, or does not fit this model or a slot.
        """
        folder = Path(order.folder)
        try:
            with self._device.next_to_steps():
                if is_delta(folder):
                    self._prepare_delta(order.adapter_id, folder)
                else:
                    self._prepare_lora(order.adapter_id, folder)
        except BaseException:
            self.unload_adapter(order.adapter_id)
            raise

    def _prepare_lora(self, adapter_id: int, folder: Path) -> None:
        adapter = read_adapter(folder, max_rank=self._config.adapter_rank)
        require_supported(adapter)
        parts = self.model.adapter_parts(adapter)
        empty = {name: [part.empty(self._dtype, "meta")] for name, part in parts.items()}
        self._check_slot(tensor_bytes(tensors_of(empty)))
        weights = open_weights(adapter.folder)
        factors = self._hold(adapter_id, parts)
        for name, part in parts.items():
            read_into(factors[name], part, weights)

    def _prepare_delta(self, adapter_id: int, folder: Path) -> None:
        updates = read_delta_updates(open_delta(folder), self.model, self._base)
        self._check_slot(tensor_bytes(tensors_of(updates)))
        with self._held:  # moved at once, as adapters are allocated
            self._keep_peak()
            self.model.adapters.prepare(adapter_id, on_device(updates, self._device.torch_device))

    def _check_slot(self, num_bytes: int) -> None:
        if num_bytes > self._slot_bytes:
            raise UnsupportedAdapterError(
                f"the variant takes {num_bytes:,} bytes of stage {self._place.stage}, of which a slot has "
                f"{self._slot_bytes:,}; deploy with larger slots (--rank, --delta-mib), or merge or export it"
            )

    def _hold(self, adapter_id: int, parts: Mapping[str, Part]) -> Mapping[str, Factors]:
        """Allocate the factors of an adapter all at once, so that the device's peak has all of them or none."""
        with self._held:
            self._keep_peak()
            factors = {name: part.empty(self._dtype, self._device.torch_device) for name, part in parts.items()}
            self.model.adapters.prepare(adapter_id, {name: [each] for name, each in factors.items()})
        return factors

    def switch_adapter(self, adapter_id: int) -> None:
        """Let steps name a prepared adapter: between two steps, without reading or moving a value."""
        with self._held:
            self.model.adapters.switch(adapter_id)

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter that no step names any more, or that was prepared; an unknown one is ignored."""
        with self._held:
            self._keep_peak()
            self.model.adapters.remove(adapter_id)

    def _keep_peak(self) -> None:
        """Keep the peak of activations before the held bytes change, beyond which the device counts it."""
        if self._device.counts_memory:
            self._peak_bytes = max(self._peak_bytes, self._device.peak_bytes(self._held_bytes()))
            self._device.reset_peak()

    def step(self, plan: StepPlan) -> tuple[torch.Tensor | None, RankTiming]:
        """Run this stage's part of a step.

        The owner of the logits gets them, [items, vocab] float32 on the CPU; all other stages get None.
        """
        device = self._device
        batch = FlatBatch.from_plan(plan, device.torch_device)
        hidden = self._receive(batch.num_tokens)
        ready = time.perf_counter()
        clock = device.start_clock()
        output = self._metered_forward(batch, hidden)
        logits = self._gather_logits(output) if self._shape.is_last else None
        forward_s = device.stop_clock(clock)
        sent = time.perf_counter()
        if not self._shape.is_last:
            dist.send(output.contiguous(), dst=self._groups.next_rank)
        return logits, RankTiming(forward_s, ready, sent)

    def _receive(self, num_tokens: int) -> torch.Tensor | None:
        if self._inbox is None:
            return None
        hidden = self._inbox[:, :num_tokens]
        dist.recv(hidden, src=self._groups.previous_rank)
        self._device.synchronize()
        return hidden

    def _metered_forward(self, batch: FlatBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the forward; on the CPU, meter a step larger in any way than all before, and run the rest at full
        speed.
        """
        size = (batch.num_tokens, len(batch.spans), batch.mask_elements)
        largest = tuple(map(max, size, self._metered))
        if self._device.counts_memory or largest == self._metered:
            return self.model.forward(batch, hidden, self._cache)
        self._metered = largest
        known = (*self.model.tensors, *self._cache.tensors)
        with ActivationMeter(known if self._inbox is None else (*known, self._inbox)) as meter:
            output = self.model.forward(batch, hidden, self._cache)
        self._peak_bytes = max(self._peak_bytes, meter.peak_bytes)
        return output

    def _gather_logits(self, output: torch.Tensor) -> torch.Tensor | None:
        leads = self._place.tp_index == 0
        if not self.model.head_is_split:
            return output.to("cpu", torch.float32, copy=True) if leads else None
        output = output.contiguous()
        parts = [torch.empty_like(output) for _ in range(self.model.parallel.tp)] if leads else None
        dist.gather(output, parts, dst=self._groups.leader_rank, group=self._groups.tensor)
        return torch.cat(parts, dim=-1).float().cpu() if parts else None

    def memory(self) -> RankMemory:
        with self._held:
            weights, kv = self.model.weight_bytes(), self._cache.num_bytes
            buffers, held = self._buffer_bytes(), self._held_bytes()
            peak = self._device.peak_bytes(held) if self._device.counts_memory else 0
        return RankMemory(
            rank=self._place.rank,
            stage=self._place.stage,
            weights_bytes=weights,
            kv_bytes=kv,
            activation_peak_bytes=max(self._peak_bytes, peak),
            pp_buffer_bytes=buffers,
            runtime_bytes=self._device.runtime_bytes(held),
        )

    def _buffer_bytes(self) -> int:
        return tensor_bytes((self._inbox,)) if self._inbox is not None else 0

    def _held_bytes(self) -> int:
        return self.model.weight_bytes() + self._cache.num_bytes + self._buffer_bytes()


class ActivationMeter(TorchDispatchMode):
    """Peak of live tensor bytes within it, on the CPU, where no allocator keeps count.

    It sees every tensor that an operator returns, and its death, not the scratch a kernel takes inside itself.
    Slow (tens of microseconds an operator): for single steps only.

    Args:
        known: tensors that exist already and do not count.
    """

    def __init__(self, known: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._live or not num_bytes or storage.data_ptr() in self._known:
            return

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self._live_bytes -= num_bytes

        self._live[key] = weakref.ref(storage, gone)
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
