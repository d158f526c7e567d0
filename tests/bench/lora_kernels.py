"""Times of vLLM's and our own adapter kernels by themselves, and tuned configurations of vLLM's: on one GPU.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.lora_kernels OUT [--parts check tune own cases] [--seconds 240] [--gpu 0]

The four linears of Qwen3-8B with 32 slots of rank 16. A time is that of a CUDA graph in which each linear of
several layers is followed by its adapters, less that of the linears alone: their weights (over 33 MB each) and the
layers' distinct adapters (over 100 MB for each factor) leave nothing of an adapter in the L2 cache (50 MB).

``check``: our kernels and vLLM's against float32, and our graphs replayed with other mixes. ``tune``: a grid of
vLLM's block sizes, split-K, warps and stages, for at most ``TUNE_S`` seconds, rows in the order of ``TUNED_ROWS``;
writes ``OUT/tuned``, a folder for ``VLLM_TUNED_CONFIG_FOLDER``. ``own``: tilings of our
kernels at 32 rows of 32 adapters; writes ``OUT/tilings.json``. ``cases``: all of ``CASES`` with vLLM's defaults,
vLLM tuned, and our own. ``OUT/kernels.json`` is written after each time. ``--aligned`` has vLLM's kernels as the
attempt ``aligned`` of ``lora_contest`` has them, which looks for ``OUT/aligned/tuned``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.bench.delta_kernel_cases import captured, graph_seconds  # puts the plug-in's folder on the path
from tests.bench.lora_contest_plugin import align_pointers
from tests.bench.variant_costs_vllm import Kept

from iserve_variants.adapter_kernels import AdapterTiling, Groups, add_adapters  # isort: skip
from iserve_variants.reference import adapter_change  # isort: skip

SLOTS, RANK = 32, 16
LINEARS = {  # of Qwen3-8B: inputs, and the outputs of each slice
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
LAYERS = 36
COLD_BYTES = 110e6
CASES = ((1, 1), (8, 8), (16, 16), (32, 1), (32, 4), (32, 8), (32, 32), (64, 32))  # rows, distinct adapters
TUNED_ROWS = (32, 64, 16, 8, 1)  # each with as many adapters as it can have
PARTS = ("check", "tune", "own", "cases")
TUNE_S, OWN_S = 60.0, 60.0
# Of the norm of the change, where y is 0 before: two values are rounded to bfloat16, each by at most 2**-9 of it.
MOST_ERROR = 4e-3

# Block of inputs, split-K, warps, stages. vLLM's default is 256, 64, 4, 2 with 32 rows: of its 64 splits of 4,096
# inputs 48 have none, and add zeros.
SHRINKS = (
    (256, 16, 4, 2),
    (512, 8, 4, 2),
    (128, 32, 4, 2),
    (256, 8, 4, 3),
    (256, 16, 2, 2),
    (128, 16, 4, 3),
    (512, 24, 4, 2),
    (256, 4, 4, 3),
    (512, 8, 8, 2),
    (64, 64, 2, 2),
    (128, 32, 2, 2),
)
# Block of rows, of outputs, warps. The default is 64, 64 (128 of one slice), 4, with 32 columns for a rank of 16.
EXPANDS = (
    (16, 256, 4),
    (16, 128, 4),
    (16, 512, 4),
    (16, 128, 2),
    (16, 64, 2),
    (16, 512, 8),
    (16, 256, 8),
    (32, 256, 4),
)
OWN_SHRINKS = ((512, 4), (256, 4), (1024, 4), (512, 2), (256, 2), (1024, 8))
OWN_EXPANDS = ((256, 4), (128, 4), (512, 4), (512, 8), (128, 2), (256, 2))


class Mix(NamedTuple):
    """Rows by adapter, for our kernels and for vLLM's."""

    groups: Groups
    meta: tuple[torch.Tensor, ...]


def mix_of(slot_of_row: torch.Tensor, slots: int = SLOTS) -> Mix:
    """Return what vLLM's ``LoRAKernelMeta`` makes of a mapping."""
    mapping, device = slot_of_row.to(torch.int32), slot_of_row.device
    found, count = torch.unique(mapping, sorted=True, return_counts=True)
    ids = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
    starts = torch.zeros(slots + 2, dtype=torch.int32, device=device)
    ids[: len(found)], counts[: len(found)] = found.int(), count.int()
    starts[1 : 1 + len(found)] = torch.cumsum(count, 0).int()
    order = torch.sort(mapping, stable=True).indices.int()
    is_base, most = torch.tensor([False]), torch.tensor([slots + 1], dtype=torch.int32)
    return Mix(Groups(order, counts, starts, ids), (mapping, order, counts, starts, ids, is_base, most))


