"""Forecasts of fleet plans: limits that are known, laws, and cases worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from fingerprint.gpu_sharing import GROUP_LOSS, slowdown
from fingerprint.load_columns import load_wait_at
from fingerprint.queueing import ServiceColumns
from fingerprint.service_model import LARGEST_BATCH, ServiceModel
from placement.fleet import performance
from placement.fleet.load import Loads, given_rates, prior
from placement.fleet.memory import kv_room
from placement.fleet.performance import FleetForecast, forecast
from placement.fleet.starts import rule_plan
from placement.fleet.types import Fleet, FleetDeployment, FleetPlan, FleetReplica
from planner.adapter_slots import VariantLoad
from tests.placement.fleet.fleets import fleet, gpus, option


def at(rates: list[float], split_loss: float = 0.0) -> Loads:
    return Loads(np.array([rates]), np.ones(1), np.array([split_loss]))


def forecast_of(one: Fleet, plan: FleetPlan, loads: Loads) -> FleetForecast:
    room = kv_room(one, plan)
    assert room is not None
    return forecast(one, plan, loads, room)


def test_an_idle_replica_takes_the_time_of_a_request_alone() -> None:
    one = fleet(1, 1)
    found = forecast_of(one, rule_plan(one), at([1e-9]))
    # 0.1 s of prompt and 100 steps of one sequence, 0.0101 s each
    assert found.e2e_s[0, 0] == pytest.approx(0.1 + 100 * 0.0101, rel=1e-6)
    assert found.busy[0, 0] == pytest.approx(0.0, abs=1e-6)


def test_a_replica_beside_one_that_is_always_busy_takes_2_2_times_as_long() -> None:
    """Two busy engines cost each 1.1 x 2, as measured on an H200."""
    one = fleet(2, 1)
    alone_s = option().alone_s
    found = forecast_of(one, rule_plan(one), at([1e-9, 8.0]))
    assert found.busy[0, 1] == pytest.approx(1.0, abs=1e-3)
    assert found.e2e_s[0, 0] == pytest.approx(2.2 * alone_s, rel=0.01)


@pytest.mark.parametrize(("tp", "busy", "slower"), [(1, 2, 3.3), (2, 1, 2.2), (2, 2, 3.3 * GROUP_LOSS)])
def test_a_tp_group_between_two_busy_others_loses_more(tp: int, busy: int, slower: float) -> None:
    one = fleet(busy + 1, tp, degrees=(tp,))
    plan = FleetPlan(tuple(FleetReplica(number, 0, tuple(range(tp))) for number in range(busy + 1)))
    alone = forecast_of(one, plan, at([1e-9] * (busy + 1))).e2e_s[0, 0]
    found = forecast_of(one, plan, at([1e-9, *[8.0 * tp] * busy]))
    assert found.busy[0, 1:] == pytest.approx([1.0] * busy, abs=1e-3)
    assert found.e2e_s[0, 0] == pytest.approx(slower * alone, rel=0.02)


def test_a_tp_group_loses_no_more_where_the_others_are_idle() -> None:
    one = fleet(3, 2, degrees=(2,))
    plan = FleetPlan(tuple(FleetReplica(number, 0, (0, 1)) for number in range(3)))
    found = forecast_of(one, plan, at([1e-9, 16.0, 1e-9]))
    assert found.slowdown[0, 0] == pytest.approx(2.2, rel=0.01)


@given(
    st.lists(st.sampled_from([(0, 1), (2, 3), (0,), (1,), (3,)]), min_size=1, max_size=4),
    st.lists(st.floats(0, 0.95), min_size=6, max_size=6),
)
def test_crowding_is_the_chance_that_two_others_are_busy_at_once(
    others: list[tuple[int, ...]], chances: list[float]
) -> None:
    """Against every combination of busy and idle tenants, one by one; what is foreign is a tenant of GPU 0."""
    replicas = tuple(FleetReplica(number, len(on) - 1, on) for number, on in enumerate([(0, 1), *others]))
    one = fleet(len(replicas), 4, degrees=(1, 2), fixed_gib=5)
    busy = np.array([chances[: len(replicas)]])
    foreign = np.array([chances[-1], 0.0, 0.0, 0.0])
    slow = np.ones(busy.shape)
    room = kv_room(one, FleetPlan(replicas))
    assert room is not None
    rows = performance._Rows.of(one, FleetPlan(replicas), room)
    crowds = performance._Crowds.of(rows, np.array([len(r.gpus) > 1 for r in replicas]), foreign)
    lossy = slow if crowds is None else crowds.lossy(slow, busy, 3.0)
    for row, replica in enumerate(replicas):
        most = 0.0
        for gpu in replica.gpus if len(replica.gpus) > 1 else ():
            there = [busy[0, n] for n, r in enumerate(replicas) if n != row and gpu in r.gpus] + [foreign[gpu]]
            cases = itertools.product([False, True], repeat=len(there))
            at_once = [math.prod(b if is_busy else 1 - b for b, is_busy in zip(there, case, strict=True))
                       for case in cases if sum(case) > 1]  # fmt: skip
            most = max(most, sum(at_once))
        assert lossy[0, row] == pytest.approx(1 + 2 * most, rel=1e-6)


def test_what_is_foreign_on_a_gpu_crowds_a_tp_group_as_a_replica_does() -> None:
    one = fleet(2, 2, degrees=(2,))
    plan = FleetPlan(tuple(FleetReplica(number, 0, (0, 1)) for number in range(2)))
    busy = replace(one, gpus=tuple(replace(gpu, busy=0.5) for gpu in one.gpus))
    found, alone = (forecast_of(on, plan, at([1e-9, 16.0])).slowdown[0, 0] for on in (busy, one))
    assert alone == pytest.approx(slowdown(1.0), rel=0.01)
    assert found == pytest.approx(slowdown(1.5) * (1 + 0.5 * (GROUP_LOSS - 1)), rel=0.01)


@pytest.mark.parametrize("rate", [0.05, 0.25, 0.5, 2.0])
def test_crowded_groups_are_followed_until_their_load_settles(rate: float) -> None:
    """At 0.25/s a little load grows to a standstill: each slows the rest, which are busy for longer."""
    one = fleet(3, 2, degrees=(2,))
    plan = FleetPlan(tuple(FleetReplica(number, 0, (0, 1)) for number in range(3)))
    found = forecast_of(one, plan, at([rate] * 3))
    busy = found.busy[0, 0]
    assert busy == pytest.approx(1 - math.exp(-rate * found.e2e_s[0, 0]), rel=0.01)
    crowded = GROUP_LOSS * busy**2 + 1 - busy**2
    assert found.slowdown[0, 0] == pytest.approx(slowdown(2 * busy) * crowded, rel=0.01)
    lossless = forecast_of(replace(one, group_loss=1.0), plan, at([rate] * 3))
    assert lossless.slowdown[0, 0] == pytest.approx(slowdown(2 * lossless.busy[0, 0]), rel=0.05)


def test_a_split_that_was_not_measured_pays_the_loss_of_the_case() -> None:
    one = fleet(1, 4, degrees=(4,), measured=False)
    plan = FleetPlan((FleetReplica(0, 0, (0, 1, 2, 3)),))
    plain = forecast_of(one, plan, at([1e-9]))
    lossy = forecast_of(one, plan, at([1e-9], split_loss=0.1))
    assert lossy.e2e_s[0, 0] == pytest.approx(1.2 * plain.e2e_s[0, 0])


@given(st.floats(0.01, 30), st.floats(1.01, 3))
def test_more_requests_never_make_one_faster(rate: float, more: float) -> None:
    one = fleet(2, 2)
    plan = rule_plan(one)
    less = forecast_of(one, plan, at([rate, rate]))
    loaded = forecast_of(one, plan, at([rate * more, rate * more]))
    assert (loaded.e2e_s >= less.e2e_s * (1 - 1e-9)).all()
    assert (loaded.utilisation > less.utilisation).all()


@given(st.permutations(range(4)), st.floats(0.1, 20))
def test_the_numbers_of_equal_gpus_are_never_a_reason(order: list[int], rate: float) -> None:
    one = fleet(3, 4)
    plan = rule_plan(one)
    moved = FleetPlan(tuple(replace(r, gpus=tuple(order[gpu] for gpu in r.gpus)) for r in plan.replicas))
    loads = at([rate, 2 * rate, 0.5])
    np.testing.assert_allclose(forecast_of(one, moved, loads).e2e_s, forecast_of(one, plan, loads).e2e_s)


def test_a_second_replica_halves_the_load() -> None:
    one = fleet(1, 2)
    single, double = rule_plan(one), FleetPlan((FleetReplica(0, 0, (0,)), FleetReplica(0, 0, (1,))))
    whole = forecast_of(one, single, at([6.0]))
    half = forecast_of(one, double, at([6.0]))
    np.testing.assert_allclose(half.utilisation[0], whole.utilisation[0, 0] / 2)
    assert half.e2e_s[0, 0] < whole.e2e_s[0, 0]


def test_beyond_capacity_a_queue_grows() -> None:
    one = fleet(1, 1)
    found = forecast_of(one, rule_plan(one), at([1000.0]))
    assert found.utilisation[0, 0] > 1
    assert found.e2e_s[0, 0] > 100


@pytest.mark.parametrize("models", [1, 4, 8, 16])
def test_the_prior_treats_equal_deployments_alike_and_fills_no_more_than_the_cluster(models: int) -> None:
    one = fleet(models, models)
    plan = rule_plan(one)
    loads = prior(one, plan)
    assert loads.weights.sum() == pytest.approx(1)
    for row in np.sort(loads.rates_per_s, axis=0).T:  # each has the same rates, though not at once
        np.testing.assert_allclose(row, np.sort(loads.rates_per_s[:, 0]))
    mean = loads.weights @ loads.rates_per_s
    np.testing.assert_allclose(mean, mean[0])
    used = forecast_of(one, plan, loads).utilisation
    assert (loads.weights @ used).max() < 0.75
    is_even = np.ptp(loads.rates_per_s, axis=1) < 1e-9
    assert used[is_even].max() < 0.75
    total = loads.rates_per_s.sum(axis=1)
    assert total.max() <= 0.55 / 0.35 * total[-1] * 1.01, "popularity moves the load and adds none"


def test_deployments_that_are_expected_have_their_part_of_the_load() -> None:
    one = fleet(1, 4)
    whole, part = prior(one, rule_plan(one)), prior(replace(one, expected=4), rule_plan(one))
    np.testing.assert_allclose(part.rates_per_s * 4, whole.rates_per_s)


def test_given_rates_are_the_least_that_is_judged() -> None:
    loads = given_rates([1.0, 3.0])
    np.testing.assert_allclose(loads.rates_per_s.min(axis=0), [1.0, 3.0])
    assert loads.are_known


def test_rates_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="finite"):
        at([float("nan")])


def test_a_fleet_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Fleet(fleet(1, 1).deployments, gpus(0))


def test_a_load_next_to_the_steps_delays_requests_and_holds_nothing_of_a_gpu() -> None:
    """Busy shares and the neighbour are as without, to the bit; the wait is that of each replica's rate."""
    loads = VariantLoad(64, 0.0).load_waits(8, 8, 1.5)
    assert loads is not None
    plain, some = option(), replace(option(), load_waits=loads)
    found = {}
    for own in (plain, some):
        one = Fleet(
            (FleetDeployment(name="m", options=(own,)), FleetDeployment(name="n", options=(plain,))), gpus(2)
        )
        plan = FleetPlan((FleetReplica(0, 0, (0,)), FleetReplica(0, 0, (1,)), FleetReplica(1, 0, (1,))))
        found[own.load_waits] = forecast_of(one, plan, at([0.4, 0.5]))
    none, with_loads = found[None], found[loads]
    assert none.on_gpu_s.tolist() == none.e2e_s.tolist() == with_loads.on_gpu_s.tolist()
    assert with_loads.busy.tolist() == none.busy.tolist()
    assert with_loads.e2e_s[0, 1] == none.e2e_s[0, 1]
    share, mean_s = load_wait_at(loads, 0.2)
    assert with_loads.e2e_s[0, 0] - none.e2e_s[0, 0] == pytest.approx(share * mean_s, rel=0.02)


