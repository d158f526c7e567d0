"""Times of vLLM's and our own adapter kernels by themselves, and tuned configurations of vLLM's: on one GPU.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.lora_kernels OUT [--parts check own tune cases] [--seconds 240] [--gpu 0]

The four linears of Qwen3-8B with 32 slots of rank 16. A time is that of a CUDA graph in which each linear of
several layers is followed by its adapters, less that of the linears alone: their weights (over 33 MB each) and the
layers' distinct adapters (over 100 MB for each factor) leave nothing of an adapter in the L2 cache (50 MB).

``check``: our kernels and vLLM's against float32, and our graphs replayed with other mixes. ``tune``: a grid of
vLLM's block sizes, split-K, warps and stages, for at most ``TUNE_S`` seconds, rows in the order of ``TUNED_ROWS``;
writes ``OUT/tuned``, a folder for ``VLLM_TUNED_CONFIG_FOLDER``. ``own``: tilings of our
kernels at 32 rows of 32 adapters; writes ``OUT/tilings.json``. ``cases``: all of ``CASES`` with vLLM's defaults,
vLLM tuned and our own. ``ranks``: ``RANK_CASES`` with slots of ``RANKS``, and our tilings with rank 64.
``OUT/kernels.json`` is written after each time. ``--aligned`` has vLLM's kernels as the
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.delta_kernel_cases import captured, graph_seconds
from tests.bench.lora_kernel_cases import (
    LINEARS,
    TILINGS,
    AdapterTiling,
    Clock,
    Linear,
    Operation,
    VllmKernels,
    mix_of,
    own,
)
from tests.bench.variant_costs_vllm import Kept

from iserve_variants.reference import adapter_change  # isort: skip

LAYERS = 36
CASES = (  # rows, distinct adapters; the larger ones show up to how many rows ours are faster
    *((1, 1), (8, 8), (16, 16), (32, 1), (32, 4), (32, 8), (32, 32), (64, 32)),
    *((rows, active) for rows in (128, 256, 512, 1024) for active in (1, 32)),
)
RANK_CASES = ((32, 1), (32, 32), (256, 32))
TUNED_ROWS = (32, 64, 16, 8, 1)  # each with as many adapters as it can have
PARTS = ("check", "own", "tune", "cases", "ranks")
TUNE_S, OWN_S, RANKS_S = 60.0, 60.0, 30.0
RANKS = (8, 32, 64)
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
OWN_SHRINKS = ((512, 4), (256, 2), (512, 2), (1024, 4), (256, 1), (512, 1))  # inputs, warps
OWN_EXPANDS = ((256, 4), (512, 8), (128, 2), (128, 4), (256, 2))  # outputs, warps


def check(linears: Sequence[Linear], vllm: Any, kept: Kept) -> None:
    """Compare our kernels, in each form of launch, and vLLM's with float32; replay our graphs with other mixes."""
    mixes = {
        "32 of 32": torch.arange(32),
        "one": torch.full((32,), 2),
        "base and 7": torch.arange(40) % 8 - 1,
        "64 of 3": torch.arange(64) % 3,
        "200 of 5": torch.arange(200) % 5,
    }
    for linear in linears:
        runs = own_forms(linear) | ({"vllm": vllm.both} if vllm is not None else {})
        for name, slots in mixes.items():
            slot_of_row = torch.where(slots < linear.slots, slots, -1).to(linear.device)
            x, y = linear.rows(len(slots))
            want = adapter_change(x, _factors(linear.a[0]), _factors(linear.b[0]), slot_of_row, 1.0)
            for run, operation in runs.items():
                operation(linear, 0, y.zero_(), x, mix_of(slot_of_row, linear.slots))
                _keep_error(kept, y, want, linear=linear.name, run=run, mix=name)
        if linear.device == "cuda":
            for run, operation in own_forms(linear).items():
                try:
                    _check_replays(linear, run, operation, kept)
                except RuntimeError as error:  # a form that cannot be captured is recorded
                    kept.add("failed", linear=linear.name, run=run, error=f"{error}"[:200])


def own_forms(linear: Linear) -> dict[str, Operation]:
    """Return our kernels in every form of launch."""
    return {f"own {overlaps}": own(AdapterTiling(overlaps=overlaps)) for overlaps in range(3)}


