"""Options and fields that were renamed work for one release under their former names, which no help shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from iserve.api_types import FORMER_FIELDS, DeployBody
from iserve.cli.app import make_app
from iserve.cli.options import FORMER_NAMES
from iserve.rest_bodies import UpdateBody
from tests.golden_words import Golden

READ = TypeAdapter(DeployBody)


def options_of(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from parameter.opts
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


def test_todays_names_are_options_and_former_ones_are_not() -> None:
    options = set(options_of(typer.main.get_command(make_app())))
    assert options >= set(FORMER_NAMES.values())
    assert not options & FORMER_NAMES.keys()


@pytest.mark.parametrize("option", ["--expect=-1", "--expected-deployments=-1"])
def test_a_former_name_is_read_as_todays(option) -> None:
    said = CliRunner().invoke(make_app("plan"), ["plan", "iserve-demo", "--gpus", "a6000", option])
    assert said.exit_code == 2
    assert "--expected-deployments" in said.output


def test_a_name_that_was_never_one_is_refused() -> None:
    said = CliRunner().invoke(make_app("plan"), ["plan", "iserve-demo", "--gpus", "a6000", "--expects=1"])
    assert said.exit_code == 2
    assert "--expects" in said.output


def test_former_fields_of_a_body_are_read_as_todays() -> None:
    former = {"slo": {"e2e_s": 8}, "rates": [1.5, 0.5], "expect": 2, "refuse_late": True}
    body = READ.validate_python(former)
    assert (body.relative_rates, body.expected_deployments, body.reject_late) == ((1.5, 0.5), 2, True)
    assert body == READ.validate_python({FORMER_FIELDS.get(name, name): value for name, value in former.items()})


@pytest.mark.parametrize(
    "given",
    [{"expect": 1, "expected_deployments": 1}, {"expects": 1}],
    ids=["both names", "no name"],
)
def test_a_field_that_is_given_twice_or_was_never_one_is_refused(given) -> None:
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        READ.validate_python(given)


def test_former_fields_are_in_no_schema_and_in_no_body_that_never_had_them(golden: Golden) -> None:
    assert not FORMER_FIELDS.keys() & READ.json_schema()["properties"].keys()
    with golden.raises("rest-errors", ValidationError):
        UpdateBody.model_validate({"refuse_late": True})
