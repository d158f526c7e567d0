"""The default estimator: measured where it reaches, scaled by the roofline where not."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.fingerprinted import FingerprintedEstimator, distance, nearest, scaled
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.profile import ProfilePlan
from tests.fingerprint.estimator_conformance import EstimatorConformance
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, Truth, llama, take_profile
from tests.golden_words import Golden

BITS16, INT8, INT4 = WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.INT4
PLAN = ProfilePlan(budget_s=1e6, max_repeats=5, weights=(BITS16, INT8))
LARGEST = Workload(4, 512, 17)

CONFIGS = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 8),
    weights=st.sampled_from(WeightFormat),
    kv=st.sampled_from(KvFormat),
    pruning=st.sampled_from(Pruning),
)


def estimator_of(profile):
    return FingerprintedEstimator(profile, RooflineEstimator(profile.spec, CPU))


@pytest.fixture(scope="module")
def quiet():
    return take_profile(SyntheticMachine(), PLAN)


@pytest.fixture(scope="module")
def noisy():
    return take_profile(SyntheticMachine(noise=0.1, seed=3), PLAN)


class TestFingerprinted(EstimatorConformance):
    @pytest.fixture
    def estimator(self, quiet):
        return estimator_of(quiet)


class TestFingerprintedUnderNoise(EstimatorConformance):
    """Small effects, large noise, and configurations that can only be scaled."""

    configs = (
        DeploymentConfig(tp=4, pp=2, weights=INT4),
        DeploymentConfig(pruning=Pruning.WANDA, kv=KvFormat.FP8),
        DeploymentConfig(pp=5),
        DeploymentConfig(tp=8, weights=INT8),
    )

    @pytest.fixture
    def estimator(self):
        truth = Truth(layer_first_s=(1e-6, 0.0, 0.0), layer_next_s=(1e-6, 0.0, 0.0))
        return estimator_of(take_profile(SyntheticMachine(truth=truth, noise=0.2, seed=1), PLAN))


class TestNearest:
    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            pytest.param({"tp": 4}, {"tp": 2}, id="more-tp-from-the-widest"),
            pytest.param({"pp": 4}, {"pp": 2}, id="more-pp-from-the-deepest"),
            pytest.param({"tp": 2, "weights": INT8}, {"weights": INT8}, id="format-before-degree"),
            pytest.param({"tp": 2, "weights": INT4}, {"tp": 2}, id="same-degree-when-no-format-fits"),
            pytest.param({"kv": KvFormat.INT8, "pp": 2}, {"pp": 2}, id="other-kv"),
            pytest.param({"tp": 2, "pp": 2}, {"pp": 2}, id="tie-goes-to-the-smaller"),
        ],
    )
    def test_cases(self, asked, expected):
        measured = [
            DeploymentConfig(),
            DeploymentConfig(tp=2),
            DeploymentConfig(pp=2),
            DeploymentConfig(weights=INT8),
        ]
        assert nearest(DeploymentConfig(**asked), measured) == DeploymentConfig(**expected)
        assert nearest(DeploymentConfig(**asked), measured[::-1]) == DeploymentConfig(**expected)

    @given(CONFIGS, CONFIGS, CONFIGS)
    def test_distance_is_a_metric(self, a, b, c):
        assert distance(a, b) == distance(b, a)
        assert (distance(a, b) == 0) == (a == b)
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9

    @given(CONFIGS, st.lists(CONFIGS, min_size=1))
    def test_a_measured_configuration_is_its_own_nearest(self, config, others):
        assert nearest(config, [*others, config]) == config

    def test_of_nothing_there_is_none(self, golden: Golden):
        with golden.raises("fingerprint", NotMeasuredError):
            nearest(DeploymentConfig(), [])


class TestScaled:
    def test_the_ratio_moves_the_value_and_both_intervals_count(self):
        """4 x 3 / 2 = 6; a factor of 2 and a factor of 2, independent, are a factor of 2 ** sqrt(2)."""
        measured = Quantity(4.0, 2.0, 8.0, Source.EXTRAPOLATED)
        asked = Quantity(3.0, 1.5, 6.0, Source.ROOFLINE)
        there = Quantity(2.0, 0.1, 9.0, Source.ROOFLINE)
        result = scaled(measured, asked, there)
        assert (result.value, result.source) == (6.0, Source.SCALED)
        assert result.low == pytest.approx(6 / 2 ** math.sqrt(2))
        assert result.high == pytest.approx(6 * 2 ** math.sqrt(2))

    def test_a_measurement_that_may_be_zero_stays_so(self):
        asked = Quantity(3.0, 1.5, 6.0, Source.ROOFLINE)
        assert scaled(Quantity(4.0, 0.0, 8.0, Source.EXTRAPOLATED), asked, asked).low == 0.0

    @given(*[st.tuples(*[st.floats(1e-6, 1e3)] * 3).map(sorted)] * 2)
    def test_scaling_never_narrows(self, one, two):
        measured, asked = (Quantity(mid, low, high, Source.ROOFLINE) for low, mid, high in (one, two))
        result = scaled(measured, asked, asked)
        assert result.low <= measured.low * (1 + 1e-9)
        assert result.high >= measured.high * (1 - 1e-9)


class TestSources:
    def test_no_number_of_a_ranking_is_the_roofline_s_alone(self, quiet):
        estimator = estimator_of(quiet)
        for config in (
            DeploymentConfig(tp=tp, pp=pp, weights=weights, kv=kv)
            for tp in (1, 2, 4, 8)
            for pp in (1, 2, 3, 8)
            for weights in WeightFormat
            for kv in KvFormat
        ):
            estimate = estimator.estimate(config, LARGEST)
            sources = {estimate.memory.source, estimate.ttft_s.source, estimate.tpot_s.source}
            assert sources <= {Source.EXTRAPOLATED, Source.SCALED}

    @pytest.mark.parametrize(
        ("config", "source"),
        [
            (DeploymentConfig(), Source.EXTRAPOLATED),
            (DeploymentConfig(tp=2, weights=INT8), Source.EXTRAPOLATED),
            (DeploymentConfig(pp=2), Source.EXTRAPOLATED),
            (DeploymentConfig(tp=4), Source.SCALED),
            (DeploymentConfig(tp=2, pp=2), Source.SCALED),
            (DeploymentConfig(weights=INT4), Source.SCALED),
            (DeploymentConfig(kv=KvFormat.INT8), Source.SCALED),
            (DeploymentConfig(pruning=Pruning.WANDA), Source.SCALED),
        ],
    )
    def test_latency_is_scaled_exactly_where_no_fingerprint_ran(self, quiet, config, source):
        estimate = estimator_of(quiet).estimate(config, LARGEST)
        assert estimate.ttft_s.source is estimate.tpot_s.source is source

    def test_a_scaled_latency_is_the_nearest_measurement_times_the_roofline_s_ratio(self, quiet):
        roofline = RooflineEstimator(quiet.spec, CPU)
        estimator = FingerprintedEstimator(quiet, roofline)
        asked, near = DeploymentConfig(tp=4), DeploymentConfig(tp=2)
        ratio = roofline.ttft_s(asked, LARGEST) / roofline.ttft_s(near, LARGEST)
        measured = estimator.estimate(near, LARGEST).ttft_s
        found = estimator.estimate(asked, LARGEST).ttft_s
        assert found.value == pytest.approx(measured.value * ratio)
        assert found.high / found.value > measured.high / measured.value

    def test_a_workload_out_of_reach_is_scaled_from_the_edge(self, quiet):
        roofline = RooflineEstimator(quiet.spec, CPU)
        estimator = FingerprintedEstimator(quiet, roofline)
        far, edge = Workload(64, 512, 17), LARGEST
        found = estimator.estimate(DeploymentConfig(), far).tpot_s
        ratio = roofline.tpot_s(DeploymentConfig(), far) / roofline.tpot_s(DeploymentConfig(), edge)
        assert found.source is Source.SCALED
        assert found.value == pytest.approx(estimator.estimate(DeploymentConfig(), edge).tpot_s.value * ratio)

    def test_memory_of_an_unmeasured_format_is_scaled_at_its_own_degree(self, quiet):
        """int4 at tp = 4: M2's 16bit at tp = 4 (never run, but solved) times the roofline's int4 over 16bit."""
        roofline = RooflineEstimator(quiet.spec, CPU)
        estimator = FingerprintedEstimator(quiet, roofline)
        asked, base = DeploymentConfig(tp=4, weights=INT4), DeploymentConfig(tp=4)
        found, there = (estimator.estimate(config, LARGEST).memory for config in (asked, base))
        ratio = (
            roofline.estimate(asked, LARGEST).memory.layer_weight_bytes
            / roofline.estimate(base, LARGEST).memory.layer_weight_bytes
        )
        assert found.layer_weight_bytes == pytest.approx(there.layer_weight_bytes * ratio, abs=1)
        assert (found.source, there.source) == (Source.SCALED, Source.EXTRAPOLATED)
        assert found.relative_error > there.relative_error

    def test_one_device_still_ranks_them_all(self):
        estimator = estimator_of(take_profile(SyntheticMachine(num_devices=1), PLAN))
        for config in (DeploymentConfig(tp=2), DeploymentConfig(pp=4), DeploymentConfig(tp=2, pp=2, weights=INT4)):
            estimate = estimator.estimate(config, LARGEST)
            assert estimate.memory.source is estimate.ttft_s.source is Source.SCALED
            assert (estimate.memory.tp, estimate.memory.pp) == (config.tp, config.pp)

    def test_another_engine_is_refused(self, quiet, golden: Golden):
        with golden.raises("fingerprint", NotMeasuredError):
            estimator_of(quiet).estimate(DeploymentConfig(engine="vllm"), LARGEST)

    def test_an_empty_profile_is_refused(self, quiet):
        with pytest.raises(NotMeasuredError, match="profile"):
            estimator_of(replace(quiet, timing=(), memory=())).estimate(DeploymentConfig(), LARGEST)

    @pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6])
    def test_small_models_work(self, num_layers):
        truth = Truth()
        estimator = estimator_of(take_profile(SyntheticMachine(spec=llama(num_layers), truth=truth), PLAN))
        estimate = estimator.estimate(DeploymentConfig(), LARGEST)
        expected = Source.MEASURED if num_layers <= 2 else Source.EXTRAPOLATED
        assert estimate.ttft_s.source is expected
        assert estimate.ttft_s.value == pytest.approx(truth.ttft_s(num_layers, 4, 512), rel=1e-6)
        if num_layers > 1:
            assert estimator.estimate(DeploymentConfig(pp=2), LARGEST).memory.pp_buffer_bytes > 0


class TestFacts:
    def test_a_quiet_profile_has_nothing_to_warn_of(self, quiet):
        estimator = estimator_of(quiet)
        assert estimator.warnings == ()
        assert len(estimator.layer_effects) == 6

    def test_layers_below_resolution_are_named(self, golden: Golden):
        truth = Truth(layer_first_s=(1e-7, 0.0, 0.0), layer_next_s=(1e-7, 0.0, 0.0))
        profile = take_profile(SyntheticMachine(truth=truth, noise=0.1, num_devices=1), PLAN)
        warnings = estimator_of(profile).warnings
        golden("fingerprint", warnings[0])
        golden("fingerprint", warnings)

    def test_layers_below_zero_are_not_called_hidden(self, golden: Golden):
        """A step of two layers is faster than one of one: the runs of the two depths were not alike."""
        truth = Truth(layer_next_s=(-1e-4, 0.0, 0.0))
        estimator = estimator_of(take_profile(SyntheticMachine(truth=truth), PLAN))
        assert estimator.warnings
        assert {part for effect in estimator.layer_effects for part, _ in effect.below_zero} == {"a step"}
        assert not any(effect.below_resolution for effect in estimator.layer_effects)
        for warning in estimator.warnings:
            golden("fingerprint", warning)
            assert "prefill" not in warning
            assert "tell it from zero" not in warning

    def test_power_is_what_was_read_or_unknown(self, quiet):
        assert estimator_of(quiet).estimate(DeploymentConfig(), LARGEST).power_w_per_gpu is None

        def powered(point):
            return replace(point, runs=tuple(replace(run, power_w=100.0 + i) for i, run in enumerate(point.runs)))

        estimator = estimator_of(replace(quiet, timing=tuple(powered(point) for point in quiet.timing)))
        power = estimator.estimate(DeploymentConfig(), LARGEST).power_w_per_gpu
        assert power.value == pytest.approx(102.0)
        assert 100.0 <= power.low < power.value < power.high <= 104.0


class TestDamagedProfiles:
    """A profile damaged by a budget, a busy machine or a wrong clock gives an estimate in order, or a refusal."""

    def test_two_depths_at_different_points_tell_no_layer_and_break_nothing(self, noisy):
        """A single layer ran at batch 1 alone, two at batch 4 alone."""
        kept = tuple(p for p in noisy.timing if (p.num_layers, p.batch) in {(1, 1), (2, 4)} and p.tp * p.pp == 1)
        estimator = estimator_of(replace(noisy, timing=kept))
        assert {p.num_layers for p in kept} == {1, 2}
        assert estimator.layer_effects == ()
        assert not any("below resolution" in warning for warning in estimator.warnings)

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        config=CONFIGS,
        workload=st.builds(
            Workload, st.sampled_from([1, 3, 100]), st.sampled_from([1, 512, 9000]), st.integers(1, 3000)
        ),
    )
    def test_any_remains_give_ordered_numbers_or_a_refusal(self, noisy, seed, config, workload):
        random = Random(seed)

        def damaged(point):
            device, host = random.choice([(1, 1), (1, 1), (1, 1), (-1, 1), (1, -100), (0, 0), (1e6, 1)])
            kept = point.runs[: random.randint(1, 5)]
            return replace(
                point, runs=tuple(replace(r, device_s=device * r.device_s, host_s=host * r.host_s) for r in kept)
            )

        timing = tuple(damaged(p) for p in noisy.timing if random.random() < 0.6)
        memory = tuple(p for p in noisy.memory if random.random() < 0.8)
        try:
            estimator = estimator_of(replace(noisy, timing=timing, memory=memory))
            found = estimator.estimate(config, workload)
        except (NotMeasuredError, ConfigError):
            return
        assert isinstance(estimator.warnings, tuple)
        for quantity in (found.ttft_s, found.tpot_s, found.e2e_s):
            assert 0 <= quantity.low <= quantity.value <= quantity.high
            assert 0 < quantity.value < math.inf
        assert 0 <= found.memory.relative_error < math.inf
        assert (
            min(found.memory.layer_weight_bytes, found.memory.first_stage_bytes, found.memory.runtime_bytes) >= 0
        )
