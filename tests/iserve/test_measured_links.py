"""Measured links: joint plans by them, their note, and when a controller has them measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.status import NodeStatus
from fingerprint.gpu_spec import GpuSpec
from iserve.controller import profiling
from iserve.evaluation.truth import true_links
from iserve.evaluation.world import Truth
from iserve.planning.notes import plan_notes
from planner.intent import IntentKind
from tests.daemon.test_interconnect import gpu, node
from tests.golden_words import Golden
from tests.iserve.joint_plans import chosen, hardware_on, wish

ONE_AT_A_TIME = wish(IntentKind.MIN_LATENCY, replicas=1, more_replicas=False)


def tp_with(links: Callable[[GpuSpec], GpuSpec]) -> tuple[int, tuple[str, ...]]:
    hardware = hardware_on("h200:4")
    plan, choice = chosen(replace(hardware, gpu=links(hardware.gpu)), ONE_AT_A_TIME)
    assert choice is not None
    return choice.config.tp, plan_notes(plan, None, 1)


def measured(factor: float) -> Callable[[GpuSpec], GpuSpec]:
    return lambda gpu: replace(gpu, interconnect=true_links(gpu, 4, Truth(all_reduce=factor)))


def test_a_plan_splits_a_model_over_idle_gpus_as_far_as_their_links_are_measured_to_be_worth_it(
    golden: Golden,
) -> None:
    fast, notes = tp_with(measured(1.0))
    assert fast == 4
    golden("controller", notes)
    slow, notes = tp_with(measured(10.0))
    assert slow == 1
    assert not any("links measured" in note for note in notes)
    unknown, notes = tp_with(lambda gpu: gpu)
    assert unknown < fast
    assert not any("links measured" in note for note in notes)


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> profiling.Profiler:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    nothing: Any = None
    return profiling.Profiler(nothing, tmp_path / "fingerprints", start_timeout_s=1.0)


def ensure(profiler: profiling.Profiler, at: NodeStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr(profiling, "ask_daemon", lambda *_: at)
    profiler.ensure_links(nothing, at, nothing, lambda: None)


def test_links_are_measured_once_by_a_controller(
    profiler: profiling.Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that fails keeps nothing; it would fail at each deploy."""
    taken: list[NodeStatus] = []
    monkeypatch.setattr(profiling, "measure_links", lambda node, python, go_on: taken.append(node))
    ensure(profiler, node(gpu(0)), monkeypatch)
    ensure(profiler, node(gpu(0), gpu(1, free_bytes=0)), monkeypatch)
    assert not taken
    ensure(profiler, node(), monkeypatch)
    ensure(profiler, node(), monkeypatch)
    assert taken == [node()]


def test_a_measurement_that_was_given_up_is_taken_by_the_next_deploy(
    profiler: profiling.Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[NodeStatus] = []

    def give_up(node: NodeStatus, python: str, go_on: object) -> None:
        taken.append(node)
        raise InterruptedError

    monkeypatch.setattr(profiling, "measure_links", give_up)
    for _ in range(2):
        with suppress(InterruptedError):
            ensure(profiler, node(), monkeypatch)
    assert len(taken) == 2
