"""Reading a Hugging Face config.json as what it is: bytes from outside.

Every value is bounded and every fault is one ConfigError that names the field, the value and what is allowed. It
knows no model family: ``fingerprint.families`` asks for the fields it needs.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from fingerprint.errors import ConfigError, NotFoundError

__all__ = [
    "MAX_CONTEXT",
    "MAX_LAYERS",
    "MAX_VOCAB",
    "MAX_WIDTH",
    "Fields",
    "divides",
    "read_config",
    "read_json_object",
    "show",
]

MAX_CONFIG_BYTES = 4 * 2**20
MAX_LEVELS = 64  # of objects and lists in each other; a published config has 5
# Bounds on what a config.json may claim: far above any model there is, low enough that no sum of them is absurd.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**22  # hidden, intermediate, heads, head_dim
MAX_VOCAB = 2**27
MAX_CONTEXT = 2**31


def read_config(path: Path) -> dict[str, object]:
    """Return the parsed config.json at ``path`` (the file, or a directory that holds it).

    Raises:
        NotFoundError: no such file or directory, or a directory without config.json.
        ConfigError: as :func:`read_json_object`.
    """
    is_folder = os.path.isdir(path)  # Path.is_dir raises where the folder above is closed to us
    file = path / "config.json" if is_folder else path
    missing = f"{path} has no config.json" if is_folder else f"there is no file {file}"
    return read_json_object(file, f"{missing}; give a model directory or its config.json", "a config.json")


def read_json_object(file: Path, missing: str, kind: str) -> dict[str, object]:
    """Return the JSON object in ``file``.

    Args:
        missing: the message where there is no such file.
        kind: what the file should be, for messages, such as ``a config.json``.

    Raises:
        NotFoundError: no such file.
        ConfigError: not readable, larger than 4 MiB, not JSON, not a JSON object, or nested beyond 64 levels.
    """
    try:
        if not _is_file(file):
            raise NotFoundError(missing)
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes; that is not {kind}")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a JSON {type(config).__name__}, {kind} holds an object")
    if _nests_beyond(config, MAX_LEVELS):
        raise ConfigError(f"{file} nests objects and lists more than {MAX_LEVELS} levels deep; that is not {kind}")
    return config


def _nests_beyond(value: dict[str, object], levels: int) -> bool:
    """Return whether objects and lists hold each other on more levels than ``levels``, from ``value`` on."""
    level: list[dict[str, object] | list[object]] = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _is_file(file: Path) -> bool:
    """Return whether the path is a file. Raises OSError where that cannot be seen; a pipe is never opened."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def show(value: object) -> str:
    """Return ``value`` for a message: one short line whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def divides(name: str, small: int, whole_name: str, whole: int) -> None:
    """Raise ConfigError unless ``small`` divides ``whole``."""
    if whole % small:
        raise ConfigError(f"{name}={small} must divide {whole_name}={whole}; it leaves {whole % small}")


class Fields:
    """The fields of one parsed config.json, read with checks. Null counts as absent, as in transformers."""

    def __init__(self, config: Mapping[str, object], family: str) -> None:
        self._config = config
        self.family = family

    def given(self, *names: str) -> tuple[str, object]:
        """Name and value of the field that goes by any of ``names``; ``(names[0], None)`` when absent or null.

        Raises:
            ConfigError: it is given under two names with different values.
        """
        found = [(name, self._config[name]) for name in names if self._config.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(
                    f"{found[0][0]}={show(found[0][1])} and {name}={show(value)} are the same field of "
                    f"{self.family} and differ; keep one"
                )
        return found[0] if found else (names[0], None)

    def has(self, name: str) -> bool:
        """Return whether the key is there, be it null."""
        return name in self._config

    def count(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
        """Return an integer in least..most; without a ``default`` the field is required.

        Raises:
            ConfigError: missing, not an integer (true and 4.0 are not), or out of bounds.
        """
        name, value = self.given(*names)
        if value is None:
            if default is None:
                raise ConfigError(f"{name} is missing; a {self.family} config.json needs it ({least} to {most:,})")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{name} must be an integer from {least} to {most:,}, got {show(value)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return the value of a field that is true or false.

        Raises:
            ConfigError: another type.
        """
        _, value = self.given(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {show(value)}")
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return ``layer_types``, one name per layer; None when absent.

        Raises:
            ConfigError: not a list of that many strings.
        """
        _, value = self.given("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(isinstance(t, str) for t in value):
            raise ConfigError(f"layer_types must name a type for each of {num_layers} layers, got {show(value)}")
        return value
