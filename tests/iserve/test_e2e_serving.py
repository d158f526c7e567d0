"""The whole way on the bundled model: deploy by intent, serve OpenAI clients, refuse, remove. Real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

AS_INSTALLED = True
DEMO = "iserve-demo"
# Long enough for a prompt and an answer of the demo model (one byte is one token).
WORK = ("--input-tokens", "128", "--output-tokens", "64", "--context", "256")


@pytest.fixture(scope="module")
def served(shared_home: Any) -> Any:
    """The demo model deployed."""
    shared_home.first = shared_home.json("deploy", "--intent", "min-cost", *WORK)
    return shared_home


@pytest.fixture(scope="module")
def client(served: Any) -> openai.OpenAI:
    found = served.openai()
    assert isinstance(found, openai.OpenAI)
    return found


def phases(served: Any, name: str) -> list[str]:
    return [e["kind"] for e in served.get("/api/v1/events") if e["message"].startswith(f"{name}:")]


@pytest.mark.smoke
def test_a_deploy_plans_and_launches(served: Any) -> None:
    first = served.first
    assert (first["name"], first["status"], first["error"]) == (DEMO, "ready", None)
    assert first["config"]["engine"] == "torch"
    assert sum(first["layers_per_stage"]) == 8
    assert first["base_url"] == f"{served.record('gateway').url}/v1"
    assert phases(served, DEMO) == [
        "accepted", "resolving", "planning", "launching", "ready",
    ]  # fmt: skip


def test_the_plan_it_followed_rests_on_what_was_measured_here(served: Any) -> None:
    plan = served.get(f"/api/v1/deployments/{DEMO}/plan")
    chosen = plan["candidates"][plan["chosen"]]
    assert plan["chosen"] == 0
    assert chosen["config"] == served.first["config"]
    assert chosen["layers_per_stage"] == served.first["layers_per_stage"]
    assert chosen["estimate"]["tpot_s"]["source"] != "roofline"
    objectives = [c["objective"] for c in plan["candidates"] if c["feasible"]]
    assert objectives == sorted(objectives)
    assert all(c["reason"] for c in plan["candidates"] if not c["feasible"])


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO]
    assert client.models.retrieve(DEMO).id == DEMO


@pytest.mark.smoke
def test_chat_answers_what_the_model_was_trained_to(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEMO, messages=[{"role": "user", "content": "123+456="}], temperature=0
    )
    assert answer.choices[0].message.content == "579"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(("prompt", "answer", "taken"), [(240, 16, True), (240, 17, False)])
def test_requests_are_taken_up_to_the_context_and_no_longer(
    client: openai.OpenAI, prompt: int, answer: int, taken: bool
) -> None:
    """Longer than what was planned for, 192 tokens."""
    wish: dict[str, Any] = {"model": DEMO, "prompt": [65] * prompt, "max_tokens": answer, "temperature": 0}
    if taken:
        usage = client.completions.create(**wish, extra_body={"ignore_eos": True}).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, answer)
    else:
        with pytest.raises(openai.BadRequestError, match="256"):
            client.completions.create(**wish)


def test_a_text_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": DEMO, "prompt": "sort 9 3 44 2", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**wish)
    assert whole.usage is not None
    chunks = list(client.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c for c in chunks if c.usage] == chunks[-1:]
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []


def test_a_chat_stream_ends_with_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=DEMO,
            messages=[{"role": "user", "content": "123+456="}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "579"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 3


def test_openai_errors(client: openai.OpenAI, served: Any, request_to: Callable[..., Any]) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="no-such", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=DEMO, prompt="a" * 300)  # --context 256
    assert too_long.value.code == "context_length_exceeded"
    answer = request_to(
        served.record("gateway").url,
        "POST",
        "/v1/completions",
        body=b'{"model": ',
        Content_Type="application/json",
    )
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_a_second_deployment_of_the_model_reuses_its_profile(served: Any, client: openai.OpenAI) -> None:
    second = served.json("deploy", DEMO, "--name", "second", "--intent", "max-throughput", "--batch", "4", *WORK)
    try:
        assert second["status"] == "ready"
        assert "profiling" not in phases(served, "second")
        assert sorted(model.id for model in client.models.list()) == [DEMO, "second"]
        for name in (DEMO, "second"):
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "2+2="}], temperature=0
            )
            assert answer.model == name
            assert answer.choices[0].message.content == "4"
        assert sorted(d["name"] for d in served.json("ps")) == [DEMO, "second"]
    finally:
        removed = served.run("rm", "second")
    assert removed.stdout == "second is removed\n"
    assert [model.id for model in client.models.list()] == [DEMO]
    assert list(served.worker_pids()) == [f"{DEMO}-1"]


def test_the_name_of_a_removed_deployment_can_be_used_again(served: Any) -> None:
    """Row ids are used again in SQLite, and with them worker ids that the daemon remembers as stopped."""
    assert served.json("deploy", "--name", "second", *WORK)["status"] == "ready"
    served.run("rm", "second")


def test_the_same_deploy_again_attaches_and_another_says_what_differs(
    served: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    again = served.run("deploy", *WORK)
    assert f"{DEMO} is ready" in again.stdout
    golden("cli", again.stderr.splitlines()[0])
    said = one_line(served.run("deploy", "--name", DEMO, "--batch", "2", *WORK, check=False))
    golden("cli", said)
    assert served.deployment()["created_at"] == served.first["created_at"]


@pytest.fixture
def watched(served: Any) -> Iterator[str]:
    """The name of a deployment that is removed after the test, whatever became of it."""
    yield "watched"
    served.run("rm", "watched", check=False)


def test_a_deploy_can_be_left_and_taken_up_again(served: Any, watched: str) -> None:
    """Ctrl-C, then the same command."""
    command = ("deploy", "--name", watched, *WORK)
    for _ in range(10):
        left = served.start(*command)
        assert left.stderr is not None
        assert left.stderr.readline() == "accepted\n"
        left.send_signal(signal.SIGINT)
        said = left.communicate(timeout=PATIENCE_S)[1]
        if left.returncode != 0:
            break
        served.run("rm", watched)  # it was ready before the signal
    assert left.returncode == 130
    assert "the same command follows it again" in said
    assert "watched is ready" in served.run(*command).stdout

    shown = served.json("show", watched)
    assert shown["deployment"]["name"] == watched
    assert shown["plan"]["chosen"] == 0
    assert [event["kind"] for event in shown["events"]].count("accepted") == 1
    text = served.run("show", watched).stdout
    for part in ("status", "1 of 1 workers ready", "endpoint", "embedded engine", "accepted", "ready"):
        assert part in text


def test_the_log_is_followed_over_a_restart_to_the_removal(
    served: Any,
    watched: str,
    until: Callable[..., Any],
    kill: Callable[[int], None],
    tmp_path: Path,
    golden: Golden,
) -> None:
    served.run("deploy", "--name", watched, *WORK)
    log = tmp_path / "log"
    with log.open("w") as file:
        follower = served.start("logs", watched, "--follow", stdout=file)
    first = until(lambda: log.read_text(), "the follower prints what is there")
    (pid,) = (pid for worker, pid in served.worker_pids().items() if worker.startswith("watched-"))
    kill(pid)
    until(lambda: served.deployment(watched)["restarts"] == 1, "its death is seen")
    until(lambda: served.deployment(watched)["status"] == "ready", "it serves again")
    until(lambda: len(log.read_text()) > len(first), "the follower prints what the next worker says")
    quiet = served.start("logs", watched, "-f", "--lines", "1")
    assert quiet.stdout is not None
    assert quiet.stdout.readline()
    quiet.send_signal(signal.SIGINT)
    assert (quiet.communicate(timeout=PATIENCE_S)[1], quiet.returncode) == ("", 130)
    served.run("rm", watched)
    assert follower.wait(timeout=PATIENCE_S) == 0
    assert follower.stderr is not None
    golden("cli", follower.stderr.read())


def test_an_slo_that_nothing_meets_is_refused_with_the_nearest_and_leaves_nothing(
    served: Any, one_line: Callable[..., str], golden: Golden
) -> None:
    before = served.processes()
    refused = served.run(
        "deploy", "--name", "hasty", "--intent", "latency-slo", "--slo", "tpot=1e-7", *WORK, check=False
    )
    said = one_line(_without_steps(refused))
    golden("cli", said.partition(";")[0])
    assert "nearest" in said
    assert [d["name"] for d in served.json("ps")] == [DEMO]
    assert served.processes().keys() == before.keys()


def _without_steps(done: Any) -> Any:
    """A deploy without --json tells its steps on stderr before the reason."""
    done.stderr = done.stderr.splitlines(keepends=True)[-1]
    return done


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--batch", "100000"), "feasible"),
        (("--input-tokens", "100000"), "context"),
        (("--context", "100000"), "lower --context"),
        (("--engine", "vllm"), "set ISERVE_VLLM_PYTHON"),
        (("no-such-model",), "'no-such-model' (registered: iserve-demo)"),
    ],
)
def test_what_cannot_be_deployed_is_one_line_and_leaves_nothing(
    served: Any, one_line: Callable[..., str], arguments: tuple[str, ...], reason: str, golden: Golden
) -> None:
    done = served.run("deploy", *arguments, "--name", "refused", "--json", check=False)
    said = one_line(done)
    assert reason in said
    golden("cli", said.partition(";")[0], numbers=False)  # before the figures of this machine
    assert "not known" not in said
    assert [d["name"] for d in served.json("ps")] == [DEMO]


def test_a_name_that_cannot_be_is_a_usage_error_and_leaves_nothing(served: Any) -> None:
    done = served.run("deploy", "--name", "not/a/name", "--json", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--name" in done.stderr
    assert "Traceback" not in done.stderr
    assert [d["name"] for d in served.json("ps")] == [DEMO]


def test_a_plan_for_the_devices_here_uses_the_stored_profile(served: Any) -> None:
    document = served.json("plan", DEMO, *WORK)
    assert document["chosen"] == 0
    assert document["candidates"][0]["estimate"]["tpot_s"]["source"] in {"measured", "extrapolated", "scaled"}


def test_an_export_has_the_limits_of_the_worker_that_runs(served: Any, tmp_path: Path) -> None:
    """Planned by the same profile, it starts nothing."""
    before = served.worker_pids()
    file = tmp_path / "compose.yaml"
    served.run("deploy", DEMO, "--export", "compose", "-o", str(file), *WORK)
    project = yaml.safe_load(file.read_text())
    exported = json.loads(project["configs"]["spec.json"]["content"])
    running = json.loads((served.home / "workers" / f"{DEMO}-1" / "spec.json").read_text())
    for what in ("config", "limits", "served_model"):
        assert exported[what] == running[what]
    assert [stage["num_layers"] for stage in exported["stages"]] == [s["num_layers"] for s in running["stages"]]
    assert project["services"][f"iserve-{DEMO}"]["cpuset"]
    assert served.worker_pids() == before
    assert [d["name"] for d in served.json("ps")] == [DEMO]


def test_lists(served: Any) -> None:
    (node,) = served.json("nodes")
    assert [device["device_id"] for device in node["devices"]] == ["cpu:0", "cpu:1"]
    names = [state["name"] for state in served.json("status")]
    assert names == ["controller", "gateway", "daemon", f"worker {DEMO}-1 (ready)"]
    for command in ("ps", "nodes", "status"):
        assert served.run(command).stdout.strip()
    assert served.run("logs", DEMO, "--lines", "5").stdout.strip()
    assert served.run("doctor").stdout.count("ok: ") >= 5


def test_chat_on_the_command_line(served: Any, one_line: Callable[..., str]) -> None:
    assert served.run("chat", DEMO, "123+456=").stdout == "579\n"
    assert served.run("chat", DEMO, stdin="123+456=\n\n2+2=\n").stdout == "579\n4\n"
    assert "no-such" in one_line(served.run("chat", "no-such", "hello", check=False))


def test_unknown_names_are_one_line(served: Any, one_line: Callable[..., str]) -> None:
    for command in (("logs", "no-such"), ("rm", "no-such"), ("rm", ""), ("keys", "revoke", "no-such")):
        one_line(served.run(*command, check=False))


def test_routes_on_disk_hold_no_secret(served: Any) -> None:
    made = json.dumps(served.run("keys", "create").stdout.strip())
    assert made.startswith('"isk-')
    for path in served.home.rglob("*"):
        if path.is_file() and path.suffix in {".json", ".log", ".db"}:
            assert made.strip('"') not in path.read_bytes().decode(errors="replace")
    assert (served.home / "run").stat().st_mode & 0o077 == 0
    assert (served.home / "state.db").stat().st_mode & 0o077 == 0
