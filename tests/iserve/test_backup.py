"""Backup and restore: what is acknowledged is in a backup, and a restored home is that backup."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from daemon.process import own_record, write_record
from fingerprint.errors import BadInputError, ConfigError, ConflictError, IserveError, NotFoundError
from iserve.cli.app import make_app
from iserve.cli.home_processes import take_down
from iserve.controller.home_lock import hold_home
from iserve.route_table import ApiKeyRecord
from iserve.settings import Settings
from iserve.state.backup import back_up, restore, state_file
from iserve.state.database import open_database
from iserve.state.store import Store
from tests.daemon.conftest import Node
from tests.golden_words import Golden


def crash_after_keys(state: Path, first: int, last: int) -> None:
    """Leave the files that kill -9 leaves of a store which has just acknowledged these keys."""
    store = Store.open(state)
    add_keys(store, first, last)
    files = {path: path.read_bytes() for path in state.parent.glob("state.db*")}
    store.close()
    for path, content in files.items():
        path.write_bytes(content)
    assert state.with_name("state.db-wal").stat().st_size > 0


def keys(state: Path) -> set[str]:
    store = Store.open(state)
    try:
        return {row.key_id for row in store.api_keys()}
    finally:
        store.close()


def numbered(count: int) -> set[str]:
    return {f"key-{number}" for number in range(count)}


def add_keys(store: Store, first: int, last: int) -> None:
    for number in range(first, last):
        store.add_key(ApiKeyRecord(key_id=f"key-{number}", sha256=f"{number:064x}", scope="admin"), "label")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home" / "state.db"


@pytest.fixture
def kept(state: Path, tmp_path: Path) -> Path:
    """A backup of five keys, made while a store was open."""
    store = Store.open(state)
    add_keys(store, 0, 5)
    back_up(state, tmp_path / "kept.db")
    store.close()
    return tmp_path / "kept.db"


def test_a_backup_beside_a_writer_holds_what_was_acknowledged(state: Path, tmp_path: Path) -> None:
    store = Store.open(state)
    add_keys(store, 0, 5)
    contents = back_up(state, tmp_path / "kept.db")
    add_keys(store, 5, 8)
    store.close()
    assert dict(contents.rows)["api_keys"] == 5
    assert (tmp_path / "kept.db").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.glob("*kept.db*")) == [tmp_path / "kept.db"]
    assert keys(tmp_path / "kept.db") == numbered(5)
    assert keys(state) == numbered(8)


def test_a_backup_after_a_crash_holds_what_is_only_in_the_log(state: Path, tmp_path: Path) -> None:
    crash_after_keys(state, 0, 7)
    back_up(state, tmp_path / "kept.db")
    assert keys(tmp_path / "kept.db") == numbered(7)


def test_restoring_over_what_a_crash_left_gives_the_backup(state: Path, kept: Path) -> None:
    crash_after_keys(state, 5, 45)
    restore(kept, state)
    assert [path.name for path in state.parent.iterdir()] == ["state.db"]
    assert state.stat().st_mode & 0o777 == 0o600
    assert keys(state) == numbered(5)


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 1000], ids=["empty", "nonsense"])
def test_restoring_over_a_damaged_state_gives_the_backup(state: Path, kept: Path, damage: bytes) -> None:
    crash_after_keys(state, 5, 45)
    state.write_bytes(damage)
    restore(kept, state)
    assert keys(state) == numbered(5)


def test_a_backup_starts_a_new_home(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    restore(kept, tmp_path / "other" / "state.db")
    assert keys(tmp_path / "other" / "state.db") == numbered(5)


def test_a_copy_of_a_crashed_home_s_files_can_be_restored(state: Path, kept: Path, tmp_path: Path) -> None:
    """The files are copied by hand, the log with them."""
    crash_after_keys(state, 5, 9)
    (tmp_path / "files").mkdir()
    for path in state.parent.iterdir():
        shutil.copy(path, tmp_path / "files")
    restore(kept, state)
    restore(tmp_path / "files" / "state.db", state)
    assert keys(state) == numbered(9)


def test_a_link_to_a_crashed_home_s_files_is_restored_with_their_log(
    state: Path, kept: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    crash_after_keys(tmp_path / "files" / "state.db", 0, 9)
    (tmp_path / "link.db").symlink_to("files/state.db")
    restore(tmp_path / "link.db", state)
    assert keys(state) == numbered(9)


def test_a_backup_of_an_older_iserve_is_migrated_before_it_takes_its_place(state: Path, kept: Path) -> None:
    old = kept.with_name("old.db")
    database = open_database(old)
    database.migrate("0003")
    database.close()
    assert revision(old) == ["0003"]
    restore(old, state)
    assert revision(state) == revision(kept)
    assert revision(old) == ["0003"]
    assert [path.name for path in state.parent.iterdir()] == ["state.db"]
    assert state.stat().st_mode & 0o777 == 0o600
    assert keys(state) == set()


def revision(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT version_num FROM alembic_version")]


def unreadable(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 8000)


def of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.commit()


def of_a_newer_iserve(path: Path) -> None:
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()


def without_columns(*revisions: str) -> Callable[[Path], None]:
    """A maker of a file with the tables of a state, each of one column, and with these revisions."""

    def make(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
            for table in ("deployments", "api_keys", "models", "profiles", "verifications"):
                connection.execute(f"CREATE TABLE {table} (id INTEGER)")
            connection.executemany("INSERT INTO alembic_version VALUES (?)", [(name,) for name in revisions])
            connection.commit()

    return make


def cut_short(path: Path) -> None:
    store = Store.open(path)
    add_keys(store, 0, 40)
    store.close()
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda path: path.write_text("{}"), BadInputError, id="json"),
        pytest.param(lambda path: path.touch(), BadInputError, id="empty"),
        pytest.param(unreadable, BadInputError, id="unreadable"),
        pytest.param(cut_short, BadInputError, id="cut short"),
        pytest.param(of_another_program, BadInputError, id="another program's"),
        pytest.param(of_a_newer_iserve, BadInputError, id="newer"),
        pytest.param(without_columns(), BadInputError, id="no revision"),
        pytest.param(without_columns("0006", "0007"), BadInputError, id="two revisions"),
        pytest.param(without_columns("0001"), BadInputError, id="no columns to migrate"),
        pytest.param(without_columns("0004"), BadInputError, id="tables of a later revision"),
        pytest.param(without_columns("0007"), BadInputError, id="no columns"),
        pytest.param(lambda path: path.mkdir(), BadInputError, id="folder"),
        pytest.param(lambda path: None, NotFoundError, id="absent"),
    ],
)
def test_what_is_no_backup_is_refused_and_changes_nothing(
    state: Path, kept: Path, tmp_path: Path, make: object, error: type[IserveError]
) -> None:
    make(tmp_path / "other.db")  # type: ignore[operator]
    with pytest.raises(error):
        restore(tmp_path / "other.db", state)
    assert [path.name for path in state.parent.iterdir()] == ["state.db"]
    assert keys(state) == numbered(5)


def test_a_file_that_exists_is_never_replaced_by_a_backup(state: Path, kept: Path) -> None:
    before = kept.read_bytes()
    with pytest.raises(ConflictError):
        back_up(state, kept)
    assert kept.read_bytes() == before


@pytest.mark.parametrize("name", ["state.db-wal", "state.db-shm", "state.db-journal", ".state.db.kept"])
def test_a_backup_takes_no_name_that_sqlite_or_a_restore_removes(state: Path, name: str, kept: Path) -> None:
    with pytest.raises(ConfigError, match="the state's own"):
        back_up(state, state.with_name(name))
    assert [path.name for path in state.parent.iterdir()] == ["state.db"]
    back_up(state, kept.with_name(name))


def test_postgres_is_backed_up_by_its_own_tools() -> None:
    with pytest.raises(ConfigError, match="pg_dump"):
        state_file("postgresql://iserve@db/iserve")


def test_down_joins_the_log_that_a_crash_left(state: Path) -> None:
    crash_after_keys(state, 0, 40)
    list(take_down(Settings(home=state.parent, port=0, api_port=0)))
    assert not state.with_name("state.db-wal").exists()
    assert keys(state) == numbered(40)


def test_restore_refuses_while_the_installation_runs(
    state: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=state.parent)
    monkeypatch.setenv("ISERVE_HOME", str(settings.home))
    runner, app = CliRunner(), make_app("restore")
    record = settings.run_folder / "gateway.json"
    write_record(record, own_record(url="http://127.0.0.1:1", token=""))
    with pytest.raises(ConflictError, match="gateway"):
        runner.invoke(app, ["restore", str(kept)], catch_exceptions=False)
    record.unlink()
    with hold_home(settings):
        monkeypatch.setattr("daemon.role_lock._PATIENCE_S", 0.0)
        with pytest.raises(ConflictError, match="controller"):
            runner.invoke(app, ["restore", str(kept)], catch_exceptions=False)
    assert runner.invoke(app, ["restore", str(kept)], catch_exceptions=False).exit_code == 0


@pytest.mark.process
def test_restore_refuses_while_a_worker_lives_that_nothing_watches(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """After kill -9 of all that watches it; its id may be that of another worker in the backup."""
    node = Node(tmp_path / "watched")
    runner, app = CliRunner(), make_app("restore")
    monkeypatch.setenv("ISERVE_HOME", str(node.home))
    try:
        node.start()
        node.ready("chat-1")
        node.signal_daemon(signal.SIGKILL)
        with golden.raises("controller", ConflictError):
            runner.invoke(app, ["restore", str(kept)], catch_exceptions=False)
        assert not (node.home / "state.db").exists()
    finally:
        node.clear()
    assert runner.invoke(app, ["restore", str(kept)], catch_exceptions=False).exit_code == 0


def test_restore_says_that_revoked_keys_are_valid_again(
    state: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(state)
    store.revoke_key("key-1")
    store.close()
    monkeypatch.setenv("ISERVE_HOME", str(state.parent))
    runner, app, said = CliRunner(), make_app("restore"), "revoked since the backup are valid again"
    assert said in runner.invoke(app, ["restore", str(kept)], catch_exceptions=False).output
    store = Store.open(state)
    assert not any(row.revoked for row in store.api_keys())
    store.close()
    Store.open(tmp_path / "keyless.db").close()
    assert said not in runner.invoke(app, ["restore", str(tmp_path / "keyless.db")], catch_exceptions=False).output


def test_the_command_names_what_the_backup_holds(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(state)
    store.put_model("llama", "/models/llama")
    store.close()
    monkeypatch.setenv("ISERVE_HOME", str(state.parent))
    done = CliRunner().invoke(make_app("backup"), ["backup", str(tmp_path / "kept.db")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 models" in done.output
