"""Times of the delta kernels on a GPU, for all linears of Llama-3.1-8B; needs torch and Triton alone.

    python -m tests.bench.delta_kernels OUT [--seconds 140] [--parts check decode step prompts formats]

Each part runs by itself: what fails is printed and recorded, and the next parts run. ``OUT/delta_kernels.json`` is
written after each. All times are medians of replays of a CUDA graph that goes through 32 layers of distinct
weights, so that nothing is found in the L2 cache: 14 GB of base weights and 59 GB of 2-bit deltas in 32 slots
(fewer slots where the GPU has no room). All tilings are compiled first, by several processes at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.delta_kernel_cases import (
    DECODE,
    FORMATS,
    LAYERS,
    MERGES,
    OTHER_FORMATS,
    PROMPTS,
    Call,
    Deltas,
    Kept,
    Machine,
    Tiling,
    Workspace,
    add_delta,
    add_routed,
    merge_delta,
    random_delta,
    route_of,
)
from tests.bench.delta_kernel_check import check

PROFILED = (DECODE[32][10], DECODE[32][14])  # narrow and wide products
PARTS = ("check", "decode", "step", "prompts", "formats", "profile")


def decode(machine: Machine, deltas: Deltas, kept: Kept) -> None:
    """Time each linear of all layers with every tiling, for numbers of rows and of deltas in use."""
    for rows, tilings in DECODE.items():
        for active in [count for count in machine.active if count <= deltas.slots]:
            slot_of_row = torch.arange(rows, device=machine.device) % active
            for tiling in tilings:
                _time_linears(machine, deltas, slot_of_row, tiling, kept, {"rows": rows, "active": active})
        print_best(kept, "decode", rows)


def _time_linears(
    machine: Machine, deltas: Deltas, slot_of_row: torch.Tensor, tiling: Tiling, kept: Kept, facts: dict[str, Any],
    *, part: str = "decode",
) -> None:  # fmt: skip
    if kept.is_over:
        return
    call = Call(route=route_of(slot_of_row, deltas.slots, tiling), tiling=tiling, workspace=kept.workspace)
    for name, (n, k) in machine.shapes:
        x = torch.randn(len(slot_of_row), k, device=machine.device).bfloat16()
        y = torch.zeros(len(slot_of_row), n, dtype=torch.bfloat16, device=machine.device)

        def run(name: str = name, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            for layer in range(deltas.layers):
                deltas.add(name, layer, y, x, call)

        try:
            seconds = machine.seconds(run) / deltas.layers
        except Exception as error:  # noqa: BLE001 - a tiling that does not compile or fit is recorded
            kept.add(
                "failed", tiling=str(tiling), linear=name, error=f"{type(error).__name__}: {error}"[:200], **facts
            )
            continue
        used = min(facts["active"], len(slot_of_row)) * deltas.format.matrix_bytes(n, k)
        kept.add(part, linear=name, tiling=str(tiling), us=seconds * 1e6, gb_per_s=used / seconds / 1e9, **facts)


def print_best(kept: Kept, part: str, rows: int) -> None:
    """Print the best tiling of each linear and mix, and the sum of 32 layers."""
    entries = [entry for entry in kept.values.get(part, []) if entry["rows"] == rows]
    for key in sorted({(entry.get("format", "int2"), entry["active"]) for entry in entries}):
        total = 0.0
        for name in {entry["linear"]: None for entry in entries}:
            mine = [e for e in entries if (e.get("format", "int2"), e["active"]) == key and e["linear"] == name]
            if mine:
                best = min(mine, key=lambda e: e["us"])
                total += best["us"] * LAYERS / 1e3
                print(
                    f"{part} {key[0]} rows {rows} active {key[1]:2d} {name:8s} {best['us']:7.1f} us "
                    f"{best['gb_per_s']:6.0f} GB/s  {best['tiling']}"
                )
        print(f"{part} {key[0]} rows {rows} active {key[1]:2d} sum of 32 layers {total:6.2f} ms")


def best_tiling(kept: Kept, rows: int, linear: str, active: int | None) -> Tiling | None:
    """Return the fastest tiling for a mix, or (``active`` None) that of the least sum of times over best times."""
    entries = [e for e in kept.values.get("decode", []) if e["rows"] == rows and e["linear"] == linear]
    least: dict[int, float] = {}
    for entry in entries:
        least[entry["active"]] = min(entry["us"], least.get(entry["active"], float("inf")))
    costs: dict[str, list[float]] = {}
    for entry in entries:
        if active in (None, entry["active"]):
            costs.setdefault(entry["tiling"], []).append(entry["us"] / least[entry["active"]])
    most = max(map(len, costs.values()), default=0)
    found = {str(tiling): tiling for tiling in DECODE[rows]}
    complete = [(sum(cost), name) for name, cost in costs.items() if len(cost) == most]
    return found[min(complete)[1]] if complete else None


def step(machine: Machine, deltas: Deltas, kept: Kept) -> None:
    """Time all linears of all layers in their order: the base alone, and with deltas after each."""
    weights = base_weights(machine, deltas.layers)
    for rows in DECODE:
        x = {k: torch.randn(rows, k, device=machine.device).bfloat16() for _, (_, k) in machine.shapes}
        y = {n: torch.zeros(rows, n, dtype=torch.bfloat16, device=machine.device) for _, (n, _) in machine.shapes}
        for active in (0, *(count for count in machine.active if count <= deltas.slots)):
            for choice in ("fixed", "best", "streams"):
                if kept.is_over or (active == 0 and choice == "best"):
                    continue
                chosen = {
                    name: best_tiling(kept, rows, name, active if choice != "fixed" and active else None)
                    or DECODE[rows][0]
                    for name, _ in machine.shapes
                }
                slot_of_row = (
                    torch.arange(rows, device=machine.device) % active
                    if active
                    else torch.full((rows,), -1, device=machine.device)
                )
                _time_step(machine, deltas, kept, (rows, active, choice), chosen, slot_of_row, weights, (x, y))


def _time_step(
    machine: Machine, deltas: Deltas, kept: Kept, facts: tuple[int, int, str], chosen: dict[str, Tiling],
    slot_of_row: torch.Tensor, weights: dict[str, list[torch.Tensor]], buffers: tuple[Any, Any],
) -> None:  # fmt: skip
    (rows, active, choice), (x, y) = facts, buffers
    calls = {
        name: Call(route=route_of(slot_of_row, deltas.slots, tiling), tiling=tiling, workspace=kept.workspace)
        for name, tiling in chosen.items()
    }

    change = {n: torch.zeros(rows, n, device=machine.device) for n in y}
    side = torch.cuda.Stream() if choice == "streams" and machine.device == "cuda" else None

    def run(has_base: bool, has_deltas: bool) -> None:
        if side is not None and has_base and has_deltas:
            run_on_two_streams(side)
            return
        for layer in range(deltas.layers):
            for name, (n, k) in machine.shapes:
                if has_base:
                    torch.mm(x[k], weights[name][layer].t(), out=y[n])
                if has_deltas:
                    deltas.add(name, layer, y[n], x[k], calls[name])

    def run_on_two_streams(side: torch.cuda.Stream) -> None:
        main = torch.cuda.current_stream()
        for layer in range(deltas.layers):
            for name, (n, k) in machine.shapes:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    deltas.add(name, layer, change[n], x[k], calls[name], adds=False)
                torch.mm(x[k], weights[name][layer].t(), out=y[n])
                main.wait_stream(side)
                add_routed(y[n], change[n], calls[name].route)

    base = machine.seconds(lambda: run(True, False), 0.1)
    added = machine.seconds(lambda: run(False, True), 0.1)
    both = machine.seconds(lambda: run(True, True), 0.1)
    kept.add(
        "step", rows=rows, active=active, choice=choice, base_ms=base * 1e3, deltas_ms=added * 1e3,
        both_ms=both * 1e3, tilings={name: str(tiling) for name, tiling in chosen.items()},
    )  # fmt: skip
    print(
        f"step rows {rows} active {active:2d} {choice:5s} base {base * 1e3:6.2f} ms, deltas {added * 1e3:6.2f}, "
        f"both {both * 1e3:6.2f}, added {(both - base) * 1e3:6.2f}"
    )


def base_weights(machine: Machine, layers: int) -> dict[str, list[torch.Tensor]]:
    def matrix(shape: tuple[int, int]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=machine.device).normal_(std=0.02)

    return {name: [matrix(shape) for _ in range(layers)] for name, shape in machine.shapes}


def prompts(machine: Machine, deltas: Deltas, kept: Kept) -> None:
    """Time many rows of one delta: the base alone, base + kernel, and one product with the merged weights."""
    layers = min(4, deltas.layers)
    weights = base_weights(machine, layers)
    for name, (n, k) in machine.shapes:
        scratch = torch.empty(n, k, dtype=torch.bfloat16, device=machine.device)

        def merge(layer: int, form: tuple[int, int], name: str = name, scratch: torch.Tensor = scratch) -> None:
            codes, scales = deltas.codes[name][layer][0], deltas.scales[name][layer][0]
            merge_delta(weights[name][layer], scratch, codes, scales, deltas.format, groups=form[0], warps=form[1])

        taken = {
            form: machine.seconds(lambda merge=merge, form=form: [merge(i, form) for i in range(layers)]) / layers
            for form in MERGES
        }
        for form, seconds in taken.items():
            kept.add("merge", linear=name, form=form, us=seconds * 1e6, gb_per_s=n * k * 4.266 / seconds / 1e9)
        best = min(taken, key=lambda form: taken[form])
        print(f"merge {name:8s} {taken[best] * 1e6:6.1f} us {n * k * 4.266 / taken[best] / 1e9:5.0f} GB/s {best}")
        for rows in machine.prompt_rows:
            if not kept.is_over:
                _time_prompt(machine, deltas, kept, name, rows, weights[name], partial(merge, form=best), scratch)
    for rows in machine.prompt_rows:
        mine = [entry for entry in kept.values.get("prompts", []) if entry["rows"] == rows]
        base, merged = sum(e["base_us"] for e in mine), sum(e["merged_us"] for e in mine)
        kernel = sum(e["base_us"] + min(e["kernel_us"].values(), default=float("inf")) for e in mine)
        if len(mine) == len(machine.shapes):
            print(
                f"prompts rows {rows}: base {base:8.1f} us a layer, with the kernel {kernel / base:5.2f} times, "
                f"merged {merged / base:5.2f} times"
            )


def _time_prompt(
    machine: Machine, deltas: Deltas, kept: Kept, name: str, rows: int, weights: Sequence[torch.Tensor],
    merge: Callable[[int], None], scratch: torch.Tensor,
) -> None:  # fmt: skip
    n, k = dict(machine.shapes)[name]
    x = torch.randn(rows, k, device=machine.device).bfloat16()
    y = torch.zeros(rows, n, dtype=torch.bfloat16, device=machine.device)
    slot_of_row, layers = torch.zeros(rows, dtype=torch.int64, device=machine.device), len(weights)

    def base() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=y)

    def merged() -> None:
        for layer in range(layers):
            merge(layer)
            torch.mm(x, scratch.t(), out=y)

    kernel_us: dict[str, float] = {}
    for tiling in PROMPTS if rows <= 1024 else ():
        call = Call(route=route_of(slot_of_row, deltas.slots, tiling), tiling=tiling, workspace=kept.workspace)

        def kernel(call: Call = call) -> None:
            for layer in range(layers):
                deltas.add(name, layer, y, x, call)

        try:
            kernel_us[str(tiling)] = machine.seconds(kernel) / layers * 1e6
        except Exception as error:  # noqa: BLE001 - a tiling that does not compile or fit is recorded
            kept.add(
                "failed",
                tiling=str(tiling),
                linear=name,
                rows=rows,
                error=f"{type(error).__name__}: {error}"[:200],
            )
    kept.add(
        "prompts", linear=name, rows=rows, base_us=machine.seconds(base) / layers * 1e6,
        merged_us=machine.seconds(merged) / layers * 1e6, kernel_us=kernel_us,
    )  # fmt: skip


def formats(machine: Machine, kept: Kept) -> None:
    """Time the other dense formats: 8 deltas and 32 rows, 8 layers."""
    for name in ("int1", "int3", "int4"):
        if kept.is_over:
            return
        deltas = Deltas(machine, FORMATS[name], min(8, machine.layers), min(8, machine.slots))
        slot_of_row = torch.arange(32, device=machine.device) % deltas.slots
        for tiling in OTHER_FORMATS:
            facts = {"rows": 32, "active": deltas.slots, "format": name}
            _time_linears(machine, deltas, slot_of_row, tiling, kept, facts, part="formats")
        del deltas
    print_best(kept, "formats", 32)


def compile_all(processes: int = 14) -> None:
    """Compile all tilings side by side, into Triton's cache, by calls with small matrices."""
    checked = (OTHER_FORMATS[0], OTHER_FORMATS[-1])
    work = {("int2", tiling) for tiling in (*DECODE[32], *DECODE[128], *PROMPTS)}
    work |= {
        (name, tiling) for name in FORMATS for tiling in OTHER_FORMATS if "24" not in name or tiling in checked
    }
    # What differs in the launch alone is compiled once.
    kinds = {(name, replace(t, programs_per_sm=1, min_groups=1)): (name, t) for name, t in work}
    jobs = sorted(kinds.values(), key=str)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for failure in filter(None, pool.imap_unordered(_compile, jobs)):
            print(failure)


