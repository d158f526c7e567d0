"""Workers that batch and share GPUs: against one replica after the other, and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.batch_load import Batching
from placement.batch_sharing import kept, settle
from tests.placement import plain_batches as plain

ALONE, BESIDE = ((1.0, (("n", "g0"),)),), ((0.5, (("n", "g0"),)), (0.5, (("n", "g1"),)))
KEYS = [("n", f"g{i}") for i in range(4)]
AT_REST = 2e-3  # of a batch: where it is left, from where it would be at rest


def batching(rate: float, stages=ALONE) -> Batching:
    return Batching(rate, 2.0, 6.0, 8, 1, stages)


@st.composite
def tenants(draw: st.DrawFn) -> Batching:
    """On one to four GPUs, as TP groups, pipelines of unlike stages or both."""
    alone_s, slots, pp = draw(st.floats(0.1, 4)), draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 2]))
    keys = draw(st.permutations(KEYS))[: pp * draw(st.sampled_from([1, 2]))]
    share = draw(st.sampled_from([0.5, 0.3])) if pp == 2 else 1.0
    return Batching(
        requests_per_s=draw(st.one_of(st.just(0.0), st.floats(1e-6, 3))),
        alone_s=alone_s,
        full_s=alone_s * (1 + draw(st.floats(0, 1)) * (slots - 1)),
        slots=slots,
        batches=draw(st.sampled_from([1, pp])),
        stages=tuple(zip((share, 1 - share), (tuple(keys[::pp]), tuple(keys[1::pp])), strict=True))[:pp],
    )


WORLDS = st.lists(tenants(), min_size=1, max_size=6)


@given(several=WORLDS)
def test_all_at_once_come_to_rest_where_one_after_the_other_do(several: list[Batching]) -> None:
    assert settle(several) == pytest.approx(plain.settle(several), abs=AT_REST)


@given(several=WORLDS, told=st.lists(tenants(), max_size=2))
def test_what_they_keep_is_over_who_runs(several: list[Batching], told: list[Batching]) -> None:
    found, expected = kept(several, told), plain.kept(several, told)
    assert found == pytest.approx(expected, abs=AT_REST)
    if not any(tenant.requests_per_s for tenant in several):
        assert set(found.values()) == {0.0}


@given(several=WORLDS)
def test_it_comes_to_rest_where_nobody_moves_any_more(several: list[Batching]) -> None:
    """The map leads nowhere else, but for the 0.01% at which it is left."""
    batches = settle(several)
    for at, tenant in enumerate(several):
        slowed = plain.slowed(several, batches, at)
        assert tenant.under_way(slowed / 1.00011) - 1e-9 <= batches[at] <= tenant.under_way(slowed) + 1e-9


@given(several=WORLDS, factor=st.floats(1, 3))
def test_more_of_one_makes_nobody_less_busy(several: list[Batching], factor: float) -> None:
    busier = several[0]._replace(requests_per_s=several[0].requests_per_s * factor)
    for before, after in zip(settle(several), settle([busier, *several[1:]]), strict=True):
        assert before <= after + AT_REST


@given(several=WORLDS)
def test_who_is_listed_first_is_no_reason(several: list[Batching]) -> None:
    assert settle(several) == pytest.approx(settle(several[::-1])[::-1], abs=1e-9)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_who_is_asked_for_too_much_always_runs(count: int) -> None:
    crowd = [batching(100.0)] * count
    assert settle(crowd) == [1.0] * count
    assert kept(crowd, []) == {("n", "g0"): pytest.approx(count / (count + 1))}


@pytest.mark.parametrize("stages", [ALONE, BESIDE])
def test_a_lone_one_shares_with_who_joins(stages) -> None:
    """On all its GPUs, one after the other or not."""
    assert settle([batching(0.5, stages)]) == [pytest.approx(batching(0.5).under_way(2.0))]


def test_nobody_keeps_nothing() -> None:
    assert (settle([]), kept([], [batching(1.0)])) == ([], {})
