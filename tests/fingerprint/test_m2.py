"""Memory from fingerprints, against machines whose true W, A and A_pp are known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.m2 import M2, MemoryTerms
from fingerprint.profile import ProfilePlan
from tests.fingerprint.synthetic_machine import SyntheticMachine, Truth, llama, take_profile

INT8, BITS16 = WeightFormat.INT8, WeightFormat.BITS16
PLAN = ProfilePlan(budget_s=1e6, max_repeats=5, weights=(BITS16, INT8))
LARGEST = Workload(4, 512, 17)
DEGREES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (4, 2)]


def m2_of(truth=None, spec=None, plan=PLAN, **machine):
    return M2(take_profile(SyntheticMachine(truth=truth or Truth(), spec=spec or llama(), **machine), plan))


def test_the_paper_s_three_terms():
    """Worked out from the machine's truth at the largest step, 4 x 512 = 2,048 tokens.

    W = 32 x 1,000,000 (layers) + 512,000 (head) + 2,048 x 2,000 (split activations)
    A = 32 x 2,000 (norms) + 512,000 (embedding) + 512 (last norm) + 100,000 + 2,048 x 1,000 (whole activations)
    A_pp = a stage's activations 4,096,000 + 2,148,000, and a buffer of 4,096 + 2,048 x 1,024 at both sides
    """
    terms = m2_of().terms(BITS16)
    assert terms.weights_bytes == pytest.approx(36_608_000, abs=64)
    assert terms.activation_bytes == pytest.approx(2_724_512, abs=64)
    assert terms.pp_bytes == pytest.approx(10_446_496, abs=64)
    assert MemoryTerms(100.0, 10.0, 1.0).total_bytes(4, 3) == 100 + 4 * 10 + 4 * 2 * 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [BITS16, INT8])
@pytest.mark.parametrize(("tp", "pp"), DEGREES)
def test_every_item_of_every_stage_is_recovered(tp, pp, weights, tied):
    """tp = 4, pp = 4 and (2, 2) were never run: they follow from (1,1), (2,1) and (1,2)."""
    truth = Truth(tied=tied)
    spec = llama(tied_embeddings=True, head_params=0) if tied else llama()
    config, workload = DeploymentConfig(tp=tp, pp=pp, weights=weights), Workload(2, 500, 100)
    memory = m2_of(truth, spec).memory(config, workload)
    for index in range(pp):
        stage = memory.stage(index, 32 // pp)
        ends = {"first": index == 0, "last": index == pp - 1}
        true = truth.weights_bytes(32 // pp, tp=tp, int8=weights == INT8, **ends)
        assert stage.weights_bytes == pytest.approx(true, abs=2 * 32 // pp)  # a byte of rounding per layer and end
        assert stage.activation_bytes == pytest.approx(truth.activation_bytes(1000, tp=tp), abs=2)
        assert stage.runtime_bytes == truth.runtime_bytes
        # 2 (K, V) x 4 heads / tp x 32 x 2 bytes x 2 x 600 tokens, for each layer
        assert stage.kv_bytes == 32 // pp * (2 * 4 // tp * 32 * 2) * 1200
        assert stage.pp_buffer_bytes == {1: 0, 2: 4096 + 1024 * 1000, 4: 2 * (4096 + 1024 * 1000)}[pp]
    assert memory.source is Source.EXTRAPOLATED
    assert 0.005 <= memory.relative_error < 0.03


@settings(max_examples=40, deadline=None)
@given(
    layer_split=st.integers(10_000, 10**9),
    layer_whole=st.integers(0, 10**6),
    embedding=st.integers(1_000, 10**9),
    head=st.integers(1_000, 10**9),
    activation_split=st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)),
    activation_whole=st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)),
    runtime=st.integers(0, 10**9),
    num_layers=st.integers(4, 90),
    config=st.sampled_from(DEGREES),
)
def test_the_fullest_gpu_is_right_for_any_machine(
    layer_split, layer_whole, embedding, head, activation_split, activation_whole, runtime, num_layers, config
):
    """The estimate is right up to the one thing that cannot be identified, which the interval then holds."""
    truth = Truth(
        layer_split_bytes=layer_split, layer_whole_bytes=layer_whole, embedding_bytes=embedding,
        head_split_bytes=head, activation_split_bytes=activation_split, activation_whole_bytes=activation_whole,
        runtime_bytes=runtime,
    )  # fmt: skip
    tp, pp = config
    plan = replace(PLAN, weights=(BITS16,), min_repeats=1, max_repeats=1)
    memory = m2_of(truth, llama(num_layers), plan).memory(DeploymentConfig(tp=tp, pp=pp), Workload(1, 700, 1))
    split = even_split(num_layers, pp)
    stages = memory.stages(split)
    true = [
        truth.weights_bytes(n, tp=tp, first=i == 0, last=i == pp - 1)
        + truth.activation_bytes(700, tp=tp)
        + runtime
        for i, n in enumerate(split)
    ]
    got = [stage.weights_bytes + stage.activation_bytes + stage.runtime_bytes for stage in stages]
    tolerance = memory.relative_error * memory.per_gpu_bytes(split) + 4 * num_layers
    assert max(got) == pytest.approx(max(true), abs=tolerance)


def test_above_the_kv_heads_the_k_and_v_projections_are_replicated():
    """At tp = 8 with 4 KV heads a rank holds 1/4 of K and V, not 1/8: 2 x 256 x 128 of 589,824 linear elements."""
    m2 = m2_of()
    layer = m2.memory(DeploymentConfig(tp=8), Workload()).layer_weight_bytes
    assert layer == pytest.approx(1_000_000 / 8 + 2_000 + 1_000_000 * 65_536 / 589_824 * (1 / 4 - 1 / 8), abs=2)


class TestKvCheck:
    def test_an_engine_that_agrees_raises_no_warning(self):
        m2 = m2_of()
        assert [check.disagrees for check in m2.kv_checks] == [False] * 3
        assert m2.warnings == ()

    def test_page_rounding_within_two_percent_is_no_disagreement(self):
        assert m2_of(Truth(kv_factor=1.015)).warnings == ()

    def test_an_engine_that_disagrees_is_believed_and_named(self):
        """An engine that keeps 16bit KV in 4 bytes."""
        m2 = m2_of(Truth(kv_factor=2.0))
        spec_bytes = 2 * 4 * 32 * 2 * 640
        assert m2.memory(DeploymentConfig(), Workload()).layer_kv_bytes == 2 * spec_bytes
        assert "+100.0%" in m2.warnings[0]
        # another KV format was not measured: the spec is used
        assert m2.memory(DeploymentConfig(kv=KvFormat.INT8), Workload()).layer_kv_bytes == spec_bytes / 2


class TestReach:
    @pytest.mark.parametrize(
        ("config", "match"),
        [
            (DeploymentConfig(weights=WeightFormat.INT4), "weights=int4"),
            (DeploymentConfig(pruning=Pruning.WANDA), "wanda"),
        ],
    )
    def test_what_was_not_loaded_is_refused(self, config, match):
        with pytest.raises(NotMeasuredError, match=match):
            m2_of().memory(config, Workload())

    def test_one_device_tells_nothing_of_two(self):
        m2 = m2_of(num_devices=1)
        assert m2.memory(DeploymentConfig(), Workload()).layer_weight_bytes == 1_002_000
        for config in (DeploymentConfig(tp=2), DeploymentConfig(pp=2)):
            with pytest.raises(NotMeasuredError):
                m2.memory(config, Workload())
        with pytest.raises(NotMeasuredError):
            m2.terms(BITS16)

    @pytest.mark.parametrize("num_layers", [2, 3])
    def test_with_fewer_than_four_layers_stages_take_the_layer_from_one_gpu(self, num_layers):
        memory = m2_of(spec=llama(num_layers)).memory(DeploymentConfig(pp=2), Workload())
        assert memory.layer_weight_bytes == 1_002_000
        assert (memory.first_stage_bytes, memory.last_stage_bytes) == (512_000, 512_512)

    def test_a_one_layer_model_is_what_was_loaded(self):
        truth = Truth()
        memory = m2_of(truth, llama(1)).memory(DeploymentConfig(), Workload())
        assert memory.stage(0, 1).weights_bytes == pytest.approx(
            truth.weights_bytes(1, tp=1, first=True, last=True), abs=3
        )


class TestPeaks:
    """Recorded from the embedded engine: what grows once, or lies on one side only."""

    def test_an_activation_peak_that_grew_from_one_layer_to_two_is_not_multiplied_by_the_depth(self):
        """The demo model at 2,048 tokens: 6,569,984 bytes with one layer, 7,094,272 with two and with eight."""
        profile = take_profile(SyntheticMachine(spec=llama(8)), PLAN)

        def recorded(point):
            peak = 6_569_984 if point.num_layers == 1 else 7_094_272
            return replace(point, ranks=tuple(replace(r, activation_peak_bytes=peak) for r in point.ranks))

        memory = M2(replace(profile, memory=tuple(recorded(p) for p in profile.memory))).memory(
            DeploymentConfig(), LARGEST
        )
        assert memory.activation_bytes == 7_094_272
        quiet = M2(profile).memory(DeploymentConfig(), LARGEST)
        assert memory.relative_error > quiet.relative_error + 500_000 / quiet.per_gpu_bytes((8,))

    @pytest.mark.parametrize(("pp", "expected"), [(2, 2_000_000), (3, 2_000_000), (8, 2_000_000)])
    def test_a_buffer_that_only_the_receiver_holds_is_counted_once_per_stage(self, pp, expected):
        profile = take_profile(SyntheticMachine(), PLAN)

        def received(point):
            ranks = tuple(replace(r, pp_buffer_bytes=2_000_000 * (r.stage > 0)) for r in point.ranks)
            return replace(point, ranks=ranks)

        m2 = M2(replace(profile, memory=tuple(received(point) for point in profile.memory)))
        assert m2.memory(DeploymentConfig(pp=pp), LARGEST).pp_buffer_bytes == expected


class TestOneStepOnly:
    """A profile that was cut short has fingerprints that ran their smallest step and no other."""

    def cut_short(self, profile, *left):
        """Leave only the smallest step of these (weights, tp, pp)."""
        return replace(
            profile,
            memory=tuple(
                p for p in profile.memory if (p.weights, p.tp, p.pp) not in left or p.max_batched_tokens == 128
            ),
        )

    @pytest.mark.parametrize(
        ("config", "tolerance"),
        [
            pytest.param(DeploymentConfig(pp=2, weights=INT8), 1e-4, id="a-stage-grows-as-one-gpu"),
            pytest.param(DeploymentConfig(pp=2), 1e-4, id="16bit"),
            pytest.param(DeploymentConfig(tp=2, weights=INT8), 0.09, id="tp-divides-part-of-it"),
        ],
    )
    @pytest.mark.parametrize("workload", [Workload(1, 1000, 1), Workload(1, 64, 1)])
    def test_growth_with_the_step_comes_from_one_gpu(self, config, tolerance, workload):
        """A rank at tp=2 holds 100,000 + 2,000 a token of one GPU's 100,000 + 3,000: the proportion is near."""
        profile = take_profile(SyntheticMachine(), PLAN)
        lame = self.cut_short(profile, (config.weights, config.tp, config.pp))
        memory = M2(lame).memory(config, workload)
        true = Truth().activation_bytes(workload.batch * workload.input_tokens, tp=config.tp)
        assert memory.activation_bytes == pytest.approx(true, rel=tolerance)
        assert memory.relative_error >= M2(profile).memory(config, workload).relative_error

    def test_a_constant_part_is_not_scaled_with_the_tokens(self):
        """Weights of int8 made 16-bit for one product take 50 MB at any step, 0.2 MB of it the tokens' at 64."""
        truth = Truth(activation_whole_bytes=(50_000_000, 1_000))
        profile = self.cut_short(take_profile(SyntheticMachine(truth=truth), PLAN), (INT8, 1, 2))
        memory = M2(profile).memory(DeploymentConfig(pp=2, weights=INT8), Workload(1, 64, 1))
        assert memory.activation_bytes == pytest.approx(truth.activation_bytes(64, tp=1), rel=1e-4)

    def test_another_depth_of_the_same_degree_is_asked_first(self):
        """Growth is the engine's there, not one GPU's, when the shallower fingerprint ran both steps."""
        profile = take_profile(SyntheticMachine(), PLAN)
        deep = tuple(p for p in profile.memory if p.tp == 1 or p.num_layers == 1 or p.max_batched_tokens == 128)
        memory = M2(replace(profile, memory=deep)).memory(DeploymentConfig(tp=2), Workload(1, 1000, 1))
        assert memory.activation_bytes == pytest.approx(Truth().activation_bytes(1000, tp=2), rel=1e-4)

    def test_a_stage_s_buffer_grows_as_in_another_format(self):
        """A profile of one GPU has no buffer to derive it from."""
        profile = self.cut_short(take_profile(SyntheticMachine(), PLAN), (INT8, 1, 2))
        memory = M2(profile).memory(DeploymentConfig(pp=2, weights=INT8), Workload(1, 1000, 1))
        assert memory.pp_buffer_bytes == pytest.approx(4096 + 1024 * 1000, rel=1e-4)

    def test_with_nothing_to_compare_it_grows_with_the_tokens(self):
        profile = take_profile(SyntheticMachine(num_devices=1), replace(PLAN, weights=(BITS16,)))
        memory = M2(self.cut_short(profile, (BITS16, 1, 1))).memory(DeploymentConfig(), Workload(1, 256, 1))
        assert memory.activation_bytes == 2 * Truth().activation_bytes(128, tp=1)
        assert memory.relative_error * memory.per_gpu_bytes((32,)) > Truth().activation_bytes(128, tp=1) / 2


