"""The number of replicas, and that the answer does not go back and forth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.actions import Drain, Scale
from placement.consolidation import consolidate
from placement.scaling import Scaling, replicas_for, scale
from placement.types import DeploymentState
from tests.placement.fleets import fleet, place, serving

RULE = Scaling(target=0.7, low=0.45, drain_s=60.0, hold_s=120.0, idle_s=300.0, max_replicas=8)


def some(number: int, work: float, **more: object) -> DeploymentState:
    """``number`` replicas, one GPU each, for which ``work`` replicas' worth arrives."""
    return serving("a", *(place(i) for i in range(number)), work=work, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(some(1, 0.7), 1, id="just busy enough"),
        pytest.param(some(1, 0.71), 2, id="one is too few"),
        pytest.param(some(1, 3.0), 5, id="as many as it takes, at once"),
        pytest.param(some(1, 99.0), 8, id="no more than may be"),
        pytest.param(some(2, 0.46), 2, id="one alone would be busier than low"),
        pytest.param(some(2, 0.44), 1, id="one is enough"),
        pytest.param(some(2, 0.44, steady_s=100.0), 2, id="not so soon after the last change"),
        pytest.param(some(2, 0.44, moving=True), 2, id="not while one moves"),
        pytest.param(some(1, 0.6, waiting=6), 2, id="6 waiting of 2 s: 0.2 more, over a minute"),
        pytest.param(some(1, 1.2, wanted=3), 3, id="two more are asked for already"),
        pytest.param(some(1, 0.0, idle_s=299.0), 1, id="not idle for long enough"),
        pytest.param(some(1, 0.0, idle_s=300.0), 0, id="nobody calls"),
        pytest.param(some(3, 0.0, idle_s=300.0), 0, id="all at once"),
        pytest.param(some(1, 0.0, idle_s=300.0, steady_s=119.0), 1, id="idle, but only just changed"),
        pytest.param(some(0, 0.0, waiting=1), 1, id="somebody calls what sleeps"),
        pytest.param(some(0, 5.0), 0, id="nobody waits"),
    ],
)
def test_by_hand(state: DeploymentState, expected: int) -> None:
    assert replicas_for(state, RULE) == expected
    orders = scale(fleet(8, state), RULE)
    assert orders == (() if expected == state.wanted else (Scale(name="a", replicas=expected),))


def test_without_scaling_to_nothing_one_stays() -> None:
    assert replicas_for(some(3, 0.0, idle_s=1e9), replace(RULE, idle_s=None)) == 1


def test_a_short_idle_time_is_not_held_up_by_a_longer_hold() -> None:
    rule = replace(RULE, idle_s=30.0)
    assert replicas_for(some(1, 0.0, idle_s=30.0, steady_s=30.0), rule) == 0
    assert replicas_for(some(1, 0.0, idle_s=30.0, steady_s=29.0), rule) == 1


def test_a_least_number_is_woken_and_kept() -> None:
    rule = replace(RULE, min_replicas=2)
    assert replicas_for(some(0, 0.0, waiting=1), rule) == 2
    assert replicas_for(some(2, 0.01), rule) == 2
    assert replicas_for(some(1, 0.01), rule) == 2
    assert replicas_for(some(2, 0.0, idle_s=300.0), rule) == 0


rules = st.builds(
    lambda low, gap, least, more: Scaling(
        target=min(1.0, low + gap), low=low, min_replicas=least, max_replicas=least + more, idle_s=None
    ),
    st.floats(0.1, 0.8), st.floats(0.05, 0.5), st.integers(1, 3), st.integers(0, 5),
)  # fmt: skip


@given(rule=rules, work=st.floats(0, 9), number=st.integers(1, 8))
def test_a_decision_once_carried_out_is_followed_by_none(rule: Scaling, work: float, number: int) -> None:
    then = replicas_for(some(number, work), rule)
    assert 1 <= then <= max(number, rule.max_replicas)
    assert replicas_for(some(then, work), rule) == then


@settings(max_examples=300)
@given(
    rule=rules, base=st.floats(0.01, 6), wobble=st.lists(st.floats(0, 1), max_size=40), number=st.integers(1, 8)
)
def test_a_load_that_stays_within_the_gap_never_makes_it_flap(
    rule: Scaling, base: float, wobble: list[float], number: int
) -> None:
    """However a load goes up and down between ``base`` and ``base * target / low``, replicas go one way only."""
    counts = [number]
    ratio = rule.target / rule.low
    for share in wobble:
        work = base * ratio ** (share * 0.999)
        counts.append(replicas_for(some(counts[-1], work), rule))
    turns = {b > a for a, b in pairwise(counts) if a != b}
    assert len(turns) <= 1


@given(st.integers(2, 6), st.floats(0, 3))
def test_fewer_only_where_the_rest_stay_at_most_as_busy_as_low(number: int, work: float) -> None:
    then = replicas_for(some(number, work), RULE)
    if then < number:
        assert work / then <= RULE.low + 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 0.7},
        {"low": 0.0},
        {"target": 1.1},
        {"drain_s": 0.0},
        {"idle_s": 0.0},
        {"min_replicas": 0},
        {"min_replicas": 3, "max_replicas": 2},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Scaling(**wrong)  # type: ignore[arg-type]


def test_the_replica_goes_whose_gpu_is_freed() -> None:
    """The first shares its GPU with another deployment; of the rest the one with fewer requests goes."""
    many = serving("a", place(0), place(1), place(2), work=0.5, outstanding=(0, 2, 1))
    snapshot = fleet(3, many, serving("b", place(0), busy=0.6))
    assert consolidate(snapshot, RULE) == (Drain(name="a", replica_id="a#2", evict=True),)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(some(2, 0.5), id="both are needed"),
        pytest.param(some(2, 0.2, outstanding=(4, 3)), id="its requests find no slot"),
        pytest.param(some(2, 0.2, waiting=1), id="somebody waits"),
        pytest.param(some(2, 0.2, wanted=3), id="another is on its way"),
        pytest.param(some(2, 0.2, moving=True), id="one moves"),
        pytest.param(some(1, 0.0), id="it is the last"),
        pytest.param(some(2, 0.0, idle_s=400.0), id="it is put to sleep instead"),
    ],
)
def test_nothing_is_consolidated_where(state: DeploymentState) -> None:
    assert consolidate(fleet(3, state), RULE) == ()


@settings(max_examples=200)
@given(loads=st.lists(st.integers(0, 4), min_size=1, max_size=5), work=st.floats(0, 4), waiting=st.integers(0, 2))
def test_what_drains_fits_into_the_rest_and_is_followed_by_no_new_replica(
    loads: list[int], work: float, waiting: int
) -> None:
    state = some(len(loads), work, outstanding=tuple(loads), waiting=waiting)
    for order in consolidate(fleet(5, state), RULE):
        gone = next(r for r in state.replicas if r.replica_id == order.replica_id)
        rest = [r for r in state.replicas if r is not gone]
        assert sum(r.max_batch - r.outstanding for r in rest) >= gone.outstanding
        assert replicas_for(some(len(rest), work), RULE) <= len(rest)
