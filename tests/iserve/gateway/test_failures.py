"""Outcomes of requests when workers, tables, clients or the gateway itself fail."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from iserve.route_table import GatewayLimits, WorkerTarget
from tests.waiting import PATIENCE_S

STREAM = {"model": "m", "prompt": "x", "stream": True}


def open_stream(
    gateway, receive_bytes: int | None = None, **fields
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    connection.connect()
    if receive_bytes is not None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    body = json.dumps({**STREAM, **fields})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def frames(body: bytes) -> list[str]:
    """Data of the SSE frames; the whole body must be frames."""
    assert body.endswith(b"\n\n")
    return [frame.removeprefix("data: ") for frame in body.decode().strip().split("\n\n")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def worker(gateway, make_worker, make_route):
    worker = make_worker()
    gateway.publish(make_route(worker.target()))
    return worker


class TestWorkerFails:
    @pytest.mark.parametrize("mode", ["die-mid-stream", "die-mid-frame", "no-done"])
    def test_cut_stream_ends_in_an_error_frame(self, gateway, worker, mode) -> None:
        """Whole frames, then one error, then the end; no [DONE]. A frame cut in the middle is not passed on."""
        worker.mode = mode
        cuts = gateway.metric('iserve_gateway_cut_streams_total{deployment="m"}')
        answer = gateway.complete(stream=True)
        data = frames(answer.body)
        good = [json.loads(item)["choices"][0]["text"] for item in data[:-1]]
        assert good == (["one ", "two ", "three"] if mode == "no-done" else ["one "])
        error = json.loads(data[-1])["error"]
        assert (error["type"], error["code"]) == ("server_error", "stream_cut")
        assert gateway.metric('iserve_gateway_cut_streams_total{deployment="m"}') == cuts + 1

    def test_the_workers_own_error_frame_is_the_last(self, gateway, worker) -> None:
        worker.mode = "own-error"
        data = frames(gateway.complete(stream=True).body)
        assert json.loads(data[-1])["error"]["message"] == "out of pages"
        assert sum("error" in item for item in data) == 1

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("mode", ["die", "busy", "die-before-frame"])
    def test_a_request_not_begun_is_sent_once_more_elsewhere(
        self, gateway, make_worker, make_route, mode, stream
    ) -> None:
        bad, good = make_worker(mode), make_worker()
        gateway.publish(make_route(bad.target("bad"), good.target("good")))
        for _ in range(2):  # whichever comes first
            answer = gateway.complete(stream=stream)
            assert answer.status == 200
            assert b"three" in answer.body
        assert len(good.bodies) == 2 or (not stream and mode == "die-before-frame")
        assert len(bad.bodies) <= 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_is_not_sent_a_third_time(self, gateway, make_worker, make_route, stream) -> None:
        """A request that kills its workers must not go round them all."""
        workers = [make_worker("die") for _ in range(3)]
        gateway.publish(make_route(*(w.target(f"w{i}") for i, w in enumerate(workers))))
        answer = gateway.complete(stream=stream)
        assert answer.status == 503
        assert answer.error["code"] == "worker_lost"
        assert int(answer.headers["retry-after"]) >= 1
        assert sum(len(worker.bodies) for worker in workers) == 2

    def test_refused_connection_is_retried_on_another(self, gateway, make_worker, make_route) -> None:
        dead = WorkerTarget(worker_id="dead", url=f"http://127.0.0.1:{free_port()}", ready=True)
        good = make_worker()
        gateway.publish(make_route(dead, good.target("good")))
        assert [gateway.complete().status for _ in range(6)] == [200] * 6
        assert len(good.bodies) == 6

    def test_nobody_left_is_503_with_retry_after(self, gateway, make_route) -> None:
        dead = WorkerTarget(worker_id="dead", url=f"http://127.0.0.1:{free_port()}", ready=True)
        gateway.publish(make_route(dead))
        answer = gateway.complete()
        assert (answer.status, answer.error["code"]) == (503, "no_ready_worker")
        assert answer.error["type"] == "server_error"
        assert int(answer.headers["retry-after"]) >= 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_worker_that_refuses_the_gateways_token_is_one_that_does_not_serve(
        self, gateway, make_worker, make_route, stream
    ) -> None:
        """The client's own key is in order; its 401 would say the opposite."""
        bad, good = make_worker("status-401"), make_worker()
        gateway.publish(make_route(bad.target("bad")))
        answer = gateway.complete(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "no_ready_worker")
        assert int(answer.headers["retry-after"]) >= 1
        gateway.publish(make_route(bad.target("bad"), good.target("good")))
        assert [gateway.complete(stream=stream).status for _ in range(4)] == [200] * 4

    def test_no_worker_at_all_is_503_at_once(self, gateway, make_route) -> None:
        gateway.publish(make_route())
        assert gateway.complete().error["code"] == "no_ready_worker"

    def test_a_foreign_error_page_becomes_an_openai_error(self, gateway, worker) -> None:
        worker.mode = "html"
        answer = gateway.complete()
        assert (answer.status, answer.error["code"]) == (500, "upstream_error")
        assert "oops" not in answer.error["message"]

    @pytest.mark.parametrize(("said", "answered"), [(422, 422), (204, 502), (302, 502), (700, 502)])
    def test_a_status_that_is_no_error_and_no_answer_is_the_gateways_502(
        self, gateway, worker, said, answered
    ) -> None:
        worker.mode = f"status-{said}"
        assert gateway.complete().status == answered

    def test_silence_is_bounded(self, gateway, make_worker, make_route) -> None:
        worker = make_worker("wait")
        gateway.publish(make_route(worker.target()), limits=GatewayLimits(upstream_timeout_s=1.5))
        assert (gateway.complete().status, gateway.complete().error["code"]) == (504, "upstream_timeout")
        worker.mode = "hold"
        assert "fell silent" in json.loads(frames(gateway.complete(stream=True).body)[-1])["error"]["message"]

    def test_a_malformed_chunk_does_not_hold_a_stream_for_ever(self, gateway, make_worker, make_route) -> None:
        worker = make_worker("bad-chunk")
        gateway.publish(make_route(worker.target()), limits=GatewayLimits(upstream_timeout_s=1.5))
        connection, response = open_stream(gateway)
        assert b"one" in response.readline()
        worker.go_on.set()
        data = frames(response.read().lstrip())
        assert json.loads(data[-1])["error"]["code"] == "stream_cut"
        connection.close()

    def test_a_complete_stream_ends_whatever_its_connection_does(self, gateway, worker, until) -> None:
        worker.mode = "done-hold"
        assert frames(gateway.complete(stream=True).body)[-1] == "[DONE]"
        until(
            lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 0, "its place is free"
        )


