"""`iserve verify` with real processes: a check of the demo model corrects its plans, and whatever dies in it,
nothing of it is left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

DEMO = "iserve-demo"
WORK = ("--input-tokens", "24", "--output-tokens", "24", "--batch", "2")  # long next to a busy machine's noise
SHORT = ("--max-seconds", "60")  # for the whole workload, also on a machine that is busy; it ends once it is sure
ROOM = 2 * (24 + 24)  # tokens of the KV cache


def metrics(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {metric["name"]: metric for metric in document["metrics"]}


def planned(home: Any) -> list[dict[str, Any]]:
    """The candidates that anything is predicted of."""
    return [c for c in home.json("plan", DEMO, *WORK)["candidates"] if c["estimate"] is not None]


def predicted(candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the cost, which has what runs on the devices just now in it."""
    return [{name: value for name, value in c["estimate"].items() if name != "cost"} for c in candidates]


def kept(home: Any) -> list[Any]:
    found = home.get("/api/v1/verifications")
    assert isinstance(found, list)
    return found


@pytest.fixture(autouse=True)
def leaves_no_check(shared_home: Any) -> Iterator[None]:
    """Whatever a test that failed left behind fails no other."""
    yield
    if kept(shared_home):
        shared_home.run("verify", DEMO, "--forget")


