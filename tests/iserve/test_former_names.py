"""Options that were renamed work for one release under their former names, which no help shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from iserve.cli.app import make_app
from iserve.cli.options import FORMER_NAMES


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
