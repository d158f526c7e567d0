"""Options with a fixed set of values: one that does not exist is refused with the nearest."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from iserve.cli.app import make_app


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (("plan", "m", "--intent", "latncy"), "'cost-slo'; did you mean 'min-latency'?"),
        (("deploy", "m", "--quality", "exct"), "'exact', 'near', 'any'; did you mean 'exact'?"),
        (("deploy", "m", "--quality", "potato"), "'exact', 'near', 'any'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(arguments: tuple[str, ...], end: str) -> None:
    done = CliRunner().invoke(make_app(), [*arguments])
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2
    assert f"{arguments[-1]!r} is not one of " in said
    assert said.rstrip(".").endswith(end)
    assert "Value error" not in said
