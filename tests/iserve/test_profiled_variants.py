"""Variants in a profile of the embedded engine: measured when a request has some, once, and used by its plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    EngineError,
    NotMeasuredError,
    TooLittleTimeError,
    UnmeasurableError,
)
from fingerprint.estimators.adapter_slots import variant_cost
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.families import load_spec
from fingerprint.lora.slot_bytes import adapter_bytes
from fingerprint.measurements import Profile
from fingerprint.profile_plan import Shards
from fingerprint.random_variants import base_hashes
from fingerprint.variant_measurements import VariantKind
from iserve.cli.profile_text import print_profile
from iserve.controller import profiling_cuts, profiling_run
from iserve.controller.profiling import Profiler, _with_former_variants
from iserve.controller.profiling_cuts import Fingerprints
from iserve.controller.profiling_run import Order, take
from iserve.controller.profiling_scope import kind_to_measure
from iserve.controller.standalone_plans import _measured_on
from iserve.demo import demo_model_path
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.merge_advice import merge_advice_of_plan
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware
from iserve.rest_bodies import ProfileBody
from iserve.simulation.running import adapter_cost
from planner.intent import Intent, Quality, Traffic
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, SyntheticSession, llama
from tests.fingerprint.variant_machine import INT2, RANK_8, VariantMachine, VariantMachineSession, VariantTruth
from tests.fingerprint.variant_step_machine import StepMachine
from tests.golden_words import Golden

SOURCE = ModelSource(name="m", directory=Path("/m"), has_weights=True, spec=llama())
(TABLE,) = capabilities_for("torch")
NODE = NodeStatus(
    node_id="n",
    observed_at=0.0,
    devices=(
        DeviceStatus(
            device_id="cpu:0",
            index=0,
            kind="cpu",
            name="synthetic",
            total_bytes=CPU.memory_bytes,
            free_bytes=CPU.memory_bytes,
            load_fraction=0.0,
        ),
    ),
    workers=(),
)
VARIANTS, DELTAS = Traffic(variants=20, variant_rank=8), Traffic(variants=20, variant_rank=8, delta_mib=4)


class Session(SyntheticSession):
    """Session whose engine serves variants too."""

    def __init__(self, machine: Machine, tp: int, pp: int) -> None:
        super().__init__(machine, tp, pp)
        self.with_slots = VariantMachineSession(machine.variants)
        self.load_with_slots, self.load_variants = self.with_slots.load_with_slots, self.with_slots.load_variants
        self.run_variants = self.with_slots.run_variants

    def memory(self) -> Any:
        return self.with_slots.memory() if self.with_slots.layers else super().memory()


class Machine(SyntheticMachine):
    """Machine that remembers apart what it was asked of variants."""

    def __post_init__(self) -> None:
        super().__post_init__()
        files = VariantTruth(file_layer_bytes=adapter_bytes(self.spec, 8) // self.spec.num_layers)
        self.variants = VariantMachine(spec=self.spec, truth=files)
        self.variants.clock = self.clock

    def open(self, *, tp: int, pp: int) -> Session:
        super().open(tp=tp, pp=pp)
        self.sessions[-1] = Session(self, tp, pp)
        return self.sessions[-1]


class Cuts:
    """Fingerprints of the machine, and its variants."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.variant = machine, machine.variants.variant

    def __call__(self, layers: Any) -> Path:
        return self.machine.fingerprint(layers)

    def forget_variants(self, layers: Any) -> None:
        pass


def options_for(traffic: Traffic) -> PlanOptions:
    return PlanOptions(intent=Intent(traffic=traffic, quality=Quality.EXACT), workload=Workload(4, 64, 32))


def profiled(
    traffic: Traffic | None,
    known: Profile | None = None,
    machine: Machine | None = None,
    max_seconds: float = 40.0,
) -> tuple[Profile, Machine]:
    """Return the profile that a deploy for ``traffic`` takes; None: one that is asked for by itself."""
    machine = machine or Machine()
    options = None if traffic is None else options_for(traffic)
    order = Order(
        source=SOURCE,
        table=TABLE.unprepared(),
        node=NODE,
        workload=Workload(4, 64, 32),
        plan_options=options,
        quality=Quality.EXACT,
        shards=Shards.AUTO,
        max_seconds=max_seconds,
        progress=lambda _: None,
        known=known,
        variants=None if options is None else kind_to_measure(TABLE, SOURCE.spec, options),
    )
    target: Any = machine
    cuts: Any = Cuts(machine)
    return take(order, target, cuts), machine


