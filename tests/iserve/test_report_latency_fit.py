"""The lines of the time charts against a machine whose times are known."""

from __future__ import annotations

import pytest

from fingerprint.config import WeightFormat
from fingerprint.measurements import Profile
from fingerprint.profile import ProfilePlan
from iserve.report.latency_fit import TPOT, TTFT, TimePanel, time_panels
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile

PLAN = ProfilePlan(budget_s=1e6, max_repeats=5, weights=(WeightFormat.BITS16, WeightFormat.INT8))


@pytest.fixture(scope="module")
def machine() -> SyntheticMachine:
    return SyntheticMachine()


@pytest.fixture(scope="module")
def profile(machine: SyntheticMachine) -> Profile:
    return take_profile(machine, PLAN)


@pytest.fixture(scope="module")
def panels(profile: Profile) -> tuple[TimePanel, ...]:
    return time_panels(profile)


def panel(panels: tuple[TimePanel, ...], quantity: str, tp: int, pp: int) -> TimePanel:
    (found,) = (
        p for p in panels if (p.quantity, p.tp, p.pp, p.batch, p.input_tokens) == (quantity, tp, pp, 1, 512)
    )
    return found


def test_every_burst_degree_and_quantity_has_a_panel(panels: tuple[TimePanel, ...]) -> None:
    assert len(panels) == 2 * 2 * 2 * 3  # batches, input lengths, TTFT and TPOT, degrees
    assert all([s.weights for s in p.series] == ["16bit", "int8"] for p in panels)
    assert {p.num_layers for p in panel(panels, TTFT, 1, 2).series[0].points} == {2, 4}


@pytest.mark.parametrize(("quantity", "of"), [(TTFT, "ttft_s"), (TPOT, "tpot_s")])
def test_points_and_line_are_the_machines_own(
    machine: SyntheticMachine, panels: tuple[TimePanel, ...], quantity: str, of: str
) -> None:
    lengths = (1, 512) if quantity == TTFT else (1, 512, 17)
    series = panel(panels, quantity, 1, 1).series[0]
    truth = getattr(machine.truth, of)
    for point in series.points:
        assert point.value_s == pytest.approx(truth(int(point.num_layers), *lengths), rel=1e-9)
        assert point.num_runs == 5
    end = series.line[-1]
    assert end.num_layers == machine.spec.num_layers
    assert end.value_s == pytest.approx(truth(machine.spec.num_layers, *lengths), rel=1e-6)
    assert [p.num_layers for p in series.line] == sorted(p.num_layers for p in series.line)


def test_noise_widens_points_and_band() -> None:
    noisy = take_profile(SyntheticMachine(noise=0.05, seed=3), PLAN)
    for found in time_panels(noisy):
        for series in found.series:
            assert all(p.low_s < p.value_s < p.high_s for p in series.points)
            assert all(p.low_s <= p.value_s <= p.high_s and p.low_s >= 0 for p in series.line)
            assert series.line[-1].high_s - series.line[-1].low_s > 0


def test_one_depth_draws_points_and_no_line() -> None:
    shallow = take_profile(
        SyntheticMachine(spec=llama(1)), ProfilePlan(budget_s=1e6, max_repeats=5, degrees=((1, 1),))
    )
    assert all(series.points and not series.line for p in time_panels(shallow) for series in p.series)
