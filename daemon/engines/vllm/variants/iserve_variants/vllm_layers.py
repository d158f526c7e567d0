"""Linears of vLLM's LoRA path with slots of deltas next to those of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from iserve_variants.formats import FORMATS, GROUP, TILE_ROWS
from iserve_variants.runtime import LINEARS, Runtime, own_name, runtime_being_built
from iserve_variants.slots import LinearSlots, Packed, cut_inputs, cut_outputs
from iserve_variants.step_routes import Run
from iserve_variants.vllm_operators import delta_linear

__all__ = ["LAYERS", "LinearWithDeltas"]

_THEIR_LINEARS = "vllm.model_executor.layers.linear"


class LinearWithDeltas:
    """Mixed in before one of vLLM's LoRA linears: an operator computes base, deltas and adapters together."""

    deltas: LinearSlots | None
    runtime: Runtime
    refusal: str
    """Why the linear takes no deltas, where ``deltas`` is None."""

    @classmethod
    def can_replace_layer(cls, *args: Any, **kwargs: Any) -> bool:
        return runtime_being_built() is not None and super().can_replace_layer(*args, **kwargs)  # type: ignore[misc]

    def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        runtime = runtime_being_built()
        assert runtime is not None  # can_replace_layer
        self.runtime, self.deltas, self.refusal = runtime, None, ""
        slices = tuple(self.output_slices)
        if type(self.base_layer).__module__ != _THEIR_LINEARS:
            self.refusal = f"its class {type(self.base_layer).__name__} may compute something else than a product"
            return
        if not LinearSlots.fits(slices, self.input_size):
            self.refusal = (
                f"with tp={self.tp_size} a GPU has {' + '.join(map(str, slices))} outputs and {self.input_size} "
                f"inputs of it, which are no whole tiles of {TILE_ROWS} and groups of {GROUP}"
            )
            return
        if self.tp_size > 1 and self.n_slices == 1 and hasattr(self.base_layer, "output_sizes"):
            self.refusal = f"it joins matrices in the checkpoint, which tp={self.tp_size} cuts one by one"
            return
        self.deltas = LinearSlots(
            slots=runtime.places.count,
            slices=slices,
            inputs=self.input_size,
            format_=FORMATS[runtime.settings.format],
            device=self.device,
        )
        runtime.merges &= isinstance(self._get_quant_method(), UnquantizedLinearMethod)
        self.delta_name = own_name(LINEARS, self.base_layer.prefix, self)

    def whole_shapes(self: Any) -> list[tuple[int, int]]:
        """Return outputs and inputs of each matrix that the linear joins, over all ranks."""
        if isinstance(self, RowParallelLinearWithLoRA):
            return [(self.output_slices[0], self.input_size * self.tp_size)]
        shards = [self.tp_size] * self.n_slices
        if isinstance(self, MergedQKVParallelLinearWithLoRA):
            shards[1:] = [self.tp_size // self.base_layer.num_kv_head_replicas] * 2
        sizes = zip(self.output_slices, shards, strict=True)
        return [(outputs * count, self.input_size) for outputs, count in sizes]

    def fill(self: Any, place: int, lora_a: Any, lora_b: Any, *, is_own: bool = False) -> None:
        """Fill a place with codes and scales, of a list of which some may be None.

        ``is_own``: they are this rank's part already, as :meth:`own_parts` returns it.
        """
        many = isinstance(lora_a, list)
        packed = list(zip(lora_a, lora_b, strict=True)) if many else [(lora_a, lora_b)]
        parts = [None if one[0] is None else one for one in packed]
        self.deltas.put(place, parts if is_own else self.own_parts(parts))

    def own_parts(self: Any, parts: Sequence[Packed | None]) -> list[Packed | None]:
        """Return this rank's part of each matrix."""
        if isinstance(self, RowParallelLinearWithLoRA):
            return [part and cut_inputs(part, self.tp_rank, self.input_size) for part in parts]
        shards = getattr(self, "output_ids", (self.tp_rank,) * len(parts))
        cut = zip(parts, shards, self.output_slices, strict=True)
        return [part and cut_outputs(part, shard, outputs) for part, shard, outputs in cut]

    def apply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.deltas is None:
            return super().apply(x, bias)  # type: ignore[misc]
        outputs = sum(self.output_slices)
        if x.dim() == 2:
            return delta_linear(x, bias, outputs, self.delta_name)
        y = delta_linear(x.reshape(-1, x.shape[-1]), bias, outputs, self.delta_name)
        return y.reshape(*x.shape[:-1], outputs)

    def multiply(self: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return base, deltas and adapters of all rows; what the operator runs."""
        routes, products = self.runtime.routes, self.runtime.products
        y = self._base_products(x, bias, routes.runs) if routes.runs else self._base_product(x, bias)
        if routes.launches(x.shape[0]):
            products.add(y, x, self.deltas, routes.token_route)
        if self.runtime.settings.adapters and routes.launches_adapters(x.shape[0]):
            self.punica_wrapper.add_lora_linear(
                y, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
            )
        return y

    def _base_product(self: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._get_quant_method().apply(self.base_layer, x, bias)

    def _base_products(self: Any, x: torch.Tensor, bias: torch.Tensor | None, runs: Sequence[Run]) -> torch.Tensor:
        """Return base and merged deltas, a product for each run of rows."""
        if len(runs) == 1 and runs[0].slot >= 0 and runs[0].end == len(x):
            weight = self.runtime.products.merge(self.base_layer.weight, self.deltas, runs[0].slot)
            return torch.nn.functional.linear(x, weight, bias)
        y = x.new_empty(x.shape[0], sum(self.output_slices))
        merged: dict[int, list[Run]] = {}
        end = runs[-1].end
        base = [*(run for run in runs if run.slot < 0), *([Run(-1, end, len(x))] if end < len(x) else [])]
        for run in base:
            y[run.start : run.end] = self._base_product(x[run.start : run.end], bias)
        for run in runs:
            if run.slot >= 0:
                merged.setdefault(run.slot, []).append(run)
        for slot, its_runs in merged.items():  # the scratch matrix is that of one delta at a time
            weight = self.runtime.products.merge(self.base_layer.weight, self.deltas, slot)
            for run in its_runs:
                rows, out = x[run.start : run.end], y[run.start : run.end]
                torch.mm(rows, weight.t(), out=out)
                if bias is not None:
                    out += bias
        return y


class ColumnWithDeltas(LinearWithDeltas, ColumnParallelLinearWithLoRA):
    """Column-parallel linear of one matrix, or of two that the checkpoint joins."""


class MergedColumnWithDeltas(LinearWithDeltas, MergedColumnParallelLinearWithLoRA):
    """Gate and up."""


class QkvWithDeltas(LinearWithDeltas, QKVParallelLinearWithLoRA):
    """q, k and v that the checkpoint joins."""


class MergedQkvWithDeltas(LinearWithDeltas, MergedQKVParallelLinearWithLoRA):
    """q, k and v."""


class RowWithDeltas(LinearWithDeltas, RowParallelLinearWithLoRA):
    """Row-parallel linear; its products are reduced over ranks afterwards."""


LAYERS = (ColumnWithDeltas, MergedColumnWithDeltas, QkvWithDeltas, MergedQkvWithDeltas, RowWithDeltas)
