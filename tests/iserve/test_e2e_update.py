"""`iserve update`: new workers take the place of the former ones, and no request is lost. Real processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

DEMO = "iserve-demo"
WORK = ("--input-tokens", "128", "--output-tokens", "64", "--context", "256")


@pytest.fixture(scope="module")
def served(shared_home: Any) -> Any:
    shared_home.json("deploy", *WORK)
    return shared_home


@contextmanager
def clients(home: Any) -> Iterator[list[str]]:
    """Two clients that ask all the time: the answers that they got by then."""
    answers: list[str] = []
    failures: list[Exception] = []
    stopped = threading.Event()

    def ask() -> None:
        client = home.openai()
        try:
            while not stopped.is_set():
                answer = client.completions.create(
                    model=DEMO, prompt="123+456=", max_tokens=48, temperature=0, extra_body={"ignore_eos": True}
                )
                answers.append(str(answer.usage.completion_tokens))
        except openai.OpenAIError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert set(answers) == {"48"}


def workers(home: Any) -> set[str]:
    return {replica["worker_id"] for replica in home.deployment()["replicas"]}


def test_new_workers_serve_then_the_former_ones_end(served: Any, until: Callable[..., Any]) -> None:
    former = workers(served)
    with clients(served) as answers:
        until(lambda: answers, "requests are served")
        updated = served.json("update", DEMO, "--intent", "max-throughput", "--replicas", "2", "--slo", "e2e=60")
        count = len(answers)
        until(lambda: len(answers) > count + 4, "the new workers serve")
        until(lambda: not former & set(served.worker_pids()), "the former worker has drained and ended")
    assert (updated["status"], updated["updating"], updated["error"]) == ("ready", False, None)
    assert (updated["intent"], updated["num_replicas"], updated["num_ready"]) == ("max-throughput", 2, 2)
    assert workers(served) == set(served.worker_pids())
    assert not workers(served) & former
    assert served.get(f"/api/v1/deployments/{DEMO}/plan")["workload"]["input_tokens"] == 128  # as it was deployed


def test_an_update_that_cannot_be_leaves_all_as_it_was_and_says_so(served: Any, golden: Golden) -> None:
    former, intent = workers(served), served.deployment()["intent"]
    with clients(served):
        refused = served.run("update", DEMO, "--intent", "latency-slo", "--slo", "e2e=0.000001", check=False)
    assert refused.returncode == 1
    golden("cli", refused.stderr.splitlines()[-1].partition(";")[0])
    deployment = served.deployment()
    assert (deployment["status"], deployment["intent"], deployment["updating"]) == ("ready", intent, False)
    assert workers(served) == former == set(served.worker_pids())
    for wrong in [
        ("--engine-version", "9.9"),
        ("--model", "/no/such/folder"),
        (),
        ("--batch", "0"),
    ]:
        refused = served.run("update", DEMO, *wrong, check=False)
        assert refused.returncode != 0
        golden("cli", " ".join(refused.stderr.replace("│", " ").split()))
    assert not served.deployment()["updating"]


def test_a_smaller_capacity_is_asked_for_and_named(served: Any, until: Callable[..., Any], golden: Golden) -> None:
    capacity = served.get(f"/api/v1/deployments/{DEMO}/plan")["capacity"]
    shown = served.run("update", DEMO, "--batch", "1", "--context", "200")
    assert f" {capacity['requests_at_once']} at once of up to 256" in shown.stderr
    golden("cli", [line for line in shown.stderr.splitlines() if "200 tokens" in line], numbers=False)
    capacity = served.get(f"/api/v1/deployments/{DEMO}/plan")["capacity"]
    assert (capacity["requests_at_once"], capacity["context_tokens"]) == (1, 200)
    shown = served.run("update", DEMO, "--batch", "none", "--context", "256")
    assert "warning" not in shown.stderr
    assert served.get(f"/api/v1/deployments/{DEMO}/plan")["capacity"]["requests_at_once"] > 1
    until(lambda: set(served.worker_pids()) == workers(served), "the former workers have ended")


def test_requests_wait_while_an_update_stops_first(served: Any, until: Callable[..., Any]) -> None:
    former = workers(served)
    with clients(served) as answers:
        until(lambda: answers, "requests are served")
        updated = served.json("update", DEMO, "--intent", "min-memory", "--stop-first")
        count = len(answers)
        until(lambda: len(answers) > count + 4, "the new workers serve")
    assert (updated["status"], updated["intent"], updated["error"]) == ("ready", "min-memory", None)
    assert set(served.worker_pids()) == workers(served)
    assert not workers(served) & former
    kinds = [event["kind"] for event in served.get("/api/v1/events")]
    assert kinds[-3:] == ["draining", "replacing", "ready"]


def test_an_update_that_is_left_goes_on_and_says_so(
    served: Any, until: Callable[..., Any], golden: Golden
) -> None:
    """Ctrl-C ends the command alone."""
    for batch in range(2, 12):
        former = workers(served)
        left = served.start("update", DEMO, "--batch", str(batch), "--context", "256")
        assert left.stderr is not None
        assert left.stderr.readline()  # its first step
        left.send_signal(signal.SIGINT)
        said = left.communicate(timeout=PATIENCE_S)[1]
        until(lambda: not served.deployment()["updating"], "the update has ended")
        if left.returncode != 0:  # else it had ended before the signal
            break
    assert left.returncode == 130
    golden("cli", said.splitlines()[-1])
    assert not workers(served) & former


def test_a_controller_that_is_killed_meanwhile_leaves_one_deployment(
    served: Any, until: Callable[..., Any]
) -> None:
    former = workers(served)
    with clients(served) as answers:
        updating = served.start("update", DEMO, "--intent", "min-latency", "--replicas", "1")
        steps = f"{DEMO}: update, launching"
        seen = len([e for e in served.get("/api/v1/events") if e["message"] == steps])
        until(
            lambda: (
                len([e for e in served.get("/api/v1/events") if e["message"] == steps]) > seen
                or served.deployment()["intent"] == "min-latency"
            ),
            "new workers are being launched",
        )
        served.kill("controller")
        served.run("up")
        until(lambda: not served.deployment()["updating"], "the update has ended")
        until(lambda: set(served.worker_pids()) == workers(served), "one set of workers is left")
        count = len(answers)
        until(lambda: len(answers) > count + 4, "it serves")
        updating.kill()
        updating.wait()
    deployment = served.deployment()
    assert (deployment["status"], deployment["intent"], deployment["error"]) == ("ready", "min-latency", None)
    assert len(workers(served)) == 1
    assert not workers(served) & former
    served.run("rm", DEMO)
    assert served.worker_pids() == {}