SPARED = replace(option(), spared_loads_s=(0.0, 0.03, 0.04))


def two_deployments(replicas: int, own: ServiceModel) -> tuple[Fleet, FleetPlan]:
    """Return one of so many replicas of ``own``, and one without variants on the GPU of the first."""
    one = Fleet(
        (FleetDeployment(name="m", options=(own,)), FleetDeployment(name="n", options=(option(),))), gpus(3)
    )
    own_replicas = tuple(FleetReplica(0, 0, (gpu,)) for gpu in range(replicas))
    return one, FleetPlan((*own_replicas, FleetReplica(1, 0, (0,))))


@given(rate=st.floats(0.01, 8.0))
def test_a_lone_replica_is_spared_no_load_to_the_bit(rate: float) -> None:
    plain, some = (forecast_of(*two_deployments(1, own), at([rate, 0.5])) for own in (option(), SPARED))
    assert some.e2e_s.tolist() == plain.e2e_s.tolist()
    assert some.utilisation.tolist() == plain.utilisation.tolist()


@given(rate=st.floats(0.01, 8.0), replicas=st.sampled_from([2, 3]))
def test_replicas_that_share_variants_are_between_all_loads_and_the_fewest(rate: float, replicas: int) -> None:
    fewer_s = SPARED.spared_loads_s[replicas - 1]
    plain = option()
    fewest = replace(plain, prompt_s=plain.prompt_s - fewer_s, further_prompt_s=plain.added_prompt_s - fewer_s)
    least, found, most = (
        float(forecast_of(*two_deployments(replicas, own), at([rate, 0.01])).e2e_s[0, 0])
        for own in (fewest, SPARED, plain)
    )
    assert least <= found * (1 + 1e-6)
    assert found <= most * (1 + 1e-6)


