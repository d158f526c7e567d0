"""Profiles of fingerprints as they are, when the budget does not hold all points."""

from __future__ import annotations

from fingerprint.config import KvFormat
from fingerprint.profile import ProfilePlan
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile


def test_memory_has_the_room_that_was_loaded_though_the_points_that_need_it_are_dropped() -> None:
    """The first fingerprint is loaded for bursts of 64, which the budget cannot hold."""
    machine = SyntheticMachine(launch_s=0.5)
    plan = ProfilePlan(budget_s=3.0, degrees=((1, 1),), batches=(1, 64), input_tokens=(128,))
    result = take_profile(machine, plan)
    per_token = machine.spec.kv_bytes_per_token_per_layer(KvFormat.BITS16)
    assert {point.batch for point in result.timing} == {1}
    assert {point.kv_sequences for point in result.memory} == {64, 1}
    for point in result.memory:
        assert point.ranks[0].kv_bytes == per_token * point.kv_tokens * point.num_layers


def test_of_a_split_model_alone_the_smallest_burst_that_it_runs_keeps_both_output_lengths() -> None:
    """A split model runs 512 tokens in only, of which the budget holds little."""
    machine = SyntheticMachine(launch_s=1.0, close_s=0.3, run_cost=40.0)
    plan = ProfilePlan(budget_s=3.0, degrees=((2, 1),), split_input_tokens=(512,), min_repeats=3)
    result = take_profile(machine, plan)
    ran = {entry[4:] for entry in machine.log if entry[0] == "run"}
    assert ran >= {(1, 512, 1), (1, 512, 17)}
    assert not any(note.startswith("batch 1, 512 in") for note in result.notes)
