"""Figure 16: models that fill a cluster one after the other."""

from __future__ import annotations

from collections import Counter

import pytest

from notebooks.figures.choices import RULES
from notebooks.figures.fleet import TWENTY_ONE, Wish, deploy_all, figure_16, order
from notebooks.figures.record import read
from notebooks.figures.setting import GPU
from planner.intent import IntentKind

WISHES = {"min-latency": Wish(IntentKind.MIN_LATENCY), "min-memory": Wish(IntentKind.MIN_MEMORY)} | {
    name: Wish(rule) for name, rule in RULES.items()
}


@pytest.mark.parametrize("wish", WISHES)
def test_no_gpu_is_filled_beyond_its_memory_and_no_layer_is_lost(wish: str) -> None:
    held: Counter[str] = Counter()
    for deployed in deploy_all(TWENTY_ONE[:12], WISHES[wish]):
        assert sum(deployed.placement.layers_per_stage) == deployed.estimate.memory.num_layers
        for stage in deployed.placement.stages:
            for device in stage.device_ids:
                held[device] += stage.bytes_per_gpu
    assert max(held.values()) <= GPU.memory_bytes


def test_what_fits_no_more_is_passed_over_and_the_next_is_tried() -> None:
    deployed = [d.model for d in deploy_all(("Llama-2-70b-hf",) * 4 + ("gpt-j-6b",), Wish(RULES["max TP"]))]
    assert deployed[-1] == "gpt-j-6b"
    assert 1 <= deployed.count("Llama-2-70b-hf") < 4


def test_an_order_is_the_same_models_again() -> None:
    assert order(0) == TWENTY_ONE
    assert order(3) == order(3)
    assert order(3) != order(4)
    assert Counter(order(3)) == Counter(TWENTY_ONE)


@pytest.mark.slow
def test_the_first_of_the_committed_orders_is_what_comes_out() -> None:
    live, kept = figure_16(1), read("16").figure
    assert live.tables[1:] == kept.tables[1:], "run `make evaluation`"
