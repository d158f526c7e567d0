"""Devices of a node, what is free on them, and how busy they were."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.devices import CpuDevices, Device, DeviceReading, read_machine
from daemon.monitor import Monitor, WorkerUse
from daemon.nvml import NvmlDevices, visible_gpus
from daemon.status import DeviceBusy, DeviceHeld
from daemon.utilization import BusyCounter, LoadWindow, union_fraction
from fingerprint.errors import ConfigError
from tests.golden_words import Golden

GIB = 2**30
FRACTIONS = st.floats(0, 1, allow_nan=False)


# --- the load window: arithmetic only --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "now_s", "expected"),
    [
        pytest.param([], 0.0, 0.0, id="nothing-seen"),
        pytest.param([(0, 1, 0.5)], 1.0, 0.5, id="one-second"),
        pytest.param([(0, 60, 1.0), (60, 120, 0.0)], 120.0, 0.5, id="half-the-window"),
        pytest.param([(0, 60, 1.0), (60, 180, 0.0)], 180.0, 0.0, id="old-work-forgotten"),
        pytest.param([(0, 100, 1.0), (100, 200, 0.0)], 200.0, 20 / 120, id="a-sample-cut-by-the-window"),
        pytest.param([(0, 10, 1.0), (90, 100, 0.0)], 100.0, 0.5, id="a-gap-counts-neither-way"),
    ],
)
def test_load_over_the_window(samples, now_s, expected):
    window = LoadWindow(120.0)
    for sample in samples:
        window.add(*sample)
    assert window.load_fraction(now_s) == pytest.approx(expected)


# Whole eighths of a second add up exactly: what is tested is the window, not rounding.
EIGHTHS = st.integers(1, 400).map(lambda eighths: eighths / 8)


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS, FRACTIONS), max_size=60), EIGHTHS)
def test_load_lies_between_the_least_and_the_most_seen(samples, window_s):
    window, at_s = LoadWindow(window_s), 0.0
    for gap_s, length_s, fraction in samples:
        window.add(at_s + gap_s, at_s + gap_s + length_s, fraction)
        at_s += gap_s + length_s
    load = window.load_fraction(at_s)
    seen = [fraction for _, _, fraction in samples] or [0.0]
    assert min(seen) - 1e-9 <= load <= max(seen) + 1e-9
    assert window.load_fraction(at_s + window_s) == 0.0


@given(FRACTIONS, st.lists(EIGHTHS, min_size=1, max_size=40))
def test_constant_work_shows_as_itself_however_it_is_sampled(fraction, lengths_s):
    window, at_s = LoadWindow(120.0), 0.0
    for length_s in lengths_s:
        window.add(at_s, at_s + length_s, fraction)
        at_s += length_s
    assert window.load_fraction(at_s) == pytest.approx(fraction)


@pytest.mark.parametrize("sample", [(5, 5, 0.5), (6, 5, 0.5), (0.5, 2, 0.5), (1, 2, 1.5), (1, 2, -0.1)])
def test_a_sample_that_cannot_be_is_refused(sample):
    window = LoadWindow()
    window.add(0, 1, 0.5)
    with pytest.raises(ValueError, match=r"interval|fraction"):
        window.add(*sample)


@given(st.lists(FRACTIONS, max_size=8))
def test_the_union_is_at_least_the_busiest_and_at_most_the_sum(fractions):
    union = union_fraction(fractions)
    assert max(fractions, default=0.0) - 1e-9 <= union <= min(1.0, sum(fractions)) + 1e-9


@given(st.permutations([0.1, 0.5, 0.9]))
def test_the_union_does_not_depend_on_order(fractions):
    assert union_fraction(fractions) == pytest.approx(1 - 0.9 * 0.5 * 0.1)


def test_a_counter_gives_the_part_since_its_last_reading():
    counter = BusyCounter()
    assert counter.fraction_since_last(10.0, 3.0) is None  # the first reading says nothing of a second
    assert counter.fraction_since_last(12.0, 3.5) == 0.25
    assert counter.fraction_since_last(13.0, 9.0) == 1.0  # more busy seconds than passed: a late reading
    assert counter.fraction_since_last(14.0, 0.5) == 0.5  # began anew
    assert counter.fraction_since_last(14.0, 0.5) is None  # no time passed


# --- GPUs ------------------------------------------------------------------------------------------------------


def test_the_fake_has_nothing_that_nvml_lacks(fake_nvml):
    """The fake's functions exist in nvidia-ml-py with the same arguments, its constants have the real values."""
    for name, thing in vars(fake_nvml).items():
        if name.startswith("nvml"):
            assert list(inspect.signature(getattr(pynvml, name)).parameters) == list(
                inspect.signature(thing).parameters
            ), name
        elif name.startswith("NVML_"):
            assert getattr(pynvml, name) == thing, name


