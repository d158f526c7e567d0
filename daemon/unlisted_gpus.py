"""GPUs of this machine that the datasheet table does not have: described by their driver and a short benchmark.

The benchmark runs once for each product, before its first profile on an engine with a Python of its own, in a
process that can be killed at any moment. What it reached is kept in the home as a GPU file (``gpus/*.json``) that
people may edit; without it the driver's figures stand alone.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from daemon.atomic_file import write_file_atomically
from daemon.benchmark_process import LIMIT_S, run_benchmark
from daemon.home import home_folder, make_home
from daemon.nvml import driver_facts, driver_version
from fingerprint.codec import to_json
from fingerprint.driver_peaks import Benchmark, described_gpu
from fingerprint.errors import IserveError
from fingerprint.gpu_file import read_gpu_file, spec_of
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import match_device

__all__ = ["device_spec", "kept_file", "measure_if_unlisted"]

log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("gpu_bench.py")
_SECONDS = 5.0  # of the benchmark itself


def kept_file(product: str) -> Path:
    """Return where the description of ``product`` is kept, whether or not there is one."""
    name = re.sub(r"[^a-z0-9]+", "-", product.casefold()).strip("-")[:80] or "gpu"
    return home_folder() / "gpus" / f"{name}.json"


def device_spec(product: str) -> GpuSpec | None:
    """Return what the GPU of this machine that the driver calls ``product`` can do.

    That is its row of the datasheet table, else the file that the home keeps, else what its driver says. None: it
    says too little, or there is no such GPU.
    """
    listed = match_device(product)
    if listed is not None:
        return listed
    try:
        path = kept_file(product)
        if path.exists():
            return replace(read_gpu_file(path), name=product)
    except IserveError as error:
        log.warning("%s; what the driver of %s says is taken", error, product)
    facts = driver_facts(product)
    if facts is None:
        return None
    try:
        return replace(spec_of(described_gpu(facts)), name=product)
    except IserveError as error:
        log.warning("%s", error)
        return None


def measure_if_unlisted(
    product: str,
    device_id: str,
    python: str,
    *,
    go_on: Callable[[], None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> None:
    """Measure a GPU that no table has and no file in the home describes, and keep what it reached.

    A benchmark that fails is logged and changes nothing else.

    Args:
        device_id: its UUID.
        python: an interpreter that has torch.
        go_on: called while it runs; what it raises ends it.
    """
    path = kept_file(product)
    if match_device(product) is not None or path.exists():
        return
    facts = driver_facts(product)
    if facts is None:
        return
    log.info("%s is in no datasheet table: a benchmark of %g s says what it reaches", product, _SECONDS)
    reached = _reached(python, device_id, go_on, limit_s)
    if reached is None:
        return
    source = (
        f"driver {driver_version()} and a benchmark of {_SECONDS:g} s on {datetime.now(UTC):%Y-%m-%d}: "
        f"{reached.memory_bytes_per_s / 1e9:.0f} GB/s, {reached.flops_16bit_per_s / 1e12:.1f} TFLOP/s"
    )
    try:
        described = described_gpu(facts, reached, source=source)
        make_home(home_folder(), path.parent.name)
        write_file_atomically(path, to_json(described, indent=1) + b"\n")
    except (IserveError, OSError) as error:
        log.warning("%s is not described: %s", product, error)


def _reached(python: str, device_id: str, go_on: Callable[[], None], limit_s: float) -> Benchmark | None:
    command = (python, str(_SCRIPT), str(_SECONDS))
    figures = run_benchmark(command, [device_id], go_on=go_on, limit_s=limit_s)
    if figures is None:
        return None
    try:
        memory, flops = (float(str(figures[name])) for name in ("memory_bytes_per_s", "flops_16bit_per_s"))
    except (ValueError, KeyError):
        memory = flops = math.nan
    if all(math.isfinite(figure) and figure > 0 for figure in (memory, flops)):
        return Benchmark(memory_bytes_per_s=memory, flops_16bit_per_s=flops)
    log.warning("the benchmark of the GPU gives %s; its driver's figures are taken", str(figures)[:300])
    return None
