"""Classes of errors, by the name that another process gives."""

from __future__ import annotations

import pytest

from fingerprint.errors import EngineError, NotFoundError, error_class


def test_a_class_is_found_by_its_name() -> None:
    assert error_class("NotFoundError", EngineError) is NotFoundError


@pytest.mark.parametrize("name", [None, "", 3, "annotations", "__all__", "error_class", "Exception", "OSError"])
def test_what_names_no_class_of_ours_is_the_default(name: object) -> None:
    assert error_class(name, EngineError) is EngineError
