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
from planner.intent import Intent, Slo
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
    ("like_the_first", "shown", "said"),
    [
        ((2,), 12, "1 and 3 cannot be told apart"),
        ((1, 2, 3), 12, "1 cannot be told apart from 2-4"),
        ((1, 2, 4), 12, "1 cannot be told apart from 2, 3, 5"),
        ((1, 2), 2, "1 cannot be told apart from 2 and 1 that are not shown"),
        ((), 12, None),
    ],
)
def test_rows_whose_intervals_overlap_are_said_not_to_be_told_apart(
    like_the_first: tuple[int, ...], shown: int, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    print_plan(replace(document, indistinguishable=like_the_first), rows=shown)
    told = [line for line in capsys.readouterr().out.splitlines() if "told apart" in line]
    assert [line for line in told if "Runner-up" not in line] == (
        [] if said is None else [f"{said}: their intervals of GiB*s overlap"]
    )


def test_batches_are_told_as_ranges() -> None:
    from iserve.planning.verdict_text import _batch_words

    told = [_batch_words(BatchRange(first=a, last=b)) for a, b in ((16, 256), (1, 4), (16, 64), (8, 8))]
    assert told == [["from batch 16 on"], ["up to batch 4"], ["at batch 16 to 64"], ["at batch 8"]]


@pytest.mark.parametrize(
    ("source", "measured_config", "measured", "said"),
    [
        (Source.EXTRAPOLATED, DeploymentConfig(), True, "extrapolated from fingerprints of this configuration"),
        (Source.SCALED, DeploymentConfig(), True, "measurements of this configuration at other loads"),
        (Source.SHARDED, DeploymentConfig(), True, "one rank measured alone"),
        (
            Source.SCALED,
            DeploymentConfig(tp=2),
            False,
            "scaled from measurements of tp=2; this configuration was not",
        ),
        (Source.EXTRAPOLATED, DeploymentConfig(pp=2), False, "fingerprints of pp=2; this configuration was not"),
        (Source.ROOFLINE, None, False, "from datasheets (roofline); nothing was measured"),
    ],
)
def test_measured_is_said_of_a_configuration_that_was_run_and_of_no_other(
    source: Source, measured_config: DeploymentConfig | None, measured: bool, said: str
) -> None:
    shown = sure_words(source, measured_config, measured=measured)
    assert said in shown
    assert ("was not measured" in shown or "nothing was measured" in shown) == (not measured)


def test_a_check_of_the_whole_model_makes_a_scaled_estimate_a_measured_one() -> None:
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
    assert "the whole model was measured at this load by a check" in shown
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
    ("requests", "bound", "said"),
    [
        (32, CapacityBound.GIVEN, "no more than planned: the options fix both"),
        (32, CapacityBound.MEMORY, "no more than planned: more does not fit the free memory"),
        (32, CapacityBound.NOT_MEASURED, "no more than planned: the memory of more was not measured"),
        (32, None, "no more than planned"),
        (40, CapacityBound.MEMORY, "(more does not fit the free memory); the figures are for batch 32"),
        (256, CapacityBound.LARGEST, "of each GPU; the figures are for batch 32"),
    ],
)
def test_the_line_on_what_is_served_is_always_there_with_its_reason(
    requests: int, bound: CapacityBound | None, said: str
) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    capacity = CapacityDocument(
        requests_at_once=requests, context_tokens=640, kv_tokens=640, memory_bytes_per_gpu=2**30, bound=bound
    )
    shown = dict(plan_lines(replace(document, capacity=capacity)))["Serves"]
    assert shown.startswith(f"up to {requests} requests at once of up to 640 tokens each, in 1.00 GiB of each GPU")
    assert said in shown


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
    assert f"in 1.00 GiB of each {device};" in dict(plan_lines(replace(document, capacity=capacity)))["Serves"]
    print_plan(document)
    heads = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("#"))
    assert ("per GPU" in heads) == (device == "GPU")


@pytest.mark.parametrize(
    ("wish", "more_requests", "said"),
    [
        (
            {"slo": Slo(tpot_s=1.0)},
            True,
            "the SLO was judged at 1 request at once, not at the 256 that may be served; --rate or --batch "
            "judges it at more",
        ),
        ({"slo": Slo(tpot_s=1.0)}, False, "the SLO was judged at 1 request at once"),
        ({"slo": Slo(tpot_s=1.0), "rate_per_s": 0.1}, True, None),
        ({}, True, None),
    ],
)
def test_the_load_at_which_an_slo_was_judged_is_said_where_no_rate_says_it(
    model: Callable[[str], Path], wish: dict[str, Any], more_requests: bool, said: str | None
) -> None:
    gpu, count = parse_gpus("h200:1")
    options = PlanOptions(intent=Intent(**wish), more_requests=more_requests)
    lines = plan_lines(plan_for_gpus(str(model("Llama-2-7b")), gpu, count, options, "vllm"))
    told = [text for _, text in lines if text.startswith("the SLO was judged")]
    assert told == ([] if said is None else [said])


def test_rates_of_several_replicas_are_told_in_total_and_of_one() -> None:
    """A plan of two replicas at twice the rate has the plan of one, with all rates in words doubled."""
    one, two = (
        plan_lines(planned("h200:8", replicas=count, slo=Slo(tpot_s=1.0), rate_per_s=0.25 * count))
        for count in (1, 2)
    )
    load, busy = (text for _, text in one[:2])
    load_of_two, busy_of_two = (text for _, text in two[:2])
    assert load.startswith("0.25 requests/s (")
    assert load_of_two.startswith("0.5 requests/s in total (0.25 per replica) (")
    highest = float(re.findall("up to ([0-9.]+) requests/s keeps", busy)[0])
    in_all, each = map(
        float, re.findall("up to ([0-9.]+) requests/s in total .([0-9.]+) per replica", busy_of_two)[0]
    )
    assert (in_all, each) == (pytest.approx(2 * highest, rel=0.01), highest)


def test_requests_of_several_replicas_are_told_in_total_and_of_one() -> None:
    one, two = (plan_lines(planned("h200:8", replicas=count, more_requests=True)) for count in (1, 2))
    per_s = float(re.findall("([0-9.]+) requests/s", one[0][1])[0])
    in_all, each = map(float, re.findall("([0-9.]+) requests/s in total .([0-9.]+) per replica", two[0][1])[0])
    assert "on each of 2 replicas" in two[0][1]
    assert (in_all, each) == (pytest.approx(2 * per_s, rel=0.01), per_s)
    assert dict(two)["Serves"].startswith("each replica up to 256 requests at once (512 in total)")


def test_an_interval_of_thousands_has_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    document = from_json((GOLDEN / "plan.json").read_bytes(), PlanDocument)
    first, *rest = document.candidates
    wide = replace(first, objective=710.5, objective_low=497.2, objective_high=1358.4)
    print_plan(replace(document, candidates=(wide, *rest)))
    assert "710.5 [497-1358]" in capsys.readouterr().out
