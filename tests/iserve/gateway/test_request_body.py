"""Limits of a request, over real sockets, and the depth scan by itself."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserve.gateway.errors import ApiError
from iserve.gateway.http_server import HEADER_TIMEOUT_S, STALLED_CLIENT_S
from iserve.gateway.request_body import BODY_TIMEOUT_S, RequestHead, num_prompts, parse_head, too_deep
from iserve.keys import new_key
from iserve.route_table import GatewayLimits
from tests.waiting import PATIENCE_S

SMALL = GatewayLimits(max_body_bytes=4096)
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def worker(gateway, make_worker, make_route):
    worker = make_worker()
    gateway.publish(make_route(worker.target()), limits=SMALL)
    return worker


def talk(gateway, *parts: bytes) -> bytes:
    """Everything the gateway says, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as client:
        try:
            for part in parts:
                client.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        said = b""
        while True:
            try:
                data = client.recv(65536)
            except ConnectionResetError:
                return said
            if not data:
                return said
            said += data


def trickle(gateway, first: bytes) -> bytes:
    """Return what it answers within 20 s to a client that goes on with a byte every half second."""
    over = threading.Event()

    def go_on(client: socket.socket) -> None:
        for _ in range(50):
            if over.wait(0.5):
                return
            client.sendall(b"x")

    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as client:
        client.sendall(first)
        sender = threading.Thread(target=go_on, args=(client,))
        sender.start()
        try:
            said = client.recv(65536)
        finally:
            over.set()
            sender.join()
    return said


