"""The controller's state, in SQLite and in PostgreSQL: what is written is there after a restart, and two writers
never lose a row."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.command import downgrade
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, create_engine, text

from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
)
from fingerprint.verification import Reading, Verification
from iserve.api_documents import DeploymentDocument
from iserve.api_types import DeployBody
from iserve.controller.stored_values import recorded_update, recorded_wish, recorded_workers
from iserve.planning.document import PlanDocument
from iserve.route_table import ApiKeyRecord
from iserve.state.database import open_database
from iserve.state.schema import metadata
from iserve.state.store import KeptAnswer, Store
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile

Where = Path | str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def where(request: pytest.FixtureRequest, path: Path) -> Where:
    """A new state of each kind."""
    if request.param == "sqlite":
        return path
    url = request.getfixturevalue("postgres").make_database()
    assert isinstance(url, str)
    return url


@pytest.fixture
def at(where: Where) -> Iterator[Callable[[], Store]]:
    """``at()``: the store there; the one that was opened before is closed, as one controller follows another."""
    opened: list[Store] = []

    def reopen() -> Store:
        while opened:
            opened.pop().close()
        opened.append(Store.open(where))
        return opened[-1]

    yield reopen
    while opened:
        opened.pop().close()


@contextmanager
def connected(where: Where) -> Iterator[Connection]:
    """Behind the store's back."""
    url = f"sqlite:///{where}" if isinstance(where, Path) else where.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def execute(where: Where, statement: str) -> None:
    with connected(where) as connection:
        connection.exec_driver_sql(statement)


def test_migrations_build_exactly_the_schema(where: Where, at: Callable[[], Store]) -> None:
    at()
    with connected(where) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_file_is_private(path: Path) -> None:
    Store.open(path).close()
    assert path.stat().st_mode & 0o077 == 0


def test_deployment_survives_reopening(at: Callable[[], Store]) -> None:
    store = at()
    row = store.add_deployment("a", b'{"model": null}')
    store.update_deployment(row.id, phase="failed", error="why")
    found = at().deployment("a")
    assert (found.request, found.phase, found.error, found.desired) == (
        '{"model": null}',
        "failed",
        "why",
        "running",
    )


def test_a_new_phase_clears_the_error(at: Callable[[], Store]) -> None:
    store = at()
    row = store.add_deployment("a", b"{}")
    store.update_deployment(row.id, phase="failed", error="why")
    store.update_deployment(row.id, phase="launching")
    assert store.deployment("a").error is None


def test_a_name_is_taken_once(at: Callable[[], Store]) -> None:
    store = at()
    store.add_deployment("a", b"{}")
    with pytest.raises(ConflictError, match="'a' exists already"):
        store.add_deployment("a", b"{}")
    store.delete_deployment(store.deployment("a").id)
    store.add_deployment("a", b"{}")


def test_two_threads_asking_for_one_name_get_it_once(at: Callable[[], Store]) -> None:
    store = at()
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        try:
            store.add_deployment("same", b"{}")
            outcomes.append("taken")
        except ConflictError:
            outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["taken"]


def test_events_go_with_their_deployment_and_stay_in_order(at: Callable[[], Store]) -> None:
    store = at()
    row = store.add_deployment("a", b"{}")
    for number in range(5):
        store.add_event(row.id, "step", str(number))
    store.add_event(None, "other", "kept")
    assert [e.message for e in store.events(deployment_id=row.id)] == ["0", "1", "2", "3", "4"]
    assert [e.message for e in store.events(after=3, deployment_id=row.id)] == ["3", "4"]
    store.delete_deployment(row.id)
    assert [e.message for e in store.events()] == ["kept"]


def test_no_id_is_given_out_twice(at: Callable[[], Store]) -> None:
    """An id names workers and what is done about them; a reader of events asks for those after the last it saw."""
    store = at()
    first = store.add_deployment("a", b"{}")
    store.add_event(first.id, "accepted", "a")
    (event,) = store.events()
    store.delete_deployment(first.id)
    assert store.add_deployment("a", b"{}").id > first.id
    store.add_event(None, "removed", "a")
    assert [e.kind for e in store.events(after=event.id)] == ["removed"]


def test_what_happened_to_a_deployment_that_is_gone_is_kept(at: Callable[[], Store]) -> None:
    store = at()
    row = store.add_deployment("a", b"{}")
    store.delete_deployment(row.id)
    store.add_event(row.id, "removing", "a")
    assert [(e.kind, e.deployment_id) for e in store.events()] == [("removing", None)]


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


def migrated_back(where: Where, to: str) -> None:
    with as_file(files("iserve.state") / "migrations") as scripts, connected(where) as connection:
        config = Config()
        config.set_main_option("script_location", str(scripts))
        config.attributes["connection"] = connection
        downgrade(config, to)


