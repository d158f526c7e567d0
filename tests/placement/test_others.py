"""Interference with what runs on the GPUs already, for a deployment that would join."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.batch_load import Batching
from placement.load_model import LoadedCluster, Tenant, crowd, lost_by_others, shares, slowdown, stretch
from placement.others import Others
from placement.types import ClusterSnapshot, DeploymentState, Placement, Stays
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
    """Given rates count as in the load model, where GPUs were seen less busy than that.

    Own and other requests' time of one more request in a long time, by a difference of the number of requests.
    """
    snapshot = one_at_a_time(seen(snapshot, *[0.0] * len(snapshot.gpus)))
    cluster, rate = LoadedCluster.of(snapshot), 1e-9
    others = Others(snapshot)
    assert others.slowdown(where) == pytest.approx(max(1.0, slowdown(Tenant(0.0, shares(where)), cluster.loads)))
    added = cluster.cost_of_adding(Tenant(rate, shares(where)), 0.0) / rate
    assert others.slowdown(where) + others.lost(where) == pytest.approx(added, rel=1e-3, abs=1e-4)


@given(where=PLACES, loads=st.lists(LOADS, min_size=4, max_size=4), batch=st.booleans())
def test_where_no_rate_counts_it_is_the_load_that_was_seen(where, loads: list[float], batch: bool) -> None:
    """The rates are unknown, or the worker with a rate batches."""
    others = Others(seen(fleet(4, *[small.serving("a", place(0, 1), busy=0.7)] * batch), *loads))
    of = [(share, [loads[int(device[1:])] for _, device in keys]) for share, keys in shares(where)]
    assert others.slowdown(where) == pytest.approx(sum(share * stretch(max(on)) for share, on in of))
    assert others.lost(where) == pytest.approx(sum(share * sum(map(lost_by_others, on)) for share, on in of))


def test_a_replica_counts_once_on_all_its_gpus() -> None:
    """A replica on four GPUs takes from a newcomer once what it does on all of them.

    Load 0.5 on four GPUs: both halves of the step lose ``0.5 * 4``; a TP group over all four takes that once from
    one that is placed on all, and from each of four that are placed on one.
    """
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
    """Load seen beyond the rate counts, next to a worker that batches, as it does where no rate is known."""
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


STAYS = Stays(alone_s=2.0, full_s=5.0)


def batching(
    name: str, where: Placement, rate: float, *, outstanding: int = 0, waiting: int = 0
) -> DeploymentState:
    """Return a deployment of four slots."""
    state = small.serving(name, where, outstanding=(outstanding,), waiting=waiting, stays=STAYS)
    return replace(state, requests_per_s=rate)


@given(where=PLACES, load=LOADS)
def test_a_batching_worker_that_nobody_calls_costs_nothing(where, load: float) -> None:
    """The worker's GPUs were busy while it was started, and no other worker has memory there."""
    uncalled = fleet(4, batching("a", place(0, 1), 0.0), batching("b", place(0, 1, 2, 3), 0.0))
    others = Others(seen(uncalled, load, load, load, load))
    assert (others.slowdown(where), others.lost(where), others.loads) == (1.0, 0.0, {})


def test_what_was_seen_counts_where_somebody_else_has_memory() -> None:
    uncalled = seen(fleet(1, batching("a", place(0), 0.0)), 0.6)
    for held, expected in ((2, 0.0), (3, 0.6)):  # of 100
        gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes - held) for gpu in uncalled.gpus)
        assert Others(replace(uncalled, gpus=gpus)).loads.get(("n", "g0"), 0.0) == expected
    beside_unknown = fleet(1, batching("a", place(0), 0.0), small.serving("b", place(0), busy=0.2))
    assert Others(seen(beside_unknown, 0.6)).loads == {("n", "g0"): 0.6}


@pytest.mark.parametrize(("outstanding", "waiting"), [(1, 0), (0, 1), (40, 7)])
def test_a_queue_that_is_worked_off_is_what_was_seen_up_to_an_even_share(outstanding: int, waiting: int) -> None:
    asking = batching("a", place(0), 0.0, outstanding=outstanding, waiting=waiting)
    quiet = batching("b", place(0), 0.0)
    for load, expected in ((0.3, 0.3), (1.0, 0.5)):
        assert Others(seen(fleet(1, asking, quiet), load)).loads == {("n", "g0"): expected}
    both = fleet(1, asking, replace(quiet, waiting=1))
    assert Others(seen(both, 1.0)).loads == {("n", "g0"): pytest.approx(2 / 3)}


