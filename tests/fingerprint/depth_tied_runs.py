"""Starts, runs and contents of a depth-tied profile."""

from __future__ import annotations

from fingerprint.config import WeightFormat
from fingerprint.measurements import Profile
from tests.fingerprint.step_timed_machine import (
    PLAN,
    StepTimedMachine,
)

BITS16, FP8 = WeightFormat.BITS16, WeightFormat.FP8


def loads(machine: StepTimedMachine) -> list[tuple[int, int, int, WeightFormat]]:
    """(tp, pp, layers, weights) of each engine start."""
    return [(e[1].tp, e[1].pp, e[1].layers, e[2]) for e in machine.log if e[0] == "load"]


def bursts(machine: StepTimedMachine) -> list[tuple[object, ...]]:
    return [entry[1:] for entry in machine.log if entry[0] == "bursts"]


def measured(profile: Profile) -> set[tuple[int, int, int]]:
    """(layers, batch, input) of every point with both output lengths."""
    found = [(t.num_layers, t.batch, t.input_tokens) for t in profile.timing]
    assert all(found.count(at) == 2 for at in found)
    return set(found)


def all_of(layers: int, points: tuple[tuple[int, int], ...]) -> set[tuple[int, int, int]]:
    return {(layers, *point) for point in points}


WHOLE = all_of(2, PLAN.points) | all_of(1, PLAN.shallow_points)
