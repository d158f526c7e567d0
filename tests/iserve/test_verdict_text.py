"""Texts of a verdict in the terminal: how sure it is, what it serves, rates and ranges."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Correction, Source
from fingerprint.gpus import parse_gpus
from iserve.cli.render import print_estimate, print_plan
from iserve.planning.document import CapacityBound, CapacityDocument, PlanDocument
from iserve.planning.offline import OneEstimateDocument, plan_for_gpus
from iserve.planning.pipeline import PlanOptions
from iserve.planning.runner_up import BatchRange
from iserve.planning.verdict_text import plan_lines
from iserve.planning.words import seconds
from planner.intent import Intent, Slo
from tests.golden_words import Golden
from tests.iserve.command_line import model
from tests.iserve.test_verdict import judged, planned

__all__ = ["judged", "model"]  # fixtures


GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize(
    "name", ["plan", "plan-rate", "plan-measured", "plan-nothing", "plan-refused", "estimate"]
)
@pytest.mark.parametrize("width", [80, 120])
def test_the_words_in_a_terminal(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden files: documents as JSON, and how they are shown. Wording is held here and nowhere else."""
    for variable, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(variable, value)
    data = (GOLDEN / f"{name.removesuffix('-refused')}.json").read_bytes()
    if name == "estimate":
        print_estimate(from_json(data, OneEstimateDocument))
    else:
        print_plan(from_json(data, PlanDocument), refused=name.endswith("-refused"))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    shown = "".join(f"{line.rstrip()}\n" for line in plain.splitlines())
    assert shown == (GOLDEN / f"{name}-{width}.txt").read_text()
    assert all(len(line) <= width for line in shown.splitlines())


@pytest.mark.parametrize(
    ("like_the_first", "shown"), [((2,), 12), ((1, 2, 3), 12), ((1, 2, 4), 12), ((1, 2), 2), ((), 12)], ids=str
)
def test_rows_whose_intervals_overlap_are_said_not_to_be_told_apart(
    like_the_first: tuple[int, ...], shown: int, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    print_plan(replace(document, indistinguishable=like_the_first), rows=shown)
    told = [line for line in capsys.readouterr().out.splitlines() if "told apart" in line]
    told = [line for line in told if "Runner-up" not in line]
    assert (told == []) is (like_the_first == ())
    golden("reports", told)


def test_batches_are_told_as_ranges() -> None:
    from iserve.planning.verdict_text import _batch_words

    told = [_batch_words(BatchRange(first=a, last=b)) for a, b in ((16, 256), (1, 4), (16, 64), (8, 8))]
    assert told == [["from batch 16 on"], ["up to batch 4"], ["at batch 16 to 64"], ["at batch 8"]]


@pytest.mark.parametrize(
    ("source", "measured_config", "measured"),
    [
        (Source.EXTRAPOLATED, DeploymentConfig(), True),
        (Source.SCALED, DeploymentConfig(), True),
        (Source.SHARDED, DeploymentConfig(), True),
        (Source.SCALED, DeploymentConfig(tp=2), False),
        (Source.EXTRAPOLATED, DeploymentConfig(pp=2), False),
        (Source.ROOFLINE, None, False),
    ],
)
def test_measured_is_said_of_a_configuration_that_was_run_and_of_no_other(
    source: Source, measured_config: DeploymentConfig | None, measured: bool, golden: Golden
) -> None:
    shown = sure_words(source, measured_config, measured=measured)
    golden("reports", shown)
    assert ("was not measured" in shown or "nothing was measured" in shown) == (not measured)


def test_a_check_of_the_whole_model_makes_a_scaled_estimate_a_measured_one(golden: Golden) -> None:
    check = Correction(
        measured_at="2026-01-01T00:00:00",
        config=DeploymentConfig(),
        workload=Workload(),
        exact=True,
        ttft_log_ratio=0.1,
        tpot_log_ratio=0.1,
        memory_bytes=0,
    )
    shown = sure_words(Source.SCALED, DeploymentConfig(tp=2), measured=True, correction=check)
    golden("reports", shown)
    assert "not measured" not in shown


def sure_words(
    source: Source, measured_config: DeploymentConfig | None, *, measured: bool, **more: Correction
) -> str:
    """The line "How sure" of a plan whose chosen configuration has an estimate with these origins."""
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    chosen, verdict = document.candidates[0], document.verdict
    assert chosen.estimate is not None
    assert verdict is not None
    assert verdict.figures is not None
    tpot = replace(chosen.estimate.tpot_s, source=source)
    estimate = replace(chosen.estimate, tpot_s=tpot, measured_config=measured_config, **more)  # type: ignore[arg-type]
    chosen = replace(chosen, config=DeploymentConfig(), estimate=estimate, measured=measured)
    verdict = replace(verdict, figures=replace(verdict.figures, tpot_s=tpot))
    lines = dict(plan_lines(replace(document, candidates=(chosen, *document.candidates[1:]), verdict=verdict)))
    return lines["How sure"]


@pytest.mark.parametrize(
    ("requests", "bound"),
    [
        (32, CapacityBound.GIVEN),
        (32, CapacityBound.MEMORY),
        (32, CapacityBound.NOT_MEASURED),
        (32, None),
        (40, CapacityBound.MEMORY),
        (256, CapacityBound.LARGEST),
    ],
)
def test_the_line_on_what_is_served_is_always_there_with_its_reason(
    requests: int, bound: CapacityBound | None, golden: Golden
) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    capacity = CapacityDocument(
        requests_at_once=requests, context_tokens=640, kv_tokens=640, memory_bytes_per_gpu=2**30, bound=bound
    )
    shown = dict(plan_lines(replace(document, capacity=capacity)))["Serves"]
    assert shown.startswith(f"up to {requests} requests")
    golden("reports", shown)


@pytest.mark.parametrize(
    ("hardware", "device"),
    [("2 x cpu (node0)", "CPU device"), ("2 x a6000", "GPU"), ("8 x h200-sxm (cpu)", "GPU")],
)
def test_memory_is_said_to_be_that_of_the_devices_there_are(
    hardware: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = replace(from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument), hardware=hardware)
    capacity = CapacityDocument(
        requests_at_once=256, context_tokens=640, kv_tokens=640, memory_bytes_per_gpu=2**30
    )
    assert f" GiB of each {device};" in dict(plan_lines(replace(document, capacity=capacity)))["Serves"]
    print_plan(document)
    heads = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("#"))
    assert ("per GPU" in heads) == (device == "GPU")


