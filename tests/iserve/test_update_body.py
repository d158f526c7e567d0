"""Changes of a deployment, applied to what was asked for: what may be null, and what may not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fingerprint.errors import ConfigError, NotFoundError
from iserve.api_types import DeployBody
from iserve.cli.app import make_app
from iserve.rest_bodies import UpdateBody
from tests.golden_words import Golden


@pytest.mark.parametrize("field", ["model", "intent", "replicas", "input_tokens", "output_tokens", "engine_args"])
def test_a_field_that_needs_a_value_is_not_taken_as_null(field: str, golden: Golden) -> None:
    with golden.raises("rest-errors", ConfigError):
        UpdateBody.model_validate({field: None}).applied_to(DeployBody(model="/models/mine", name="mine"))


def test_a_context_below_the_planned_request_takes_a_shorter_one(golden: Golden) -> None:
    deployed = DeployBody(model="/models/mine", name="mine")
    with golden.raises("rest-errors", ConfigError):
        UpdateBody(context_tokens=512).applied_to(deployed)[0].options(
            default_policy="packing", load_threshold=0.5
        )
    wish, changes = UpdateBody(context_tokens=512, input_tokens=384).applied_to(deployed)
    assert changes == ("context_tokens", "input_tokens")
    work = wish.options(default_policy="packing", load_threshold=0.5).workload
    assert (work.input_tokens, work.output_tokens, work.longest_tokens) == (384, 128, 512)


def test_an_update_of_nothing_names_every_option_that_changes_something() -> None:
    command = get_command(make_app()).commands["update"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    done = CliRunner().invoke(make_app(), ["update", "chat"])
    assert done.exit_code == 2
    assert set(re.findall(r"--[a-z-]+", done.output.partition("nothing is changed; ")[2])) == options - {
        "--stop-first",
        "--json",
        "--help",
    }


def test_lengths_on_the_command_line_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    class Controller:
        def get(self, *_: Any) -> None:
            raise NotFoundError("no plan")

        def patch(self, path: str, changes: dict[str, Any], _: type) -> None:
            sent.append((path, changes))
            raise NotFoundError("enough")

    monkeypatch.setattr("iserve.cli.connection.client", lambda **_: Controller())
    CliRunner().invoke(
        make_app(), ["update", "chat", "--context", "512", "--input-tokens", "384", "--output-tokens", "100"]
    )
    assert sent == [
        (
            "/api/v1/deployments/chat",
            {"input_tokens": 384, "output_tokens": 100, "context_tokens": 512},
        )
    ]
