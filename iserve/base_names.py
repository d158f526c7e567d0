"""Names of a base model, and whether an adapter's configuration names another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fingerprint.config_json import read_config
from fingerprint.errors import IserveError
from fingerprint.sanitize import printable

__all__ = ["other_base_warning"]

_HUB_FOLDER = "models--"  # of the hub's cache: models--OWNER--NAME


def other_base_warning(trained_on: str | None, base: str, directory: Path) -> str | None:
    """Return a warning where an adapter names another base than the one that its shapes fit; None: it does not.

    Names are compared by their last part, without regard to case, for a model is named by hub ids of several
    owners, by folders, and as its own configuration says. None of these vouches for the weights.

    Args:
        trained_on: as the adapter's configuration says; None: it says nothing.
        base: as it was named.
        directory: of the base.
    """
    if trained_on is None or _leaf(trained_on) in set(_names(base, directory)):
        return None
    return (
        f"the adapter names '{printable(trained_on[:200])}' as its base, and {base} is not called so: its shapes "
        "fit, which says nothing of the weights; if these differ, its answers are of no use"
    )


def _names(base: str, directory: Path) -> Iterator[str]:
    yield _leaf(base)
    yield _leaf(str(directory))
    yield from _of_hub(directory.parts)
    try:
        stated = read_config(directory).get("_name_or_path")
    except IserveError:
        return
    if isinstance(stated, str) and stated:
        yield _leaf(stated)


def _of_hub(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        if part.startswith(_HUB_FOLDER):
            yield part.rpartition("--")[2].casefold()


def _leaf(name: str) -> str:
    """Return the last part of a path or a hub id."""
    return next(_of_hub([*Path(name).parts]), Path(name).name.casefold())
