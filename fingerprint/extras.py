"""Optional dependencies: the extras of the distribution, and the error for one that is not installed.

Planning needs none of them, so a package of an extra is imported only where it is used, after ``need_extra``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from fingerprint.errors import MissingExtraError

__all__ = ["install_extra", "missing_extra", "need_extra"]

# Packages by extra, as pyproject.toml declares them.
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers", "safetensors", "tokenizers"),
    "exact": ("pulp", "highspy"),
}


def missing_extra(extra: str, what: str) -> str | None:
    """Return why ``what`` cannot be used and what to install, or None where the extra is installed."""
    absent = [package for package in _PACKAGES[extra] if not _is_installed(package)]
    if not absent:
        return None
    return f"{what} needs {', '.join(absent)} (not installed here): {install_extra(extra)}"


def install_extra(extra: str) -> str:
    """Return the command that installs the extra into this environment, whichever pip comes first on PATH."""
    return f"{shlex.quote(sys.executable)} -m pip install 'iserve[{extra}]'"


def need_extra(extra: str, what: str) -> None:
    """Raise MissingExtraError where a package of ``extra`` is not installed."""
    reason = missing_extra(extra, what)
    if reason is not None:
        raise MissingExtraError(reason)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook that blocks the package
        return False
