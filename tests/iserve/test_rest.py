"""The REST API over real sockets: authorisation, answers to bad bodies, one shape of errors, two claims to one
name.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden_words import Golden

DEMO = "iserve-demo"
JSON = {"Content_Type": "application/json"}
ROUTES = [
    ("GET", "/api/v1/models"),
    ("POST", "/api/v1/models"),
    ("DELETE", "/api/v1/models/no-such"),
    ("GET", "/api/v1/variants"),
    ("POST", "/api/v1/variants"),
    ("GET", "/api/v1/variants/no-such"),
    ("GET", "/api/v1/variants/no-such/progress"),
    ("PATCH", "/api/v1/variants/no-such"),
    ("DELETE", "/api/v1/variants/no-such"),
    ("GET", "/api/v1/quality"),
    ("POST", "/api/v1/quality"),
    ("GET", "/api/v1/profiles"),
    ("POST", "/api/v1/profiles"),
    ("GET", "/api/v1/profiles/jobs/no-such"),
    ("POST", "/api/v1/plans"),
    ("POST", "/api/v1/plans/launch"),
    ("GET", "/api/v1/deployments"),
    ("POST", "/api/v1/deployments"),
    ("GET", "/api/v1/deployments/no-such"),
    ("GET", "/api/v1/deployments/no-such/plan"),
    ("GET", "/api/v1/deployments/no-such/log"),
    ("GET", "/api/v1/deployments/no-such/log/part"),
    ("DELETE", "/api/v1/deployments/no-such"),
    ("PATCH", "/api/v1/deployments/no-such"),
    ("GET", "/api/v1/verifications"),
    ("POST", "/api/v1/verifications"),
    ("GET", "/api/v1/verifications/jobs/no-such"),
    ("DELETE", "/api/v1/verifications"),
    ("GET", "/api/v1/nodes"),
    ("GET", "/api/v1/engines"),
    ("GET", "/api/v1/serving"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/keys"),
    ("POST", "/api/v1/keys"),
    ("DELETE", "/api/v1/keys/no-such"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
]


@pytest.fixture(scope="module")
def home(shared_home: Any) -> Any:
    shared_home.run("up")
    return shared_home


@pytest.fixture(scope="module")
def keys(home: Any) -> dict[str, str]:
    made = {scope: home.run("keys", "create", "--scope", scope).stdout.strip() for scope in ("admin", "inference")}
    revoked = home.controller().post("/api/v1/keys", {"scope": "admin"}, dict[str, str])
    home.run("keys", "revoke", revoked["key_id"])
    return made | {"revoked": revoked["key"], "home": home.record("controller").token}


@pytest.fixture
def ask(home: Any, keys: dict[str, str], request_to: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``ask(method, path, body, key=...)`` with the admin key by default."""
    url = home.record("controller").url

    def send(
        method: str, path: str, body: object = None, *, token: str | None = keys["admin"], **headers: str
    ) -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return request_to(url, method, path, token=token, body=data, **(JSON | headers))

    return send


def test_every_route_is_listed_here(home: Any) -> None:
    schema = home.get("/openapi.json")
    known = {(m.upper(), p) for p, methods in schema["paths"].items() for m in methods}
    tested = {(m, p.replace("/no-such", "/{}")) for m, p in ROUTES}
    variables = {(m, "/".join("{}" if part.startswith("{") else part for part in p.split("/"))) for m, p in known}
    assert variables - {("GET", "/healthz"), ("GET", "/readyz")} == tested - {("GET", "/openapi.json")}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_the_homes_token_and_admin_keys_are_let_in(
    ask: Callable[..., Any], keys: dict[str, str], method: str, path: str
) -> None:
    body = b"{not json" if method in ("POST", "PATCH") else None  # never looked at before the key is
    for token in (None, "", "isk-wrong", keys["inference"], keys["revoked"], keys["home"][:-1]):
        refused = ask(method, path, body, token=token)
        assert (refused.status, refused.body["error"]) == (401, "Unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
    for token in (keys["admin"], keys["home"]):
        assert ask(method, path, body, token=token).status in {200, 400, 404}


def test_health_needs_no_key_and_an_unknown_path_does(ask: Callable[..., Any]) -> None:
    assert ask("GET", "/healthz", token=None).body == "ok"
    assert ask("GET", "/readyz", token=None).body == "ready"
    assert ask("GET", "/no-such", token=None).status == 401
    assert ask("GET", "/api/v1/healthz/../healthz", token=None).status == 401


def test_an_odd_host_header_changes_nothing(ask: Callable[..., Any], keys: dict[str, str]) -> None:
    for host in ("evil.example", "127.0.0.1:1", "localhost"):
        assert ask("GET", "/api/v1/nodes", Host=host).status == 200
        assert ask("GET", "/api/v1/nodes", Host=host, token=None).status == 401


@pytest.mark.parametrize("method_path", [r for r in ROUTES if r[0] == "POST"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"unknown_field": 1}',
        b'{"model": 7, "name": 7, "directory": 7, "label": 7}',
    ],
    ids=["empty", "cut", "null", "list", "text", "no-utf8", "deep", "unknown", "types"],
)
def test_bad_bodies_are_400(ask: Callable[..., Any], method_path: tuple[str, str], body: bytes) -> None:
    answer = ask(*method_path, body)
    assert (answer.status, answer.body["error"]) == (400, "BadInputError")
    assert answer.body["message"]


