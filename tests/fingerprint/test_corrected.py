"""An estimator corrected by checks: exact where it was checked, careful nearby, silent on other engines."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimate, Estimator, Quantity
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.fingerprinted import FingerprintedEstimator, nearest
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.profile import ProfilePlan
from fingerprint.verification import Reading, SingleRequest, Verification
from tests.fingerprint.estimator_conformance import EstimatorConformance
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, llama, take_profile
from tests.golden_words import Golden

SPEC = llama()
RAW = RooflineEstimator(SPEC, CPU)
HERE, WORK = DeploymentConfig(), Workload(batch=2, input_tokens=64, output_tokens=16)
INT8 = DeploymentConfig(weights=WeightFormat.INT8)

CONFIGS = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    weights=st.sampled_from([WeightFormat.BITS16, WeightFormat.INT8]),
    kv=st.sampled_from([KvFormat.BITS16, KvFormat.INT8]),
)
WORKLOADS = st.builds(
    Workload, batch=st.integers(1, 64), input_tokens=st.integers(1, 2048), output_tokens=st.integers(1, 512)
)
RATIOS = st.floats(0.05, 20.0)


def reading(value: float, spread: float = 0.0) -> Reading:
    return Reading(value=value, low=value * (1 - spread), high=value * (1 + spread), repeats=5)


def check_of(
    estimator: Estimator,
    config: DeploymentConfig = HERE,
    workload: Workload = WORK,
    *,
    ttft: float = 1.0,
    tpot: float = 1.0,
    more_bytes: int = 0,
    spread: float = 0.0,
    at: str = "2026-11-21T10:00:00+00:00",
) -> Verification:
    """A check that measures ``ttft`` and ``tpot`` times what is predicted, and ``more_bytes`` on each GPU."""
    predicted = estimator.estimate(config, workload)
    split = even_split(predicted.memory.num_layers, config.pp)
    return Verification(
        config=config,
        workload=workload,
        launch_workload=workload,
        layers_per_stage=split,
        measured_at=at,
        ttft_s=reading(predicted.ttft_s.value * ttft, spread),
        tpot_s=reading(predicted.tpot_s.value * tpot, spread),
        memory_bytes_per_gpu=predicted.memory.per_gpu_bytes(split) + more_bytes,
        kv_tokens=None,
    )


def per_gpu_bytes(estimate: Estimate) -> int:
    return estimate.memory.per_gpu_bytes(even_split(estimate.memory.num_layers, estimate.memory.pp))


def inside(inner: Quantity, outer: Quantity) -> bool:
    return outer.low <= inner.low and inner.high <= outer.high


class TestCorrected(EstimatorConformance):
    @pytest.fixture
    def estimator(self) -> CorrectedEstimator:
        machine = SyntheticMachine(noise=0.05, seed=2)
        profile = take_profile(machine, ProfilePlan(budget_s=1e6, max_repeats=5))
        base = FingerprintedEstimator(profile, RooflineEstimator(profile.spec, CPU))
        checks = [
            check_of(base, ttft=1.4, tpot=0.6, more_bytes=-10_000_000, spread=0.02),
            check_of(base, replace(HERE, tp=2), ttft=3.0, tpot=2.0, more_bytes=50_000_000),
            check_of(base, INT8, ttft=0.9, more_bytes=5_000),
        ]
        return CorrectedEstimator(base, checks)


def test_what_was_checked_is_predicted_as_measured() -> None:
    check = check_of(RAW, ttft=1.7, tpot=0.8, more_bytes=123_456_789)
    found = CorrectedEstimator(RAW, [check]).estimate(HERE, WORK)
    assert check.tpot_s is not None
    assert found.ttft_s.value == pytest.approx(check.ttft_s.value)
    assert found.tpot_s.value == pytest.approx(check.tpot_s.value)
    assert per_gpu_bytes(found) == check.memory_bytes_per_gpu
    correction = found.correction
    assert correction is not None
    assert (correction.exact, correction.config, correction.workload) == (True, HERE, WORK)
    assert correction.ttft_log_ratio == pytest.approx(math.log(1.7))
    assert correction.tpot_log_ratio == pytest.approx(math.log(0.8))
    assert correction.memory_bytes == 123_456_789


def test_a_check_of_a_worker_with_other_graphs_corrects_nothing() -> None:
    check = check_of(RAW, ttft=2.7)
    corrected = CorrectedEstimator(RAW, [check], graph_tokens=4096)
    assert corrected.estimate(HERE, WORK) == RAW.estimate(HERE, WORK)
    today = replace(check, graph_tokens=4096)
    found = CorrectedEstimator(RAW, [check, today], graph_tokens=4096).estimate(HERE, WORK)
    assert found.ttft_s.value == pytest.approx(check.ttft_s.value)


def test_weights_and_cache_are_counted_and_never_corrected() -> None:
    raw = RAW.estimate(HERE, WORK).memory
    found = CorrectedEstimator(RAW, [check_of(RAW, more_bytes=777)]).estimate(HERE, WORK).memory
    assert replace(found, runtime_bytes=raw.runtime_bytes) == raw
    assert found.runtime_bytes == raw.runtime_bytes + 777


@given(config=CONFIGS, workload=WORKLOADS)
def test_a_check_that_finds_no_error_changes_nothing(config: DeploymentConfig, workload: Workload) -> None:
    found = CorrectedEstimator(RAW, [check_of(RAW)]).estimate(config, workload)
    assert replace(found, correction=None) == RAW.estimate(config, workload)


@given(config=CONFIGS, workload=WORKLOADS, ttft=RATIOS, tpot=RATIOS, more=st.integers(-(10**9), 10**9))
def test_other_engines_are_left_alone(
    config: DeploymentConfig, workload: Workload, ttft: float, tpot: float, more: int
) -> None:
    corrected = CorrectedEstimator(RAW, [check_of(RAW, ttft=ttft, tpot=tpot, more_bytes=more)])
    elsewhere = replace(config, engine="vllm")
    assert corrected.estimate(elsewhere, workload) == RAW.estimate(elsewhere, workload)
    assert corrected.estimate(config, workload).correction is not None


@given(configs=st.lists(CONFIGS, min_size=2, max_size=6), ttft=st.floats(0.9, 1.1), tpot=st.floats(0.9, 1.1))
def test_among_what_rests_on_one_measurement_a_check_does_not_change_which_is_faster(
    configs: list[DeploymentConfig], ttft: float, tpot: float
) -> None:
    """Within the intervals. Else what was chosen and checked would lose to whatever was not checked yet."""
    corrected = CorrectedEstimator(RAW, [check_of(RAW, ttft=ttft, tpot=tpot)])

    def order(estimator: Estimator) -> list[int]:
        times = [estimator.estimate(config, WORK).tpot_s.value for config in configs]
        return sorted(range(len(configs)), key=lambda i: (float(f"{times[i] / min(times):.9g}"), i))

    assert order(corrected) == order(RAW)


@given(
    config=CONFIGS,
    workload=WORKLOADS,
    ttft=RATIOS,
    tpot=RATIOS,
    more=st.integers(-(10**9), 10**9),
    spread=st.floats(0.0, 0.9),
)
def test_what_is_carried_over_is_bounded_and_its_interval_holds_the_raw_one(
    config: DeploymentConfig, workload: Workload, ttft: float, tpot: float, more: int, spread: float
) -> None:
    """At other workloads of what was checked by the ratio that was found, elsewhere by the interval there."""
    check = check_of(RAW, ttft=ttft, tpot=tpot, more_bytes=more, spread=spread)
    found, raw = CorrectedEstimator(RAW, [check]).estimate(config, workload), RAW.estimate(config, workload)
    for ours, theirs, ratio in ((found.ttft_s, raw.ttft_s, ttft), (found.tpot_s, raw.tpot_s, tpot)):
        assert 0 < ours.low <= ours.value <= ours.high
        moved = theirs.value * ratio
        if config != HERE:
            moved = min(max(moved, theirs.low), theirs.high)
        assert ours.value == pytest.approx(moved)
        assert ours.source == theirs.source
        if (config, workload) != (HERE, WORK):
            assert inside(theirs, ours)
    if (config, workload) != (HERE, WORK):
        ours, theirs = per_gpu_bytes(found), per_gpu_bytes(raw)
        assert ours * (1 + found.memory.relative_error) >= theirs * (1 + raw.memory.relative_error) * (1 - 1e-12)
        assert ours * (1 - found.memory.relative_error) <= theirs * (1 - raw.memory.relative_error) * (1 + 1e-12)
        if config != HERE:
            assert abs(ours - theirs) <= raw.memory.relative_error * theirs


class Anchored:
    """Roofline as if the ``run`` configurations had been measured and all further ones scaled from the nearest."""

    name = "anchored"

    def __init__(self, *run: DeploymentConfig) -> None:
        self.run = run

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        return replace(RAW.estimate(config, workload), measured_config=nearest(config, self.run))


@given(
    run=st.lists(CONFIGS, min_size=1, max_size=3, unique=True),
    checked=st.lists(CONFIGS, min_size=1, max_size=3, unique=True),
    config=CONFIGS,
    ratio=RATIOS,
    more=st.integers(-(10**9), 10**9),
)
def test_a_correction_moves_only_what_rests_on_the_same_measurement(
    run: list[DeploymentConfig],
    checked: list[DeploymentConfig],
    config: DeploymentConfig,
    ratio: float,
    more: int,
) -> None:
    base = Anchored(*run)
    checks = [check_of(base, one, ttft=ratio, tpot=ratio, more_bytes=more) for one in checked]
    raw, found = base.estimate(config, WORK), CorrectedEstimator(base, checks).estimate(config, WORK)
    if found.correction is None:
        assert found == raw
    same = [one for one in checked if base.estimate(one, WORK).measured_config == raw.measured_config]
    if raw.is_measured:
        same = [one for one in same if one == config]
    assert (found.correction is not None) == bool(same)
    if found.correction is not None:
        assert found.correction.config in same
        if found.correction.config != config:
            assert raw.tpot_s.low * (1 - 1e-9) <= found.tpot_s.value <= raw.tpot_s.high * (1 + 1e-9)


def test_what_was_measured_is_not_moved_by_the_error_of_a_scaling() -> None:
    """tp=2 was not run, and a check found it 12 times as slow as its scaled estimate: tp=1, from whose measurement
    that was scaled, was right all along. tp=4, scaled as well, may be as slow: as far as its interval goes."""
    two, four = DeploymentConfig(tp=2), DeploymentConfig(tp=4)
    base = Anchored(HERE)
    corrected = CorrectedEstimator(base, [check_of(base, two, ttft=12.0, tpot=12.0, more_bytes=10**9)])
    assert corrected.estimate(HERE, WORK) == base.estimate(HERE, WORK)
    raw, found = base.estimate(four, WORK), corrected.estimate(four, WORK)
    assert found.tpot_s.value == pytest.approx(min(raw.tpot_s.high, 12 * raw.tpot_s.value))
    checked = corrected.estimate(two, WORK)
    assert checked.tpot_s.value == pytest.approx(12 * base.estimate(two, WORK).tpot_s.value)
    assert checked.is_measured


def test_a_check_of_what_was_measured_moves_what_is_scaled_from_it_alone() -> None:
    two = DeploymentConfig(tp=2)
    base = Anchored(HERE, INT8)
    corrected = CorrectedEstimator(base, [check_of(base, ttft=1.1, tpot=1.1)])
    assert corrected.estimate(INT8, WORK) == base.estimate(INT8, WORK)
    assert corrected.estimate(replace(INT8, tp=2), WORK).correction is None
    moved = corrected.estimate(two, WORK)
    assert moved.tpot_s.value == pytest.approx(1.1 * base.estimate(two, WORK).tpot_s.value)


def test_repeats_that_scatter_more_than_the_interval_widen_it() -> None:
    raw = RAW.estimate(HERE, WORK)
    found = CorrectedEstimator(RAW, [check_of(RAW, spread=0.99)]).estimate(HERE, WORK)
    assert found.tpot_s.low == pytest.approx(0.01 * raw.tpot_s.value)
    assert found.tpot_s.high == pytest.approx(max(raw.tpot_s.high, 1.99 * raw.tpot_s.value))


def test_a_reading_that_allows_all_that_was_predicted_and_more_corrects_nothing() -> None:
    """Two tokens behind a long prompt read so: 8.7 ms a token, give or take 8.2."""
    raw = RAW.estimate(HERE, WORK)
    low, high = 0.9 * raw.tpot_s.low, 1.1 * raw.tpot_s.high
    vague = replace(check_of(RAW), tpot_s=Reading(value=(low + high) / 2, low=low, high=high, repeats=4))
    assert CorrectedEstimator(RAW, [vague]).estimate(HERE, WORK).tpot_s == raw.tpot_s
    beyond = replace(check_of(RAW), tpot_s=Reading(value=2 * high, low=high, high=3 * high, repeats=4))
    assert CorrectedEstimator(RAW, [beyond]).estimate(HERE, WORK).tpot_s.value == pytest.approx(2 * high)


@pytest.mark.parametrize("vague_alone", [False, True])
def test_one_such_reading_leaves_the_other_its_own_end(vague_alone: bool) -> None:
    """A vague measurement of a full batch takes nothing from that of one request, nor the other way round."""
    lone = replace(WORK, batch=1)

    def of(work: Workload, *, vague: bool) -> Reading:
        raw = RAW.estimate(HERE, work).tpot_s
        low, high = 0.9 * raw.low, 1.1 * raw.high
        if vague:
            return Reading(value=(low + high) / 2, low=low, high=high, repeats=4)
        return Reading(value=2 * high, low=2 * high, high=2 * high, repeats=4)

    full, alone = of(WORK, vague=not vague_alone), of(lone, vague=vague_alone)
    check = check_of(RAW)
    check = replace(
        check, tpot_s=full, single_request=SingleRequest(workload=lone, ttft_s=check.ttft_s, tpot_s=alone)
    )
    found = CorrectedEstimator(RAW, [check])
    told, untold = (WORK, lone) if vague_alone else (lone, WORK)
    measured = full if vague_alone else alone
    assert found.estimate(HERE, told).tpot_s.value == pytest.approx(measured.value)
    assert found.estimate(HERE, untold).tpot_s.value == pytest.approx(RAW.estimate(HERE, untold).tpot_s.value)


def test_less_memory_takes_nothing_from_weights_and_cache() -> None:
    raw = RAW.estimate(HERE, WORK).memory
    beside = raw.runtime_bytes + raw.activation_bytes
    half = CorrectedEstimator(RAW, [check_of(RAW, more_bytes=-raw.runtime_bytes - 10)]).estimate(HERE, WORK).memory
    assert (half.runtime_bytes, half.activation_bytes) == (0, raw.activation_bytes - 10)
    less = CorrectedEstimator(RAW, [check_of(RAW, more_bytes=-beside - 10)]).estimate(HERE, WORK).memory
    assert (less.runtime_bytes, less.activation_bytes) == (0, 0)
    assert less.layer_weight_bytes == raw.layer_weight_bytes


def test_the_nearest_check_is_carried_over_and_its_own_comes_first() -> None:
    two, four = DeploymentConfig(tp=2), DeploymentConfig(tp=4, pp=2)
    corrected = CorrectedEstimator(RAW, [check_of(RAW, ttft=2.0), check_of(RAW, four, ttft=3.0)])
    for config, checked in ((HERE, HERE), (two, HERE), (replace(four, pp=4), four), (four, four), (INT8, HERE)):
        correction = corrected.estimate(config, WORK).correction
        assert correction is not None
        assert (correction.config, correction.exact) == (checked, config == checked)


def test_of_two_checks_of_one_configuration_the_later_counts_whatever_the_order() -> None:
    checks = [check_of(RAW, ttft=2.0, at="2026-11-20"), check_of(RAW, ttft=5.0, at="2026-11-21")]
    for given_ in (checks, checks[::-1]):
        found = CorrectedEstimator(RAW, given_).estimate(HERE, WORK)
        assert found.ttft_s.value == pytest.approx(5 * RAW.estimate(HERE, WORK).ttft_s.value)


@pytest.mark.parametrize("batch", [WORK.batch, 1])
@pytest.mark.parametrize(("checked_longest", "longest"), [(0, 200), (200, 0), (200, 300), (200, 200), (0, 0)])
def test_times_are_exact_whatever_the_longest_request_and_memory_is_where_that_is_alike(
    checked_longest: int, longest: int, batch: int
) -> None:
    """Room for longer requests moves no time of those that were run; the memory's interval it widens."""
    room = replace(WORK, longest_tokens=checked_longest)
    whole = check_of(RAW, HERE, room, ttft=1.5, tpot=1.6, more_bytes=5000)
    one = replace(WORK, batch=1)
    ttft_s, tpot_s = whole.ttft_s, whole.tpot_s
    check = replace(
        whole, single_request=SingleRequest(workload=replace(room, batch=1), ttft_s=ttft_s, tpot_s=tpot_s)
    )
    asked = replace(WORK if batch > 1 else one, longest_tokens=longest)
    found, raw = CorrectedEstimator(RAW, [check]).estimate(HERE, asked), RAW.estimate(HERE, asked)
    assert found.correction is not None
    assert found.correction.exact
    assert found.ttft_s.value == pytest.approx(ttft_s.value)
    assert tpot_s is not None
    assert found.tpot_s.value == pytest.approx(tpot_s.value)
    assert found.tpot_s.low == pytest.approx(raw.tpot_s.low * found.tpot_s.value / raw.tpot_s.value)
    same_room = asked == room
    assert (found.memory.relative_error == raw.memory.relative_error) == same_room
    longer = replace(asked, output_tokens=WORK.output_tokens + 1)
    beside = CorrectedEstimator(RAW, [check]).estimate(HERE, longer).correction
    assert beside is not None
    assert not beside.exact


