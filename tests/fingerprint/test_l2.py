"""Latency from fingerprints, against machines whose true h and o are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.l2 import L2, MeasuredKey
from fingerprint.measurements import RunReading
from fingerprint.profile import ProfilePlan, default_plan
from tests.fingerprint.synthetic_machine import SyntheticMachine, Truth, llama, take_profile
from tests.golden_words import Golden

INT8, BITS16 = WeightFormat.INT8, WeightFormat.BITS16
PLAN = ProfilePlan(budget_s=1e6, max_repeats=5)
LARGEST = Workload(4, 512, 17)
BASE = MeasuredKey(1, 1, BITS16, KvFormat.BITS16)
N = 32

positive = st.floats(1e-6, 1e-2)


def true_s(truth, config, workload):
    where = {"tp": config.tp, "pp": config.pp, "int8": config.weights == INT8}
    b, n, m = workload.batch, workload.input_tokens, workload.output_tokens
    return truth.ttft_s(N, b, n, **where), truth.tpot_s(N, b, n, m, **where)


class TestWithoutNoise:
    @pytest.mark.parametrize(
        "workload", [LARGEST, Workload(1, 128, 1), Workload(2, 200, 30), Workload(8, 800, 300)]
    )
    @pytest.mark.parametrize(
        "config",
        [DeploymentConfig(), DeploymentConfig(tp=2), DeploymentConfig(pp=2), DeploymentConfig(weights=INT8)],
    )
    def test_the_full_model_is_recovered(self, config, workload):
        truth = Truth()
        plan = replace(PLAN, weights=(BITS16, INT8))
        latency = L2(take_profile(SyntheticMachine(truth=truth), plan)).latency(config, workload)
        ttft_s, tpot_s = true_s(truth, config, workload)
        assert latency.ttft_s.value == pytest.approx(ttft_s, rel=1e-6)
        assert latency.tpot_s.value == pytest.approx(tpot_s, rel=1e-6)
        assert latency.ttft_s.source is latency.tpot_s.source is Source.EXTRAPOLATED

    def test_one_layer_s_time_is_recovered(self):
        """At batch 4, 512 in: 2e-4 + 4e-6 x 2,048 + 2e-9 x 2,048 x 512, and a step at 520.5 cached tokens."""
        effect = L2(take_profile(SyntheticMachine(), PLAN)).fits[BASE].layer_effect()
        assert (effect.batch, effect.input_tokens) == (4, 512)
        assert effect.first_s.value == pytest.approx(2e-4 + 4e-6 * 2048 + 2e-9 * 2048 * 512)
        assert effect.next_s.value == pytest.approx(3e-4 + 2e-5 * 4 + 5e-8 * 4 * 520.5)
        assert not effect.below_resolution

    @pytest.mark.parametrize("pp", [3, 4, 8])
    def test_more_stages_at_batch_one_add_the_measured_hand_over(self, pp):
        truth, workload = Truth(handover_s=(2e-3, 1e-6)), Workload(1, 512, 17)
        config = DeploymentConfig(pp=pp)
        latency = L2(take_profile(SyntheticMachine(truth=truth), PLAN)).latency(config, workload)
        ttft_s, tpot_s = true_s(truth, config, workload)
        assert latency.ttft_s.value == pytest.approx(ttft_s, rel=1e-6)
        assert latency.tpot_s.value == pytest.approx(tpot_s, rel=1e-6)

    @settings(max_examples=40, deadline=None)
    @given(
        layer_first=st.tuples(positive, st.floats(0, 1e-4), st.floats(0, 1e-7)),
        layer_next=st.tuples(positive, st.floats(0, 1e-4), st.floats(0, 1e-6)),
        other_next=st.tuples(positive, st.floats(0, 1e-3)),
        host=st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)),
        workload=st.builds(Workload, st.integers(1, 8), st.integers(72, 960), st.integers(1, 150)),
    )
    def test_any_machine_of_this_kind_is_recovered(self, layer_first, layer_next, other_next, host, workload):
        truth = Truth(layer_first_s=layer_first, layer_next_s=layer_next, other_next_s=other_next, host_s=host)
        plan = replace(PLAN, degrees=((1, 1),), min_repeats=2, max_repeats=2)
        fits = L2(take_profile(SyntheticMachine(truth=truth), plan))
        latency = fits.latency(DeploymentConfig(), workload)
        ttft_s, tpot_s = true_s(truth, DeploymentConfig(), workload)
        assert latency.ttft_s.value == pytest.approx(ttft_s, rel=1e-4)
        assert latency.tpot_s.value == pytest.approx(tpot_s, rel=1e-4)


class TestIntervals:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("noise", "repeats", "config", "workload"),
        [
            pytest.param(0.02, 5, DeploymentConfig(), LARGEST, id="2%"),
            pytest.param(0.05, 3, DeploymentConfig(), LARGEST, id="5%-three-runs"),
            pytest.param(0.1, 8, DeploymentConfig(), LARGEST, id="10%"),
            pytest.param(0.05, 5, DeploymentConfig(pp=2), LARGEST, id="two-stages"),
            pytest.param(0.05, 5, DeploymentConfig(), Workload(2, 300, 40), id="between-points"),
        ],
    )
    def test_ninety_percent_intervals_hold_the_truth_about_that_often(self, noise, repeats, config, workload):
        truth = Truth()
        plan = replace(PLAN, degrees=((config.tp, config.pp),), min_repeats=repeats, max_repeats=repeats)
        true, held = true_s(truth, config, workload), []
        for seed in range(200):
            machine = SyntheticMachine(truth=truth, noise=noise, seed=seed)
            latency = L2(take_profile(machine, plan)).latency(config, workload)
            quantities = (latency.ttft_s, latency.tpot_s)
            held.append([q.low <= t <= q.high for q, t in zip(quantities, true, strict=True)])
        for coverage in np.mean(held, axis=0):
            assert 0.82 <= coverage <= 0.98

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("load_noise", "noise", "repeats"),
        [
            pytest.param(0.1, 0.02, 4, id="loads-differ-more-than-runs"),
            pytest.param(0.2, 0.05, 6, id="a-restless-machine"),
        ],
    )
    def test_they_hold_one_load_of_the_full_model_where_loads_differ(self, load_noise, noise, repeats):
        """Repeats do not show what all runs of a load share: from them alone, a TTFT's would hold 3 in 4."""
        truth = Truth()
        plan = replace(PLAN, degrees=((1, 1),), min_repeats=repeats, max_repeats=repeats)
        true, held, blind = true_s(truth, DeploymentConfig(), LARGEST), [], []
        for seed in range(120):
            machine = SyntheticMachine(truth=truth, noise=noise, load_noise=load_noise, seed=seed)
            found = take_profile(machine, plan)
            served = [t * machine.level() for t in true]
            unknown = replace(found, timing=tuple(replace(p, loads=()) for p in found.timing))
            for profile, results in ((found, held), (unknown, blind)):
                latency = L2(profile).latency(DeploymentConfig(), LARGEST)
                both = zip((latency.ttft_s, latency.tpot_s), served, strict=True)
                results.append([q.low <= t <= q.high for q, t in both])
        assert np.mean(held, axis=0) == pytest.approx([0.92, 0.92], abs=0.07)
        assert np.mean(blind, axis=0)[0] < 0.8

    def test_late_runs_do_not_carry_the_estimate_away(self):
        """The mean of the estimates stays within 10% of the truth, though a run in twenty takes three times as
        long.
        """
        truth, plan = Truth(), replace(PLAN, degrees=((1, 1),), min_repeats=9, max_repeats=9)
        found = [
            L2(take_profile(SyntheticMachine(truth=truth, noise=0.02, outliers=0.05, seed=seed), plan))
            .latency(DeploymentConfig(), LARGEST)
            .ttft_s.value
            for seed in range(40)
        ]
        assert np.median(found) == pytest.approx(true_s(truth, DeploymentConfig(), LARGEST)[0], rel=0.1)

    def test_more_noise_is_a_wider_interval(self):
        def width(noise):
            profile = take_profile(SyntheticMachine(noise=noise, seed=3), PLAN)
            quantity = L2(profile).latency(DeploymentConfig(), LARGEST).tpot_s
            return (quantity.high - quantity.low) / quantity.value

        assert width(0.002) < width(0.02) < width(0.2)

    def test_deeper_models_are_predicted_less_surely(self):
        def width(num_layers):
            profile = take_profile(SyntheticMachine(spec=llama(num_layers), noise=0.03, seed=1), PLAN)
            quantity = L2(profile).latency(DeploymentConfig(), LARGEST).ttft_s
            return quantity.high - quantity.value

        assert width(8) < width(32) < width(80)

    def test_times_that_are_not_of_this_form_show_as_misfit(self):
        """A machine whose prefill jumps at one point: residuals beyond the runs' spread widen the interval."""
        profile = take_profile(SyntheticMachine(noise=0.002, seed=1), replace(PLAN, batches=(1, 2, 4)))

        def slower(point):
            if (point.batch, point.input_tokens) != (2, 512):
                return point
            runs = tuple(replace(run, device_s=2 * run.device_s) for run in point.runs)
            return replace(point, runs=runs)

        bent = replace(profile, timing=tuple(slower(point) for point in profile.timing))
        straight_fit, bent_fit = L2(profile).fits[BASE], L2(bent).fits[BASE]
        assert bent_fit.misfit > 10 * straight_fit.misfit
        straight, wide = (fit.latency(LARGEST).ttft_s for fit in (straight_fit, bent_fit))
        assert wide.high - wide.low > 10 * (straight.high - straight.low)

    def test_a_point_that_was_run_once_takes_its_spread_from_the_others(self):
        profile = take_profile(SyntheticMachine(noise=0.05, seed=2), PLAN)
        once = [replace(p, runs=p.runs[:1]) if i % 3 == 0 else p for i, p in enumerate(profile.timing)]
        alone = [replace(p, runs=p.runs[:1]) for p in profile.timing]
        full, part, none = (
            L2(replace(profile, timing=tuple(timing))).latency(DeploymentConfig(), LARGEST).ttft_s
            for timing in (profile.timing, once, alone)
        )
        assert full.high - full.low < part.high - part.low < none.high - none.low < float("inf")

    def test_a_layer_cheaper_than_the_noise_is_below_resolution(self):
        truth = Truth(layer_first_s=(1e-7, 0.0, 0.0), layer_next_s=(1e-7, 0.0, 0.0))
        fits = L2(take_profile(SyntheticMachine(truth=truth, noise=0.1, seed=5), PLAN))
        assert [effect.key for effect in fits.layer_effects if effect.below_resolution] == list(fits.fits)
        latency = fits.latency(DeploymentConfig(), LARGEST)
        ttft_s, tpot_s = true_s(truth, DeploymentConfig(), LARGEST)
        assert latency.ttft_s.low <= ttft_s <= latency.ttft_s.high
        assert latency.tpot_s.low <= tpot_s <= latency.tpot_s.high

    def test_a_full_model_is_never_faster_than_its_fingerprint(self):
        truth = Truth(layer_first_s=(1e-7, 0.0, 0.0), layer_next_s=(1e-7, 0.0, 0.0))
        for seed in range(10):
            latency = L2(take_profile(SyntheticMachine(truth=truth, noise=0.1, seed=seed), PLAN)).latency(
                DeploymentConfig(), LARGEST
            )
            assert latency.ttft_s.low > 0.5 * truth.first_s(2, 4, 512)


