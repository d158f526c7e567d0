"""Deployments carried out by the controller against a real daemon whose workers are stand-ins.

The daemon is killed or short of memory at the worst moments. The profile of the demo model is a synthetic
machine's.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.devices import read_machine
from daemon.engines.registry import get_engine
from daemon.process import own_record, write_record
from daemon.settings import DaemonSettings
from daemon.status import WorkerState
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import EngineError, InfeasibleError, NotMeasuredError, StateUnavailableError
from fingerprint.families import load_spec
from fingerprint.measurements import Profile
from fingerprint.model_use import ModelUse
from fingerprint.profile import ProfileProgress
from iserve.api_documents import DeploymentDocument
from iserve.api_types import DeployBody, LaunchBody, PlanBody
from iserve.controller.daemon_workers import launched
from iserve.controller.deployer import Deployer
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_validity import machine_key
from iserve.controller.reconcile import Reconciler
from iserve.controller.service import Controller
from iserve.demo import demo_model_path
from iserve.model_source import ModelSource, resolve
from iserve.planning.model_use import used
from iserve.planning.pipeline import PlanOptions
from iserve.route_table import RouteTable
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from tests.daemon.conftest import Node
from tests.daemon.engines.standin import make_vllm
from tests.fingerprint.small_checkpoints import TOWER_PARAMS, write_llava
from tests.fingerprint.synthetic_machine import SyntheticMachine, Truth, take_profile
from tests.golden_words import Golden
from tests.iserve.postgres_server import PostgresServer

pytestmark = pytest.mark.process

Until = Callable[..., Any]


class World:
    """Controller in this process with a daemon; this process poses as its gateway."""

    def __init__(self, folder: Path, database_url: str | None = None) -> None:
        self.node = Node(folder / "home")
        self.settings = Settings(
            home=self.node.home, database_url=database_url, start_timeout_s=30.0, profile_seconds=1.0
        )
        write_record(self.node.home / "run" / "gateway.json", own_record(url="http://127.0.0.1:1", token=""))
        self.store = Store.open(self.settings.state)
        self.controller = Controller(self.settings, self.store)

    def start(self, **settings: object) -> None:
        self.node.start(**settings)

    def restart(self) -> None:
        """The daemon killed and started again."""
        self.node.signal_daemon(signal.SIGKILL)
        self.node.start()

    def know_demo(self, **truth: int) -> None:
        """A profile of the demo model, by which it takes what ``truth`` says."""
        machine = SyntheticMachine(load_spec(demo_model_path()), Truth(**truth))
        self.store.put_profile(take_profile(machine), machine_key(self.node.client.node(), get_engine("torch")))

    def deploy(self, name: str = "a", **wish: Any) -> DeploymentDocument:
        return self.controller.deploy(DeployBody(name=name, input_tokens=16, output_tokens=16, **wish))

    def record(self, spec: WorkerSpec, name: str = "a") -> None:
        """A deployment whose worker has been chosen and recorded, as when its controller was killed then."""
        row = self.store.add_deployment(name, to_json(DeployBody(name=name)))
        self.store.update_deployment(row.id, phase="launching", workers=to_json((spec,)))

    def work(self, name: str = "a") -> None:
        self.controller.work_on(self.store.deployment(name))

    def phase(self, name: str = "a") -> str:
        return self.store.deployment(name).phase

    def free_bytes(self) -> int:
        return min(device.free_bytes for device in self.node.client.node().devices)

    def states(self) -> dict[str, WorkerState]:
        return {worker.spec.worker_id: worker.state for worker in self.node.client.workers()}

    def close(self) -> None:
        self.controller.close()
        self.node.clear()
        self.store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as world:
        yield world


@pytest.fixture
def ended(world: World, until: Until) -> Callable[..., str]:
    """Return ``ended("a")``: its phase once it has ended, and why for one that failed."""

    def wait(name: str = "a") -> str:
        until(lambda: world.phase(name) in {"ready", "refused", "failed"}, f"{name} is carried out")
        row = world.store.deployment(name)
        return row.phase if row.error is None else f"{row.phase}: {row.error}"

    return wait


@pytest.fixture
def postgres_world(tmp_path: Path, postgres: PostgresServer) -> Iterator[World]:
    with contextlib.closing(World(tmp_path, postgres.make_database())) as world:
        yield world


@pytest.mark.parametrize("fails", [False, True])
def test_the_steps_after_a_profile_do_not_show_its_progress(tmp_path: Path, fails: bool) -> None:
    """A worker that was being launched was said to load layers of another configuration."""
    machine = SyntheticMachine(load_spec(demo_model_path()))
    measured, nothing, reported = take_profile(machine), cast(Any, None), []
    row: Any = SimpleNamespace(name="a", id=1)

    def take(*_arguments: object, progress: Callable[[ProfileProgress], None], **_options: object) -> Profile:
        progress(ProfileProgress(done=359, total=359, elapsed_s=1.0, budget_s=1.0, running="tp=1 pp=2"))
        if fails:
            raise EngineError("it ended")
        return measured

    store: Any = SimpleNamespace(deployment_by_id=lambda _: SimpleNamespace(desired="running"))
    profiler: Any = SimpleNamespace(take=take)
    settings = Settings(home=tmp_path)
    deployer = Deployer(settings, store, profiler, nothing, nothing, lambda _, progress: reported.append(progress))
    source = ModelSource(name="m", directory=tmp_path, has_weights=True, spec=machine.spec)
    with contextlib.suppress(EngineError):
        deployer._profile(row, source, get_engine("torch"), PlanOptions())
    assert [None if progress is None else progress.done for progress in reported] == [359, None]


def limits(memory_bytes: int) -> WorkerLimits:
    return WorkerLimits(
        max_batch=1,
        max_batched_tokens=64,
        max_context_tokens=64,
        kv_tokens=64,
        memory_bytes_per_device=memory_bytes,
    )


def test_a_deploy_is_not_failed_by_a_database_that_is_away(
    postgres_world: World, postgres: PostgresServer, until: Until
) -> None:
    """The deploy is taken up where it was, and its worker with it."""
    world = postgres_world
    world.start()
    slow = world.node.spec("a-1")
    world.node.behave(slow_start_s=1.0)
    world.record(slow)
    world.work()
    until(lambda: world.states(), "its worker is starting")
    postgres.stop()
    try:
        until(lambda: set(world.states().values()) == {WorkerState.READY}, "its worker serves")
        until(lambda: not world.controller._active, "nothing is under way: it cannot be recorded")
    finally:
        postgres.start()
    assert world.phase() == "launching"
    pid = world.node.client.worker("a-1").pid
    world.work()
    until(lambda: world.phase() == "ready", "it is taken up again")
    assert world.node.client.worker("a-1").pid == pid


def test_a_step_that_could_not_be_recorded_fails_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """The database is away for an instant: back when the failure would be recorded."""
    world.start()
    world.record(world.node.spec("a-1"))
    update, refused = world.store.update_deployment, []

    def once_away(deployment_id: int, **changes: Any) -> bool:
        if changes.get("phase") == "ready" and not refused:
            refused.append(changes)
            raise StateUnavailableError("away")
        return update(deployment_id, **changes)

    monkeypatch.setattr(world.store, "update_deployment", once_away)
    world.work()
    until(lambda: refused and not world.controller._active, "its end cannot be recorded")
    assert world.phase() == "launching"
    world.work()
    until(lambda: world.phase() == "ready", "it is taken up again")


def test_a_plan_is_recorded_with_its_workers(world: World, monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    """A controller that is killed after any write leaves no plan next to the workers of the one before."""
    monkeypatch.setattr(type(get_engine("torch")), "shares_places", lambda *_: True)
    world.start()
    world.know_demo()
    former = world.node.spec("a-1", limits=limits(1 << 60))
    world.record(former)
    update, plans = world.store.update_deployment, list[bytes]()

    def killed_after_a_plan(deployment_id: int, **changes: Any) -> bool:
        if plans:
            raise StateUnavailableError("killed")
        if changes.get("plan") is not None:
            plans.append(changes["plan"])
        return update(deployment_id, **changes)

    monkeypatch.setattr(world.store, "update_deployment", killed_after_a_plan)
    world.work()
    until(lambda: plans and not world.controller._active, "it is planned anew, and nothing after that is recorded")
    row = world.store.deployment("a")
    assert row is not None
    assert row.plan == plans[0].decode()
    (worker,) = from_json(row.workers or "[]", tuple[WorkerSpec, ...])
    assert worker.limits != former.limits
    assert (former.shares_places, worker.shares_places) == (False, True)  # what the engine says as it is planned


def test_requests_beyond_the_models_context_are_refused_before_anything_is_measured(
    world: World, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., str]
) -> None:
    world.start()
    monkeypatch.setattr(Profiler, "take", lambda *_, **__: pytest.fail("it is measured"))
    world.controller.deploy(DeployBody(name="a", input_tokens=1000, output_tokens=100))
    phase, _, why = ended().partition(": ")
    assert phase in {"refused", "failed"}
    assert re.findall(r"\d+", why) == ["1000", "100", "1100", "1024"]


def test_two_who_ask_for_one_worker_at_once_get_the_same(world: World) -> None:
    """The second may be the next controller; what the first asked before it was killed is still being done."""
    world.start()
    answers: list[object] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        try:
            answers.append(launched(world.node.client, world.node.spec("a-1")).spec.port)
        except Exception as error:  # noqa: BLE001 - compared below
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert set(answers) == {world.node.client.worker("a-1").spec.port}


def test_a_worker_that_only_has_the_id_is_ended_and_never_routed_to(world: World, until: Until) -> None:
    """A restored state gives out ids again that workers of the replaced state still have."""
    world.start()
    former = world.node.ready("a-1", served_model="former")
    recorded = world.node.spec("a-1")
    world.record(recorded)
    world.store.update_deployment(world.store.deployment("a").id, phase="ready")
    reconciler, ready = Reconciler(world.controller), []

    def serves() -> bool:
        before = world.node.client.worker("a-1")
        reconciler.tick()
        (route,) = read_routes(world.node.home).routes
        after = world.node.client.worker("a-1")
        if before.pid == after.pid == former.pid:  # no other was there in between
            ready.append(route.workers[0].ready)
            assert world.controller.deployment("a").replicas[0].url is None
        return world.phase() == "ready" and route.workers[0].ready

    until(serves, "the recorded worker serves")
    assert not any(ready)
    now = world.node.client.worker("a-1")
    assert now.is_of(recorded)
    assert not now.is_of(former.spec)
    assert now.pid != former.pid


def read_routes(home: Path) -> RouteTable:
    return from_json((home / "run" / "routes.json").read_bytes(), RouteTable)


def test_a_daemon_killed_while_it_is_told_to_launch_is_told_again(
    world: World, until: Until, ended: Callable[..., str]
) -> None:
    world.start()
    world.record(world.node.spec("a-1"))
    process = world.node.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # it takes the request, and does not answer
    world.work()
    until(lambda: _unread_bytes(world.node.client.url), "the daemon is asked something")
    world.restart()
    assert ended() == "ready"
    assert world.states() == {"a-1": WorkerState.READY}


def _unread_bytes(url: str) -> bool:
    """Return whether a request waits at the port of ``url``, by the kernel's table of sockets."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(words[1].endswith(port) and int(words[4].partition(":")[2], 16) > 0 for words in lines)


