"""Our kernels of adapters in vLLM's place, for steps of up to 1,024 rows; all else stays vLLM's.

One operator for a linear is traced into vLLM's compiled graphs, and knows its sizes when it runs. Rows are grouped
by adapter once for each mapping, in buffers that captured graphs read. Logits, which no graph has, are left alone
while no adapter in a slot changes the output layer: vLLM adds the product with that layer's slots to the logits of
every row with an adapter, though most adapters leave them zero.
"""

# No ``from __future__ import annotations``: schemas of operators are inferred from annotations that are types.

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "OutputSlots",
    "add_lora_linear",
    "linear_operator",
    "split_steps_alone",
    "splitting",
    "use_adapter_kernels",
]

_LOGGER = logging.getLogger("vllm.iserve_variants")


def use_adapter_kernels() -> None:
    """Replace what vLLM runs for adapters in linears; once in a process.

    Raises:
        ValueError: a row's result is to be the same in each batch, which it is not where batches of more than
            ``MOST_ROWS`` rows are vLLM's.
    """
    if hasattr(torch.ops.vllm, "iserve_adapter_linear"):
        return
    from vllm.lora.layers.classifier import BaseClassificationHeadWithLoRA
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink
    from vllm.lora.ops.triton_ops.utils import is_batch_invariant, supports_pdl
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.utils.torch_utils import direct_register_custom_op

    from iserve_variants import adapter_kernels

    if is_batch_invariant:
        raise ValueError(
            "kernels of adapters sum steps of few rows in their own order: unset VLLM_BATCH_INVARIANT"
        )
    tilings = adapter_kernels.TILINGS
    if not supports_pdl():
        tilings = {slices: replace(tiling, overlaps=0) for slices, tiling in tilings.items()}
    direct_register_custom_op(
        op_name="iserve_adapter_linear",
        op_func=linear_operator(adapter_kernels, tilings, _lora_shrink, _lora_expand),
        mutates_args=["y"],
        fake_impl=_nothing,
    )
    make, prepare = splitting(adapter_kernels.Groups, adapter_kernels.AdapterTiling().rows, LoRAKernelMeta)
    LoRAKernelMeta.make, LoRAKernelMeta.prepare_tensors = staticmethod(make), prepare
    split_steps_alone(PunicaWrapperGPU)
    PunicaWrapperGPU.add_lora_linear = add_lora_linear
    slots = OutputSlots()
    slots.watch(LogitsProcessorWithLoRA, PunicaWrapperGPU)
    slots.watch_layer(BaseClassificationHeadWithLoRA)
    _LOGGER.info("kernels of adapters are iServe's in steps of up to %d rows", adapter_kernels.MOST_ROWS)


