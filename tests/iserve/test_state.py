"""The controller's state: what is written is there after a restart, and two writers never lose a row."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConflictError, NotFoundError, UnavailableError
from fingerprint.verification import Reading, Verification
from iserve.routes import ApiKeyRecord
from iserve.state.schema import metadata
from iserve.state.store import Store
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_migrations_build_exactly_the_schema(path: Path) -> None:
    Store.open(path).close()
    with create_engine(f"sqlite:///{path}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_file_is_private(path: Path) -> None:
    Store.open(path).close()
    assert path.stat().st_mode & 0o077 == 0


def test_deployment_survives_reopening(path: Path) -> None:
    store = Store.open(path)
    row = store.add_deployment("a", b'{"model": null}')
    store.update_deployment(row.id, phase="failed", error="why")
    store.close()
    found = Store.open(path).deployment("a")
    assert (found.request, found.phase, found.error, found.desired) == (
        '{"model": null}',
        "failed",
        "why",
        "running",
    )


def test_a_new_phase_clears_the_error(path: Path) -> None:
    store = Store.open(path)
    row = store.add_deployment("a", b"{}")
    store.update_deployment(row.id, phase="failed", error="why")
    store.update_deployment(row.id, phase="launching")
    assert store.deployment("a").error is None


def test_a_name_is_taken_once(path: Path) -> None:
    store = Store.open(path)
    store.add_deployment("a", b"{}")
    with pytest.raises(ConflictError, match="'a' exists already"):
        store.add_deployment("a", b"{}")
    store.delete_deployment(store.deployment("a").id)
    store.add_deployment("a", b"{}")


def test_two_threads_asking_for_one_name_get_it_once(path: Path) -> None:
    store = Store.open(path)
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


def test_events_go_with_their_deployment_and_stay_in_order(path: Path) -> None:
    store = Store.open(path)
    row = store.add_deployment("a", b"{}")
    for number in range(5):
        store.add_event(row.id, "step", str(number))
    store.add_event(None, "other", "kept")
    assert [e.message for e in store.events(deployment_id=row.id)] == ["0", "1", "2", "3", "4"]
    assert [e.message for e in store.events(after=3, deployment_id=row.id)] == ["3", "4"]
    store.delete_deployment(row.id)
    assert [e.message for e in store.events()] == ["kept"]


def test_no_id_is_given_out_twice(path: Path) -> None:
    """An id names workers and what is done about them; a reader of events asks for those after the last it saw."""
    store = Store.open(path)
    first = store.add_deployment("a", b"{}")
    store.add_event(first.id, "accepted", "a")
    (event,) = store.events()
    store.delete_deployment(first.id)
    assert store.add_deployment("a", b"{}").id > first.id
    store.add_event(None, "removed", "a")
    assert [e.kind for e in store.events(after=event.id)] == ["removed"]


def test_what_happened_to_a_deployment_that_is_gone_is_kept(path: Path) -> None:
    store = Store.open(path)
    row = store.add_deployment("a", b"{}")
    store.delete_deployment(row.id)
    store.add_event(row.id, "removing", "a")
    assert [(e.kind, e.deployment_id) for e in store.events()] == [("removing", None)]


def test_a_state_of_the_first_schema_is_migrated_whole(path: Path) -> None:
    """Every row is there afterwards, events with their deployments."""
    store = Store(f"sqlite:///{path}")
    store.migrate(to="0001")
    for name in ("a", "b"):
        row = store.add_deployment(name, b"{}")
        store.add_event(row.id, "accepted", name)
    store.add_event(None, "other", "kept")
    before = (store.deployments(), store.events())
    store.close()
    store = Store.open(path)
    assert (store.deployments(), store.events()) == before
    store.delete_deployment(store.deployment("b").id)
    assert [e.message for e in store.events()] == ["a", "kept"]
    assert store.add_deployment("c", b"{}").id == 3


def test_a_migration_that_is_cut_short_leaves_the_old_schema(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process is killed in it: the next start builds on what was there."""
    create_table, made = Operations.create_table, []

    def fail_at_the_third(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        if len(made) == 3:
            raise KeyboardInterrupt
        return create_table(*arguments, **options)

    monkeypatch.setattr(Operations, "create_table", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        Store.open(path)
    monkeypatch.undo()
    assert Store.open(path).add_deployment("a", b"{}").id == 1


def test_a_state_of_a_newer_iserve_is_one_clear_error(path: Path) -> None:
    Store.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UnavailableError, match=r"another version of iServe .*9999"):
        Store.open(path)


def test_a_folder_that_cannot_be_written_is_one_clear_error(path: Path) -> None:
    path.write_text("a file where the folder should be")
    with pytest.raises(UnavailableError, match=r"cannot write .*state.db: File exists"):
        Store.open(path / "state.db")


def test_a_profile_that_cannot_be_read_counts_as_absent(path: Path) -> None:
    store = Store.open(path)
    profile = take_profile(SyntheticMachine())
    store.put_profile(profile, "here")
    assert store.profile(profile.spec.shape_hash, profile.engine, "here") == profile
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE profiles SET body = '{"of": "another version"}'""")
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


def test_the_newest_check_of_a_configuration_is_kept_and_all_of_a_shape_can_be_forgotten(path: Path) -> None:
    store = Store.open(path)
    where = {"shape_hash": "s", "engine": "torch", "machine_key": "here"}
    first, second = verification(), verification(tp=2)
    later = replace(first, kv_tokens=1280)
    for check in (first, second, later):
        store.put_verification(check, model="m", **where)
    store.put_verification(first, model="other", **where | {"machine_key": "there"})
    store.put_verification(first, model="n", **where | {"shape_hash": "t"})
    store.close()
    store = Store.open(path)
    assert [row.verification for row in store.verifications(**where)] == [second, later]
    assert [row.model for row in store.verifications(shape_hash="s")] == ["m", "m", "other"]
    assert len(store.verifications()) == 4
    assert store.forget_verifications("s") == 3
    assert store.forget_verifications("s") == 0
    assert [row.model for row in store.verifications()] == ["n"]


def test_a_check_that_cannot_be_read_counts_as_absent(path: Path) -> None:
    store = Store.open(path)
    store.put_verification(verification(), model="m", shape_hash="s", engine="torch", machine_key="here")
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE verifications SET body = '{"of": "another version"}'""")
    assert store.verifications() == ()
    assert store.forget_verifications("s") == 1


