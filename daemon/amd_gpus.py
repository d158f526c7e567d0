"""AMD GPUs of this machine, by what their kernel driver lists. They are only counted: no worker runs on them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["count_amd_gpus"]

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_VENDOR = "4098"  # AMD's PCI id
_MAX_NODES = 256


def count_amd_gpus(nodes: Path = _NODES) -> int:
    """Return how many there are; 0 without the driver. Its list has the CPUs too, which have no SIMD units."""
    try:
        folders = sorted(nodes.iterdir())[:_MAX_NODES]
    except OSError:
        return 0
    return sum(_is_gpu(folder / "properties") for folder in folders)


def _is_gpu(properties: Path) -> bool:
    try:
        words = [line.split() for line in properties.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    found = {word[0]: word[1] for word in words if len(word) == 2}
    return found.get("vendor_id") == _VENDOR and found.get("simd_count", "0") != "0"