def splitting(
    groups_of: Callable[..., Any], rows: int, meta: type
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return ``make`` and ``prepare_tensors`` of ``meta`` which keep its groups in pieces of ``rows`` rows too.

    A meta's ``iserve_pieces`` are counts, starts and slots, always in the same memory.
    """
    their_make, theirs = meta.make, meta.prepare_tensors  # type: ignore[attr-defined]

    def groups(self: Any, *found: torch.Tensor) -> Any:
        return groups_of(self.token_indices_sorted_by_lora_ids, *found)

    def split(self: Any, into: Any) -> Any:
        found = (self.num_tokens_per_lora, self.lora_token_start_loc, self.active_lora_ids)
        return groups(self, *found).split(rows, into)

    def make(*args: Any, **kwargs: Any) -> Any:
        made = their_make(*args, **kwargs)
        made.iserve_pieces = split(made, None)[1:]
        return made

    def prepare_tensors(self: Any, token_lora_mapping: torch.Tensor) -> None:
        theirs(self, token_lora_mapping)
        if self.iserve_pieces:
            split(self, groups(self, *self.iserve_pieces))

    return make, prepare_tensors


def split_steps_alone(wrapper: type) -> None:
    """Have vLLM's ``wrapper`` keep pieces of a step's rows alone: rows of logits are for vLLM's kernels."""
    theirs = wrapper.__init__  # type: ignore[misc]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.prompt_mapping_meta.iserve_pieces = ()

    wrapper.__init__ = __init__  # type: ignore[misc]


class OutputSlots:
    """Slots whose adapter changes the layer of ``add_lora_logits``: the output layer, or a classifier."""

    def __init__(self) -> None:
        self._changed = WeakTensorKeyDictionary()  # by the slots of A: memory is used again after a model has gone

    def watch(self, layer: type, wrapper: type) -> None:
        """Have vLLM's ``layer`` of the logits say what its slots hold, and ``wrapper`` add no more than that."""
        self.watch_layer(layer)
        theirs, their_update = wrapper.add_lora_logits, wrapper.update_metadata  # type: ignore[attr-defined]

        def update_metadata(
            this: Any, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any
        ) -> None:
            their_update(this, mapping, lora_index_to_id, *args, **kwargs)
            this.iserve_ids = lora_index_to_id  # vLLM's own list, by slot

        def add_lora_logits(
            this: Any, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            changed, ids = self._changed.get(lora_a_stacked, ()), getattr(this, "iserve_ids", None)
            if changed and (ids is None or any(ids[index] is not None for index in tuple(changed))):
                theirs(this, y, x, lora_a_stacked, *args, **kwargs)

        wrapper.add_lora_logits = add_lora_logits  # type: ignore[attr-defined]
        wrapper.update_metadata = update_metadata  # type: ignore[attr-defined]

    def watch_layer(self, layer: type) -> None:
        """Have a class of vLLM's layers say what its slots hold: each class that calls ``add_lora_logits``."""
        their_set, their_reset = layer.set_lora, layer.reset_lora  # type: ignore[attr-defined]

        def set_lora(this: Any, index: int, lora_a: Any, lora_b: Any) -> None:
            their_set(this, index, lora_a, lora_b)
            self._changed.setdefault(_slots_of(this), set()).add(index)

        def reset_lora(this: Any, index: int) -> None:
            their_reset(this, index)
            self._changed.get(_slots_of(this), set()).discard(index)

        layer.set_lora, layer.reset_lora = set_lora, reset_lora  # type: ignore[attr-defined]


def _slots_of(layer: Any) -> torch.Tensor:
    """Return the slots of A: of a linear they are those of its only slice."""
    slots: torch.Tensor | tuple[torch.Tensor, ...] = layer.lora_a_stacked
    return slots if isinstance(slots, torch.Tensor) else slots[0]


def linear_operator(
    kernels: ModuleType, tilings: Mapping[int, Any], shrink: Callable[..., None], expand: Callable[..., None]
) -> Callable[..., None]:
    """Return the operator: our kernels where they are for a product, else ``shrink`` and ``expand`` of vLLM.

    Args:
        tilings: by the linear's slices.
    """

    def iserve_adapter_linear(
        y: torch.Tensor,
        x: torch.Tensor,
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        mapping: torch.Tensor,
        order: torch.Tensor,
        counts: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        is_base: torch.Tensor,
        num_active: torch.Tensor,
        piece_counts: torch.Tensor,
        piece_starts: torch.Tensor,
        piece_slots: torch.Tensor,
        scale: float,
        adds: bool,
    ) -> None:
        if is_base.item() or x.shape[0] == 0:
            return
        x = x.contiguous()
        is_plain = y.dtype == x.dtype and y.shape[-1] == sum(each.shape[-2] for each in b)
        if adds and is_plain and kernels.takes(x, a, b):
            groups = kernels.Groups(order, piece_counts, piece_starts, piece_slots)
            kernels.add_adapters(y, x, a, b, groups, scale, tilings[len(a)])
            return
        mixed = (mapping, order, counts, starts, slots, is_base, num_active)
        buffer = torch.empty((len(b), x.shape[0], b[0].shape[-1]), dtype=torch.float32, device=x.device)
        shrink(x, a, buffer, *mixed, scale)
        expand(buffer, b, y, *mixed, offset_start=0, add_inputs=adds)

    return iserve_adapter_linear


def _nothing(*_: object, **__: object) -> None:
    return


def add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Any,
    lora_b_stacked: Any,
    scale: float,
    output_slices: Any,
    *,
    buffer: Any = None,
    **kwargs: Any,
) -> None:
    """Call the operator; in the place of ``PunicaWrapperGPU.add_lora_linear``."""
    meta = self.token_mapping_meta
    torch.ops.vllm.iserve_adapter_linear(
        y,
        x,
        lora_a_stacked,
        lora_b_stacked,
        *meta.meta_args(x.size(0), self.lora_config.specialize_active_lora),
        *meta.iserve_pieces,
        scale,
        kwargs.get("add_inputs", True),
    )
