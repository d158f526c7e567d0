"""The KV cache: for each layer, one contiguous stretch per sequence slot, as long as the context or the window.

Allocated once, so that its bytes are exactly those the plan assumed: nothing grows, nothing is paged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daemon.torch_engine.model.batch import FlatBatch, Span

__all__ = ["KvCache", "kv_cache_bytes"]

KeysValues = tuple[torch.Tensor, torch.Tensor]


def kv_cache_bytes(
    *, layer_tokens: Sequence[int], slots: int, kv_heads: int, head_dim: int, element_bytes: int
) -> int:
    """Return bytes of K and V on one rank; ``kv_heads`` are the ones that this rank holds."""
    return 2 * sum(layer_tokens) * slots * kv_heads * head_dim * element_bytes


class KvCache:
    """K and V of each layer, [slots, kv_heads, room, head_dim], a layer's room being ``layer_tokens`` of it.

    A layer whose room is shorter than a sequence keeps the last tokens: position p lies at p modulo the room. Its
    queries must look no further back than that. A slot is reused by simply writing from position 0 again; what
    lies beyond a sequence's end is never read.
    """

    def __init__(
        self,
        *,
        layer_tokens: Sequence[int],
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = [(slots, kv_heads, tokens, head_dim) for tokens in layer_tokens]
        # Zeroed, not only reserved: the pages are then really taken, and running out shows at load.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._keys, *self._values)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def add(self, layer: int, batch: FlatBatch, key: torch.Tensor, value: torch.Tensor) -> list[KeysValues]:
        """Store the step's [1, kv_heads, T, head_dim] keys and values at their slots and positions.

        Returns:
            For each span, K and V [1, kv_heads, n, head_dim] of its last n tokens, its own included and n at least
            the layer's room if the sequence is that long; in order, but for a span of one token, which looks at
            all of them alike.
        """
        room = self._keys[layer].shape[2]
        if max(span.end for span in batch.spans) <= room:
            self._write(layer, batch.slots, batch.positions[0], key[0], value[0])
            return [self._read(layer, span, 0, span.end) for span in batch.spans]
        # What a piece overwrites its first tokens still look at.
        before = {span: self._last(layer, span, room - 1) for span in batch.spans if span.count > 1}
        kept = _last_of_each(batch.spans, room, key.device)
        at = batch.positions[0][kept] % room
        self._write(layer, batch.slots[kept], at, key[0][:, kept], value[0][:, kept])
        found = []
        for span in batch.spans:
            own = slice(span.first, span.first + span.count)
            if span.count == 1:
                found.append(self._read(layer, span, 0, min(span.end, room)))
            else:
                old_keys, old_values = before[span]
                keys = torch.cat([old_keys, key[:, :, own]], dim=2)
                found.append((keys, torch.cat([old_values, value[:, :, own]], dim=2)))
        return found

    def _write(
        self, layer: int, slots: torch.Tensor, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        at = slots, slice(None), places  # one write for all sequences, however many they are
        self._keys[layer][at] = key.transpose(0, 1)
        self._values[layer][at] = value.transpose(0, 1)

    def _read(self, layer: int, span: Span, low: int, high: int) -> KeysValues:
        """Return views of places ``low`` to ``high``."""
        at = (slice(span.slot, span.slot + 1), slice(None), slice(low, high))
        return self._keys[layer][at], self._values[layer][at]

    def _last(self, layer: int, span: Span, most: int) -> KeysValues:
        """Return copies of what is stored before ``span``, in order; of ``most`` tokens at most."""
        keys, values = self._read(layer, span, 0, self._keys[layer].shape[2])
        positions = torch.arange(max(0, span.start - most), span.start, device=keys.device) % keys.shape[2]
        return keys[:, :, positions], values[:, :, positions]


def _last_of_each(spans: Sequence[Span], most: int, device: torch.device) -> torch.Tensor:
    """Return which tokens of the step lie within the last ``most`` of their span.

    No place is then written twice.
    """
    parts = [
        torch.arange(span.first + max(0, span.count - most), span.first + span.count, device=device)
        for span in spans
    ]
    return torch.cat(parts)
