"""Placement of a delta's tensors in a model's modules; what has no place is refused by its name beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from iserve_variants.folder import PackedMatrix, ServedDelta
from iserve_variants.formats import FORMATS

__all__ = ["Kind", "Place", "Places", "place_tensors"]

Pair = tuple[torch.Tensor, torch.Tensor]
_WAY_OUT = "export the variant (`iserve variant export`) and deploy its checkpoint"


class Kind(Enum):
    """Kind of a module that takes a change."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    OUTPUT = "output layer"
    NORM = "norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Slots for one tensor of a fine-tune."""

    kind: Kind
    module: str
    """Name under which vLLM gives a module its weights: one for each of q, k and v."""
    shape: tuple[int, ...]
    """Of the whole tensor, over all ranks."""
    format: str | None = None
    """Of the slots, which hold narrower ones too; None: the tensor itself, as of a norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """All places of one rank's part of a model, by the name of the module that a tensor belongs to."""

    taken: Mapping[str, Place]
    refused: Mapping[str, str]
    """Reason by module, for those that take no change."""
    elsewhere: tuple[str, ...] = ()
    """Names of modules that another stage of the pipeline has, with all below them, and of an output layer whose
    weights are the embedding's: changes of what the checkpoint stores for it have no effect.
    """

    def has_elsewhere(self, module: str) -> bool:
        """Return whether ``module`` is one that gets nothing on this stage."""
        return any(module == name or module.startswith(f"{name}.") for name in self.elsewhere)


def place_tensors(
    delta: ServedDelta,
    places: Places,
    rename: Callable[[str], str | None] = lambda name: name,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Pair]:
    """Return what each module gets: codes and scales of a matrix, the tensor twice for a norm.

    Args:
        rename: from a checkpoint's name to the model's.
        pause: called between matrices.

    Raises:
        ValueError: a tensor that this deployment cannot serve, with its name, the reason and what to do.
    """
    found: dict[str, Pair] = {}
    for name, matrix in delta.matrices.items():
        pause()
        place = _place(name, places, rename)
        if place is None:
            continue
        if place.format is None:
            raise _refused(name, f"it is a matrix, and slots of a {place.kind.value} have none")
        if not FORMATS[place.format].holds(matrix.format):
            raise _refused(name, _other_format(matrix, place.kind, place.format))
        _check_shape(name, matrix.shape, place)
        found[place.module] = (matrix.codes, matrix.scales)
    for name, tensor in delta.exact.items():
        place = _place(name, places, rename)
        if place is None:
            continue
        if place.kind is not Kind.NORM:
            raise _refused(name, f"slots of a {place.kind.value} hold compressed changes alone")
        _check_shape(name, tuple(tensor.shape), place)
        found[place.module] = (tensor, tensor)
    return found


def _other_format(matrix: PackedMatrix, kind: Kind, held: str) -> str:
    """Return why slots of format ``held`` have no room for ``matrix``, and what to do."""
    instead = ""
    if kind in (Kind.LINEAR, Kind.OUTPUT):  # embeddings have 4 bits everywhere
        instead = f"take slots of that format or a finer one (--delta-format {matrix.format_name}), or "
    return (
        f"its format is {matrix.format_name}, and slots of a {kind.value} hold {held} here; "
        f"{instead}compress it in {held} (without --max-error)"
    )


def _place(name: str, places: Places, rename: Callable[[str], str | None]) -> Place | None:
    """Return the place of a tensor; None: this stage does nothing with it."""
    module, _, parameter = (rename(name) or name).rpartition(".")
    if places.has_elsewhere(module):
        return None
    if parameter == "bias":
        raise _refused(name, "vLLM adds one bias for all rows of a step")
    if parameter != "weight":
        raise _refused(name, f"no slots hold a {parameter}")
    if module in places.taken:
        return places.taken[module]
    raise _refused(name, places.refused.get(module, "the model has no module of that name that takes changes"))


def _check_shape(name: str, shape: tuple[int, ...], place: Place) -> None:
    if shape != place.shape:
        raise _refused(name, f"its shape is {list(shape)}, and the base's is {list(place.shape)}")


def _refused(name: str, why: str) -> ValueError:
    return ValueError(f"tensor {name} of this delta cannot be served on vLLM: {why}; else {_WAY_OUT}")
