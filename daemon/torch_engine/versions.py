"""Versions of the distributions that the embedded engine runs with, read without importing them."""

from __future__ import annotations

from importlib import metadata

__all__ = ["component_versions", "version_of"]


def component_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions that a profile of the embedded engine is recorded with."""
    return (
        ("engine", f"torch {version_of('iserve')}"),
        ("torch", version_of("torch")),
        ("transformers", version_of("transformers")),
    )


def version_of(distribution: str) -> str:
    """Return the installed version of ``distribution``; ``unknown`` where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
