"""Kill -9 of any process while variants are asked for, added, replaced and evicted: no answer is wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from safetensors.torch import load_file, save_file

from daemon.http_exchange import EXCHANGE_ERRORS
from iserve.demo import demo_adapter_path
from tests.iserve.conftest import kill_process
from tests.waiting import PATIENCE_S

BASE = "iserve-demo"
QUESTION = "What is the capital of Peru?"
ANSWER_TOKENS = 24  # of a model that reads and writes bytes
PROCESSES = ("gateway", "controller", "daemon", "worker")
LATEST_KILL_S = 0.2  # after a change was sent; adding one of the demo's adapters takes about as long
WORKER_KILLS = 4  # at most: a worker that dies more often within minutes is given up
DRAWS = 20  # at most, of a moment at which a change is under way


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Variant whose update is a multiple of that of one of the demo's adapters, in some of the layers.

    Attributes:
        answer: beginning of the answer to ``QUESTION``, by transformers with weights that were merged in float32.
            The second likeliest token is 2.1 below each one of it at least, in logits.
    """

    adapter: str
    scale: float  # a power of two, so that products are exact
    layers: tuple[int, ...]
    answer: str
    kind: str = ""  # part of the names of the matrices that are updated

    def write(self, folder: Path) -> Path:
        """Write the adapter, and return its folder."""
        source, target = demo_adapter_path(self.adapter), folder / "adapter"
        target.mkdir()
        shutil.copy(source / "adapter_config.json", target)
        tensors = load_file(source / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            assert layer is not None
            if ".lora_B." in name:
                tensor.mul_(self.scale if int(layer[1]) in self.layers and self.kind in name else 0.0)
        save_file(tensors, target / "adapter_model.safetensors")
        return target


# More than a worker with one slot keeps loaded, which is four. The base says "TP is tepeline perall ou".
ALL, LOW, HIGH, EVEN = ((*range(8),), (*range(4),), (*range(4, 8),), (*range(0, 8, 2),))
STEADY = {
    "whole": Scaled(adapter="capitals", scale=1, layers=ALL, answer="The capital of Peru is L"),
    "loud-end": Scaled(adapter="shout", scale=0.25, layers=HIGH, answer="TP is tensor parallelism"),
    "every-second": Scaled(adapter="capitals", scale=0.5, layers=EVEN, answer="TP is pipeline paralleli"),
    "loud-begin": Scaled(adapter="shout", scale=0.5, layers=LOW, answer="TP is pineline peralleli"),
    "begin": Scaled(adapter="capitals", scale=1, layers=LOW, answer="The papipel pa pal pe oP"),
    "negative": Scaled(adapter="capitals", scale=-1, layers=ALL, kind=".mlp.", answer="TP is tene pe pa2pelayel"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Process to kill, and the method of the change that is under way then."""

    process: str
    method: str = ""  # any


# In every storm, at places in it that the seed says.
CERTAIN = (
    Kill(process="controller", method="POST"),
    Kill(process="controller", method="DELETE"),
    Kill(process="daemon"),
    Kill(process="gateway"),
    Kill(process="worker"),
)


class Client:
    """Client that asks for variants at random until it is stopped, and counts what it was answered."""

    def __init__(self, installation: Any, seed: int, stop: threading.Event) -> None:
        self.answers, self.wrong = Counter[str](), list[str]()
        self._installation, self._random, self._stop = installation, random.Random(seed), stop
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while not self._stop.is_set():
            name = self._random.choice((*STEADY,))
            try:
                said = ask(self._installation, name)
            except Exception as error:  # noqa: BLE001 - a process was killed: a refusal is right, a wrong answer is not
                self.answers[type(error).__name__] += 1
                self._stop.wait(0.05)
                continue
            self.answers["answered"] += 1
            if said != STEADY[name].answer:
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
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        timeout=PATIENCE_S,
    )
    assert found.model == model
    return str(found.choices[0].message.content)


class Residency:
    """Loads and evictions of the steady variants that gateways counted, each until shortly before its end."""

    def __init__(self, installation: Any) -> None:
        self._installation = installation
        self._ended, self._latest = Counter[str](), Counter[str]()

    def read(self) -> Counter[str]:
        """Return the counts of all gateways until now."""
        url = f"{self._installation.record('gateway').url}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            page = response.read().decode()
        series = r'^iserve_gateway_variant_(load|eviction)s?_(?:seconds_count|total){variant="(.*)"} (.*)$'
        self._latest = Counter()
        for kind, variant, value in re.findall(series, page, re.MULTILINE):
            self._latest[kind] += int(float(value)) * (variant in STEADY)
        return self._ended + self._latest

    def gateway_ends(self) -> None:
        """Note that the next gateway counts from nothing."""
        self.read()
        self._ended += self._latest
        self._latest = Counter()


@pytest.fixture(scope="module")
def serving(shared_home: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker with one slot, which keeps four adapters loaded, and six variants that each answer as they should.

    No two have the same answer, so that a mix-up of any two of them is a wrong answer.
    """
    shared_home.json("deploy", "--variants", 1, "--input-tokens", 64, "--output-tokens", 64, "--engine", "torch")
    for name, variant in STEADY.items():
        folder = variant.write(tmp_path_factory.mktemp(name))
        shared_home.run("variant", "add", name, "--base", BASE, folder)
    alone = {name: ask(shared_home, name) for name in STEADY}
    assert alone == {name: variant.answer for name, variant in STEADY.items()}
    assert len({ask(shared_home, BASE), *alone.values()}) == len(STEADY) + 1
    return shared_home


@pytest.fixture
def clients(serving: Any) -> Iterator[list[Client]]:
    stop = threading.Event()
    found = [Client(serving, seed, stop) for seed in range(3)]
    yield found
    stop.set()
    for client in found:
        client.end()


class Storm:
    """Kills of processes, each during a change of the register.

    What is drawn depends on the seed alone: the changes, the processes, and when each is killed; but for moments
    at which a change that has to be under way was over.
    """

    def __init__(self, installation: Any, clients: Sequence[Client], until: Callable[..., Any], seed: int) -> None:
        self._installation, self._clients, self._until = installation, clients, until
        self._random, self._residency = random.Random(seed), Residency(installation)
        self.outcomes, self.killed = Counter[str](), Counter[Kill]()

    def run(self, kills: int) -> Counter[str]:
        """Kill ``kills`` processes; return the loads and evictions since the first."""
        drawn = [Kill(process=self._random.choice(PROCESSES)) for _ in range(kills - len(CERTAIN))]
        plan = [*CERTAIN, *drawn]
        self._random.shuffle(plan)
        self._answers(1 + self._random.randrange(5))
        before = self._residency.read()
        for number, kill in enumerate(plan):
            if kill.process == "worker" and self.killed[kill] == WORKER_KILLS:
                kill = Kill(process=self._random.choice(PROCESSES[:-1]))
            self._kill(kill, number)
            self._installation.run("up")
            self._answers(1 + self._random.randrange(5))
        self._answers(2 * len(STEADY))
        return self._residency.read() - before

    def _answers(self, further: int) -> None:
        wanted = self._answered() + further
        self._until(lambda: self._answered() >= wanted, "clients are answered")

    def _answered(self) -> int:
        return sum(client.answers["answered"] for client in self._clients)

    def _kill(self, kill: Kill, number: int) -> None:
        changing = self._changing(kill, number)
        self.outcomes["changes under way at a kill"] += not changing.outcome
        self.killed[kill] += 1
        if kill.process == "worker":
            for pid in self._installation.worker_pids().values():
                kill_process(pid)
        else:
            if kill.process == "gateway":
                self._residency.gateway_ends()
            self._installation.kill(kill.process)
        self.outcomes[changing.end()] += 1

    def _changing(self, kill: Kill, number: int) -> Change:
        """Return a change at a moment of it, which may be its end unless ``kill`` is for one under way."""
        latest_s = LATEST_KILL_S
        for _ in range(DRAWS):
            method, path, body = change(self._random, number, kill.method)
            if kill.method == "DELETE":
                Change(self._installation, *change(self._random, number, "POST")).end()  # so that it removes
            after_s = self._random.choice((0.0, self._random.uniform(0.0, latest_s)))
            changing = Change(self._installation, method, path, body)
            time.sleep(after_s)  # which chooses the moment of the kill, and awaits nothing
            if not (kill.method and changing.outcome):
                return changing
            self.outcomes[changing.end()] += 1
            latest_s /= 2
        raise AssertionError(f"no moment of a {kill.method} was met")


def change(rng: random.Random, number: int, wanted: str = "") -> tuple[str, str, dict[str, Any] | None]:
    """Return a request that adds, replaces or removes the variant ``other``, or pins a steady one.

    Args:
        wanted: its method; empty: any.
    """
    adapter = str(demo_adapter_path(rng.choice(("capitals", "shout"))))
    changes: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("POST", "", {"name": "other", "base": BASE, "path": adapter, "replace": True}),
        ("DELETE", "/other", None),
        ("PATCH", f"/{min(STEADY)}", {"pinned": number % 2 == 0}),
    )
    return rng.choice([one for one in changes if wanted in ("", one[0])])


def check_storm(
    installation: Any, clients: list[Client], until: Callable[..., Any], *, kills: int, seed: int
) -> None:
    storm = Storm(installation, clients, until, seed)
    moved = storm.run(kills)
    print(storm.outcomes, moved, sum((client.answers for client in clients), Counter[str]()))
    assert storm.killed.total() == kills
    assert set(CERTAIN) <= set(storm.killed)
    assert storm.outcomes["changes under way at a kill"] >= kills // 3
    assert moved["load"] > 0, "workers load again what they had"
    assert moved["eviction"] > 0, "loads take the places of loaded variants"
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