def test_gpus_are_known_by_uuid_with_one_init_and_cached_handles(fake_nvml):
    gpus = NvmlDevices.open(fake_nvml)
    assert [(d.device_id, d.index, d.kind, d.name, d.total_bytes) for d in gpus.devices] == [
        ("GPU-aaaa", 0, "cuda", "NVIDIA RTX A6000", 48 * GIB),
        ("GPU-bbbb", 1, "cuda", "NVIDIA RTX A6000", 48 * GIB),
    ]
    for _ in range(3):
        gpus.read()
    assert fake_nvml.CALLS.count("nvmlInit") == 1
    assert fake_nvml.CALLS.count("nvmlDeviceGetHandleByIndex") == 2
    gpus.close()
    assert fake_nvml.CALLS[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("named", "offered"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 1 , 1,", [1]),
        ("GPU-bb", [1]),
        ("GPU-aaaa-1,GPU-aaaa-2", [0, 2]),
        ("", []),
        ("-1", []),
        ("2,-1,0", [2]),
        ("NoDevFiles", []),
    ],
)
def test_gpus_hidden_by_the_environment_are_not_offered(named, offered):
    assert visible_gpus(named, ["GPU-aaaa-1", "GPU-bbbb", "GPU-aaaa-2"]) == offered


@pytest.mark.parametrize(("named", "why"), [("3", "no GPU"), ("GPU-cc", "no GPU"), ("GPU-a", "more than one GPU")])
def test_a_gpu_that_is_not_there_cannot_be_named(fake_nvml, monkeypatch, named, why, golden: Golden):
    with pytest.raises(ConfigError, match=f"is {why}"):
        visible_gpus(named, ["GPU-aaaa-1", "GPU-bbbb", "GPU-aaaa-2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with golden.raises("daemon", ConfigError):
        NvmlDevices.open(fake_nvml)
    assert fake_nvml.CALLS[-1] == "nvmlShutdown"


def test_an_offered_gpu_keeps_the_drivers_index(fake_nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus = NvmlDevices.open(fake_nvml)
    assert [(d.device_id, d.index) for d in gpus.devices] == [("GPU-bbbb", 1)]
    assert gpus.devices[0].on_node == 2  # the memory of the node is for both
    assert set(gpus.read()) == {"GPU-bbbb"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert NvmlDevices.open(fake_nvml) is None


def test_the_drivers_version_is_known_where_it_tells(fake_nvml):
    assert NvmlDevices.open(fake_nvml).driver == "570.86.15"
    fake_nvml.FAILING["nvmlSystemGetDriverVersion", ""] = fake_nvml.NVML_ERROR_NOT_SUPPORTED
    assert NvmlDevices.open(fake_nvml).driver is None
    assert CpuDevices(1).driver is None


def test_a_reading_of_a_gpu(fake_nvml):
    gpus = NvmlDevices.open(fake_nvml)
    gpu = fake_nvml.GPUS[1]
    gpu.used, gpu.gpu_percent, gpu.power_mw, gpu.sm_mhz = 8 * GIB, 73, 287_500, 1740
    gpu.processes = {41: 7 * GIB, 42: None}
    assert gpus.read()["GPU-bbbb"] == DeviceReading(
        free_bytes=40 * GIB,
        utilisation_fraction=0.73,
        power_w=287.5,
        sm_clock_mhz=1740.0,
        process_bytes={41: 7 * GIB, 42: None},
    )


def test_what_a_gpu_cannot_tell_is_unknown_and_a_lost_one_has_no_room(fake_nvml):
    gpus = NvmlDevices.open(fake_nvml)
    for name in (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetComputeRunningProcesses",
    ):
        fake_nvml.FAILING[name, "GPU-aaaa"] = fake_nvml.NVML_ERROR_NOT_SUPPORTED
    fake_nvml.FAILING["nvmlDeviceGetMemoryInfo", "GPU-bbbb"] = fake_nvml.NVML_ERROR_GPU_IS_LOST
    readings = gpus.read()
    assert readings["GPU-aaaa"] == DeviceReading(free_bytes=48 * GIB, sm_clock_mhz=210.0)
    assert readings["GPU-bbbb"] == DeviceReading(free_bytes=None, error="NVML error 15")
    monitor = Monitor(gpus)
    monitor.read()
    assert [device.free_bytes for device in monitor.statuses([])] == [48 * GIB, 0]
    assert [device.used_bytes for device in monitor.statuses([])] == [0, None]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_machine_without_a_usable_driver_has_no_gpus(fake_nvml, failing):
    fake_nvml.FAILING[failing, ""] = fake_nvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert NvmlDevices.open(fake_nvml) is None


def test_a_driver_without_gpus_is_closed_again(fake_nvml):
    fake_nvml.GPUS.clear()
    assert NvmlDevices.open(fake_nvml) is None
    assert fake_nvml.CALLS[-1] == "nvmlShutdown"


# --- the CPU as devices ----------------------------------------------------------------------------------------


def machine(tmp_path: Path, files: Mapping[str, str]) -> dict[str, Path]:
    """A /proc and a /sys/fs/cgroup with 16 GiB, 12 of them available, and what ``files`` adds."""
    given = {
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {12 * 2**20} kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/cpuinfo": "processor : 0\nmodel name : Test CPU @ 1 GHz\n",
    } | dict(files)
    for name, text in given.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}


@pytest.mark.parametrize(
    ("files", "memory", "available"),
    [
        pytest.param({}, 16, 12, id="no-limit"),
        pytest.param({"cgroup/memory.max": "max\n", "cgroup/memory.current": "1\n"}, 16, 12, id="v2-max"),
        pytest.param(
            {"cgroup/memory.max": f"{4 * GIB}\n", "cgroup/memory.current": f"{GIB}\n"}, 4, 3, id="v2-own-limit"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/memory.max": f"{4 * GIB}\n",
                "cgroup/a/memory.current": f"{3 * GIB}\n",
                "cgroup/a/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            4,
            3,
            id="v2-limit-of-a-parent-file-cache-given-back",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/box\n0::/\n",
                "cgroup/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
                "cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
            },
            8,
            6,
            id="v1",
        ),
    ],
)
def test_memory_is_what_machine_and_control_group_grant(tmp_path, files, memory, available):
    found = read_machine(**machine(tmp_path, files))
    assert (found.memory_bytes, found.available_bytes) == (memory * GIB, available * GIB)
    assert found.cpu_model == "Test CPU @ 1 GHz"


def test_cores_are_those_of_the_affinity_within_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 8, 9})
    places = machine(tmp_path, {"cgroup/cpu.max": "350000 100000\n"})
    assert read_machine(**places).cores == (2, 3, 5, 7)
    (tmp_path / "cgroup/cpu.max").write_text("max 100000\n")
    assert read_machine(**places).cores == (2, 3, 5, 7, 8, 9)


