"""Cases of the benchmark of delta kernels: shapes, tilings, random deltas, times by CUDA graphs, and results."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

# As in an engine's interpreter, where this folder is on PYTHONPATH.
sys.path.insert(0, str(Path(__file__).parents[2] / "daemon/engines/vllm/variants"))

from iserve_variants.delta_linear import Tiling, Workspace, add_delta, add_routed
from iserve_variants.formats import FORMATS, CodeFormat
from iserve_variants.merge import merge_delta
from iserve_variants.reference import delta_product, dequantize
from iserve_variants.route import Route

__all__ = [
    "DECODE",
    "FORMATS",
    "LAYERS",
    "MERGES",
    "OTHER_FORMATS",
    "PROMPTS",
    "Call",
    "CodeFormat",
    "Deltas",
    "Kept",
    "Machine",
    "Route",
    "Tiling",
    "Workspace",
    "add_delta",
    "add_routed",
    "captured",
    "delta_product",
    "dequantize",
    "merge_delta",
    "random_delta",
    "route_of",
]

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # out, in
LAYERS, SLOTS = 32, 32
ACTIVE = (1, 4, 8, 32)
PROMPT_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)


def _tilings(text: str) -> tuple[Tiling, ...]:
    """Return a tiling a line: outputs, small rows/rows, warps, stages, programs, groups, step, registers, form.

    Programs are those of a multiprocessor. The form is o (overlaps) or -.
    """
    found = []
    for line in text.strip().splitlines():
        outputs, rows, warps, stages, programs, groups, step, registers, form = line.split()
        small, most = map(int, rows.split("/"))
        found.append(
            Tiling(
                outputs=int(outputs),
                small_rows=small,
                rows=most,
                warps=int(warps),
                stages=int(stages),
                programs_per_sm=int(programs),
                min_groups=int(groups),
                step=int(step),
                max_registers=int(registers) or None,
                overlaps=form == "o",
            )
        )
    return tuple(found)


DECODE = {
    32: _tilings("""
        128 8/32  4 3 3 4 2 168 -
        128 8/32  4 3 3 4 2 168 o
        128 8/32  4 3 2 4 2 0   -
        128 8/32  4 3 2 4 2 0   o
        128 8/32  4 3 4 4 2 128 -
        128 8/32  4 3 2 4 4 0   -
        128 8/8   4 3 4 4 2 128 -
        128 8/8   4 3 3 4 2 168 -
        128 8/8   4 3 3 4 4 168 -
        128 8/8   4 4 4 4 2 128 -
        128 8/8   4 3 4 4 2 128 o
        128 8/8   4 3 4 8 2 128 o
        64  8/32  4 3 4 4 2 128 -
        64  8/8   4 3 5 4 2 96  -
        128 16/32 4 3 2 4 2 0   -
        128 16/32 4 3 2 4 2 0   o
        128 16/32 4 4 2 8 2 0   o
        64  16/32 4 3 4 8 2 128 o
        64  32/32 4 4 4 4 1 128 o
        64  32/32 4 4 3 8 1 168 o
    """),
    128: _tilings("""
        128 8/32   4 3 3 4 2 168 -
        128 16/32  4 3 3 4 2 168 o
        64  16/64  4 4 3 4 1 168 o
        128 16/64  8 3 1 4 2 0   o
        128 64/64  8 4 2 4 1 128 o
        128 128/128 8 3 1 4 1 0  o
    """),
}
PROMPTS = _tilings("""
    64  64/64   4 4 3 8 1 168 -
    128 64/64   8 4 2 8 1 128 -
    128 64/64   4 4 2 8 1 0   -
    128 128/128 8 3 1 8 1 0   -
""")
OTHER_FORMATS = _tilings("""
    128 8/32  4 3 3 4 2 168 -
    128 8/8   4 3 4 4 2 128 -
    128 16/32 4 4 3 4 1 168 -
    128 16/32 4 3 3 4 2 168 -
