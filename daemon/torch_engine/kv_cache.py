"""The KV cache: for each layer, one contiguous stretch of the whole context per sequence slot.

Allocated once, so that its bytes are exactly those the plan assumed: nothing grows, nothing is paged.
"""

from __future__ import annotations

import torch

from daemon.torch_engine.batch import FlatBatch

__all__ = ["KvCache", "kv_cache_bytes"]


def kv_cache_bytes(
    *, num_layers: int, slots: int, kv_heads: int, context_tokens: int, head_dim: int, element_bytes: int
) -> int:
    """Bytes of K and V on one rank; ``kv_heads`` are the ones that this rank holds."""
    return 2 * num_layers * slots * kv_heads * context_tokens * head_dim * element_bytes


class KvCache:
    """K and V of ``num_layers`` layers, each [slots, kv_heads, context, head_dim].

    A slot is reused by simply writing from position 0 again; what lies beyond a sequence's end is never read.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        kv_heads: int,
        context_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, kv_heads, context_tokens, head_dim)
        # Zeroed, not only reserved: the pages are then really taken, and running out shows at load.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._keys, *self._values)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def write(self, layer: int, batch: FlatBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's [1, kv_heads, T, head_dim] keys and values at their slots and positions."""
        at = batch.slots, slice(None), batch.positions[0]  # one write for all sequences, however many they are
        self._keys[layer][at] = key[0].transpose(0, 1)
        self._values[layer][at] = value[0].transpose(0, 1)

    def read(self, layer: int, slot: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [1, kv_heads, high - low, head_dim] of positions ``low`` to ``high`` of one sequence."""
        at = (slice(slot, slot + 1), slice(None), slice(low, high))
        return self._keys[layer][at], self._values[layer][at]