class TestHost:
    def test_an_overlapped_host_hides_behind_a_deep_model(self):
        """Per step the host needs 5 ms. One or two layers wait for it; 32 layers take longer and hide it."""
        truth = Truth(host_s=(0.0, 0.0))
        profile = take_profile(SyntheticMachine(truth=truth), replace(PLAN, degrees=((1, 1),)))

        def overlapped(point):
            k, b, n, m = point.num_layers, point.batch, point.input_tokens, point.output_tokens
            steps = m - 1
            waits = steps * max(0.0, 5e-3 - truth.next_s(k, b, n + m / 2))
            runs = tuple(
                RunReading(e2e_s=r.device_s + waits, device_s=r.device_s, host_s=waits) for r in point.runs
            )
            return replace(point, runs=runs)

        seen = replace(profile, timing=tuple(overlapped(point) for point in profile.timing))
        tpot_s = L2(seen).latency(DeploymentConfig(), LARGEST).tpot_s.value
        assert tpot_s == pytest.approx(truth.next_s(N, 4, 520.5), rel=1e-3)
        assert tpot_s > 5e-3

    def test_a_noisy_host_is_not_multiplied_by_the_depth(self):
        truth = Truth(host_s=(0.05, 0.01))
        profile = take_profile(SyntheticMachine(truth=truth, noise=0.0), PLAN)
        random = np.random.default_rng(0)

        def jittery(point):
            runs = tuple(
                replace(run, host_s=run.host_s * (1 + 0.1 * random.standard_normal())) for run in point.runs
            )
            return replace(point, runs=runs)

        seen = replace(profile, timing=tuple(jittery(point) for point in profile.timing))
        tpot = L2(seen).latency(DeploymentConfig(), LARGEST).tpot_s
        assert tpot.value == pytest.approx(true_s(truth, DeploymentConfig(), LARGEST)[1], rel=0.1)


