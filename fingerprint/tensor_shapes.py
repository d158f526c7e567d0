"""Tensors of a checkpoint, and the few kinds of module that layers are made of. It counts elements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import prod

__all__ = ["Role", "TensorShape", "elements", "linear", "norm"]


class Role(StrEnum):
    """Purpose of a tensor: decides how it is counted and how a dummy of it is filled."""

    LINEAR = "linear"  # a matrix that quantization and pruning change
    EXPERT = "expert"  # likewise, of one expert
    ROUTER = "router"
    BIAS = "bias"
    NORM = "norm"  # a norm's weight
    EMBEDDING = "embedding"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Name, shape and role of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    role: Role


def elements(tensors: Iterable[TensorShape], *roles: Role) -> int:
    """Return the number of elements of the tensors that have one of ``roles`` (of all, when none is given)."""
    return sum(prod(tensor.shape) for tensor in tensors if not roles or tensor.role in roles)


def linear(name: str, out_width: int, in_width: int, *, bias: bool, role: Role = Role.LINEAR) -> list[TensorShape]:
    """Return a matrix of (out, in), as torch stores it, and its bias."""
    weight = TensorShape(f"{name}.weight", (out_width, in_width), role)
    return [weight, TensorShape(f"{name}.bias", (out_width,), Role.BIAS)] if bias else [weight]


def norm(name: str, width: int, *, bias: bool) -> list[TensorShape]:
    """Return a norm's weight and its bias."""
    weight = TensorShape(f"{name}.weight", (width,), Role.NORM)
    return [weight, TensorShape(f"{name}.bias", (width,), Role.BIAS)] if bias else [weight]