@given(num_cores=st.integers(1, 40), count=st.integers(1, 16))
def test_shares_are_fair_and_none_is_empty(num_cores, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)))
        devices = CpuDevices(count).devices
    sizes = [len(device.cores) for device in devices]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert {core for device in devices for core in device.cores} <= set(range(num_cores))
    if num_cores >= count:  # then no core is in two shares and none is left over
        assert sorted(core for device in devices for core in device.cores) == list(range(num_cores))


def test_two_shares_have_half_each(tmp_path):
    devices = CpuDevices(2, **machine(tmp_path, {}))
    assert [(d.device_id, d.kind, d.total_bytes) for d in devices.devices] == [
        ("cpu:0", "cpu", 8 * GIB),
        ("cpu:1", "cpu", 8 * GIB),
    ]
    assert devices.read()["cpu:1"].free_bytes == 6 * GIB


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_shares_that_cannot_be_is_refused(count):
    with pytest.raises(ConfigError, match=str(count)):
        CpuDevices(count)


# --- the monitor: readings and workers together ----------------------------------------------------------------


class Source:
    """Devices whose readings a test sets."""

    driver = None

    def __init__(self, kind: str, total_bytes: int, *ids: str) -> None:
        self.devices = tuple(
            Device(device_id=name, index=i, kind=kind, name="test", total_bytes=total_bytes)
            for i, name in enumerate(ids)
        )
        self.readings = {name: DeviceReading(free_bytes=total_bytes) for name in ids}

    def read(self) -> Mapping[str, DeviceReading]:
        return dict(self.readings)

    def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def use(worker_id: str = "w", device_id: str = "a", **changes: object) -> WorkerUse:
    """Each rank is promised 4 GiB unless ``each_bytes`` says otherwise."""
    each_bytes = changes.pop("each_bytes", 4 * GIB)
    values = {"worker_id": worker_id, "pid": 1, "slots": {device_id: 1}, "ready": True} | changes
    promised = {device: ranks * each_bytes for device, ranks in values["slots"].items()}
    return WorkerUse(**({"promised_bytes": promised} | values))


