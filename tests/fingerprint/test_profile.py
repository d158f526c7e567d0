"""The profiling driver, against a machine that refuses what the protocol forbids."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.errors import ConfigError, EngineError
from fingerprint.estimators.l2 import L2, MeasuredKey
from fingerprint.measurements import Profile
from fingerprint.profile import ProfilePlan, default_plan, fingerprint_layers, profile
from tests.fingerprint.synthetic_machine import SyntheticMachine, SyntheticSession, Truth, llama, take_profile
from tests.golden_words import Golden

PLAN = ProfilePlan(budget_s=1000.0, max_repeats=20)
NUM_POINTS = 3 * 2 * 8  # (tp, pp) pairs x fingerprints x (2 batches x 2 inputs x 2 outputs)


def runs_of(machine):
    return [entry[1:] for entry in machine.log if entry[0] == "run"]


class TestWhatIsRun:
    def test_one_launch_per_degree_serves_every_fingerprint_and_format(self):
        machine = SyntheticMachine()
        result = take_profile(machine, replace(PLAN, weights=(WeightFormat.BITS16, WeightFormat.INT8)))
        assert [entry[1:] for entry in machine.log if entry[0] == "open"] == [(1, 1), (2, 1), (1, 2)]
        measured = {(p.tp, p.pp, p.num_layers, p.weights) for p in result.timing}
        assert measured == {
            (tp, pp, k, w)
            for (tp, pp), layers in {(1, 1): (1, 2), (2, 1): (1, 2), (1, 2): (2, 4)}.items()
            for k in layers
            for w in (WeightFormat.BITS16, WeightFormat.INT8)
        }

    def test_without_noise_the_minimum_is_enough(self):
        result = take_profile(SyntheticMachine(), PLAN)
        assert result.complete
        assert result.notes == ()
        assert [len(point.runs) for point in result.timing] == [5] * NUM_POINTS

    def test_the_first_run_of_a_point_and_after_a_load_is_not_counted(self):
        machine = SyntheticMachine(noise=0.02)
        result = take_profile(machine, PLAN)
        run, counted = Counter(runs_of(machine)), {}
        for p in result.timing:
            key = (p.tp, p.pp, p.num_layers, p.batch, p.input_tokens, p.output_tokens)
            counted[key] = len(p.runs)
        assert all(run[key] > count for key, count in counted.items())
        loads = sum(entry[0] == "load" for entry in machine.log)
        first_loads = 3 * 2
        # every first load warms all 8 points, every later one a single run
        assert sum(run.values()) - sum(counted.values()) == first_loads * 8 + (loads - first_loads)

    def test_fingerprints_take_turns(self):
        """The runs of a point are spread among those of other fingerprints: drift falls on all alike."""
        machine = SyntheticMachine()
        take_profile(machine, PLAN)
        order = [layers for tp, pp, layers, *_ in runs_of(machine) if (tp, pp) == (1, 1)]
        turns = sum(a != b for a, b in pairwise(order))
        assert turns >= 2

    def test_every_run_is_recorded_with_the_load_it_was_of(self):
        machine = SyntheticMachine(noise=0.02)
        result = take_profile(machine, PLAN)
        loaded = [entry[1:4] for entry in machine.log if entry[0] == "load"]
        for point in result.timing:
            assert len(point.loads) == len(point.runs)
            assert len(set(point.loads)) >= 2
            assert {loaded[load - 1] for load in point.loads} == {(point.tp, point.pp, point.num_layers)}

    def test_the_minimum_of_runs_takes_two_loads_of_every_fingerprint(self):
        """The first and the last fingerprint too, where the way back begins, are loaded twice."""
        machine = SyntheticMachine()
        plan = default_plan(machine.spec, Workload(), weights=(WeightFormat.BITS16, WeightFormat.INT8))
        result = take_profile(machine, replace(plan, budget_s=1e6))
        assert {len(point.runs) for point in result.timing} <= {3, 4}
        assert min(len(set(point.loads)) for point in result.timing) == 2

    def test_memory_is_read_after_the_smallest_and_the_largest_step(self):
        result = take_profile(SyntheticMachine(), PLAN)
        for degree in ((1, 1), (2, 1), (1, 2)):
            points = [p for p in result.memory if (p.tp, p.pp) == degree]
            assert sorted((p.num_layers, p.max_batched_tokens) for p in points) == [
                (k, tokens) for k in fingerprint_layers(32, degree[1]) for tokens in (128, 4 * 512)
            ]
            assert {p.kv_tokens for p in points} == {4 * (512 + 17)}
            assert {len(p.ranks) for p in points} == {degree[0] * degree[1]}

    def test_degrees_beyond_the_machine_are_left_out_with_a_reason(self, golden: Golden):
        result = take_profile(SyntheticMachine(num_devices=1), PLAN)
        assert {(p.tp, p.pp) for p in result.timing} == {(1, 1)}
        assert result.complete
        golden("fingerprint", result.notes)

    @pytest.mark.parametrize(
        ("num_layers", "expected"),
        [
            pytest.param(1, {(1, 1): {1}, (2, 1): {1}}, id="one-layer-has-no-stages"),
            pytest.param(2, {(1, 1): {1, 2}, (2, 1): {1, 2}, (1, 2): {2}}, id="two"),
            pytest.param(3, {(1, 1): {1, 2}, (2, 1): {1, 2}, (1, 2): {2}}, id="three"),
            pytest.param(4, {(1, 1): {1, 2}, (2, 1): {1, 2}, (1, 2): {2, 4}}, id="four"),
        ],
    )
    def test_small_models_have_fewer_fingerprints_and_a_note(self, num_layers, expected):
        result = take_profile(SyntheticMachine(spec=llama(num_layers)), PLAN)
        found = {}
        for point in result.timing:
            found.setdefault((point.tp, point.pp), set()).add(point.num_layers)
        assert found == expected
        assert bool(result.notes) == (num_layers < 4)

    def test_points_longer_than_the_context_are_left_out(self, golden: Golden):
        result = take_profile(SyntheticMachine(spec=llama(max_context_tokens=300)), PLAN)
        assert {point.input_tokens for point in result.timing} == {128}
        golden("fingerprint", result.notes[0])

    def test_a_context_that_fits_no_point_is_refused(self):
        machine = SyntheticMachine(spec=llama(max_context_tokens=100))
        with pytest.raises(ConfigError, match="context of 100 tokens"):
            take_profile(machine, PLAN)
        assert machine.sessions == []

    def test_a_profile_travels_as_json(self):
        result = take_profile(SyntheticMachine(noise=0.1), replace(PLAN, max_repeats=5))
        assert from_json(to_json(result), Profile) == result


class TestBudget:
    def test_noisy_points_get_more_runs_until_they_are_tight(self):
        result = take_profile(SyntheticMachine(noise=0.06), replace(PLAN, budget_s=5000.0, max_repeats=100))
        assert result.complete
        counts = [len(point.runs) for point in result.timing]
        assert min(counts) >= 5
        assert max(counts) > 8

    def test_a_spent_budget_is_not_complete(self):
        result = take_profile(SyntheticMachine(noise=0.2), replace(PLAN, budget_s=40.0))
        assert not result.complete
        assert len(result.timing) == NUM_POINTS

    def test_all_points_get_their_minimum_before_any_gets_more(self):
        """A minimum costs 20 to 25 s here; at 20% noise every launch would gladly use 40 s up on its own."""
        result = take_profile(SyntheticMachine(noise=0.2), replace(PLAN, budget_s=40.0, max_repeats=100))
        counts = [len(point.runs) for point in result.timing]
        assert min(counts) >= 5
        assert max(counts) > 5

    def test_a_budget_too_short_for_all_says_so(self, golden: Golden):
        result = take_profile(SyntheticMachine(), replace(PLAN, budget_s=9.0))
        assert not result.complete
        golden("fingerprint", result.notes)
        gaps = {(gap.config.tp, gap.config.pp): gap for gap in result.unreached}
        assert gaps
        for degree, gap in gaps.items():
            runs = [len(p.runs) for p in result.timing if (p.tp, p.pp) == degree]
            assert gap.planned_points - gap.missing_points == sum(count >= PLAN.min_repeats for count in runs)

    def test_what_was_measured_in_time_is_reached_however_wide_its_intervals(self):
        result = take_profile(SyntheticMachine(noise=0.2), replace(PLAN, budget_s=40.0))
        assert not result.complete
        assert result.unreached == ()

    def test_what_fails_is_not_cut_short(self):
        machine = SyntheticMachine()
        plain = machine.open

        def open_(*, tp, pp):
            if (tp, pp) == (2, 1):
                raise EngineError("no")
            return plain(tp=tp, pp=pp)

        machine.open = open_
        result = take_profile(machine, PLAN)
        assert not result.complete
        assert result.unreached == ()

    @settings(max_examples=100, deadline=None)
    @given(
        budget_s=st.floats(0.5, 90.0),
        launch_s=st.floats(0.0, 20.0),
        load_s=st.floats(0.0, 3.0),
        close_s=st.floats(0.0, 2.0),
        run_cost=st.floats(0.1, 20.0),
        noise=st.sampled_from([0.0, 0.05, 0.3]),
    )
    def test_no_launch_ends_after_the_budget_and_one_run_or_load_at_most(
        self, budget_s, launch_s, load_s, close_s, run_cost, noise
    ):
        """The first launch is made whatever it takes; what closing takes is seen when the first one ends."""
        times = {"launch_s": launch_s, "load_s": load_s, "close_s": close_s, "run_cost": run_cost}
        machine = SyntheticMachine(noise=noise, **times)
        actions, begun = [], []
        plain_clock, plain_open = machine.clock, machine.open
        machine.clock = RecordingClock(plain_clock, actions)

        def open_(*, tp, pp):
            begun.append(plain_clock.now)
            return plain_open(tp=tp, pp=pp)

        machine.open = open_
        started = plain_clock.now
        result = take_profile(machine, replace(PLAN, budget_s=budget_s))
        assert all(at + launch_s <= started + budget_s + 1e-6 for at in begun[1:])
        longest = max([load_s, *(took for took in actions if took not in {launch_s, close_s})])
        assert result.spent_s <= max(budget_s, launch_s) + longest + close_s + 1e-6
        assert all(session.closed for session in machine.sessions)
        assert result.complete <= (len(result.timing) == NUM_POINTS)

    @settings(max_examples=100, deadline=None)
    @given(
        budget_s=st.floats(0.5, 200.0),
        launch_s=st.floats(0.0, 20.0),
        load_s=st.floats(0.0, 3.0),
        run_cost=st.floats(0.1, 20.0),
        noise=st.sampled_from([0.0, 0.05, 0.3]),
        degrees=st.permutations([(1, 1), (2, 1), (1, 2)]),
    )
    def test_nothing_is_spent_on_another_degree_before_one_gpu_has_its_minimum(
        self, budget_s, launch_s, load_s, run_cost, noise, degrees
    ):
        machine = SyntheticMachine(noise=noise, launch_s=launch_s, load_s=load_s, run_cost=run_cost)
        plan = replace(PLAN, budget_s=budget_s, degrees=tuple(degrees), min_repeats=3)
        result = take_profile(machine, plan)
        opened = [entry[1:] for entry in machine.log if entry[0] == "open"]
        assert opened[:1] == [(1, 1)]
        base = [point for point in result.timing if (point.tp, point.pp) == (1, 1)]
        if opened[1:]:
            dropped = sum(" left out: with it two runs" in note for note in result.notes)
            assert len(base) == 2 * (8 - dropped)
            assert min(len(point.runs) for point in base) >= 3

    @pytest.mark.slow
    @settings(max_examples=100, deadline=None)
    @given(
        budget_s=st.floats(0.5, 60.0),
        launch_s=st.floats(0.0, 20.0),
        load_s=st.floats(0.0, 3.0),
        run_cost=st.floats(0.1, 60.0),
        seed=st.integers(0, 3),
    )
    def test_wishing_for_more_degrees_never_costs_the_estimate(self, budget_s, launch_s, load_s, run_cost, seed):
        """A profile that tp = pp = 1 alone can be estimated from in that time is so with further degrees."""
        usable = []
        for degrees in (((1, 1),), ((1, 1), (2, 1), (1, 2))):
            machine = SyntheticMachine(noise=0.1, launch_s=launch_s, load_s=load_s, run_cost=run_cost, seed=seed)
            plan = default_plan(machine.spec, Workload(), degrees=degrees, budget_s=budget_s)
            fits = L2(take_profile(machine, plan)).fits.values()
            usable.append(any(fit.is_determined and len(fit.depths) > 1 for fit in fits))
        assert usable[0] <= usable[1]

    @pytest.mark.parametrize("run_cost", [20.0, 40.0, 60.0])
    def test_a_busy_machine_leaves_points_and_degrees_out_but_can_be_estimated_from(
        self, run_cost, golden: Golden
    ):
        """The smallest bursts are 1 in 2, 4 or 6 s long: 60 s hold neither all points nor a second launch."""
        machine = SyntheticMachine(launch_s=15.0, load_s=2.0, run_cost=run_cost)
        result = take_profile(machine, default_plan(machine.spec, Workload(), budget_s=60.0))
        assert {(p.tp, p.pp) for p in result.timing} == {(1, 1)}
        assert L2(result).fits[MeasuredKey(1, 1, WeightFormat.BITS16, KvFormat.BITS16)].is_determined
        golden("fingerprint", result.notes)
        never = {g.config for g in result.unreached if g.missing_points == g.planned_points}
        assert {(config.tp, config.pp) for config in never} == {(2, 1), (1, 2)}

    def test_a_launch_that_cannot_end_in_time_is_not_begun(self):
        """The first launch took 20 of 40 s and its runs some of the rest."""
        machine = SyntheticMachine(launch_s=20.0)
        profile("m", machine.spec, machine, machine.fingerprint, replace(PLAN, budget_s=40.0), clock=machine.clock)
        assert [entry[1:] for entry in machine.log if entry[0] == "open"] == [(1, 1)]

    def test_a_launch_before_the_profile_may_be_told(self):
        """The controller does so, which asks for the machine before it plans."""
        opened = {}
        for known_s in (0.0, 20.0):
            machine = SyntheticMachine(launch_s=0.0)
            plain = machine.open

            def open_(*, tp, pp, machine=machine, plain=plain):
                machine.launch_s = 20.0 * (tp * pp > 1)  # the worker of (1, 1) is up already
                return plain(tp=tp, pp=pp)

            machine.open = open_
            plan = replace(PLAN, budget_s=15.0)
            where = (machine.spec, machine, machine.fingerprint, plan)
            profile("m", *where, clock=machine.clock, launch_s=known_s)
            opened[known_s] = [entry[1:] for entry in machine.log if entry[0] == "open"]
        assert opened == {0.0: [(1, 1), (2, 1)], 20.0: [(1, 1)]}

    def test_points_that_the_budget_cannot_hold_are_dropped_everywhere_alike(self, golden: Golden):
        result = take_profile(SyntheticMachine(run_cost=60.0), replace(PLAN, budget_s=60.0))
        shapes = {}
        for p in result.timing:
            shapes.setdefault((p.tp, p.pp, p.num_layers), set()).add((p.batch, p.input_tokens, p.output_tokens))
        assert not result.complete
        golden("fingerprint", result.notes)
        assert 1 <= len(shapes[1, 1, 1]) < 8
        alone = next(g for g in result.unreached if g.config == DeploymentConfig(engine=result.engine))
        assert alone.planned_points == 2 * 8
        assert alone.missing_points >= 2 * (8 - len(shapes[1, 1, 1]))
        assert shapes[1, 1, 1] == shapes[1, 1, 2]

    def test_a_slow_first_run_drops_nothing(self):
        """The first run of a process may compile for seconds."""
        machine = SyntheticMachine()
        machine.open = lambda **degree: SlowStart(machine, **degree)
        result = profile("m", machine.spec, machine, machine.fingerprint, PLAN, clock=machine.clock)
        assert len(result.timing) == NUM_POINTS

    def test_asking_the_machine_counts_where_it_launches_a_worker(self):
        """A real engine does so: its (1, 1) worker is then already up, the remaining ones are not."""
        machine = SyntheticMachine(noise=0.2)
        plain_machine, plain_open = machine.machine, machine.open

        def machine_():
            machine.clock.now += 5.0
            return plain_machine()

        def open_(*, tp, pp):
            machine.launch_s = 0.0 if (tp, pp) == (1, 1) else 5.0
            return plain_open(tp=tp, pp=pp)

        machine.machine, machine.open = machine_, open_
        result = take_profile(machine, replace(PLAN, budget_s=40.0, max_repeats=100))
        assert 39.0 <= result.spent_s <= 41.0
        assert min(len(point.runs) for point in result.timing) >= 5
        assert len(result.timing) == NUM_POINTS


class RecordingClock:
    """A fake clock that notes how long each step forward was."""

    def __init__(self, clock, actions):
        self._clock, self._actions = clock, actions

    def __call__(self):
        return self._clock()

    @property
    def now(self):
        return self._clock.now

    @now.setter
    def now(self, value):
        self._actions.append(value - self._clock.now)
        self._clock.now = value


class SlowStart(SyntheticSession):
    def run(self, **shape):
        if not any(entry[0] == "run" for entry in self.machine.log):
            self.machine.clock.now += 30.0
        return super().run(**shape)


class Breaks(SyntheticSession):
    """Runs a while, then raises."""

    def __init__(self, machine, *, tp, pp, error, after=10):
        super().__init__(machine, tp, pp)
        self.error, self.left = error, after
        machine.sessions.append(self)

    def run(self, **shape):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().run(**shape)


class TestFailures:
    @pytest.mark.parametrize("error", [EngineError("out of memory"), KeyboardInterrupt(), ZeroDivisionError()])
    def test_a_session_that_breaks_is_closed(self, error):
        machine = SyntheticMachine()
        machine.open = lambda *, tp, pp: Breaks(machine, tp=tp, pp=pp, error=error)
        with pytest.raises(type(error)):
            take_profile(machine, PLAN)
        assert [session.closed for session in machine.sessions] == [True]

    def test_a_later_launch_that_fails_is_noted_and_the_rest_measured(self, golden: Golden):
        machine = SyntheticMachine()
        plain = machine.open

        def open_(*, tp, pp):
            if tp > 1:
                raise EngineError("rank 1 did not come up")
            return plain(tp=tp, pp=pp)

        machine.open = open_
        result = take_profile(machine, PLAN)
        assert {(p.tp, p.pp) for p in result.timing} == {(1, 1), (1, 2)}
        assert not result.complete
        golden("fingerprint", result.notes)

    def test_an_interrupt_in_a_later_launch_is_not_swallowed(self):
        machine = SyntheticMachine()
        plain = machine.open
        machine.open = lambda *, tp, pp: (
            plain(tp=tp, pp=pp) if tp == 1 else Breaks(machine, tp=tp, pp=pp, error=KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            take_profile(machine, PLAN)
        assert all(session.closed for session in machine.sessions)


def test_progress_only_grows_and_names_what_runs(golden: Golden):
    machine, seen = SyntheticMachine(noise=0.1), []
    profile("m", machine.spec, machine, machine.fingerprint, PLAN, clock=machine.clock, progress=seen.append)
    assert all(a.done <= b.done and a.elapsed_s <= b.elapsed_s for a, b in pairwise(seen))
    assert all(0 <= event.done <= event.total for event in seen)
    assert seen[-1].done > NUM_POINTS * 5
    assert seen[0].running == "tp=1 pp=1: launching"
    golden("fingerprint", sorted({event.running for event in seen}))


class TestPlan:
    @pytest.mark.parametrize(
        ("workload", "batches", "inputs", "outputs"),
        [
            pytest.param(Workload(), (1, 4), (128, 512), (1, 17), id="default"),
            pytest.param(Workload(16, 1000, 100), (1, 16), (250, 1000), (1, 17), id="own-batch"),
            pytest.param(Workload(1, 100_000, 10), (1, 4), (1021, 4086), (1, 10), id="bounded-by-context"),
            pytest.param(Workload(1000, 2048, 10), (1, 8), (512, 2048), (1, 10), id="bounded-by-burst"),
            pytest.param(Workload(1, 1, 1), (1, 4), (1,), (1, 2), id="smallest"),
        ],
    )
    def test_points_lie_around_the_workload(self, workload, batches, inputs, outputs):
        plan = default_plan(llama(), workload)
        assert (plan.batches, plan.input_tokens, plan.output_tokens) == (batches, inputs, outputs)

    @given(
        st.builds(Workload, st.integers(1, 10_000), st.integers(1, 10_000_000), st.integers(1, 10_000_000)),
        st.integers(3, 100_000),
    )
    def test_every_point_fits_the_context(self, workload, context):
        plan = default_plan(llama(max_context_tokens=context), workload)
        assert max(plan.input_tokens) + plan.output_tokens[1] <= context
        assert max(plan.batches) * max(plan.input_tokens) <= max(16_384, max(plan.input_tokens))

    def test_bursts_of_many_tokens_get_more_steps(self):
        """1 + tokens / 64, between 17 and 49, and no more than were asked for."""
        bursts = [(1, 704), (4, 704), (8, 704)]
        assert [default_plan(llama(), Workload(8, 704, 64)).outputs_of(*b) for b in bursts] == [
            (1, 17),
            (1, 45),
            (1, 49),
        ]
        assert default_plan(llama(), Workload(8, 704, 30)).outputs_of(8, 704) == (1, 30)
        assert default_plan(llama(), Workload(8, 704, 5)).outputs_of(8, 704) == (1, 5)

    @pytest.mark.parametrize(
        "change",
        [
            {"batches": ()},
            {"batches": (0, 1)},
            {"batches": (2, 2)},
            {"output_tokens": (5, 5)},
            {"output_tokens": (0, 5)},
            {"degrees": ((0, 1),)},
            {"budget_s": float("inf")},
            {"budget_s": 0.0},
            {"min_repeats": 0},
            {"min_repeats": 9, "max_repeats": 8},
            {"kv": (KvFormat.INT8, KvFormat.INT8)},
        ],
    )
    def test_a_plan_that_cannot_be_run_is_refused(self, change):
        with pytest.raises(ConfigError):
            ProfilePlan(**change)


def test_the_fake_is_strict():
    """The fake raises at what the driver must not do, so that the tests above mean something."""
    machine = SyntheticMachine(truth=Truth())
    with pytest.raises(AssertionError, match="devices"):
        machine.open(tp=2, pp=2)
    session = machine.open(tp=1, pp=1)
    with pytest.raises(AssertionError, match="before load"):
        session.run(batch=1, input_tokens=1, output_tokens=1)
    with pytest.raises(AssertionError, match="still open"):
        machine.open(tp=1, pp=1)
    session.close()
    session.close()
    with pytest.raises(AssertionError, match="after close"):
        session.memory()


def test_a_split_model_is_run_at_the_workloads_own_length_only():
    machine = SyntheticMachine()
    plan = default_plan(machine.spec, Workload(batch=1, input_tokens=512, output_tokens=128), budget_s=1e6)
    points = take_profile(machine, replace(plan, max_repeats=3)).timing
    lengths = {split: {p.input_tokens for p in points if (p.tp * p.pp > 1) is split} for split in (False, True)}
    assert lengths == {False: {128, 512}, True: {512}}
