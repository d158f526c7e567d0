"""A policy by its name, as the command line, the API and the settings give it."""

from __future__ import annotations

import pytest

from fingerprint.errors import ConfigError
from placement.fit import Placer
from placement.ilp_placer import ExactPlacer
from placement.lookahead import LookAhead
from placement.placer_registry import check_placement, make_placer
from placement.policies import POLICIES
from placement.types import Placement
from tests.golden_words import Golden
from tests.placement.clusters import blocks, cluster, gpu

NAMES = ", ".join(POLICIES)
TWO = cluster(gpu(0, 90, load=0.4), gpu(1, 90))


@pytest.mark.parametrize(
    ("name", "kind", "device"),
    [
        ("hybrid", Placer, "a0"),
        ("packing", Placer, "a0"),
        ("least-loaded", Placer, "a1"),
        ("ilp", ExactPlacer, "a1"),
        ("look-ahead", LookAhead, "a0"),
        ("look-ahead:0", LookAhead, "a0"),
    ],
)
def test_each_name_is_a_placer(name: str, kind: type, device: str) -> None:
    check_placement(name)
    placer = make_placer(name, TWO, threshold=0.5)
    assert isinstance(placer, kind)
    answer = placer.fit(blocks(2))
    assert isinstance(answer, Placement)
    assert answer.device_ids == (device,)


def test_the_threshold_is_hybrids() -> None:
    answer = make_placer("hybrid", TWO, threshold=0.3).fit(blocks(2))
    assert isinstance(answer, Placement)
    assert answer.device_ids == ("a1",)


@pytest.mark.parametrize(
    ("name", "sees_load"),
    [
        ("best", True),
        ("best", False),
        ("look-ahead:0.5", False),
        ("look-ahead:x", True),
    ],
)
def test_what_is_none(name: str, sees_load: bool, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        check_placement(name, sees_load=sees_load)


def test_what_a_name_means_is_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="no placement policy"):
        make_placer("best", TWO)