def _compile(job: tuple[str, Tiling]) -> str | None:
    name, tiling = job
    try:
        for shape in ((256, 2048), *(((192, 1000), (100, 384)) if tiling in OTHER_FORMATS else ())):
            codes, scales = random_delta(1, shape, FORMATS[name], "cuda")
            x, y = (torch.zeros(4, side, dtype=torch.bfloat16, device="cuda") for side in (shape[1], shape[0]))
            route = route_of(torch.zeros(4, dtype=torch.int64, device="cuda"), 1, tiling)
            add_delta(y, x, codes, scales, route, FORMATS[name], tiling, Workspace("cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - found again where it is timed
        return f"compile {name} {tiling}: {type(error).__name__}: {str(error)[:200]}"
    return None


def profile(machine: Machine) -> None:
    """Launch one large linear with 8 and with 1 deltas, for a profiler: twice each, of which the second counts."""
    shape = dict(machine.shapes).get("gate_up", machine.shapes[0][1])
    codes, scales = random_delta(8 if machine.device == "cuda" else 1, shape, FORMATS["int2"], machine.device)
    x, y = (torch.zeros(32, side, dtype=torch.bfloat16, device=machine.device) for side in (shape[1], shape[0]))
    x.normal_()
    for tiling in PROFILED:
        for active in (len(codes), 1):
            route = route_of(torch.arange(32, device=machine.device) % active, len(codes), tiling)
            for _ in range(2):
                add_delta(y, x, codes, scales, route, FORMATS["int2"], tiling, Workspace(machine.device))


def run_parts(machine: Machine, kept: Kept, parts: Iterable[str]) -> None:
    asked = set(parts)
    if "check" in asked:
        kept.part("check", lambda: check(machine, kept))
    if asked & {"decode", "step", "prompts"}:
        held: list[Deltas] = []
        kept.part(
            "allocate", lambda: held.append(Deltas(machine, FORMATS["int2"], machine.layers, _slots(machine)))
        )
        if held:
            for name, run in (("decode", decode), ("step", step), ("prompts", prompts)):
                if name in asked:
                    kept.part(name, lambda run=run: run(machine, held[0], kept))  # type: ignore[misc]
        held.clear()
    if "profile" in asked:
        kept.part("profile", lambda: profile(machine))
    if "formats" in asked:
        kept.part("formats", lambda: formats(machine, kept))


def _slots(machine: Machine) -> int:
    """Return the slots of 2-bit deltas that the GPU has room for next to the base."""
    if machine.device != "cuda":
        return machine.slots
    free, _ = torch.cuda.mem_get_info()
    sizes = [(n * k * 2, FORMATS["int2"].matrix_bytes(n, k)) for _, (n, k) in machine.shapes]
    room = 0.9 * free - 4e9 - machine.layers * sum(base for base, _ in sizes)
    return max(1, min(machine.slots, int(room / (machine.layers * sum(delta for _, delta in sizes)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=140, help="start nothing new after this long")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    kept = Kept(arguments.out, Machine(), arguments.seconds)
    if set(arguments.parts) != {"profile"}:
        kept.part("compile", compile_all)
        print(f"compiled after {time.monotonic() - begin:.0f} s")
    run_parts(Machine(), kept, arguments.parts)
    print(f"{time.monotonic() - begin:.0f} s; failed {len(kept.values['failed'])}; {kept.values.get('seconds')}")


if __name__ == "__main__":
    main()
