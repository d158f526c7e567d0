"""The OpenAPI document: everything in it is described, and each error that it lists occurs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from fingerprint.codec import to_builtins
from fingerprint.errors import StateUnavailableError
from iserve.attribute_docs import attribute_docstrings
from iserve.state.store import Store
from placement.policies import POLICIES
from tests.bad_input.conftest import Api, api
from tests.iserve.test_quality_kept import of_model

__all__ = ["api"]

OPEN = {"/healthz", "/readyz"}
HERE = {"gpus": "a6000:1"}
NO_MODEL = {"model": "/no/such"}
NO_ENGINE = {"engine": "vllm"}
KEPT = "kept"  # a deployment that never gets ready: nothing is started here

# By operation: requests that get an error which not every operation can give.
REFUSED: dict[tuple[str, str], dict[int, tuple[str, Any]]] = {
    ("post", "/api/v1/models"): {404: ("/api/v1/models", {"name": "a", "directory": "/no/such"})},
    ("delete", "/api/v1/models/{name}"): {404: ("/api/v1/models/no-such", None)},
    ("post", "/api/v1/variants"): {
        404: ("/api/v1/variants", {"name": "a", "base": "/no/such", "path": "/no/such"}),
        409: ("/api/v1/variants", {"name": KEPT, "base": "iserve-demo", "path": "/no/such"}),
    },
    ("get", "/api/v1/variants/{name}"): {404: ("/api/v1/variants/none", None)},
    ("get", "/api/v1/variants/{name}/progress"): {404: ("/api/v1/variants/none/progress", None)},
    ("patch", "/api/v1/variants/{name}"): {404: ("/api/v1/variants/none", {"pinned": True})},
    ("delete", "/api/v1/variants/{name}"): {404: ("/api/v1/variants/none", None)},
    ("get", "/api/v1/quality"): {404: ("/api/v1/quality?model=/no/such", None)},
    ("post", "/api/v1/quality"): {
        404: ("/api/v1/quality", to_builtins(of_model(name="/no/such", variant_hash=None))),
        409: ("/api/v1/quality", to_builtins(of_model(name="iserve-demo", variant_hash=None))),
    },
    ("post", "/api/v1/profiles"): {
        404: ("/api/v1/profiles", NO_MODEL),
        422: ("/api/v1/profiles", NO_ENGINE),
    },
    ("get", "/api/v1/profiles/jobs/{job_id}"): {404: ("/api/v1/profiles/jobs/none", None)},
    ("post", "/api/v1/plans"): {
        404: ("/api/v1/plans", NO_MODEL | HERE),
        409: ("/api/v1/plans", {}),
        422: ("/api/v1/plans", NO_ENGINE),
    },
    ("post", "/api/v1/plans/launch"): {
        404: ("/api/v1/plans/launch", NO_MODEL | HERE),
        409: ("/api/v1/plans/launch", {}),
        422: ("/api/v1/plans/launch", NO_ENGINE),
    },
    ("post", "/api/v1/deployments"): {
        404: ("/api/v1/deployments", NO_MODEL),
        409: ("/api/v1/deployments", {"name": KEPT}),
        422: ("/api/v1/deployments", NO_ENGINE),
    },
    ("get", "/api/v1/deployments/{name}"): {404: ("/api/v1/deployments/none", None)},
    ("patch", "/api/v1/deployments/{name}"): {
        404: ("/api/v1/deployments/none", {"batch": 2}),
        409: (f"/api/v1/deployments/{KEPT}", {"batch": 2}),
        422: (f"/api/v1/deployments/{KEPT}", {"engine_version": "0.0.1"}),
    },
    ("delete", "/api/v1/deployments/{name}"): {404: ("/api/v1/deployments/none", None)},
    ("get", "/api/v1/deployments/{name}/plan"): {404: ("/api/v1/deployments/none/plan", None)},
    ("get", "/api/v1/deployments/{name}/log"): {404: ("/api/v1/deployments/none/log", None)},
    ("get", "/api/v1/deployments/{name}/log/part"): {404: ("/api/v1/deployments/none/log/part", None)},
    ("post", "/api/v1/verifications"): {
        404: ("/api/v1/verifications", NO_MODEL),
        409: ("/api/v1/verifications", {"deployment": KEPT}),
        422: ("/api/v1/verifications", NO_ENGINE),
    },
    ("delete", "/api/v1/verifications"): {404: ("/api/v1/verifications?model=/no/such", None)},
    ("get", "/api/v1/verifications/jobs/{job_id}"): {404: ("/api/v1/verifications/jobs/none", None)},
    ("get", "/api/v1/events"): {404: ("/api/v1/events?deployment=none", None)},
    ("delete", "/api/v1/keys/{key_id}"): {404: ("/api/v1/keys/none", None)},
}


@pytest.fixture(scope="module")
def schema(api: Api) -> dict[str, Any]:
    document: dict[str, Any] = api.app.openapi()
    return document


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def is_sentence(text: str) -> bool:
    return len(text.split()) >= 3 and text.rstrip().endswith(".")


def test_every_field_has_a_description(schema: dict[str, Any]) -> None:
    fields = {
        f"{name}.{field}": content.get("description", "")
        for name, kind in schema["components"]["schemas"].items()
        for field, content in kind.get("properties", {}).items()
    }
    assert len(fields) > 500
    assert [name for name, text in fields.items() if not is_sentence(text)] == []
    assert [name for name, text in fields.items() if re.search(r"\bNone\b|``", text)] == []


def test_every_type_has_a_description(schema: dict[str, Any]) -> None:
    kinds = schema["components"]["schemas"]
    assert [name for name, kind in kinds.items() if not is_sentence(kind.get("description", ""))] == []
    assert [name for name, kind in kinds.items() if re.search(r"\bNone\b|``|Raises:", kind["description"])] == []


def test_every_operation_and_parameter_has_a_description(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        where = f"{method} {path}"
        assert is_sentence(operation["description"]), where
        assert 3 <= len(operation["summary"].split()) <= 25, where
        assert "\n" not in operation["summary"], where
        for parameter in operation.get("parameters", ()):
            assert is_sentence(parameter["description"]), f"{where}: {parameter}"


def test_every_operation_has_one_tag_that_is_described(schema: dict[str, Any]) -> None:
    described = {tag["name"] for tag in schema["tags"] if is_sentence(tag["description"])}
    used = {tag for _, _, operation in operations(schema) for tag in operation["tags"]}
    assert used == described
    assert all(len(operation["tags"]) == 1 for _, _, operation in operations(schema))


def test_a_key_is_required_of_all_but_the_health_checks(schema: dict[str, Any]) -> None:
    (scheme,) = schema["components"]["securitySchemes"].items()
    assert scheme[0] == "apiKey"
    assert (scheme[1]["type"], scheme[1]["scheme"]) == ("http", "bearer")
    for _, path, operation in operations(schema):
        assert operation.get("security", []) == ([] if path in OPEN else [{"apiKey": []}]), path


def test_every_error_has_the_one_shape_and_an_example(schema: dict[str, Any]) -> None:
    for _, path, operation in operations(schema):
        for status, answer in operation["responses"].items():
            assert answer["description"], path
            if int(status) >= 400 and path not in OPEN:
                content = answer["content"]["application/json"]
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
                assert set(content["example"]) == {"error", "message"}


def test_every_error_that_is_listed_occurs(
    api: Api, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.ask("POST", "/api/v1/deployments", {"name": KEPT, "model": "iserve-demo"})[0] == 202
    for method, path, operation in operations(schema):
        listed = {int(status) for status in operation["responses"] if int(status) >= 400}
        if path in OPEN:
            assert listed <= {503}  # test_controller_process reads /readyz of a home that starts
            continue
        occurred = set(REFUSED.get((method, path), {}))
        for status, (url, body) in REFUSED.get((method, path), {}).items():
            found, answer = api.ask(method.upper(), url, body)
            assert found == status, (method, url, answer)
        assert listed - occurred == common_errors(api, method, path, monkeypatch), (method, path)


def common_errors(api: Api, method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the errors that any operation gives, or any with a body: by address, key, body and state."""
    verb, url = method.upper(), re.sub(r"\{\w+\}", "none", path)
    with_body = method in ("post", "patch")
    found = {api.ask(verb, url, token=None)[0]}
    if path.startswith("/api/"):
        found.add(api.ask(verb, f"{url}?no-such=1", {} if with_body else None)[0])
    if with_body:
        found.add(api.ask(verb, url, Content_Length=str(2**30))[0])
        found.add(api.ask(verb, url, Transfer_Encoding="chunked")[0])
        found.add(api.ask(verb, url, {}, Content_Type="text/plain")[0])
    with monkeypatch.context() as patch:

        def away(_store: Store) -> None:
            raise StateUnavailableError("the database is away")

        patch.setattr(Store, "api_keys", away)
        found.add(api.ask(verb, url, token=api.keys["admin"])[0])
    return found


class _Base:
    pass


def test_attribute_docstrings_come_from_the_source() -> None:
    from fingerprint.config import Workload
    from iserve.api_types import LaunchBody

    assert attribute_docstrings(Workload)["batch"] == "Requests at once."
    inherited = attribute_docstrings(LaunchBody)
    assert {"gpus", "engine_args", "rate_window_s"} <= set(inherited)
    assert set(POLICIES) <= set(re.findall(r"[\w-]+", inherited["policy"]))
    assert attribute_docstrings(_Base) == {}