@pytest.fixture(scope="module")
def with_variants() -> Profile:
    return profiled(VARIANTS)[0]


def readings(profile: Profile) -> dict[Any, set[Any]]:
    """Return what each point read, to the last bit: how often it was run depends on this machine's clock."""
    times = {replace(one, runs=(), loads=()): set(one.runs) for one in profile.timing}
    return times | {replace(one, ranks=()): set(one.ranks) for one in profile.memory}


def test_without_variants_nothing_more_is_run_and_the_profile_is_the_same() -> None:
    """To the last bit."""
    (plain, asked), (none, not_asked) = profiled(None), profiled(Traffic())
    for machine in (asked, not_asked):
        assert not machine.variants.log
    assert set(asked.log) == set(not_asked.log)
    assert readings(plain) == readings(none)
    assert plain.variants == none.variants == ()


def test_variants_change_nothing_of_the_base(with_variants: Profile) -> None:
    plain, _ = profiled(Traffic())
    assert readings(with_variants) == readings(plain)
    work, config = Workload(4, 64, 32), DeploymentConfig()
    without = replace(with_variants, variants=())
    first, second = (estimator_for(one).estimate(config, work) for one in (without, with_variants))
    assert first == second


def test_a_kind_is_measured_once_and_another_is_added(with_variants: Profile) -> None:
    again, machine = profiled(VARIANTS, known=with_variants)
    assert again == with_variants
    assert not machine.variants.log
    both, machine = profiled(DELTAS, known=with_variants)
    assert not [entry for entry in machine.log if entry[0] == "run"], "the base is known"
    assert [one.kind for one in both.variants] == [RANK_8, INT2]
    assert both.timing == with_variants.timing
    assert from_json(to_json(both), Profile) == both


def test_what_fails_is_noted_and_not_tried_again(golden: Golden) -> None:
    machine = Machine()
    machine.variants.failing = BadInputError("no room for adapters")
    failed, _ = profiled(VARIANTS, machine=machine)
    golden("variant", failed.notes)
    again, machine = profiled(VARIANTS, known=failed)
    assert again == failed
    assert not machine.variants.log


def test_what_may_be_gone_the_next_time_is_tried_again(golden: Golden) -> None:
    """A worker that was killed, say. The note of each try is that of the last, until one succeeds."""
    known = None
    for words in ("the worker was killed", "no memory now"):
        machine = Machine()
        machine.variants.failing = EngineError(words)
        known, _ = profiled(VARIANTS, known=known, machine=machine)
        assert known.variants == ()
        golden("variant", [note for note in known.notes if note.startswith(str(RANK_8))])
    found, _ = profiled(VARIANTS, known=known)
    assert [one.kind for one in found.variants] == [RANK_8]
    assert not [note for note in found.notes if note.startswith(str(RANK_8))]


def test_noise_is_tried_again_each_time_and_what_cannot_be_measured_never(golden: Golden) -> None:
    """More seconds help neither of them, and are not advised."""
    known = None
    for _ in range(3):
        machine = Machine()
        machine.variants.failing = NotMeasuredError("steps do not agree; try again")
        known, _ = profiled(VARIANTS, known=known, machine=machine)
        assert machine.variants.log
        assert known.variants == ()
    machine = Machine()
    machine.variants.failing = UnmeasurableError("no fingerprint can be repeated; --engine torch repeats none")
    once, _ = profiled(VARIANTS, machine=machine)
    (kept,) = once.variants
    assert (kept.kind, kept.runs, kept.tried_s) == (RANK_8, (), None)
    golden("variant", [note for note in (*known.notes, *once.notes) if note.startswith(str(RANK_8))])
    again, machine = profiled(VARIANTS, known=once, max_seconds=600.0)
    assert again == once
    assert not machine.variants.log


