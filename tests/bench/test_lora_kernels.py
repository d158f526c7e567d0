"""Bench of adapter kernels, on small matrices in Triton's interpreter: every part runs and is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.variant_kernels import kernel_module

kernel_module("adapter_kernels")  # skips where there is no Triton

from tests.bench import lora_kernel_cases as cases  # noqa: E402
from tests.bench import lora_kernels as bench  # noqa: E402
from tests.bench.variant_costs_vllm import Kept  # noqa: E402

pytestmark = pytest.mark.slow
SHAPES = {"qkv": (64, (32, 16, 16)), "o": (64, (32,)), "down": (96, (32,))}
DEFAULT = {"block_m": 1}


class Vllm:
    """vLLM's operations in torch, whose configurations change nothing."""

    def __init__(self) -> None:
        self.folders: list[Path | None] = []

    def use_folder(self, folder: Path | None) -> None:
        self.folders.append(folder)

    def default(self, kind: str, linear: cases.Linear, rows: int) -> dict[str, Any]:
        return DEFAULT

    def shrink(self, linear: cases.Linear, layer: int, y: Any, x: Any, mix: Any, **_: Any) -> None:
        pass

    expand = shrink

    def both(self, linear: cases.Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: cases.Mix) -> None:
        a, b = ([each[:, 0] for each in factors] for factors in (linear.a[layer], linear.b[layer]))
        y += bench.adapter_change(x, a, b, mix.meta[0], 1.0).bfloat16()


class Clock(cases.Clock):
    """Clock by which configurations of vLLM's kernels with 8 warps are the fastest."""

    def added_s(self, linear: cases.Linear, rows: int, active: int, operation: Any) -> float:
        super().added_s(linear, rows, active, operation)
        config = getattr(operation, "keywords", {}).get("config")
        if config in (None, DEFAULT):
            return 5e-6
        return 1e-6 if config["num_warps"] == 8 else 2e-6


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> list[cases.Linear]:
    torch.manual_seed(0)
    monkeypatch.setattr(bench, "CASES", ((1, 1), (8, 4)))
    monkeypatch.setattr(bench, "TUNED_ROWS", (32, 1))
    monkeypatch.setattr(bench, "OWN_SHRINKS", bench.OWN_SHRINKS[:2])
    monkeypatch.setattr(bench, "OWN_EXPANDS", bench.OWN_EXPANDS[:2])
    monkeypatch.setattr(bench, "SHRINKS", ((16, 4, 4, 2), (32, 2, 8, 2), (64, 64, 4, 2)))
    monkeypatch.setattr(bench, "RANKS", (8, 32))
    monkeypatch.setattr(bench, "RANK_CASES", ((8, 4),))
    made: dict[tuple[tuple[int, ...], int], cases.Mix] = {}  # the interpreter splits the groups of each mix once

    def mix_of(slot_of_row: torch.Tensor, slots: int) -> cases.Mix:
        key = (tuple(slot_of_row.tolist()), slots)
        return made.get(key) or made.setdefault(key, split(slot_of_row, slots))

    split = cases.mix_of
    monkeypatch.setattr(cases, "mix_of", mix_of)
    monkeypatch.setattr(bench, "mix_of", mix_of)
    return [cases.Linear(name, k, n, "cpu", slots=4, cold_bytes=1.0) for name, (k, n) in SHAPES.items()]


def test_every_part_is_recorded(linears: list[cases.Linear], tmp_path: Path) -> None:
    linears = [linears[0], linears[2]]  # three slices, and one
    kept, vllm = Kept(tmp_path / "kernels.json"), Vllm()
    clock = Clock(lambda run: run() or 1e-6)
    bench.run_parts(bench.PARTS, linears, vllm, clock, kept, tmp_path, "NVIDIA H200-X")
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert not [row for row in rows if row["kind"] in ("error", "failed", "left-out")]
    checks = [row for row in rows if row["kind"] == "check"]
    assert len(checks) == len(linears) * 5 * 4  # mixes; our forms of launch, and vLLM's
    assert all(row["passed"] for row in checks)
    assert {(row["rows"], row["active"]) for row in rows if row["kind"] == "case"} == {(1, 1), (8, 4)}
    runs = {"base", "vllm", "tuned", "own"}
    assert all(set(row["ms"]) == runs for row in rows if row["kind"] == "case")
    assert vllm.folders.count(tmp_path / "tuned") == len(linears) * 2
    tilings = json.loads((tmp_path / "tilings.json").read_text())
    assert set(tilings) == {"64x64", "96x32"}
    assert all(cases.AdapterTiling(**values) for values in tilings.values())


