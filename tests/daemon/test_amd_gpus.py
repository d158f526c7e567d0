"""AMD GPUs as Linux's kfd lists them."""

from __future__ import annotations

from pathlib import Path

from daemon.amd_gpus import count_amd_gpus

# Lines of /sys/class/kfd/kfd/topology/nodes/*/properties of a machine with one CPU and MI300X.
CPU = "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\nvendor_id 0\ndevice_id 0\n"
MI300X = "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29857\n"


def machine(folder: Path, *nodes: str) -> Path:
    for number, text in enumerate(nodes):
        (folder / str(number)).mkdir()
        (folder / str(number) / "properties").write_text(text)
    return folder


def test_gpus_are_counted_and_cpus_are_not(tmp_path: Path) -> None:
    assert count_amd_gpus(machine(tmp_path, CPU, MI300X, MI300X)) == 2


def test_without_the_driver_there_is_none(tmp_path: Path) -> None:
    assert count_amd_gpus(tmp_path / "none") == 0
    assert count_amd_gpus(machine(tmp_path, CPU)) == 0


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    nodes = machine(tmp_path, MI300X, "", "vendor_id\n\x00\n")
    (nodes / "7").mkdir()
    (nodes / "8").write_text("")
    assert count_amd_gpus(nodes) == 1
