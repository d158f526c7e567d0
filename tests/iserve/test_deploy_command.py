"""Requests of ``iserve deploy`` to the controller, and when it makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daemon.process import own_record, write_record
from fingerprint.errors import NotMeasuredError, UnavailableError
from iserve.cli.app import make_app
from tests.golden_words import Golden


def deploy_body(monkeypatch: pytest.MonkeyPatch, home: Path, *options: str) -> Any:
    """Return what ``iserve deploy`` posts with these options."""
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
        assert deploy_body(monkeypatch, tmp_path, *options).get("engine_version") is None
    refused = CliRunner().invoke(make_app(), ["deploy", "iserve-demo", *asked, "--export", "compose"])
    assert (refused.exit_code, "leave --engine-version out" in " ".join(refused.output.split())) == (2, True)


def export(home: Path, monkeypatch: pytest.MonkeyPatch, connect: Any) -> Any:
    monkeypatch.setenv("ISERVE_HOME", str(home))
    monkeypatch.setattr("iserve.cli.connection.client", connect)
    return CliRunner().invoke(
        make_app(), ["deploy", "iserve-demo", "--export", "compose", "-o", str(home / "compose.yaml")]
    )


def test_an_export_for_the_devices_here_says_that_it_brought_the_home_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    class Controller:
        def post(self, path: str, *_: object) -> None:
            raise NotMeasuredError(f"{path}: profile it first")

    down = export(tmp_path, monkeypatch, lambda _settings: Controller())
    said = "is up now"
    assert said in down.stderr
    golden("cli", down.stderr)
    golden("cli", str(down.exception))
    write_record(tmp_path / "run" / "controller.json", own_record(url="http://127.0.0.1:1", token=""))
    assert said not in export(tmp_path, monkeypatch, lambda _settings: Controller()).stderr


def test_an_export_where_no_controller_starts_names_the_way_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def connect(_settings: object) -> None:
        raise UnavailableError("the home cannot be written")

    refused = export(tmp_path, monkeypatch, connect)
    golden("cli", str(refused.exception))
