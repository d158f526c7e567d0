"""Links between this machine's GPUs: measured once, kept in the home, and given to estimates.

The file ``interconnect.json`` names the GPUs and the driver that it was measured with, and holds for these alone.
It may be edited, or removed to have the links measured again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from daemon.atomic_file import write_file_atomically
from daemon.benchmark_process import LIMIT_S, run_benchmark
from daemon.home import home_folder, make_private
from daemon.status import NodeStatus, WorkerState
from fingerprint.codec import from_json, to_json
from fingerprint.errors import IserveError
from fingerprint.interconnect import MeasuredLinks
from fingerprint.measurements import Profile

__all__ = [
    "can_measure_links",
    "has_links",
    "kept_links",
    "links_file",
    "links_source",
    "measure_links",
    "with_links",
]

log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("interconnect_bench.py")
_SECONDS = 6.0  # of the measurement itself
_MAX_FILE_BYTES = 64 * 2**10
_IDLE_FRACTION, _FREE_BYTES = 0.05, 4 << 30  # most that is held of an idle GPU; least that is free


@dataclass(frozen=True, kw_only=True)
class _FoundGroup:
    gpus: int
    all_reduce_s: tuple[float, ...]
    send_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Found:
    backend: str
    torch: str
    captured: bool
    sizes_bytes: tuple[int, ...]
    groups: tuple[_FoundGroup, ...]


@dataclass(frozen=True, kw_only=True)
class _KeptLinks:
    gpus: tuple[str, ...]  # UUIDs in the order of the machine
    driver: str
    source: str
    interconnect: tuple[MeasuredLinks, ...]


def links_file() -> Path:
    """Return the path of the measured links, whether or not there are any."""
    return home_folder() / "interconnect.json"


def has_links(node: NodeStatus) -> bool:
    """Return whether the node has links that can be measured: those between two GPUs or more."""
    return len(node.devices) >= 2 and all(gpu.kind == "cuda" for gpu in node.devices)


def kept_links(node: NodeStatus) -> tuple[MeasuredLinks, ...]:
    """Return the measured links of the node's GPUs; empty where there are none that hold for them."""
    kept = _kept(node)
    return () if kept is None else kept.interconnect


def links_source(node: NodeStatus) -> str:
    """Return with what and when the kept links of the node's GPUs were measured; empty where there are none."""
    kept = _kept(node)
    return "" if kept is None else kept.source


def _kept(node: NodeStatus) -> _KeptLinks | None:
    path = links_file()
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        kept = from_json(data[:_MAX_FILE_BYTES], _KeptLinks, what=path.name)
    except FileNotFoundError:
        return None
    except (OSError, IserveError) as error:
        log.warning("%s cannot be used, links are the datasheet's; remove it to measure again: %s", path, error)
        return None
    return kept if (kept.gpus, kept.driver) == _key(node) else None


def with_links(profile: Profile, node: NodeStatus) -> Profile:
    """Return ``profile``, which holds on ``node``, with the measured links of its GPUs."""
    device = replace(profile.machine.device, interconnect=kept_links(node))
    return replace(profile, machine=replace(profile.machine, device=device))


def can_measure_links(node: NodeStatus) -> bool:
    """Return whether the links of the node are still to be measured, and its GPUs are idle now."""
    gpus = node.devices
    living = [worker for worker in node.workers if worker.state not in (WorkerState.STOPPED, WorkerState.FAILED)]
    if not has_links(node) or living or kept_links(node):
        return False
    return all(gpu.free_bytes >= max(_FREE_BYTES, (1 - _IDLE_FRACTION) * gpu.total_bytes) for gpu in gpus)


def measure_links(
    node: NodeStatus, python: str, *, go_on: Callable[[], None] = lambda: None, limit_s: float = LIMIT_S
) -> None:
    """Measure the links between the node's GPUs, and keep the result.

    A measurement that fails is logged and changes nothing else.

    Args:
        python: an interpreter that has torch.
        go_on: called while it runs; what it raises ends it.
    """
    gpus, driver = _key(node)
    log.info("the links between %d GPUs are measured, for %g s", len(gpus), _SECONDS)
    command = (python, str(_SCRIPT), str(_SECONDS), "--parent", str(os.getpid()))
    found = run_benchmark(command, gpus, go_on=go_on, limit_s=limit_s)
    if found is None:
        return
    try:
        read = from_json(to_json(found), _Found, what="the measurement")
        how = f"{read.backend} of torch {read.torch}, {'with' if read.captured else 'without'} CUDA graphs"
        source = f"{how[:200]}, {datetime.now(UTC):%Y-%m-%d}"
        kept = _KeptLinks(gpus=gpus, driver=driver, source=source, interconnect=_links(read))
        make_private(home_folder())
        write_file_atomically(links_file(), to_json(kept, indent=1) + b"\n")
    except (IserveError, OSError) as error:
        log.warning("the links between the GPUs are the datasheet's: %s", error)


def _key(node: NodeStatus) -> tuple[tuple[str, ...], str]:
    return tuple(gpu.device_id for gpu in node.devices), node.driver or ""


def _links(read: _Found) -> tuple[MeasuredLinks, ...]:
    """Return the links of each measured group. A time below that of a smaller message is noise, and counts as it.

    Raises:
        ConfigError: a figure that no link has.
    """
    return tuple(
        MeasuredLinks(
            gpus=group.gpus,
            sizes_bytes=read.sizes_bytes,
            all_reduce_s=tuple(accumulate(group.all_reduce_s, max)),
            send_s=tuple(accumulate(group.send_s, max)),
        )
        for group in read.groups
    )