def test_what_was_not_measured_is_not_corrected() -> None:
    check = replace(check_of(RAW, ttft=2.0), tpot_s=None, memory_bytes_per_gpu=None)
    found, raw = CorrectedEstimator(RAW, [check]).estimate(HERE, WORK), RAW.estimate(HERE, WORK)
    assert (found.tpot_s, found.memory) == (raw.tpot_s, raw.memory)
    assert found.correction is not None
    assert (found.correction.tpot_log_ratio, found.correction.memory_bytes) == (0.0, 0)


def test_memory_is_compared_for_what_the_worker_was_launched_for_times_for_what_was_run() -> None:
    """A check whose answers were cut to fit its minute ran in a worker with room for the whole ones."""
    whole = replace(WORK, output_tokens=512)
    check = replace(check_of(RAW, HERE, whole, more_bytes=5000), workload=WORK)
    found = CorrectedEstimator(RAW, [check]).estimate(HERE, whole)
    assert found.memory == replace(
        RAW.estimate(HERE, whole).memory, runtime_bytes=RAW.estimate(HERE, whole).memory.runtime_bytes + 5000
    )
    assert found.correction is not None
    assert not found.correction.exact
    assert check.tpot_s is not None
    run = CorrectedEstimator(RAW, [check]).estimate(HERE, WORK)
    assert run.tpot_s.value == pytest.approx(check.tpot_s.value)


