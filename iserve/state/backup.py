"""Backup and restore of a state file (SQLite): whole copies, checked, and put in place in one step.

A state in WAL mode is two files: after a crash the log next to it (``-wal``) holds commits that the file does not.
A file put in place of the database while that log stays there gets the pages of the log written over it.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from urllib.parse import quote

from daemon.atomic_file import sync_folder
from fingerprint.errors import BadInputError, ConfigError, ConflictError, NotFoundError, StateUnavailableError
from fingerprint.output_file import output_file

__all__ = ["BackupContents", "back_up", "join_log", "restore", "state_file"]

_COUNTED = ("deployments", "models", "variants", "quality_results", "profiles", "verifications", "api_keys")
_LOG_SUFFIXES = ("-wal", "-shm", "-journal")
_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class BackupContents:
    """Rows of a backup, by table, and its size."""

    rows: tuple[tuple[str, int], ...]
    num_bytes: int

    def __str__(self) -> str:
        rows = ", ".join(f"{count} {table.replace('_', ' ')}" for table, count in self.rows)
        return f"{rows}; {self.num_bytes / 1024:,.0f} KiB"


def state_file(where: Path | str) -> Path:
    """Return the path of a state in SQLite.

    Raises:
        ConfigError: the state is in PostgreSQL, whose own tools copy it.
    """
    if isinstance(where, str):
        raise ConfigError(
            "the state is in PostgreSQL (ISERVE_DATABASE_URL): back up with pg_dump, restore with pg_restore"
        )
    return where


def back_up(state: Path, target: Path) -> BackupContents:
    """Write a copy of the state to ``target``, mode 0600, while a controller may be writing to it or none runs.

    Raises:
        NotFoundError: there is no state.
        ConfigError: ``target`` cannot be a new file, or is a name of the state's own files.
        ConflictError: ``target`` exists.
        StateUnavailableError: the state is damaged, or the copy cannot be written; no part of it is left.
    """
    if not state.exists():
        raise NotFoundError(f"there is no state at {state}; nothing was deployed or registered here yet")
    target = output_file(target)
    if target.exists():
        raise ConflictError(f"{target} exists; name another file, or remove that one first")
    if target.parent.samefile(state.parent) and _is_taken(target.name, state.name):
        raise ConfigError(f"{target} is a name of the state's own files; name another file")
    with _copy_of(state, f"file:{quote(str(state))}?mode=ro", target) as (copy, contents):
        os.replace(copy, target)
        sync_folder(target.parent)
    return contents


def restore(source: Path, state: Path) -> BackupContents:
    """Put a copy of ``source``, migrated, in place of the state: all of it or, after any failure, nothing.

    The caller holds the home's lock; no process has the state open.

    Raises:
        NotFoundError: there is no ``source``.
        BadInputError: it is not a backup, or is one of a newer iServe.
        StateUnavailableError: the state cannot be written.
    """
    if not source.exists():
        raise NotFoundError(f"there is no file {source}")
    if not source.is_file():
        raise BadInputError(f"{source} is not a file")
    if state.exists() and source.samefile(state):
        raise ConfigError(f"{source} is this home's state itself; name a backup")
    for left_by_a_crash in state.parent.glob(f".{state.name}.*"):
        left_by_a_crash.unlink(missing_ok=True)
    # A copy from a read-only medium can be opened only so; with a log next to it, its log is to be read too.
    file = source.resolve()
    immutable = "" if file.with_name(file.name + "-wal").exists() else "&immutable=1"
    with _copy_of(source, f"file:{quote(str(file))}?mode=ro{immutable}", state) as (copy, contents):
        _bring_up_to_date(copy, source)
        _discard_log(state)
        os.replace(copy, state)
        sync_folder(state.parent)
    return contents


def join_log(state: Path) -> None:
    """Write the commits of the log next to the state into the file, and remove the log.

    Raises:
        ConflictError: another process has the state open; the log stays.
        StateUnavailableError: the state is damaged or cannot be written; the log stays.
    """
    if not state.exists():
        return
    try:
        with closing(_connect(f"file:{quote(str(state))}?mode=rw")) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise ConflictError(f"another process has {state} open; end it first") from error
        raise StateUnavailableError(f"{state} cannot be written: {error}") from error


@contextmanager
def _copy_of(source: Path, uri: str, target: Path) -> Iterator[tuple[Path, BackupContents]]:
    """Yield a checked copy next to ``target``, which is gone at the end unless it was moved."""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise StateUnavailableError(f"cannot write {target}: {error.strerror}; mend the folder") from error
    os.close(handle)
    copy = Path(name)
    try:
        try:
            with closing(_connect(uri)) as opened, closing(_connect(f"file:{quote(name)}?mode=rw")) as copied:
                _check_is_state(opened, source)
                opened.backup(copied)  # in one step, of one moment; the writer is not kept waiting
                copied.execute("PRAGMA journal_mode=DELETE")  # one file
                contents = _check_whole(copied, source)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, source, target) from error
        try:
            yield copy, contents
        except OSError as error:
            raise StateUnavailableError(f"cannot write {target}: {error.strerror}; mend the folder") from error
    finally:
        for left in (copy, *(copy.with_name(copy.name + suffix) for suffix in _LOG_SUFFIXES)):
            left.unlink(missing_ok=True)


def _bring_up_to_date(copy: Path, source: Path) -> None:
    """Migrate the copy of a backup to the newest schema, and see that the copy is one this iServe can read.

    Raises:
        BadInputError: its tables are not those of the schema that it names.
        StateUnavailableError: the copy cannot be written.
    """
    import sqlalchemy as sa

    from iserve.state.database import open_database
    from iserve.state.schema import metadata

    database = open_database(copy)
    try:
        database.migrate()
        with database.read() as connection:
            for table in metadata.sorted_tables:
                connection.execute(sa.select(table).limit(0))
    except (StateUnavailableError, sa.exc.IntegrityError) as error:
        if "full" in str(error) or "disk I/O error" in str(error):
            raise
        raise BadInputError(f"{source} is not a state of iServe: {error}; name another backup") from error
    finally:
        database.close()
    join_log(copy)  # one file again


def _is_taken(name: str, state: str) -> bool:
    """Return whether SQLite or a restore writes to, or removes, a file of this name next to the state."""
    return name in {state + suffix for suffix in _LOG_SUFFIXES} or name.startswith(f".{state}.")


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)


def _as_ours(error: sqlite3.DatabaseError, source: Path, target: Path) -> StateUnavailableError | BadInputError:
    cause = str(error)
    if "not a database" in cause or "malformed" in cause or "unsupported file format" in cause:
        return BadInputError(
            f"{source} is not a whole state of iServe: {cause}; name a file that `iserve backup` made"
        )
    if "full" in cause or "disk I/O error" in cause:
        return StateUnavailableError(f"{target} cannot be written: {cause}; free space in {target.parent}")
    return StateUnavailableError(f"{source} cannot be copied to {target}: {cause}")


def _check_is_state(opened: sqlite3.Connection, source: Path) -> None:
    tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"alembic_version", "deployments", "api_keys"} <= tables:
        raise BadInputError(f"{source} is not a state of iServe; name a file that `iserve backup` made")
    known = _known_revisions()
    revisions = [revision for (revision,) in opened.execute("SELECT version_num FROM alembic_version")]
    if len(revisions) != 1:
        raise BadInputError(
            f"{source} is not a state of iServe: it names {len(revisions)} schemas, not one; name another backup"
        )
    if revisions[0] not in known:
        raise BadInputError(
            f"{source} is of a newer iServe (schema {revisions[0]!s:.40}, this one knows up to {max(known)}); "
            "restore it with that version"
        )


def _check_whole(copied: sqlite3.Connection, source: Path) -> BackupContents:
    (said,) = copied.execute("PRAGMA quick_check(1)").fetchone()
    if said != "ok":
        raise BadInputError(f"{source} is damaged: {said!s:.200}; name another backup")
    tables = {name for (name,) in copied.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    rows = tuple(
        (table, int(copied.execute(f"SELECT count(*) FROM {table}").fetchone()[0]))
        for table in _COUNTED
        if table in tables  # an old state has fewer
    )
    (num_bytes,) = copied.execute(
        "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    ).fetchone()
    return BackupContents(rows, num_bytes)


def _known_revisions() -> frozenset[str]:
    from alembic.script import ScriptDirectory

    with as_file(files("iserve.state") / "migrations") as scripts:
        return frozenset(script.revision for script in ScriptDirectory(str(scripts)).walk_revisions())


def _discard_log(state: Path) -> None:
    """Leave the old state without a log, so that no part of it is written over what takes its place.

    A whole database takes its log in, and is the old state until the very replacement. Of a damaged one, which
    cannot, the log is removed.
    """
    with suppress(StateUnavailableError):
        join_log(state)
    for suffix in _LOG_SUFFIXES:
        state.with_name(state.name + suffix).unlink(missing_ok=True)
    sync_folder(state.parent)
