"""Measured links: laws of the interpolation, and what estimates make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.all_reduce import GroupSums
from fingerprint.estimators.roofline import CALIBRATED, RooflineEstimator, all_reduce_s
from fingerprint.gpus import gpu_spec
from fingerprint.interconnect import MeasuredLinks
from fingerprint.service_model import service_model
from tests.fingerprint.step_timed_machine import llama_7b

SIZES = (8192, 131_072, 2_097_152, 33_554_432)
FAST = MeasuredLinks(
    gpus=2, sizes_bytes=SIZES, all_reduce_s=(12e-6, 14e-6, 30e-6, 190e-6), send_s=(8e-6, 8e-6, 15e-6, 100e-6)
)
SLOW = replace(FAST, all_reduce_s=(60e-6, 90e-6, 500e-6, 7e-3), send_s=(40e-6, 50e-6, 200e-6, 3e-3))
H200 = gpu_spec("h200")


@st.composite
def links(draw: st.DrawFn) -> MeasuredLinks:
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=2, max_size=6)))
    times = st.lists(st.floats(1e-7, 1e-2), min_size=len(sizes), max_size=len(sizes)).map(sorted)
    return MeasuredLinks(
        gpus=2, sizes_bytes=tuple(sizes), all_reduce_s=tuple(draw(times)), send_s=tuple(draw(times))
    )


SIZE = st.floats(1.0, 2.0**31)
LEAST = st.floats(0.0, 1e-3)


@given(links(), SIZE, SIZE, LEAST)
def test_a_larger_message_never_takes_less(one: MeasuredLinks, a: float, b: float, least_s: float) -> None:
    small, large = sorted((a, b))
    assert one.all_reduce_of_s(small, least_s) <= one.all_reduce_of_s(large, least_s) * (1 + 1e-12)
    assert one.send_of_s(small, least_s) <= one.send_of_s(large, least_s) * (1 + 1e-12)


@given(links(), LEAST)
def test_at_a_measured_size_it_is_the_measured_time(one: MeasuredLinks, least_s: float) -> None:
    """All of them are lifted alike where the smallest takes less than a step's own latency."""
    lift = max(0.0, least_s - one.all_reduce_s[0])
    for size, time_s in zip(one.sizes_bytes, one.all_reduce_s, strict=True):
        assert one.all_reduce_of_s(size, least_s) == pytest.approx(time_s + lift)
    assert one.all_reduce_of_s(one.sizes_bytes[0] / 2, least_s) == pytest.approx(one.all_reduce_s[0] + lift)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), SIZE)
def test_a_latency_and_a_bandwidth_are_found_again(latency_s: float, bytes_per_s: float, size: float) -> None:
    times = tuple(latency_s + one / bytes_per_s for one in SIZES)
    one = MeasuredLinks(gpus=2, sizes_bytes=SIZES, all_reduce_s=times, send_s=times)
    assert one.send_of_s(size, 0.0) == pytest.approx(latency_s + max(size, SIZES[0]) / bytes_per_s, rel=1e-6)


def test_beyond_the_largest_size_bytes_cost_what_the_last_did() -> None:
    assert FAST.all_reduce_of_s(2 * SIZES[3] - SIZES[2], 0.0) == pytest.approx(190e-6 + 160e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 1},
        {"gpus": 5000},
        {"sizes_bytes": (8192, 8192, 2**21, 2**25)},
        {"sizes_bytes": (0, 8192, 2**21, 2**25)},
        {"sizes_bytes": (8192,), "all_reduce_s": (1e-5,), "send_s": (1e-5,)},
        {"all_reduce_s": (12e-6, 14e-6)},
        {"all_reduce_s": (12e-6, 11e-6, 30e-6, 190e-6)},
        {"send_s": (0.0, 8e-6, 15e-6, 100e-6)},
        {"send_s": (8e-6, 8e-6, 15e-6, float("nan"))},
        {"send_s": (8e-6, 8e-6, 15e-6, float("inf"))},
    ],
)
def test_times_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(FAST, **wrong)  # type: ignore[arg-type]


def test_a_fast_link_keeps_the_latency_of_a_running_step() -> None:
    """An engine waits for the slowest rank and launches its own kernels: an isolated all-reduce hides both."""
    measured = replace(H200, interconnect=(FAST,))
    assert all_reduce_s(measured, 4096, 2, 1) == pytest.approx(CALIBRATED.all_reduce_latency_s)
    assert all_reduce_s(measured, 4096, 2, 4096) == pytest.approx(190e-6 + 21.8e-6 - 12e-6)
    assert all_reduce_s(measured, 4096, 4, 1) == all_reduce_s(H200, 4096, 4, 1)  # four were not measured


def test_a_slow_link_counts_as_measured() -> None:
    measured = replace(H200, interconnect=(SLOW,))
    assert all_reduce_s(measured, 4096, 2, 1) == pytest.approx(60e-6)
    assert all_reduce_s(measured, 4096, 2, 4096) == pytest.approx(7e-3)


def test_estimates_of_a_measured_degree_say_so() -> None:
    slow, work = replace(H200, interconnect=(SLOW,)), Workload(batch=1, input_tokens=512, output_tokens=128)
    for tp, is_measured in ((1, False), (2, True), (4, False)):
        config = DeploymentConfig(tp=tp, engine="vllm")
        found, before = (RooflineEstimator(llama_7b(), gpu).estimate(config, work) for gpu in (slow, H200))
        assert found.links_measured is is_measured
        assert (found.ttft_s.value > before.ttft_s.value) is is_measured
        service = service_model(RooflineEstimator(llama_7b(), slow), config, work)
        assert service.is_split_measured is (tp <= 2)


def test_a_hand_over_between_stages_takes_what_a_send_takes() -> None:
    work, config = Workload(batch=1, input_tokens=512, output_tokens=128), DeploymentConfig(pp=2, engine="vllm")
    before = RooflineEstimator(llama_7b(), H200).tpot_s(config, work)
    for links_of, more_s in ((FAST, 0.0), (SLOW, 31e-6)):  # 16 KiB: hidden states and residual of one token
        found = RooflineEstimator(llama_7b(), replace(H200, interconnect=(links_of,))).tpot_s(config, work)
        assert found - before == pytest.approx(more_s, abs=1e-6)


def test_measured_sums_have_a_narrower_interval() -> None:
    modelled = GroupSums(llama_7b(), H200, 2).log_errors(0.5, 1.0)
    measured = GroupSums(llama_7b(), replace(H200, interconnect=(FAST,)), 2).log_errors(0.5, 1.0)
    assert all(a < b for a, b in zip(measured, modelled, strict=True))