def test_keys_are_hashes_and_can_be_revoked(path: Path) -> None:
    store = Store.open(path)
    store.add_key(ApiKeyRecord(key_id="key-1", sha256="ab" * 32, scope="admin"), "laptop")
    assert [(k.key_id, k.label, k.revoked) for k in store.api_keys()] == [("key-1", "laptop", False)]
    store.revoke_key("key-1")
    assert store.api_keys()[0].revoked
    with pytest.raises(NotFoundError):
        store.revoke_key("key-2")


def test_route_versions_only_rise(path: Path) -> None:
    store = Store.open(path)
    first = [store.next_route_version() for _ in range(3)]
    store.close()
    assert [*first, Store.open(path).next_route_version()] == [1, 2, 3, 4]


def test_a_damaged_database_is_one_clear_error(path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(UnavailableError, match="not a database"):
        Store.open(path)


def test_a_write_that_fails_changes_nothing(path: Path) -> None:
    store = Store.open(path)
    row = store.add_deployment("a", b"{}")
    blocker = sqlite3.connect(path)
    blocker.execute("PRAGMA query_only = 0")
    blocker.execute("CREATE TRIGGER no_update BEFORE UPDATE ON deployments BEGIN SELECT RAISE(ABORT, 'full'); END")
    blocker.commit()
    with pytest.raises(Exception, match="full"):
        store.update_deployment(row.id, phase="ready")
    assert store.deployment("a").phase == "accepted"
