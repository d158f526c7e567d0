"""Role of a hidden layer's tensor, by its name and shape."""

from __future__ import annotations

import re

from fingerprint.tensor_shapes import Role

__all__ = ["role_of"]

_ROUTER = re.compile(r"(^|\.)(gate|router\w*|wg|gate_weight)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_NUMBERED_EXPERT = re.compile(r"(^|\.)experts\.[0-9]+\.")


def role_of(name: str, shape: tuple[int, ...], num_experts: int) -> Role:
    """The role of the tensor ``name`` (the rest behind the layer's index) of ``shape``."""
    if name.endswith("bias"):
        return Role.BIAS
    if _is_expert(name, shape, num_experts):
        return Role.EXPERT
    if len(shape) == 2 and num_experts and shape[0] == num_experts and _ROUTER.search(name) is not None:
        return Role.ROUTER
    if len(shape) == 2 and "A_log" not in name:
        return Role.LINEAR
    return Role.NORM if name.endswith("weight") else Role.BIAS


def _is_expert(name: str, shape: tuple[int, ...], num_experts: int) -> bool:
    """A matrix of one expert, or of all experts in one."""
    if "shared_expert" in name or len(shape) < 2:
        return False
    if len(shape) == 3:
        return shape[0] == num_experts and shape[1] > 1
    if _NUMBERED_EXPERT.search(name) is not None:
        return True
    return _EXPERTS.search(name) is not None and num_experts > 0 and shape[0] % num_experts == 0  # DBRX's rows
