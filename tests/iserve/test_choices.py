"""Options with a fixed set of values: one that does not exist is refused with the nearest."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from iserve.cli.app import make_app
from tests.golden_words import Golden


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "m", "--intent", "latncy"),
        ("deploy", "m", "--quality", "exct"),
        ("deploy", "m", "--quality", "potato"),
    ],
    ids=repr,
)
def test_an_unknown_choice_is_refused_with_the_nearest(arguments: tuple[str, ...], golden: Golden) -> None:
    done = CliRunner().invoke(make_app(), [*arguments])
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2
    golden("cli", said.rstrip("."))
    assert "Value error" not in said
