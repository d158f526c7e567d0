"""The check of an engine that a user sends back: what it writes where the engine is, and where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.bench.verify_engine import AT_ONCE, Check, Report
from tests.daemon.engines.tensorrt_environment import VARIABLE, make_tensorrt_llm

ROOT = Path(__file__).parents[2]
NVML = ROOT / "tests/daemon/fake_nvml.py"


def check(folder: Path, *words: str, **env: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.verify_engine", *words, "--out", str(folder / "found.json")]
    around = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(command, cwd=ROOT, env=around | env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads((folder / "found.json").read_bytes())


@pytest.mark.process
def test_without_the_engine_it_says_what_to_set(tmp_path: Path) -> None:
    status, found = check(tmp_path, "tensorrt-llm", "iserve-demo")
    steps = {step["name"]: step for step in found["steps"]}
    assert status == 1
    assert [(name, step["ok"]) for name, step in steps.items()] == [("installed", False), ("end", True)]
    assert VARIABLE in steps["installed"]["problem"]


@pytest.mark.process
@pytest.mark.long
def test_every_step_holds_on_the_stand_in(tmp_path: Path) -> None:
    """The engine's stand-in keeps to TensorRT-LLM's documentation, so that no step is tried first by a user."""
    make_tensorrt_llm(tmp_path / "env")
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml/pynvml.py").write_text(NVML.read_text() + "\ndel GPUS[1:]\n")
    path = os.pathsep.join(filter(None, (str(tmp_path / "nvml"), os.environ.get("PYTHONPATH"))))
    status, found = check(
        tmp_path,
        "tensorrt-llm",
        "iserve-demo",
        "--max-seconds",
        "5",
        **{VARIABLE: str(tmp_path / "env/bin/python"), "PYTHONPATH": path},
    )
    assert [(step["name"], step["problem"]) for step in found["steps"]] == [
        (name, None) for name in ("installed", "profile", "deploy", "conformance", "accuracy", "adapters", "end")
    ]
    assert status == 0
    (accuracy,) = (step["result"] for step in found["steps"] if step["name"] == "accuracy")
    assert {metric["name"] for metric in accuracy["metrics"]} >= {"ttft_s", "tpot_s"}


class Scripted(Check):
    """Check of an installation whose commands print what ``said`` has for their first word."""

    said: dict[str, str]

    def _iserve(self, *words: str) -> str:
        return self.said[words[0]]


def steps_of(folder: Path, *, engine: str = "vllm", model: str = "m", **said: str) -> dict[str, dict[str, Any]]:
    """Return the steps that a check wrote down, by their names."""
    report = Report(engine=engine, model=model, created_at="", machine="", gpus=(), driver="")
    check = Scripted(report, folder, folder / "found.json", 1.0, ())
    check.said = {
        "engines": json.dumps([{"engine": engine, "problem": None}]),
        "profile": json.dumps({"profile": "p"}),
        "verify": json.dumps({"metrics": []}),
        "down": "",
    } | said
    check.run_all()
    return {step["name"]: step for step in json.loads((folder / "found.json").read_bytes())["steps"]}


@contextmanager
def answering(answer: dict[str, Any]) -> Iterator[str]:
    """Serve ``answer`` to every POST, as JSON; yield the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 2 * AT_ONCE

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


CHOICE = {"index": 0, "text": "Paris", "finish_reason": "length"}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"choices": [], "usage": {"completion_tokens": 16}}, "IndexError: "),
        ({"choices": [CHOICE], "usage": None}, "AttributeError: "),
        ({"error": "warming up"}, "TypeError: "),
    ],
)
def test_an_unexpected_answer_is_a_failed_step(tmp_path: Path, answer: dict[str, Any], problem: str) -> None:
    with answering(answer) as base_url:
        steps = steps_of(tmp_path, deploy=json.dumps({"base_url": base_url}))
    assert steps["conformance"]["problem"].startswith(problem)
    assert [name for name, step in steps.items() if not step["ok"]] == ["conformance"]
    assert list(steps) == ["installed", "profile", "deploy", "conformance", "accuracy", "end"]


def test_adapters_that_are_left_out_of_every_answer_fail(tmp_path: Path) -> None:
    with answering({"choices": [CHOICE], "usage": {"completion_tokens": 16}}) as base_url:
        said = {"deploy": json.dumps({"base_url": base_url}), "rm": "", "variant": "{}"}
        steps = steps_of(tmp_path, engine="tensorrt-llm", model="iserve-demo", **said)
    assert steps["adapters"]["problem"].count("Paris") == 3
    assert not steps["adapters"]["ok"]


@pytest.mark.parametrize(
    ("said", "failed", "problem"),
    [
        ({"engines": "[]"}, "installed", "ValueError: "),
        ({"engines": json.dumps([{"engine": "vllm"}])}, "installed", "KeyError: 'problem'"),
        ({"profile": "warming up"}, "profile", "JSONDecodeError: "),
        ({"profile": ""}, "profile", "JSONDecodeError: "),
    ],
)
def test_words_of_a_command_that_are_not_expected_are_a_failed_step(
    tmp_path: Path, said: dict[str, str], failed: str, problem: str
) -> None:
    steps = steps_of(tmp_path, **said)
    assert [name for name, step in steps.items() if not step["ok"]] == [failed]
    assert steps[failed]["problem"].startswith(problem)
    assert list(steps)[-2:] == [failed, "end"]
