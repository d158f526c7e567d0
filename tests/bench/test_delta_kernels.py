"""Benchmark of the delta kernels, on small matrices in Triton's interpreter: every part runs and is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemon.variant_kernels import kernel_module

kernel_module("delta_linear")  # skips where there is no Triton

from tests.bench import delta_kernel_check, delta_kernels  # noqa: E402
from tests.bench.delta_kernel_cases import Kept, Machine  # noqa: E402


@pytest.mark.long
def test_every_part_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {rows: tilings[:1] for rows, tilings in delta_kernels.DECODE.items()}
    for module in (delta_kernels, delta_kernel_check):
        monkeypatch.setattr(module, "DECODE", few)
        monkeypatch.setattr(module, "PROMPTS", delta_kernels.PROMPTS[:1])
    monkeypatch.setattr(delta_kernels, "OTHER_FORMATS", delta_kernels.OTHER_FORMATS[:1])
    monkeypatch.setattr(delta_kernels, "MERGES", delta_kernels.MERGES[:1])
    monkeypatch.setattr(delta_kernels, "PROFILED", delta_kernels.PROFILED[:1])
    shapes = (("o", (64, 128)), ("down", (64, 256)))
    machine = Machine(device="cpu", shapes=shapes, layers=1, slots=4, active=(1, 4), prompt_rows=(8,))
    kept = Kept(tmp_path, machine, 600)
    delta_kernels.run_parts(machine, kept, delta_kernels.PARTS)
    written = json.loads((tmp_path / "delta_kernels.json").read_text())
    assert "broken" not in written
    assert not written["failed"]
    assert all(entry["passed"] for entry in written["check"])
    assert {(e["rows"], e["active"], e["linear"]) for e in written["decode"]} == {
        (rows, active, name) for rows in (32, 128) for active in (1, 4) for name, _ in shapes
    }
    assert {(e["rows"], e["active"]) for e in written["step"]} == {(r, a) for r in (32, 128) for a in (0, 1, 4)}
    assert {(e["linear"], e["rows"]) for e in written["prompts"]} == {("o", 8), ("down", 8)}
    assert {e["format"] for e in written["formats"]} == {"int1", "int3", "int4"}


def test_a_part_that_fails_leaves_the_next_ones(tmp_path: Path) -> None:
    kept = Kept(tmp_path, Machine(device="cpu"), 600)
    kept.part("first", lambda: {}["missing"])
    kept.part("second", lambda: kept.add("second", value=1))
    written = json.loads((tmp_path / "delta_kernels.json").read_text())
    assert "KeyError" in written["broken"]["first"]
    assert written["second"] == [{"value": 1}]
    late = Kept(tmp_path, Machine(device="cpu"), -1)
    late.part("third", lambda: late.add("third", value=1))
    assert late.values["left_out"] == ["third"]
