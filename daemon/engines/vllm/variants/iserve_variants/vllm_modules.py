"""Norms, embeddings and the output layer of a vLLM model with slots of deltas, around vLLM's own modules."""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from iserve_variants.runtime import EMBEDDINGS, Runtime, own_name
from iserve_variants.slots import EmbeddingSlots, NormSlots
from iserve_variants.vllm_operators import delta_embedding
from iserve_variants.vllm_prompts import adapters_of_samples_only, compute_logits_of_prompts

__all__ = ["EmbeddingWithDeltas", "NormWithDeltas", "OutputWithDeltas", "add_to_logits"]


class NormWithDeltas(BaseLayerWithLoRA):
    """RMS norm whose rows have the weight of their slot; in a compiled graph it needs no launch of its own."""

    def __init__(self, base_layer: torch.nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.base_layer, self.runtime = base_layer, runtime
        self.deltas = NormSlots(slots=runtime.places.count, weight=base_layer.weight)
        self.token_slots = runtime.routes.token_slots
        self.eps = base_layer.variance_epsilon

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        normed, total = self.deltas.normalize(x, self.token_slots[: x.shape[0]], self.eps, residual)
        return normed if residual is None else (normed, total)

    def fill(self, place: int, lora_a: Any, lora_b: Any, *, is_own: bool = False) -> None:
        """Fill a place with weights, all of which each rank has."""
        self.deltas.put(place, lora_a)


class _VocabularyWithDeltas(BaseLayerWithLoRA):
    """Slots of a matrix of the whole vocabulary, next to vLLM's module with adapters where there is one."""

    deltas: EmbeddingSlots
    runtime: Runtime

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        inner = self._with_adapters()
        assert inner is not None  # adapters of a module that has no slots for them are not here
        inner.set_lora(index, lora_a, lora_b)

    def fill(self, place: int, lora_a: Any, lora_b: Any, *, is_own: bool = False) -> None:
        """Fill a place with codes and scales, all of which each rank has."""
        self.deltas.put(place, (lora_a, lora_b))

    def reset_lora(self, index: int) -> None:
        inner = self._with_adapters()
        if inner is not None:
            inner.reset_lora(index)

    def set_mapping(self, punica_wrapper: Any) -> None:
        super().set_mapping(punica_wrapper)
        inner = self._with_adapters()
        if inner is not None:
            inner.set_mapping(punica_wrapper)

    def _with_adapters(self) -> BaseLayerWithLoRA | None:
        inner = self._modules.get("base_layer")
        return inner if isinstance(inner, BaseLayerWithLoRA) else None


class EmbeddingWithDeltas(_VocabularyWithDeltas):
    """Embedding plus what the deltas change of its tokens' rows."""

    def __init__(self, base_layer: torch.nn.Module, name: str, deltas: EmbeddingSlots, runtime: Runtime) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.deltas, self.runtime = deltas, runtime
        self.delta_name = own_name(EMBEDDINGS, name, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        delta_embedding(y, x, self.delta_name)
        return y

    def change(self, y: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the changes; what the operator runs."""
        if not self.runtime.routes.changes_embeddings(tokens.shape[0]):
            return
        slots = self.runtime.routes.token_slots[: tokens.shape[0]]
        y.copy_(y.float() + self.deltas.change(tokens, slots))


class OutputWithDeltas(_VocabularyWithDeltas):
    """Slots of an output layer with weights of its own; the logits' module adds them."""

    def __init__(self, base_layer: torch.nn.Module | None, deltas: EmbeddingSlots, runtime: Runtime) -> None:
        """Keep ``base_layer``, vLLM's logits with adapters, where the model's class has them."""
        super().__init__()
        self.base_layer = base_layer
        self.deltas, self.runtime = deltas, runtime


def add_to_logits(
    model: torch.nn.Module, processor: torch.nn.Module, deltas: EmbeddingSlots, runtime: Runtime
) -> None:
    """Make ``processor`` add to the logits of each row what its delta changes of the output layer.

    Every rank that has logits has those of the whole vocabulary, and the whole output layer's slots.

    Args:
        model: that has ``processor``, and whose logits of prompts are asked for as those of samples are.
    """
    runtime.routes.wants_samples = True
    compute_logits_of_prompts(model, runtime.routes)
    inner = processor._get_logits

    def get_logits(
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        if skip_gather:
            raise NotImplementedError("logits of a part of the vocabulary are not offered with deltas of it")
        with adapters_of_samples_only(processor):
            logits = inner(hidden_states, lm_head, embedding_bias, skip_gather)
        route = runtime.routes.logits_route
        if logits is not None and route is not None:
            rows, x = logits.view(-1, logits.shape[-1]), hidden_states.view(-1, hidden_states.shape[-1])
            runtime.products.add(rows, x, deltas, route)
        return logits

    processor._get_logits = get_logits