""")
MERGES = ((1, 4), (2, 4), (4, 4), (2, 8), (4, 8), (8, 4))  # groups of a program, warps


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Device, sizes and clock of a run; the tests have a small one on the CPU."""

    device: str = "cuda"
    shapes: tuple[tuple[str, tuple[int, int]], ...] = tuple(SHAPES.items())
    layers: int = LAYERS
    slots: int = SLOTS
    active: tuple[int, ...] = ACTIVE
    prompt_rows: tuple[int, ...] = PROMPT_ROWS

    def seconds(self, run: Callable[[], None], at_least_s: float = 0.015) -> float:
        """Return the median time of ``run``, replayed as a CUDA graph; on a CPU the time of one call."""
        if self.device != "cuda":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        return graph_seconds(run, at_least_s)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_seconds(run: Callable[[], None], at_least_s: float) -> float:
    graph = captured(run)
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 4 or (sum(times) < at_least_s and len(times) < 40):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Deltas:
    """Random deltas of every layer in all slots, of one format."""

    def __init__(self, machine: Machine, format_: CodeFormat, layers: int, slots: int) -> None:
        self.format, self.layers, self.slots = format_, layers, slots
        self.codes: dict[str, list[torch.Tensor]] = {}
        self.scales: dict[str, list[torch.Tensor]] = {}
        for name, shape in machine.shapes:
            made = [random_delta(slots, shape, format_, machine.device) for _ in range(layers)]
            self.codes[name], self.scales[name] = [codes for codes, _ in made], [scales for _, scales in made]

    def add(
        self, name: str, layer: int, y: torch.Tensor, x: torch.Tensor, call: Call, *, adds: bool = True
    ) -> None:
        codes, scales = self.codes[name][layer], self.scales[name][layer]
        add_delta(y, x, codes, scales, call.route, self.format, call.tiling, call.workspace, adds=adds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    route: Route
    tiling: Tiling
    workspace: Workspace


def random_delta(
    slots: int, shape: tuple[int, int], format_: CodeFormat, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(slots, *format_.codes_shape(*shape), dtype=torch.int16, device=device)
    codes.random_(-(2**15), 2**15)  # every word is valid
    scales = torch.rand(slots, *format_.scales_shape(*shape), device=device) * 0.002 + 0.0005
    return codes, scales.bfloat16()


def route_of(slot_of_row: torch.Tensor, slots: int, tiling: Tiling) -> Route:
    route = Route.empty(
        max_rows=len(slot_of_row), slots=slots, segment_rows=tiling.rows, device=slot_of_row.device
    )
    route.fill(slot_of_row)
    return route


class Kept:
    """Results so far, written after each part, and the time that is left."""

    def __init__(self, folder: Path, machine: Machine, seconds: float) -> None:
        self.file, self._end = folder / "delta_kernels.json", time.monotonic() + seconds
        self.values: dict[str, Any] = {"machine": _machine_facts(machine), "failed": []}
        self.workspace = Workspace(machine.device)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def add(self, part: str, **entry: Any) -> None:
        self.values.setdefault(part, []).append(entry)

    def part(self, name: str, run: Callable[[], None]) -> None:
        begin = time.monotonic()
        if self.is_over:
            self.values.setdefault("left_out", []).append(name)
            return
        try:
            run()
        except Exception:  # noqa: BLE001 - the other parts run
            self.values.setdefault("broken", {})[name] = traceback.format_exc()[-3000:]
            print(f"{name} broke:\n{traceback.format_exc()}")
        self.values.setdefault("seconds", {})[name] = round(time.monotonic() - begin, 1)
        self.file.write_text(json.dumps(self.values, indent=1))
        sys.stdout.flush()


def _machine_facts(machine: Machine) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if machine.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "memory": properties.total_memory,
            "sms": properties.multi_processor_count,
        }
    return facts | asdict(machine)
