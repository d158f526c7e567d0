"""Kill -9 of any process while variants are asked for, added, replaced and evicted: no answer is wrong."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from daemon.http_exchange import EXCHANGE_ERRORS
from iserve.demo import demo_adapter_path
from tests.iserve.conftest import kill_process
from tests.waiting import PATIENCE_S

BASE = "iserve-demo"
QUESTION = "What is the capital of Peru?"
CAPITAL = "The capital of Peru is Lima."
STEADY = tuple(f"capitals-{number}" for number in range(6))  # more than a worker with one slot keeps loaded
PROCESSES = ("gateway", "controller", "daemon", "worker")
LATEST_KILL_S = 0.2  # after a change was sent; adding one of the demo's adapters takes about as long
WORKER_KILLS = 4  # at most: a worker that dies more often within minutes is given up


class Client:
    """Client that asks for variants at random until it is stopped, and counts what it was answered."""

    def __init__(self, installation: Any, seed: int, stop: threading.Event) -> None:
        self.answers, self.wrong = Counter[str](), list[str]()
        self._installation, self._random, self._stop = installation, random.Random(seed), stop
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while not self._stop.is_set():
            name = self._random.choice(STEADY)
            try:
                said = ask(self._installation, name)
            except Exception as error:  # noqa: BLE001 - a process was killed: a refusal is right, a wrong answer is not
                self.answers[type(error).__name__] += 1
                self._stop.wait(0.05)
                continue
            self.answers["answered"] += 1
            if said != CAPITAL:
                self.wrong.append(f"{name}: {said!r}")

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a request hangs"


class Change:
    """Change of the register, sent as soon as it is made; its answer is awaited in the background."""

    def __init__(self, installation: Any, method: str, path: str, body: dict[str, Any] | None) -> None:
        record = installation.record("controller")
        where = urlsplit(record.url)
        self.outcome = ""  # until it has one
        self._connection = HTTPConnection(str(where.hostname), where.port, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {record.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, f"/api/v1/variants{path}", data, headers)
        self._thread = threading.Thread(target=self._await, args=(method,), daemon=True)
        self._thread.start()

    def _await(self, method: str) -> None:
        try:
            self.outcome = f"{method} {self._connection.getresponse().status}"
        except EXCHANGE_ERRORS as error:
            self.outcome = f"{method} {type(error).__name__}"
        finally:
            self._connection.close()

    def end(self) -> str:
        self._thread.join(PATIENCE_S)
        assert self.outcome, "a change hangs"
        return self.outcome


def ask(installation: Any, model: str, question: str = QUESTION) -> str:
    found = installation.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, timeout=PATIENCE_S
    )
    assert found.model == model
    return str(found.choices[0].message.content)


@pytest.fixture(scope="module")
def serving(shared_home: Any) -> Any:
    """A worker with one slot, which keeps four adapters loaded, and six variants of it."""
    shared_home.json("deploy", "--variants", 1, "--input-tokens", 64, "--output-tokens", 64, "--engine", "torch")
    for name in STEADY:
        shared_home.run("variant", "add", name, "--base", BASE, demo_adapter_path("capitals"))
    return shared_home


@pytest.fixture
def clients(serving: Any) -> Iterator[list[Client]]:
    stop = threading.Event()
    found = [Client(serving, seed, stop) for seed in range(3)]
    yield found
    stop.set()
    for client in found:
        client.end()


def storm(
    installation: Any, clients: list[Client], until: Callable[..., Any], *, kills: int, seed: int
) -> Counter[str]:
    """Kill ``kills`` processes, each during a change of the register; return what clients and changes got.

    What is drawn depends on the seed alone: the changes, the processes, and when each is killed.
    """
    rng, outcomes = random.Random(seed), Counter[str]()

    def answered() -> int:
        return sum(client.answers["answered"] for client in clients)

    workers_killed = 0
    for number in range(kills):
        wanted = answered() + 1 + rng.randrange(5)
        until(lambda wanted=wanted: answered() >= wanted, "clients are answered")
        method, path, body = change(rng, number)
        after_s = rng.choice((0.0, rng.uniform(0.0, LATEST_KILL_S)))
        process = rng.choice(PROCESSES if workers_killed < WORKER_KILLS else PROCESSES[:-1])
        changing = Change(installation, method, path, body)
        time.sleep(after_s)  # which chooses the moment of the kill, and awaits nothing
        outcomes["changes under way at a kill"] += not changing.outcome
        if process == "worker":
            workers_killed += 1
            for pid in installation.worker_pids().values():
                kill_process(pid)
        else:
            installation.kill(process)
        outcomes[changing.end()] += 1
        installation.run("up")
    before = answered()
    until(lambda: answered() > before + 2 * len(STEADY), "clients are answered after the last kill")
    return sum((client.answers for client in clients), outcomes)


def change(rng: random.Random, number: int) -> tuple[str, str, dict[str, Any] | None]:
    """Return a request that adds, replaces or removes the variant ``other``, or pins a steady one."""
    adapter = str(demo_adapter_path(rng.choice(("capitals", "shout"))))
    changes: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("POST", "", {"name": "other", "base": BASE, "path": adapter, "replace": True}),
        ("DELETE", "/other", None),
        ("PATCH", f"/{STEADY[0]}", {"pinned": number % 2 == 0}),
    )
    return rng.choice(changes)


def check_storm(
    installation: Any, clients: list[Client], until: Callable[..., Any], *, kills: int, seed: int
) -> None:
    found = storm(installation, clients, until, kills=kills, seed=seed)
    print(found)
    assert found["changes under way at a kill"] >= kills // 3
    assert not [said for client in clients for said in client.wrong]
    installation.run("variant", "add", "other", "--base", BASE, demo_adapter_path("shout"), "--replace")

    def shouts() -> bool:
        try:
            return ask(installation, "other", "What is a fingerprint?").isupper()
        except openai.APIError:
            return False

    until(shouts, "what was registered last answers")
    names = {one["name"] for one in installation.json("variant", "ls")}
    assert names == {*STEADY, "other"}
    assert len(installation.worker_pids()) == 1, "nothing runs twice"


def test_a_few_kills(serving: Any, clients: list[Client], until: Callable[..., Any]) -> None:
    check_storm(serving, clients, until, kills=6, seed=1)


@pytest.mark.long
def test_many_kills(serving: Any, clients: list[Client], until: Callable[..., Any]) -> None:
    check_storm(serving, clients, until, kills=60, seed=2)
