"""Python sources of installed packages, parsed and never imported."""

from __future__ import annotations

import ast
import threading

__all__ = ["parse_python"]

# CPython 3.11 ends with a SystemError where two threads parse at once (python/cpython issue 106905).
_PARSING = threading.Lock()


def parse_python(source: str | bytes) -> ast.Module:
    """Return the module's tree; one thread parses at a time.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    with _PARSING:
        return ast.parse(source)
