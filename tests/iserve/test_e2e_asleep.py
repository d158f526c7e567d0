"""A deployment that ends without requests and starts at the next one: real processes, HTTP, kill -9."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import openai
import pytest

from iserve.demo import demo_model_path
from iserve.state.store import Store
from tests.waiting import PATIENCE_S

NAME = "napper"
WORK = ("--input-tokens", "64", "--output-tokens", "64", "--engine", "torch")
IDLE_S = 1.0


class Call:
    """Question, asked by a thread of its own."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.answer: str | None = None
        self.error: openai.APIStatusError | None = None
        self._client = client
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            answer = self._client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "123+456="}], temperature=0
            )
            self.answer = answer.choices[0].message.content
        except openai.APIStatusError as error:
            self.error = error

    def end(self) -> Call:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the request hangs"
        return self


@pytest.fixture(scope="module")
def napping(shared_home: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A copy of the demo model, so that it can be taken away, deployed to sleep after a second."""
    shared_home.checkpoint = tmp_path_factory.mktemp("model") / NAME
    shutil.copytree(demo_model_path(), shared_home.checkpoint)
    given = ("deploy", shared_home.checkpoint, "--name", NAME, "--scale-to-zero", IDLE_S)
    shared_home.first = shared_home.json(*given, *WORK)
    return shared_home


@pytest.fixture
def asleep(napping: Any, until: Callable[..., Any]) -> Any:
    """Return a deployment that is scaled to zero, with no process left."""
    until(lambda: is_asleep(napping), "it sleeps")
    until(lambda: not napping.worker_pids(), "its worker has ended")
    return napping


def is_asleep(installation: Any) -> bool:
    return bool(installation.deployment(NAME)["status"] == "scaled-to-zero")


def events(installation: Any) -> list[str]:
    return [e["kind"] for e in installation.get("/api/v1/events") if e["message"].startswith(f"{NAME}:")]


def test_it_ends_when_nobody_calls_and_comes_back_at_the_next_request(asleep: Any) -> None:
    assert asleep.first["scale_to_zero_s"] == IDLE_S
    assert [model.id for model in asleep.openai().models.list()] == [NAME], "it can be called"
    before = len(events(asleep))
    call = Call(asleep.openai()).end()
    assert (call.answer, call.error) == ("579", None)
    assert events(asleep)[before:][:2] == ["scaling-up", "ready"]


def test_its_controller_killed_over_and_over_loses_no_request_and_leaves_nothing_running(
    asleep: Any, until: Callable[..., Any]
) -> None:
    before = len(events(asleep))
    asleep.kill("controller")
    calls = [Call(asleep.openai()) for _ in range(2)]
    asleep.run("up")
    until(lambda: "scaling-up" in events(asleep)[before:], "it wakes")  # and may be ready by now
    asleep.kill("controller")
    asleep.run("up")
    assert [call.end().answer for call in calls] == ["579", "579"]
    assert events(asleep)[before:].count("scaling-up") == 1, "started once"
    assert set(asleep.worker_pids()) <= {f"{NAME}-1"}, "which may have ended again: nobody calls"
    asleep.kill("controller")
    with closing(Store.open(asleep.home / "state.db")) as store:  # as if just before the worker was ended
        store.update_deployment(store.deployment(NAME).id, phase="scaled-to-zero")
    asleep.run("up")
    until(lambda: not asleep.worker_pids(), "its worker, for which nobody calls, has ended")
    assert is_asleep(asleep)


def test_what_cannot_be_started_is_said_and_sleeps_on_until_it_is_removed(asleep: Any) -> None:
    shutil.rmtree(asleep.checkpoint)
    error = Call(asleep.openai()).end().error
    assert error is not None
    assert (error.status_code, error.code, error.response.headers["retry-after"]) == (503, "cannot_start", "10")
    document = asleep.deployment(NAME)
    assert document["status"] == "scaled-to-zero"
    assert document["error"] in error.message
    asleep.run("rm", NAME)
    assert asleep.json("ps") == []
    assert not asleep.worker_pids()