class TestRestart:
    def test_a_request_waits_for_a_worker_that_is_being_restarted(
        self, gateway, make_worker, make_route, until
    ) -> None:
        worker = make_worker()
        gateway.publish(make_route(worker.target(ready=False)))
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(gateway.complete)
            waiting = 'iserve_gateway_waiting_requests{deployment="m"}'
            until(lambda: gateway.metric(waiting) == 1, "the request waits")
            gateway.publish(make_route(worker.target(ready=True)))
            assert answer.result().status == 200

    def test_first_come_first_served_and_no_more_than_a_worker_takes(
        self, gateway, make_worker, make_route, until
    ) -> None:
        worker = make_worker("wait")
        gateway.publish(make_route(worker.target(max_outstanding=1)))
        with ThreadPoolExecutor(4) as pool:
            answers = []
            for number in range(4):
                answers.append(pool.submit(gateway.complete, prompt=str(number)))
                until(
                    lambda n=number: (
                        gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == n and worker.bodies
                    ),
                    "each has arrived before the next",
                )
            assert len(worker.bodies) == 1
            worker.go_on.set()
            assert [answer.result().status for answer in answers] == [200] * 4
        assert [json.loads(body)["prompt"] for body in worker.bodies] == ["0", "1", "2", "3"]

    def test_full_queue_is_429(self, gateway, make_worker, make_route, until) -> None:
        worker = make_worker("wait")
        gateway.publish(make_route(worker.target(max_outstanding=1)), limits=GatewayLimits(max_queue=1))
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(gateway.complete) for _ in range(2)]
            until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "one waits")
            refused = gateway.complete()
            assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            worker.go_on.set()
            assert [answer.result().status for answer in first] == [200, 200]

    def test_load_goes_to_the_least_loaded(self, gateway, make_worker, make_route, until) -> None:
        busy, free = make_worker("wait"), make_worker("wait")
        gateway.publish(make_route(busy.target("a"), free.target("b")))
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(gateway.complete) for _ in range(6)]
            until(lambda: len(busy.bodies) + len(free.bodies) == 6, "all have reached a worker")
            assert (len(busy.bodies), len(free.bodies)) == (3, 3)
            busy.go_on.set()
            free.go_on.set()
            assert all(answer.result().status == 200 for answer in answers)

    def test_a_deployment_that_is_removed_tells_those_who_wait(
        self, gateway, make_worker, make_route, until
    ) -> None:
        gateway.publish(make_route(make_worker().target(ready=False)))
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(gateway.complete)
            until(lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 1, "it waits")
            gateway.publish()
            assert (answer.result().status, answer.result().error["code"]) == (404, "model_not_found")