class TestFormatNotLoaded:
    """A profile whose budget ended after 16bit at some degree: int8 there is 16bit's, less what int8 saves."""

    @pytest.mark.parametrize(("tp", "pp"), DEGREES[1:])
    @pytest.mark.parametrize("weights", [BITS16, INT8])
    def test_it_follows_from_the_other_format(self, tp, pp, weights):
        truth = Truth(activation_whole_bytes=(50_000, 500), runtime_bytes=70_000_000)
        profile = take_profile(SyntheticMachine(truth=truth), PLAN)
        lame = tuple(p for p in profile.memory if p.weights != weights or p.tp * p.pp == 1)
        config, workload = DeploymentConfig(tp=tp, pp=pp, weights=weights), Workload(2, 500, 100)
        memory = M2(replace(profile, memory=lame)).memory(config, workload)
        known = M2(profile).memory(config, workload)
        split = even_split(32, pp)
        assert memory.stages(split)[0].weights_bytes == pytest.approx(known.stages(split)[0].weights_bytes, abs=99)
        assert memory.per_gpu_bytes(split) == pytest.approx(known.per_gpu_bytes(split), rel=1e-4)
        assert (memory.source, known.source) == (Source.SCALED, Source.EXTRAPOLATED)

    def test_what_computing_in_a_format_needs_is_kept_and_doubted(self):
        """int8 weights made 16-bit for one product take 20 MB on one GPU: a stage has them, a TP rank a share."""
        profile = take_profile(SyntheticMachine(), PLAN)

        def dearer(point):
            extra = 20_000_000 if point.weights == INT8 else 0
            ranks = tuple(replace(r, activation_peak_bytes=r.activation_peak_bytes + extra) for r in point.ranks)
            return replace(point, ranks=ranks)

        lame = tuple(dearer(p) for p in profile.memory if p.weights != INT8 or p.tp * p.pp == 1)
        m2 = M2(replace(profile, memory=lame))
        alone = m2.memory(DeploymentConfig(weights=INT8), LARGEST).activation_bytes
        stage = m2.memory(DeploymentConfig(pp=2, weights=INT8), LARGEST)
        assert stage.activation_bytes == alone
        assert stage.relative_error * stage.per_gpu_bytes((16, 16)) > 20_000_000 / 2
        assert alone / 2 < m2.memory(DeploymentConfig(tp=2, weights=INT8), LARGEST).activation_bytes < alone

    def test_a_format_that_was_never_loaded_stays_refused(self):
        profile = take_profile(SyntheticMachine(), PLAN)
        lame = tuple(p for p in profile.memory if p.weights == BITS16)
        with pytest.raises(NotMeasuredError, match="weights=int8"):
            M2(replace(profile, memory=lame)).memory(DeploymentConfig(weights=INT8), Workload())


