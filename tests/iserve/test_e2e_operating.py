"""Operating an installation: ports in use, keys, doctor, a home that cannot be written. Real processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

DEMO = "iserve-demo"
WORK = ("--input-tokens", "64", "--output-tokens", "16")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of loopback that another program listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("setting", ["ISERVE_PORT", "ISERVE_API_PORT"])
def test_a_port_in_use_is_one_line_and_leaves_nothing_running(
    make_installation: Callable[..., Any], taken_port: int, one_line: Callable[..., str], setting: str
) -> None:
    installation = make_installation(**{setting: str(taken_port)})
    said = one_line(installation.run("up", check=False))
    assert str(taken_port) in said
    assert setting in said
    assert "--" not in said, "`up` has no options"
    assert installation.processes() == {}
    assert [state["pid"] for state in installation.json("status")] == [None, None, None]


@pytest.mark.long
def test_up_goes_on_where_a_failed_start_left_off(
    make_installation: Callable[..., Any], taken_port: int, golden: Golden
) -> None:
    installation = make_installation(ISERVE_PORT=str(taken_port))
    assert installation.run("up", check=False).returncode == 1
    installation.settings["ISERVE_PORT"] = "0"
    assert installation.run("up").stdout.startswith("OpenAI API: http://127.0.0.1:")
    before = installation.processes()
    assert installation.run("up").stdout.startswith("OpenAI API: http://127.0.0.1:")
    assert installation.processes().keys() == before.keys()
    installation.settings["ISERVE_REQUIRE_KEYS"] = "1"
    refused = installation.run("up", check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    golden("cli", refused.stderr)
    assert installation.processes().keys() == before.keys()
    del installation.settings["ISERVE_REQUIRE_KEYS"]


def test_commands_that_look_start_nothing(
    make_installation: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    installation = make_installation()
    for command in (("ps",), ("nodes",), ("logs", "a"), ("rm", "a"), ("keys", "ls"), ("chat", "a", "b")):
        assert "iserve up" in one_line(installation.run(*command, check=False))
    assert [state["pid"] for state in installation.json("status")] == [None, None, None]
    assert installation.run("down").stdout == "nothing else runs\n"
    assert installation.processes() == {}


def test_doctor_tells_what_is_wrong(make_installation: Callable[..., Any], golden: Golden) -> None:
    installation = make_installation()
    sick = installation.run("doctor", check=False)
    assert sick.returncode == 1
    assert sick.stderr.count("\n") == 1
    assert sick.stdout.count("PROBLEM: ") == 3
    golden("cli", [line for line in sick.stdout.splitlines() if "absent: engine vllm" in line])
    installation.run("up")
    assert "PROBLEM" not in installation.run("doctor").stdout


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ISERVE_PORT", "70000"),
        ("ISERVE_PORT", "http"),
        ("ISERVE_HOEM", "x"),
        ("ISERVE_CPU_DEVICES", "0"),
        ("ISERVE_HOST", "no.such.host.invalid"),
        ("ISERVE_HOME", "/proc/no-home"),
        ("ISERVE_POLICY", "best"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(
    make_installation: Callable[..., Any], one_line: Callable[..., str], setting: str, value: str
) -> None:
    installation = make_installation(**{setting: value})
    try:
        one_line(installation.run("up", check=False))
        assert installation.processes() == {}
    finally:
        del installation.settings[setting]


@pytest.fixture(scope="module")
def guarded(shared_home: Any) -> Any:
    """An installation that wants keys."""
    shared_home.settings["ISERVE_REQUIRE_KEYS"] = "1"
    shared_home.json("deploy", *WORK)
    return shared_home


def test_keys_are_wanted_given_and_revoked(
    guarded: Any, until: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    def is_refused(key: str) -> bool:
        try:
            return not guarded.openai(key).models.list().data
        except openai.AuthenticationError:
            return True

    assert is_refused("none")
    key = guarded.run("keys", "create", "--label", "laptop").stdout.strip()
    until(lambda: not is_refused(key), "the key is known")
    assert guarded.run("chat", DEMO, "2+2=", "--key", key).stdout == "4\n"
    for refused in (("--key", "isk-wrong"), ()):
        said = one_line(guarded.run("chat", DEMO, "2+2=", *refused, check=False))
        for way in ("`iserve keys create`", "--key", "OPENAI_API_KEY"):
            assert way in said
    for value, hints in (("", 1), (key, 0)):  # the deploy that runs already: it is attached to
        guarded.settings["OPENAI_API_KEY"] = value
        shown = guarded.run("deploy", *WORK).stdout
        assert shown.count("export OPENAI_API_KEY=$(iserve keys create)\n") == hints
    del guarded.settings["OPENAI_API_KEY"]
    (listed,) = guarded.json("keys", "ls")
    assert (listed["label"], listed["scope"], listed["revoked"]) == ("laptop", "inference", False)
    assert key not in guarded.run("keys", "ls").stdout
    guarded.run("keys", "revoke", listed["key_id"])
    until(lambda: is_refused(key), "the revoked key is refused")
    assert [k["revoked"] for k in guarded.json("keys", "ls")] == [True]


@pytest.mark.long
def test_a_key_stays_refused_while_the_controller_is_away(guarded: Any, until: Callable[..., Any]) -> None:
    key = guarded.run("keys", "create").stdout.strip()
    until(lambda: key_works(guarded, key), "the key is known")
    guarded.kill("controller")
    assert key_works(guarded, key)
    assert not key_works(guarded, key[:-1] + "x")
    guarded.run("up")
    assert key_works(guarded, key)


def key_works(installation: Any, key: str) -> bool:
    try:
        return bool(installation.openai(key).models.list().data)
    except openai.AuthenticationError:
        return False


@pytest.mark.long
def test_doctor_ends_a_worker_that_nobody_watches(guarded: Any, until: Callable[..., Any]) -> None:
    for name in ("controller", "gateway", "daemon"):
        guarded.kill(name)
    assert "unwatched; --fix ends it" in guarded.run("doctor", check=False).stdout
    fixed = guarded.run("doctor", "--fix", check=False)
    assert fixed.returncode == 1  # the three are still not running
    assert f"ok: worker {DEMO}-1" in fixed.stdout
    until(lambda: not guarded.processes(), "nothing runs")
    guarded.run("up")
    until(lambda: guarded.deployment()["status"] == "ready", "the deployment is back")


def test_removal_does_not_hold_up_the_rest(guarded: Any, until: Callable[..., Any]) -> None:
    """A worker that is stopped drains its streams; meanwhile a killed gateway must start again all the same."""
    key = guarded.run("keys", "create").stdout.strip()
    until(lambda: key_works(guarded, key), "the key is known")
    guarded.json("deploy", "--name", "slow", "--input-tokens", "16", "--output-tokens", "1000")
    stream = guarded.openai(key).completions.create(
        model="slow", prompt="Once", max_tokens=990, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    removing = guarded.start("rm", "slow")
    until(lambda: guarded.deployment("slow")["status"] == "removing", "the removal has begun")
    killed = guarded.kill("gateway")
    assert until(lambda: guarded.record("gateway").pid, "a gateway lives again") != killed
    until(lambda: key_works(guarded, key), "the new gateway serves")
    assert removing.communicate(timeout=PATIENCE_S)[0] == "slow is removed\n"
    assert [d["name"] for d in guarded.json("ps")] == [DEMO]


def test_registered_names(guarded: Any, one_line: Callable[..., str], tmp_path: Path) -> None:
    from iserve.demo import demo_model_path

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in demo_model_path().iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert "1,608,064 parameters" in guarded.run("register", "mine", copy).stdout
    assert guarded.json("plan", "mine", "--gpus", "a6000:1")["model"] == "mine"
    assert guarded.json("estimate", "mine", "--gpu", "h200")["model"] == "mine"
    assert "1 to 63 letters" in one_line(guarded.run("register", "not there", copy, check=False))
    assert [m["name"] for m in guarded.get("/api/v1/models")] == [DEMO, "mine"]
    (copy / "config.json").unlink()
    assert "config.json" in one_line(guarded.run("plan", "mine", "--gpus", "a6000:1", check=False))


@pytest.mark.long
def test_down_during_a_deploy(make_installation: Callable[..., Any], until: Callable[..., Any]) -> None:
    installation = make_installation()
    waiting = installation.start("deploy", "--json")
    until(lambda: installation.worker_pids(), "a profiling worker runs")
    installation.run("down")
    assert installation.processes().keys() <= {waiting.pid}
    waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 1
