"""Queueing at one replica against closed forms: M/M/1, M/M/c, M/G/1, GI/M/1; and its laws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig
from fingerprint.queueing import (
    Column,
    ServiceColumns,
    Variation,
    Wait,
    prompt_wait,
    requests_at_once,
    slot_wait,
)
from fingerprint.service_model import STEP_KNOTS, ServiceModel, steps_between

LOADS = [1e-4, 1e-3, 0.01, 0.05, 0.3, 0.5, 0.8, 0.95, 0.9985]  # the last between the last two knots


def columns(slots: int, *, alone_s: float = 1.0, full_s: float = 1.0) -> ServiceColumns:
    """Return a replica whose requests are next to no prompt and two tokens."""
    slope = (full_s - alone_s) / max(1, slots - 1)
    one, none = np.ones(1), np.full(1, 1e-12)
    return ServiceColumns(one * slots, none, none, one, one[None] * (alone_s - slope), one[None] * slope)


def wait(u: float, *, slots: int = 1, arrival_cv: float = 1.0, service_cv: float = 1.0) -> Wait:
    """Return the wait in units of T where T does not depend on the batch."""
    return for_a_slot(columns(slots), np.array([u]), Variation(arrival_cv, service_cv, service_cv))


def for_a_slot(service: ServiceColumns, utilisation: Column, variation: Variation) -> Wait:
    return slot_wait(service, utilisation, variation, requests_at_once(service, utilisation, variation).peak)


def erlang_c(slots: int, u: float) -> float:
    offered = slots * u
    below = math.fsum(offered**k / math.factorial(k) for k in range(slots))
    top = offered**slots / math.factorial(slots) / (1 - u)
    return top / (below + top)


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("slots", [1, 2, 8, 32])
def test_mmc(u: float, slots: int) -> None:
    """The share that waits is Sakasegawa's, within 2 points; how long it waits is exact."""
    found = wait(u, slots=slots)
    assert found.share[0] == pytest.approx(erlang_c(slots, u), abs=1e-9 if slots == 1 else 0.02)
    assert found.mean_s[0] == pytest.approx(1 / slots / (1 - u))
    assert found.beyond(np.array([0.5]))[0] == pytest.approx(found.share[0] * math.exp(-0.5 * slots * (1 - u)))


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("service_cv", [0.0, 0.5, 1.0])
def test_mean_wait_is_pollaczek_khinchine(u: float, service_cv: float) -> None:
    assert wait(u, service_cv=service_cv).of_all_s[0] == pytest.approx(u * (1 + service_cv**2) / 2 / (1 - u))


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("arrival_cv", [0.5, 2.0, 4.0])
def test_gi_m_1(u: float, arrival_cv: float) -> None:
    """The share that waits is the root of s = E exp(-(1 - s) gap), and gives the length of waits: both exact."""
    low, high = 0.0, 1 - 1e-12
    for _ in range(200):
        s = (low + high) / 2
        beyond = (1 + arrival_cv**2 * (1 - s) / u) ** (-1 / arrival_cv**2) > s
        low, high = (s, high) if beyond else (low, s)
    found = wait(u, arrival_cv=arrival_cv)
    for x in (0.0, 1.0, 10.0):
        assert found.beyond(np.array([x]))[0] == pytest.approx(low * math.exp(-(1 - low) * x), abs=4e-3)


def test_littles_law_of_a_batch_that_grows() -> None:
    """Four slots of T(n) = 2 + 0.5 n at a rate of 0.4: ``m = 0.4 T(m + 1)``."""
    service = columns(4, alone_s=2.5, full_s=4.0)
    running = requests_at_once(service, 0.4 * service.slot_s, Variation())
    assert running.mean[0] == pytest.approx(1.25 + 1)
    assert 0 < running.deviation[0] <= (4 - 2.25) / 2


def test_columns_are_the_service_models() -> None:
    """Steps between the knots and the time of a request among many, as the model itself says."""
    steps = tuple(step * 1e-3 for step in (10.0, 10.5, 11.0, 12.0, 15.0, 20.0, 33.0, 60.0, 130.0))
    model = ServiceModel(
        config=DeploymentConfig(), prompt_s=0.05, step_s=steps, input_tokens=100, output_tokens=20,
        longest_tokens=120, fixed_bytes=0, kv_bytes_per_token=1.0,
    )  # fmt: skip
    found = ServiceColumns.of([model], np.array([48.0]))
    for batch in (1.0, 1.5, 4.0, 47.0, 200.0, 300.0):
        assert found.steps_s(np.array([batch]))[0] == pytest.approx(model.step_of(batch))
    full_s = model.prompt_s + 47 * model.added_prompt_s + 19 * model.step_of(48)
    assert found.slot_s[0] == pytest.approx(full_s / 48)


