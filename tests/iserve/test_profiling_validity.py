"""A profile holds for the devices, driver, engine and size it was taken with, and is used for no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm.capabilities import TABLE
from daemon.status import DeviceStatus, NodeStatus, WorkerStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import Workload
from fingerprint.errors import ConflictError, InfeasibleError
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import Profile
from iserve.controller.check_targets import check_same_engine
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_validity import differences, key_without_driver, machine_key
from iserve.controller.snapshot import hardware_of
from iserve.model_source import ModelSource
from iserve.state.store import Store
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile
from tests.fingerprint.variant_machine import VariantMachine
from tests.golden_words import Golden

GIB = 2**30
VERSIONS = (("engine", "vllm 0.24.0"), ("torch", "2.11.0"))


class Vllm:
    name = "vllm"

    def __init__(self, *versions: tuple[str, str]) -> None:
        self._versions = versions or VERSIONS

    def versions(self) -> tuple[tuple[str, str], ...]:
        return self._versions


class Gone(Vllm):
    def versions(self) -> tuple[tuple[str, str], ...]:
        return ()


def node(*, count: int = 2, driver: str | None = "570.86", name: str = "NVIDIA RTX A6000") -> NodeStatus:
    devices = tuple(
        DeviceStatus(
            device_id=f"GPU-{index}",
            index=index,
            kind="cuda",
            name=name,
            total_bytes=48 * GIB,
            free_bytes=40 * GIB,
            load_fraction=0.0,
        )
        for index in range(count)
    )
    return NodeStatus(node_id="n", observed_at=0.0, devices=devices, workers=(), driver=driver)


def measured(driver: str | None = "570.86", max_batch: int = 0) -> Profile:
    """On two A6000."""
    profile = take_profile(SyntheticMachine(llama(), engine="vllm"))
    machine = replace(profile.machine, device=gpu_spec("a6000"), num_devices=2, driver=driver, versions=VERSIONS)
    memory = tuple(replace(point, max_batch=max_batch) for point in profile.memory)
    return replace(profile, machine=machine, memory=memory)


PROFILE = measured()
SOURCE = ModelSource(name="m", directory=Path("/m"), has_weights=True, spec=PROFILE.spec)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "state.db")
    yield store
    store.close()


@pytest.fixture
def profiler(store: Store, tmp_path: Path) -> Profiler:
    return Profiler(store, tmp_path / "fingerprints", start_timeout_s=1.0)


def keep(store: Store, profile: Profile = PROFILE, there: NodeStatus | None = None) -> None:
    engine: Any = Vllm()
    store.put_profile(profile, machine_key(there or node(), engine))


CHANGES = [
    pytest.param(node(driver="575.1"), Vllm(), "driver 570.86 (now 575.1)", id="driver"),
    pytest.param(
        node(),
        Vllm(("engine", "vllm 0.23.1"), VERSIONS[1]),
        "vllm 0.24.0 (now vllm 0.23.1)",
        id="engine",
    ),
    pytest.param(node(), Vllm(VERSIONS[0], ("torch", "2.12.0")), "torch 2.11.0 (now 2.12.0)", id="library"),
    pytest.param(node(), Vllm(VERSIONS[0]), "torch 2.11.0 (now not installed)", id="library-gone"),
    pytest.param(
        node(), Vllm(*VERSIONS, ("transformers", "5.0")), "no transformers (now 5.0)", id="library-has-come"
    ),
    pytest.param(node(), Gone(), "vllm 0.24.0 (now not installed)", id="engine-gone"),
    pytest.param(node(name="NVIDIA H200"), Vllm(), "a6000 (now h200-sxm)", id="gpu"),
    pytest.param(node(count=1), Vllm(), "2 devices (now 1)", id="number-of-gpus"),
]


def test_a_profile_is_used_where_it_was_taken(store: Store, profiler: Profiler) -> None:
    keep(store)
    engine: Any = Vllm()
    assert profiler.stored(SOURCE, engine, node()) == PROFILE
    assert profiler.unused(SOURCE, engine, node()) == ()


@pytest.mark.parametrize(("now", "engine", "difference"), CHANGES)
def test_any_other_is_not_and_it_is_told_why(
    now: NodeStatus, engine: Any, difference: str, store: Store, profiler: Profiler, golden: Golden
) -> None:
    keep(store)
    assert profiler.stored(SOURCE, engine, now) is None
    (told,) = profiler.unused(SOURCE, engine, now)
    assert PROFILE.created_at in told
    golden.hide(PROFILE.created_at, "THEN")
    golden("controller", told)


def test_the_python_that_ran_it_is_told_apart_from_its_packages() -> None:
    """The embedded engine's profile says which Python it was; of that none is out of force."""
    recorded = replace(PROFILE, machine=replace(PROFILE.machine, versions=(*VERSIONS, ("python", "3.11.9"))))
    assert differences(recorded, node(), VERSIONS) == []


def test_it_is_used_again_when_the_machine_is_as_it_was(store: Store, profiler: Profiler) -> None:
    keep(store)
    keep(store, measured("575.1"), node(driver="575.1"))
    engine: Any = Vllm()
    for driver in ("570.86", "575.1"):
        found = profiler.stored(SOURCE, engine, node(driver=driver))
        assert found is not None
        assert found.machine.driver == driver
        assert len(profiler.unused(SOURCE, engine, node(driver=driver))) == 1


