"""Floating-point tensors as safetensors stores them: F32, F16 and BF16 bytes to float32 values and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT_DTYPES", "decode_floats", "encode_floats"]

FLOAT_DTYPES = ("F32", "F16", "BF16")
_Floats = npt.NDArray[np.float32]


def decode_floats(raw: bytes, dtype: str) -> _Floats:
    """Return the values of ``raw``, exactly; ``dtype`` is one of ``FLOAT_DTYPES``."""
    if dtype == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    assert dtype == "BF16", dtype
    return (np.frombuffer(raw, "<u2").astype("<u4") << np.uint32(16)).view("<f4")


def encode_floats(values: _Floats, dtype: str) -> bytes:
    """Return ``values`` in ``dtype``, rounded to nearest even; too large ones become infinite. NaN is not kept."""
    if dtype == "F32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    assert dtype == "BF16", dtype
    bits = np.ascontiguousarray(values, "<f4").reshape(-1).view("<u4")
    rounded = bits >> np.uint32(16)  # of which the upper half is kept, rounded to nearest even
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    return rounded.view("<u2")[1::2].tobytes()