def test_a_check_of_a_model_corrects_its_plans_and_leaves_nothing_running(
    shared_home: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    """A single way through; each step needs the one before."""
    home = shared_home
    before = planned(home)
    document = home.json("verify", DEMO, *WORK, *SHORT)
    assert home.worker_pids() == {}
    assert home.json("ps") == []
    assert (document["model"], document["deployment"], document["correction_before"]) == (DEMO, None, None)
    usual = {"batch": 2, "input_tokens": 24, "output_tokens": 24, "longest_tokens": 0}
    assert document["workload"] == usual | {"images": 0, "tokens_per_image": 0}
    found = metrics(document)
    assert list(found) == ["ttft_s", "tpot_s", "memory_bytes_per_gpu", "kv_tokens"]
    for metric in found.values():
        assert metric["measured"] > 0
        assert metric["error"] == pytest.approx(metric["measured"] / metric["predicted"] - 1)
    for name in ("ttft_s", "tpot_s"):
        metric = found[name]
        assert metric["repeats"] >= 3
        assert metric["measured_low"] <= metric["measured"] <= metric["measured_high"]
        assert metric["within_interval"] == (metric["low"] <= metric["measured"] <= metric["high"])
        assert "HTTP" in metric["method"]
    assert (found["kv_tokens"]["predicted"], found["kv_tokens"]["measured"]) == (ROOM, ROOM)
    assert found["kv_tokens"]["within_interval"] is True

    config = document["config"]
    raw = next(c["estimate"] for c in before if c["config"] == config)
    assert raw["correction"] is None
    assert found["ttft_s"]["predicted"] == pytest.approx(raw["ttft_s"]["value"])
    after = planned(home)
    for candidate in after:
        exact = candidate["config"] == config
        correction = candidate["estimate"]["correction"]
        same = candidate["estimate"]["measured_config"] == raw["measured_config"]
        assert (correction is not None) == (exact or (same and not candidate["measured"]))
        if correction is None:
            continue
        assert (correction["exact"], correction["config"]) == (exact, config)
        if exact:
            assert candidate["measured"]
            estimate = candidate["estimate"]
            for name in ("ttft_s", "tpot_s"):  # of a reading less certain than what was predicted it says so
                now = found[name]["measured"] if found[name]["corrects"] else raw[name]["value"]
                assert estimate[name]["value"] == pytest.approx(now)
            assert estimate["memory_bytes_per_gpu"] == found["memory_bytes_per_gpu"]["measured"]
            assert set(estimate) - {"correction"} == set(raw) - {"correction"}
    for text in (home.run("plan", DEMO, *WORK).stdout, " ".join(home.json("report", DEMO)["warnings"])):
        assert "corrected by the check of" in text
    (stored,) = kept(home)
    assert (stored["model"], stored["engine"], stored["in_force"]) == (DEMO, "torch", True)

    again = home.json("verify", DEMO, *WORK, *SHORT)  # perhaps of another, which the correction made the best
    corrections = {json.dumps(c["config"]): c["estimate"]["correction"] for c in after}
    assert again["correction_before"] == corrections[json.dumps(again["config"])]
    assert home.worker_pids() == {}

    golden("cli", home.run("verify", DEMO, "--forget").stdout)
    assert kept(home) == []
    assert predicted(planned(home)) == predicted(before)
    golden("cli", one_line(home.run("verify", DEMO, "--forget", check=False)))


def test_a_running_deployment_is_checked_as_it_is(
    shared_home: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    home = shared_home
    home.json("deploy", DEMO, "--name", "chat", *WORK)
    try:
        worker = home.worker_pids()
        document = home.json("verify", "chat", *WORK, *SHORT)  # what it was deployed with may be said again
        assert (document["model"], document["deployment"]) == (DEMO, "chat")
        usual = {"batch": 2, "input_tokens": 24, "output_tokens": 24, "longest_tokens": 0}
        assert document["workload"] == usual | {"images": 0, "tokens_per_image": 0}
        assert metrics(document)["kv_tokens"]["measured"] == 2 * 1024  # it serves longer requests
        assert [one["verification"]["memory_bytes_per_gpu"] for one in kept(home)] == [None]  # corrects nothing
        assert home.worker_pids() == worker
        refused = home.run("verify", "chat", "--batch", "7", "--slo", "tpot=1", check=False)
        golden("cli", one_line(refused))
        home.run("verify", "chat", "--forget")
        assert kept(home) == []
    finally:
        home.run("rm", "chat")


def test_what_cannot_be_checked_is_refused_and_starts_nothing(
    shared_home: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    home = shared_home
    for bad in (("--max-seconds", "0"), ("--max-seconds", "nan"), ("--batch", "0"), ("--slo", "never")):
        assert home.run("verify", DEMO, *bad, check=False).returncode == 2
    golden("cli", one_line(home.run("verify", "no-such-model", check=False)))
    impossible = one_line(home.run("verify", DEMO, "--slo", "tpot=1e-9", "--json", check=False))
    golden("cli", impossible.partition(";")[0])
    too_short = one_line(home.run("verify", DEMO, *WORK, "--max-seconds", "0.001", "--json", check=False))
    assert "raise --max-seconds" in too_short
    assert home.worker_pids() == {}
    assert kept(home) == []


@pytest.fixture
def begin(shared_home: Any) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """``begin(seconds)``: a check of at most that long, which has just begun; its answers are too long to end it
    sooner, unless ``output_tokens`` are fewer."""
    begun: list[subprocess.Popen[str]] = []

    def start(seconds: int, output_tokens: int = 300) -> subprocess.Popen[str]:
        command = shared_home.start("verify", DEMO, "--output-tokens", output_tokens, "--max-seconds", seconds)
        begun.append(command)
        assert command.stderr is not None
        if not any("checking" in line for line in command.stderr):
            raise AssertionError(f"the check never began: {command.communicate()}{shared_home.logs()}")
        return command

    yield start
    for command in begun:
        command.kill()
        command.communicate()


def only_worker(home: Any) -> tuple[str, int]:
    ((worker_id, pid),) = home.worker_pids().items()
    assert worker_id.startswith("verify-")
    return worker_id, pid


def said(command: subprocess.Popen[str]) -> str:
    out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 1
    assert out == ""
    return err.splitlines()[-1]


def test_a_worker_that_dies_in_the_check_is_told_and_corrects_nothing(
    shared_home: Any, begin: Callable[[int], Any], kill: Callable[[int], None], golden: Golden
) -> None:
    command = begin(60)
    kill(only_worker(shared_home)[1])
    golden("cli", said(command).partition(" (")[0])  # how far its restart is
    assert shared_home.worker_pids() == {}
    assert kept(shared_home) == []


def test_what_a_killed_controller_launched_for_a_check_is_ended_by_the_next(
    shared_home: Any, begin: Callable[[int], Any], until: Callable[..., Any]
) -> None:
    command = begin(60)
    worker_id, _ = only_worker(shared_home)
    shared_home.kill("controller")
    assert "the controller" in said(command)
    shared_home.run("up")
    until(lambda: worker_id not in shared_home.worker_pids(), "the check's worker is ended")
    assert kept(shared_home) == []


def test_a_check_goes_on_when_its_command_is_killed_and_ends_with_its_worker(
    shared_home: Any, begin: Callable[[int], Any], until: Callable[..., Any]
) -> None:
    begin(15, output_tokens=48).kill()  # time enough for the fewest repeats on a machine that is busy
    until(lambda: kept(shared_home), "the check has ended")
    until(lambda: shared_home.worker_pids() == {}, "its worker is gone")
    shared_home.run("verify", DEMO, "--forget")
