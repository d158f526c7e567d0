"""Names of devices that a compression computes on, read without torch."""

from __future__ import annotations

import re

from fingerprint.errors import ConfigError

__all__ = ["gpu_number"]

_NAME = re.compile(r"cpu|cuda(?::(0|[1-9][0-9]?))?")  # two digits: torch keeps the number of a GPU in 8 bits


def gpu_number(name: str) -> int | None:
    """Return the number of the GPU ``cuda`` (the first) or ``cuda:N``; None of ``cpu``.

    Raises:
        ConfigError: any other name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name[:40]!r} is neither cpu nor cuda:N")
    return None if name == "cpu" else int(found[1] or 0)