def test_next_to_no_load_replicas_are_spared_by_their_number() -> None:
    for replicas, fewer_s in ((1, 0.0), (2, 0.03), (3, 0.04)):
        found = forecast_of(*two_deployments(replicas, SPARED), at([1e-9, 1e-9]))
        assert found.e2e_s[0, 0] == pytest.approx(option().alone_s - fewer_s, rel=1e-4)
        assert found.e2e_s[0, 1] == pytest.approx(option().alone_s, rel=1e-4)


def test_cases_of_load_are_worked_out_by_themselves() -> None:
    rates = np.array([[0.5, 0.2], [4.0, 0.2], [6.0, 1.0]])
    one, plan = two_deployments(2, SPARED)
    found = forecast_of(one, plan, Loads(rates, np.ones(3) / 3, np.zeros(3)))
    for case, row in enumerate(rates):
        alone = forecast_of(one, plan, at(row.tolist()))
        np.testing.assert_allclose(found.e2e_s[case], alone.e2e_s[0], rtol=1e-9)
        np.testing.assert_allclose(found.utilisation[case], alone.utilisation[0], rtol=1e-9)


def test_replicas_that_their_neighbours_slow_have_the_loads_of_their_own_utilisation() -> None:
    """Without neighbours the rate is served and loads are spared; with them it is not served with all loads."""
    found = []
    for own in (SPARED, option()):
        one = Fleet(
            (FleetDeployment(name="m", options=(own,)), FleetDeployment(name="n", options=(option(),))), gpus(2)
        )
        plan = FleetPlan(tuple(FleetReplica(deployment, 0, (gpu,)) for deployment in (0, 1) for gpu in (0, 1)))
        alone = FleetPlan(plan.of(0))
        rate = 1.2 * 0.5 * 2 / ServiceColumns.of([own], np.array([LARGEST_BATCH])).slot_s[0]
        found.append((forecast_of(one, alone, at([rate, 0.0])), forecast_of(one, plan, at([rate, 40.0]))))
    (spared, slowed), (all_loads, slowed_all) = found
    assert (spared.utilisation < all_loads.utilisation).all()
    assert slowed.utilisation[0, :2] == pytest.approx(slowed_all.utilisation[0, :2])
    assert (slowed.utilisation[0, :2] > 1).all()
