"""Our kernels of adapters in vLLM's place, for steps of few rows; all else stays vLLM's.

One operator for a linear is traced into vLLM's compiled graphs, and knows its sizes when it runs. Rows are grouped
by adapter once for each mapping, in buffers that captured graphs read.
"""

# No ``from __future__ import annotations``: schemas of operators are inferred from annotations that are types.

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["add_lora_linear", "linear_operator", "splitting", "use_adapter_kernels"]

_LOGGER = logging.getLogger("vllm.iserve_variants")
_OVERLAPPING = (9, 0)  # compute capability from which on a launch may begin before the one before it has ended


def use_adapter_kernels() -> None:
    """Replace what vLLM runs for adapters in linears; once in a process."""
    if hasattr(torch.ops.vllm, "iserve_adapter_linear"):
        return
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.utils.torch_utils import direct_register_custom_op

    from iserve_variants import adapter_kernels

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    tiling = adapter_kernels.AdapterTiling(overlaps=2 if capability >= _OVERLAPPING else 0)
    direct_register_custom_op(
        op_name="iserve_adapter_linear",
        op_func=linear_operator(adapter_kernels, tiling, _lora_shrink, _lora_expand),
        mutates_args=["y"],
        fake_impl=_nothing,
    )
    make, prepare = splitting(adapter_kernels.Groups, tiling.rows, LoRAKernelMeta)
    LoRAKernelMeta.make, LoRAKernelMeta.prepare_tensors = staticmethod(make), prepare
    PunicaWrapperGPU.add_lora_linear = add_lora_linear
    _LOGGER.info("kernels of adapters are iServe's in steps of up to %d rows", adapter_kernels.MOST_ROWS)


def splitting(
    groups_of: Callable[..., Any], rows: int, meta: type
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return ``make`` and ``prepare_tensors`` of ``meta`` which keep its groups in pieces of ``rows`` rows too.

    A meta's ``iserve_pieces`` are counts, starts and slots, always in the same memory.
    """
    their_make, theirs = meta.make, meta.prepare_tensors  # type: ignore[attr-defined]

    def split(self: Any) -> Any:
        found = (self.num_tokens_per_lora, self.lora_token_start_loc, self.active_lora_ids)
        return groups_of(self.token_indices_sorted_by_lora_ids, *found).split(rows)[1:]

    def make(*args: Any, **kwargs: Any) -> Any:
        made = their_make(*args, **kwargs)
        made.iserve_pieces = split(made)
        return made

    def prepare_tensors(self: Any, token_lora_mapping: torch.Tensor) -> None:
        theirs(self, token_lora_mapping)
        for into, new in zip(self.iserve_pieces, split(self), strict=True):
            into.copy_(new)

    return make, prepare_tensors


def linear_operator(
    kernels: ModuleType, tiling: Any, shrink: Callable[..., None], expand: Callable[..., None]
) -> Callable[..., None]:
    """Return the operator: our kernels where they are for a product, else ``shrink`` and ``expand`` of vLLM."""

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
        if adds and kernels.takes(x, a, b):
            groups = kernels.Groups(order, piece_counts, piece_starts, piece_slots)
            kernels.add_adapters(y, x, a, b, groups, scale, tiling)
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
