"""The daemon's HTTP face and its client, over a real daemon process."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

from daemon.client import DaemonClient
from daemon.home import make_home
from daemon.process import ProcessRecord, read_record, write_record
from daemon.server import MAX_BODY_BYTES, find_devices
from daemon.status import WorkerState
from fingerprint.codec import to_json
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    ConflictError,
    NoAnswerError,
    NotFoundError,
    UnavailableError,
)
from tests.waiting import PATIENCE_S, wait_until


def ask(node, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict]:
    record = read_record(node.home / "run" / "daemon.json")
    headers = {"Authorization": f"Bearer {record.token}"} | headers
    connection = http.client.HTTPConnection(record.url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


ROUTES = [
    ("GET", "/v1/node"),
    ("GET", "/v1/workers"),
    ("POST", "/v1/workers"),
    ("GET", "/v1/workers/w1"),
    ("DELETE", "/v1/workers/w1"),
    ("GET", "/v1/workers/w1/log"),
    ("GET", "/v1/workers/w1/log/part"),
    ("GET", "/nowhere"),
]


def test_every_route_wants_the_token(node):
    node.start()
    node.ready()
    token = read_record(node.home / "run" / "daemon.json").token
    for method, path in ROUTES:
        for header in (
            "",
            "Bearer ",
            "Bearer wrong",
            f"Basic {token}",
            token,
            f"Bearer {token}x",
            "Bearer \u00fc",
        ):
            status, body = ask(node, method, path, Authorization=header)
            assert (status, body["error"]) == (401, "BadInputError"), (method, path, header)
    assert ask(node, "GET", "/healthz", Authorization="") == (200, {"status": "ok"})
    assert node.client.worker("w1").state is WorkerState.READY


def test_the_node_describes_itself(node):
    node.start(node_id="left")
    status = node.client.node()
    assert status.node_id == "left"
    assert status.machine is None
    assert [(device.device_id, device.index, device.kind) for device in status.devices] == [
        ("cpu:0", 0, "cpu"),
        ("cpu:1", 1, "cpu"),
    ]
    for device in status.devices:
        assert 0 < device.free_bytes <= device.total_bytes
        assert device.cores
    assert status.workers == node.client.workers() == ()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        pytest.param("POST", "/v1/workers", b"{", 400, "BadInputError", id="not-json"),
        pytest.param("POST", "/v1/workers", b"[]", 400, "BadInputError", id="not-a-spec"),
        pytest.param("POST", "/v1/workers", b'{"worker_id": "w"}', 400, "BadInputError", id="fields-missing"),
        pytest.param("POST", "/v1/workers", b"\xff\xfe", 400, "BadInputError", id="not-utf-8"),
        pytest.param("POST", "/v1/workers", b" " * (MAX_BODY_BYTES + 1), 413, "BadInputError", id="too-large"),
        pytest.param("GET", "/v1/workers/nobody", b"", 404, "NotFoundError", id="no-worker"),
        pytest.param("DELETE", "/v1/workers/nobody", b"", 404, "NotFoundError", id="none-to-stop"),
        pytest.param("GET", "/v1/workers/nobody/log", b"", 404, "NotFoundError", id="no-log"),
        pytest.param("GET", "/v1/workers/..%2F..%2Frun/log", b"", 404, "NotFoundError", id="no-way-out"),
        pytest.param("GET", "/v1/nothing", b"", 404, "NotFoundError", id="no-route"),
        pytest.param("PATCH", "/v1/workers", b"", 405, "BadInputError", id="no-method"),
    ],
)
def test_a_bad_request_is_answered_as_one(calm_node, method, path, body, status, error):
    answered, document = ask(calm_node, method, path, body)
    assert (answered, document["error"]) == (status, error)
    assert isinstance(document["message"], str)
    assert document.keys() == {"error", "message"}


def test_a_number_of_log_lines_that_cannot_be_is_refused(node):
    node.start()
    node.ready()
    for lines in ("0", "-1", "ten", "10001", "9" * 5000, "\u0665"):
        status, document = ask(node, "GET", f"/v1/workers/w1/log?lines={quote(lines)}")
        assert (status, document["error"]) == (400, "BadInputError")
        assert len(document["message"]) < 200
    for position in ("1", "a:b", "-1:2", "1:2:3", "\u0665:1", "9" * 5000):
        status, document = ask(node, "GET", f"/v1/workers/w1/log/part?position={quote(position)}")
        assert (status, document["error"]) == (400, "BadInputError")
        assert len(document["message"]) < 200
    part = node.client.log_part("w1", lines=10_000)
    assert part.text.startswith("fake worker starts")
    assert node.client.log_part("w1", lines=1, position=part.position).text == ""
    assert node.client.log("w1", 10_000).startswith("fake worker starts")


def test_a_spec_that_contradicts_itself_is_refused_on_arrival(calm_node):
    body = json.loads(to_json(calm_node.spec()))
    body["config"]["pp"] = 2
    status, document = ask(calm_node, "POST", "/v1/workers", json.dumps(body).encode())
    assert (status, document["error"]) == (400, "ConfigError")
    assert "1 stages for pp=2" in document["message"]


def test_a_launch_is_created_and_starting(node):
    node.start()
    status, document = ask(node, "POST", "/v1/workers", to_json(node.spec()))
    assert (status, document["state"], document["restarts"]) == (201, "starting", 0)
    assert document["url"] == f"http://127.0.0.1:{document['spec']['port']}"


def test_two_launches_of_one_id_at_once_are_one_worker(node):
    node.start()
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(node, "POST", "/v1/workers", to_json(node.spec()))[0]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [201, 409, 409, 409, 409, 409]


def test_a_second_daemon_of_the_same_home_is_refused_in_one_line(node):
    node.start()
    before = (node.home / "run" / "daemon.json").read_bytes()
    second = subprocess.run(
        [sys.executable, "-m", "daemon", "--home", str(node.home), "--cpu-devices", "1"],
        capture_output=True,
        text=True,
        env=node.env,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "runs already" in second.stderr
    assert (node.home / "run" / "daemon.json").read_bytes() == before
    assert node.client.node().devices


def test_a_daemon_that_waits_for_its_home_ends_at_a_signal(node):
    # One that was killed may hold the lock for a while, with no living record.
    run = make_home(node.home, "run")
    with (run / "daemon.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "daemon", "--home", str(node.home), "--cpu-devices", "1"], env=node.env
        )
        files = Path("/proc") / str(process.pid) / "fd"
        wait_until(lambda: any(one.resolve() == run / "daemon.lock" for one in files.iterdir()), "it waits")
        process.terminate()
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def run_daemon(node, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "daemon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=node.env, timeout=PATIENCE_S, check=False)


def test_what_cannot_start_says_so_in_one_line(node, tmp_path):
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = run_daemon(node, "--home", str(node.home), "--cpu-devices", "1", "--port", port)
    assert (in_use.returncode, in_use.stderr.count("\n")) == (1, 1)
    assert "cannot listen" in in_use.stderr
    unwritable = run_daemon(node, "--home", str(tmp_path / "file" / "home"), "--cpu-devices", "1")
    assert (unwritable.returncode, unwritable.stderr.count("\n")) == (1, 1)
    assert "cannot write" in unwritable.stderr
    for arguments in (("--cpu-devices", "0"), ("--start-timeout", "0"), ("--start-timeout", "nan")):
        bad = run_daemon(node, "--home", str(node.home), *arguments)
        assert (bad.returncode, bad.stderr.count("\n")) == (1, 1)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "workers").touch()
    odd = run_daemon(node, "--home", str(tmp_path / "odd"), "--cpu-devices", "1")
    assert (odd.returncode, odd.stderr.count("\n")) == (1, 1)
    assert "cannot read" in odd.stderr
    assert run_daemon(node).returncode == 2


def test_the_record_of_a_killed_daemon_is_replaced_by_the_next(node):
    node.start()
    first = read_record(node.home / "run" / "daemon.json")
    node.signal_daemon(signal.SIGKILL)
    node.start()
    second = read_record(node.home / "run" / "daemon.json")
    assert second.pid != first.pid
    assert second.token != first.token


# --- the client ------------------------------------------------------------------------------------------------


def test_a_daemon_that_is_away_is_unavailable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = DaemonClient(f"http://127.0.0.1:{free.getsockname()[1]}", "token")
    with pytest.raises(UnavailableError, match="GET /v1/node"):
        client.node()


def test_a_daemon_that_hangs_is_unavailable_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = DaemonClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "token", timeout_s=0.2)
        with pytest.raises(UnavailableError, match="timed out"):
            client.workers()


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(BadInputError, match="URL"):
        DaemonClient(url, "token")


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        pytest.param(409, b'{"error": "ConflictError", "message": "taken"}', ConflictError, id="named"),
        pytest.param(400, b'{"error": "ConfigError", "message": "taken"}', ConfigError, id="named-finer"),
        pytest.param(404, b'{"error": "Surprise", "message": "taken"}', NotFoundError, id="unknown-name"),
        pytest.param(400, b'{"error": "to_json", "message": "taken"}', BadInputError, id="name-of-no-error"),
        pytest.param(500, b"taken, oops", UnavailableError, id="not-json"),
        pytest.param(503, b'{"error": "NoAnswerError", "message": "x"}', UnavailableError, id="of-one-behind"),
        pytest.param(200, b'{"what": "taken"}', NoAnswerError, id="nonsense"),
    ],
)
def test_answers_become_the_projects_errors(tmp_path, status, body, error):
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(error) as caught:
            DaemonClient(f"http://127.0.0.1:{server.server_port}", "token").node()
        thread.join()
    assert type(caught.value) is error


# --- what it takes ---------------------------------------------------------------------------------------------


def test_the_daemon_stays_light():
    """Neither torch nor the web stack of the control plane is imported."""
    code = "import sys, daemon.__main__, daemon.client; print(*sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, env=env)
    loaded = {name.split(".")[0] for name in modules.stdout.split()}
    assert "aiohttp" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "fastapi", "pydantic", "sqlalchemy", "sklearn"}


def test_where_there_is_no_gpu_the_cpu_is_two_devices(fake_nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    assert [device.device_id for device in find_devices(None).devices] == ["GPU-aaaa", "GPU-bbbb"]
    assert [device.device_id for device in find_devices(3).devices] == ["cpu:0", "cpu:1", "cpu:2"]
    fake_nvml.FAILING["nvmlInit", ""] = fake_nvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert [device.device_id for device in find_devices(None).devices] == ["cpu:0", "cpu:1"]


def test_a_record_is_for_whoever_can_read_it(tmp_path):
    record = ProcessRecord(pid=1, start_time_ticks=1, url="http://127.0.0.1:5", token="t")
    write_record(tmp_path / "daemon.json", record)
    assert read_record(tmp_path / "daemon.json") == record


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_a_body_nested_without_end_is_400(calm_node, opening):
    status, answer = ask(calm_node, "POST", "/v1/workers", opening * 100_000)
    assert (status, answer["error"]) == (400, "BadInputError")
    assert "Traceback" not in calm_node.daemon_log
