"""Names of people's choice: refused, or shown so that no terminal, page, log or scraper obeys them."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.text import Text

from daemon.log_rotation import log_to_stderr
from fingerprint.sanitize import is_plain, printable
from iserve.cli import main
from iserve.cli.render import print_rows
from iserve.cli.sanitized_console import SanitizedConsole
from iserve.cli.sanitized_output import harmless_output
from iserve.demo import demo_model_path
from iserve.report.page_frame import environment
from iserve.report.svg import element
from tests.bad_input.conftest import Api
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

ESCAPE, BELL, CSI = "\x1b[31mred\x1b[2J", "a\x07b", "\x9b31m"
TURNED = "model\u202egnp.exe\u2066x\u200f"
HOSTILE = [ESCAPE, BELL, CSI, TURNED, "a\nb", "a\rb", "a\tb", "\x00", "\x7f", "\u2028x", "\ud800", "\ufeffx"]
HARMLESS = [
    "émile",
    "模型",
    "نموذج",
    "👩‍🚀 model 🏴",
    "a b",
    "<b>&amp;</b>",
    "[bold]x[/bold]",
    ":smile:",
    '"quoted"',
]
OBEYED = set(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0x200F, 0x2028, 0xFEFF]))


@given(st.text())
def test_what_is_shown_has_nothing_to_obey_and_json_stays_the_same(text: str) -> None:
    shown = printable(text)
    assert not OBEYED & set(shown)
    shown.encode()
    assert printable(shown) == shown
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text


def test_every_script_and_emoji_is_left_alone() -> None:
    for name in HARMLESS:
        assert printable(name) == name
        assert is_plain(name)
    assert not any(is_plain(name) for name in HOSTILE)


def test_labels_of_keys_are_refused_or_kept_as_they_are(api: Api) -> None:
    for label in (*HOSTILE[:-2], "", "x" * 201, "x" * 10_000):
        status, answer = api.ask("POST", "/api/v1/keys", {"label": label})
        assert (status, answer["error"]) == (400, "ConfigError"), label
        assert len(answer["message"]) < 1000
        assert not OBEYED & set(answer["message"])
    for label in (*HARMLESS, "x" * 200):
        assert api.ask("POST", "/api/v1/keys", {"label": label})[0] == 201
    listed = api.ask("GET", "/api/v1/keys")[1]
    assert {*HARMLESS, "x" * 200} <= {key["label"] for key in listed}


def test_names_of_deployments_and_models_are_letters_and_digits(api: Api) -> None:
    for name in (*HOSTILE[:-2], *HARMLESS, "x" * 64, "x" * 10_000, "..", "-x"):
        for path, body in (
            ("/api/v1/deployments", {"name": name}),
            ("/api/v1/plans/launch", {"name": name, "gpus": "a6000:1"}),
            ("/api/v1/models", {"name": name, "directory": str(demo_model_path())}),
        ):
            status, answer = api.ask("POST", path, body)
            assert status == 400, (name, path, answer)
            assert not OBEYED & set(answer["message"])
    assert api.controller.deployments() == ()


def test_folders_of_models_with_control_characters_are_refused_others_served(api: Api, tmp_path: Path) -> None:
    for number, name in enumerate((*HOSTILE, *HARMLESS)):
        if "\0" in name or name == "\ud800":
            continue  # no folder can have that name, or no JSON this path
        folder = tmp_path / str(number) / name.replace("/", "-")
        folder.parent.mkdir()
        folder.symlink_to(demo_model_path())  # a link is its target: the name that counts is that one's
        assert api.ask("POST", "/api/v1/plans", {"model": str(folder), "gpus": "a6000:1"})[0] == 201
        folder.unlink()
        folder.mkdir()
        (folder / "config.json").write_bytes((demo_model_path() / "config.json").read_bytes())
        status, answer = api.ask("POST", "/api/v1/plans", {"model": str(folder), "gpus": "a6000:1"})
        if name in HOSTILE:
            assert (status, answer["error"]) == (404, "NotFoundError"), name
            assert not OBEYED & set(answer["message"])
        else:
            assert (status, answer["model"]) == (201, folder.name)


def test_prometheus_reads_the_metrics_whatever_was_asked(api: Api) -> None:
    for name in ("x%1b[31m", 'a"b', "a%0Ab", "x" * 5000):
        api.ask("GET", f"/api/v1/deployments/{name}")
    text = api.ask("GET", "/metrics")[1]
    assert not OBEYED & set(text)
    labels = {
        value for f in text_string_to_metric_families(text) for s in f.samples for value in s.labels.values()
    }
    assert labels
    assert max(map(len, labels)) < 100


@given(st.text(max_size=20))
def test_a_page_shows_no_mark_of_direction(name: str) -> None:
    template = environment().from_string('<p title="{{ name }}">{{ name }}</p>')
    for page in (template.render(name=name), element("text", name, title=name)):
        assert not OBEYED - set("\r") & set(page)
        ElementTree.fromstring(page)


def test_a_log_has_one_line_for_a_record_and_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging.root, "handlers", [])
    log_to_stderr()
    logging.getLogger("test").warning("model %s", f"{ESCAPE}\n2026-01-01 INFO forged: all is well {TURNED}")
    written = out.getvalue()
    assert written.count("\n") == 1
    assert not OBEYED & set(written)


def test_a_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(("name",), [(name,) for name in (*HOSTILE, *HARMLESS)])
    shown = capsys.readouterr().out
    assert not OBEYED & set(shown)
    assert "\\u001b[31mred" in shown
    for name in HARMLESS:
        assert name in shown


def test_a_name_that_has_room_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    """Next to what takes many times the width; a path that is longer than a row is."""
    words = ("word " * 40,) * 8
    print_rows(("name", *"abcdefgh"), [("a-name-of-some-length-v2", *words), ("b", *words)])
    shown = capsys.readouterr().out
    assert "a-name-of-some-length-v2" in shown
    print_rows(("path",), [("/folder" * 30,)])
    folded = capsys.readouterr().out
    assert "".join(folded.split()) == "path" + "/folder" * 30
    assert max(map(len, (shown + folded).splitlines())) <= 120


def test_no_escape_passes_through_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of any command, by whatever means, has rich's own colours and no foreign escape."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    harmless_output()
    print(ESCAPE, CSI, TURNED)
    sys.stdout.writelines([ESCAPE, "\n"])
    typer.echo(ESCAPE, color=True)
    typer.echo("\ud800", err=True)
    assert not OBEYED & set(out.getvalue() + err.getvalue())
    assert out.getvalue().count("\\u001b[31mred") == 3
    console = SanitizedConsole(force_terminal=True, color_system="standard")
    console.print(Text(f"{ESCAPE}{TURNED}", style="bold"))
    written = out.getvalue().splitlines()[-1]
    assert written.startswith("\x1b[1m")  # its own
    assert "\x1b[31m" not in written
    assert not OBEYED - {"\x1b"} & set(written)


def test_a_refusal_of_the_command_line_is_made_harmless(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    done = subprocess.run(
        [sys.executable, "-c", "from iserve.cli import main; main()", "trace", f"{tmp_path}/{CSI}{TURNED}"],
        env=environment | {"ISERVE_HOME": str(tmp_path / "home")},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode != 0
    assert "Traceback" not in said
    assert not OBEYED & set(said)
    assert "\\u202e" in said or "\\x9b" in said


@pytest.mark.parametrize("name", ["../../etc", "x/log", "", "..", "a b", "x?lines=1", "模型"])
@pytest.mark.parametrize("command", ["logs", "rm", "chat"])
def test_what_cannot_name_a_deployment_names_none(
    command: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """The controller is asked nothing: in a path such a name would be another route."""
    monkeypatch.setattr(sys, "argv", ["iserve", command, name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    golden("cli-errors", capsys.readouterr().err)
