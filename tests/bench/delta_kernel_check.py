"""Correctness of the delta kernels: every format and tiling against the reference, on a GPU or the interpreter."""

from __future__ import annotations

from typing import Any

import torch

from tests.bench.delta_kernel_cases import (
    DECODE,
    FORMATS,
    OTHER_FORMATS,
    PROMPTS,
    Call,
    CodeFormat,
    Kept,
    Machine,
    Tiling,
    Workspace,
    add_delta,
    captured,
    delta_product,
    dequantize,
    merge_delta,
    random_delta,
    route_of,
)

MOST_ERROR = 6e-3  # of the norm: y is rounded to bfloat16 once more


def check(machine: Machine, kept: Kept) -> None:
    """Compare every format and tiling with the reference, replay a graph with other mixes, and repeat a sum."""
    torch.manual_seed(0)
    decode = {*DECODE[32], *DECODE[128], *PROMPTS} if machine.device == "cuda" else {DECODE[32][0]}
    for name, format_ in FORMATS.items():
        partial = {OTHER_FORMATS[0], OTHER_FORMATS[-1]}
        for tiling in sorted((decode if name == "int2" else set()) | partial, key=str):
            for shape in ((4096, 4096),) if machine.device == "cuda" else ((192, 256),):
                kept.add(
                    "check",
                    format=name,
                    tiling=str(tiling),
                    shape=shape,
                    **_errors(machine, format_, tiling, shape),
                )
        if kept.is_over:
            break
        for tiling in sorted(partial, key=str):
            for shape in ((192, 1000), (100, 384)):  # not whole tiles; a group that is not whole
                kept.add(
                    "check",
                    format=name,
                    tiling=str(tiling),
                    shape=shape,
                    **_errors(machine, format_, tiling, shape),
                )
    for entry in kept.values["check"]:
        if not entry["passed"]:
            print("WRONG", entry)
    kept.values["merge_error"] = {name: _merge_error(machine, format_) for name, format_ in FORMATS.items()}
    errors = [entry["error"] for entry in kept.values["check"]]
    passed = sum(entry["passed"] for entry in kept.values["check"])
    print(
        f"check: {passed} of {len(errors)} passed, largest error {max(errors):.1e}; "
        f"merge {max(kept.values['merge_error'].values()):.1e}"
    )


def _errors(machine: Machine, format_: CodeFormat, tiling: Tiling, shape: tuple[int, int]) -> dict[str, Any]:
    slots, (n, k) = 5, shape
    codes, scales = random_delta(slots, shape, format_, machine.device)
    workspace, worst, why = Workspace(machine.device), 0.0, ""
    for mix in ([-1, 0, 4, 4, -1, 2] * 4, [3] * 37, [-1] * 5, [2], list(range(5)) * 3):
        slot_of_row = torch.tensor(mix, device=machine.device)
        x = torch.randn(len(mix), k, device=machine.device).bfloat16()
        y = torch.zeros(len(mix), n, dtype=torch.bfloat16, device=machine.device)
        call = Call(route=route_of(slot_of_row, slots, tiling), tiling=tiling, workspace=workspace)
        add_delta(y, x, codes, scales, call.route, format_, tiling, workspace)
        want = delta_product(x, codes, scales, slot_of_row, format_)[:, :n]
        worst = max(worst, relative_error(y, want))
        if y[slot_of_row < 0].any():
            why = "rows without a delta were written"
        again = torch.zeros_like(y)
        add_delta(again, x, codes, scales, call.route, format_, tiling, workspace)
        if not torch.equal(y, again):
            why = "the same sum twice differs"
        if workspace.arrived(1).any():
            why = "counters are not 0 again"
    if machine.device == "cuda":
        worst = max(worst, _replay_error(format_, tiling, shape, codes, scales))
    return {
        "error": worst,
        "why": why,
        "passed": worst < MOST_ERROR * (1 if machine.device == "cuda" else 2) and not why,
    }


def _replay_error(
    format_: CodeFormat, tiling: Tiling, shape: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor
) -> float:
    """Return the largest error of a graph that was captured with base rows alone and replayed with other mixes."""
    (n, k), rows, workspace = shape, 32, Workspace("cuda")
    x, y = (
        torch.randn(rows, k, device="cuda").bfloat16(),
        torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda"),
    )
    route = route_of(torch.full((rows,), -1, device="cuda"), len(codes), tiling)
    graph = captured(lambda: (y.zero_(), add_delta(y, x, codes, scales, route, format_, tiling, workspace))[0])
    worst = 0.0
    for mix in (torch.arange(rows) % 5, torch.full((rows,), 3), torch.randint(-1, 5, (rows,))):
        route.fill(mix.cuda())
        graph.replay()
        worst = max(worst, relative_error(y, delta_product(x, codes, scales, mix.cuda(), format_)[:, :n]))
    return worst


def relative_error(y: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference by that of ``want``; infinite where y is not finite."""
    if not torch.isfinite(y).all():
        return float("inf")
    return float((y.float() - want).norm() / want.norm().clamp(min=1e-9))


def _merge_error(machine: Machine, format_: CodeFormat) -> float:
    n, k = (4096, 14336) if machine.device == "cuda" else (64, 256)
    codes, scales = random_delta(1, (n, k), format_, machine.device)
    w = torch.randn(n, k, device=machine.device).bfloat16() * 0.02
    out = torch.full_like(w, float("nan"))
    merge_delta(w, out, codes[0], scales[0], format_)
    return relative_error(out, w.float() + dequantize(codes[0], scales[0], format_))
