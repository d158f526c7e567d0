"""Lookup of distributions in an interpreter: versions, package folders, whether the first is editable.

The module's text is run in the engine's own interpreter, so this file needs the standard library alone. Nothing is
imported of the engine: the folder is the import system's answer, since some editable installations are found by an
import hook alone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib import metadata
from typing import Any

__all__ = ["look"]


def look(names: list[str]) -> dict[str, Any]:
    """Return versions and package folders of the distributions ``names``, and the kind of the first of them."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    is_editable = False
    for name in names:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        versions[name] = _version_of(found)
        if name == names[0]:
            origin = json.loads(found.read_text("direct_url.json") or "{}")  # PEP 610
            is_editable = bool(origin.get("dir_info", {}).get("editable"))
    packages = {name: _folder_of(name.replace("-", "_")) for name in names}
    return {"versions": versions, "packages": packages, "is_editable": is_editable}


def _version_of(found: metadata.Distribution) -> str:
    """Return the version, from the headers alone: ``found.version`` parses the README behind them, too."""
    headers = (found.read_text("METADATA") or "").partition("\n\n")[0]
    named = re.search(r"^Version:[ \t]*(\S+)[ \t]*$", headers, re.MULTILINE | re.IGNORECASE)
    return named[1] if named else found.version  # older ones have it in another file


def _folder_of(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or spec.origin is None:  # a namespace: what an uninstallation left
        return None
    return next(iter(spec.submodule_search_locations or ()), None)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry]
    print(json.dumps({**look(sys.argv[1:]), "path": sys.path}))