def test_the_worker_of_an_earlier_iserve_is_the_first_of_several(where: Where, at: Callable[[], Store]) -> None:
    """The worker is adopted as it runs; events stay.

    Leading back keeps the first; the unreadable is chosen anew.
    """
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
    both = (WORKER, replace(WORKER, worker_id="a-1-r2"))
    store.update_deployment(1, workers=to_json(both))
    assert recorded_workers(store.deployment("a")) == both
    store.close()
    migrated_back(where, "0004")
    database = open_database(where)
    with database.read() as connection:
        kept = connection.execute(text("SELECT worker FROM deployments ORDER BY id")).scalars().all()
    database.close()
    assert [None if one is None else from_json(one, WorkerSpec) for one in kept] == [WORKER, None, None]
    store = at()
    assert recorded_workers(store.deployment("a")) == (WORKER,)
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
    assert recorded_wish(steady) == DeployBody(model="m")
    wish = recorded_wish(moving)
    times = [level["times"] for level in levels]
    assert [wish.relative_rates.count(each) / len(wish.relative_rates) for each in times] == [0.5, 0.5], (
        "of the time"
    )
    assert wish.rate_window_s >= 86_400
    assert lost.request == "no JSON"
    store.close()
    migrated_back(where, "0005")
    database = open_database(where)
    with database.read() as connection:
        kept = connection.execute(text("SELECT request FROM deployments ORDER BY id")).scalars().all()
    database.close()
    assert [json.loads(one) for one in kept[:2]] == [{"model": "m"}, {"model": "m", "rate_per_s": 2.0}]


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
    wish = recorded_wish(asked)
    assert wish == recorded_update(asked)
    assert (wish.relative_rates, wish.expected_deployments, wish.reject_late) == ((1.5, 0.5), 3, True)
    assert wish.engine_args == {"expect": "kept"}
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


def test_todays_names_lead_back_to_the_former_ones(where: Where, at: Callable[[], Store]) -> None:
    of_former_names(where)
    at().close()
    migrated_back(where, "0008")
    with connected(where) as connection:
        query = "SELECT request, plan, phase FROM deployments ORDER BY id"
        (request, plan, phase), (unreadable, _, _) = connection.execute(text(query)).all()
        kinds = connection.execute(text("SELECT kind FROM events ORDER BY id")).scalars().all()
    assert (json.loads(request), phase, unreadable) == (FORMER_REQUEST, "asleep", "no JSON")
    assert json.loads(plan) == json.loads(PLAN_OF_0008.read_text())
    assert kinds == ["accepted", "asleep", "waking"]


def test_migrations_lead_back_too(where: Where, at: Callable[[], Store]) -> None:
    """Each undoes what it did, so that a row of the first tables outlives the way there and back."""
    at().add_deployment("a", b"{}")
    migrated_back(where, "0001")
    execute(where, "SELECT key_id, sha256, scope, label, created_at, revoked FROM api_keys")
    assert [d.name for d in at().deployments()] == ["a"]


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


def test_a_folder_that_cannot_be_written_is_one_clear_error(path: Path) -> None:
    path.write_text("a file where the folder should be")
    with pytest.raises(UnavailableError, match=r"cannot write .*state.db: File exists"):
        Store.open(path / "state.db")


def test_a_profile_that_cannot_be_read_counts_as_absent(where: Where, at: Callable[[], Store]) -> None:
    store = at()
    profile = take_profile(SyntheticMachine())
    store.put_profile(profile, "here")
    assert store.profile(profile.spec.shape_hash, profile.engine, "here") == profile
    execute(where, """UPDATE profiles SET body = '{"of": "another version"}'""")
    assert store.profile(profile.spec.shape_hash, profile.engine, "here") is None
    assert store.profiles() == ()


def verification(**config: int) -> Verification:
    reading = Reading(value=0.5, low=0.4, high=0.6, repeats=5)
    return Verification(
        config=DeploymentConfig(**config),
        workload=Workload(),
        room=Workload(),
        layers_per_stage=(8,),
        measured_at="2026-11-21T10:00:00+00:00",
        ttft_s=reading,
        tpot_s=None,
        memory_bytes_per_gpu=None,
        kv_tokens=640,
    )


def test_the_newest_check_of_a_configuration_is_kept_and_all_of_a_shape_can_be_forgotten(
    at: Callable[[], Store],
) -> None:
    store = at()
    where = {"shape_hash": "s", "engine": "torch", "machine_key": "here"}
    first, second = verification(), verification(tp=2)
    later = replace(first, kv_tokens=1280)
    for check in (first, second, later):
        store.put_verification(check, model="m", **where)
    store.put_verification(first, model="other", **where | {"machine_key": "there"})
    store.put_verification(first, model="n", **where | {"shape_hash": "t"})
    store = at()
    assert [row.verification for row in store.verifications(**where)] == [second, later]
    assert [row.model for row in store.verifications(shape_hash="s")] == ["m", "m", "other"]
    assert len(store.verifications()) == 4
    assert store.forget_verifications("s") == 3
    assert store.forget_verifications("s") == 0
    assert [row.model for row in store.verifications()] == ["n"]


