"""Cost of a layout, and placing one by one."""

from __future__ import annotations

import pytest

from placement.fit import fit
from placement.multi_model import LOOKED_AT, Choice, Wanted, beside, by_key, cost_of, largest_first, one_by_one
from placement.policies import LeastLoaded
from placement.types import Placement, StagePlacement
from tests.placement.clusters import blocks, cluster, gpu

# GPUs of one node in link pairs (0, 1), (2, 3), ...; loads of 0 and 1/2: stages take once and twice their time.
FOUR = cluster(gpu(0, 90), gpu(1, 90, load=0.5), gpu(2, 90), gpu(3, 90))


def layout(*stages: tuple[tuple[str, ...], int]) -> Placement:
    first, placed = 0, []
    for devices, layers in stages:
        placed.append(
            StagePlacement(
                node_id="a", device_ids=devices, first_layer=first, num_layers=layers, bytes_per_gpu=10 * layers
            )
        )
        first += layers
    return Placement(tuple(placed))


@pytest.mark.parametrize(
    ("tp", "pp", "stages", "factor"),
    [
        pytest.param(1, 1, [(("a0",), 4)], 1.0, id="idle"),
        pytest.param(1, 1, [(("a1",), 4)], 2.0, id="loaded"),
        pytest.param(1, 2, [(("a0",), 2), (("a1",), 2)], 1.5, id="half-of-it-loaded"),
        pytest.param(1, 2, [(("a0",), 3), (("a1",), 1)], 1.25 + 0.5, id="three-of-four-layers-on-one-stage"),
        pytest.param(2, 1, [(("a0", "a1"), 4)], 2.0, id="as-slow-as-the-slower"),
        pytest.param(2, 1, [(("a2", "a3"), 4)], 1.0, id="a-pair"),
        pytest.param(2, 1, [(("a0", "a2"), 4)], 2.0, id="across-pairs"),
        pytest.param(4, 1, [(("a0", "a1", "a2", "a3"), 4)], 2.0, id="no-pair-holds-four"),
    ],
)
def test_cost(tp: int, pp: int, stages: list[tuple[tuple[str, ...], int]], factor: float) -> None:
    gpus = by_key(FOUR)
    timed = Choice(label="", demand=blocks(4, tp=tp, pp=pp), cost=3.0)
    untimed = Choice(label="", demand=blocks(4, tp=tp, pp=pp), cost=3.0, timed=False)
    assert cost_of(timed, layout(*stages), gpus, link_group_size=2) == pytest.approx(3 * factor)
    assert cost_of(untimed, layout(*stages), gpus, link_group_size=2) == pytest.approx(3 + 0.003 * (factor - 1))


def choose(*costs_of_tp: tuple[int, float]) -> Wanted:
    return Wanted(
        model="m",
        choices=tuple(Choice(label=f"tp={tp}", demand=blocks(4, tp=tp), cost=c) for tp, c in costs_of_tp),
    )


def test_the_configuration_that_costs_least_where_it_would_stand() -> None:
    """tp=4 takes the loaded GPU in and so twice its time; tp=2 on the idle pair takes less."""
    wanted = choose((1, 3.0), (2, 1.5), (4, 1.0))
    for weigh_load, label, cost in ((False, "tp=4", 2.0), (True, "tp=2", 1.5)):
        (placed,), _ = one_by_one([wanted], FOUR, LeastLoaded(), link_group_size=2, weigh_load=weigh_load)
        assert (placed.choice.label, placed.cost) == (label, pytest.approx(cost))


def test_on_a_large_cluster_the_first_that_fits_is_taken() -> None:
    """More looks would make its decisions slow."""
    large = cluster(*(gpu(i, 90, load=0.5 if i % 8 == 0 else 0.0, node=f"n{i // 8}") for i in range(LOOKED_AT)))
    (placed,), _ = one_by_one([choose((2, 1.5), (8, 1.0))], large, LeastLoaded(), weigh_load=True)
    assert placed.choice.label == "tp=8"


def test_largest_first_is_by_the_smallest_choice() -> None:
    def of(model: str, *layers: int) -> Wanted:
        return Wanted(model=model, choices=tuple(Choice(label=str(n), demand=blocks(n), cost=1.0) for n in layers))

    wanted = [of("small", 2, 90), of("b", 5, 6), of("a", 5, 7), of("large", 8)]
    assert [one.model for one in largest_first(wanted)] == ["large", "a", "b", "small"]


def test_what_is_free_beside_others() -> None:
    answer = fit(blocks(4, tp=2, pp=2), FOUR, LeastLoaded())
    assert isinstance(answer, Placement)
    assert [one.free_bytes for one in beside(FOUR, [answer, answer]).gpus] == [50, 50, 50, 50]
