"""``iserve report``: what it gathers, writes and refuses. A real HTTP server plays the controller."""

from __future__ import annotations

import html
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import iserve.cli.connection
from daemon.engines.registry import capabilities_for
from daemon.status import DeviceStatus
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import BadInputError, NotFoundError, NotMeasuredError
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import Profile
from fingerprint.profile import ProfilePlan, default_plan
from iserve.api_documents import ModelDocument, NodeDocument
from iserve.cli.app import make_app
from iserve.cli.profile_text import print_profile
from iserve.cli.report import hardware_here
from iserve.client import ControllerClient
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.offline import plan_for_gpus
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware, make_plan
from iserve.planning.verdict_text import alike_words, note_lines, plan_lines
from iserve.report.accuracy import AccuracyRecord, AccuracyRow, find_accuracy, read_accuracy, store_accuracy
from iserve.report.build import build_report, find_profile
from iserve.report.page import render_report
from iserve.report.values import Report
from placement.types import DeploymentState, Placement, ReplicaState, StagePlacement
from planner.intent import Intent, IntentKind
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, take_profile
from tests.golden_words import Golden
from tests.iserve.page_words import page_words

LLAMA_2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Llama-2-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


@pytest.fixture(scope="module")
def report(model: Path) -> Report:
    spec, gpu = load_spec(model), gpu_spec("a6000")
    hardware, engines = hypothetical_hardware(gpu, 8), capabilities_for("auto")
    return build_report("Llama-2-7b", spec, hardware, RooflineEstimator(spec, gpu), engines, PlanOptions())


def test_all_eight_intents_rank_every_configuration(report: Report) -> None:
    assert {ranking.intent for ranking in report.rankings} == {str(kind) for kind in IntentKind}
    every = set(range(len(report.configurations)))
    for ranking in report.rankings:
        assert {row.configuration for row in ranking.rows} == every
        assert len(ranking.rows) == len(every)
    assert len({found.config for found in report.configurations}) == len(every)


def test_every_intents_verdict_is_on_the_page_and_the_default_intents_comes_first(report: Report) -> None:
    page = html.unescape(render_report(report))
    assert report.rankings[0].intent == "min-cost"
    for ranking in report.rankings:
        assert ranking.verdict is not None
        assert ranking.verdict.sentence in page
        assert {"At this load", "How sure", "Runner-up"} <= {label for label, _ in ranking.verdict.lines}
        refused = sum(not row.feasible for row in ranking.rows)
        assert ranking.verdict.refused.startswith(f"{refused} refused: ")
    first = report.rankings[0].verdict
    assert first is not None
    assert page.index(first.sentence) < page.index("<nav")
    assert page.index(first.lines[0][1]) < page.index("<nav")


def test_rankings_are_the_planners(report: Report) -> None:
    gpu = gpu_spec("a6000")
    estimator = RooflineEstimator(report.spec, gpu)
    hardware, engines = hypothetical_hardware(gpu, 8), capabilities_for("auto")
    for kind in (IntentKind.MIN_COST, IntentKind.MAX_THROUGHPUT):
        plan = make_plan(report.spec, hardware, estimator, engines, PlanOptions(intent=Intent(kind=kind)))
        (ranking,) = (r for r in report.rankings if r.intent == str(kind))
        assert [report.configurations[row.configuration].config for row in ranking.rows] == [
            ranked.config for ranked in plan.candidates
        ]
        assert [row.reason for row in ranking.rows] == [ranked.reason for ranked in plan.candidates]


def test_example_limits_follow_from_the_best_and_admit_it(report: Report) -> None:
    by_intent = {ranking.intent: ranking for ranking in report.rankings}
    for intent, source in (("latency-slo", "min-latency"), ("cost-slo", "min-cost")):
        ranking = by_intent[intent]
        assert ranking.limit is not None
        assert "1.5 times" in ranking.limit
        best = by_intent[source].rows[0].configuration
        assert best in {row.configuration for row in ranking.rows if row.feasible}
        assert any(not row.feasible and "exceeds" in (row.reason or "") for row in ranking.rows)
    assert all(r.limit is None for r in report.rankings if r.intent not in {"latency-slo", "cost-slo"})


# The command


def invoke(*arguments: str) -> tuple[int, str]:
    """Return exit code and everything printed; an expected error is printed as ``iserve`` prints it."""
    result = CliRunner().invoke(make_app(), ["report", *arguments], catch_exceptions=True)
    if isinstance(result.exception, SystemExit) or result.exception is None:
        return result.exit_code, result.output
    raise result.exception


