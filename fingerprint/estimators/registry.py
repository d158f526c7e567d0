"""Estimators by name. Which one fits a question is the caller's decision; how each is built is its own affair.

Classes are imported when asked for, so that planning from a datasheet loads no statistics library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fingerprint.errors import NotFoundError

if TYPE_CHECKING:
    from fingerprint.estimates import Estimator

__all__ = ["estimator_class", "estimator_names"]

# A new estimator is one file, one row here, and one subclass of the conformance test. Constructors differ, because
# estimators learn from different things (a datasheet, a profile); the rows share ``estimate`` and ``name``.
_CLASSES = {
    "fingerprinted": "fingerprint.estimators.fingerprinted:FingerprintedEstimator",
    "roofline": "fingerprint.estimators.roofline:RooflineEstimator",
}


def estimator_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_CLASSES))


def estimator_class(name: str) -> type[Any]:
    """The class registered as ``name``; its instances follow ``fingerprint.estimates.Estimator``.

    Raises:
        NotFoundError: no such estimator.
    """
    if name not in _CLASSES:
        raise NotFoundError(f"no estimator is called {name!r}; there are {', '.join(estimator_names())}")
    module, _, attribute = _CLASSES[name].partition(":")
    found: type[Estimator] = getattr(import_module(module), attribute)
    return found
