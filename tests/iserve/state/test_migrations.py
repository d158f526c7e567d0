"""Migrations of the state: each schema that was released leads to today's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import text

from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import (
    UnavailableError,
)
from iserve.api_documents import DeploymentDocument
from iserve.api_types import DeployBody
from iserve.controller.stored_values import recorded_request, recorded_update, recorded_workers
from iserve.planning.document import PlanDocument
from iserve.state.database import open_database
from iserve.state.schema import metadata
from iserve.state.store import Store
from tests.iserve.state.raw_sql import Where, connected, execute


def test_migrations_build_exactly_the_schema(where: Where, at: Callable[[], Store]) -> None:
    at()
    with connected(where) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


FIRST_SCHEMA = """
INSERT INTO deployments VALUES (1, 'a', 1.5, '{}', 'running', 'ready', NULL, NULL, NULL);
INSERT INTO deployments VALUES (2, 'b', 2.5, '{}', 'running', 'ready', NULL, NULL, NULL);
INSERT INTO events (id, at, deployment_id, kind, message) VALUES (1, 1.5, 1, 'accepted', 'a');
INSERT INTO events (id, at, deployment_id, kind, message) VALUES (2, 2.5, 2, 'accepted', 'b');
INSERT INTO events (id, at, deployment_id, kind, message) VALUES (3, 3.5, NULL, 'other', 'kept');
INSERT INTO api_keys VALUES ('key-1', 'ab', 'admin', 'laptop', 1.5, false);
INSERT INTO profiles VALUES ('s', 'torch', 'here', 'm', 1.5, '{}')
"""


def test_a_state_of_the_first_schema_is_migrated_whole(where: Where, at: Callable[[], Store]) -> None:
    """Every row is there afterwards, events with their deployments."""
    database = open_database(where)
    database.migrate(to="0001")
    database.close()
    for statement in FIRST_SCHEMA.strip().split(";\n"):
        execute(where, statement)
    for table in ("deployments", "events") if isinstance(where, str) else ():  # as if the ids had been given out
        execute(where, f"SELECT setval('{table}_id_seq', 3)")
    store = at()
    assert [(d.id, d.name, d.created_at, d.phase) for d in store.deployments()] == [
        (1, "a", 1.5, "ready"),
        (2, "b", 2.5, "ready"),
    ]
    assert [(e.id, e.deployment_id, e.message) for e in store.events()] == [
        (1, 1, "a"),
        (2, 2, "b"),
        (3, None, "kept"),
    ]
    assert [k.label for k in store.api_keys()] == ["laptop"]
    assert [d.workers for d in store.deployments()] == [None, None]
    store.delete_deployment(2)
    assert [e.message for e in store.events()] == ["a", "kept"]
    assert store.add_deployment("c", b"{}").id > 2


WORKER = WorkerSpec(
    worker_id="a-1",
    served_model="a",
    checkpoint="/m",
    config=DeploymentConfig(),
    stages=(StageAssignment(device_ids=("cpu:0",), num_layers=2),),
    limits=WorkerLimits(
        max_batch=1, max_batched_tokens=64, max_context_tokens=64, kv_tokens=64, memory_bytes_per_device=1000
    ),
)


def test_the_worker_of_an_earlier_iserve_is_the_first_of_several(where: Where, at: Callable[[], Store]) -> None:
    """The worker is adopted as it runs; events stay; the unreadable is chosen anew."""
    database = open_database(where)
    database.migrate(to="0004")
    with database.write() as connection:
        columns = "id, name, created_at, request, desired, phase, worker"
        for number, name, worker in ((1, "a", to_json(WORKER).decode()), (2, "b", "no JSON"), (3, "c", None)):
            values = {"id": number, "name": name, "worker": worker}
            row = ":id, :name, 1.5, '{}', 'running', 'ready', :worker"
            connection.execute(text(f"INSERT INTO deployments ({columns}) VALUES ({row})"), values)
        event = "(id, at, deployment_id, kind, message) VALUES (1, 1.5, 1, 'accepted', 'a')"
        connection.execute(text(f"INSERT INTO events {event}"))
    database.close()
    store = at()
    rows = store.deployments()
    assert [recorded_workers(row) for row in rows] == [(WORKER,), (), ()]
    assert [(e.deployment_id, e.message) for e in store.events()] == [(1, "a")]


def test_levels_of_a_rate_that_were_asked_for_are_windows_now(where: Where, at: Callable[[], Store]) -> None:
    """The windows are as long as the levels were taken to last; a request that cannot be read stays as it is."""
    database = open_database(where)
    database.migrate(to="0005")
    levels = [{"share": 0.75, "times": 1.5}, {"share": 0.25, "times": 0.5}]
    asked = [{"model": "m", "rate_levels": []}, {"model": "m", "rate_per_s": 2.0, "rate_levels": levels}]
    with database.write() as connection:
        for number, request in enumerate([*map(json.dumps, asked), "no JSON"]):
            values = {"id": number, "name": str(number), "request": request}
            row = ":id, :name, 1.5, :request, 'running', 'ready'"
            columns = "id, name, created_at, request, desired, phase"
            connection.execute(text(f"INSERT INTO deployments ({columns}) VALUES ({row})"), values)
    database.close()
    store = at()
    steady, moving, lost = store.deployments()
    assert recorded_request(steady) == DeployBody(model="m")
    request = recorded_request(moving)
    times = [level["times"] for level in levels]
    assert [request.relative_rates.count(each) / len(request.relative_rates) for each in times] == [0.5, 0.5], (
        "of the time"
    )
    assert request.rate_window_s >= 86_400
    assert lost.request == "no JSON"


FORMER_REQUEST = {"model": "m", "rate_per_s": 2.0, "rates": [1.5, 0.5], "expect": 3, "refuse_late": True} | {
    "intent": "min-latency",
    "slo": {"e2e_s": 8.0},
    "scale_to_zero_s": 60.0,
    "engine_args": {"expect": "kept"},  # an engine's own option
}


FORMER_ANSWER = {"name": "a", "model": "m", "intent": "min-latency", "status": "accepted", "created_at": 1.5} | {
    **dict.fromkeys(("error", "base_url", "config", "worker_url")),
    "layers_per_stage": [],
    "device_ids": [],
    "restarts": 0,
    "refuses_late": True,
}


PLAN_OF_0008 = Path(__file__).with_name("recorded") / "plan-0008.json"


def of_former_names(where: Where) -> None:
    """Write what the version before 0009 has of two deployments, one of them unreadable."""
    database = open_database(where)
    database.migrate(to="0008")
    request, answer, plan = json.dumps(FORMER_REQUEST), json.dumps(FORMER_ANSWER), PLAN_OF_0008.read_text()
    columns = ("id", "name", "created_at", "request", "desired", "phase", "plan", "update_request", "update_plan")
    rows = [
        (1, "a", 1.5, request, "running", "asleep", plan, request, plan),
        (2, "b", 1.5, "no JSON", "running", "waking", "no JSON", None, None),
    ]
    with database.write() as connection:
        insert = f"INSERT INTO deployments ({', '.join(columns)}) VALUES ({', '.join(f':{c}' for c in columns)})"
        for row in rows:
            connection.execute(text(insert), dict(zip(columns, row, strict=True)))
        for number, kind in enumerate(("accepted", "asleep", "waking"), start=1):
            event = "INSERT INTO events (id, at, deployment_id, kind, message) VALUES (:id, 1.5, 1, :kind, 'a')"
            connection.execute(text(event), {"id": number, "kind": kind})
        key = (
            "INSERT INTO idempotency_keys (key, created_at, request, answer) VALUES ('k', 1.5, :request, :answer)"
        )
        connection.execute(text(key), {"request": request, "answer": answer})
    database.close()


def test_what_was_kept_by_former_names_is_read_by_todays(where: Where, at: Callable[[], Store]) -> None:
    of_former_names(where)
    store = at()
    asked, lost = store.deployments()
    request = recorded_request(asked)
    assert request == recorded_update(asked)
    assert (request.relative_rates, request.expected_deployments, request.reject_late) == ((1.5, 0.5), 3, True)
    assert request.engine_args == {"expect": "kept"}
    assert (asked.phase, lost.phase) == ("scaled-to-zero", "scaling-up")
    assert (lost.request, lost.plan) == ("no JSON", "no JSON")
    assert [event.kind for event in store.events()] == ["accepted", "scaled-to-zero", "scaling-up"]
    kept = store.kept_answer("k", made_after=0.0)
    assert kept is not None
    assert from_json(kept.answer, DeploymentDocument).rejects_late
    for stored in (asked.plan, asked.update_plan):
        plan, former = from_json(stored or "", PlanDocument), json.loads(PLAN_OF_0008.read_text())
        assert plan.why_not.combined_relaxation is not None
        assert len(plan.why_not.relaxations) == len(former["why_not"]["relax"]) > 0
        assert plan.load_forecast is not None
        assert [level.relative_rate for level in plan.load_forecast.rate_levels] == [1.5, 0.5]
        assert plan.verdict is not None
        assert plan.verdict.runner_up is not None
        assert plan.verdict.first_relaxation == former["verdict"]["relax_first"]
        assert plan.verdict.runner_up.equivalent
        (candidate,) = plan.candidates
        assert candidate.estimate is not None
        assert candidate.estimate.measured_config == candidate.config
        assert plan.single_request == candidate.estimate
        assert plan.capacity is not None
        assert plan.capacity.cache_sizes is not None


VERIFICATION_OF_0009 = {
    "config": {"tp": 1, "pp": 1, "engine": "torch", "weights": "16bit", "kv": "16bit", "pruning": "none"},
    "workload": {"batch": 2, "input_tokens": 64, "output_tokens": 16},
    "room": {"batch": 2, "input_tokens": 64, "output_tokens": 128},
    "layers_per_stage": [8],
    "measured_at": "2026-11-21T10:00:00+00:00",
    "ttft_s": {"value": 0.5, "low": 0.4, "high": 0.6, "repeats": 5},
    "tpot_s": None,
    "memory_bytes_per_gpu": None,
    "kv_tokens": 640,
    "alone": {
        "workload": {"batch": 1, "input_tokens": 64, "output_tokens": 16},
        "ttft_s": {"value": 0.3, "low": 0.2, "high": 0.4, "repeats": 5},
        "tpot_s": None,
    },
}


def test_verifications_of_former_names_are_read_by_todays(where: Where, at: Callable[[], Store]) -> None:
    bodies = (json.dumps(VERIFICATION_OF_0009), "no JSON", "[]")
    database = open_database(where)
    database.migrate(to="0009")
    with database.write() as connection:
        for number, body in enumerate(bodies):
            insert = (
                "INSERT INTO verifications (shape_hash, engine, machine_key, config, model, created_at, body) "
                "VALUES ('s', 'torch', 'here', :config, 'm', 1.5, :body)"
            )
            connection.execute(text(insert), {"config": str(number), "body": body})
    database.close()
    store = at()
    (row,) = store.verifications(shape_hash="s")
    assert row.verification.launch_workload == Workload(2, 64, 128)
    assert row.verification.single_request is not None
    assert row.verification.single_request.workload == Workload(1, 64, 16)


def test_a_migration_that_is_cut_short_leaves_the_old_schema(
    at: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed in it: the next start builds on what was there."""
    create_table, made = Operations.create_table, []

    def fail_at_the_third(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        if len(made) == 3:
            raise KeyboardInterrupt
        return create_table(*arguments, **options)

    monkeypatch.setattr(Operations, "create_table", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        at()
    monkeypatch.undo()
    assert at().add_deployment("a", b"{}").id == 1


def test_a_state_of_a_newer_iserve_is_one_clear_error(where: Where, at: Callable[[], Store]) -> None:
    at()
    execute(where, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UnavailableError, match=r"another version of iServe .*9999"):
        at()
