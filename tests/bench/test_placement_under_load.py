"""The bench of placement under load, small: same input, same figures; no request is left out."""

from __future__ import annotations

import os

import pytest

from placement.policies import LeastLoaded, Packing
from placement.rebalancer import Elastic
from placement.scaling import Scaling
from tests.bench.placement_under_load import FixedDeployer, elastic, figure_10, moving, row, run

pytestmark = pytest.mark.skipif("ISERVE_REFERENCE_DATA" not in os.environ, reason="needs ISERVE_REFERENCE_DATA")


def test_the_same_seed_gives_the_same_figures() -> None:
    world = figure_10(7, duration_s=900.0)
    assert world == figure_10(7, duration_s=900.0)
    for policy, cluster_policy in ((Packing(), None), (0.25, moving())):
        first, second = (
            row("", "", world, run(world, FixedDeployer(world, policy), cluster_policy)) for _ in range(2)
        )
        assert first == second
        assert first.unserved == 0


def test_packing_uses_fewer_gpus_and_least_loaded_is_faster() -> None:
    """The two ends of the paper's figure 10, which no seed may turn around as a whole."""
    world = figure_10(7)
    packed, spread = (
        row("", "", world, run(world, FixedDeployer(world, policy))) for policy in (Packing(), LeastLoaded())
    )
    assert packed.gpu_hours < spread.gpu_hours
    assert packed.gpus_used < spread.gpus_used == 8
    assert packed.slowdown_p95 > spread.slowdown_p95


def test_scaling_serves_what_one_replica_cannot() -> None:
    world = elastic(7, 16, duration_s=900.0)
    fixed = row("", "", world, run(world, FixedDeployer(world, LeastLoaded())))
    cluster_policy = Elastic(scaling=Scaling())
    scaled = row("", "", world, run(world, FixedDeployer(world, LeastLoaded()), cluster_policy))
    assert scaled.changes > 0 == fixed.changes
    assert scaled.unserved == fixed.unserved == 0
    assert scaled.slo_violation_fraction < fixed.slo_violation_fraction
