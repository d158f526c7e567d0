"""Routing of a mixture's tokens: by the router's weights, or uniformly as vLLM's simulator draws experts.

Random weights route by chance: a bias may send every token to the same experts, in a fingerprint not the same as
in the whole model. A profile has the experts of each token drawn uniformly
(``VLLM_MOE_ROUTING_SIMULATION_STRATEGY``), says so, and counts in one call whether they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

UNIFORM, BY_WEIGHTS = "uniform", "weights"
_SIMULATOR, _LAW = "RoutingSimulatorRouter", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
_COUNTS: dict[int, Any] = {}  # int64 tensor of each layer's experts, of the routers that are counted


def expert_routing(model: Any) -> str:
    """Return ``UNIFORM``, ``BY_WEIGHTS`` or vLLM's name of another law; "": no mixture, or not known."""
    kinds = {type(router).__name__ == _SIMULATOR for router in routers(model)}
    if kinds != {True}:
        return BY_WEIGHTS if kinds else ""
    law = os.environ.get(_LAW, "")
    return UNIFORM if law == "uniform_random" else law


def routers(model: Any) -> Iterator[Any]:
    """Yield the router of each mixture layer."""
    seen = set()
    for module in getattr(model, "modules", lambda: ())():
        router = getattr(module, "router", None)
        if hasattr(router, "select_experts") and id(router) not in seen:
            seen.add(id(router))
            yield router


def start_counting(model: Any) -> None:
    """Count from now on how often each expert is chosen, where the routers of this release tell it.

    Steps that are replays of CUDA graphs are not counted, as no code of a router runs in them.
    """
    _COUNTS.clear()
    for layer, router in enumerate(routers(model)):
        if hasattr(router, "set_capture_fn"):
            router.set_capture_fn(partial(_count, layer, router.global_num_experts))


def end_counting(model: Any) -> dict[str, float] | None:
    """Stop, and return the client's ``ExpertCount``; None where nothing was counted."""
    for router in routers(model):
        if hasattr(router, "set_capture_fn"):
            router.set_capture_fn(None)
    layers = [found.tolist() for found in _COUNTS.values()]
    _COUNTS.clear()
    if not layers or not all(map(sum, layers)):
        return None
    busiest = [max(layer) * len(layer) / sum(layer) for layer in layers]
    return {
        "choices": min(map(sum, layers)),
        "experts": len(layers[0]),
        "layers": len(layers),
        "busiest": sum(busiest) / len(layers),
        "busiest_layer": max(busiest),
    }


def _count(layer: int, experts: int, chosen: Any) -> None:
    found = _COUNTS.get(layer)
    if found is None:
        found = _COUNTS[layer] = chosen.new_zeros(experts).long()
    chosen = chosen.flatten().long()
    found.scatter_add_(0, chosen, chosen.new_ones(chosen.shape))  # no synchronisation, as bincount would be