@dataclass
class Linear:
    """Weights of one linear in several layers, and random adapters in every slot."""

    name: str
    inputs: int
    outputs: tuple[int, ...]
    device: str = "cuda"
    slots: int = SLOTS
    rank: int = RANK
    cold_bytes: float = COLD_BYTES

    def __post_init__(self) -> None:
        down, up = self.inputs * len(self.outputs), sum(self.outputs)
        layers = math.ceil(self.cold_bytes / (2 * self.slots * self.rank * min(down, up)))
        self.weights = [self._random(up, self.inputs, std=0.02) for _ in range(layers)]
        self.a = [[self._random(self.slots, 1, self.rank, self.inputs, std=0.01) for _ in self.outputs]
                  for _ in range(layers)]  # fmt: skip
        self.b = [[self._random(self.slots, 1, size, self.rank, std=0.01) for size in self.outputs]
                  for _ in range(layers)]  # fmt: skip

    def _random(self, *shape: int, std: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=std)

    @property
    def key(self) -> str:
        """Name of the shape in ``tilings.json``."""
        return f"{self.inputs}x{sum(self.outputs)}"

    def rows(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, self.inputs, device=self.device).bfloat16()
        return x, torch.zeros(rows, sum(self.outputs), dtype=torch.bfloat16, device=self.device)

    def mixes(self, rows: int, active: int) -> list[Mix]:
        """Return mixes of ``active`` adapters each, which go through all slots."""
        row = torch.arange(rows, device=self.device) % active
        return [mix_of((row + first) % self.slots, self.slots) for first in range(0, self.slots, active)]


Operation = Callable[[Linear, int, torch.Tensor, torch.Tensor, Mix], None]


class Clock:
    """Times of operations after their linears; the linears' own times are measured once."""

    def __init__(self, seconds: Callable[[Callable[[], None]], float]) -> None:
        self._seconds, self._alone_s = seconds, dict[tuple[str, int], float]()

    def added_s(self, linear: Linear, rows: int, active: int, operation: Operation | None) -> float:
        """Return what ``operation`` adds to one linear; None: the linear's own time."""
        (x, y), mixes, layers = linear.rows(rows), linear.mixes(rows, active), len(linear.weights)

        def run(adds: Operation | None) -> None:
            for layer in range(layers):
                torch.mm(x, linear.weights[layer].t(), out=y)
                if adds is not None:
                    adds(linear, layer, y, x, mixes[layer % len(mixes)])

        key = (linear.name, rows)
        if key not in self._alone_s:
            self._alone_s[key] = self._seconds(lambda: run(None)) / layers
        if operation is None:
            return self._alone_s[key]
        return self._seconds(lambda: run(operation)) / layers - self._alone_s[key]


def own(tiling: AdapterTiling) -> Operation:
    def add(linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix) -> None:
        add_adapters(y, x, linear.a[layer], linear.b[layer], mix.groups, 1.0, tiling)

    return add