def test_a_better_profile_is_not_corrected_by_the_error_of_the_old_one() -> None:
    """The measurement is kept, not its ratio: whatever is predicted anew, what was checked is as measured."""
    check = check_of(RAW, ttft=2.0, tpot=2.0, more_bytes=10**8)
    better = RooflineEstimator(SPEC, replace(CPU, memory_bytes_per_s=CPU.memory_bytes_per_s / 2))
    assert better.estimate(HERE, WORK).tpot_s.value != RAW.estimate(HERE, WORK).tpot_s.value
    found = CorrectedEstimator(better, [check]).estimate(HERE, WORK)
    assert check.tpot_s is not None
    assert found.tpot_s.value == pytest.approx(check.tpot_s.value)


@pytest.mark.parametrize(
    "numbers", [(0.0, 0.0, 0.0), (2.0, 1.0, 3.0), (1.0, 2.0, 1.5), (1.0, 1.0, math.inf), (math.nan,) * 3]
)
def test_a_reading_of_which_no_ratio_can_be_made_is_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="a reading needs"):
        Reading(low=numbers[0], value=numbers[1], high=numbers[2], repeats=1)


def test_a_reader_is_told_of_every_check(golden: Golden) -> None:
    checks = [check_of(RAW, ttft=2.0, tpot=0.5, more_bytes=2**20), check_of(RAW, INT8, at="2026-11-22")]
    golden("fingerprint", CorrectedEstimator(RAW, checks).warnings)


