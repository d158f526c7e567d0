"""What runs on the GPUs already, to one who would join."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.load_model import LoadedCluster, Tenant, lost_by_others, shares, slowdown, stretch
from placement.others import Others
from placement.types import ClusterSnapshot
from tests.placement import fleets as small
from tests.placement.fleets import fleet, fleets, place

LOADS = st.floats(0, 1)
PLACES = st.sampled_from([place(0), place(0, 1), place(0, 1, 2, 3), place(0, 1, pp=2), place(2, 1, 0, 3, pp=2)])


serving = partial(small.serving, max_batch=1)


def one_at_a_time(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    return replace(
        snapshot,
        deployments=tuple(
            replace(d, replicas=tuple(replace(r, max_batch=1) for r in d.replicas)) for d in snapshot.deployments
        ),
    )


def seen(snapshot: ClusterSnapshot, *loads: float) -> ClusterSnapshot:
    """Busy for these fractions of the last 120 s."""
    gpus = tuple(replace(g, load_fraction=load) for g, load in zip(snapshot.gpus, loads, strict=True))
    return replace(snapshot, gpus=gpus)


@given(where=PLACES)
def test_without_others_gpus_are_idle(where) -> None:
    alone = Others(fleet(4))
    assert (alone.slowdown(where), alone.lost(where)) == (1.0, 0.0)
    assert alone.loads == {}


@given(where=PLACES)
def test_others_whom_nobody_calls_are_nobody(where) -> None:
    uncalled = Others(fleet(4, serving("a", place(0, 1), busy=0.0), serving("b", place(0, 1, 2, 3), busy=0.0)))
    assert (uncalled.slowdown(where), uncalled.lost(where), uncalled.loads) == (1.0, 0.0, {})


@given(where=PLACES, low=st.floats(0, 2), more=st.floats(0, 2), load=LOADS)
def test_more_rate_of_others_is_never_faster(where, low: float, more: float, load: float) -> None:
    def beside(busy: float) -> Others:
        return Others(seen(fleet(4, serving("a", place(0, 1, 2), busy=busy)), load, load, load, load))

    less, busier = beside(low), beside(low + more)
    assert 1.0 <= less.slowdown(where) <= busier.slowdown(where)
    assert 0.0 <= less.lost(where) <= busier.lost(where) * (1 + 1e-9)


@given(snapshot=fleets(), where=PLACES)
def test_told_rates_are_the_load_model(snapshot: ClusterSnapshot, where) -> None:
    """Where GPUs were seen less busy than that: own and others' time of one more request in a long time, by a
    difference of the number of requests."""
    snapshot = one_at_a_time(seen(snapshot, *[0.0] * len(snapshot.gpus)))
    cluster, rate = LoadedCluster.of(snapshot), 1e-9
    others = Others(snapshot)
    assert others.slowdown(where) == pytest.approx(max(1.0, slowdown(Tenant(0.0, shares(where)), cluster.loads)))
    added = cluster.cost_of_adding(Tenant(rate, shares(where)), 0.0) / rate
    assert others.slowdown(where) + others.lost(where) == pytest.approx(added, rel=1e-3, abs=1e-4)


@given(where=PLACES, loads=st.lists(LOADS, min_size=4, max_size=4), batch=st.booleans())
def test_where_no_rate_counts_it_is_the_load_that_was_seen(where, loads: list[float], batch: bool) -> None:
    """Nobody is told, or who is told batches."""
    others = Others(seen(fleet(4, *[small.serving("a", place(0, 1), busy=0.7)] * batch), *loads))
    of = [(share, [loads[int(device[1:])] for _, device in keys]) for share, keys in shares(where)]
    assert others.slowdown(where) == pytest.approx(sum(share * stretch(max(on)) for share, on in of))
    assert others.lost(where) == pytest.approx(sum(share * sum(map(lost_by_others, on)) for share, on in of))


def test_a_replica_counts_once_on_all_its_gpus() -> None:
    """Four GPUs, load 0.5. Both halves of the step lose ``0.5 * 4``; a TP group over all four takes that once from
    one who stands on all, and from each of four who stand on one."""
    one = Others(fleet(4, serving("a", place(0, 1, 2, 3), busy=0.5)))
    each = Others(fleet(4, *(serving(f"a{i}", place(i), busy=0.5) for i in range(4))))
    assert one.lost(place(0, 1, 2, 3)) == pytest.approx(2.0)
    assert each.lost(place(0, 1, 2, 3)) == pytest.approx(8.0)
    assert each.lost(place(0)) == one.lost(place(0)) == pytest.approx(2.0)


@pytest.mark.parametrize(("busy", "load", "expected"), [(0.5, 0.2, 0.5), (0.2, 0.5, 0.5), (1.2, 1.0, 1.2)])
def test_a_gpu_is_as_loaded_as_the_more_of_what_was_seen_and_what_is_asked(
    busy: float, load: float, expected: float
) -> None:
    others = Others(seen(fleet(1, serving("a", place(0), busy=busy)), load))
    assert others.loads == {("n", "g0"): pytest.approx(expected)}


@given(where=PLACES, busy=st.floats(0, 0.7), load=st.floats(0.01, 1))
def test_who_is_told_hides_nobody_who_is_not(where, busy: float, load: float) -> None:
    """Beside a worker that batches: what was seen beyond the rate counts as it does where nobody is told."""
    batching = small.serving("b", place(0, 1, 2, 3), busy=0.4)
    both = Others(seen(fleet(4, serving("a", place(0), busy=busy), batching), load, load, load, load))
    alone = Others(seen(fleet(4, batching), load, load, load, load))
    assert both.lost(where) >= (1 - busy / load) * alone.lost(where) - 1e-9
    assert both.slowdown(where) >= alone.slowdown(where)
    if not busy:
        assert both.lost(where) == pytest.approx(alone.lost(where))


def test_of_whose_requests_nobody_knows_what_they_take_only_the_load_counts() -> None:
    unknown = replace(serving("a", place(0), busy=0.5), service_s=0.0)
    others = Others(seen(fleet(1, unknown), 0.3))
    assert others.loads == {("n", "g0"): 0.3}
    assert others.lost(place(0)) == pytest.approx(lost_by_others(0.3))
