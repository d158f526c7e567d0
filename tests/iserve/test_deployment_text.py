"""Terminal output about one deployment: its plan, its update, its steps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fingerprint.codec import from_json
from iserve.api_documents import DeploymentDocument, ProgressDocument, ReplicaDocument
from iserve.cli import show, update
from iserve.cli.progress import StepDisplay
from iserve.planning.deployability import DeployableDocument
from iserve.planning.document import PlanDocument
from tests.golden_words import Golden

GOLDEN = Path(__file__).parent / "golden"
REPLICA = ReplicaDocument(
    worker_id="a-1",
    status="ready",
    device_ids=("GPU-a",),
    layers_per_stage=(2,),
    url=None,
    restarts=0,
    error=None,
)
DOCUMENT = DeploymentDocument(
    name="a",
    model="m",
    intent="min-cost",
    status="ready",
    error=None,
    base_url=None,
    config=None,
    layers_per_stage=(),
    device_ids=(),
    worker_url=None,
    restarts=0,
    created_at=1000.25,
    replicas=(REPLICA,),
)


@pytest.fixture
def plan() -> PlanDocument:
    """A plan that can be deployed on this machine."""
    document = from_json((GOLDEN / "plan-measured.json").read_bytes(), PlanDocument)
    assert document.verdict is not None
    return replace(document, verdict=replace(document.verdict, deployable=DeployableDocument(here=True)))


def test_what_is_deployed_is_not_said_to_be_deployable(
    plan: PlanDocument, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of a deployment without workers, such as one that was refused."""
    show._print(replace(DOCUMENT, replicas=()), plan, ())
    assert "Deploy here" in capsys.readouterr().out
    show._print(DOCUMENT, plan, ())
    said = capsys.readouterr().out
    assert "At this load" in said
    assert "Deploy here" not in said


@pytest.mark.parametrize(
    "stop_first",
    [False, True],
)
def test_an_update_says_what_becomes_of_the_former_workers_where_they_are_left(
    plan: PlanDocument, capsys: pytest.CaptureFixture[str], stop_first: bool, golden: Golden
) -> None:
    controller: Any = SimpleNamespace(get=lambda *_: plan)
    update._follow(controller, DOCUMENT, stop_first=stop_first, as_json=False)
    said = capsys.readouterr().out
    golden("reports", said.splitlines()[-1])
    assert "Deploy here" not in said


def test_a_step_without_a_count_has_none_of_the_step_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = ProgressDocument(step="tp=1 pp=2", done=359, total=359, elapsed_s=1.0)
    with StepDisplay(quiet=False) as display:
        display.show("profiling", progress)
        display.show("launching", None)
    assert capsys.readouterr().err.splitlines()[-1] == "launching"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with StepDisplay(quiet=False) as display:
        display.show("profiling", progress)
        display.show("launching", None)
        assert display._bar is not None
        (task,) = display._bar.tasks
        assert (task.description, task.total, task.fields["detail"]) == ("launching", None, "")