class TestTooSlow:
    """An engine for which the budget is too short."""

    def slow(self, known: Profile | None = None, max_seconds: float = 40.0) -> tuple[Profile, Machine]:
        machine = Machine()
        machine.variants.failing = TooLittleTimeError("they would take 500 s")
        return profiled(VARIANTS, known=known, machine=machine, max_seconds=max_seconds)

    def test_it_is_tried_twice_and_then_with_more_time_alone(self, golden: Golden) -> None:
        once, machine = self.slow()
        assert machine.variants.log
        assert once.variants == ()
        twice, machine = self.slow(once)
        assert machine.variants.log
        (kept,) = twice.variants
        assert (kept.kind, kept.runs, kept.tried_s) == (RANK_8, (), 20.0)
        golden("variant", [note for note in twice.notes if note.startswith(str(RANK_8))])
        for max_seconds in (40.0, 10.0):
            again, machine = self.slow(twice, max_seconds)
            assert again == twice
            assert not machine.variants.log
        longer, machine = self.slow(twice, 60.0)
        assert machine.variants.log
        (kept,) = longer.variants
        assert kept.tried_s == 30.0
        assert from_json(to_json(longer), Profile) == longer

    def test_a_deploy_finds_the_profile_enough_until_it_has_more_time(self, with_variants: Profile) -> None:
        once, _ = self.slow()
        twice, _ = self.slow(once)
        engine = SimpleNamespace(capabilities=lambda: TABLE)
        for profile, enough in ((with_variants, [True, True]), (once, [False, False]), (twice, [True, False])):
            profiler: Any = SimpleNamespace(stored=lambda *_, found=profile, **__: found, lacking=lambda *_: ())
            asked: Any = (profiler, SOURCE, engine, NODE, options_for(VARIANTS))
            assert [Profiler.enough(*asked, seconds) is profile for seconds in (40.0, 60.0)] == enough

    def test_more_time_may_be_enough(self) -> None:
        twice, _ = self.slow(self.slow()[0])
        found, _ = profiled(VARIANTS, known=twice, max_seconds=60.0)
        (measured,) = found.variants
        assert measured.runs
        assert not [note for note in found.notes if note.startswith(str(RANK_8))]

    def test_a_profile_that_is_asked_for_tries_again(self, with_variants: Profile) -> None:
        """`iserve profile --rank` measures anew, whatever is known; a failure of its own is not the second one."""
        twice, _ = self.slow(self.slow()[0])
        assert _with_former_variants(with_variants, twice).variants == with_variants.variants
        assert _with_former_variants(self.slow()[0], twice).variants == ()

    def test_plans_are_as_without_a_measurement(self) -> None:
        plain, twice = profiled(Traffic())[0], self.slow(self.slow()[0])[0]
        config, work = DeploymentConfig(adapter_slots=4, adapter_rank=8), Workload(4, 64, 32)
        costs = [estimator_for(one).variant_cost(config) for one in (plain, twice)]  # type: ignore[attr-defined]
        assert costs == [None, None]
        assert estimator_for(twice).estimate(DeploymentConfig(), work)


def test_engines_whose_profiling_workers_serve_no_variants_measure_none() -> None:
    table = get_engine("tensorrt-llm").capabilities()
    assert kind_to_measure(table, SOURCE.spec, options_for(VARIANTS)) is None
    assert kind_to_measure(TABLE, SOURCE.spec, options_for(Traffic())) is None


def test_vllm_measures_variants_by_its_step_timer_alone() -> None:
    """A release that is not known runs without the timer, and its bursts hide what kernels add."""
    table = get_engine("vllm").capabilities()
    by_format = replace(DELTAS, delta_mib=0, delta_format=SlotFormat.INT2)
    assert kind_to_measure(table, SOURCE.spec, options_for(VARIANTS)) == RANK_8
    assert kind_to_measure(table, SOURCE.spec, options_for(by_format)) == INT2
    assert kind_to_measure(replace(table, step_timed=False), SOURCE.spec, options_for(VARIANTS)) is None


