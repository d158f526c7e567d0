"""A deployment of two replicas: both serve, one is killed with -9 under load, in the end none is left."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from daemon.worker_token import authorization, read_token
from tests.golden_words import Golden
from tests.iserve.test_e2e_faults import DEMO, Stream, ask
from tests.waiting import PATIENCE_S

LENGTH = 600  # tokens of a stream; a few seconds
WORK = ("--input-tokens", "64", "--output-tokens", LENGTH, "--batch", "2")


class Callers:
    """Clients that ask short questions without a pause, from a few threads, until asked to end."""

    def __init__(self, installation: Any, number: int = 2) -> None:
        self.answers: list[str] = []
        self.errors: list[openai.OpenAIError] = []
        self._installation, self._over = installation, threading.Event()
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(ask(self._installation))
            except openai.OpenAIError as error:
                self.errors.append(error)

    def end(self) -> Callers:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request hangs"
        return self


@pytest.fixture(scope="module")
def two(shared_home: Any) -> Any:
    shared_home.first = shared_home.json("deploy", *WORK, "--replicas", 2)
    return shared_home


def replicas(installation: Any) -> list[dict[str, Any]]:
    found = installation.deployment()["replicas"]
    assert isinstance(found, list)
    return found


def running(installation: Any, replica: dict[str, Any]) -> int:
    token = read_token(installation.home / "workers" / replica["worker_id"])
    request = urllib.request.Request(f"{replica['url']}/stats", headers=authorization(token))
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(json.load(answer)["running"])


def test_each_has_devices_of_its_own_and_all_are_of_one_configuration(two: Any, golden: Golden) -> None:
    assert (two.first["num_ready"], two.first["num_replicas"], two.first["status"]) == (2, 2, "ready")
    one, other = (replica["device_ids"] for replica in two.first["replicas"])
    assert one
    assert not set(one) & set(other)
    assert sorted(two.first["device_ids"]) == sorted(one + other)
    assert len({replica["url"] for replica in two.first["replicas"]}) == 2
    assert len(two.worker_pids()) == 2
    table = two.run("ps").stdout
    assert "2/2" in table
    assert f"{' '.join(one)} | {' '.join(other)}" in table
    plan = two.get(f"/api/v1/deployments/{DEMO}/plan")
    assert plan["replicas"] == 2
    assert any(note.startswith("2 replicas, each on devices of its own") for note in plan["notes"])
    other_id = two.first["replicas"][1]["worker_id"]
    assert other_id in two.run("logs", DEMO, "--replica", 2).stdout
    golden("cli", two.run("logs", DEMO, "--replica", 3, check=False).stderr)


def test_one_killed_under_load_fails_what_it_was_answering_and_nothing_else(
    two: Any, until: Callable[..., Any], kill: Callable[[int], None]
) -> None:
    """The stream of the killed worker breaks; the other stream and every question, at any moment, are answered.

    Two streams, one on each, for a request goes to the worker with the fewest; then questions without a pause.
    """
    pids = two.worker_pids()
    streams = [Stream(two.openai(), LENGTH) for _ in range(2)]
    until(lambda: all(s.tokens > 5 or s.is_over for s in streams), "both streams have begun")
    victim, other = replicas(two)
    assert [running(two, victim), running(two, other)] == [1, 1]
    callers = Callers(two)
    try:
        until(lambda: callers.answers, "questions are answered")
        kill(pids[victim["worker_id"]])
        until(lambda: two.deployment()["num_ready"] == 1, "one is seen to be gone")
        shown = two.deployment()
        assert (shown["status"], shown["num_replicas"]) == ("ready", 2)
        answered = len(callers.answers)
        until(lambda: len(callers.answers) > answered, "the other serves")
        until(lambda: two.deployment()["num_ready"] == 2, "it is started again")
        answered = len(callers.answers)
        until(lambda: len(callers.answers) > answered + 4, "both serve")
    finally:
        callers.end()
    assert callers.errors == []
    assert set(callers.answers) == {"579"}
    (broken,) = [stream for stream in streams if stream.end().error is not None]
    (whole,) = set(streams) - {broken}
    assert broken.tokens < LENGTH
    whole.check_whole()
    after = two.worker_pids()
    assert after[other["worker_id"]] == pids[other["worker_id"]], "it alone was started again"
    assert after[victim["worker_id"]] != pids[victim["worker_id"]]
    assert [replica["restarts"] for replica in replicas(two)] == [1, 0]


def test_more_than_fit_are_refused_and_leave_nothing(
    two: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    before = two.worker_pids()
    done = two.run("deploy", *WORK, "--replicas", 3, "--name", "three", "--json", check=False)
    refusal = one_line(done)
    golden("cli", refusal.partition("is the least short of it: ")[2])  # which is, follows what was measured
    assert [d["name"] for d in two.get("/api/v1/deployments")] == [DEMO]
    assert two.worker_pids() == before


@pytest.mark.long
def test_one_of_them_is_checked_and_the_check_says_so(two: Any) -> None:
    checked = two.json("verify", DEMO, "--max-seconds", 2)
    assert any("one of 2 replicas was checked" in note for note in checked["notes"])
    two.run("verify", DEMO, "--forget")


@pytest.mark.long
def test_all_come_back_after_the_installation_was_down(two: Any, until: Callable[..., Any]) -> None:
    before = [replica["device_ids"] for replica in replicas(two)]
    two.run("down")
    assert not two.processes()
    two.run("up")
    until(lambda: two.deployment()["num_ready"] == 2, "both are back")
    assert [replica["device_ids"] for replica in replicas(two)] == before
    assert ask(two) == "579"


def test_removed_it_leaves_none(two: Any) -> None:
    """The last: nothing is deployed after it."""
    two.run("rm", DEMO)
    assert two.worker_pids() == {}
    assert two.get("/api/v1/deployments") == []