@given(where=PLACES, low=st.floats(0, 2), more=st.floats(0, 2), load=LOADS, one=st.floats(0, 0.5))
def test_more_rate_of_those_that_batch_is_never_faster(where, low, more, load, one) -> None:
    def beside(rate: float) -> Others:
        others = (
            batching("a", place(0, 1, 2), rate),
            batching("b", place(0), 0.3),
            serving("c", place(3), busy=one),
        )
        return Others(seen(fleet(4, *others), load, load, load, load))

    less, busier = beside(low), beside(low + more)
    assert 1.0 <= less.slowdown(where) <= busier.slowdown(where) * (1 + 1e-3)
    assert 0.0 <= less.lost(where) <= busier.lost(where) * (1 + 2e-2) + 1e-9


@given(where=PLACES, rates=st.lists(st.floats(0, 50), min_size=1, max_size=5), load=LOADS)
def test_those_that_batch_leave_an_even_share(where, rates: list[float], load: float) -> None:
    asking = (batching(str(i), place(0, 1, 2, 3), rate, outstanding=1) for i, rate in enumerate(rates))
    others = Others(seen(fleet(4, *asking), load, load, load, load))
    assert others.slowdown(where) <= len(rates) + 1 + 1e-6


def test_a_lone_batching_worker_keeps_half_of_the_time_that_it_runs_beside_another() -> None:
    """And each GPU that it is on counts."""
    rate = 0.4
    busy = Batching(rate, STAYS.alone_s, STAYS.full_s, 4, 1, shares(place(0))).under_way(2.0)
    one, two = Others(fleet(1, batching("a", place(0), rate))), Others(fleet(2, batching("a", place(0, 1), rate)))
    assert one.loads == {("n", "g0"): pytest.approx(busy / 2)}
    assert one.lost(place(0)) == pytest.approx(lost_by_others(busy / 2))
    assert two.lost(place(0, 1)) == pytest.approx(2 * one.lost(place(0)))


@given(rate=st.floats(0.01, 0.45))
def test_a_batch_that_gains_nothing_is_one_at_a_time(rate: float) -> None:
    """Up to half of a GPU, from where on it shares and does not let anybody wait."""
    gains_nothing = replace(batching("a", place(0), rate), stays=Stays(alone_s=1.0, full_s=4.0))
    one = replace(serving("a", place(0)), requests_per_s=rate, service_s=1.0)
    batches, waits = Others(fleet(1, gains_nothing)), Others(fleet(1, one))
    assert batches.slowdown(place(0)) == pytest.approx(waits.slowdown(place(0)), rel=1e-3)


def test_beside_one_at_a_time_both_ask() -> None:
    """Neither deployment is less busy for the other."""
    batch, one = batching("a", place(0), 0.4), serving("b", place(0), busy=0.3)
    both, without = Others(fleet(1, batch, one)), Others(fleet(1, batch))
    (load,), (alone,) = both.loads.values(), without.loads.values()
    assert load >= alone + 0.3
    assert both.slowdown(place(0)) > max(without.slowdown(place(0)), Others(fleet(1, one)).slowdown(place(0)))
    assert both.lost(place(0)) > without.lost(place(0)) + Others(fleet(1, one)).lost(place(0))


@given(snapshot=fleets(), where=PLACES, low=st.floats(0, 3), more=st.floats(0, 3))
def test_more_to_come_costs_no_less_and_nobody_costs_nothing(
    snapshot: ClusterSnapshot, where, low: float, more: float
) -> None:
    others = Others(snapshot)
    assert others.later(where, 0.0) == 0.0
    assert 0.0 <= others.later(where, low) <= others.later(where, low + more) * (1 + 1e-9)


@given(where=PLACES, load=st.floats(0, 3))
def test_on_idle_gpus_who_is_to_come_slows_its_own_only(where, load: float) -> None:
    assert Others(fleet(4)).later(where, load) == pytest.approx(crowd(load) - 1)


@given(where=PLACES, busy=st.floats(0, 0.4), load=st.floats(0, 0.4))
def test_who_is_to_come_counts_as_load_that_is_there(where, busy: float, load: float) -> None:
    """The loss by an expected deployment is what the load model says of GPUs that are busy for as much more."""
    there = one_at_a_time(seen(fleet(4, serving("a", place(0, 1, 2, 3), busy=busy)), *[0.0] * 4))
    added = Tenant(1e-7, shares(where))

    def in_all(more: float) -> float:
        cluster = LoadedCluster.of(there)
        cluster.loads = {(g.node_id, g.device_id): busy + more for g in there.gpus}
        return cluster.cost_of_adding(added, 0.0) / 1e-7

    assert Others(there).later(where, load) == pytest.approx(in_all(load) - in_all(0.0), rel=1e-3, abs=1e-4)