class Steps:
    """Target of an engine with our step timer; remembers which deltas its workers serve."""

    def __init__(self) -> None:
        self.machine, self.formats = StepMachine(spec=SOURCE.spec), list[SlotFormat]()

    def open(self, *, tp: int, pp: int, delta_format: SlotFormat = SlotFormat.NONE) -> Any:
        assert (tp, pp) == (1, 1)
        self.formats.append(delta_format)
        return self.machine.open()


class StepCuts:
    def __init__(self, machine: StepMachine) -> None:
        self.variant, self._machine = machine.variant, machine

    def __call__(self, layers: Any) -> Path:
        return self._machine.fingerprint(layers)

    def forget_variants(self, layers: Any) -> None:
        pass


@pytest.mark.parametrize(("kind", "rank"), [(VariantKind(16), 16), (INT2, 0)])
def test_vllm_measures_steps_within_30_seconds_and_plans_use_them(
    with_variants: Profile, kind: VariantKind, rank: int
) -> None:
    target = Steps()
    order = Order(
        source=SOURCE,
        table=get_engine("vllm").capabilities().unprepared(),
        node=NODE,
        workload=Workload(32, 2048, 32),
        plan_options=None,
        quality=Quality.EXACT,
        shards=Shards.NEVER,
        max_seconds=600.0,
        progress=lambda _: None,
        variants=kind,
    )
    base = replace(with_variants, variants=(), notes=())
    found = profiling_run._with_variants(base, order, target, StepCuts(target.machine))  # type: ignore[arg-type]
    assert target.formats == [kind.delta_format]
    assert (found.notes, found.variants[0].kind, found.variants[0].runs) == ((), kind, ())
    assert found.variants[0].spent_s < 40.0
    config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=rank, delta_format=kind.delta_format)
    cost = variant_cost(estimator_for(found), SOURCE.spec, config)
    assert cost is not None
    assert cost.is_exact
    assert cost.measured == found.variants[0]
    before = variant_cost(estimator_for(base), SOURCE.spec, config)
    assert before is not None
    assert before.measured is None


def test_slots_that_the_engine_refuses_are_not_measured() -> None:
    """The embedded engine's slots have a size in place of a format."""
    by_format = replace(DELTAS, delta_mib=0, delta_format=SlotFormat.INT2)
    assert kind_to_measure(TABLE, SOURCE.spec, options_for(by_format)) is None
    assert kind_to_measure(TABLE, SOURCE.spec, options_for(DELTAS)) == INT2


def test_a_rank_and_a_format_are_asked_for_one_at_a_time(golden: Golden) -> None:
    assert ProfileBody().variant_kind() is None
    assert ProfileBody(variant_rank=5).variant_kind() == RANK_8
    assert ProfileBody(delta_format=SlotFormat.INT2).variant_kind() == INT2
    with golden.raises("variant", ConfigError):
        ProfileBody(variant_rank=5, delta_format=SlotFormat.INT2).variant_kind()
    with golden.raises("variant", ConfigError):
        _measured_on(get_engine("tensorrt-llm"), RANK_8)
    assert _measured_on(get_engine("vllm"), RANK_8) == RANK_8