class VllmKernels:
    """vLLM's two operations, with a configuration of each or with what vLLM looks up itself."""

    def __init__(self, aligned: Path | None = None) -> None:
        """Import them.

        Args:
            aligned: file for kernels that know their pointers to be aligned; None: as they are.
        """
        if aligned is not None:
            align_pointers(aligned)
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils

        self._shrink, self._expand, self._utils = lora_shrink_op, lora_expand_op, utils
        self._theirs = utils.get_lora_op_configs

    def use_folder(self, folder: Path | None) -> None:
        """Look configurations up in ``folder``, as ``VLLM_TUNED_CONFIG_FOLDER`` does."""
        if folder is None:
            os.environ.pop("VLLM_TUNED_CONFIG_FOLDER", None)
        else:
            os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)
        self._utils.load_lora_op_config.cache_clear()
        self._theirs.cache_clear()

    def default(self, kind: str, linear: Linear, rows: int) -> dict[str, Any]:
        """Return what vLLM takes without a folder."""
        size = linear.inputs if kind == "shrink" else max(linear.outputs)
        adds = None if kind == "shrink" else True
        slices = len(linear.outputs)
        return dict(
            self._theirs(
                kind, max_loras=linear.slots + 1, batch=rows, hidden_size=size, rank=linear.rank,
                num_slices=slices, add_inputs=adds,
            )
        )  # fmt: skip

    def _with(self, module: Any, config: dict[str, Any] | None) -> None:
        module.get_lora_op_configs = self._theirs if config is None else lambda *_, **__: config

    def shrink(
        self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix,
        *, config: dict[str, Any] | None = None, buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self._with(self._shrink, config)
        if buffer is None:
            buffer = torch.empty(len(linear.outputs), len(x), linear.rank, device=x.device)
        self._shrink._lora_shrink(x, linear.a[layer], buffer, *mix.meta, 1.0)
        return buffer

    def expand(
        self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix,
        *, config: dict[str, Any] | None = None, buffer: torch.Tensor,
    ) -> None:  # fmt: skip
        self._with(self._expand, config)
        self._expand._lora_expand(buffer, linear.b[layer], y, *mix.meta, offset_start=0, add_inputs=True)

    def both(self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix) -> None:
        buffer = self.shrink(linear, layer, y, x, mix)
        self.expand(linear, layer, y, x, mix, buffer=buffer)


def check(linears: Sequence[Linear], vllm: Any, kept: Kept) -> None:
    """Compare our kernels, in every form of launch, and vLLM's with float32; replay our graph with other mixes."""
    mixes = {
        "32 of 32": torch.arange(32),
        "one": torch.full((32,), 2),
        "base and 7": torch.arange(40) % 8 - 1,
        "64 of 3": torch.arange(64) % 3,
    }
    for linear in linears:
        device = linear.device
        for name, slots in mixes.items():
            slot_of_row = torch.where(slots < linear.slots, slots, -1).to(device)
            x, _ = linear.rows(len(slots))
            want = adapter_change(x, _factors(linear.a[0]), _factors(linear.b[0]), slot_of_row, 1.0)
            runs = {f"own {form}": own(AdapterTiling(overlaps=form)) for form in range(3)}
            runs |= {"vllm": vllm.both} if vllm is not None else {}
            for run, operation in runs.items():
                y = torch.zeros_like(want, dtype=torch.bfloat16)
                operation(linear, 0, y, x, mix_of(slot_of_row, linear.slots))
                _keep_error(kept, y, want, linear=linear.name, run=run, mix=name)
        if device == "cuda":
            _check_replays(linear, kept)


def _check_replays(linear: Linear, kept: Kept) -> None:
    """Capture a graph with rows of the base alone, and replay it with other mixes in the same buffers."""
    x, y = linear.rows(32)
    mix = mix_of(torch.full((32,), -1, device=linear.device), linear.slots)
    run = own(AdapterTiling(overlaps=2))
    graph = captured(lambda: (y.zero_(), run(linear, 0, y, x, mix))[0])
    for name, slots in {"none": [-1] * 32, "all": list(range(32)), "two": [3, 9] * 16}.items():
        slot_of_row = torch.tensor(slots, device=linear.device)
        for into, new in zip(mix.groups, mix_of(slot_of_row, linear.slots).groups, strict=True):
            into.copy_(new)
        graph.replay()
        want = adapter_change(x, _factors(linear.a[0]), _factors(linear.b[0]), slot_of_row, 1.0)
        _keep_error(kept, y, want, linear=linear.name, run="own, replayed", mix=name)


def _factors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each[:, 0] for each in tensors]


def _keep_error(kept: Kept, y: torch.Tensor, want: torch.Tensor, **facts: str) -> None:
    norm = float(want.norm())
    error = float((y.float() - want).norm()) / norm if norm else float(y.float().norm())
    most = MOST_ERROR * (1 if y.device.type == "cuda" else 2)  # the interpreter cuts off
    kept.add("check", **facts, error=error, passed=error < most)


