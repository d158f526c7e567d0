"""Moves that pay, and that moves end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.actions import Move, Scale
from placement.load_model import LoadedCluster
from placement.migration import Migration, best_move, load_s
from placement.rebalancer import Elastic
from placement.scaling import Scaling
from placement.types import ClusterSnapshot, Placement
from tests.placement.fleets import fleet, fleets, moved, place, serving

# 10 bytes at 1 byte/s and a start of 10 s: a move takes 20 s.
RULE = Migration(gpu_price=0.25, horizon_s=120.0, load_bytes_per_s=1.0, start_s=10.0, hold_s=120.0)


def cost(snapshot: ClusterSnapshot, price: float) -> float:
    return LoadedCluster.of(snapshot).standing_cost(price)


def test_a_crowded_replica_moves_to_an_idle_gpu() -> None:
    """0.8 / 0.2 = 4 requests together, 2 * 0.4 / 0.6 = 1.33 apart: 2.42 less for 100 s, for a price of 5."""
    snapshot = fleet(2, serving("a", place(0), busy=0.4), serving("b", place(0), busy=0.4))
    assert best_move(snapshot, RULE) == Move(name="a", replica_id="a#0", placement=place(1), load_s=20.0)


def test_two_quiet_replicas_come_together_and_free_a_gpu() -> None:
    """At 0.02 each: 0.0417 requests together instead of 0.0408; a GPU's price is 0.25."""
    snapshot = fleet(2, serving("a", place(0), busy=0.02), serving("b", place(1), busy=0.02))
    move = best_move(snapshot, RULE)
    assert move is not None
    after = moved(snapshot, move.name, move.replica_id, move.placement)
    assert sum(gpu.free_bytes == gpu.total_bytes for gpu in after.gpus) == 1


def test_two_quiet_replicas_of_one_deployment_stay_apart() -> None:
    """Together they would free a GPU, and each would share its time with the other."""
    snapshot = fleet(2, serving("a", place(0), place(1), busy=0.02))
    assert best_move(snapshot, RULE) is None
    crowded = serving("a", place(0), place(1), busy=0.4), serving("b", place(0), busy=0.4, steady_s=0.0)
    assert best_move(fleet(2, *crowded), RULE) is None
    away = Move(name="a", replica_id="a#0", placement=place(2), load_s=20.0)
    assert best_move(fleet(3, *crowded), RULE) == away


@pytest.mark.parametrize(
    ("busy", "rule"),
    [
        pytest.param(0.2, RULE, id="saves 0.17 requests, a GPU costs 0.25"),
        pytest.param(0.4, replace(RULE, gpu_price=3.0), id="a GPU is dear"),
        pytest.param(0.4, replace(RULE, horizon_s=20.0), id="the load may be over when it arrives"),
        pytest.param(0.4, replace(RULE, load_bytes_per_s=0.05), id="the weights take longer than the load lasts"),
        pytest.param(0.4, replace(RULE, hold_s=1001.0), id="too soon after the last change"),
    ],
)
def test_it_stays_where_a_move_does_not_pay(busy: float, rule: Migration) -> None:
    snapshot = fleet(2, serving("a", place(0), busy=busy), serving("b", place(0), busy=busy))
    assert best_move(snapshot, rule) is None


def test_one_at_a_time() -> None:
    crowd = [serving(name, place(0), busy=0.4) for name in "ab"]
    assert best_move(fleet(2, crowd[0], replace(crowd[1], moving=True)), RULE) is None


def test_a_tensor_parallel_group_stays_within_a_link_group() -> None:
    """GPU 1 is full: of the pairs (2, 3) and (1, 2) only the first is linked, and it has room."""
    full = serving("c", place(1, size_bytes=95), busy=0.0)
    crowd = (serving("a", place(4, 5), busy=0.45), serving("b", place(4, 5), busy=0.45))
    move = best_move(fleet(6, *crowd, full), RULE, link_group_size=2)
    assert move is not None
    assert move.placement.device_ids == ("g2", "g3")


