"""Conformance suite of engines: a worker and the engine protocol, whichever engine it is.

    class TestMine(EngineConformance):
        engine = "mine"

A real daemon with the real adapters launches real processes; an engine that cannot run here is a strict stand-in
for its server. Each class has one worker, and its tests run in their order: the last ones end it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from daemon.adapter_requests import LOAD_PATH, UNLOAD_PATH
from daemon.engines.registry import get_engine
from daemon.process import group_members
from daemon.procfs import processes
from daemon.status import WorkerState, WorkerStatus
from daemon.worker_spec import StageAssignment, WorkerLimits
from daemon.worker_stats import WorkerStats
from daemon.worker_token import TOKEN_FILE, authorization
from fingerprint.config import DeploymentConfig
from fingerprint.errors import IserveError
from tests.daemon.tiny_adapters import linears, write_tiny_adapter
from tests.waiting import PATIENCE_S, wait_until

LAYERS = 4  # of the tiny llama
CONTEXT = 64
LIMITS = WorkerLimits(
    max_batch=3,
    max_batched_tokens=64,
    max_context_tokens=CONTEXT,
    kv_tokens=3 * CONTEXT,
    memory_bytes_per_device=2**30,
)


def ask(url: str, path: str, body: object = None, *, token: str | None = None) -> tuple[int, bytes]:
    """Send one request over a plain connection."""
    headers = authorization(token)
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    try:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass
class Running:
    """A daemon with one ready worker."""

    node: Any
    status: WorkerStatus

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        status, data = ask(self.status.url, path, body, token=self.status.token)
        return status, json.loads(data) if data else None

    def stats(self) -> WorkerStats:
        status, data = self._stats()
        assert status == 200
        return get_engine(self.status.spec.config.engine).read_stats(self.status.spec, data)

    def take_a_step(self) -> None:
        """Answer a request, for an engine may have statistics from its first step on (TensorRT-LLM)."""
        assert self.ask("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2})[0] == 200
        wait_until(lambda: self._stats()[0] == 200, "it tells statistics")

    def _stats(self) -> tuple[int, bytes]:
        path = get_engine(self.status.spec.config.engine).stats_path
        return ask(self.status.url, path, token=self.status.token)

    def session(self) -> set[int]:
        """Every living process of the worker, its shim's included."""
        shim_pid = self.node.lease().shim_pid
        return {stat.pid for stat in processes() if stat.session_id == shim_pid}