def test_a_worker_that_died_unseen_with_its_daemon_is_launched_again(
    world: World, until: Until, ended: Callable[..., str], kill: Callable[[int], None]
) -> None:
    world.start()
    world.node.behave(slow_start_s=600)
    world.record(world.node.spec("a-1"))
    world.work()
    until(lambda: (world.node.home / "workers" / "a-1" / "lease.json").exists(), "the worker starts")
    world.node.signal_daemon(signal.SIGKILL)
    kill(world.node.lease("a-1").shim_pid)
    world.node.behave()
    world.node.start()
    assert ended() == "ready"


def test_a_worker_that_does_not_serve_in_time_gives_its_memory_back(
    world: World, until: Until, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(DaemonSettings, "warm_up_s", 0.0)
    world.start()
    world.node.behave(slow_start_s=600)
    world.controller.close()
    world.controller = Controller(Settings(home=world.node.home, start_timeout_s=0.5), world.store)
    world.record(world.node.spec("a-1", limits=limits(world.free_bytes() // 2)))
    world.work()
    golden("controller", ended())
    reconciler = Reconciler(world.controller)

    def nothing_runs() -> bool:
        reconciler.tick()
        return world.states() == {}

    until(nothing_runs, "the worker of the failed deployment is ended")
    assert world.phase() == "failed"


def test_a_worker_that_is_healthy_in_time_may_be_ready_later(world: World, ended: Callable[..., str]) -> None:
    """The daemon bounds the warm-up between the two."""
    world.start()
    world.node.behave(slow_start_s=2.0)  # more than the last look at a worker takes
    world.controller.close()
    world.controller = Controller(Settings(home=world.node.home, start_timeout_s=1e-3), world.store)
    world.record(world.node.spec("a-1"))
    world.work()
    assert ended() == "ready"


def test_a_launch_that_the_daemon_refuses_says_why(
    world: World, ended: Callable[..., str], golden: Golden
) -> None:
    world.start(max_workers=1)
    world.node.ready("other")
    world.record(world.node.spec("a-1"))
    world.work()
    golden("controller", ended())


def test_a_profile_of_another_engine_version_is_told_and_not_used(
    world: World, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    """Plan and deploy say so; once there is one that holds, there is nothing to say."""
    world.start()
    golden.hide(read_machine().cpu_model, "CPU")
    old = take_profile(SyntheticMachine(load_spec(demo_model_path())))
    versions = (("engine", "torch 0.0.9"), ("torch", "1.13.0"))
    world.store.put_profile(replace(old, machine=replace(old.machine, versions=versions)), "of another time")
    why = r"torch 0\.0\.9 \(now .*\), torch 1\.13\.0 \(now "
    with pytest.raises(NotMeasuredError, match=why):
        world.controller.plans.plan(PlanBody(input_tokens=16, output_tokens=16))

    with golden.raises("controller", NotMeasuredError):
        world.controller.plans.plan(PlanBody(model=str(demo_model_path()), input_tokens=16, output_tokens=16))

    def take(*_arguments: Any, **_options: Any) -> Profile:
        world.know_demo(runtime_bytes=2**20)
        (newest, *_) = world.store.profiles()
        return newest

    monkeypatch.setattr(world.controller.profiler, "take", take)
    world.deploy("a")
    world.deploy("b")
    assert [ended("a"), ended("b")] == ["ready", "ready"]
    assert re.search(why, world.controller.deployment_plan("a").notes[0])
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env")))
    with golden.raises("controller", NotMeasuredError):
        world.controller.plans.plan(PlanBody(input_tokens=16, output_tokens=16, engine="vllm"))
    world.deploy("c")
    assert ended("c") == "ready"
    assert not any("is not used" in note for note in world.controller.deployment_plan("c").notes)


def test_a_plan_that_no_engine_here_can_make_names_the_way_without_this_machine(
    world: World, golden: Golden
) -> None:
    world.start()
    for ask in (world.controller.plans.plan, world.controller.plans.launch):
        with golden.raises("controller", InfeasibleError):
            ask(LaunchBody(engine="tensorrt-llm"))


def test_records_of_another_version_trouble_only_their_own_deployment(
    world: World, until: Until, ended: Callable[..., str], golden: Golden
) -> None:
    world.start()
    world.know_demo(runtime_bytes=2**20)
    world.deploy("good")
    assert ended("good") == "ready"
    asked = world.store.add_deployment("asked", b'{"no_such_wish": 1}')
    world.store.update_deployment(asked.id, phase="ready")
    chosen = world.store.add_deployment("chosen", to_json(DeployBody(name="chosen", output_tokens=16)))
    world.store.update_deployment(chosen.id, phase="ready", workers=b'[{"no_such_spec": 1}]')
    reconciler = Reconciler(world.controller)

    def settled() -> bool:
        reconciler.tick()
        return (world.phase("asked"), world.phase("chosen")) == ("failed", "ready") and len(world.states()) == 2

    until(settled, "what cannot be read has failed, or was chosen anew")
    routes = (world.node.home / "run" / "routes.json").read_text()
    assert '"name":"good"' in routes
    found = {document.name: document for document in world.controller.deployments()}
    assert found["good"].status == "ready"
    golden("controller", found["asked"].error or "")
    world.controller.remove("asked")

    def is_gone() -> bool:
        reconciler.tick()
        return "asked" not in {document.name for document in world.controller.deployments()}

    until(is_gone, "it can be removed")


def test_removing_what_is_removed_meanwhile_is_no_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    row = world.store.add_deployment("a", to_json(DeployBody(name="a")))
    update = world.store.update_deployment

    def and_gone(deployment_id: int, **changes: Any) -> None:
        update(deployment_id, **changes)
        world.store.delete_deployment(deployment_id)  # the reconciler is quick

    monkeypatch.setattr(world.store, "update_deployment", and_gone)
    assert world.controller.remove("a").status == "removing"
    assert world.store.deployment_by_id(row.id) is None


def test_a_worker_of_a_profile_has_an_end_long_after_the_profile_s(world: World, tmp_path: Path) -> None:
    """The daemon ends it then, should its controller be killed and none follow."""
    world.start()
    profiler = Profiler(world.store, tmp_path / "fingerprints", start_timeout_s=60.0)
    source, engine, node = resolve(str(demo_model_path())), get_engine("torch"), world.node.client.node()
    begun, max_seconds = time.time(), 3600.0
    with profiler._target(source, engine, lambda: world.node.client, node, max_seconds) as target:
        session = target.open(tp=1, pp=1)
        (worker,) = world.node.client.workers()
        session.close()
    assert worker.spec.profiling
    assert worker.spec.ends_at is not None
    assert begun + 2 * max_seconds < worker.spec.ends_at < begun + 24 * 3600


def test_one_profile_serves_a_multimodal_model_with_and_without_its_towers(world: World, tmp_path: Path) -> None:
    """The profile is stored as that of the text alone."""
    world.start()
    node, engine = world.node.client.node(), get_engine("torch")
    whole = resolve(str(write_llava(tmp_path / "llava")))
    text = used(whole, ModelUse(text_only=True))
    measured = take_profile(SyntheticMachine(text.spec))
    world.store.put_profile(measured, machine_key(node, engine))
    profiler = Profiler(world.store, tmp_path / "fingerprints", start_timeout_s=1.0)
    held = []
    for source in (whole, text):
        found = profiler.stored(source, engine, node)
        assert found is not None
        assert found.spec == source.spec
        estimate = profiler.estimator(found, engine, node).estimate(DeploymentConfig(), Workload())
        held.append(estimate.memory.per_gpu_bytes((2,)))
        assert profiler.unused(source, engine, node) == ()
    assert held[0] - held[1] == 2 * TOWER_PARAMS


def test_what_was_placed_on_an_engine_that_does_not_answer_yet_waits_for_it(
    world: World, until: Until, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A late mount is no reason to plan anew, which may end on another engine."""
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(tmp_path / "mount" / "bin" / "python"))
    world.start()
    world.record(world.node.spec("a-1", config=DeploymentConfig(engine="vllm"), engine_version="0.24.0"))
    row = world.store.deployment("a")
    world.store.update_deployment(row.id, phase="ready")

    def work() -> DeploymentRow:
        world.work()
        until(lambda: not world.controller._active, "it is carried out")
        return world.store.deployment("a")

    def steps() -> list[str]:
        return [event.kind for event in world.store.events(deployment_id=row.id)]

    for _ in range(2):
        now = work()
        assert (now.phase, now.workers) == ("ready", row.workers)
        assert "cannot be run" in (now.error or "")
    assert steps() == ["ready"]  # said once
    make_vllm(tmp_path / "mount")
    work()
    assert steps()[:2] == ["ready", "launching"]
