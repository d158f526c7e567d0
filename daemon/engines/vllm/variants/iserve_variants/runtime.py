"""State that all modules of one model share, and the operators that find a module by its name.

An operator of its own is opaque to vLLM's compiler: what it launches is decided when it runs, or when a graph is
captured, not when the model is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from iserve_variants.background import SlotPlaces
from iserve_variants.products import Products, ReferenceProducts
from iserve_variants.settings import Settings
from iserve_variants.step_routes import StepRoutes

__all__ = [
    "EMBEDDINGS",
    "LINEARS",
    "ChangesEmbedding",
    "Multiplies",
    "Runtime",
    "building",
    "own_name",
    "runtime_being_built",
]


class Multiplies(Protocol):
    """Linear with slots."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return base's product and the deltas' [rows, outputs]."""


class ChangesEmbedding(Protocol):
    """Embedding with slots."""

    def change(self, y: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the deltas' changes to the embeddings ``y`` of ``tokens``."""


LINEARS: WeakValueDictionary[str, Multiplies] = WeakValueDictionary()
EMBEDDINGS: WeakValueDictionary[str, ChangesEmbedding] = WeakValueDictionary()


def own_name(registry: WeakValueDictionary[str, Any], prefix: str, module: object) -> str:
    """Register ``module``; return its name, which is the same at each start unless another model has it too."""
    name = f"{prefix}.iserve_delta"
    while name in registry:
        name += "_"
    registry[name] = module
    return name


class Runtime:
    """Settings, routes and kernels of one model, shared by its modules."""

    def __init__(self, settings: Settings, routes: StepRoutes, places: SlotPlaces) -> None:
        self.settings, self.routes, self.places = settings, routes, places
        self.products: Products = ReferenceProducts()  # until the modules, whose sizes buffers have, are there
        self.merges = settings.merged_from_rows is not None
        """Whether matrices can be merged; a quantized base's cannot."""


_building: list[Runtime] = []


@contextmanager
def building(runtime: Runtime) -> Iterator[None]:
    """Give ``runtime`` to the modules that are made meanwhile."""
    _building.append(runtime)
    try:
        yield
    finally:
        _building.remove(runtime)


def runtime_being_built() -> Runtime | None:
    """Return the runtime of the model whose modules are being made; None: it has no slots of deltas."""
    return _building[-1] if _building else None
