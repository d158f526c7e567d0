"""Choices of experts that a router tells are counted by layer, on tensors of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from daemon.engines.external import PROFILING_PATH


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(PROFILING_PATH)
    from iserve_profiling import expert_routing

    yield expert_routing
    sys.modules.pop("iserve_profiling.expert_routing", None)


class Router:
    """A router like vLLM's: it tells the experts of each token, tokens in rows, to what is set."""

    def __init__(self, experts: int) -> None:
        self.global_num_experts = experts
        self.told: Callable[[torch.Tensor], None] | None = None

    def set_capture_fn(self, told: Callable[[torch.Tensor], None] | None) -> None:
        self.told = told

    def select_experts(self, chosen: list[list[int]]) -> None:
        if self.told is not None:
            self.told(torch.tensor(chosen, dtype=torch.int32))


def model_of(*routers: object) -> SimpleNamespace:
    layers = [SimpleNamespace(router=router) for router in routers]
    return SimpleNamespace(modules=lambda: iter(layers))


def test_the_busiest_is_a_mean_over_layers_and_steps_add_up(routing: ModuleType) -> None:
    even, skewed = Router(4), Router(4)
    model = model_of(even, skewed)
    even.select_experts([[0, 1]])  # before it began
    routing.start_counting(model)
    even.select_experts([[0, 1], [2, 3]])
    even.select_experts([[0, 1], [2, 3]])
    skewed.select_experts([[0, 1], [0, 2]])
    skewed.select_experts([[0, 1], [0, 3]])
    counted = {"choices": 8, "experts": 4, "layers": 2, "busiest": (1.0 + 2.0) / 2, "busiest_layer": 2.0}
    assert routing.end_counting(model) == counted
    even.select_experts([[0, 1]])  # after its end
    routing.start_counting(model)
    assert routing.end_counting(model) is None  # nothing ran


def test_routers_that_tell_nothing_are_not_counted(routing: ModuleType) -> None:
    silent = SimpleNamespace(select_experts=lambda: None)  # of a release before there was a callback
    model = model_of(silent)
    routing.start_counting(model)
    assert routing.end_counting(model) is None
    assert routing.end_counting(model_of()) is None
