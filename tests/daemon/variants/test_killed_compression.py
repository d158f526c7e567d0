"""Compressions that are killed with SIGKILL, at operations on files and in every unit, end as if nothing was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fingerprint.delta import read_delta
from tests.fingerprint.small_fine_tunes import LAYERS, read_bytes, tiny_tensors, tuned, write_model
from tests.waiting import PATIENCE_S


@pytest.mark.process
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", tuned(tensors))
    command = [sys.executable, "-m", "tests.daemon.variants.killed_compression", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    by_operation, by_unit = map(int, done.stdout.split())
    assert by_operation > 5
    assert by_unit == LAYERS + 1 + 1  # killed in each layer and in the output layer, then through
    whole = read_bytes(tmp_path / "whole")
    assert read_delta(tmp_path / "whole").manifest.matrices
    for name in ("operations", "units"):
        assert read_bytes(tmp_path / name) == whole
        assert not (tmp_path / f".{name}.compressing").exists()


@pytest.mark.process
@pytest.mark.slow
def test_trials_that_are_killed_end_with_the_format_that_is_accepted(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", tuned(tensors))
    command = [sys.executable, "-m", "tests.daemon.variants.killed_compression", str(tmp_path), "trials"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert read_bytes(tmp_path / "operations") == read_bytes(tmp_path / "whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {"base", "tuned", "operations", "whole"}
