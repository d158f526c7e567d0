"""Results of quality over REST: what is looked up, what is refused, and which paths a key is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import to_json
from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.quality.facts import weights_stamp
from iserve.state.rows import VariantRow
from tests.bad_input.conftest import TOKEN, Api
from tests.iserve.test_quality_kept import of_model


def of_demo(checkpoint: Path | None = None) -> dict[str, Any]:
    """Result of the demo model by no deployment, as JSON."""
    result = of_model(
        name=DEMO_MODEL_NAME,
        checkpoint=str(checkpoint or demo_model_path()),
        variant_hash=None,
        weights_stamp=weights_stamp(demo_model_path()),
        engine_version=None,
    )
    return dict(json.loads(to_json(result)))


def test_a_name_that_is_not_of_this_machine_is_not_asked_of_the_hub(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("iserve.model_source.list_files", asked)
    for name in ("nope", "owner/nope"):
        status, answer = api.ask("GET", f"/api/v1/quality?model={name}")
        assert (status, answer["error"]) == (404, "NotFoundError")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"value": 0.5', '"value": 1e999'),
        ('"value": 0.5', '"value": NaN'),
        ('"num_tokens": 9', '"num_tokens": -5'),
        ('"num_tokens": 9', f'"num_tokens": {10**400}'),
        ("/texts/q.jsonl", "\\ud800"),
        ('"name": "iserve-demo"', '"name": "\\ud800"'),
        ("d" * 64, "not a hash"),
        ("a" * 64, ""),
    ],
)
def test_what_no_measurement_has_is_refused_and_the_true_result_stays(api: Api, before: str, after: str) -> None:
    assert api.ask("POST", "/api/v1/quality", of_demo())[0] == 201
    body = json.dumps(of_demo())
    assert before in body
    answer = api.client.post(
        "/api/v1/quality",
        content=body.replace(before, after, 1),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    assert answer.status_code in (400, 404)
    assert api.ask("GET", f"/api/v1/quality?model={DEMO_MODEL_NAME}")[1] == [of_demo()]


def test_a_key_is_shown_no_folder_that_it_may_not_name(api: Api) -> None:
    inside = str(api.folder / "q.jsonl")
    for file, seen in (("/elsewhere/q.jsonl", "q.jsonl"), (inside, inside), ("../q.jsonl", "q.jsonl")):
        body = of_demo()
        body["text"]["file"] = file
        assert api.ask("POST", "/api/v1/quality", body)[0] == 201
        for query in ("", f"?model={DEMO_MODEL_NAME}"):
            (own,) = api.ask("GET", f"/api/v1/quality{query}")[1]
            assert own == body
            (shown,) = api.ask("GET", f"/api/v1/quality{query}", token=api.keys["admin"])[1]
            assert shown["text"]["file"] == seen
            assert shown["model"]["checkpoint"] is shown["against"]["checkpoint"] is None
            for side in ("model", "against"):
                body_side = body[side] | {"checkpoint": None}
                assert shown[side] == body_side


def test_a_key_is_shown_no_folder_with_a_variant(api: Api) -> None:
    api.controller.store.variants.put(
        VariantRow(
            name="style",
            base=DEMO_MODEL_NAME,
            base_directory=str(demo_model_path()),
            content_hash="b" * 64,
            max_rank=8,
            num_modules=1,
            num_bytes=1,
            disk_bytes=1,
            trained_on=None,
            pinned=False,
            created_at=1.0,
        )
    )
    body = of_demo()
    body["model"] |= {"name": "style", "variant_hash": "b" * 64}
    assert api.ask("POST", "/api/v1/quality", body)[0] == 201
    own = api.ask("GET", "/api/v1/variants/style")[1]["quality"]
    shown = api.ask("GET", "/api/v1/variants/style", token=api.keys["admin"])[1]["quality"]
    assert own == [body]
    assert [one["model"]["checkpoint"] for one in shown] == [None]
    assert [one["text"]["file"] for one in shown] == ["q.jsonl"]
