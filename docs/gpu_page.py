"""The page of the GPUs, from the datasheet table and the fields of a GPU file: ``docs/generate.py`` writes it."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields

from fingerprint.gpu_file import MAX_FILE_BYTES, GpuDescription
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec, known_gpus, provenance

__all__ = ["gpu_page"]

_HEAD = """\
# GPUs

Made by `docs/generate.py` from `fingerprint/data/gpus.json` and `fingerprint/gpu_file.py`.

    iserve plan ./my-model --gpus h200:8                          # a listed one; these need not be here
    iserve plan ./my-model --gpus my-gpu:8 --gpu-file my-gpu.json # one that a file describes

Upper and lower case are the same; a slip is answered with the nearest name. Figures are peaks, dense (without
sparsity), per GPU; 1 GB is 1e9 bytes. Memory is what the driver reports. A price is the median of the on-demand
prices that were found; a dash is one that was not, or no such thing. The rows of
2026-11-23 quote the sheets that they name by public tables and from knowledge: the sheets were not opened.
"""
_AMD = """\
## AMD

AMD GPUs are planned for and compared, never deployed on: a plan says *planned, not deployed by iServe: AMD*, an
export is refused. Plans are for vLLM, in 16 bits and, where the GPU multiplies it, fp8, as vLLM documents.
Estimates rest on constants fitted to NVIDIA GPUs, so an interval's upper end is twice, its lower half of what it
would be there ([what was compared](decisions/0002-roofline-calibration.md)).
"""
_HERE = """\
## A GPU that is not listed, in this machine

It is not refused. Its driver says memory, SMs, clocks, bus width and compute capability, from which the peaks
follow (`fingerprint/driver_peaks.py`; links between GPUs are taken to be PCIe). Before its first profile on vLLM
or TensorRT-LLM, a benchmark of 5 s with that engine's torch measures what reading memory and 16-bit matrix
products reach, once for each product; the larger of the two figures is taken. The result is kept in `gpus/` of the
home as the file below: edit it (a price, a link), or remove it to have it measured anew. The embedded engine
measures its device itself.

Tried on an H200 that was taken for unlisted (2026-11-24, driver 580.159.04, torch 2.14, four runs):

| | datasheet | driver | benchmark, 8 to 10 s with torch's start |
|---|--:|--:|--:|
| memory | 4,800 GB/s | 4,814 | 3,952 to 4,062 |
| 16 bits | 989 TFLOP/s | 1,071 | 870 to 881 of ones; of random numbers, as it is now, 745 and 782 |

"""
_FILE = """\
## A GPU that is not listed, elsewhere

`--gpu-file FILE.json` of `plan`, `estimate`, `simulate`, `report` and `deploy --export` reads one JSON object:

```json
{
  "name": "rtx-6000-ada",
  "memory_mib": 49140,
  "memory_gb_per_s": 960,
  "tflops_16bit": 364.2,
  "tflops_fp8": 728.5,
  "compute_capability": "8.9",
  "tdp_w": 300
}
```

"""
_LINKS = """\
## Links between GPUs of this machine

The links of two GPUs or more are measured once, when all are idle: before the first profile, or at a deploy that
finds one. With an engine's torch, for 6 s: all-reduces of the first 2, 4 and 8 GPUs in CUDA graphs, and sends over
the group's middle, of 8 KiB, 128 KiB, 2 MiB and 32 MiB; NVLink multicast stays off. The times are kept in
`interconnect.json` of the home, for these GPUs and this driver: edit it, or remove it to have them measured anew.
`iserve nodes` and `iserve doctor` show them; a plan by them notes *links measured*. A measurement that fails is
logged, and the datasheet's links stay ([what estimates make of it](decisions/0037-measured-links.md)).

"""


def gpu_page() -> str:
    """The page."""
    listed = [gpu_spec(name) for name in known_gpus()]
    parts = [
        _HEAD,
        "| name | also | memory, GiB | GB/s | TFLOP/s, 16 bits | fp8 | link, GB/s one way | TDP, W | $/h | is |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(map(_row, listed)) + "\n",
        _AMD,
        _HERE + _LINKS + _FILE + _fields(),
        "## Sources\n\nCompared with public tables on the day in brackets.\n\n"
        + "\n".join(f"* **{gpu.name}**: {_source(gpu.name)}" for gpu in listed),
    ]
    return "\n".join(parts)


def _row(gpu: GpuSpec) -> str:
    aliases = ", ".join(f"`{name}`" for name in provenance(gpu.name).aliases)
    kind = gpu.gfx or "{}.{}".format(*gpu.compute_capability or ())
    cells = (
        f"`{gpu.name}`",
        aliases,
        f"{gpu.memory_bytes / 2**30:.1f}",
        f"{gpu.memory_bytes_per_s / 1e9:,.0f}",
        f"{gpu.flops_16bit_per_s / 1e12:,.0f}",
        "-" if gpu.flops_fp8_per_s is None else f"{gpu.flops_fp8_per_s / 1e12:,.0f}",
        _link(gpu),
        "-" if gpu.tdp_w is None else f"{gpu.tdp_w:.0f}",
        "-" if gpu.price_usd_per_gpu_hour is None else f"{gpu.price_usd_per_gpu_hour:.2f}",
        kind,
    )
    return f"| {' | '.join(cells)} |"


def _link(gpu: GpuSpec) -> str:
    if gpu.link_group_size == 1:
        return f"PCIe, {gpu.pcie_bytes_per_s / 1e9:.0f}"
    each = f"{gpu.link_group_size - 1} x " if gpu.link_mesh else ""
    return f"{each}{gpu.link_bytes_per_s / 1e9:.4g}, of {gpu.link_group_size}"


def _source(name: str) -> str:
    said = provenance(name)
    notes = f". {said.notes}" if said.notes else ""
    return f"{said.source} ({said.source_date}){notes}"


def _fields() -> str:
    """The fields with what the class says of each."""
    text = inspect.getdoc(GpuDescription) or ""
    said = dict(re.findall(r"^ {4}(\w+): (.+)$", text, re.MULTILINE))
    rows = [
        f"| `{field.name}` | {'required' if field.default is MISSING else 'optional'} | {said[field.name]} |"
        for field in fields(GpuDescription)
    ]
    return (
        "| field | | what it is |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Another field is refused, with the nearest that exists; so are a figure that can only be in another\n"
        f"unit, and a file of more than {MAX_FILE_BYTES:,} bytes.\n"
    ).replace("``", "`")
