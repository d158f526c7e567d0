"""Time of a load of a variant by its bytes and tensors, as an H200 recorded it."""

from __future__ import annotations

__all__ = ["RECORDED_TENSORS", "recorded_load_s"]

# By least squares of relative errors over twelve loads from the page cache (ranks 8, 16, 64; vLLM 0.33,
# Llama-3.1-8B, ``tests.bench.lora_steps``). Means of a rank are met within 10%, single loads within 24%.
_LOAD_S, _LOAD_BYTES_PER_S = 0.0533, 1.274e9
RECORDED_TENSORS = 2 * 7 * 32  # of each of those adapters: two for every matrix of 32 layers


def recorded_load_s(num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
    """Return the seconds of a load of ``num_bytes`` from the page cache.

    From adapters of up to 88 MB; a delta of 2.3 GB took 2.7 s where this says 1.8 (docs/decisions/0053). The part
    that is not for bytes is the tensors', which loads of 14 and 28 tensors say (docs/decisions/0050).

    Args:
        num_tensors: of an adapter, two for each matrix that it updates. Deltas count as many as were recorded.
    """
    return _LOAD_S * num_tensors / RECORDED_TENSORS + num_bytes / _LOAD_BYTES_PER_S
