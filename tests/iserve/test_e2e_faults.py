"""Kill -9 of each process while a stream runs: what must live on does, what died is back, nothing runs twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.waiting import PATIENCE_S

AS_INSTALLED = True
DEMO = "iserve-demo"
LONG = 900  # tokens; a few seconds of streaming
WORK = ("--input-tokens", "64", "--output-tokens", LONG, "--batch", "2")


class Stream:
    """A long completion, read by a thread of its own."""

    def __init__(self, client: openai.OpenAI, length: int = LONG) -> None:
        self.tokens, self.length = 0, length
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._client = client
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._client.completions.create(
                model=DEMO,
                prompt="Once",
                max_tokens=self.length,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            ):
                self.tokens = self.tokens + 1 if chunk.usage is None else chunk.usage.completion_tokens
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
        except openai.OpenAIError as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> Stream:
        self._thread.join(PATIENCE_S)
        assert self.is_over, f"the stream hangs after {self.tokens} tokens"
        return self

    def check_whole(self) -> None:
        self.end()
        assert (self.error, self.finish_reason, self.tokens) == (None, "length", self.length)


@pytest.fixture(scope="module")
def running(shared_home: Any) -> Any:
    shared_home.json("deploy", *WORK)
    return shared_home


@pytest.fixture
def stream(running: Any, until: Callable[..., Any]) -> Stream:
    """Return a stream that has begun."""
    begun = Stream(running.openai())
    until(lambda: begun.tokens > 5 or begun.is_over, "the stream has begun")
    assert begun.error is None
    return begun


def ask(installation: Any, name: str = DEMO) -> str:
    answer = installation.openai().chat.completions.create(
        model=name, messages=[{"role": "user", "content": "123+456="}], temperature=0
    )
    return str(answer.choices[0].message.content)


@pytest.mark.smoke
def test_a_killed_controller_is_not_missed_and_the_next_one_adopts(running: Any, stream: Stream) -> None:
    worker, gateway, daemon = running.worker_pids(), running.record("gateway"), running.record("daemon")
    running.kill("controller")
    assert not stream.is_over
    assert ask(running) == "579"
    running.run("up")
    stream.check_whole()
    assert running.worker_pids() == worker
    assert (running.record("gateway"), running.record("daemon")) == (gateway, daemon)
    assert [d["status"] for d in running.json("ps")] == ["ready"]
    assert ask(running) == "579"


@pytest.mark.smoke
def test_a_killed_daemon_is_started_again_and_adopts_its_workers(
    running: Any, stream: Stream, until: Callable[..., Any]
) -> None:
    worker = running.worker_pids()
    killed = running.kill("daemon")
    assert not stream.is_over
    assert ask(running) == "579"
    assert until(lambda: running.record("daemon").pid, "a daemon lives again") != killed
    until(lambda: running.deployment()["status"] == "ready", "the worker is adopted")
    stream.check_whole()
    assert running.worker_pids() == worker
    assert ask(running) == "579"


def test_requests_are_served_all_the_while_a_daemon_is_away(running: Any, until: Callable[..., Any]) -> None:
    killed = running.kill("daemon")
    end_s = None
    while end_s is None or time.monotonic() < end_s:
        assert ask(running) == "579"
        if end_s is None and running.record("daemon").pid != killed:
            end_s = time.monotonic() + 2  # a few looks of the new daemon and controller
    until(lambda: running.deployment()["status"] == "ready", "the worker is adopted")


@pytest.mark.smoke
def test_a_killed_gateway_is_back_at_once(running: Any, stream: Stream, until: Callable[..., Any]) -> None:
    worker, killed = running.worker_pids(), running.kill("gateway")
    assert isinstance(stream.end().error, openai.APIError), "its connection died with it, and it said so"
    assert until(lambda: running.record("gateway").pid, "a gateway lives again") != killed
    assert ask(running) == "579"
    assert running.worker_pids() == worker


@pytest.mark.smoke
def test_a_killed_worker_ends_its_stream_in_an_error_and_is_started_again(
    running: Any, stream: Stream, until: Callable[..., Any], kill: Callable[[int], None]
) -> None:
    (before,) = running.worker_pids().values()
    restarts = running.deployment()["restarts"]
    kill(before)
    assert isinstance(stream.end().error, openai.APIError)
    assert stream.finish_reason is None
    until(lambda: running.deployment()["restarts"] == restarts + 1, "the worker is started again")
    until(lambda: running.deployment()["status"] == "ready", "the worker is ready again")
    assert ask(running) == "579"
    (after,) = running.worker_pids().values()
    assert after != before


def test_everything_but_the_worker_killed_at_once(running: Any, stream: Stream) -> None:
    worker = running.worker_pids()
    for name in ("controller", "daemon", "gateway"):
        running.kill(name)
    doctor = running.run("doctor", check=False)
    assert doctor.returncode == 1
    assert doctor.stdout.count("PROBLEM: ") == 4  # the three, and a worker without a shim
    assert running.run("status").stdout.count("not running") == 3
    running.run("up")
    assert isinstance(stream.end().error, openai.APIError)
    assert running.worker_pids() == worker
    assert ask(running) == "579"


def test_a_second_controller_is_refused(running: Any, one_line: Callable[..., str]) -> None:
    first = running.record("controller")
    second = subprocess.run(
        [sys.executable, "-m", "iserve.controller"],
        env=running.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert str(first.pid) in one_line(second)
    assert running.record("controller") == first
    assert ask(running) == "579"


def test_down_ends_everything_and_up_brings_it_back(running: Any, until: Callable[..., Any]) -> None:
    worker = running.worker_pids()
    assert running.run("down").stdout.splitlines() == [
        "controller ended",
        "gateway ended",
        f"worker {DEMO}-1 ended",
        "daemon ended",
    ]
    assert running.processes() == {}
    assert running.run("down").stdout == "nothing else runs\n"
    running.run("up")
    until(lambda: running.deployment()["status"] == "ready", "the deployment is back")
    assert ask(running) == "579"
    assert running.worker_pids().keys() == worker.keys()
    assert running.worker_pids() != worker


def test_two_commands_at_once_start_one_controller(make_installation: Callable[..., Any]) -> None:
    installation = make_installation()
    both = [installation.start("up") for _ in range(2)]
    said = [process.communicate(timeout=PATIENCE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0] == said[1]
    commands = [command for command in installation.processes().values() if "iserve.controller" in command]
    assert len(commands) == 1


def is_profiling(installation: Any) -> bool:
    return any(worker.startswith("profile-") for worker in installation.worker_pids())


def test_a_deploy_removed_while_it_profiles_leaves_nothing(
    make_installation: Callable[..., Any], until: Callable[..., Any]
) -> None:
    installation = make_installation()
    waiting = installation.start("deploy", "--name", "unwanted", "--json")
    until(lambda: is_profiling(installation), "a profile is being taken")
    installation.run("rm", "unwanted")
    waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 1
    until(lambda: not installation.worker_pids(), "its profiling worker is ended")
    assert installation.json("ps") == []
    assert list((installation.home / "fingerprints").iterdir()) == []


@pytest.mark.long
def test_a_deploy_survives_the_death_of_its_controller(
    make_installation: Callable[..., Any], until: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    installation = make_installation(ISERVE_PROFILE_SECONDS="60")
    waiting = installation.start("deploy", "--json", *WORK)
    until(lambda: is_profiling(installation), "a profile is being taken")
    installation.kill("controller")
    out, error = waiting.communicate(timeout=PATIENCE_S)
    done = subprocess.CompletedProcess(waiting.args, waiting.returncode, out, error)
    assert "does not answer" in one_line(done)
    (leftover,) = installation.worker_pids()
    installation.run("up")
    until(lambda: leftover not in installation.worker_pids(), "the leftover profile is ended")
    until(
        lambda: installation.deployment()["status"] in {"ready", "failed", "refused"}, "the deploy has ended", 240
    )
    ended = installation.deployment()
    assert (ended["status"], ended["error"]) == ("ready", None)
    assert ask(installation) == "579"
    (worker,) = installation.worker_pids()
    assert worker.startswith(DEMO)
    events = [e["kind"] for e in installation.get("/api/v1/events") if e["message"].startswith(f"{DEMO}:")]
    assert events.count("ready") == 1
    assert events.count("profiling") == 2
    assert list((installation.home / "fingerprints").iterdir()) == []
