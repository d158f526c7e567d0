"""The controller's state, in SQLite and in PostgreSQL: what is written is there after a restart, and two writers
never lose a row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
)
from fingerprint.verification import Reading, Verification
from iserve.route_table import ApiKeyRecord
from iserve.state.store import KeptAnswer, Store
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile
from tests.golden_words import Golden
from tests.iserve.state.raw_sql import Where, execute


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


def test_a_folder_that_cannot_be_written_is_one_clear_error(path: Path, golden: Golden) -> None:
    path.write_text("a file where the folder should be")
    with golden.raises("controller", UnavailableError):
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
        launch_workload=Workload(),
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
