"""Reader of world files in YAML or JSON: unknown fields are errors, and every error is one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from iserve.attribute_docs import attribute_docstrings
from iserve.evaluation.world import World

__all__ = ["read_world", "world_of", "world_schema"]

_LARGEST_BYTES = 4 * 2**20


def read_world(path: Path, changes: Sequence[str] = ()) -> World:
    """Return the world that a file states.

    Args:
        changes: fields that have other values, as ``truth.all_reduce=4``.

    Raises:
        NotFoundError: the file cannot be read.
        ConfigError: it is not YAML or JSON, has an unknown field, lacks one, or a value is out of its range.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ConfigError(
                f"{path} has more than {_LARGEST_BYTES:,} bytes; a world file states laws, not traces"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(
            f"the world {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    value = _parsed(text, str(path))
    for change in changes:
        _set(value, change, path)
    return world_of(value, str(path))


def _set(value: object, change: str, path: Path) -> None:
    """Set the field that ``change`` names, within mappings."""
    name, separator, text = change.partition("=")
    *folders, last = name.split(".")
    for part in folders:
        value = value.setdefault(part, {}) if isinstance(value, dict) else value
    if not separator or not isinstance(value, dict):
        raise ConfigError(f"{path}: {change!r} is not FIELD=VALUE, or FIELD.FIELD=VALUE of fields within a field")
    value[last] = _parsed(text, change)


def _parsed(text: str, path: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML or JSON: {said}") from error


def world_of(value: object, where: str = "world") -> World:
    """Return the world that parsed YAML or JSON states. Raises ConfigError as :func:`read_world`."""
    _check_fields(value, World, where)
    try:
        return msgspec.convert(value, World)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    except BadInputError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_fields(value: object, kind: Any, path: str) -> None:
    """Raise ConfigError at a field that ``kind``, or a dataclass within it, does not have."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            return
        known = get_type_hints(kind)
        for name, member in value.items():
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{path}: unknown field {str(name)[:80]!r}; {hint}")
            _check_fields(member, known[name], f"{path}: {name}" if ":" not in path else f"{path}.{name}")
        return
    inner = [part for part in get_args(kind) if part is not Ellipsis]
    if isinstance(value, list):
        for number, member in enumerate(value):
            for part in inner:
                _check_fields(member, part, f"{path}[{number}]")
    elif isinstance(value, Mapping):
        for part in inner:
            if is_dataclass(part):
                members = value.items() if getattr(kind, "__origin__", None) is dict else ()
                for name, member in members:
                    _check_fields(member, part, f"{path}.{name}")
                if not members:
                    _check_fields(value, part, path)


def world_schema() -> dict[str, Any]:
    """Return the JSON schema of a world file, with each field's description."""
    schema: dict[str, Any] = msgspec.json.schema(World)
    kinds = {kind.__name__: kind for kind in _dataclasses(World)}
    for name, part in schema["$defs"].items():
        if name not in kinds:
            part.pop("description", None)
            continue
        part["additionalProperties"] = False
        part["description"] = (kinds[name].__doc__ or "").split("\n\n")[0]
        described = attribute_docstrings(kinds[name])
        for field in fields(kinds[name]):
            of = part["properties"][field.name]
            if field.default_factory is dict:
                of["default"] = {}  # msgspec says it since 0.23
            of["description"] = described[field.name]
    return schema


def _dataclasses(kind: Any) -> list[type]:
    """Return ``kind`` and the dataclasses that its fields hold."""
    if not is_dataclass(kind):
        return [found for part in get_args(kind) for found in _dataclasses(part)]
    hints = get_type_hints(kind)
    own = kind if isinstance(kind, type) else type(kind)
    return [own, *(found for field in fields(kind) for found in _dataclasses(hints[field.name]))]