@pytest.mark.parametrize(
    "wish",
    [
        {"intent": "cheapest"},
        {"cost": "euros"},
        {"percentile": 0},
        {"percentile": 100},
        {"batch": 0},
        {"batch": 10**30},
        {"batch": 1.5},
        {"replicas": 0},
        {"replicas": -1},
        {"replicas": 65},
        {"replicas": 10**30},
        {"replicas": 1.5},
        {"input_tokens": -1},
        {"rate_per_s": -2.0},
        {"slo": {}},
        {"slo": {"ttft_s": 0}},
        {"slo": {"p99": 1}},
        {"intent": "latency-slo"},
        {"intent": "cost-slo"},
        {"budget": 0},
        {"quality": "best"},
        {"engine": "no-such"},
        {"policy": "best"},
        {"model": ""},
        {"model": "a\u0000b"},
        {"model": "../../etc/passwd"},
        {"model": "x" * 5000},
    ],
    ids=lambda wish: repr(wish)[:40],
)
def test_bad_wishes_are_refused_by_plans_and_deployments(ask: Callable[..., Any], wish: dict[str, Any]) -> None:
    for path in ("/api/v1/plans", "/api/v1/deployments"):
        answer = ask("POST", path, wish)
        assert answer.status in {400, 404}, answer
        assert answer.body["error"] in {"BadInputError", "ConfigError", "NotFoundError"}
    assert ask("GET", "/api/v1/deployments").body == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["percentile", "rate_per_s", "budget", "max_seconds"])
def test_numbers_that_are_none_are_400(ask: Callable[..., Any], field: str, number: str) -> None:
    path = "/api/v1/profiles" if field == "max_seconds" else "/api/v1/plans"
    assert ask("POST", path, f'{{"{field}": {number}}}'.encode()).status == 400


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/events?after=-1", 400),
        ("/api/v1/events?limit=0", 400),
        ("/api/v1/events?limit=x", 400),
        ("/api/v1/events?deployment=no-such", 404),
        ("/api/v1/events?after=99999999999999999999999", 400),
        ("/api/v1/no-such", 404),
        ("/api/v1/deployments/", 404),
        ("/api/v1/deployments/%00", 404),
        ("/api/v1/deployments/%ff%fe", 404),
        ("/api/v1/deployments/..%2f..%2fetc", 404),
        ("/api/v1/deployments/" + "x" * 3000, 404),
    ],
)
def test_odd_paths(ask: Callable[..., Any], path: str, status: int) -> None:
    answer = ask("GET", path)
    assert answer.status == status
    assert set(answer.body) == {"error", "message"}


def test_a_wrong_method_is_405(ask: Callable[..., Any]) -> None:
    assert ask("PUT", "/api/v1/deployments", {}).status == 405


def test_a_body_too_large_is_413_and_one_of_unknown_length_411(
    ask: Callable[..., Any], home: Any, keys: dict[str, str]
) -> None:
    assert ask("POST", "/api/v1/plans", b" " * (2**20 + 1)).status == 413
    assert ask("POST", "/api/v1/plans", None, Content_Length=str(10**18)).status == 413
    assert ask("POST", "/api/v1/plans", None, Transfer_Encoding="chunked", Content_Length="2").status == 411


