"""M1 of the paper: M2's equations on the whole model itself, loaded at (1,1), (2,1) and (1,2).

``M(t, p) = W + t * A + t * (p - 1) * A_pp`` from three loads of the whole model per weight format, with nothing
extrapolated in layers; its price is the whole model's memory. One depth does not tell a layer from the two ends,
so an uneven split of the layers rests on their shares by the tensors' sizes.
"""

from __future__ import annotations

from dataclasses import replace

from fingerprint.estimators.m2 import M2
from fingerprint.measurements import Profile

__all__ = ["M1"]


class M1(M2):
    """Memory from the whole model's own loads; fingerprints in the profile are not looked at.

    Args:
        profile, max_batched_tokens: as M2's. Stages that hold unequal numbers of layers are not looked at either.
    """

    name = "M1"

    def __init__(self, profile: Profile, *, max_batched_tokens: int = 8192) -> None:
        num_layers = profile.spec.num_layers
        whole = tuple(p for p in profile.memory if p.num_layers == num_layers and num_layers % p.pp == 0)
        super().__init__(replace(profile, memory=whole), max_batched_tokens=max_batched_tokens)