def with_alone(check: Verification, *, ttft: float, tpot: float) -> Verification:
    """``check``, made with several slots, and one request alone that takes so many times as predicted."""
    lone = replace(check.workload, batch=1)
    predicted = RAW.estimate(check.config, lone)
    found = SingleRequest(
        workload=lone,
        ttft_s=reading(predicted.ttft_s.value * ttft, 0.01),
        tpot_s=reading(predicted.tpot_s.value * tpot, 0.01),
    )
    return replace(check, single_request=found)


@given(
    full=st.tuples(st.floats(0.3, 3.0), st.floats(0.3, 3.0)),
    alone=st.tuples(st.floats(0.3, 3.0), st.floats(0.3, 3.0)),
)
def test_between_one_request_and_the_whole_batch_the_ratio_goes_evenly(
    full: tuple[float, float], alone: tuple[float, float]
) -> None:
    work = replace(WORK, batch=16)
    check = with_alone(check_of(RAW, workload=work, ttft=full[0], tpot=full[1]), ttft=alone[0], tpot=alone[1])
    corrected = CorrectedEstimator(RAW, [check])
    for batch, along in ((1, 0.0), (2, 0.25), (4, 0.5), (16, 1.0), (32, 1.0)):
        here = replace(work, batch=batch)
        found, raw = corrected.estimate(HERE, here), RAW.estimate(HERE, here)
        for index, metric in enumerate(("ttft_s", "tpot_s")):
            value, before = getattr(found, metric), getattr(raw, metric)
            ratio = alone[index] ** (1 - along) * full[index] ** along
            assert value.value == pytest.approx(before.value * ratio)
            assert value.low <= value.value <= value.high
            if batch in (2, 4, 32):
                assert inside(before, value), "carried over, so that the uncorrected interval is held too"
        assert found.correction is not None
        assert found.correction.exact == (batch in (1, 16))


def test_a_check_of_the_batch_alone_has_one_ratio_for_all() -> None:
    work = replace(WORK, batch=16)
    corrected = CorrectedEstimator(RAW, [check_of(RAW, workload=work, ttft=2.0, tpot=3.0)])
    for batch in (1, 4, 16):
        here = replace(work, batch=batch)
        assert corrected.estimate(HERE, here).tpot_s.value == pytest.approx(
            3 * RAW.estimate(HERE, here).tpot_s.value
        )


def test_a_check_from_before_has_nothing_alone() -> None:
    """The JSON is as it lies in the state of an older version."""
    kept = json.loads(to_json(check_of(RAW)))
    del kept["single_request"]
    assert from_json(json.dumps(kept), Verification) == check_of(RAW)
