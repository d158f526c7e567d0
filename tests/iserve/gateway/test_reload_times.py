"""Time of a load by which the gateway chooses what to unload: of bytes and of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.load_time import RECORDED_TENSORS, recorded_load_s
from iserve.gateway.variant_worker import reload_s
from iserve.route_table import VariantRoute
from placement.worker_variants import WorkerVariants
from tests.iserve.gateway.variant_requests import variant

BYTES = 6_832_916  # of an adapter of q and v, rank 16, of Llama-3.1-8B


def adapter(tensors: int | None) -> VariantRoute:
    return replace(variant(f"of-{tensors}"), num_bytes=BYTES, num_tensors=tensors)


def test_a_load_takes_longer_by_its_tensors() -> None:
    assert reload_s(adapter(RECORDED_TENSORS)) == pytest.approx(0.0587, rel=0.01)
    assert reload_s(adapter(128)) == pytest.approx(0.0206, rel=0.01)


def test_a_delta_counts_as_many_tensors_as_were_recorded() -> None:
    assert reload_s(adapter(None)) == recorded_load_s(BYTES) == reload_s(adapter(RECORDED_TENSORS))


def test_a_variant_that_left_the_table_has_no_bytes() -> None:
    assert reload_s(None) == recorded_load_s(0)


def test_of_equal_bytes_the_one_with_fewer_tensors_makes_room() -> None:
    """The first was used longer ago, and takes three times as long to load again."""
    routes = {one.name: one for one in (adapter(128), adapter(448))}
    found = WorkerVariants(1, 2, lambda name: reload_s(routes.get(name)))
    for at_s, name in enumerate(("of-448", "of-128")):
        found.load(name, float(at_s))
        found.admit(name, float(at_s))
        found.leave(name)
    assert found.evictions("new", 2.0) == ("of-128",)
