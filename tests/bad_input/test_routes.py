"""Every route of the REST API, found in the application itself, so that none can be forgotten.

It asks for authorisation, and refuses what it does not know by name.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import fastapi.routing
from fastapi import FastAPI

from iserve.controller.auth import Door
from tests.bad_input.conftest import TOKEN, Api
from tests.golden_words import Golden

OPEN = {("GET", "/healthz"), ("GET", "/readyz")}


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of each, those that the schema does not show included."""
    flat = getattr(
        fastapi.routing, "iter_route_contexts", iter
    )  # newer releases keep included routers as they are
    for route in flat(app.router.routes):
        for method in sorted(getattr(route, "methods", None) or ()):
            yield method, getattr(route, "path", "")


def filled(path: str) -> str:
    return path.format(**{name: "no-such" for _, name, _, _ in string.Formatter().parse(path) if name})


def test_the_routes_are_found(api: Api) -> None:
    found = set(routes_of(api.app))
    described = {(m.upper(), p) for p, methods in api.app.openapi()["paths"].items() for m in methods}
    assert described <= found
    assert len(described) > 20
    assert found >= OPEN


def test_each_route_but_the_health_checks_wants_the_homes_token_or_an_admin_key(api: Api) -> None:
    """None, empty, wrong, of another scope, revoked, cut short, in another scheme, and under an odd Host."""
    wrong = [
        None,
        "",
        "isk-wrong",
        api.keys["inference"],
        api.keys["revoked"],
        TOKEN[:-1],
        TOKEN + "x",
        " " + TOKEN,
    ]
    for method, path in routes_of(api.app):
        for token in wrong:
            status, body = api.ask(method, filled(path), {"scope": "admin"}, token=token, Host="evil.example")
            if (method, path) in OPEN | {("HEAD", p) for _, p in OPEN}:
                assert status in {200, 503}, (method, path)
            else:
                assert status == 401, (method, path, token)
                assert method == "HEAD" or body["error"] == "Unauthorized"
        for odd in ({"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN}, {"Cookie": f"token={TOKEN}"}):
            if (method, path) not in OPEN:
                assert api.ask(method, filled(path), token=None, **odd)[0] == 401, (method, path, odd)
    kept = api.ask("GET", "/api/v1/keys")[1]
    assert {key["label"] for key in kept} == {"admin", "inference", "revoked"}


def test_the_token_and_admin_keys_are_let_in_under_any_host(api: Api) -> None:
    for method, path in routes_of(api.app):
        if method == "GET" and (method, path) not in OPEN:
            for token in (TOKEN, api.keys["admin"]):
                assert api.ask(method, filled(path), token=token, Host="evil.example")[0] in {200, 404}


def test_an_unknown_path_tells_a_stranger_nothing(api: Api) -> None:
    for path in ("/", "/docs", "/redoc", "/api/v1", "/api/v1/no-such", "/healthz/", "//healthz", "/HEALTHZ"):
        assert api.ask("GET", path, token=None)[0] == 401
        assert api.ask("GET", path)[0] == 404


def test_a_refusal_says_how_a_key_is_had(api: Api, golden: Golden) -> None:
    status, body = api.ask("GET", "/api/v1/nodes", token=None)
    assert (status, body["error"]) == (401, "Unauthorized")
    golden("rest-errors", body["message"])


def test_two_authorizations_are_none(api: Api) -> None:
    two = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer isk-other")]
    assert api.client.get("/api/v1/nodes", headers=two).status_code == 401


def test_every_application_stands_behind_the_door(api: Api) -> None:
    assert [middleware.cls for middleware in api.app.user_middleware] == [Door]


def bodies(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and schema of every request that has a body."""
    schema = app.openapi()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                yield method.upper(), path, schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[-1]]


def test_an_unknown_field_is_refused_by_its_name(api: Api, golden: Golden) -> None:
    found = list(bodies(api.app))
    assert len(found) >= 7
    for method, path, schema in found:
        assert schema["additionalProperties"] is False, path
        needed = dict.fromkeys(schema.get("required", ()), "x")
        status, body = api.ask(method, filled(path), needed | {"colour_of_the_box": 1})
        assert (status, body["error"]) == (400, "BadInputError"), path
        assert "colour_of_the_box" in body["message"]
    for where, wish in (
        ("slo", {"slo": {"ttft_s": 1, "p98_s": 1}}),
        ("relative_rates", {"relative_rates": [{"share": 1}]}),
    ):
        status, body = api.ask("POST", "/api/v1/plans", wish)
        assert (status, body["error"]) == (400, "BadInputError")
        golden("rest-errors", body["message"], where)


def test_an_unknown_field_within_a_list_is_refused_by_its_name(api: Api, golden: Golden) -> None:
    status, answer = api.ask("POST", "/api/v1/plans", {"expected_models": [{"modle": "m"}]})
    assert (status, answer["error"]) == (400, "BadInputError")
    golden("rest-errors", answer["message"])


def test_an_unknown_query_parameter_is_refused_by_its_name(api: Api, golden: Golden) -> None:
    tried = 0
    for method, path in routes_of(api.app):
        if path.startswith("/api/"):
            body = {"name": "a", "directory": "/nowhere"} if path == "/api/v1/models" else {}
            model = "&model=m" if (method, path) == ("DELETE", "/api/v1/verifications") else ""
            status, answer = api.ask(method, f"{filled(path)}?linse=7{model}", body if method == "POST" else None)
            assert (status, answer["error"], "linse" in answer["message"]) == (400, "BadInputError", True), path
            tried += 1
    assert tried > 20
    status, body = api.ask("GET", "/api/v1/events?linit=7")
    assert status == 400
    golden("rest-errors", body["message"])


def test_a_name_that_is_given_twice_is_refused(api: Api, golden: Golden) -> None:
    """A repeated name in a body, at any depth, or in a query is refused: which value was meant is unknown."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    for body, name in (
        ('{"model": "a", "model": "b"}', "model"),
        ('{"slo": {"ttft_s": 1, "ttft_s": 2}}', "ttft_s"),
        ('{"batch": 1, "b\\u0061tch": 1}', "batch"),
    ):
        answer = api.client.post("/api/v1/plans", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (400, "BadInputError")
        golden("rest-errors", answer.json()["message"], name)
    status, document = api.ask("GET", "/api/v1/events?limit=1&after=0&limit=2")
    assert status == 400
    golden("rest-errors", document["message"], "limit")


def test_a_body_of_another_type_is_told_which_is_wanted(api: Api, golden: Golden) -> None:
    key = {"Authorization": f"Bearer {TOKEN}"}
    paths = [(method, filled(path)) for method, path, _ in bodies(api.app)]
    assert len(paths) >= 7
    for method, path in paths:
        for what, headers in (("text", {"Content-Type": "text/plain; charset=utf-8"}), ("none", {})):
            answer = api.client.request(method, path, content="{}", headers=key | headers)
            assert answer.status_code == 415
            golden("rest-errors", answer.json()["message"], f"{method} {path} {what}")
    spelled = {"Content-Type": "Application/JSON; charset=utf-8"}
    status, document = api.ask("POST", "/api/v1/plans", {"gpus": 1}, **spelled)
    assert (status, "body.gpus" in document["message"]) == (400, True)


def test_a_deployment_is_not_asleep_between_two_requests(api: Api) -> None:
    for idle_s in (5e-324, 0.999, 0, -1):
        status, body = api.ask("POST", "/api/v1/deployments", {"scale_to_zero_s": idle_s})
        assert (status, "scale_to_zero_s" in body["message"]) == (400, True)
