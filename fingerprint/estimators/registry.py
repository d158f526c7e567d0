"""Estimators and the strategies they are made of, by name. How each is built is its own affair.

An estimator answers for a whole configuration (``fingerprint.estimates.Estimator``). A strategy answers for its
memory or its latency alone, from a profile: the paper's M2 and L2, ours (``counted``, L3) where an engine carries
our step timer. Classes are imported when asked for, so that
planning from a datasheet loads no statistics library.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import Any

from fingerprint.errors import NotFoundError

__all__ = ["Predicts", "estimator_class", "estimator_names"]


class Predicts(StrEnum):
    """Scope of an estimator class: what it predicts."""

    EVERYTHING = "everything"  # ``estimate(config, workload) -> Estimate``
    MEMORY = "memory"  # ``memory(config, workload) -> MemoryEstimate``
    LATENCY = "latency"  # ``latency(config, workload) -> Latency``


# A new one is one file, one row here, and one subclass of the conformance test. Constructors of estimators differ,
# because they learn from different things (a datasheet, a profile); strategies are given the profile first.
_CLASSES = {
    Predicts.EVERYTHING: {
        "corrected": "fingerprint.estimators.corrected:CorrectedEstimator",
        "depth-tied": "fingerprint.estimators.depth_tied:DepthTiedEstimator",
        "fingerprinted": "fingerprint.estimators.fingerprinted:FingerprintedEstimator",
        "roofline": "fingerprint.estimators.roofline:RooflineEstimator",
    },
    Predicts.MEMORY: {
        "M1": "fingerprint.estimators.m1:M1",
        "M2": "fingerprint.estimators.m2:M2",
        "M2-blocks": "fingerprint.estimators.m2_blocks:M2Blocks",
        "M3": "fingerprint.estimators.m3:M3",
        "counted": "fingerprint.estimators.engine_memory:CountedMemory",
    },
    Predicts.LATENCY: {
        "L1": "fingerprint.estimators.l1:L1",
        "L2": "fingerprint.estimators.l2:L2",
        "L2-device": "fingerprint.estimators.l2_device:L2Device",
        "L3": "fingerprint.estimators.l3:L3",
    },
}


def estimator_names(predicts: Predicts = Predicts.EVERYTHING) -> tuple[str, ...]:
    """The registered names of those that predict that, sorted."""
    return tuple(sorted(_CLASSES[predicts]))


def estimator_class(name: str, predicts: Predicts = Predicts.EVERYTHING) -> type[Any]:
    """The class registered as ``name`` among those that predict that.

    Raises:
        NotFoundError: no such class.
    """
    path = _CLASSES[predicts].get(name)
    if path is None:
        known = ", ".join(estimator_names(predicts))
        raise NotFoundError(f"no estimator of {predicts} is called {name!r}; there are {known}")
    module, _, attribute = path.partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found