@pytest.mark.smoke
class EngineConformance:
    """Laws of any engine; name it, and prepare the node."""

    engine: ClassVar[str]
    device: ClassVar[str] = "cpu:0"
    settings: ClassVar[dict[str, object]] = {}
    token_fields: ClassVar[dict[str, object]] = {}  # of a request, by which its answer's tokens are seen

    @pytest.fixture(scope="class")
    @classmethod
    def prepare(cls) -> Callable[[Any, Path], None]:
        """Called with the node, not started yet, and a folder."""
        return lambda _node, _folder: None

    @pytest.fixture(scope="class")
    @classmethod
    def running(
        cls,
        tmp_path_factory: pytest.TempPathFactory,
        tiny_checkpoint: Callable[[str], Path],
        make_node: Callable[[Path], Any],
        prepare: Callable[[Any, Path], None],
    ) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp(cls.engine)
        node = make_node(folder / "home")
        prepare(node, folder)
        shutil.copytree(tiny_checkpoint("llama"), node.checkpoint, dirs_exist_ok=True)
        try:
            node.start(real_engines=True, **cls.settings)
            node.client.launch(cls.spec(node))
            found = Running(node, node.wait("w1", WorkerState.READY))
            found.take_a_step()
            yield found
        finally:
            node.clear()

    @classmethod
    def spec(cls, node: Any, worker_id: str = "w1", **changes: object) -> Any:
        values: dict[str, object] = {
            "served_model": "tiny",
            "config": DeploymentConfig(engine=cls.engine, adapter_slots=2, adapter_rank=8),
            "stages": (StageAssignment(device_ids=(cls.device,), num_layers=LAYERS),),
            "limits": LIMITS,
        }
        return node.spec(worker_id, **(values | changes))

    def test_it_is_registered_under_its_name(self) -> None:
        assert get_engine(self.engine).name == self.engine

    # --- it serves ----------------------------------------------------------------------------------------------

    def test_a_ready_worker_is_healthy(self, running: Running) -> None:
        assert ask(running.status.url, "/health")[0] == 200
        assert running.status.url == f"http://127.0.0.1:{running.status.spec.port}"

    def test_its_model_goes_by_the_name_that_was_asked_for(self, running: Running) -> None:
        status, answer = running.ask("/v1/models")
        assert status == 200
        assert [model["id"] for model in answer["data"]] == ["tiny"]

    def test_a_prompt_of_token_ids_is_answered_and_counted(self, running: Running) -> None:
        wish = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        status, answer = running.ask("/v1/completions", wish)
        assert status == 200
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = answer["usage"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        assert counts == (3, 5, 8)

    def test_a_stream_ends_with_its_usage_and_done(self, running: Running) -> None:
        wish = {"model": "tiny", "prompt": [1, 2], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        wish |= {"stream": True, "stream_options": {"include_usage": True}}
        status, data = ask(running.status.url, "/v1/completions", wish, token=running.status.token)
        events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
        assert status == 200
        assert events[-1] == "[DONE]"
        last = json.loads(events[-2])
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4

    @pytest.mark.parametrize(
        ("wish", "status", "said"),
        [
            pytest.param({"model": "other", "prompt": [1]}, 404, "other", id="unknown-model"),
            pytest.param({"model": "tiny", "prompt": [1] * (CONTEXT + 1)}, 400, str(CONTEXT), id="long-prompt"),
            pytest.param(
                {"model": "tiny", "prompt": [1] * 10, "max_tokens": CONTEXT}, 400, str(CONTEXT), id="long-answer"
            ),
            pytest.param({"model": "tiny", "prompt": []}, 400, "prompt", id="no-prompt"),
        ],
    )
    def test_a_refusal_is_an_openai_error(
        self, running: Running, wish: dict[str, object], status: int, said: str
    ) -> None:
        got, answer = running.ask("/v1/completions", wish)
        assert got == status
        assert said in answer["error"]["message"]
        assert {"message", "type", "param", "code"} <= set(answer["error"])

    @pytest.mark.parametrize("token", [None, "", "wrong"])
    def test_inference_needs_the_token_that_its_gateway_has(self, running: Running, token: str | None) -> None:
        """Keys that are required cannot be evaded at the worker, nor can a web page use it elsewhere."""
        wish = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
        url = running.status.url
        assert ask(url, "/v1/completions", wish, token=token)[0] == 401
        assert ask(url, "/v1/chat/completions", wish, token=token)[0] == 401
        assert ask(url, "/v1/models", token=token)[0] == 401
        assert ask(url, "/invocations", wish, token=token)[0] == 401  # vLLM's own key leaves it open
        assert ask(url, get_engine(self.engine).stats_path, token=token)[0] == 401
        assert ask(url, "/health", token=token)[0] == 200

    def test_its_token_is_on_no_command_line_and_in_no_file_that_others_read(self, running: Running) -> None:
        token = running.status.token
        assert token is not None
        for stat in processes():
            with contextlib.suppress(OSError):
                assert token.encode() not in Path(f"/proc/{stat.pid}/cmdline").read_bytes()
        told = [
            path for path in running.node.home.rglob("*") if path.is_file() and token in path.read_text("latin1")
        ]
        assert [path.name for path in told] == [TOKEN_FILE]
        assert told[0].stat().st_mode & 0o077 == 0

    # --- it keeps what it was launched with, and tells how it is ------------------------------------------------

    def test_its_cache_has_the_room_that_was_planned_and_not_much_more(self, running: Running) -> None:
        stats = running.stats()
        slack = (LIMITS.max_batch + 1) * 16  # each sequence's last block is partly empty
        assert LIMITS.kv_tokens <= stats.kv_tokens_total <= LIMITS.kv_tokens + slack
        assert stats.kv_tokens_free == stats.kv_tokens_total

    def test_what_it_did_is_in_its_statistics(self, running: Running) -> None:
        before = running.stats()
        wish = {"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        assert running.ask("/v1/completions", wish)[0] == 200
        # An engine may account for its last step a moment after it has answered.
        wait_until(lambda: running.stats().output_tokens - before.output_tokens >= 6, "its tokens are counted")
        after = running.stats()
        assert after.model == "tiny"
        assert after.prompt_tokens - before.prompt_tokens == 4
        assert after.output_tokens - before.output_tokens == 6
        assert after.steps > before.steps
        assert (after.running, after.waiting) == (0, 0)

    def test_more_requests_than_it_may_run_are_all_answered(self, running: Running) -> None:
        wish = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: running.ask("/v1/completions", wish), range(8)))
        assert [status for status, _ in answers] == [200] * 8

    def test_versions_are_recorded_without_loading_it(self, running: Running, monkeypatch: Any) -> None:
        for name, value in running.node.extra_env.items():
            monkeypatch.setenv(name, value)
        versions = dict(get_engine(self.engine).versions())
        assert versions["engine"].startswith(f"{self.engine} ")
        assert versions["engine"].split()[1]

    # --- it serves adapters next to the base --------------------------------------------------------------------

    def test_an_adapter_is_loaded_answers_and_is_unloaded(self, running: Running, tmp_path: Path) -> None:
        folder = write_tiny_adapter(tmp_path / "style", linears(running.node.checkpoint), 8, seed=1)
        load = {"lora_name": "style@0123456789abcdef", "lora_path": str(folder)}
        name, url = load["lora_name"], running.status.url
        wish = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True} | self.token_fields

        def text(model: str) -> tuple[int, str, str]:
            status, answer = running.ask("/v1/completions", wish | {"model": model})
            return (status, answer["model"], str(answer["choices"])) if status == 200 else (status, "", "")

        def send(path: str, body: object) -> int:
            return ask(url, path, body, token=running.status.token)[0]

        assert ask(url, LOAD_PATH, load)[0] == 401
        assert text(name)[0] == 404
        assert (send(LOAD_PATH, load), send(LOAD_PATH, load)) == (200, 400)
        base, own = text("tiny"), text(name)
        assert (base[:2], own[:2]) == ((200, "tiny"), (200, name))
        assert own[2] != base[2]
        assert text(name) == own
        models = running.ask("/v1/models")[1]["data"]
        assert [(one["id"], one.get("parent")) for one in models] == [("tiny", None), (name, "tiny")]
        assert [send(UNLOAD_PATH, {"lora_name": name}) for _ in range(2)] == [200, 404]
        assert (text(name)[0], text("tiny")) == (404, base)

    # --- it ends ------------------------------------------------------------------------------------------------

    def test_a_port_that_somebody_else_has_is_not_shared(self, running: Running) -> None:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as vLLM does
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            running.node.client.launch(self.spec(running.node, "w2", port=port))
            status = running.node.wait("w2", WorkerState.FAILED)
        assert status.restarts == 0
        assert "port" in status.error
        assert "in use" in status.error
        running.node.client.stop("w2")

    def test_killed_it_is_started_again_and_nothing_of_the_first_is_left(self, running: Running) -> None:
        before, old = running.status, running.session()
        os.kill(before.pid, signal.SIGKILL)
        running.status = running.node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
        assert running.status.restarts == 1
        assert not old & {stat.pid for stat in processes()}
        assert ask(running.status.url, "/health")[0] == 200

    def test_stopped_it_leaves_no_process_and_no_listener(self, running: Running) -> None:
        old = running.session()
        assert len(old) >= 2
        stopped = running.node.client.stop("w1")
        assert (stopped.state, stopped.error) == (WorkerState.STOPPED, None)
        assert not old & {stat.pid for stat in processes()}
        assert group_members(running.status.pid) == ()
        with pytest.raises(ConnectionRefusedError):
            ask(running.status.url, "/health")

    def test_a_checkpoint_that_is_none_is_refused_or_fails_once(self, running: Running, tmp_path: Path) -> None:
        """Engines differ in when they read it; none tries again what cannot be."""
        (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        said = ""
        try:
            running.node.client.launch(self.spec(running.node, "bad", checkpoint=str(tmp_path)))
            status = running.node.wait("bad", WorkerState.FAILED)
            assert status.restarts == 0
            said = status.error
        except IserveError as error:
            said = str(error)
        with contextlib.suppress(IserveError):
            running.node.client.stop("bad")
        assert any(cause in said for cause in ("num_hidden_layers", "safetensors")), said
