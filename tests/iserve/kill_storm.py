"""A controller that is killed again and again while clients use it, and an account of what it answered.

Real: the controller's process, its database, the daemon, shims, HTTP. Stand-ins: the workers (fake_worker.py),
the profile (a synthetic machine's) and the gateway, which has no part in this.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from daemon.engines.registry import get_engine
from daemon.process import own_record, write_record
from daemon.procfs import start_time_ticks
from daemon.status import WorkerState
from fingerprint.errors import NotFoundError, UnavailableError
from fingerprint.families import load_spec
from iserve.api_documents import DeploymentDocument
from iserve.client import ControllerClient, controller_record
from iserve.controller.profiling_validity import machine_key
from iserve.demo import demo_model_path
from iserve.settings import Settings
from iserve.state.store import Store
from tests.daemon.conftest import Node
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile
from tests.iserve.forked_programs import CONTROLLERS
from tests.waiting import PATIENCE_S, wait_until

T = TypeVar("T")

DEPLOYMENTS = "/api/v1/deployments"


class Controllers:
    """Controllers on one home, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
        self._log = settings.home.parent / "controller.log"
        self._environment = kept | settings.environment()
        self.pid = 0

    def start(self) -> None:
        """Returns at once, while it is starting."""
        self.pid = CONTROLLERS.start_detached(["-m", "iserve.controller"], self._environment, self._log)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)
        wait_until(lambda: start_time_ticks(self.pid) is None, "the controller is gone")

    @property
    def lives(self) -> bool:
        return self.pid != 0 and start_time_ticks(self.pid) is not None

    def client(self) -> ControllerClient:
        record = controller_record(self.settings)
        if record is None:
            raise UnavailableError("it was killed, or is starting")
        return ControllerClient(record.url, record.token)

    def answers(self) -> bool:
        try:
            self.client().get(DEPLOYMENTS, object)
        except UnavailableError:
            return False
        return True

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


def persist(act: Callable[[], T]) -> tuple[T, int]:
    """Return the first answer, and how often asking failed before it."""
    lost, deadline = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return act(), lost
        except UnavailableError:
            lost += 1
            time.sleep(0.02)
    raise AssertionError("no answer came")


@dataclass
class Person:
    """Client that submits, looks at, changes and removes one deployment, over and over, under any controller.

    Every request is repeated until it is answered, under one key. What is acknowledged must be so from then on.
    """

    name: str
    model: str
    controllers: Controllers
    random: random.Random
    stop: threading.Event
    acknowledged: int = 0
    removed: int = 0
    lost: int = 0  # requests without an answer
    repeated: int = 0  # of those, the ones that had been heard: the answer was that of the first
    there: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"{DEPLOYMENTS}/{self.name}"

    def live(self) -> None:
        try:
            while not self.stop.is_set():
                self._submit()
                self._look()
                if self.stop.is_set() and self.random.random() < 0.5:
                    return
                self.remove()
        except Exception as error:  # noqa: BLE001 - reported by the test, which runs in another thread
            self.faults.append(f"{self.name}: {type(error).__name__}: {error}")

    def _submit(self) -> None:
        body = {
            "model": self.model,
            "name": self.name,
            "intent": self.random.choice(["min-cost", "min-latency", "min-memory"]),
            "input_tokens": 16,
            "output_tokens": self.random.choice([8, 16]),
        }
        key = f"{self.name}-{self.acknowledged}"

        def ask() -> DeploymentDocument:
            return self.controllers.client().post(DEPLOYMENTS, body, DeploymentDocument, idempotency_key=key)

        answer, lost = persist(ask)
        self.acknowledged, self.lost, self.there = self.acknowledged + 1, self.lost + lost, True
        if self.random.random() < 0.3:
            again, lost = persist(ask)
            self.lost, self.repeated = self.lost + lost, self.repeated + 1
            assert again == answer, f"answered {answer}, then {again}"

    def _look(self) -> None:
        """For a while, or until it serves: it is always there."""
        patience_s = self.random.choice([0.0, 0.3, PATIENCE_S])
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            document, _ = persist(lambda: self.controllers.client().get(self.path, DeploymentDocument))
            assert document.status not in {"refused", "failed", "removing"}, f"{document.status}: {document.error}"
            if document.status == "ready":
                return
            time.sleep(0.05)

    def remove(self) -> None:
        sent = 0

        def ask() -> None:
            nonlocal sent
            client = self.controllers.client()
            sent += 1
            try:
                client.delete(self.path)
            except NotFoundError:
                assert sent > 1, "an acknowledged deployment was not there to be removed"

        _, lost = persist(ask)
        self.lost, self.there = self.lost + lost, False
        wait_until(self._is_gone, f"{self.name} is gone")
        self.removed += 1

    def _is_gone(self) -> bool:
        try:
            self.controllers.client().get(self.path, DeploymentDocument)
        except NotFoundError:
            return True
        except UnavailableError:
            return False
        return False


