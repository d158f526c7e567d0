"""What of a node's load a plan sees."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.gpus import gpu_spec
from iserve.api_types import NodeDocument
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


def test_a_cpu_without_a_worker_is_as_loaded_as_when_it_was_profiled() -> None:
    status = node(count=1, driver=None)
    (device,) = status.devices
    cpu = replace(status, devices=(replace(device, kind="cpu", load_fraction=0.9),))
    for num_workers, load in ((0, 0.0), (1, 0.9)):
        document = NodeDocument(
            node_id="n", reachable=True, observed_at=0.0, devices=cpu.devices, num_workers=num_workers
        )
        assert hardware_of(document, gpu_spec("a6000")).snapshot.gpus[0].load_fraction == load
    assert hardware_of(cpu, gpu_spec("a6000")).snapshot.gpus[0].load_fraction == 0.0