def tune(linears: Sequence[Linear], vllm: Any, clock: Clock, kept: Kept, out: Path, gpu_name: str) -> None:
    """Time each configuration of vLLM's kernels, its default first, and write the fastest of each shape."""
    end_s = time.monotonic() + TUNE_S
    vllm.use_folder(None)
    found: dict[tuple[str, int, int, int, int], dict[str, float]] = {}
    for rows in TUNED_ROWS:
        for kind in ("shrink", "expand"):
            took: dict[tuple[int, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for linear in linears:
                shape = (len(linear.outputs), *_sizes(kind, linear))
                default = vllm.default(kind, linear, rows)
                for config in (default, *_configs(kind, linear)):
                    # Without an entry for each number of slices vLLM would fail.
                    is_needed = rows == TUNED_ROWS[0] and config is default
                    if is_needed or time.monotonic() < end_s:
                        added = _tuned_s(linear, vllm, clock, kept, (kind, rows, config))
                        took[shape][json.dumps(config)].append(added)
            for (slices, k, n), sums in took.items():
                sharing = sum((len(each.outputs), *_sizes(kind, each)) == (slices, k, n) for each in linears)
                times = {config: sum(each) for config, each in sums.items() if len(each) == sharing}
                if times:  # else the time was over
                    found[kind, slices, rows, k, n] = times
                    us = {config: 1e6 * each for config, each in times.items()}
                    kept.add("tuned", op=kind, slices=slices, rows=rows, k=k, n=n, us=us)
    write_tuned(out / "tuned", gpu_name, found, linears[0].slots + 1)


def _sizes(kind: str, linear: Linear) -> tuple[int, int]:
    """Return k and n, as vLLM's files are keyed."""
    return (linear.inputs, linear.rank) if kind == "shrink" else (linear.rank, max(linear.outputs))


def _configs(kind: str, linear: Linear) -> list[dict[str, Any]]:
    shared = {"num_ctas": 1, "max_nreg": None}
    if kind == "expand":
        return [
            {"block_m": m, "block_n": n, "block_k": max(16, linear.rank), "num_warps": warps, "num_stages": 1}
            | shared
            for m, n, warps in EXPANDS
        ]
    return [
        {"block_m": 16, "block_n": 16, "block_k": k, "split_k": split, "num_warps": warps, "num_stages": stages,
         "group_size_m": 8} | shared
        for k, split, warps, stages in SHRINKS
        if k * split <= linear.inputs
    ]  # fmt: skip


def _tuned_s(linear: Linear, vllm: Any, clock: Clock, kept: Kept, asked: tuple[str, int, dict[str, Any]]) -> float:
    """Return what one operation adds with a configuration; infinite where that does not run."""
    kind, rows, config = asked
    buffer = torch.zeros(len(linear.outputs), rows, linear.rank, device=linear.device)
    operation = partial(getattr(vllm, kind), config=config, buffer=buffer)
    try:
        return clock.added_s(linear, rows, min(rows, linear.slots), operation)
    except Exception as error:  # noqa: BLE001 - a configuration that does not compile or fit is recorded
        said = f"{type(error).__name__}: {error}"[:200]
        kept.add("failed", linear=linear.name, op=kind, config=config, error=said)
        return math.inf


def write_tuned(
    folder: Path, gpu_name: str, found: dict[tuple[str, int, int, int, int], dict[str, float]], max_loras: int
) -> None:
    """Write the fastest configurations as vLLM reads them; steps of 96 rows or more keep vLLM's defaults.

    vLLM takes the nearest size where it does not find its own, rows included, so 128 rows are written too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    many = {
        "shrink": {"block_m": 32, "block_n": 16, "block_k": 32, "split_k": 8, "num_warps": 4, "num_ctas": 1,
                   "group_size_m": 8, "num_stages": 2, "max_nreg": None},
        "expand": {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_ctas": 1, "num_stages": 2,
                   "max_nreg": None},
    }  # fmt: skip
    files: dict[str, dict[str, Any]] = {"shrink": {}, "expand": {}}
    for (kind, slices, rows, k, n), times in found.items():
        best = json.loads(min(times, key=lambda each: times[each]))
        of_slices = files[kind].setdefault(str(max_loras), {}).setdefault(str(slices), {})
        default = many[kind] | ({"block_n": 128} if kind == "expand" and slices == 1 else {})
        of_slices.setdefault(str(rows), {}).setdefault(str(k), {})[str(n)] = best
        of_slices.setdefault("128", {}).setdefault(str(k), {})[str(n)] = default
    name = gpu_name.replace(" ", "_").replace("-", "_")
    (folder / f"{name}_SHRINK.json").write_text(json.dumps(files["shrink"], indent=1))
    for adds in ("TRUE", "FALSE"):  # vLLM with two streams does not add to y in the kernel
        (folder / f"{name}_EXPAND_{adds}.json").write_text(json.dumps(files["expand"], indent=1))


def choose_own(linears: Sequence[Linear], clock: Clock, kept: Kept, out: Path) -> None:
    """Choose each linear's tiling at 32 rows of 32 adapters: inputs, then outputs, then the form of launch."""
    end_s = time.monotonic() + OWN_S
    chosen: dict[str, dict[str, int]] = {}
    for linear in linears:
        best, best_s = AdapterTiling(), math.inf
        stages: tuple[list[dict[str, int]], ...] = (
            [{"inputs": inputs, "shrink_warps": warps} for inputs, warps in OWN_SHRINKS],
            [{"outputs": outputs, "expand_warps": warps} for outputs, warps in OWN_EXPANDS],
            [{"overlaps": form} for form in (0, 2)],
        )
        for stage in stages:
            for tiling in [replace(best, **changed) for changed in stage]:
                if time.monotonic() > end_s:
                    break
                try:
                    added = clock.added_s(linear, 32, min(32, linear.slots), own(tiling))
                except Exception as error:  # noqa: BLE001 - a tiling that does not compile or fit is recorded
                    kept.add("failed", linear=linear.name, tiling=asdict(tiling), error=f"{error}"[:200])
                    continue
                kept.add("own", linear=linear.name, us=1e6 * added, tiling=asdict(tiling))
                best, best_s = (tiling, added) if added < best_s else (best, best_s)
        chosen[linear.key] = asdict(best)
        (out / "tilings.json").write_text(json.dumps(chosen, indent=1))


def cases(linears: Sequence[Linear], vllm: Any, clock: Clock, kept: Kept, out: Path) -> None:
    """Time every case with vLLM's defaults, with its tuned configurations, and with our kernels."""
    tilings = json.loads((out / "tilings.json").read_text()) if (out / "tilings.json").exists() else {}
    folders = [("vllm", None), ("tuned", out / "tuned")] if vllm is not None else []
    for rows, active in CASES:
        sums: dict[str, float] = defaultdict(float)
        for linear in linears:
            tiling = AdapterTiling(**tilings.get(linear.key, {}))
            sums["base"] += clock.added_s(linear, rows, active, None)
            for name, folder in folders:
                if folder is None or folder.exists():
                    vllm.use_folder(folder)
                    sums[name] += _keep_case(clock, kept, (linear, rows, active), name, vllm.both)
            sums["own"] += _keep_case(clock, kept, (linear, rows, active), "own", own(tiling))
        kept.add("case", rows=rows, active=active, ms={name: 1e3 * LAYERS * total for name, total in sums.items()})


def _keep_case(clock: Clock, kept: Kept, case: tuple[Linear, int, int], name: str, operation: Operation) -> float:
    linear, rows, active = case
    added = clock.added_s(linear, rows, active, operation)
    used = 2 * linear.rank * active * (linear.inputs * len(linear.outputs) + sum(linear.outputs))
    kept.add("time", run=name, linear=linear.name, rows=rows, active=active, us=1e6 * added,
             gb_per_s=used / added / 1e9 if added > 0 else None)  # fmt: skip
    return added


def run_parts(
    parts: Sequence[str], linears: Sequence[Linear], vllm: Any, clock: Clock, kept: Kept, out: Path,
    gpu_name: str, end_s: float = math.inf,
) -> None:  # fmt: skip
    """Run each part that begins before ``end_s``; one that fails is kept, and the next ones run."""
    runs: dict[str, Callable[[], None]] = {
        "check": lambda: check(linears, vllm, kept),
        "tune": lambda: tune(linears, vllm, clock, kept, out, gpu_name),
        "own": lambda: choose_own(linears, clock, kept, out),
        "cases": lambda: cases(linears, vllm, clock, kept, out),
    }
    for part in parts:
        if time.monotonic() > end_s:
            kept.add("left-out", part=part)
            continue
        begun_s = time.monotonic()
        try:
            runs[part]()
        except Exception:  # noqa: BLE001 - the other parts run
            kept.add("error", part=part, text=traceback.format_exc()[-3000:])
        kept.add("part", part=part, seconds=round(time.monotonic() - begun_s, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no part begins")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--aligned", action="store_true")
    given = parser.parse_args(arguments)
    end_s = time.monotonic() + given.seconds
    os.environ["CUDA_VISIBLE_DEVICES"] = str(given.gpu)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    kept = Kept(given.out / "kernels.json", gpu=name, torch=torch.__version__, aligned=given.aligned)
    clock = Clock(lambda run: graph_seconds(run, 0.02))
    linears = [Linear(key, inputs, outputs) for key, (inputs, outputs) in LINEARS.items()]
    vllm = VllmKernels((given.out / "aligned_kernels.py").resolve() if given.aligned else None)
    run_parts(given.parts, linears, vllm, clock, kept, given.out, name, end_s)


if __name__ == "__main__":
    main()
