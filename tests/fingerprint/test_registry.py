"""Estimators and strategies by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fingerprint.errors import NotFoundError
from fingerprint.estimators.registry import Predicts, estimator_class, estimator_names
from tests.golden_words import Golden


@pytest.mark.parametrize(
    ("predicts", "names", "method"),
    [
        (Predicts.EVERYTHING, ("corrected", "depth-tied", "fingerprinted", "roofline"), "estimate"),
        (Predicts.MEMORY, ("M1", "M2", "M2-blocks", "M3", "counted"), "memory"),
        (Predicts.LATENCY, ("L1", "L2", "L2-device", "L3"), "latency"),
    ],
)
def test_every_name_is_a_class_that_answers(predicts: Predicts, names: tuple[str, ...], method: str) -> None:
    assert estimator_names(predicts) == names
    for name in names:
        assert callable(getattr(estimator_class(name, predicts), method))


def test_an_unknown_name_is_refused_with_those_there_are(golden: Golden) -> None:
    with golden.raises("fingerprint", NotFoundError):
        estimator_class("L2", Predicts.MEMORY)
    with golden.raises("fingerprint", NotFoundError):
        estimator_class("M2")


def test_the_roofline_needs_no_statistics_library() -> None:
    code = (
        "import sys; from fingerprint.estimators.registry import estimator_class; estimator_class('roofline'); "
        "sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