@pytest.mark.parametrize(
    ("wish", "more_requests", "is_said"),
    [
        ({"slo": Slo(tpot_s=1.0)}, True, True),
        ({"slo": Slo(tpot_s=1.0)}, False, True),
        ({"slo": Slo(tpot_s=1.0), "rate_per_s": 0.1}, True, False),
        ({}, True, False),
    ],
)
def test_the_load_at_which_an_slo_was_judged_is_said_where_no_rate_says_it(
    model: Callable[[str], Path], wish: dict[str, Any], more_requests: bool, is_said: bool, golden: Golden
) -> None:
    gpu, count = parse_gpus("h200:1")
    options = PlanOptions(intent=Intent(**wish), more_requests=more_requests)
    lines = plan_lines(plan_for_gpus(str(model("Llama-2-7b")), gpu, count, options, "vllm"))
    told = [text for _, text in lines if text.startswith("the SLO was judged")]
    assert len(told) == is_said
    golden("reports", told)


def test_rates_of_several_replicas_are_told_in_total_and_of_one(golden: Golden) -> None:
    """A plan of two replicas at twice the rate has the plan of one, with all rates in words doubled."""
    one, two = (
        plan_lines(planned("h200:8", replicas=count, slo=Slo(tpot_s=1.0), rate_per_s=0.25 * count))
        for count in (1, 2)
    )
    load, busy = (text for _, text in one[:2])
    load_of_two, busy_of_two = (text for _, text in two[:2])
    assert load.startswith("0.25 requests/s (")
    golden("reports", load_of_two)
    highest = float(re.findall("up to ([0-9.]+) requests/s keeps", busy)[0])
    in_all, each = map(
        float, re.findall("up to ([0-9.]+) requests/s in total .([0-9.]+) per replica", busy_of_two)[0]
    )
    assert (in_all, each) == (pytest.approx(2 * highest, rel=0.01), highest)


def test_requests_of_several_replicas_are_told_in_total_and_of_one(golden: Golden) -> None:
    one, two = (plan_lines(planned("h200:8", replicas=count, more_requests=True)) for count in (1, 2))
    per_s = float(re.findall("([0-9.]+) requests/s", one[0][1])[0])
    in_all, each = map(float, re.findall("([0-9.]+) requests/s in total .([0-9.]+) per replica", two[0][1])[0])
    golden("reports", two[0][1])
    assert (in_all, each) == (pytest.approx(2 * per_s, rel=0.01), per_s)
    golden("reports", dict(two)["Serves"])


def test_an_interval_of_thousands_has_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    first, *rest = document.candidates
    wide = replace(first, objective=710.5, objective_low=497.2, objective_high=1358.4)
    print_plan(replace(document, candidates=(wide, *rest)))
    assert "710.5 [497-1358]" in capsys.readouterr().out


@pytest.mark.parametrize("value_s", [0.0123456, 0.5, 0.9994, 0.99951, 0.99999, 1.0, 61.0])
def test_a_time_has_no_exponent_and_is_within_its_digits(value_s: float) -> None:
    number, unit = seconds(value_s).split()
    assert "e" not in number
    assert float(number) * {"ms": 1e-3, "s": 1.0}[unit] == pytest.approx(value_s, rel=5e-3)
