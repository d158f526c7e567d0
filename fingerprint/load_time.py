"""Time of a load of a variant by its bytes, as an H200 recorded it."""

from __future__ import annotations

__all__ = ["recorded_load_s"]

# By least squares of relative errors over twelve loads from the page cache (ranks 8, 16, 64; vLLM 0.33,
# Llama-3.1-8B, ``tests.bench.lora_steps``). Means of a rank are met within 10%, single loads within 24%.
_LOAD_S, _LOAD_BYTES_PER_S = 0.0533, 1.274e9


def recorded_load_s(num_bytes: int) -> float:
    """Return the seconds of a load of ``num_bytes`` from the page cache.

    From adapters of up to 88 MB; a delta of 2.3 GB took 2.7 s where this says 1.8 (docs/decisions/0053).
    """
    return _LOAD_S + num_bytes / _LOAD_BYTES_PER_S
