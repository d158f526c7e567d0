"""What ``iserve deploy`` asks the controller for, and when it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fingerprint.errors import UnavailableError
from iserve.cli.app import make_app


def deploy_body(monkeypatch: pytest.MonkeyPatch, home: Path, *options: str) -> Any:
    """What ``iserve deploy`` posts with these options."""
    posted: list[Any] = []

    def post(_connect: object, _path: str, body: Any, *_: object, **__: object) -> None:
        posted.append(body)
        raise UnavailableError("far enough")

    monkeypatch.setenv("ISERVE_HOME", str(home))
    monkeypatch.setattr("iserve.client.post_once", post)
    result = CliRunner().invoke(make_app(), ["deploy", "iserve-demo", *options])
    assert "far enough" in str(result.exception), result.output
    return posted[0]


def test_a_deploy_names_the_release_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--engine", "vllm", "--engine-version", "0.26.0")
    assert deploy_body(monkeypatch, tmp_path, *asked)["engine_version"] == "0.26.0"
    for options in ((), ("--engine-version", "newest")):
        assert deploy_body(monkeypatch, tmp_path, *options)["engine_version"] is None
    refused = CliRunner().invoke(make_app(), ["deploy", "iserve-demo", *asked, "--export", "compose"])
    assert (refused.exit_code, "leave --engine-version out" in " ".join(refused.output.split())) == (2, True)