def test_names_of_deployments_and_models_are_checked(ask: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("", " ", "-a", "a/b", "a b", "a" * 64, "ä", "a\n", "\u0000"):
        assert ask("POST", "/api/v1/deployments", {"name": name}).status == 400
        assert ask("POST", "/api/v1/models", {"name": name, "directory": str(tmp_path)}).status in {400, 404}
    assert ask("POST", "/api/v1/models", {"name": "a", "directory": str(tmp_path)}).status == 404
    assert [model["name"] for model in ask("GET", "/api/v1/models").body] == [DEMO]


def test_two_who_want_one_name_at_once(
    ask: Callable[..., Any], home: Any, until: Callable[..., Any], golden: Golden
) -> None:
    barrier = threading.Barrier(4)
    answers: list[Any] = []
    wish = {"name": "one", "input_tokens": 16, "output_tokens": 16}

    def deploy() -> None:
        barrier.wait()
        answers.append(ask("POST", "/api/v1/deployments", wish))

    threads = [threading.Thread(target=deploy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status for answer in answers) == [202, 409, 409, 409]
    (accepted,) = (answer.body for answer in answers if answer.status == 202)
    attached = ask("POST", "/api/v1/deployments?attach=true", {**wish, "batch": None, "model": DEMO})
    assert (attached.status, attached.body["created_at"]) == (202, accepted["created_at"])  # defaults said aloud
    other = ask("POST", "/api/v1/deployments?attach=true", {**wish, "batch": 2, "slo": {"ttft_s": 1}})
    assert other.status == 409
    said = re.sub(r"\((planning|launching|ready)\)", "(planning)", other.body["message"])  # it goes on meanwhile
    golden("rest-errors", said)
    assert "input_tokens" not in said
    until(lambda: home.deployment("one")["status"] == "ready", "the one that was accepted serves")
    assert [worker.rpartition("-")[0] for worker in home.worker_pids()] == ["one"]
    for then in (accepted["created_at"] - 1.0, "nan"):
        assert ask("DELETE", f"/api/v1/deployments/one?created_at={then}").status == 404
    assert home.deployment("one")["status"] == "ready"
    removed = ask("DELETE", f"/api/v1/deployments/one?created_at={accepted['created_at']!r}")
    assert (removed.status, removed.body["status"]) == (202, "removing")
    late = ask("POST", "/api/v1/deployments?attach=true", wish)  # or it is gone already, and deployed anew
    assert late.status == 202 or "is being removed" in late.body["message"]
    if late.status == 202:
        ask("DELETE", "/api/v1/deployments/one")
    until(lambda: ask("GET", "/api/v1/deployments/one").status == 404, "it is removed")
    assert home.worker_pids() == {}


def test_a_deploy_that_is_asked_for_again_with_its_key_is_done_once(
    ask: Callable[..., Any], home: Any, until: Callable[..., Any], golden: Golden
) -> None:
    def deploy(key: str, **wish: object) -> Any:
        body = {"name": "keyed", "input_tokens": 16, "output_tokens": 16} | wish
        return ask("POST", "/api/v1/deployments", body, Idempotency_Key=key)

    refused = deploy("k1", input_tokens=0)
    assert refused.status == 400  # which takes no key
    barrier = threading.Barrier(4)
    answers: list[Any] = []

    def at_once() -> None:
        barrier.wait()
        answers.append(deploy("k1"))

    threads = [threading.Thread(target=at_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = answers[0]
    assert (first.status, first.body["status"]) == (202, "accepted")
    assert [(answer.status, answer.body) for answer in answers] == [(202, first.body)] * 4
    assert deploy("k1", engine="auto").body == first.body  # the same request: what it says is the default
    other = deploy("k1", output_tokens=8)
    assert (other.status, other.body["error"]) == (409, "ConflictError")
    assert '"output_tokens":16' in other.body["message"]
    assert deploy("k2").status == 409  # its name is in use
    events = ask("GET", "/api/v1/events?deployment=keyed").body
    assert [event["kind"] for event in events].count("accepted") == 1
    command = ["deploy", "--name", "keyed", "--input-tokens", 16, "--output-tokens", 16, "--idempotency-key", "k1"]
    assert "keyed is ready" in home.run(*command).stdout  # it asks the same, and follows what there is
    home.run("rm", "keyed")
    late = home.run(*command, check=False)  # which does not bring it back
    assert late.returncode == 1
    golden("rest-errors", late.stderr.splitlines()[-1])
    assert deploy("k1").body == first.body
    assert ask("GET", "/api/v1/deployments/keyed").status == 404
    assert home.run("deploy", "--idempotency-key", "a b", check=False).returncode == 2


@pytest.mark.parametrize("key", ["", " ", "a b", "\u00e4", "k" * 201, "a\tb"])
def test_a_key_that_cannot_be_is_refused(ask: Callable[..., Any], key: str) -> None:
    refused = ask("POST", "/api/v1/deployments", {"name": "a"}, Idempotency_Key=key)
    assert (refused.status, refused.body["error"]) == (400, "BadInputError")
    assert "key" in refused.body["message"]


def test_metrics_count_and_tell(ask: Callable[..., Any]) -> None:
    ask("GET", "/api/v1/deployments/no-such")
    text = ask("GET", "/metrics").body
    assert 'iserve_controller_requests_total{method="GET",status="404"}' in text
    assert 'iserve_device_free_bytes{device="cpu:0"}' in text


def test_no_bug_was_met(home: Any) -> None:
    """Last of this module: none of the above made a traceback."""
    assert "Traceback" not in (home.home / "logs" / "controller.log").read_text()