def test_a_client_that_reads_late_gets_all_of_it_and_the_gateway_holds_little(
    gateway, make_worker, make_route, until
) -> None:
    """Pieces go on at once until they would have to wait; then the worker is slowed down. None is overtaken."""
    words = tuple(f"{number} {'x' * 4096}" for number in range(5000))
    gateway.publish(make_route(make_worker(words=words).target()))
    tokens = 'iserve_gateway_completion_tokens_total{deployment="m"}'
    process, counted = psutil.Process(gateway.process.pid), gateway.metric(tokens)
    held_bytes = process.memory_info().rss
    connection, response = open_stream(gateway, stream_options={"include_usage": True}, receive_bytes=65_536)

    def is_full() -> bool:
        read = process.io_counters().read_chars
        time.sleep(0.2)
        return process.io_counters().read_chars == read

    until(is_full, "it reads no more of the worker")
    assert process.memory_info().rss - held_bytes < 8 * 2**20  # of 20 MiB
    *told, usage, done = frames(response.read())
    assert done == "[DONE]"
    assert [json.loads(item)["choices"][0]["text"] for item in told] == list(words)
    assert json.loads(usage)["usage"]["completion_tokens"] == 5
    until(lambda: gateway.metric(tokens) == counted + 5, "it has counted the usage once")
    connection.close()


class TestClientLeaves:
    def test_in_the_middle_of_a_stream(self, gateway, worker, until) -> None:
        worker.mode = "hold"
        connection, response = open_stream(gateway)
        assert b"one" in response.readline()
        response.close()
        connection.close()
        until(lambda: worker.cancelled == 1, "the worker's request is cancelled")
        until(
            lambda: gateway.metric('iserve_gateway_outstanding_requests{deployment="m"}') == 0, "its place is free"
        )

    def test_before_the_answer_begins(self, gateway, worker, until) -> None:
        worker.mode = "wait"
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            body = json.dumps({"model": "m", "prompt": "x"}).encode()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d"
            )
            client.sendall(head % len(body) + b"\r\n\r\n" + body)
            until(lambda: worker.bodies, "the request has reached the worker")
        until(lambda: worker.cancelled == 1, "the worker's request is cancelled")

    def test_having_sent_a_request_ahead(self, gateway, make_worker, make_route, until) -> None:
        worker = make_worker("trickle")
        gateway.publish(make_route(worker.target()))
        body = json.dumps(STREAM).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall((head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) * 2)
            assert client.recv(100)
        until(lambda: worker.cancelled == 1, "the worker's request is cancelled")
        assert len(worker.bodies) == 1

    def test_in_the_queue(self, gateway, make_worker, make_route, until) -> None:
        worker = make_worker()
        gateway.publish(make_route(worker.target(ready=False)))
        with pytest.raises(TimeoutError):
            gateway.ask("POST", "/v1/completions", {"model": "m", "prompt": "x"}, timeout_s=0.3)
        until(
            lambda: gateway.metric('iserve_gateway_waiting_requests{deployment="m"}') == 0, "it has left the queue"
        )
        gateway.publish(make_route(worker.target(ready=True)))
        assert gateway.complete().status == 200
        assert len(worker.bodies) == 1