class TestBody:
    @pytest.mark.parametrize(
        ("body", "code", "param"),
        [
            pytest.param(b"", "invalid_json", None, id="empty"),
            pytest.param(b"{", "invalid_json", None, id="cut"),
            pytest.param(b'{"model": "m"} x', "invalid_json", None, id="trailing"),
            pytest.param(b"[1]", "invalid_json", None, id="no-object"),
            pytest.param(b"\x80", "invalid_json", None, id="no-text"),
            pytest.param(b'{"model": "m", "a": ' + b"[" * 3000, "invalid_json", None, id="deep-and-open"),
            pytest.param(
                b'{"model": "m", "a": ' + b"[" * 70 + b"]" * 70 + b"}", "json_too_complex", None, id="deep"
            ),
            pytest.param(b"{}", "invalid_value", "model", id="no-model"),
            pytest.param(b'{"model": 3}', "invalid_value", "model", id="model-a-number"),
            pytest.param(b'{"model": ["m"]}', "invalid_value", "model", id="model-a-list"),
            pytest.param(b'{"model": "m", "stream": "yes"}', "invalid_value", "stream", id="stream-a-string"),
            pytest.param(b'{"model": "m", "stream_options": 1}', "invalid_value", "stream_options", id="options"),
        ],
    )
    def test_bad_body_is_400(self, gateway, worker, body, code, param) -> None:
        answer = gateway.ask("POST", "/v1/completions", body)
        assert answer.status == 400
        assert (answer.error["type"], answer.error["code"], answer.error["param"]) == (
            "invalid_request_error",
            code,
            param,
        )
        assert worker.bodies == []

    def test_the_body_goes_on_as_it_came(self, gateway, worker) -> None:
        """Byte for byte: no field is reordered, rounded or lost."""
        body = (
            b'{ "prompt": "\\u00e9 [{", "temperature":0.10000000000000000001,\n "model" : "m", "x": {"y": [[]]} }'
        )
        assert gateway.ask("POST", "/v1/completions", body).status == 200
        assert worker.bodies == [body]

    def test_the_largest_body_is_served_and_one_byte_more_is_413(self, gateway, worker) -> None:
        body = b'{"model": "m", "prompt": "%s"}'
        most = body % (b"x" * (4096 - len(body % b"")))
        assert gateway.ask("POST", "/v1/completions", most).status == 200
        answer = gateway.ask("POST", "/v1/completions", most + b" ")
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert "4096" in answer.error["message"]
        assert worker.bodies == [most]

    def test_an_oversized_body_is_counted_when_its_length_is_not_said(self, gateway, worker) -> None:
        chunk = b"400\r\n" + b"x" * 0x400 + b"\r\n"
        said = talk(
            gateway,
            JSON_HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
            *([chunk] * 8),
        )  # and its end never arrives
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b"body_too_large" in said

    def test_a_client_that_sends_all_of_a_far_too_large_body_still_reads_why(self, gateway, worker) -> None:
        answer = gateway.ask("POST", "/v1/completions", b"x" * 20_000_000)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")

    def test_32_mib_are_the_limit_where_nothing_else_is_said(self, gateway, worker, make_route) -> None:
        gateway.publish(make_route(worker.target()))
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        said = talk(gateway, JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *([chunk] * 33))  # and no end
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b"33554432" in said
        assert worker.bodies == []

    @pytest.mark.parametrize(("levels", "status"), [(64, 200), (65, 400)])
    def test_64_levels_are_the_limit(self, gateway, worker, levels, status) -> None:
        nested = b"[" * (levels - 1) + b"]" * (levels - 1)
        body = b'{"model": "m", "prompt": "x", "a": ' + nested + b"}"
        assert gateway.ask("POST", "/v1/completions", body).status == status

    @pytest.mark.parametrize("prompt", ["x", [1, 2]])
    def test_128_prompts_are_the_limit(self, gateway, worker, prompt) -> None:
        assert gateway.complete(prompt=[prompt] * 128).status == 200
        answer = gateway.complete(prompt=[prompt] * 129)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "too_many_prompts", "prompt")
        assert "129" in answer.error["message"]
        assert len(worker.bodies) == 1

    @pytest.mark.parametrize("name", ["n", "best_of"])
    def test_128_answers_are_the_limit_too(self, gateway, worker, name) -> None:
        assert gateway.complete(prompt=["x"] * 64, **{name: 2}).status == 200
        assert gateway.complete(**{name: None}).status == 200
        for prompt, number in ((["x"] * 64, 3), ("x", 129), ("x", 10**30)):
            answer = gateway.complete(prompt=prompt, **{name: number})
            assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "too_many_answers", name)
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], name: 129}
        assert gateway.ask("POST", "/v1/chat/completions", chat).error["code"] == "too_many_answers"

    @pytest.mark.parametrize("number", ["9999", 9999.0, True, [1]])
    def test_a_number_of_answers_is_a_whole_number(self, gateway, worker, number) -> None:
        answer = gateway.complete(n=number)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "n")

    def test_only_json_is_taken(self, gateway, worker) -> None:
        """A form or plain text is what a web page may send to a loopback address unasked."""
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            body = b'{"model": "m", "prompt": "x"}'
            answer = gateway.ask("POST", "/v1/completions", body, {"Content-Type": kind})
            assert answer.status == 415
        assert worker.bodies == []

    @pytest.mark.long
    def test_a_slow_body_is_cut_off(self, gateway, worker) -> None:
        said = trickle(gateway, JSON_HEAD + b"Content-Length: 100\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in said

    @pytest.mark.long
    def test_a_half_sent_header_is_cut_off(self, gateway, worker) -> None:
        said = trickle(gateway, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half")
        assert said.startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            said = b""
            while not said.endswith(b'{"status":"ok"}'):
                said += client.recv(65536)
            client.sendall(b"GET /hea")  # half of a second request
            assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert talk(gateway) == b""  # a connection that never asks is closed too


def test_all_slow_clients_have_ten_seconds() -> None:
    """For a head, for a body (and a second more per 64 KiB of it), and to take what waits for them."""
    assert (HEADER_TIMEOUT_S, BODY_TIMEOUT_S, STALLED_CLIENT_S) == (10, 10, 10)


class TestHeaders:
    @pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 431)])
    def test_64_kib_of_headers_are_taken(self, gateway, worker, more, status) -> None:
        """The limit is of a whole head; names and values alone may not be more either."""
        line, rest = b"GET /v1/models HTTP/1.1\r\n", b"Host: x\r\nConnection: close\r\nX-Big: %b\r\n\r\n"
        beside = len(line + rest) - 2 if not more else len(b"hostxconnectioncloseX-Big")
        said = talk(gateway, line + rest % (b"a" * (65_536 + more - beside)))
        assert said.startswith(b"HTTP/1.1 %d " % status)

    @pytest.mark.parametrize("num_bytes", [70_000, 5_000_000])
    def test_a_giant_header_is_431(self, gateway, worker, num_bytes) -> None:
        said = talk(gateway, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: ", b"a" * num_bytes, b"\r\n\r\n")
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")  # b"": it was reset while still sending
        assert gateway.ask("GET", "/v1/models").status == 200

    @pytest.mark.parametrize("num_bytes", [65_536, 70_000, 5_000_000])
    def test_a_giant_url_is_414(self, gateway, worker, num_bytes) -> None:
        said = talk(gateway, b"GET /v1/models?" + b"a" * num_bytes, b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert said == b"" or said.startswith(b"HTTP/1.1 414 ")  # b"": it was reset while still sending
        assert gateway.ask("GET", "/v1/models").status == 200

    @pytest.mark.parametrize("trailer", [b"X-Big: " + b"a" * 3_000_000, b"X: a\r\n" * 500_000])
    def test_trailers_are_bounded_too(self, gateway, worker, trailer) -> None:
        said = talk(
            gateway,
            JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
            *(trailer[start : start + 100_000] for start in range(0, len(trailer), 100_000)),
        )
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
        assert worker.bodies == []

    @pytest.mark.parametrize(
        "head",
        [
            pytest.param(b"GET /healthz HTTP/1.1\r\n", id="no-host"),
            pytest.param(b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n", id="two-hosts"),
            pytest.param(JSON_HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n", id="two-lengths"),
            pytest.param(JSON_HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", id="two-framings"),
            pytest.param(JSON_HEAD + b"Content-Length: -5\r\n", id="negative-length"),
            pytest.param(JSON_HEAD + b"X : a\r\n", id="space-before-the-colon"),
            pytest.param(JSON_HEAD + b"X: a\r\n b\r\n", id="folded"),
            pytest.param(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n", id="connect"),
        ],
    )
    def test_ambiguous_heads_are_400(self, gateway, worker, head) -> None:
        """Text that two readers could understand differently lets requests be smuggled past one of them."""
        assert talk(gateway, head + b"\r\n").startswith(b"HTTP/1.1 400 ")

    def test_a_malformed_chunk_of_the_body_is_400(self, gateway, worker) -> None:
        said = talk(gateway, JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\nno size\r\n")
        assert said.startswith(b"HTTP/1.1 400 ")
        assert worker.bodies == []

    @pytest.mark.parametrize("framing", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n"])
    def test_a_wish_for_another_protocol_is_passed_over(self, gateway, worker, framing) -> None:
        """Java's client asks every http:// server for HTTP/2, and sends the body along."""
        body = b'{"model": "m", "prompt": "x"}'
        rest = framing % (len(body), body) if b"%" in framing else framing + b"%x\r\n%b\r\n0\r\n\r\n" % (29, body)
        for cut in (0, 5, rest.index(b"{") + 3):
            wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAA\r\n"
            said = talk(gateway, JSON_HEAD + wish + rest[:cut], rest[cut:])
            assert said.startswith(b"HTTP/1.1 200 ")
            assert worker.bodies.pop() == body

    def test_nor_does_it_hide_a_malformed_body(self, gateway, worker) -> None:
        wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert talk(gateway, JSON_HEAD + wish, b"no size\r\n").startswith(b"HTTP/1.1 400 ")
        said = talk(
            gateway, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert said.startswith(b"HTTP/1.1 200 ")

    def test_a_request_is_the_same_however_it_is_cut(self, gateway, worker) -> None:
        body = b'{"model": "m", "prompt": "x"}'
        chunks = b"3\r\n%b\r\n1a;a=b\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (body[:3], body[3:])
        whole = JSON_HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        for place in range(1, len(whole)):
            assert talk(gateway, whole[:place], whole[place:]).startswith(b"HTTP/1.1 200 "), whole[:place]
        assert set(worker.bodies) == {body}

    def test_requests_sent_ahead_are_answered_in_turn(self, gateway, worker) -> None:
        asked = [b'{"model": "m", "prompt": "%d"}' % number for number in range(5)]
        sent = b"".join(JSON_HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in asked)
        said = talk(gateway, sent + b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert said.count(b"HTTP/1.1 200 ") == 5
        assert said.rindex(b"HTTP/1.1 200 ") < said.index(b"HTTP/1.1 404 ")
        assert worker.bodies == asked

    def test_many_headers_together_too(self, gateway, worker) -> None:
        answer = gateway.ask("GET", "/v1/models", headers={f"X-{i}": "a" * 1000 for i in range(66)})
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")

    def test_what_is_not_http_is_400(self, gateway, worker) -> None:
        said = talk(gateway, b"\x16\x03\x01\x02\x00 tls?\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"

    def test_request_id_is_the_clients_own_or_a_new_one(self, gateway, worker) -> None:
        body = {"model": "m", "prompt": "x"}
        own = gateway.ask("POST", "/v1/completions", body, {"X-Request-Id": "abc-1"})
        assert own.headers["x-request-id"] == "abc-1"
        odd = gateway.ask("POST", "/v1/completions", body, {"X-Request-Id": "a b\tc" * 50})
        assert odd.headers["x-request-id"].startswith("req-")
        assert worker.request_ids == ["abc-1", odd.headers["x-request-id"]]

    def test_the_clients_key_does_not_reach_the_worker(self, gateway, worker, make_route) -> None:
        """The worker is sent three headers of ours, none of the client's."""
        key, record = new_key()
        gateway.publish(make_route(worker.target()), keys=(record,), auth_required=True)
        body = {"model": "m", "prompt": "x"}
        assert gateway.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"}).status == 200
        assert "authorization" not in worker.header_names[-1]


class TestPaths:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/healthz", 405),
            ("POST", "/metrics", 405),
            ("GET", "/", 404),
            ("GET", "/v1", 404),
            ("GET", "/v1/embeddings", 404),
            ("GET", "//v1/models", 404),
            ("GET", "/v1/models/../../metrics", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/v1/models?x=1", 200),
            ("HEAD", "/healthz", 200),
        ],
    )
    def test_status(self, gateway, worker, method, path, status) -> None:
        answer = gateway.ask(method, path)
        assert answer.status == status
        if status >= 400:
            assert answer.error["type"] == "invalid_request_error"
        assert ("allow" in answer.headers) == (status == 405)

    @pytest.mark.parametrize(
        "headers",
        [
            pytest.param({}, id="none"),
            pytest.param({"Authorization": "Bearer isk-wrong"}, id="wrong"),
            pytest.param({"Authorization": "Bearer"}, id="empty"),
            pytest.param({"Authorization": "Basic KEY"}, id="other-scheme"),
            pytest.param({"X-Api-Key": "KEY"}, id="other-header"),
            pytest.param({"Host": "127.0.0.1/healthz?"}, id="odd-host"),
        ],
    )
    def test_closed_by_default(self, gateway, make_route, headers) -> None:
        key, record = new_key()
        gateway.publish(make_route(), keys=(record,), auth_required=True)
        sent = {name: value.replace("KEY", key) for name, value in headers.items()}
        for path in ("/v1/models", "/v1/models/m", "/metrics", "/", "/v1/chat/completions", "/healthz/"):
            answer = gateway.ask("GET", path, headers=sent)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
        assert gateway.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200
        assert gateway.ask("GET", "/v1/models", headers={"Authorization": f"bearer {key}"}).status == 200
        assert gateway.ask("GET", "/healthz").status == 200
        assert gateway.ask("GET", "/readyz").status == 200

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost:8080", 200),
            ("127.0.0.1:8080", 200),
            ("[::1]:8080", 200),
            ("app.localhost", 200),
            ("workstation:8080", 200),
            ("10.0.0.7", 200),
            ("evil.example", 403),
            ("evil.example:8080", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost.evil.example.", 403),
            ("[::1", 403),
        ],
    )
    def test_without_keys_no_foreign_name_is_answered(self, gateway, worker, host, status) -> None:
        """A web page whose name was made to lead here would otherwise read the answers (DNS rebinding)."""
        answer = gateway.ask("GET", "/v1/models", headers={"Host": host})
        assert answer.status == status
        if status == 403:
            assert answer.error["code"] == "host_not_allowed"
            body = {"model": "m", "prompt": "x"}
            assert gateway.ask("POST", "/v1/completions", body, {"Host": host}).status == 403
            assert worker.bodies == []

    def test_with_keys_any_name_is_answered(self, gateway, make_route) -> None:
        """A client with a key is no stranger, and behind a proxy the name is the proxy's."""
        key, record = new_key()
        gateway.publish(make_route(), keys=(record,), auth_required=True)
        headers = {"Host": "llm.example", "Authorization": f"Bearer {key}"}
        assert gateway.ask("GET", "/v1/models", headers=headers).status == 200


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\a,:'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\'), inner, max_size=4),
    max_leaves=40,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


TEXTS = st.text(alphabet='[]{}"\\a,:')
TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=5)


class TestPrompts:
    @given(prompts=st.lists(TEXTS, min_size=1, max_size=9) | st.lists(TOKENS, min_size=1, max_size=9))
    def test_a_list_has_its_length(self, prompts) -> None:
        assert num_prompts(raw(prompts)) == len(prompts)

    @given(prompt=TEXTS | TOKENS)
    def test_a_text_or_a_list_of_tokens_is_one(self, prompt) -> None:
        assert num_prompts(raw(prompt)) == 1

    def test_millions_are_counted_not_built(self) -> None:
        body = b'{"model": "m", "prompt": [' + b",".join([b'""'] * 5_000_000) + b"]}"
        tracemalloc.start()
        try:
            with pytest.raises(ApiError, match="5000000 prompts"):
                parse_head(body)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
        finally:
            tracemalloc.stop()


def raw(value: object) -> msgspec.Raw:
    return msgspec.json.decode(json.dumps({"prompt": value}).encode(), type=RequestHead).prompt


class TestDepth:
    @given(value=NESTED, limit=st.integers(0, 6))
    def test_scan_agrees_with_the_tree(self, value, limit) -> None:
        assert too_deep(json.dumps(value).encode(), limit) == (depth(value) > limit)

    def test_limit_is_64_levels(self) -> None:
        def body(levels: int) -> bytes:
            return b'{"model": "m", "a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

        assert parse_head(body(64)).model == "m"
        with pytest.raises(ApiError, match="64 levels"):
            parse_head(body(65))

    def test_brackets_in_text_are_text(self) -> None:
        text = '[{"a": "\\' * 1000
        assert parse_head(json.dumps({"model": "m", "prompt": text}).encode()).model == "m"

    @pytest.mark.parametrize("piece", [b"[]", b'""'])
    def test_too_many_parts_are_refused(self, piece) -> None:
        pieces = [b"[]"] * 70 + [piece] * 1_100_000  # 70 arrays, so that the scan does not stop at its first look
        body = b'{"model": "m", "a": [' + b",".join(pieces) + b"]}"
        with pytest.raises(ApiError, match="too many parts"):
            parse_head(body)
