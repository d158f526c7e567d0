"""The gateway's process: signals, ports, limits of files, its record."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.iserve.gateway.test_failures import open_stream, worker
from tests.waiting import PATIENCE_S

__all__ = ["worker"]  # fixtures


@pytest.mark.process
class TestProcess:
    def test_killed_and_started_again_it_serves_at_once(self, own_gateway, make_worker, make_route) -> None:
        """The table lies on the disk, and no controller is there to help."""
        own_gateway.publish(make_route(make_worker().target()))
        port = own_gateway.port
        own_gateway.kill()
        own_gateway.start()
        assert own_gateway.port == port
        assert own_gateway.complete().status == 200

    def test_without_a_table_it_is_not_ready_and_serves_nobody(self, own_gateway) -> None:
        assert own_gateway.ask("GET", "/healthz").status == 200
        for path in ("/readyz", "/v1/models", "/metrics"):
            answer = own_gateway.ask("GET", path)
            assert (answer.status, answer.error["code"]) == (503, "not_ready")
            assert int(answer.headers["retry-after"]) >= 1
        assert own_gateway.complete().status == 503

    def test_sigterm_lets_streams_finish(self, own_gateway, make_worker, make_route, until) -> None:
        worker = make_worker("hold")
        own_gateway.publish(make_route(worker.target()))
        connection, response = open_stream(own_gateway)
        assert b"one" in response.readline()
        own_gateway.process.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            try:
                socket.create_connection(("127.0.0.1", own_gateway.port)).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refuses, "no new connection is taken")
        worker.go_on.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert own_gateway.process.wait(PATIENCE_S) == 0
        assert not (own_gateway.home / "run" / "gateway.json").exists()

    def test_after_its_grace_a_stream_ends_in_an_error_frame(
        self, tmp_path, own_gateway, make_worker, make_route
    ) -> None:
        own_gateway.stop()
        own_gateway.start("--grace", "0")
        worker = make_worker("hold")
        own_gateway.publish(make_route(worker.target()))
        connection, response = open_stream(own_gateway)
        assert b"one" in response.readline()
        own_gateway.process.send_signal(signal.SIGTERM)
        assert b"shutting down" in response.read()
        connection.close()
        assert own_gateway.process.wait(PATIENCE_S) == 0

    def test_a_port_in_use_is_exit_98_and_one_line(self, gateway, tmp_path) -> None:
        argv = [sys.executable, "-m", "iserve.gateway", "--home", str(tmp_path), "--port", str(gateway.port)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 98
        (line,) = done.stderr.splitlines()
        assert str(gateway.port) in line
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("port", ["-1", "65536", "http"])
    def test_a_port_that_is_none_is_a_usage_error(self, tmp_path, port) -> None:
        argv = [sys.executable, "-m", "iserve.gateway", "--home", str(tmp_path), "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr

    def test_it_serves_more_connections_than_the_soft_limit_of_files(
        self, tmp_path, own_gateway, make_worker, make_route
    ) -> None:
        own_gateway.stop()
        own_gateway.start(wrapper=("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"))
        own_gateway.publish(make_route(make_worker().target()))
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", own_gateway.port)))
            assert own_gateway.complete().status == 200

    def test_idle_connections_beyond_its_limit_give_way(self, own_gateway, make_worker, make_route) -> None:
        """A gateway whose clients take all its files could not reach a worker."""
        own_gateway.stop()
        own_gateway.start(wrapper=("sh", "-c", 'ulimit -n 320; exec "$@"', "sh"))
        own_gateway.publish(make_route(make_worker().target()))
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(socket.create_connection(("127.0.0.1", own_gateway.port)))
            assert own_gateway.complete().status == 200
            assert len(os.listdir(f"/proc/{own_gateway.process.pid}/fd")) < 320 - 100
        assert "out of system resource" not in own_gateway.logged()

    def test_an_address_that_is_not_ours_is_exit_1_and_one_line(self, tmp_path) -> None:
        argv = [sys.executable, "-m", "iserve.gateway", "--home", str(tmp_path), "--host", "192.0.2.1"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1

    def test_the_record_is_private_and_names_the_process(self, gateway) -> None:
        path = gateway.home / "run" / "gateway.json"
        record = json.loads(path.read_bytes())
        assert record["pid"] == gateway.process.pid
        assert urlsplit(record["url"]).port == gateway.port
        assert path.stat().st_mode & 0o777 == 0o600