def test_a_page_for_gpus_that_are_not_here(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, told = invoke(str(model), "--gpus", "a6000:8", "-o", str(page))
    assert code == 0, told
    assert "Llama-2-7b on 8 x a6000" in told
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "nothing was measured" in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]  # nothing half-made


def test_the_page_goes_to_report_html_and_replaces_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("old")
    assert invoke(str(model), "--gpus", "h200:1")[0] == 0
    assert "Llama-2-7b" in (tmp_path / "report.html").read_text()


def test_json_is_the_data_behind_the_page(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, told = invoke(str(model), "--gpus", "a6000:2", "--json")
    data = json.loads(told)
    assert code == 0
    assert data["spec"]["num_layers"] == 32
    assert {ranking["intent"] for ranking in data["rankings"]} == {str(kind) for kind in IntentKind}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", ["--json", "--markdown"])
def test_a_file_for_what_is_printed_is_refused(model: Path, tmp_path: Path, other: str) -> None:
    code, told = invoke(str(model), "--gpus", "a6000:2", other, "-o", str(tmp_path / "page.html"))
    assert code == 2
    assert f"{other} prints the report" in " ".join(told.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [".", "missing/page.html"])
def test_a_directory_is_never_overwritten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, told = invoke(str(model), "--gpus", "a6000:8", "-o", target)
    assert code == 2
    assert "--output" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--gpus", "nonsense"], ["--gpus", "a6000:8", "--batch", "0"]])
def test_bad_values_are_usage_errors(model: Path, arguments: list[str]) -> None:
    assert invoke(str(model), *arguments)[0] == 2


def test_a_workload_beyond_the_context_is_one_line(model: Path, tmp_path: Path) -> None:
    command = [str(model), "--gpus", "a6000:8", "--input-tokens", "5000", "-o", str(tmp_path / "page.html")]
    run = subprocess.run(
        [sys.executable, "-c", "from iserve.cli import main; main()", "report", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("iserve: ")
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"rows": 3}', b"\x00\xff"])
def test_a_record_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "truth.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotFoundError if content is None else BadInputError, match=r"truth\.json"):
        read_accuracy(path)


# By a profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    plan = ProfilePlan(budget_s=1e6, max_repeats=5, weights=(WeightFormat.BITS16, WeightFormat.INT8))
    return take_profile(SyntheticMachine(noise=0.02), plan)


def test_the_latest_profile_of_the_shape_is_found(profile: Profile) -> None:
    older, newer = replace(profile, created_at="2026-01-01"), replace(profile, created_at="2026-02-01")
    other = replace(profile, model="other", created_at="2026-03-01", spec=replace(profile.spec, num_layers=3))
    shape = profile.spec.shape_hash
    assert find_profile([older, other, newer], "synthetic", shape) is newer
    assert find_profile([older, other, newer], "another name of it", shape) is newer
    assert find_profile([older, other], "other", None) is other
    with pytest.raises(NotMeasuredError, match="iserve profile synthetic"):
        find_profile([other], "synthetic", shape)


def test_a_profile_of_plain_fingerprints_in_words(
    profile: Profile, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    estimator = estimator_for(profile)
    for complete in (True, False):
        print_profile(replace(profile, complete=complete), estimator, Workload())
        (line,) = capsys.readouterr().out.splitlines()
        runs = sum(len(point.runs) for point in profile.timing)
        assert f" {runs} runs of {len(profile.timing)} points in {profile.spent_s:.1f} s" in line
        golden("reports", line)


class Controller:
    """Answers the routes that a report reads."""

    def __init__(self, profiles: tuple[Profile, ...], folder: Path) -> None:
        devices = tuple(
            DeviceStatus(
                device_id=f"cpu:{i}",
                index=i,
                kind="cpu",
                name="cpu",
                total_bytes=8 << 30,
                free_bytes=8 << 30,
                load_fraction=0.0,
            )
            for i in range(2)
        )
        answers: dict[str, object] = {
            "/api/v1/profiles": profiles,
            "/api/v1/verifications": (),
            "/api/v1/serving": (),
            "/api/v1/nodes": (
                NodeDocument(node_id="here", reachable=True, observed_at=0.0, devices=devices, num_workers=0),
            ),
            "/api/v1/models": (
                ModelDocument(
                    name="unprofiled",
                    directory=str(folder),
                    family="llama",
                    num_layers=32,
                    num_params=1,
                    has_weights=False,
                ),
            ),
        }

        self.answers = answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = to_json(answers[self.path])
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def controller(profile: Profile, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    running = Controller((profile,), model)
    url = f"http://127.0.0.1:{running.server.server_port}"
    monkeypatch.setattr(iserve.cli.connection, "client", lambda: ControllerClient(url, "token"))
    yield running
    running.close()


def record_of(profile: Profile, *, measured: float, created_at: str = "2026-01-01") -> AccuracyRecord:
    """The whole model's TTFT: predicted 1 s, and ``measured``."""
    row = AccuracyRow(
        model="synthetic",
        shape_hash=profile.spec.shape_hash,
        num_layers=profile.spec.num_layers,
        config=DeploymentConfig(),
        workload=Workload(4, 512, 17),
        quantity="ttft_s",
        predicted=Quantity(1.0, 0.5, 1.5, Source.EXTRAPOLATED),
        measured=measured,
        measured_low=measured,
        measured_high=measured,
        repeats=5,
    )
    return AccuracyRecord(
        created_at=created_at,
        command="bench",
        machine=profile.machine,
        load_average_before=0.0,
        load_average_after=0.0,
        rows=(row,),
    )


def errors_of(page: Path) -> str:
    return page.read_text().partition('<section id="errors">')[2].partition("</section>")[0]


@pytest.mark.slow
def test_a_measured_whole_model_is_on_the_page_without_being_asked_for(
    controller: Controller, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    home, page = tmp_path / "home", tmp_path / "page.html"
    monkeypatch.setenv("ISERVE_HOME", str(home))
    command = ("synthetic", "-o", str(page), "--output-tokens", "17")
    assert invoke(*command)[0] == 0
    golden("reports", page_words(errors_of(page)))
    (kept,) = store_accuracy(home, record_of(profile, measured=0.8))
    assert list((home / "accuracy").iterdir()) == [kept]  # nothing half-made next to it
    assert invoke(*command)[0] == 0
    assert "This model: synthetic" in errors_of(page)
    assert "+25.0%" in errors_of(page)
    assert "full model measured, 16bit" in page.read_text()  # the diamond next to the fitted line
    truth = tmp_path / "truth.json"
    truth.write_bytes(to_json(record_of(profile, measured=0.4)))
    assert invoke(*command, "--measurements", str(truth))[0] == 0
    assert "+150.0%" in errors_of(page)
    assert "+25.0%" not in errors_of(page)


def test_a_report_plans_beside_who_is_called(controller: Controller, profile: Profile) -> None:
    stage = StagePlacement(node_id="here", device_ids=("cpu:0",), first_layer=0, num_layers=8, bytes_per_gpu=0)
    replica = ReplicaState(replica_id="a", placement=Placement((stage,)), ready=True, outstanding=0, max_batch=8)
    other = DeploymentState(
        name="a", model="a", wanted=1, replicas=(replica,), moving=False, waiting=0, requests_per_s=0.0,
        service_s=1.0, idle_s=0.0, steady_s=1000.0,
    )  # fmt: skip
    for requests_per_s in (0.0, 1.0):
        there = replace(other, requests_per_s=requests_per_s)
        controller.answers["/api/v1/serving"] = (there,)
        _, hardware = hardware_here(iserve.cli.connection.client(), profile.machine.device)
        assert hardware.snapshot.deployments == (there,)


def test_a_record_is_found_by_shape_and_machine(profile: Profile, tmp_path: Path) -> None:
    shape, machine = profile.spec.shape_hash, profile.machine
    assert find_accuracy(tmp_path / "no-home", shape, machine) is None
    older, newer = (record_of(profile, measured=0.8, created_at=f"2026-0{month}-01") for month in (1, 2))
    store_accuracy(tmp_path, older)
    store_accuracy(tmp_path, newer)
    assert find_accuracy(tmp_path, shape, machine) == newer
    assert find_accuracy(tmp_path, "another shape", machine) == newer  # other models, same machine
    slower = replace(machine, device=replace(machine.device, memory_bytes_per_s=1.0, memory_bytes=1))
    assert find_accuracy(tmp_path, shape, slower) == newer  # peaks are measured anew in every launch
    for other in (replace(machine, cpu_model="another"), replace(machine, versions=(("engine", "synthetic 2"),))):
        assert find_accuracy(tmp_path, shape, other) is None


def test_a_home_that_cannot_be_written_to_is_named(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "accuracy").write_text("in the way")
    with pytest.raises(NotFoundError, match="accuracy"):
        store_accuracy(tmp_path, record_of(profile, measured=0.8))


def test_a_page_from_the_stored_profile_with_its_errors(
    controller: Controller, profile: Profile, tmp_path: Path, golden: Golden
) -> None:
    record = replace(record_of(profile, measured=1.0), rows=())
    truth, page = tmp_path / "truth.json", tmp_path / "page.html"
    truth.write_bytes(to_json(record))
    code, told = invoke("synthetic", "-o", str(page), "--measurements", str(truth), "--output-tokens", "17")
    assert code == 0, told
    text = page.read_text()
    golden("reports", page_words(text))
    assert 'id="times"' in text
    assert "extrapolated" in text


def test_a_twins_profile_serves_under_the_models_own_name(
    profile: Profile, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile is of a shape; the page is of the model that was asked for."""
    running = Controller((replace(profile, spec=load_spec(model)),), model)
    url = f"http://127.0.0.1:{running.server.server_port}"
    monkeypatch.setattr(iserve.cli.connection, "client", lambda: ControllerClient(url, "token"))
    try:
        code, told = invoke("unprofiled", "-o", str(tmp_path / "page.html"))
    finally:
        running.close()
    assert code == 0, told
    assert told.startswith(f"{tmp_path / 'page.html'}: unprofiled on ")


def test_without_a_profile_it_says_how_to_take_one(controller: Controller, tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match="iserve profile unprofiled"):
        invoke("unprofiled", "-o", str(tmp_path / "page.html"))
    assert not list(tmp_path.iterdir())


def test_without_a_profile_of_a_folder_it_names_the_folder_as_it_was_given(
    controller: Controller, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A folder's name alone is not registered: `iserve profile NAME` would not find it."""
    (tmp_path / "my models").symlink_to(model.parent)
    monkeypatch.chdir(tmp_path)
    given = f"./my models/{model.name}"
    with golden.raises("reports", NotMeasuredError):
        invoke(given, "-o", str(tmp_path / "page.html"))


def test_a_model_that_is_nowhere_is_told_so(controller: Controller, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no directory"):
        invoke("./nowhere/at/all", "-o", str(tmp_path / "page.html"))


def test_every_configuration_of_the_plan_is_on_the_page(report: Report) -> None:
    page = render_report(report).replace("\u00a0", " ")
    for found in report.configurations:
        config = found.config
        assert f"tp={config.tp} pp={config.pp}, {config.weights} weights, {config.kv} KV" in page


def test_the_report_as_markdown_in_a_file_and_on_standard_output(
    model: Path, tmp_path: Path, golden: Golden
) -> None:
    runner, asked = CliRunner(), ["report", str(model), "--gpus", "a6000:2"]
    assert runner.invoke(make_app(), [*asked, "-o", str(tmp_path / "x.md")]).exit_code == 0
    written = (tmp_path / "x.md").read_text()
    assert written.startswith("# Llama-2-7b\n")
    golden("reports", [line for line in written.splitlines() if line.startswith("#")])
    assert "<" not in written.replace("\\<", "")
    printed = runner.invoke(make_app(), [*asked, "--markdown"])
    assert (printed.exit_code, printed.stdout.splitlines()[0]) == (0, "# Llama-2-7b")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "x.md"]
    assert runner.invoke(make_app(), [*asked, "--markdown", "--json"]).exit_code == 2


@pytest.mark.parametrize("kind", [IntentKind.MIN_COST, IntentKind.MIN_MEMORY])
def test_the_page_says_what_a_terminal_says(model: Path, kind: IntentKind, tmp_path: Path) -> None:
    """Every line of the verdict and every note, those on the serving capacity among them."""
    gpu = gpu_spec("a6000")
    options = PlanOptions(intent=Intent(kind=kind), more_requests=True, longer_requests=True)
    document = plan_for_gpus(str(model), gpu, 8, options, "auto")
    page = tmp_path / "page.html"
    assert invoke(str(model), "-o", str(page), "--gpus", "a6000:8")[0] == 0
    shown = html.unescape(page.read_text())
    lines = plan_lines(document)
    alike = [alike_words(document, 12)] if document.indistinguishable else []
    assert "Serves" in dict(lines)
    assert document.indistinguishable or document.joint is not None
    for text in (*(text for _, text in lines), *note_lines(document), *alike):
        assert text in shown


def test_a_page_on_a_profile_that_was_cut_short_says_so(golden: Golden) -> None:
    machine = SyntheticMachine(launch_s=15.0, load_s=2.0, run_cost=20.0)
    profile = take_profile(machine, default_plan(machine.spec, Workload(), budget_s=60.0))
    assert profile.unreached
    found = build_report(
        "m", profile.spec, hypothetical_hardware(CPU, 2), estimator_for(profile), capabilities_for("torch"),
        PlanOptions(),
    )  # fmt: skip
    told = page_words(render_report(found))
    golden("reports", [line for line in told if "cut short" in line or "was not measured" in line])