def free_gib(source: Source, *uses: WorkerUse) -> list[float]:
    monitor = Monitor(source)
    monitor.read()
    return [device.free_bytes / GIB for device in monitor.statuses(uses)]


def test_a_cpu_share_is_free_less_the_larger_of_promise_and_use():
    source = Source("cpu", 10 * GIB, "a", "b")
    assert free_gib(source) == [10, 10]
    assert free_gib(source, use()) == [6, 10]  # promised and not used yet
    source.readings = {name: DeviceReading(free_bytes=9 * GIB) for name in "ab"}  # 2 in use, by the worker
    assert free_gib(source, use(resident_bytes=2 * GIB)) == [6, 10]
    source.readings = {name: DeviceReading(free_bytes=7 * GIB) for name in "ab"}  # 6 in use by it: above its limit
    assert free_gib(source, use(resident_bytes=6 * GIB)) == [4, 10]


def test_what_others_use_of_the_machine_is_missing_from_every_share():
    source = Source("cpu", 10 * GIB, "a", "b")
    source.readings = {name: DeviceReading(free_bytes=7 * GIB) for name in "ab"}  # 2 by the worker, 4 by more
    assert free_gib(source, use(resident_bytes=2 * GIB)) == [4, 8]


def test_two_ranks_on_two_shares_count_half_each():
    source = Source("cpu", 10 * GIB, "a", "b")
    both = use(slots={"a": 1, "b": 1}, resident_bytes=12 * GIB)
    source.readings = {name: DeviceReading(free_bytes=4 * GIB) for name in "ab"}
    assert free_gib(source, both) == [4, 4]


@given(free=st.integers(0, 10), promised=st.integers(0, 20), resident=st.integers(0, 20), slots=st.integers(0, 3))
def test_free_is_never_negative_and_a_worker_never_adds_to_it(free, promised, resident, slots):
    source = Source("cpu", 10 * GIB, "a")
    source.readings = {"a": DeviceReading(free_bytes=free * GIB)}
    worker = use(slots={"a": slots}, each_bytes=promised * GIB, resident_bytes=min(resident, 10 - free) * GIB)
    (with_worker,) = free_gib(source, worker)
    assert 0 <= with_worker <= 10
    if slots:
        assert with_worker <= max(0, 10 - promised * slots)