class TestReach:
    @pytest.mark.parametrize(
        "config",
        [
            DeploymentConfig(weights=WeightFormat.INT4),
            DeploymentConfig(kv=KvFormat.INT8),
            DeploymentConfig(tp=4),
            DeploymentConfig(tp=4, pp=2),
            DeploymentConfig(pruning=Pruning.WANDA),
        ],
    )
    def test_what_was_not_run_is_refused(self, config):
        with pytest.raises(NotMeasuredError):
            L2(take_profile(SyntheticMachine(), PLAN)).latency(config, Workload(1, 512, 17))

    @pytest.mark.parametrize(
        "workload",
        [
            Workload(9, 512, 17),
            Workload(1, 63, 17),
            Workload(1, 63, 17, longest_tokens=90),
            Workload(1, 512, 2000),
        ],
    )
    def test_more_than_a_factor_of_two_outside_is_refused(self, workload, golden: Golden):
        fits = L2(take_profile(SyntheticMachine(), PLAN))
        with golden.raises("fingerprint", NotMeasuredError):
            fits.latency(DeploymentConfig(), workload)
        fit = fits.fits[BASE]
        assert not fit.reaches(workload)
        assert fit.reaches(fit.nearest_workload(workload))

    def test_more_stages_than_measured_are_not_assumed_at_larger_batches(self):
        fits = L2(take_profile(SyntheticMachine(), PLAN))
        with pytest.raises(NotMeasuredError):
            fits.latency(DeploymentConfig(pp=4), LARGEST)

    def test_one_batch_tells_nothing_of_another(self):
        fit = L2(take_profile(SyntheticMachine(), replace(PLAN, batches=(1,)))).fits[BASE]
        assert fit.reaches(Workload(1, 512, 17))
        assert not fit.reaches(Workload(2, 512, 17))

    def test_a_full_model_that_was_run_is_measured(self):
        """Two layers are the whole model here: equation 1 on its own runs, noise and all."""
        machine = SyntheticMachine(spec=llama(2), noise=0.05, seed=1)
        profile = take_profile(machine, PLAN)
        latency = L2(profile).latency(DeploymentConfig(), LARGEST)
        short, long = (
            next(
                p
                for p in profile.timing
                if (p.tp, p.pp, p.num_layers, p.batch, p.input_tokens, p.output_tokens) == (1, 1, 2, 4, 512, m)
            )
            for m in (1, 17)
        )
        middle = [np.mean(sorted(run.e2e_s for run in point.runs)[1:4]) for point in (short, long)]
        assert latency.ttft_s.value == pytest.approx(middle[0])
        assert latency.tpot_s.value == pytest.approx((middle[1] - middle[0]) / 16)
        assert latency.ttft_s.source is latency.tpot_s.source is Source.MEASURED
        elsewhere = L2(profile).latency(DeploymentConfig(), Workload(4, 512, 18))
        assert elsewhere.ttft_s.source is Source.EXTRAPOLATED