@pytest.mark.parametrize(("recorded", "holds"), [("570.86", True), ("565.0", False), (None, False)])
def test_one_kept_before_the_driver_counted_holds_by_the_driver_it_records(
    recorded: str | None, holds: bool, store: Store, profiler: Profiler
) -> None:
    engine: Any = Vllm()
    store.put_profile(measured(recorded), key_without_driver(node(), engine))
    assert (profiler.stored(SOURCE, engine, node()) is not None) == holds
    if not holds:
        (why,) = profiler.unused(SOURCE, engine, node())
        assert why.endswith(f"driver {recorded or 'unknown'} (now 570.86)")


def test_without_a_driver_the_key_is_what_it_was() -> None:
    """Profiles taken on a CPU before stay."""
    engine: Any = Vllm()
    assert machine_key(node(driver=None), engine) == key_without_driver(node(), engine)
    assert machine_key(node(), engine) != key_without_driver(node(), engine)


def test_an_engine_started_for_fewer_requests_tells_nothing_of_more(
    store: Store, profiler: Profiler, golden: Golden
) -> None:
    keep(store, measured(max_batch=8))
    engine: Any = Vllm()
    assert profiler.stored(SOURCE, engine, node(), batch=8) is not None
    assert profiler.stored(SOURCE, engine, node(), batch=9) is None
    (why,) = profiler.unused(SOURCE, engine, node(), batch=9)
    golden("controller", why)


def test_other_engines_and_models_are_not_spoken_of(store: Store, profiler: Profiler) -> None:
    keep(store, replace(PROFILE, engine="torch"))
    engine: Any = Vllm()
    assert profiler.unused(SOURCE, engine, node()) == ()


# --- what is there when a profile is taken ---------------------------------------------------------------------


class Daemon:
    """A node with nothing on it; nothing is to be started there."""

    def __init__(self, there: NodeStatus) -> None:
        self.there = there

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def node(self) -> NodeStatus:
        return self.there


def taken(
    profiler: Profiler, engine: Any, measured: Profile, then: Any = None, there: NodeStatus | None = None
) -> Any:
    """The profile that a measurement makes, during which ``then`` happens."""

    def measure(*_: object) -> Profile:
        if then is not None:
            then()
        return measured

    daemon: Any = Daemon(there or node())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("iserve.controller.profiling.take", measure)
        patched.setattr("iserve.controller.profiling.Fingerprints", lambda *_, **__: lambda _: Path("/cut"))
        return profiler.take(
            SOURCE, engine, lambda: daemon, workload=Workload(1, 64, 16), max_seconds=1.0, progress=lambda _: None
        )


class Replaceable(Vllm):
    def capabilities(self) -> EngineCapabilities:
        return TABLE


def test_a_profile_is_kept_for_what_it_was_taken_with(store: Store, profiler: Profiler) -> None:
    engine: Any = Replaceable()
    assert taken(profiler, engine, PROFILE) == PROFILE
    assert profiler.stored(SOURCE, engine, node()) == PROFILE


def test_a_profile_that_replaces_one_keeps_its_variants(store: Store, profiler: Profiler) -> None:
    former = replace(PROFILE, variants=(VariantMachine().measure(budget_s=1e-3),))
    keep(store, former)
    engine: Any = Replaceable()
    assert taken(profiler, engine, PROFILE) == former
    assert profiler.stored(SOURCE, engine, node()) == former


def test_gpus_and_links_are_known_before_a_profile_is_taken(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    monkeypatch.setattr("iserve.controller.profiling._measure_unlisted", lambda *_: done.append("gpu"))
    monkeypatch.setattr(Profiler, "_measure_links", lambda *_: done.append("links"))
    engine: Any = Replaceable()
    taken(profiler, engine, PROFILE, lambda: done.append("profile"))
    assert done == ["gpu", "links", "profile"]


def test_an_engine_that_is_replaced_during_a_profile_costs_the_profile(
    store: Store, profiler: Profiler, golden: Golden
) -> None:
    """Kept for the new release, it would be used for it without a word."""
    engine: Any = Replaceable()

    def upgrade() -> None:
        engine._versions = (("engine", "vllm 0.24.1"), VERSIONS[1])

    with golden.raises("controller", ConflictError):
        taken(profiler, engine, PROFILE, upgrade)
    assert store.profiles() == ()


def test_what_another_release_than_the_controller_s_measured_is_not_kept(store: Store, profiler: Profiler) -> None:
    """A daemon that an earlier controller left may have another Python in its settings."""
    engine: Any = Replaceable(("engine", "vllm 0.23.0"), VERSIONS[1])
    with pytest.raises(ConflictError, match="profile it again"):
        taken(profiler, engine, PROFILE)
    assert store.profiles() == ()


def test_of_gpus_of_several_kinds_none_is_taken_for_the_others(store: Store, profiler: Profiler) -> None:
    other = node(name="NVIDIA H200").devices[1]
    mixed = replace(node(), devices=(node().devices[0], other))
    engine: Any = Replaceable()
    keep(store, there=mixed)  # as it was kept before
    told = r"A6000: 0, NVIDIA H200: 1\).*CUDA_VISIBLE_DEVICES=0 iserve"
    with pytest.raises(InfeasibleError, match=told):
        profiler.stored(SOURCE, engine, mixed)
    with pytest.raises(InfeasibleError, match=told):
        taken(profiler, engine, PROFILE, lambda: pytest.fail("it was measured"), mixed)
    with pytest.raises(InfeasibleError, match=told):
        hardware_of(mixed, PROFILE.machine.device)


# --- what a check may correct ----------------------------------------------------------------------------------


def test_a_worker_of_another_release_corrects_nothing(golden: Golden) -> None:
    engine: Any = Vllm()
    check_same_engine(engine, VERSIONS, "chat")
    check_same_engine(engine, (), "chat")  # a daemon of before did not record it
    with golden.raises("controller", ConflictError):
        check_same_engine(engine, (("engine", "vllm 0.23.0"),), "chat")