@given(u=st.floats(0.01, 0.99), slots=st.sampled_from([1, 3, 60]), burstiness=st.sampled_from([1.0, 3.0]))
def test_knots_on_a_line_are_the_line(u: float, slots: int, burstiness: float) -> None:
    line = columns(slots, alone_s=0.01, full_s=0.01 + 1e-4 * (slots - 1))
    slope = 0.0 if slots == 1 else 1e-4
    steps = np.array(steps_between(0.01, 0.01 + slope * (STEP_KNOTS[-1] - 1), STEP_KNOTS[-1]))
    knots = np.array(STEP_KNOTS, np.float64)
    slopes = np.diff(steps) / np.diff(knots)
    many = replace(line, intercepts_s=(steps[:-1] - slopes * knots[:-1])[:, None], slopes_s=slopes[:, None])
    of_line, of_many = (requests_at_once(s, np.array([u]), Variation(burstiness)) for s in (line, many))
    assert of_many.mean[0] == pytest.approx(of_line.mean[0])
    assert of_many.deviation[0] == pytest.approx(of_line.deviation[0])


@pytest.mark.slow
@given(
    steps=st.lists(st.floats(0, 1), min_size=len(STEP_KNOTS), max_size=len(STEP_KNOTS)).map(sorted),
    loads=st.lists(st.floats(0.001, 0.999), min_size=2, max_size=20).map(sorted),
    slots=st.sampled_from([1, 2, 5, 64, 256]),
    peaks=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_requests_at_once_are_the_least_that_meet_as_many_and_grow_with_load(
    steps: list[float], loads: list[float], slots: int, peaks: float
) -> None:
    """Steps may jump anywhere; a walk from none asks how many are met while as many run as were met."""
    model = ServiceModel(
        config=DeploymentConfig(), prompt_s=0.03, step_s=tuple(0.008 + step for step in steps), input_tokens=1000,
        output_tokens=200, longest_tokens=2000, fixed_bytes=0, kv_bytes_per_token=1.0,
    )  # fmt: skip
    service = ServiceColumns.of([model] * len(loads), np.full(len(loads), float(slots)))
    found = requests_at_once(service, np.array(loads), Variation(math.sqrt(peaks)))
    rate = np.array(loads) / service.slot_s
    met = np.zeros(len(loads))
    for _ in range(3000):
        met = rate * service.requests_s(np.clip(met + found.peak, 1.0, slots))
    walked = np.clip(met + found.peak, 1.0, slots)
    assert (found.mean >= walked * (1 - 1e-9)).all()
    settled = np.abs(rate * service.requests_s(np.clip(met + found.peak, 1.0, slots)) - met) < 1e-9 * (1 + met)
    assert found.mean[settled] == pytest.approx(walked[settled], rel=1e-5)
    if peaks == 1:
        assert (np.diff(found.mean) >= -1e-9).all()


ROUNDING = 1e-12


@given(
    u=st.floats(0.01, 0.98),
    slots=st.sampled_from([1, 2, 8, 40]),
    grown=st.floats(1, 30),
    arrival_cv=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    service_cv=st.sampled_from([0.0, 0.7, 1.5]),
)
def test_more_load_and_more_burstiness_wait_more(
    u: float, slots: int, grown: float, arrival_cv: float, service_cv: float
) -> None:
    service = columns(slots, full_s=grown)
    loads = np.array([u, u + 0.01])

    def both(cv: float) -> tuple[Column, ...]:
        pair = service.take(np.zeros(2, np.intp))
        here, prompts = (
            wait(pair, loads, Variation(cv, service_cv, service_cv)) for wait in (for_a_slot, prompt_wait)
        )
        running = requests_at_once(pair, loads, Variation(cv, service_cv, service_cv))
        return here.share, here.of_all_s, prompts.of_all_s, running.mean

    for column, burstier in zip(both(arrival_cv), both(2 * arrival_cv), strict=True):
        assert 0 <= column[0] <= column[1] * (1 + 1e-9) + ROUNDING
        assert column[0] <= burstier[0] + 0.03 * max(1.0, column[0]), "Hayward's slots are no whole number"
    assert both(arrival_cv)[0].max() <= 1
