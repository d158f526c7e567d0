"""The node as a plan sees it: the daemon's observations turned into a placement snapshot."""

from __future__ import annotations

from daemon.devices import Device
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.errors import InfeasibleError
from fingerprint.gpu_spec import GpuSpec
from iserve.api_types import NodeDocument
from iserve.planning import Hardware
from placement.types import ClusterSnapshot, GpuState

__all__ = ["devices_of", "hardware_of"]


def hardware_of(node: NodeStatus | NodeDocument, gpu: GpuSpec) -> Hardware:
    """The devices of ``node``, with what is free on them and their load now.

    Args:
        gpu: what one device can do, as the profile recorded it or the datasheet says.

    Raises:
        InfeasibleError: the node offers no device.
    """
    if not node.devices:
        raise InfeasibleError(f"node {node.node_id} offers no device")
    num_workers = node.num_workers if isinstance(node, NodeDocument) else len(node.workers)
    gpus = tuple(
        GpuState(
            device_id=device.device_id,
            node_id=node.node_id,
            gpu_index=device.index,
            total_bytes=device.total_bytes,
            free_bytes=min(device.free_bytes, device.total_bytes),
            load_fraction=_load_of_those_there(device, num_workers),
        )
        for device in node.devices
    )
    return Hardware(label=f"{len(gpus)} x {gpu.name} ({node.node_id})", gpu=gpu, snapshot=ClusterSnapshot(gpus))


_HELD = 0.02  # of a device's memory: less is the driver's own


def _load_of_those_there(device: DeviceStatus, num_workers: int) -> float:
    """0 where nobody holds memory: what was seen of the last 120 s is then of who has left, such as the engine of
    a profile that was taken a moment ago. A CPU's memory is always held: there it is 0 without a worker of ours,
    for what else runs on it ran beside the profile too and is in its times."""
    if device.kind == "cpu" and not num_workers:
        return 0.0
    if device.total_bytes - device.free_bytes < _HELD * device.total_bytes:
        return 0.0
    return min(1.0, max(0.0, device.load_fraction))


def devices_of(node: NodeStatus) -> tuple[Device, ...]:
    """What of the devices of ``node`` does not change."""
    return tuple(
        Device(
            device_id=device.device_id,
            index=device.index,
            kind=device.kind,
            name=device.name,
            total_bytes=device.total_bytes,
            cores=device.cores,
        )
        for device in node.devices
    )