def test_tuned_files_are_as_vllm_reads_them(linears: list[cases.Linear], tmp_path: Path) -> None:
    """Names by the GPU, and ``[max_loras][slices][rows][k][n]``, where vLLM takes the nearest number it finds."""
    kept = Kept(tmp_path / "kernels.json")
    bench.tune(linears, Vllm(), Clock(lambda run: run() or 1e-6), kept, tmp_path, "NVIDIA H200-X")
    files = {path.name for path in (tmp_path / "tuned").iterdir()}
    names = ("SHRINK", "EXPAND_TRUE", "EXPAND_FALSE")
    assert files == {f"NVIDIA_H200_X_{name}.json" for name in names}
    shrink, expand, _ = (
        json.loads((tmp_path / "tuned" / f"NVIDIA_H200_X_{name}.json").read_text()) for name in names
    )
    assert set(shrink) == {"5"}  # one more than the slots, as vLLM asks
    assert set(shrink["5"]) == {"3", "1"}
    assert all(set(rows) == {"32", "1", "128"} for rows in shrink["5"].values())
    assert set(shrink["5"]["1"]["32"]) == {"64", "96"}
    assert (
        shrink["5"]["1"]["32"]["64"]["16"] | {"num_warps": 8, "split_k": 2} == shrink["5"]["1"]["32"]["64"]["16"]
    )
    assert shrink["5"]["1"]["128"]["64"]["16"]["split_k"] == 8  # prompts keep vLLM's default
    assert expand["5"]["3"]["1"]["16"]["32"]["num_warps"] == 8
    assert {"block_m", "block_n", "block_k", "num_warps", "num_stages", "num_ctas"} <= set(
        expand["5"]["1"]["32"]["16"]["32"]
    )


def test_a_configuration_not_timed_for_all_linears_of_its_shape_is_not_chosen(
    linears: list[cases.Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expansions of o and down have one shape; the time ends within down's."""
    calls: list[str] = []

    class Ending(Clock):
        def added_s(self, linear: cases.Linear, rows: int, active: int, operation: Any) -> float:
            calls.append(linear.name)
            if calls.count("down") > 3 + 2:  # the default, two of shrink; the default and one of expand
                monkeypatch.setattr(bench.time, "monotonic", lambda: 1e12)
            return super().added_s(linear, rows, active, operation)

    kept = Kept(tmp_path / "kernels.json")
    bench.tune(linears, Vllm(), Ending(lambda run: run() or 1e-6), kept, tmp_path, "GPU")
    monkeypatch.undo()
    expand = json.loads((tmp_path / "tuned" / "GPU_EXPAND_TRUE.json").read_text())
    assert set(expand["5"]["1"]) == {"32", "128"}
    (tuned,) = [
        r for r in kept.document["rows"] if r.get("op") == "expand" and r["slices"] == 1 and r["rows"] == 32
    ]
    assert len(tuned["us"]) == 3


def test_each_number_of_slices_has_an_entry_even_without_time(
    linears: list[cases.Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM fails where it finds none."""
    monkeypatch.setattr(bench, "TUNE_S", -1.0)
    bench.tune(linears, Vllm(), Clock(lambda run: run() or 1e-6), Kept(tmp_path / "kept.json"), tmp_path, "GPU")
    for name in ("SHRINK", "EXPAND_TRUE"):
        of_slices = json.loads((tmp_path / "tuned" / f"GPU_{name}.json").read_text())["5"]
        assert {slices: set(rows) for slices, rows in of_slices.items()} == {
            "1": {"32", "128"},
            "3": {"32", "128"},
        }


def test_a_part_that_fails_leaves_the_next_ones(linears: list[cases.Linear], tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kernels.json")
    clock = Clock(lambda run: run() or 1e-6)
    bench.run_parts(("tune", "check"), linears[1:2], None, clock, kept, tmp_path, "GPU")
    assert kept.document["rows"][0]["kind"] == "error"
    assert [row["part"] for row in kept.document["rows"] if row["kind"] == "part"] == ["tune", "check"]
    bench.run_parts(("check",), linears, None, clock, kept, tmp_path, "GPU", end_s=0.0)
    assert kept.document["rows"][-1]["kind"] == "left-out"


def test_a_mix_has_vllms_groups() -> None:
    mix = bench.mix_of(torch.tensor([2, -1, 2, 0]), 3)
    assert mix.groups.slots.tolist() == [-1, 0, 2, -1]
    assert mix.groups.counts.tolist() == [1, 1, 2, 0]
    assert mix.groups.starts.tolist() == [0, 1, 2, 4, 0]
    assert mix.groups.order.tolist() == [1, 3, 0, 2]
