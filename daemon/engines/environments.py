"""Engine environments under the home: their layout, and which installations are complete.

An environment is the folder ``HOME/engines/ENGINE-VERSION``, a virtual environment. Its file ``installed.json`` is
written last and removed first, so a folder without it is unfinished, whichever process was killed, and is never
used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fingerprint.errors import ConfigError

__all__ = ["EngineEnvironment", "environment_of", "environments", "exact_version", "is_version"]

FOLDER = "engines"
_MARKER = "installed.json"
_NUMBERS = 3  # of a release, as engines write theirs
_MAX_VERSION_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """Version of an engine, in a virtual environment of its own."""

    engine: str
    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def marker(self) -> Path:
        return self.folder / _MARKER

    @property
    def complete(self) -> bool:
        return self.marker.is_file()


def environment_of(home: Path, engine: str, version: str) -> EngineEnvironment:
    """Return where ``version`` of ``engine`` is, or would be, installed."""
    return EngineEnvironment(engine, version, home / FOLDER / f"{engine}-{version}")


def environments(home: Path, engine: str) -> tuple[EngineEnvironment, ...]:
    """Return the environments of ``engine``, unfinished ones included, the newest version first."""
    return tuple(sorted(_environments(home, engine), key=lambda one: Version(one.version), reverse=True))


def _environments(home: Path, engine: str) -> Iterator[EngineEnvironment]:
    try:
        folders = list((home / FOLDER).iterdir())
    except OSError:
        return
    for folder in folders:
        version = folder.name.removeprefix(f"{engine}-")
        if version != folder.name and _is_canonical(version) and folder.is_dir():
            yield EngineEnvironment(engine, version, folder)


def _is_canonical(version: str) -> bool:
    try:
        return str(Version(version)) == version
    except InvalidVersion:
        return False


def exact_version(text: str) -> str:
    """Return ``text`` as a full version number in its canonical form.

    ``0.33`` becomes ``0.33.0``, ``v0.33-rc1`` becomes ``0.33.0rc1``.

    Raises:
        ConfigError: not one exact version.
    """
    try:
        if len(text) > _MAX_VERSION_CHARACTERS or text != text.strip():
            raise InvalidVersion(text)
        version = Version(text)
    except InvalidVersion:
        raise ConfigError(f"a version is a number such as 0.33.0, got {text[:80]!r}") from None
    base = version.base_version
    return f"{base}{'.0' * (_NUMBERS - len(version.release))}{str(version).removeprefix(base)}"


def is_version(installed: str, asked: str) -> bool:
    """Return whether ``installed`` is the version ``asked`` for: 0.33.0+cu130 is 0.33.0, and 0.33 is as well."""
    try:
        there, wanted = Version(installed), Version(asked)
    except InvalidVersion:
        return installed == asked
    return there == wanted or (wanted.local is None and Version(there.public) == wanted)
