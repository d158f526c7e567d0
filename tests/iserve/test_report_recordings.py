"""Reports of models that were measured on vLLM and an H200: the recordings of ``tests/bench/results/h200``.

Whole models are in the recordings with their fingerprints, so what the page says can be checked against them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from daemon.engines.registry import get_engine
from fingerprint.codec import to_json
from fingerprint.config import Workload
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.repeat_overhead import together
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import StepReading
from iserve.cli.app import make_app
from iserve.cli.profile_text import print_profile
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware
from iserve.report.accuracy import AccuracyRecord, find_accuracy, read_accuracy
from iserve.report.build import build_report
from iserve.report.full_model import WholeModel
from iserve.report.page import render_report
from iserve.report.text import seconds
from iserve.report.values import Report
from tests.bench.accuracy import RESULTS, load, memory_row, truths
from tests.bench.accuracy_measure import OUTPUT, Recorded
from tests.bench.accuracy_record import accuracy_records
from tests.bench.accuracy_record import main as keep_records
from tests.golden_words import Golden

RECORDINGS = load(RESULTS / "h200")
HOSTILE = "<script>alert('x')</script>"

each_recording = pytest.mark.parametrize(
    "recorded", [pytest.param(one, id=f"{one.model}-{one.weights}-tp{one.tp}-pp{one.pp}") for one in RECORDINGS]
)


@cache
def records() -> Sequence[AccuracyRecord]:
    """Return those of all recordings, one for each machine."""
    return accuracy_records(RECORDINGS)


@pytest.fixture(scope="module")
def record() -> AccuracyRecord:
    """Return the record of the machine that measured last."""
    return records()[-1]


def record_of(recorded: Recorded) -> AccuracyRecord:
    """Return the record of the machine that measured it."""
    (found,) = (r for r in records() if r.machine == recorded.profile.machine)
    return found


_ESTIMATORS: dict[int, tuple[Recorded, DepthTiedEstimator]] = {}  # made once: by the recording's identity


def estimator_of(recorded: Recorded) -> DepthTiedEstimator:
    if id(recorded) not in _ESTIMATORS:
        profile = recorded.profile
        made = DepthTiedEstimator(profile, RooflineEstimator(profile.spec, profile.machine.device))
        _ESTIMATORS[id(recorded)] = recorded, made
    return _ESTIMATORS[id(recorded)][1]


_REPORTS: dict[tuple[int, int], Report] = {}  # made once: by the recording's identity, and GPUs


def report_of(recorded: Recorded, num_gpus: int = 1, record: AccuracyRecord | None = None) -> Report:
    if any(recorded is one for one in RECORDINGS):
        key = id(recorded), num_gpus
        made = _REPORTS[key] = _REPORTS.get(key) or _made(recorded, num_gpus)
    else:
        made = _made(recorded, num_gpus)
    return replace(made, accuracy=record)


def _made(recorded: Recorded, num_gpus: int) -> Report:
    return build_report(
        recorded.model,
        recorded.profile.spec,
        hypothetical_hardware(recorded.profile.machine.device, num_gpus),
        estimator_of(recorded),
        [get_engine("vllm").capabilities()],
        PlanOptions(workload=Workload(batch=8, input_tokens=512, output_tokens=OUTPUT)),
    )


def own(report: Report, recorded: Recorded) -> WholeModel:
    """The configuration that was recorded."""
    (model,) = (m for m in report.whole if (m.tp, m.pp) == (recorded.tp, recorded.pp))
    return model


def section(page: str, anchor: str) -> str:
    """Return its text, tags and entities taken out."""
    (found,) = re.findall(rf'<section id="{anchor}">.*?</section>', page, re.DOTALL)
    return "".join(ElementTree.fromstring(found).itertext())


@pytest.mark.slow
@each_recording
@pytest.mark.parametrize("num_gpus", [1, 4])
def test_the_page_is_whole_and_says_what_was_measured(recorded: Recorded, num_gpus: int) -> None:
    report = report_of(recorded, num_gpus)
    page = render_report(report)
    assert "nothing was measured" not in page
    assert "from fingerprints measured" in page
    times, counted = section(page, "whole"), section(page, "counted")
    for point in own(report, recorded).points:
        time = point.time
        row = [f"{time.batch}", f"{time.input_tokens:,}"]
        for found in (time.ttft_s, time.tpot_s):
            row += [seconds(found.value), f"{seconds(found.low)} to {seconds(found.high)}"]
        assert "".join(row) in times  # the cells of its row, in their order
    assert f"{own(report, recorded).num_layers} layers, each forward" in times
    assert f"model ({recorded.profile.spec.num_layers} layers), predicted" in counted
    for note in recorded.profile.notes:
        assert note in section(page, "model")
    assert 'id="times"' not in page  # of the paper's method, which nothing here rests on
    assert "No full model" in section(page, "errors")
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert ElementTree.fromstring(drawing).attrib["aria-label"]
    assert len({found.config for found in report.configurations}) == len(report.configurations)
    assert any(found.feasible for found in report.configurations)


@each_recording
def test_every_point_is_charted_at_both_widths(recorded: Recorded) -> None:
    record = record_of(recorded)
    page = render_report(report_of(recorded, record=record))
    (whole,) = re.findall(r'<section id="whole">.*?</section>', page, re.DOTALL)
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r'<svg[^>]*class="chart".*?</svg>', whole)]
    points = len(own(report_of(recorded), recorded).points)
    assert [len(list(chart.iter("circle"))) for chart in charts] == [points] * 4  # TTFT, TPOT, wide and narrow
    for chart in charts:
        diamonds = [mark for mark in chart.iter("polygon") if "truth" in mark.get("class", "")]
        assert len(diamonds) == len(truths(recorded))
    assert f"answers of {OUTPUT} tokens" in section(page, "whole")


@each_recording
def test_a_repeated_step_waits_and_takes_as_the_whole_models(recorded: Recorded) -> None:
    """The whole model was run with the step timer on, too: what the page says of its parts can be looked up."""
    model = own(report_of(recorded), recorded)
    points = {(p.time.batch, p.time.input_tokens): p.decode for p in model.points}
    assert recorded.whole_timed
    for timed in recorded.whole_timed:
        mine = points[timed.batch, timed.input_tokens]
        steps = [s for run in timed.runs for s in _later_half(run.steps, timed.batch)]
        if not steps:  # a pipeline works on parts of a batch, of which one step each is a round
            rounds = [found for run in timed.runs for found in together(timed, run)]
            assert recorded.pp == 2
            assert {len(found.steps) for found in rounds} == {2}
            forward_s = statistics.median(found.forward_s for found in rounds[len(rounds) // 2 :])
            assert mine.layers_s == pytest.approx(forward_s, rel=0.08)
            continue
        assert mine.gap_s < 5e-6
        assert mine.gap_s == pytest.approx(statistics.median(s.gap_s for s in steps), abs=2e-6)
        assert mine.layers_s == pytest.approx(statistics.median(s.forward_s for s in steps), rel=0.08)
    assert model.plain_gap_s is not None
    if recorded.tp == 1:  # ranks that sum their parts wait for the slower host inside the forward
        assert model.plain_gap_s[0] > 20 * max(point.gap_s for point in points.values())


def _later_half(steps: tuple[StepReading, ...], batch: int) -> list[StepReading]:
    whole = [s for s in steps if not s.prefill_tokens and s.sequences == batch]
    return whole[len(whole) // 2 :]


@each_recording
def test_counted_memory_is_near_the_whole_models(recorded: Recorded) -> None:
    memory = own(report_of(recorded), recorded).memory
    assert memory is not None
    rank = max(recorded.whole_memory, key=lambda r: r.weights_bytes)
    assert memory.whole.weights_bytes == pytest.approx(rank.weights_bytes, rel=0.005)
    if recorded.tp == 1:
        assert memory.whole.activation_bytes == rank.activation_peak_bytes
    else:  # one reading each: 60 MiB of 2 GiB more in the whole model, of what is not known
        assert memory.whole.activation_bytes == pytest.approx(rank.activation_peak_bytes, rel=0.03)
    assert memory.whole.context_bytes == pytest.approx(rank.runtime_bytes, abs=2**28)
    held = rank.weights_bytes + rank.activation_peak_bytes + rank.runtime_bytes + rank.graph_bytes
    assert memory.whole.total_bytes == pytest.approx(held, rel=0.05)
    assert memory.whole.kv_bytes_per_token == pytest.approx(rank.kv_bytes / rank.kv_room_tokens, rel=0.01)


def test_what_was_not_recorded_is_said_and_what_was_is_shown(golden: Golden) -> None:
    recorded = RECORDINGS[0]
    silent = replace(recorded, profile=_with_readings(recorded, None))
    text = section(render_report(report_of(silent)), "whole")
    golden("reports", re.findall(r"Not recorded.*?\.", text))
    told = section(render_report(report_of(replace(recorded, profile=_with_readings(recorded, 1755.0)))), "whole")
    assert "1,755 MHz" in told
    golden("reports", re.findall(r"Not recorded.*?\.", told))


def _with_readings(recorded: Recorded, clock: float | None) -> object:
    timing = tuple(
        replace(
            p,
            runs=tuple(replace(run, sm_clock_mhz=clock, power_w=None, held_bytes=None) for run in p.runs),
        )
        for p in recorded.profile.timing
    )
    return replace(recorded.profile, timing=timing)


def test_a_corrected_estimator_shows_what_its_base_measured() -> None:
    recorded = RECORDINGS[0]
    plain = report_of(recorded)
    corrected = build_report(
        recorded.model,
        recorded.profile.spec,
        hypothetical_hardware(recorded.profile.machine.device, 1),
        CorrectedEstimator(estimator_of(recorded), ()),
        [get_engine("vllm").capabilities()],
        PlanOptions(workload=plain.workload),
    )
    assert corrected.whole == plain.whole
    assert corrected.profile is recorded.profile


def test_notes_are_text_not_markup() -> None:
    recorded = RECORDINGS[0]
    hostile = replace(recorded, profile=replace(recorded.profile, notes=(HOSTILE,)))
    page = render_report(report_of(hostile))
    assert HOSTILE not in page
    assert HOSTILE in section(page, "model")


# The whole models as records


@each_recording
def test_a_record_holds_the_bench_s_truths(recorded: Recorded) -> None:
    record = record_of(recorded)
    ran = (recorded.model, recorded.tp, recorded.pp, recorded.weights)
    rows = [row for row in record.rows if (row.model, row.config.tp, row.config.pp, row.config.weights) == ran]
    times = {
        (row.workload.batch, row.workload.input_tokens, row.quantity): row
        for row in rows
        if row.workload is not None
    }
    for truth in truths(recorded):
        ttft, tpot = (times[truth.batch, truth.input_tokens, name] for name in ("ttft_s", "tpot_s"))
        assert (ttft.measured, tpot.measured) == (truth.ttft_s, truth.tpot_s)
        found = estimator_of(recorded).estimate(ttft.config, truth.workload)
        assert (ttft.predicted, tpot.predicted) == (found.ttft_s, found.tpot_s)
        for row in (ttft, tpot):
            assert row.measured_low < row.measured < row.measured_high
            assert row.predicted.low < row.predicted.value < row.predicted.high
    memory = {row.quantity: row for row in rows if row.workload is None}
    counted = memory_row(recorded)
    assert memory["kv_blocks"].measured == counted.blocks
    assert memory["kv_blocks"].predicted.value == counted.blocks_predicted
    assert memory["kv_blocks"].predicted.low < counted.blocks_predicted < memory["kv_blocks"].predicted.high
    assert memory["weights_bytes_per_gpu"].measured == counted.weights_bytes
    assert memory["non_kv_bytes_per_gpu"].measured == counted.non_kv_bytes
    assert len(rows) == 2 * len(truths(recorded)) + 3


@pytest.mark.slow
def test_records_are_kept_where_a_report_looks_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: AccuracyRecord
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    target = tmp_path / "truth.json"
    assert keep_records(["--json", str(target)]) == 0
    assert read_accuracy(target) == record
    for one in RECORDINGS:
        found = find_accuracy(tmp_path / "home", one.profile.spec.shape_hash, one.profile.machine)
        assert found is not None
        assert found in records()
        assert one.profile.spec.shape_hash in {row.shape_hash for row in found.rows}


def test_no_recordings_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        keep_records([str(tmp_path)])
    assert refused.value.code == 2


@each_recording
def test_errors_are_on_the_page_for_each_quantity(recorded: Recorded) -> None:
    record = record_of(recorded)
    text = section(render_report(report_of(recorded, record=record)), "errors")
    assert f"This model: {recorded.model}" in text
    assert "load average" not in text  # not recorded there
    for said in ("TTFT", "TPOT", "weights on the fullest GPU", "memory without the KV cache", "KV blocks"):
        assert said in text
    assert f"{memory_row(recorded).blocks:,}" in text
    for row in record.rows:
        if row.model == recorded.model:
            assert f"{row.relative_error:+.1%}" in text


def test_another_models_rows_are_folded_with_their_sum(record: AccuracyRecord, golden: Golden) -> None:
    recorded = RECORDINGS[0]
    page = render_report(report_of(recorded, record=record))
    (errors,) = re.findall(r'<section id="errors">.*?</section>', page, re.DOTALL)
    others = {row.model for row in record.rows if row.shape_hash != recorded.profile.spec.shape_hash}
    folded = re.findall(r"<details><summary>(.*?)</summary>", errors)
    assert len(folded) == len(others)
    golden("reports", folded)


def test_a_record_from_elsewhere_goes_to_any_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: AccuracyRecord
) -> None:
    """``--measurements`` on GPUs that are not here: rows of other models, named so."""
    folder = tmp_path / "small"
    folder.mkdir()
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4}
    sizes = {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(shape | heads | sizes))
    truth, page = tmp_path / "truth.json", tmp_path / "page.html"
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    truth.write_bytes(to_json(record))
    command = ["report", str(folder), "--gpus", "h200:1", "--measurements", str(truth), "-o", str(page)]
    assert CliRunner().invoke(make_app(), command, catch_exceptions=False).exit_code == 0
    text = section(page.read_text(), "errors")
    for model in {row.model for row in record.rows}:
        assert f"same machine: {model}" in text


# In a terminal


@each_recording
def test_a_profile_in_words(recorded: Recorded, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    workload = Workload(batch=8, input_tokens=512, output_tokens=OUTPUT)
    print_profile(recorded.profile, estimator_of(recorded), workload)
    told = capsys.readouterr().out
    model = own(report_of(recorded), recorded)
    runs = sum(len(point.runs) for point in recorded.profile.timing)
    assert told.startswith(f"{recorded.model}: {runs} runs of ")
    assert "after engine starts" in told.splitlines()[0]
    assert f" {model.num_layers} layers repeated {model.repeat} times" in told
    golden("reports", told)
    rows = [line.split() for line in told.splitlines() if re.match(r"\d+ +\d+ ", line)]
    assert [(int(batch), int(tokens)) for batch, tokens, *_ in rows] == [
        (p.time.batch, p.time.input_tokens) for p in model.points
    ]
    assert model.memory is not None
    assert f"{model.memory.blocks:,} KV blocks" in told
