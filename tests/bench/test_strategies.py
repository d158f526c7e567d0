"""The bench of strategies on a machine whose truth is known: no strategy errs there, every second is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, WeightFormat, Workload, even_split
from fingerprint.estimators.registry import Predicts, estimator_names
from fingerprint.measurements import Profile
from fingerprint.profile import profile
from fingerprint.profile_plan import ProfilePlan
from tests.bench.profiling_cost import Activity, Kind, RecordingTarget, cost_of, each_once
from tests.bench.strategies import STRATEGIES, Recording, StrategyRow, answered, grid_row, judged, left_out
from tests.bench.whole_models import DEGREES, Whole, measure_one
from tests.fingerprint.synthetic_machine import SyntheticMachine

PLAN = ProfilePlan(weights=(WeightFormat.BITS16, WeightFormat.INT8), budget_s=1e6, min_repeats=3, max_repeats=4)
FINGERPRINT_LAYERS, ALL_LAYERS = {(1, 1): {1, 2}, (2, 1): {1, 2}, (1, 2): {2, 4}}, 32


def taken(plan: ProfilePlan) -> tuple[Profile, tuple[Activity, ...], float]:
    """A profile, what was noted of it, and what the machine's own clock says that it took."""
    machine = SyntheticMachine()
    target = RecordingTarget(machine, machine.clock)
    started = machine.clock()
    found = profile("synthetic", machine.spec, target, machine.fingerprint, plan, clock=machine.clock)
    return found, tuple(target.activities), machine.clock() - started


def truth() -> tuple[tuple[Whole, ...], tuple[Activity, ...]]:
    machine = SyntheticMachine()
    target, found = RecordingTarget(machine, machine.clock), []
    for tp, pp in DEGREES:
        session = target.open(tp=tp, pp=pp)
        for weights in PLAN.weights:
            for batch in (1, 4):
                config, workload = DeploymentConfig(tp=tp, pp=pp, weights=weights), Workload(batch, 512, 33)
                checkpoint = machine.fingerprint(range(ALL_LAYERS))
                found.append(measure_one(session, checkpoint, even_split(ALL_LAYERS, pp), config, workload, 4))
        session.close()
    return tuple(found), tuple(target.activities)


@pytest.fixture(scope="module")
def recording() -> Recording:
    cut, cut_took, _ = taken(PLAN)
    whole, whole_took, _ = taken(replace(PLAN, whole=True))
    wholes, truth_took = truth()
    return Recording(
        model="synthetic",
        spec=cut.spec,
        fingerprints=cut,
        whole=whole,
        truth=wholes,
        fingerprints_took=cut_took,
        whole_took=whole_took,
        truth_took=truth_took,
    )


@pytest.fixture(scope="module")
def rows(recording: Recording) -> dict[tuple[str, str], StrategyRow]:
    found = [row for s in STRATEGIES for row in judged(recording, s, answered(recording, s)[0])]
    return {(row.strategy, row.quantity): row for row in found}


def test_every_registered_strategy_is_judged_or_named_as_left_out() -> None:
    registered = {name for predicts in (Predicts.MEMORY, Predicts.LATENCY) for name in estimator_names(predicts)}
    assert {s.name for s in STRATEGIES} | set(left_out()) == registered


@pytest.mark.parametrize(
    "plan", [PLAN, replace(PLAN, whole=True), replace(PLAN, degrees=((1, 1),))], ids=["cut", "whole", "one"]
)
def test_every_second_is_of_some_launch_load_or_run(plan: ProfilePlan) -> None:
    _, took, spent_s = taken(plan)
    assert cost_of(took).seconds == pytest.approx(spent_s)
    assert [(a.tp, a.pp) for a in took if a.kind is Kind.LAUNCH] == list(plan.degrees)
    for degree in plan.degrees:
        loaded = {a.num_layers for a in took if a.kind is not Kind.LAUNCH and (a.tp, a.pp) == degree}
        assert loaded == ({ALL_LAYERS} if plan.whole else FINGERPRINT_LAYERS[degree])


