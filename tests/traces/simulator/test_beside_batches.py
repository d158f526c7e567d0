"""The load model of workers that batch, compared with the simulator on the same requests.

The bounds are what was measured over all of ``tests.bench.beside_batches`` (docs/placement.md), rounded up.
"""

from __future__ import annotations

import pytest

from tests.bench.beside_batches import LOADS, ONE, PIPE, RARE, WORLDS, Compared, World, busy, slower

FEW, MANY = 800, 5000  # requests
CONV, CODE = WORLDS[::2], WORLDS[1::2]


def _check(world: World, found: Compared) -> None:
    """A group is slowed where any of its GPUs is in use; the model knows how much each is on average."""
    bound = 0.2 if len(world.newcomer.device_ids) > 1 else 0.12
    assert found.predicted == pytest.approx(found.simulated, rel=bound)


@pytest.mark.parametrize("load", [0.1, 0.6])
@pytest.mark.parametrize("trace", ["azure-conv", "azure-code"])
def test_a_lone_worker_is_as_busy_as_it_is_simulated(trace: str, load: float) -> None:
    for place, bound in ((ONE, 0.03), (PIPE, 0.1)):
        found = busy(trace, load, MANY, place)
        assert found.predicted == pytest.approx(found.simulated, abs=bound)


@pytest.mark.parametrize("world", [*CONV[::2], *CODE[1::2]], ids=lambda world: world.label)
def test_a_newcomer_is_slowed_as_it_is_simulated(world: World) -> None:
    _check(world, slower(world, 0.1, FEW))


def test_beside_one_that_is_asked_for_more_than_it_serves_half_is_left() -> None:
    found = slower(CONV[0], 1.2, FEW)
    _check(CONV[0], found)
    assert found.predicted == pytest.approx(2.0)


def test_beside_an_idle_worker_requests_take_as_long_as_alone() -> None:
    found = slower(CONV[0], RARE / 10, FEW)
    assert found.simulated == pytest.approx(found.predicted, abs=0.01)
    assert 1 <= found.predicted < 1.02


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.label)
@pytest.mark.parametrize("load", LOADS)
def test_everywhere(world: World, load: float) -> None:
    _check(world, slower(world, load, MANY))
