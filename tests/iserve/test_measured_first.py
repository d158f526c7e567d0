"""A profile that was cut short: the plan chooses what was measured, and says what was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.capability import Note
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.fingerprinted import nearest
from fingerprint.measurements import Profile
from fingerprint.profile import default_plan
from iserve.cli.render import print_plan
from iserve.model_source import ModelSource
from iserve.planning.deployability import deployable_now
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.document import PlanDocument
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware, make_plan
from iserve.planning.plan_document import plan_document
from iserve.planning.verdict_text import note_lines
from planner.intent import Intent, IntentKind
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, take_profile
from tests.golden_words import Golden

WORK = Workload()
ONE, TWO = DeploymentConfig(), DeploymentConfig(tp=2)


@pytest.fixture(scope="module")
def cut_short() -> Profile:
    """On a busy machine: the smallest bursts are 1 in 2 s long, and 60 s hold no second launch."""
    machine = SyntheticMachine(launch_s=15.0, load_s=2.0, run_cost=20.0)
    return take_profile(machine, default_plan(machine.spec, WORK, budget_s=60.0))


@pytest.fixture(scope="module")
def document(cut_short: Profile) -> PlanDocument:
    hardware = hypothetical_hardware(CPU, 2)
    options = PlanOptions(intent=Intent(kind=IntentKind.MIN_LATENCY), workload=WORK)
    made = make_plan(cut_short.spec, hardware, estimator_for(cut_short), capabilities_for("torch"), options)
    return plan_document(made, model="m", hardware=hardware.label, workload=WORK, profile=cut_short)


def test_what_its_scaled_estimate_makes_look_best_is_passed_over(
    cut_short: Profile, document: PlanDocument
) -> None:
    found = {c.config: c for c in document.candidates}
    one, two = found[ONE], found[TWO]
    assert one.objective is not None
    assert two.objective is not None
    assert two.objective < one.objective
    assert (one.measured, two.measured) == (True, False)
    assert two.estimate is not None
    assert two.estimate.measured_config == ONE == nearest(TWO, [ONE])
    assert document.candidates[0].config == ONE
    passed = next(passed for passed in document.passed_over if passed.config == TWO)
    assert passed.objective_low is not None
    assert passed.objective_high is not None
    assert passed.objective_low < two.objective < passed.objective_high
    assert document.candidates.index(two) in document.indistinguishable


def test_what_the_budget_ended_before_is_told(
    document: PlanDocument, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert document.profile is not None
    assert document.profile.cut_short
    never = {gap.config for gap in document.profile.unreached if gap.missing_points == gap.planned_points}
    assert never == {TWO, DeploymentConfig(pp=2)}
    print_plan(document)
    shown = " ".join(capsys.readouterr().out.split())
    golden("controller", shown)


def test_what_was_run_fewer_times_than_planned_is_not_said_to_be_unmeasured(cut_short: Profile) -> None:
    two_runs = tuple(replace(point, tp=2, runs=point.runs[:2]) for point in cut_short.timing)
    profile = replace(cut_short, timing=(*cut_short.timing, *two_runs))
    assert any(gap.config == TWO and gap.missing_points == gap.planned_points for gap in profile.unreached)
    hardware, estimator = hypothetical_hardware(CPU, 2), estimator_for(profile)
    made = make_plan(profile.spec, hardware, estimator, capabilities_for("torch"), PlanOptions(workload=WORK))
    document = plan_document(made, model="m", hardware=hardware.label, workload=WORK, profile=profile)
    assert next(c for c in document.candidates if c.config == TWO).measured
    (told,) = (note for note in document.notes if "cut short" in note)
    unmeasured, _, partly = told.partition(" not measured")
    assert "tp=2 pp=1 16bit" not in unmeasured
    assert "tp=2 pp=1 16bit" in partly


def test_plans_and_profiles_of_before_are_read(cut_short: Profile, document: PlanDocument) -> None:
    assert from_json(to_json(document), PlanDocument) == document
    assert from_json(to_json(cut_short), Profile) == cut_short


def test_a_plan_by_a_profile_carries_the_notes_of_its_engine(tmp_path: Path) -> None:
    """A note is, for example, that the engine's release is not known; that it was never run is left out."""
    machine = SyntheticMachine(launch_s=1.0, load_s=0.5)
    profile = take_profile(machine, default_plan(machine.spec, Workload(), budget_s=600.0))
    (table,) = capabilities_for("torch")
    said = "torch 9.9 is unknown"
    planned = planned_deployment(
        ModelSource(profile.model, tmp_path, True, profile.spec),
        hypothetical_hardware(CPU, 2),
        estimator_for(profile),
        replace(table, notes=(Note(text=said),), verified=()),
        PlanOptions(),
        devices=(),
        deployable_of=lambda *_: deployable_now(has_weights=True),
        profile=profile,
    )
    told = note_lines(planned.document)
    assert told[0] == said
    assert not any("verified" in line for line in told)


@pytest.mark.parametrize("lengths", [(512,), (128, 512)])
def test_what_was_run_at_one_prompt_length_says_why_its_times_are_scaled(
    lengths: tuple[int, ...], golden: Golden
) -> None:
    """A default profile runs split models at the workload's own length, which does not tell a longer context's
    price; at two lengths they are extrapolated, and nothing is to be said."""
    machine = SyntheticMachine()
    profile = take_profile(machine, replace(default_plan(machine.spec, WORK), split_input_tokens=lengths))
    hardware = hypothetical_hardware(CPU, 2)
    made = make_plan(
        profile.spec,
        hardware,
        estimator_for(profile),
        capabilities_for("torch"),
        PlanOptions(intent=Intent(), workload=WORK),
    )
    document = plan_document(made, model="m", hardware=hardware.label, workload=WORK, profile=profile)
    sources = {c.config: c.estimate.tpot_s.source for c in document.candidates if c.estimate is not None}
    assert sources[TWO] == ("scaled" if len(lengths) == 1 else "extrapolated")
    said = [note for note in note_lines(document) if "at one prompt length" in note]
    assert len(said) == (len(lengths) == 1)
    golden("reports", said)