@dataclass(frozen=True)
class Outcome:
    blows: int
    acknowledged: int
    removed: int
    lost: int
    started: int  # workers


class Storm:
    """A home, its daemon, its state at ``where``, and three people."""

    def __init__(self, folder: Path, where: Path | str, *, seed: int) -> None:
        self.random = random.Random(seed)
        self.node = Node(folder / "home")
        self.starts = folder / "starts"
        self.starts.touch()
        model = folder / "model"
        shutil.copytree(demo_model_path(), model)
        self.node.checkpoint = model
        self.node.behave(record_starts=str(self.starts))
        self.node.start()
        write_record(self.node.home / "run" / "gateway.json", own_record(url="http://127.0.0.1:1", token=""))
        url = where if isinstance(where, str) else None
        self.settings = Settings(home=self.node.home, database_url=url, port=0, api_port=0, start_timeout_s=60.0)
        store = Store.open(self.settings.state)
        machine = SyntheticMachine(load_spec(model))
        store.put_profile(take_profile(machine), machine_key(self.node.client.node(), get_engine("torch")))
        store.close()
        self.controllers = Controllers(self.settings)
        self.stop = threading.Event()
        self.lives_longer = 1.0  # than a kill says: rises while no request gets through, on a slow machine
        self.people = [
            Person(name, str(model), self.controllers, random.Random(f"{seed}-{name}"), self.stop)
            for name in ("ann", "bob", "cem")
        ]

    def run(self, blow: Callable[[], None], times: int) -> Outcome:
        """At least so many blows, and until as many deployments were acknowledged, however fast the machine is.

        Raises:
            AssertionError: something acknowledged was lost, or ran twice, or is left at the end.
        """
        blows = 0
        threads = [threading.Thread(target=person.live) for person in self.people]
        for thread in threads:
            thread.start()
        try:
            while blows < times or self._total("acknowledged") < times:
                before = self._total("acknowledged")
                blow()
                blows += 1
                self.lives_longer *= 1.0 if self._total("acknowledged") > before else 1.1
                self._check()
            if not self.controllers.lives:
                self.controllers.start()
            wait_until(self.controllers.answers, "the last controller answers")
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        self._check()
        self._all_serve()
        self._all_end()
        return Outcome(
            blows=blows,
            acknowledged=self._total("acknowledged"),
            removed=self._total("removed"),
            lost=self._total("lost"),
            started=len(self.starts.read_text().splitlines()),
        )

    def _total(self, what: str) -> int:
        return sum(getattr(person, what) for person in self.people)

    def kill(self, within_s: float = 1.5) -> None:
        """A blow: a controller is started, and killed at a moment of its start or of so many seconds after."""
        self.controllers.start()
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0.0, min(1.0, within_s)))
        else:
            wait_until(self.controllers.answers, "the controller answers")
            time.sleep(self.random.uniform(0.0, within_s * self.lives_longer))
        self.controllers.end()

    def _check(self) -> None:
        """Check what can be checked in the middle of it all."""
        assert not any(p.faults for p in self.people), [p.faults for p in self.people]
        starts = Counter(line.split()[0] for line in self.starts.read_text().splitlines())
        assert not (twice := {w: n for w, n in starts.items() if n > 1}), f"started more than once: {twice}"
        for person in self.people:
            ids = {worker for worker in starts if worker.startswith(f"{person.name}-")}
            # The one that is being asked for may be running before it is acknowledged.
            assert len(ids) <= person.acknowledged + 1, f"{person.name} asked {person.acknowledged} times: {ids}"
        running = Counter(worker.rpartition("-")[0] for worker in self._running())
        assert not (twice := {name: n for name, n in running.items() if n > 1}), f"run twice at once: {twice}"

    def _running(self) -> list[str]:
        workers = self.node.client.workers()
        return [w.spec.worker_id for w in workers if w.state is not WorkerState.STOPPED]

    def _all_serve(self) -> None:
        """Check that what was acknowledged and not removed is there, nothing else is, and each has one worker."""
        client = self.controllers.client()

        def documents() -> tuple[DeploymentDocument, ...]:
            return client.get(DEPLOYMENTS, tuple[DeploymentDocument, ...])

        wanted = {person.name for person in self.people if person.there}
        assert {d.name for d in documents()} == wanted
        wait_until(lambda: all(d.status == "ready" for d in documents()), "all serve")
        assert Counter(worker.rpartition("-")[0] for worker in self._running()) == Counter(wanted)

    def _all_end(self) -> None:
        for person in self.people:
            if person.there:
                person.remove()
        wait_until(lambda: not self._running(), "no worker runs")
        pids = [int(line.split()[1]) for line in self.starts.read_text().splitlines()]
        assert not (left := [pid for pid in pids if start_time_ticks(pid) is not None]), f"left running: {left}"
        self.controllers.end(signal.SIGTERM)

    def close(self) -> None:
        self.stop.set()
        if self.controllers.lives:
            self.controllers.end()
        self.node.clear()