def _check_replays(linear: Linear, name: str, run: Operation, kept: Kept) -> None:
    """Capture a graph with rows of the base alone, and replay it with other mixes in the same buffers."""
    x, y = linear.rows(32)
    mix = mix_of(torch.full((32,), -1, device=linear.device), linear.slots)
    graph = captured(lambda: (y.zero_(), run(linear, 0, y, x, mix))[0])
    for rows, slots in {"none": [-1] * 32, "all": list(range(32)), "two": [3, 9] * 16}.items():
        slot_of_row = torch.tensor(slots, device=linear.device)
        for into, new in zip(mix.split, mix_of(slot_of_row, linear.slots).split, strict=True):
            into.copy_(new)
        graph.replay()
        want = adapter_change(x, _factors(linear.a[0]), _factors(linear.b[0]), slot_of_row, 1.0)
        _keep_error(kept, y, want, linear=linear.name, run=f"{name}, replayed", mix=rows)


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
    stages = (*_shapes(), [{"overlaps": form} for form in (0, 1)])
    end_s, chosen = time.monotonic() + OWN_S, dict[str, dict[str, Any]]()
    for linear in linears:
        best = _fastest(linear, AdapterTiling(), math.inf, stages, own, clock, kept, end_s)
        chosen[linear.key] = asdict(best)
        (out / "tilings.json").write_text(json.dumps(chosen, indent=1))


def _shapes() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shrinks = [{"inputs": inputs, "shrink_warps": warps} for inputs, warps in OWN_SHRINKS]
    return shrinks, [{"outputs": n, "expand_warps": warps} for n, warps in OWN_EXPANDS]


def _fastest(
    linear: Linear, best: AdapterTiling, best_s: float, stages: Sequence[list[dict[str, Any]]],
    operation: Callable[[AdapterTiling], Operation], clock: Clock, kept: Kept, end_s: float, **facts: int,
) -> AdapterTiling:  # fmt: skip
    """Return the fastest tiling, found by changing in each stage the fastest of the one before."""
    for stage in stages:
        for tiling in [replace(best, **changed) for changed in stage]:
            if time.monotonic() > end_s:
                return best
            try:
                added = clock.added_s(linear, 32, min(32, linear.slots), operation(tiling))
            except Exception as error:  # noqa: BLE001 - a tiling that does not compile or fit is recorded
                kept.add("failed", linear=linear.name, tiling=asdict(tiling), error=f"{error}"[:200])
                continue
            kept.add("own", linear=linear.name, us=1e6 * added, tiling=asdict(tiling), **facts)
            best, best_s = (tiling, added) if added < best_s else (best, best_s)
    return best


def tilings_in(file: Path, linears: Sequence[Linear]) -> list[AdapterTiling]:
    """Return the tilings that were chosen for the linears; the default where none was."""
    found = json.loads(file.read_text()) if file.exists() else {}
    return [AdapterTiling(**found.get(linear.key, {})) for linear in linears]


def cases(linears: Sequence[Linear], vllm: Any, clock: Clock, kept: Kept, out: Path) -> None:
    """Time every case with vLLM's defaults, with its tuned configurations, and with our kernels."""
    tilings = tilings_in(out / "tilings.json", linears)
    folders = [("vllm", None), ("tuned", out / "tuned")] if vllm is not None else []
    for rows, active in CASES:
        sums: dict[str, float] = defaultdict(float)
        for linear, tiling in zip(linears, tilings, strict=True):
            sums["base"] += clock.added_s(linear, rows, active, None)
            for name, folder in folders:
                if folder is None or folder.exists():
                    vllm.use_folder(folder)
                    sums[name] += _keep_case(clock, kept, (linear, rows, active), name, vllm.both)
            sums["own"] += _keep_case(clock, kept, (linear, rows, active), "own", own(tiling))
        kept.add("case", rows=rows, active=active, ms={name: 1e3 * LAYERS * total for name, total in sums.items()})


def _keep_case(
    clock: Clock,
    kept: Kept,
    case: tuple[Linear, int, int],
    name: str,
    operation: Operation,
    **facts: int,
) -> float:
    linear, rows, active = case
    added = clock.added_s(linear, rows, active, operation)
    used = 2 * linear.rank * active * (linear.inputs * len(linear.outputs) + sum(linear.outputs))
    kept.add("time", run=name, linear=linear.name, rows=rows, active=active, us=1e6 * added,
             gb_per_s=used / added / 1e9 if added > 0 else None, **facts)  # fmt: skip
    return added


def ranks(linears: Sequence[Linear], vllm: Any, clock: Clock, kept: Kept) -> None:
    """Time vLLM's kernels and ours with other ranks, then tilings of ours with the largest rank."""
    end_s = time.monotonic() + RANKS_S
    if vllm is not None:
        vllm.use_folder(None)
    for rank in RANKS:
        for of_16 in linears:
            linear = replace(of_16, rank=rank)
            tiling = TILINGS[len(linear.outputs)]
            for rows, active in RANK_CASES:
                runs = {"own": own(tiling)} | ({"vllm": vllm.both} if vllm is not None else {})
                for name, operation in runs.items():
                    _keep_case(clock, kept, (linear, rows, min(active, linear.slots)), name, operation, rank=rank)
            if rank == max(RANKS):
                _fastest(linear, tiling, math.inf, _shapes(), own, clock, kept, end_s, rank=rank)


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
        "ranks": lambda: ranks(linears, vllm, clock, kept),
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
