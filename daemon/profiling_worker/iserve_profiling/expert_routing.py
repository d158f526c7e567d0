"""Routing of a mixture's tokens: by the router's weights, or uniformly as vLLM's simulator draws experts.

Random weights route by chance: a bias may send every token to the same experts, in a fingerprint not the same as
in the whole model. A profile has the experts of each token drawn uniformly
(``VLLM_MOE_ROUTING_SIMULATION_STRATEGY``), and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

UNIFORM, BY_WEIGHTS = "uniform", "weights"
_SIMULATOR = "RoutingSimulatorRouter"


def expert_routing(model: Any) -> str:
    """Return ``UNIFORM`` or ``BY_WEIGHTS`` of a vLLM ``model``; "" where it is no mixture, or is not known."""
    kinds = {type(router).__name__ == _SIMULATOR for router in routers(model)}
    return "" if not kinds else UNIFORM if kinds == {True} else BY_WEIGHTS


def routers(model: Any) -> Iterator[Any]:
    """Yield the router of each mixture layer."""
    seen = set()
    for module in getattr(model, "modules", lambda: ())():
        router = getattr(module, "router", None)
        if hasattr(router, "select_experts") and id(router) not in seen:
            seen.add(id(router))
            yield router