def test_a_check_that_cannot_be_read_counts_as_absent(where: Where, at: Callable[[], Store]) -> None:
    store = at()
    store.put_verification(verification(), model="m", shape_hash="s", engine="torch", machine_key="here")
    execute(where, """UPDATE verifications SET body = '{"of": "another version"}'""")
    assert store.verifications() == ()
    assert store.forget_verifications("s") == 1


def test_keys_are_hashes_and_can_be_revoked(at: Callable[[], Store]) -> None:
    store = at()
    store.add_key(ApiKeyRecord(key_id="key-1", sha256="ab" * 32, scope="admin"), "laptop")
    assert [(k.key_id, k.label, k.revoked) for k in store.api_keys()] == [("key-1", "laptop", False)]
    store.revoke_key("key-1")
    assert store.api_keys()[0].revoked
    with pytest.raises(NotFoundError):
        store.revoke_key("key-2")


def test_route_versions_only_rise(at: Callable[[], Store]) -> None:
    store = at()
    first = [store.next_route_version() for _ in range(3)]
    assert [*first, at().next_route_version()] == [1, 2, 3, 4]


def test_a_damaged_database_is_one_clear_error(path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(UnavailableError, match="not a database"):
        Store.open(path)


NO_UPDATE = {
    "sqlite": "CREATE TRIGGER no_update BEFORE UPDATE ON deployments BEGIN SELECT RAISE(ABORT, 'full'); END",
    "postgresql": """
        CREATE FUNCTION no_update() RETURNS trigger AS $$ BEGIN RAISE 'full'; END $$ LANGUAGE plpgsql;
        CREATE TRIGGER no_update BEFORE UPDATE ON deployments FOR EACH ROW EXECUTE FUNCTION no_update()
    """,
}


def test_a_write_that_fails_changes_nothing(where: Where, at: Callable[[], Store]) -> None:
    store = at()
    row = store.add_deployment("a", b"{}")
    execute(where, NO_UPDATE["sqlite" if isinstance(where, Path) else "postgresql"])
    with pytest.raises(Exception, match="full"):
        store.update_deployment(row.id, phase="ready")
    assert store.deployment("a").phase == "accepted"


def kept(key: str = "k", created_at: float = 100.0) -> KeptAnswer:
    return KeptAnswer(key=key, created_at=created_at, request='{"name":"a"}', answer='{"status":"accepted"}')


def test_an_answer_is_kept_with_its_deployment_or_not_at_all(at: Callable[[], Store]) -> None:
    store = at()
    store.add_deployment("a", b"{}", created_at=100.0, message="a: asked for", kept=kept())
    assert [(e.kind, e.message) for e in store.events()] == [("accepted", "a: asked for")]
    with pytest.raises(ConflictError, match="'a' exists already"):
        store.add_deployment("a", b"{}", message="a again", kept=kept("other"))
    with pytest.raises(ConflictError):  # the key is taken: no second deployment under another name
        store.add_deployment("b", b"{}", message="b", kept=kept())
    store = at()
    assert store.kept_answer("k", made_after=0.0) == kept()
    assert store.kept_answer("other", made_after=0.0) is None
    assert [d.name for d in store.deployments()] == ["a"]
    assert len(store.events()) == 1


def test_a_kept_answer_outlives_its_deployment_and_ends_with_its_time(at: Callable[[], Store]) -> None:
    store = at()
    store.delete_deployment(store.add_deployment("a", b"{}", kept=kept()).id)
    assert store.kept_answer("k", made_after=100.0) == kept()
    assert store.kept_answer("k", made_after=100.1) is None
    store.add_deployment("a", b"{}", kept=kept(created_at=200.0), forget_before=100.1)  # the key is free again
    assert store.kept_answer("k", made_after=0.0) == kept(created_at=200.0)


def test_texts_of_people_are_kept_as_they_are_or_refused(at: Callable[[], Store]) -> None:
    """Texts may be as long as a folder's name; a zero byte, which PostgreSQL keeps in no text, is no reason to
    fail.
    """
    store = at()
    label = "long \U0001f600 " * 100
    store.add_key(ApiKeyRecord(key_id="key-1", sha256="ab" * 32, scope="admin"), label)
    assert [k.label for k in store.api_keys()] == [label]
    store.add_event(None, "other", "a\0b")
    assert [e.message for e in store.events()] == ["a\\0b"]


def test_a_reason_is_kept_whatever_a_log_or_a_name_of_a_file_brings_into_it(at: Callable[[], Store]) -> None:
    """Else the deployment would be taken up again for ever."""
    store = at()
    row = store.add_deployment("a", b"{}")
    store.update_deployment(row.id, phase="failed", error="cannot read \udcff.bin: \0")
    store.add_event(row.id, "failed", "cannot read \udcff.bin: \0")
    told = "cannot read \\udcff.bin: \\0"
    assert store.deployment("a").error == store.events()[-1].message == told