def test_a_load_is_held_by_every_rank_while_it_runs() -> None:
    machine = SyntheticMachine()
    target = RecordingTarget(machine, machine.clock)
    session = target.open(tp=2, pp=1)
    opened = machine.clock()
    measure_one(session, machine.fingerprint(range(2)), (2,), DeploymentConfig(tp=2), Workload(4, 512, 33), 2)
    ranks = session.memory()
    session.close()
    counted = sum(r.weights_bytes + r.kv_bytes + r.activation_peak_bytes + r.runtime_bytes for r in ranks)
    assert {a.held_bytes for a in target.activities if a.kind is not Kind.LAUNCH} == {counted}
    assert cost_of(target.activities[1:]).gib_s == pytest.approx((machine.clock() - opened) * counted / 2**30)


def test_memory_needs_every_launch_load_and_run_once(recording: Recording) -> None:
    once = list(each_once(recording.fingerprints_took))
    assert len([a for a in once if a.kind is Kind.LAUNCH]) == 3
    assert len([a for a in once if a.kind is Kind.LOAD]) == 3 * 2 * 2  # degrees, fingerprints, formats
    assert len([a for a in once if a.kind is Kind.RUN]) == 3 * 2 * 2 * 8  # batches, inputs and outputs
    runs, all_runs = ([a for a in found if a.kind is Kind.RUN] for found in (once, recording.fingerprints_took))
    assert cost_of(runs).seconds < cost_of(all_runs).seconds / 3  # a run to warm up, and three at least


@pytest.mark.parametrize("name", ["M1", "M2", "M3"])
def test_memory_is_exact_where_the_machine_is(rows: dict[tuple[str, str], StrategyRow], name: str) -> None:
    for quantity in ("memory_bytes_per_gpu", "engine_bytes_per_gpu"):
        row = rows[name, quantity]
        assert row.reached == row.asked == row.inside == 12
        assert row.worst_error == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("name", "reached"), [("L1", 10), ("L2", 12), ("L2 by the wall's clock (paper)", 12)])
def test_latency_is_exact_but_for_hand_overs_that_l1_does_not_see(
    rows: dict[tuple[str, str], StrategyRow], name: str, reached: int
) -> None:
    """L1 knows stages at batch 1 only: two configurations at (1, 2) are refused, two are too fast."""
    for quantity in ("ttft_s", "tpot_s"):
        row = rows[name, quantity]
        assert (row.asked, row.reached) == (12, reached)
        assert row.median_error == pytest.approx(0, abs=1e-6)
        assert row.worst_error is not None
        assert (row.worst_error > 1e-3) == (name == "L1")


def test_what_was_refused_is_named(recording: Recording) -> None:
    (l1,) = (s for s in STRATEGIES if s.name == "L1")
    _, refused = answered(recording, l1)
    assert len(refused) == 2
    assert all("batch 1 only" in reason for reason in refused)


def test_a_strategy_pays_for_its_own_degrees_and_nothing_else(
    recording: Recording, rows: dict[tuple[str, str], StrategyRow]
) -> None:
    whole = [a for a in recording.whole_took if a.pp == 1]
    l1, m1, m2 = rows["L1", "ttft_s"], rows["M1", "memory_bytes_per_gpu"], rows["M2", "memory_bytes_per_gpu"]
    assert l1.cost == cost_of(whole)
    assert m2.cost == rows["M3", "memory_bytes_per_gpu"].cost  # on two devices the grid is M2's three degrees
    assert m2.cost.gib_s < m1.cost.gib_s
    grid = grid_row(recording, Predicts.MEMORY)
    assert grid.cost == cost_of(each_once(recording.truth_took))
    assert m1.of_grid is not None
    assert m1.of_grid.seconds * grid.cost.seconds == pytest.approx(m1.cost.seconds)
