"""What of a node's load a plan sees."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.gpus import gpu_spec
from iserve.controller.node import hardware_of
from tests.iserve.test_profile_validity import node

GIB = 2**30


def test_only_who_is_there_loads_a_gpu() -> None:
    """A profile that was taken a moment ago has kept the GPU busy and is gone."""
    status = node()
    left, held = (
        replace(device, load_fraction=0.9, free_bytes=free)
        for device, free in zip(status.devices, (48 * GIB - GIB // 2, 40 * GIB), strict=True)
    )
    seen = hardware_of(replace(status, devices=(left, held)), gpu_spec("a6000")).snapshot
    assert [gpu.load_fraction for gpu in seen.gpus] == [0.0, 0.9]