class TestRoutes:
    def test_a_stream_outlives_its_route(self, gateway, make_worker, make_route) -> None:
        old, new = make_worker("hold"), make_worker(words=("new",))
        gateway.publish(make_route(old.target("old")))
        connection, response = open_stream(gateway)
        assert b"one" in response.readline()
        gateway.publish(make_route(new.target("new")))
        assert gateway.complete().json["choices"][0]["text"] == "new"
        old.go_on.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()

    def test_a_stream_outlives_its_deployment_and_leaves_no_series(
        self, gateway, make_worker, make_route, until
    ) -> None:
        worker = make_worker("hold")
        gateway.publish(make_route(worker.target()))
        connection, response = open_stream(gateway)
        gateway.publish()
        worker.go_on.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        until(lambda: b'deployment="m"' not in gateway.ask("GET", "/metrics").body, "its series are gone")

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b'{"version": 99', id="cut"),
            pytest.param(b"[]", id="not-a-table"),
            pytest.param(b"\xff\xfe", id="not-text"),
            pytest.param(b"[" * 100_000, id="deep"),
            pytest.param(None, id="gone"),
        ],
    )
    def test_a_table_that_cannot_be_read_changes_nothing(
        self, gateway, worker, make_route, until, content
    ) -> None:
        path = gateway.home / "run" / "routes.json"
        said = len(gateway.logged())
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        until(lambda: "stays in force" in gateway.logged()[said:], "the gateway has noticed")
        assert gateway.serves_version() == gateway.version
        assert gateway.complete().status == 200
        gateway.publish(make_route(worker.target(), name="next"))  # and the next good one is taken
        assert gateway.complete(model="next").status == 200

    @pytest.mark.parametrize(
        "url", ["https://127.0.0.1:1", "http://", "file:///etc/passwd", "http://h:1/x", "http://h:99999"]
    )
    def test_a_worker_url_of_another_kind_is_refused(self, gateway, worker, make_route, until, url) -> None:
        good = gateway.version
        bad = make_route(WorkerTarget(worker_id="w", url=url, ready=True))
        with pytest.raises(AssertionError, match="in vain"):
            gateway.publish(bad, patience_s=0.5)
        assert gateway.serves_version() == good

    def test_series_of_a_removed_deployment_are_dropped(self, gateway, worker, make_route) -> None:
        gateway.publish(make_route(worker.target(), name="gone-soon"))
        assert gateway.complete(model="gone-soon").status == 200
        assert b"gone-soon" in gateway.ask("GET", "/metrics").body
        gateway.publish(make_route(worker.target()))
        assert b"gone-soon" not in gateway.ask("GET", "/metrics").body


def test_many_at_once(gateway, make_worker, make_route) -> None:
    """Every answer reaches its own request, and none is lost."""
    workers = [make_worker(words=(f"w{i}",)) for i in range(2)]
    gateway.publish(*(make_route(w.target(), name=f"m{i}") for i, w in enumerate(workers)))
    start = threading.Barrier(16)

    def ask(number: int) -> str:
        start.wait()
        texts = {gateway.complete(model=f"m{number % 2}").json["choices"][0]["text"] for _ in range(5)}
        (text,) = texts
        return text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == ["w0", "w1"] * 8
