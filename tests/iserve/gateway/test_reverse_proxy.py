"""The documented nginx configuration: TLS, streaming, long bodies and refusals through a real nginx."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from iserve.keys import new_key
from iserve.route_table import ApiKeyRecord
from tests.iserve.gateway.conftest import REPO
from tests.waiting import PATIENCE_S, wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(
    NGINX is None or shutil.which("openssl") is None, reason="needs nginx and the openssl command"
)
# What the snippet is included in, with everything it writes in a folder of the test.
_AROUND = """\
{user}
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxied;
    fastcgi_temp_path unused-1;
    uwsgi_temp_path unused-2;
    scgi_temp_path unused-3;
    {snippet}
}}
"""


@dataclass
class Proxy:
    """nginx on a port of this machine, with a certificate for ``localhost`` that its client trusts."""

    port: int
    trust: ssl.SSLContext

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, timeout=PATIENCE_S, context=self.trust)


def documented() -> str:
    """The configuration as docs/operations.md shows it."""
    (snippet,) = re.findall(r"```nginx\n(.*?)```", (REPO / "docs" / "operations.md").read_text(), re.DOTALL)
    return str(snippet)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def proxy(gateway_process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    certificate, key = folder / "cert.pem", folder / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*request, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    snippet = documented()
    for ours, its in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "server 127.0.0.1:8080;": f"server 127.0.0.1:{gateway_process.port};",
        "/etc/ssl/certs/llm.example.com.pem": str(certificate),
        "/etc/ssl/private/llm.example.com.key": str(key),
        "http://127.0.0.1:8081": f"http://127.0.0.1:{gateway_process.port}",  # nothing else runs here
    }.items():
        assert snippet.count(ours) == 1, ours
        snippet = snippet.replace(ours, its)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(_AROUND.format(user=user, snippet=snippet))
    command = [str(NGINX), "-p", folder, "-c", folder / "nginx.conf", "-e", "stderr", "-g", "daemon off;"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:

        def listens() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(listens, "nginx listens")
            yield Proxy(port, ssl.create_default_context(cafile=certificate))
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def key() -> tuple[str, ApiKeyRecord]:
    return new_key("inference")


@pytest.fixture
def worker(gateway, make_worker, make_route, key):
    """The worker behind a gateway that wants ``key``."""
    worker = make_worker()
    gateway.publish(make_route(worker.target()), keys=(key[1],), auth_required=True)
    return worker


@pytest.fixture
def headers(key) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key[0]}"}


def test_tokens_come_as_the_worker_makes_them(proxy: Proxy, worker, headers) -> None:
    """The worker says its second word only when the first has arrived."""
    worker.mode = "hold"
    connection = proxy.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "m", "prompt": "x", "stream": True}), headers
    )
    response = connection.getresponse()
    assert response.status == 200
    assert b"one " in response.readline()
    worker.go_on.set()
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_client_that_leaves_ends_its_request(proxy: Proxy, worker, headers) -> None:
    worker.mode = "trickle"
    connection = proxy.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "m", "prompt": "x", "stream": True}), headers
    )
    connection.getresponse().readline()
    assert worker.cancelled == 0
    connection.sock.close()
    connection.close()
    wait_until(lambda: worker.cancelled == 1, "the worker is told")


def test_a_body_of_20_mib_passes_and_one_beyond_the_limit_is_refused(proxy: Proxy, worker, headers) -> None:
    for size, status in ((20 * 2**20, 200), (33 * 2**20, 413)):
        connection = proxy.connect()
        body = json.dumps({"model": "m", "prompt": "x" * size})
        try:
            connection.request("POST", "/v1/completions", body, headers)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            assert status == 413  # refused before all of it was sent
        assert connection.getresponse().status == status
        connection.close()


def test_keys_are_asked_for_and_what_is_not_passed_on_is_not_there(proxy: Proxy, worker, headers) -> None:
    connection = proxy.connect()
    for path, given, status in (
        ("/v1/models", headers, 200),
        ("/v1/models", {}, 401),
        ("/metrics", headers, 404),
        ("/readyz", {}, 404),
    ):
        connection.request("GET", path, headers=given)
        response = connection.getresponse()
        response.read()
        assert response.status == status, path
    connection.close()


def test_plain_http_is_refused(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 400
    connection.close()
