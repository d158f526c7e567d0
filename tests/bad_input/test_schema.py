"""Requests that the OpenAPI schema allows and forbids, made up by schemathesis, meet no bug.

The answers are what the schema says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.bad_input.conftest import TOKEN, Api
from tests.golden_words import Golden

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
# A hub that is not asked here; and so many profiles are asked for that they have to wait.
AWAY = ("offline mode is on", "jobs run or wait already")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR):
        yield caplog


def fuzz(api: Api, examples: int) -> Counter[int]:
    """Return how often each status was answered."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", api.app, headers={"Authorization": f"Bearer {TOKEN}"})
    seen: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        # Any text is a path; where there is no body nor query, nothing can be wrong.
        can_be_wrong = operation.body or operation.query
        for mode in (
            (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if can_be_wrong else (GenerationMode.POSITIVE,)
        ):

            @settings(
                max_examples=examples,
                database=None,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Case) -> None:
                answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
                seen[answer.status_code] += 1
                if answer.status_code == 503:
                    assert case.path == "/readyz" or any(why in answer.text for why in AWAY), answer.text
                else:
                    assert answer.status_code < 500, answer.text
                case.validate_response(answer, checks=CHECKS)

            ask()
    return seen


@pytest.mark.slow
def test_what_the_schema_allows_and_forbids_is_answered_as_it_says(
    api: Api, quiet: pytest.LogCaptureFixture
) -> None:
    seen = fuzz(api, examples=2)
    assert {200, 201, 202, 400, 404} <= seen.keys()
    assert not [record for record in quiet.records if record.exc_info], quiet.text


@pytest.mark.long
def test_the_same_at_length(api: Api, quiet: pytest.LogCaptureFixture) -> None:
    seen = fuzz(api, examples=150)
    assert seen.total() > 3_000
    assert not [record for record in quiet.records if record.exc_info], quiet.text


@pytest.mark.parametrize(
    "body",
    [
        {"modle": "a"},
        {"slo": {"ttft": 1}},
        {"\x1b[2J": 1},
    ],
    ids=repr,
)
def test_an_unknown_field_is_told_the_known_ones(api: Api, body: dict[str, object], golden: Golden) -> None:
    for path in ("plans", "deployments"):
        status, answer = api.ask("POST", f"/api/v1/{path}", body)
        assert (status, answer["error"]) == (400, "BadInputError")
        golden("rest-errors", answer["message"])
        assert answer["message"].startswith("body")
        assert "slo" in body or "intent, cost, " in answer["message"]