def test_a_gpu_is_free_less_what_is_promised_and_not_taken_yet():
    source = Source("cuda", 48 * GIB, "a")
    assert free_gib(source, use(ready=False)) == [44]  # loads: nothing taken yet
    source.readings = {"a": DeviceReading(free_bytes=45 * GIB, process_bytes={7: 3 * GIB, 8: GIB})}
    assert free_gib(source, use(ready=False, pids=frozenset({7}))) == [44]  # has 3 of its 4
    assert free_gib(source, use(ready=True, pids=frozenset())) == [45]  # not listed (a container): has all


def test_what_a_worker_holds_of_its_gpus_is_told_where_the_driver_lists_its_processes():
    source = Source("cuda", 48 * GIB, "a", "b", "c")
    source.readings = {
        "a": DeviceReading(free_bytes=0, process_bytes={7: 3 * GIB, 8: GIB, 9: 5 * GIB}),
        "b": DeviceReading(free_bytes=0, process_bytes={8: None}),
        "c": DeviceReading(free_bytes=0, process_bytes={7: GIB}),
    }
    monitor = Monitor(source)
    worker = use(slots={"a": 1, "b": 1}, pids=frozenset({7, 8}))
    assert monitor.held(worker) == ()  # not looked yet
    monitor.read()
    assert monitor.held(worker) == (DeviceHeld(device_id="a", held_bytes=4 * GIB),)  # of b a size is not known
    assert monitor.held(use(slots={"a": 1}, pids=frozenset())) == ()  # a container's processes have other ids


def test_stages_of_an_uneven_split_take_what_each_was_promised():
    for kind in ("cpu", "cuda"):
        source = Source(kind, 10 * GIB, "a", "b")
        worker = use(slots={"a": 1, "b": 1}, promised_bytes={"a": 7 * GIB, "b": 2 * GIB}, ready=False)
        assert free_gib(source, worker) == [3, 8]


def test_load_is_the_workers_own_account():
    source, clock = Source("cpu", GIB, "a", "b"), Clock()
    monitor = Monitor(source, clock=clock)

    def second(*busy_s: float) -> float:
        clock.now_s += 1.0
        monitor.read()
        monitor.observe(
            [use(f"w{i}", busy=(DeviceBusy(device_id="a", busy_s=value),)) for i, value in enumerate(busy_s)]
        )
        return monitor.statuses([])[0].load_fraction

    second(0.0, 0.0)
    assert second(0.5, 0.0) == pytest.approx(0.5)
    assert second(1.0, 0.5) == pytest.approx((0.5 + 0.75) / 2)  # two at half time: 3/4 of the second
    assert monitor.statuses([])[1].load_fraction == 0.0


def test_a_silent_worker_leaves_the_driver_to_speak():
    source, clock = Source("cuda", GIB, "a"), Clock()
    source.readings = {"a": DeviceReading(free_bytes=GIB, utilisation_fraction=0.8)}
    monitor = Monitor(source, clock=clock)
    for _ in range(5):
        clock.now_s += 1.0
        monitor.read()
        monitor.observe([use(busy=None)])
    assert monitor.statuses([])[0].load_fraction == pytest.approx(0.8)


def test_a_cpu_share_whose_worker_is_silent_is_not_called_idle():
    """Seconds without a report are left out; they do not dilute the reported ones."""
    source, clock = Source("cpu", GIB, "a"), Clock()
    monitor = Monitor(source, clock=clock)
    for busy_s in (0.0, 1.0, None, None, None):
        clock.now_s += 1.0
        busy = None if busy_s is None else (DeviceBusy(device_id="a", busy_s=busy_s),)
        monitor.observe([use(busy=busy)])
    assert monitor.statuses([])[0].load_fraction == 1.0