class TestInterval:
    def test_steps_beyond_the_measured_ones_widen_it(self):
        m2 = m2_of()
        inside, beyond = (m2.memory(DeploymentConfig(), Workload(b, 512, 1)) for b in (4, 16))
        assert beyond.activation_bytes == pytest.approx(Truth().activation_bytes(16 * 512, tp=1), abs=2)
        assert beyond.relative_error > inside.relative_error

    def test_steps_are_cut_at_what_the_engine_batches(self):
        m2 = m2_of()
        at_limit, above = (m2.memory(DeploymentConfig(), Workload(b, 512, 1)) for b in (16, 64))
        assert above.activation_bytes == at_limit.activation_bytes

    def test_layers_that_weigh_differently_in_a_stage_widen_it(self):
        profile = take_profile(SyntheticMachine(), PLAN)

        def heavier(point):
            extra = 50_000 * point.num_layers if point.pp == 2 else 0
            ranks = tuple(replace(rank, weights_bytes=rank.weights_bytes + extra) for rank in point.ranks)
            return replace(point, ranks=ranks)

        uneven = M2(replace(profile, memory=tuple(heavier(point) for point in profile.memory)))
        config = DeploymentConfig(pp=2)
        assert (
            uneven.memory(config, Workload()).relative_error
            > 0.02 + M2(profile).memory(config, Workload()).relative_error
        )

    def test_an_uncertain_runtime_widens_it(self):
        profile = take_profile(SyntheticMachine(), PLAN)

        def other(index, point):
            ranks = tuple(replace(rank, runtime_bytes=rank.runtime_bytes + 10**7 * index) for rank in point.ranks)
            return replace(point, ranks=ranks)

        noisy = M2(replace(profile, memory=tuple(other(i, p) for i, p in enumerate(profile.memory))))
        assert noisy.memory(DeploymentConfig(), Workload()).relative_error > 0.05