class TestPlans:
    @staticmethod
    def notes(profile: Profile, traffic: Traffic) -> tuple[str, ...]:
        return planned_deployment(
            SOURCE,
            hypothetical_hardware(CPU, 1),
            CorrectedEstimator(estimator_for(profile), []),
            TABLE,
            options_for(traffic),
            devices=(),
            deployable_of=lambda config, replicas: DeployableDocument(here=True),
            profile=profile,
        ).document.notes

    def test_a_plan_says_in_one_line_where_the_time_is_from(self, with_variants: Profile, golden: Golden) -> None:
        dated = replace(with_variants.variants[0], created_at="2026-11-28T00:00:00+00:00")
        profile = replace(with_variants, variants=(dated,))
        said = []
        for traffic in (VARIANTS, replace(VARIANTS, variant_rank=64), DELTAS):
            (line,) = (note for note in self.notes(profile, traffic) if "the time that" in note)
            said.append(line)
        golden("variant", said)

    def test_the_hint_measures_what_the_plan_is_for(self, golden: Golden) -> None:
        """The model, the engine, and at least as many requests at once."""
        (line,) = (n for n in self.notes(profiled(None)[0], VARIANTS) if "the time that" in n)
        golden("variant", line)

    def test_a_plan_takes_the_added_time(self, with_variants: Profile) -> None:
        estimator = CorrectedEstimator(estimator_for(with_variants), [])
        config = DeploymentConfig(adapter_slots=4, adapter_rank=8)
        cost = adapter_cost(config, SOURCE.spec, 8, estimator)
        assert cost is not None
        truth, layers = VariantTruth(), SOURCE.spec.num_layers
        assert cost.step_s(4, 2) == pytest.approx(truth.added_step_s(layers, 4, 2))
        assert cost.prompt_s is not None
        assert cost.prompt_s(64) == pytest.approx(truth.added_prompts_s(layers, 64, 1))
        found = variant_cost(estimator, SOURCE.spec, config)
        assert found is not None
        assert found.load_s(0) == pytest.approx(layers * truth.load[0] + truth.load[1])
        assert cost.load_s == found.load_s(adapter_bytes(SOURCE.spec, 8))
        assert not cost.stops_steps, "a load of the embedded engine is next to its steps"

    def test_a_plan_at_a_rate_advises_to_merge_by_the_measured_time(self, with_variants: Profile) -> None:
        """Without it there is none, for the time of adapters is not known then."""
        options = options_for(Traffic(variants=40, variant_rank=8, variant_skew=3.0))
        options = replace(options, intent=replace(options.intent, rate_per_s=5.0))
        config = DeploymentConfig(adapter_slots=4, adapter_rank=8)
        advice, none = (
            merge_advice_of_plan("m", SOURCE.spec, CPU, estimator_for(one), options, config)
            for one in (with_variants, replace(with_variants, variants=()))
        )
        assert none is None
        assert advice is not None
        assert advice.gpu_s_per_request_on_slots is not None
        assert advice.gpu_s_per_request_merged < advice.gpu_s_per_request_on_slots

    def test_a_profile_is_printed_with_its_variants(
        self, with_variants: Profile, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        print_profile(with_variants, estimator_for(with_variants), Workload(4, 64, 32))
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("adapters of rank 8"))
        golden("variant", line)


def test_a_profile_that_is_taken_again_keeps_the_variants_of_the_former(with_variants: Profile) -> None:
    plain, _ = profiled(None)
    assert _with_former_variants(plain, with_variants).variants == with_variants.variants
    assert _with_former_variants(with_variants, with_variants) == with_variants
    assert _with_former_variants(plain, None) == plain


def test_a_failure_replaces_no_measurement_and_is_not_kept(with_variants: Profile) -> None:
    plain, _ = profiled(None)
    (good,) = with_variants.variants
    bad = replace(good, runs=(), loads=(), failure="no room")
    failed = replace(plain, variants=(bad,))
    assert _with_former_variants(failed, with_variants).variants == (good,)
    assert _with_former_variants(with_variants, failed).variants == (good,)
    assert _with_former_variants(plain, failed).variants == ()
    assert _with_former_variants(failed, None).variants == (bad,)


def test_variants_of_a_fingerprint_hash_their_base_once_and_are_deleted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(profiling_cuts, "base_hashes", lambda base: (hashed.append(base), base_hashes(base))[1])
    demo = demo_model_path()
    source = ModelSource("demo", demo, True, load_spec(demo))
    fingerprints = Fingerprints(source, tmp_path / "cuts", weights=True)
    kind = VariantKind(delta_format=SlotFormat.INT2)
    written = {cut: [fingerprints.variant(cut, kind, number)[0] for number in (0, 1, 0)] for cut in ((0,), (0, 1))}
    assert hashed == [fingerprints(cut) for cut in written]
    fingerprints.forget_variants((0,))
    assert [folder.exists() for folder in written[0,]] == [False] * 3
    assert all(folder.exists() for folder in (*written[0, 1], *hashed))
    assert fingerprints.variant((0,), kind, 0)[0].exists()
