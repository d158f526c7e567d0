"""Data that the controller gives the gateway of a deployment that rejects late requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.codec import from_json, to_json
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec
from fingerprint.gpus import gpu_spec
from fingerprint.load_waits import OneLoad
from iserve.api_types import DeployBody
from iserve.controller.reconcile import admission_policy_of, planned_service
from iserve.demo import demo_model_path
from iserve.planning.document import PlanDocument
from iserve.planning.pipeline import PlanOptions, alone_of, hypothetical_hardware, make_plan
from iserve.planning.plan_document import plan_document
from iserve.route_table import GatewayLimits, Route, RouteTable
from iserve.state.store import DeploymentRow
from planner.admission import AdmissionPolicy
from planner.intent import Slo
from tests.golden_words import Golden
from tests.iserve.test_autoscaling import at_work
from tests.iserve.test_replicas import Twins

pytestmark = pytest.mark.process

WORK = Workload(batch=4, input_tokens=64, output_tokens=16)
SLO = {"ttft_s": 1.0, "e2e_s": 8.0}


@pytest.fixture(scope="module")
def plan() -> PlanDocument:
    spec, hardware = load_spec(demo_model_path()), hypothetical_hardware(gpu_spec("a6000"), 1)
    estimator, options = RooflineEstimator(spec, hardware.gpu), PlanOptions(workload=WORK)
    made = make_plan(spec, hardware, estimator, capabilities_for("torch"), options)
    assert made.best is not None
    alone = alone_of(estimator, made.best.config, WORK)
    return plan_document(made, model="m", hardware=hardware.label, workload=WORK, alone=alone)


def row(plan: PlanDocument | None, **wish: Any) -> DeploymentRow:
    return DeploymentRow(
        id=1,
        name="a",
        created_at=0.0,
        request=to_json(DeployBody(name="a", **wish)).decode(),
        desired="running",
        phase="ready",
        error=None,
        plan=None if plan is None else to_json(plan).decode(),
        workers=None,
    )


def test_it_has_the_limits_asked_for_and_the_times_of_the_plan(plan: PlanDocument) -> None:
    assert plan.chosen is not None
    full, alone = plan.candidates[plan.chosen].estimate, plan.single_request
    assert full is not None
    assert alone is not None
    policy = admission_policy_of(row(plan, slo=SLO, reject_late=True), 4)
    assert policy is not None
    assert (policy.slo, policy.slots) == (Slo(ttft_s=1.0, e2e_s=8.0), 4)
    service = policy.service
    assert (service.input_tokens, service.output_tokens) == (64, 16)
    assert service.prompt_s == alone.ttft_s.value
    assert service.prompts_s(4 * 64) == pytest.approx(full.ttft_s.value)
    assert service.step_of(1) == alone.tpot_s.value
    assert service.step_of(4) == pytest.approx(full.tpot_s.value)
    assert from_json(to_json(policy), AdmissionPolicy) == policy


def test_no_more_run_at_once_than_find_slots_for_their_variants(plan: PlanDocument) -> None:
    """A bound of 2.2 of the batch of 4."""
    bound = [
        replace(one, estimate=None if one.estimate is None else replace(one.estimate, most_at_once=2.2))
        for one in plan.candidates
    ]
    policy = admission_policy_of(row(replace(plan, candidates=tuple(bound)), slo=SLO, reject_late=True), 4)
    free = admission_policy_of(row(plan, slo=SLO, reject_late=True), 4)
    assert policy is not None
    assert free is not None
    assert (policy.service.most_at_once, free.service.most_at_once) == (2.2, None)
    assert (policy.at_once, free.at_once) == (2, 4)


def test_it_knows_what_a_load_takes(plan: PlanDocument) -> None:
    """A plan of a release that did not know it is read, and has none."""
    load = OneLoad(load_s=1.5, stops_steps=True, counted_s=0.5)
    known = [
        replace(one, estimate=None if one.estimate is None else replace(one.estimate, one_load=load))
        for one in plan.candidates
    ]
    policy = admission_policy_of(row(replace(plan, candidates=tuple(known)), slo=SLO, reject_late=True), 4)
    assert policy is not None
    assert policy.service.one_load == load
    assert from_json(to_json(policy), AdmissionPolicy) == policy
    earlier = to_json(policy).replace(to_json(load), b"null")
    assert from_json(earlier, AdmissionPolicy).service.one_load is None
    left_out = earlier.replace(b',"one_load":null', b"").replace(b', "one_load": null', b"")
    assert b"one_load" not in left_out
    assert from_json(left_out, AdmissionPolicy).service.one_load is None


def test_a_table_of_an_earlier_release_is_read_and_rejects_none_until_the_controller_writes_its_own(
    plan: PlanDocument,
) -> None:
    policy = admission_policy_of(row(plan, slo=SLO, reject_late=True), 4)
    served = Route(name="a", model="m", created=0, max_context_tokens=80, workers=(), admission=policy)
    table = RouteTable(version=1, auth_required=False, routes=(served,), keys=(), limits=GatewayLimits())
    found = from_json(to_json(table).replace(b'"admission":', b'"punctuality":'), RouteTable)
    assert found == replace(table, routes=(replace(served, admission=None),))


def test_none_is_rejected_where_it_is_not_asked_for_or_not_planned_yet(plan: PlanDocument) -> None:
    assert admission_policy_of(row(plan, slo=SLO), 4) is None
    assert admission_policy_of(row(None, slo=SLO, reject_late=True), 4) is None
    assert planned_service('{"of": "another version"}') is None


def test_it_wants_to_know_what_is_late(golden: Golden) -> None:
    with golden.raises("controller", ConfigError):
        DeployBody(reject_late=True).options(default_policy="hybrid", load_threshold=0.2)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Twins]:
    with at_work(Twins(tmp_path)) as world:
        yield world


def test_its_workers_get_as_many_requests_as_they_have_slots(
    world: Twins, until: Callable[..., Any], plan: PlanDocument
) -> None:
    """The rest waits in the gateway, which then knows when each begins; elsewhere as many again wait there."""
    world.deploy_two(until, slo=SLO, reject_late=True)
    assert [(w.ready, w.max_outstanding) for w in world.route().workers] == [(True, 2)] * 2, "no plan, no times"
    world.store.update_deployment(world.store.deployment("a").id, plan=to_json(plan))
    world.reconciler.tick()
    table = from_json((world.node.home / "run" / "routes.json").read_bytes(), RouteTable)
    (route,) = table.routes
    assert route.admission == admission_policy_of(row(plan, slo=SLO, reject_late=True), 1)
    assert [worker.max_outstanding for worker in route.workers] == [1, 1]
    assert world.shown().rejects_late
