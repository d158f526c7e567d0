"""The recording of a compression on an H200 against what the pages say of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fingerprint.delta import FORMATS
from tests.bench.delta_compress import MAX_RATIO, MIN_SAME

ROOT = Path(__file__).parents[2]
PAGE, DECISION = ROOT / "docs" / "deltas.md", ROOT / "docs" / "decisions" / "0052-compression-speed.md"
KEPT = Path(__file__).parent / "results" / "delta_compress_h200.json"


@pytest.fixture(scope="module")
def kept() -> Any:
    return json.loads(KEPT.read_text())


def numbers_after(page: Path, heading: str) -> set[str]:
    """Return all numbers of a page from a heading on."""
    _, found, section = page.read_text().partition(heading)
    assert found
    return set(re.findall(r"\d+(?:[.,]\d+)*", section))


def test_the_whole_command_on_the_gpu_is_on_both_pages(kept: Any) -> None:
    assert (kept["gpu"], kept["torch"]) == ("NVIDIA H200", "2.11.0+cu130")
    assert kept["machine"] == "x86_64, 32 CPUs, 16 threads"
    assert (kept["shape"]["layers"], kept["shape"]["vocabulary"]) == (2, 16_384)
    device, units = kept["device"], kept["device"]["units_s"]
    assert device["is_whole"]
    assert sum(units.values()) == pytest.approx(device["total_s"], rel=0.01)
    total, peak = f"{device['total_s']:.1f}", f"{device['peak_gib']:.1f} GiB"
    whole = f"{device['whole_model_s_extrapolated']:.0f} s"
    assert (total, peak, whole) == ("28.0", "6.6 GiB", "376 s")
    first, second, output = (f"{units[name]:.1f}" for name in ("layer 0", "layer 1", "output layer"))
    read, embeddings = f"{units['read and hashed']:.1f}", f"{units['embeddings']:.1f}"
    said = {total, peak.split()[0], whole.split()[0], first, second, output, read, embeddings}
    assert said <= numbers_after(PAGE, "## Cost")
    assert said | {f"{kept['cpu']['total_s']:.1f}"} <= numbers_after(DECISION, "## Measured")
    for page in (PAGE, DECISION):
        assert "extrapolated" in page.read_text()


def test_the_cpu_was_ended_in_its_first_layer_so_that_no_layer_is_compared(kept: Any) -> None:
    assert not kept["cpu"]["is_whole"]
    assert set(kept["cpu"]["units_s"]) == {"read and hashed", "embeddings"}
    assert len(kept["cpu"]["layer_0_s"]) == 6
    assert kept["layer"] == kept["disagreements"] == []


def test_each_matrix_has_its_ratio_in_the_decision(kept: Any) -> None:
    decision, cpu, gpu = DECISION.read_text(), kept["cpu"]["layer_0_s"], kept["device"]["layer_0_s"]
    hidden, wide = kept["shape"]["hidden"], kept["shape"]["intermediate"]
    keys = hidden // kept["shape"]["heads"] * kept["shape"]["kv_heads"]
    for number, rows in enumerate((hidden, keys, keys, hidden, wide, wide), 1):
        name = f"matrix {number} of layer 0"
        cells = f"{gpu[name]:.2f} | {cpu[name]:.2f} | {cpu[name] / gpu[name]:.1f}"
        assert f"| matrix {number} ({rows:,} x {hidden:,}) | {cells} |" in decision
    own = sum(gpu[name] for name in cpu)
    assert (f"{sum(cpu.values()):.1f}", f"{sum(cpu.values()) / own:.1f}") == ("47.4", "6.5")
    assert {"47", f"{own:.1f}"} <= numbers_after(PAGE, "## Cost")
    assert {"47.4", "6.5"} <= numbers_after(DECISION, "## Measured")


def test_seconds_of_the_cpu_are_in_proportion_to_the_rows(kept: Any) -> None:
    """Sixteen threads brought nothing: 1,024 rows are solved by one."""
    seconds = [kept["cpu"]["layer_0_s"][f"matrix {number} of layer 0"] for number in range(1, 7)]
    of_part = [each / parts for each, parts in zip(seconds, (4, 1, 1, 4, 14, 14), strict=True)]
    assert min(of_part) > 0.8
    assert max(of_part) < 1.4


def test_both_devices_make_the_same_codes_and_errors(kept: Any) -> None:
    rows = kept["matrices"]
    assert {row["format"] for row in rows} == set(FORMATS)
    assert all(row["same_codes"] >= 0.9995 > MIN_SAME for row in rows)
    assert all(abs(row["cuda_error"] / row["cpu_error"] - 1) < 1e-4 < MAX_RATIO for row in rows)
    bounds = [f"{bound(row[side] for row in rows):.2f}" for side in ("cpu_s", "cuda_s") for bound in (min, max)]
    assert bounds == ["0.57", "1.23", "0.41", "1.49"]
    slower = {row["format"] for row in rows if row["cuda_s"] > row["cpu_s"]}
    assert slower == {"int2", "sparse24-int4", "sparse24-int2"}