@pytest.mark.slow
@settings(max_examples=200)
@given(snapshot=fleets(most_replicas=3), price=st.floats(0.02, 1))
def test_a_move_fits_lies_elsewhere_and_pays(snapshot: ClusterSnapshot, price: float) -> None:
    """The new place is free before the old one is, and no replica of the deployment is placed there.

    While a move lasts both places hold memory.
    """
    rule = replace(RULE, gpu_price=price)
    move = best_move(snapshot, rule)
    if move is None:
        return
    deployment = next(d for d in snapshot.deployments if d.name == move.name)
    old = next(r.placement for r in deployment.replicas if r.replica_id == move.replica_id)
    theirs = {device for replica in deployment.replicas for device in replica.placement.device_ids}
    free = {gpu.device_id: gpu.free_bytes for gpu in snapshot.gpus}
    assert not theirs & set(move.placement.device_ids)
    assert len(set(move.placement.device_ids)) == len(old.device_ids)
    assert move.placement.layers_per_stage == old.layers_per_stage
    for before, stage in zip(old.stages, move.placement.stages, strict=True):
        assert stage.bytes_per_gpu == before.bytes_per_gpu
        assert all(free[device] >= stage.bytes_per_gpu for device in stage.device_ids)
    after = moved(snapshot, move.name, move.replica_id, move.placement)
    takes_s = load_s(old, rule)
    saved = (cost(snapshot, price) - cost(after, price)) * (rule.horizon_s - takes_s)
    assert saved > price * len(old.device_ids) * takes_s * 0.999


@pytest.mark.slow
@settings(max_examples=150)
@given(snapshot=fleets(most_replicas=2))
def test_at_a_standing_load_moves_end_and_none_is_undone(snapshot: ClusterSnapshot) -> None:
    seen = [snapshot.deployments]
    for _ in range(40):
        move = best_move(snapshot, RULE)
        if move is None:
            return
        snapshot = moved(snapshot, move.name, move.replica_id, move.placement)
        assert snapshot.deployments not in seen
        seen.append(snapshot.deployments)
    raise AssertionError("moves go on and on")


@pytest.mark.slow
@settings(max_examples=150)
@given(snapshot=fleets().filter(lambda s: best_move(s, RULE) is not None), data=st.data())
def test_a_move_is_undone_only_after_the_load_has_changed_by_twice_its_price(
    snapshot: ClusterSnapshot, data: st.DataObject
) -> None:
    """Whatever the load becomes: what staying there costs more than going back rose by both moves' margins."""
    move = best_move(snapshot, RULE)
    assert move is not None
    back = next(d for d in snapshot.deployments if d.name == move.name).replicas[0].placement
    loads = [data.draw(st.floats(0, 1)) for _ in snapshot.deployments]

    def layout(there: Placement, *, changed: bool) -> ClusterSnapshot:
        deployments = tuple(
            replace(d, requests_per_s=load if changed else d.requests_per_s)
            for d, load in zip(snapshot.deployments, loads, strict=True)
        )
        return moved(ClusterSnapshot(snapshot.gpus, deployments), move.name, move.replica_id, there)

    def gain(*, changed: bool) -> float:
        """Return by how much it is cheaper to be placed where the move led."""
        here, there = (layout(place, changed=changed) for place in (move.placement, back))
        return cost(there, RULE.gpu_price) - cost(here, RULE.gpu_price)

    takes_s = load_s(back, RULE)
    margin = RULE.gpu_price * len(back.device_ids) * takes_s / (RULE.horizon_s - takes_s)
    turned = best_move(layout(move.placement, changed=True), RULE)
    if turned is not None and (turned.name, turned.placement) == (move.name, back):
        assert gain(changed=False) - gain(changed=True) > 2 * margin * 0.999


def test_scaling_comes_before_moving() -> None:
    """While the number of replicas changes, the loads that a move is judged by are about to change."""
    crowd = (serving("a", place(0), busy=0.9), serving("b", place(0), busy=0.4))
    both = Elastic(scaling=Scaling(), migration=RULE)
    assert both(fleet(2, *crowd)) == (Scale(name="a", replicas=2),)
    assert [type(order) for order in Elastic(migration=RULE)(fleet(2, *crowd))] == [Move]
    assert Elastic()(fleet(2, *crowd)) == ()


@pytest.mark.parametrize(
    "wrong", [{"gpu_price": 0.0}, {"horizon_s": 0.0}, {"load_bytes_per_s": -1}, {"hold_s": -1}]
)
def test_prices_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Migration(**wrong)
    with pytest.raises(ConfigError):
        Elastic(every_s=0.0)
