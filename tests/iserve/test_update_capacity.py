"""Serving capacity across an update: no less than before, unless less is asked for.

Stand-in workers; a synthetic machine's profile, by which two workers of default capacity do not share a device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.worker_spec import WorkerSpec
from iserve.controller.reconcile import Reconciler
from iserve.controller.snapshot import without
from iserve.controller.stored_values import recorded_request, recorded_workers
from iserve.controller.update_capacity import WorkerCapacity, reduction
from iserve.rest_bodies import UpdateBody
from iserve.route_table import Demand
from iserve.state.store import DeploymentRow
from tests.golden_words import Golden
from tests.iserve.test_deployer import World

pytestmark = pytest.mark.process

Until = Callable[..., Any]
RUNTIME_SHARE = 0.35  # of a device: two fit, but the second has no half of what is left


class Updated(World):
    """A deployment of default capacity whose gateway has read all routes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.controller.demand = lambda: Demand(routes_version=2**31, deployments=())  # type: ignore[method-assign]
        self.reconciler = Reconciler(self.controller)

    def begin(self, until: Until, num_devices: int) -> WorkerSpec:
        self.start(cpu_devices=num_devices)
        self.know_demo(runtime_bytes=int(RUNTIME_SHARE * self.free_bytes()))
        self.deploy()
        until(lambda: self.phase() == "ready", "it is deployed")
        return self.worker()

    def row(self) -> DeploymentRow:
        return self.store.deployment("a")

    def worker(self) -> WorkerSpec:
        (spec,) = recorded_workers(self.row())
        return spec

    def update(self, until: Until, **changes: Any) -> DeploymentRow:
        """The deployment once the update has ended."""
        self.controller.update("a", UpdateBody(**changes))

        def ended() -> bool:
            self.reconciler.tick()
            row = self.row()
            return row.update_request is None and row.draining is None and row.phase == "ready"

        until(ended, "the update has ended")
        return self.row()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Updated]:
    with closing(Updated(tmp_path)) as world:
        yield world


def capacity(spec: WorkerSpec) -> WorkerCapacity:
    return WorkerCapacity.of([spec])


def test_a_free_device_takes_the_new_worker_at_the_same_capacity(world: Updated, until: Until) -> None:
    former = world.begin(until, num_devices=2)
    row = world.update(until, intent="min-latency")
    assert row.error is None
    assert world.worker().stages[0].device_ids != former.stages[0].device_ids
    assert capacity(world.worker()).holds(capacity(former))
    assert list(world.states()) == [world.worker().worker_id]


def test_what_would_serve_less_next_to_the_present_worker_is_refused_with_what_to_change(
    world: Updated, until: Until, golden: Golden
) -> None:
    former = world.begin(until, num_devices=1)
    row = world.update(until, intent="min-latency")
    assert row.error is not None
    golden.hide(re.search(r"at most ([\d.]+) GiB", row.error)[1], "N")  # of this machine
    golden("controller", row.error)
    assert f"{capacity(former)}); accept that" in row.error
    assert (world.worker(), recorded_request(row).intent) == (former, "min-cost")
    assert list(world.states()) == [former.worker_id]


def test_a_smaller_capacity_that_is_asked_for_is_taken_and_both_are_named(
    world: Updated, until: Until, golden: Golden
) -> None:
    former = world.begin(until, num_devices=1)
    row = world.update(until, batch=1, context_tokens=32)
    assert row.error is None
    assert capacity(world.worker()) == WorkerCapacity(1, 32, 32)
    (event,) = (event.message for event in world.store.events() if "updated, the former" in event.message)
    assert event.endswith(f", before {capacity(former)}")
    golden("controller", event)


def test_what_fits_in_no_case_is_refused_for_its_own_reason(world: Updated, until: Until, golden: Golden) -> None:
    world.begin(until, num_devices=1)
    row = world.update(until, intent="latency-slo", slo={"e2e_s": 1e-6})
    assert row.error is not None
    golden("controller", row.error)
    assert "next to its present worker" not in row.error


def test_memory_of_workers_that_end_counts_as_free(world: Updated, until: Until) -> None:
    former = world.begin(until, num_devices=2)
    node = world.node.client.node()
    (device_id,) = former.stages[0].device_ids
    there = {device.device_id: device.free_bytes for device in node.devices}
    after = {device.device_id: device.free_bytes for device in without(node, [former]).devices}
    assert after == there | {device_id: there[device_id] + former.promised_bytes()[device_id]}
    assert without(node, [former]).workers == ()
    assert {d.free_bytes for d in without(node, full=set(there)).devices} == {0}


def test_a_capacity_is_held_but_for_a_few_requests(golden: Golden) -> None:
    present = WorkerCapacity(179, 4096)
    assert replace(present, requests_at_once=175).holds(present)
    assert not replace(present, requests_at_once=100).holds(present)
    assert not replace(present, context_tokens=2048).holds(present)
    assert reduction(present, present) is None
    golden("controller", reduction(present, replace(present, requests_at_once=175)))


def test_a_smaller_kv_cache_is_named_where_requests_and_context_stay(golden: Golden) -> None:
    before = WorkerCapacity(256, 32_768, 168_174)
    after = WorkerCapacity(256, 32_768, 32_768)
    assert not after.holds(before)
    golden("controller", reduction(before, after))
    assert reduction(before, replace(before, kv_tokens=160_000)) is None
    assert WorkerCapacity(256, 32_768).holds(before), "nothing is known of its cache"