@pytest.mark.slow
def test_steps_beside_many_prompt_tokens_are_told_from_their_noise():
    """More steps after the prompts separate a step's time from noise, on a CPU like that of docs/fidelity.md.

    A step of 8 sequences of 700 tokens takes three times one alone, and their prompts as long as 39 steps. With 16
    steps after them, as after all other points, noise of 15% hides what batch and context add; with 48 it does so
    less, and the remaining points are no worse.
    """
    truth = Truth(
        layer_first_s=(2e-4, 1.4e-5, 1e-9),
        other_first_s=(1e-3, 5e-5, 1e-6),
        layer_next_s=(4e-4, 5e-5, 1.2e-7),
        other_next_s=(8e-4, 5e-5),
        host_s=(2e-4, 3e-4),
    )
    spec = llama(8, max_context_tokens=1024)
    plan = default_plan(spec, Workload(8, 704, 64), degrees=((1, 1),), budget_s=40.0)
    workloads = [Workload(8, 700, 64), Workload(4, 300, 64), Workload(1, 200, 64), Workload(1, 700, 64)]

    def errors(plan):
        found = []
        for seed in range(40):
            machine = SyntheticMachine(spec=spec, truth=truth, noise=0.15, seed=seed, load_s=1.0)
            l2 = L2(take_profile(machine, plan))
            tpots = [l2.latency(DeploymentConfig(), w).tpot_s.value for w in workloads]
            true = [truth.tpot_s(8, w.batch, w.input_tokens, w.output_tokens) for w in workloads]
            found.append(np.abs(np.array(tpots) / true - 1))
        return np.sqrt(np.mean(np.square(found), axis=0))

    alike, more = errors(replace(plan, longest_output_tokens=0)), errors(plan)
    assert more[0] < 0.8 * alike[0]
    assert (more[1:] < 1.15 * alike[1:]).all()
