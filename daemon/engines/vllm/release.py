"""Knowledge of vLLM releases: run on a GPU, read in its sources, or neither."""

from __future__ import annotations

from enum import StrEnum

from packaging.version import InvalidVersion, Version

from daemon.engines.vllm.variant_plug_in import takes_release

__all__ = [
    "KNOWN",
    "NEWEST",
    "NEWEST_RUN",
    "RUN_WITH_DELTAS",
    "SLOTS_SINCE",
    "Standing",
    "delta_release",
    "has_plug_in",
    "image_release",
    "keeps_adapters_apart",
    "serves_deltas",
    "standing_of",
]

_OLDEST_READ, _NEWEST_READ = (0, 24), (0, 33)
_RUN = frozenset({(0, 24), (0, 26), (0, 33)})  # on an H200: docs/decisions/0025
_APART_SINCE = (0, 26)  # decision 42
RUN_WITH_DELTAS = frozenset({(0, 33)})  # with the plug-in of ``variants`` on an H200: docs/decisions/0048
NEWEST_RUN = "{}.{}.0".format(*max(_RUN))
NEWEST = "{}.{}.0".format(*_NEWEST_READ)
SLOTS_SINCE = "{}.{}".format(*_APART_SINCE)
KNOWN = "{}.{} to {}.{}".format(*_OLDEST_READ, *_NEWEST_READ)


class Standing(StrEnum):
    """Degree to which a release is verified."""

    RUN = "run"
    READ = "read"
    UNKNOWN = "unknown"


def standing_of(version: str) -> Standing:
    """Return the standing of ``version`` ("0.33.0"); its patch release and its local part do not count.

    A pre-release or a development build ("0.33.0rc1", "0.33.1.dev5") is neither what ran nor what was read.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return Standing.UNKNOWN
    release = (found.major, found.minor)
    if found.is_prerelease or not _OLDEST_READ <= release <= _NEWEST_READ:
        return Standing.UNKNOWN
    return Standing.RUN if release in _RUN else Standing.READ


def keeps_adapters_apart(version: str) -> bool:
    """Return whether each row of a step has its own adapter even where one was loaded since the step before.

    Releases without that keep the rows' slots while the requests are the same, though a load may have moved their
    adapters to other slots.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return (found.major, found.minor) >= _APART_SINCE


def serves_deltas(version: str) -> bool:
    """Return whether the plug-in of ``variants`` was run with ``version`` on a GPU, and takes it.

    The plug-in takes no further patch release than those whose sources it was written for.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return (found.major, found.minor) in RUN_WITH_DELTAS and has_plug_in(version)


def has_plug_in(version: str) -> bool:
    """Return whether the plug-in of ``variants`` was written for ``version``."""
    try:
        return takes_release(Version(version).public)
    except InvalidVersion:
        return False


def delta_release() -> str:
    """Return the newest release that :func:`serves_deltas`; empty: there is none."""
    return "{}.{}.0".format(*max(RUN_WITH_DELTAS)) if RUN_WITH_DELTAS else ""


def image_release(version: str) -> str:
    """Return the release whose image is nearest to ``version``; without its local part where it is a release.

    No image of a pre-release or a development build is published: the nearest release that was read stands in.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return NEWEST
    if not found.is_prerelease:
        return found.public
    return "{}.{}.0".format(*min(max((found.major, found.minor), _OLDEST_READ), _NEWEST_READ))
