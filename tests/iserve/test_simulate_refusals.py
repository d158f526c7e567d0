"""Refusals and cuts of `iserve simulate`: options that say nothing, lengths, traces, rates beyond capacity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden_words import Golden
from tests.iserve.page_words import page_words
from tests.iserve.test_simulate import Done, model, simulate, trace
from traces.request import Request
from traces.writing import write_trace

__all__ = ["model", "simulate", "trace"]  # fixtures


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("--gpus", "a6000:0"), 2, id="zero GPUs"),
        pytest.param(("--gpus", "a6000:4,h200:4"), 2, id="mixed GPUs"),
        pytest.param(("--gpus", "abacus:4"), 2, id="unknown GPU"),
        pytest.param(("--gpus-per-node", "0"), 2, id="empty nodes"),
        pytest.param(("--models", ","), 2, id="no models"),
        pytest.param(("--service", "lifo"), 2, id="service"),
        pytest.param(("--models", "a=x,a=y"), 2, id="a name twice"),
        pytest.param(("--models", "/nowhere"), 1, id="unknown model"),
        pytest.param(("--fail", "node0"), 2, id="no time"),
        pytest.param(("--fail", "node7:1"), 2, id="unknown node"),
        pytest.param(("--fail", "node0:5:4"), 2, id="back before"),
        pytest.param(("--planner", "best"), 2, id="unknown planner"),
        pytest.param(("--planner", "aiconfigurator"), 2, id="no answers"),
        pytest.param(("--planner", "aiconfigurator:/nowhere"), 1, id="lost answers"),
        pytest.param(("--planner", "alpaserve"), 1, id="AlpaServe without an SLO"),
        pytest.param(("--background-profile", "1:2"), 2, id="no memory"),
        pytest.param(("--background-profile", "1:nan:2"), 2, id="not a number"),
        pytest.param(("--router", "x"), 2, id="unknown router"),
        pytest.param(("--popularity", "x"), 2, id="unknown popularity"),
        pytest.param(("--replicas", "0"), 2, id="no replicas"),
        pytest.param(("--replicas", "3:2"), 2, id="fewer at most than at least"),
        pytest.param(("--scale-to-zero", "0"), 2, id="asleep at once"),
        pytest.param(("--policy", "look-ahead:x"), 2, id="no such price"),
        pytest.param(("--policy", "x"), 2, id="no policy"),
        pytest.param(
            ("--planner", "alpaserve", "--scale-to-zero", "9"),
            2,
            id="AlpaServe",
        ),
        pytest.param(("--replicas", "65"), 2, id="too many replicas"),
        pytest.param(("--abort-at-queue", "0"), 2, id="no queue"),
        pytest.param(("--deploy-interval", "nan"), 2, id="no such time"),
        pytest.param(("--deploy-interval", "-4"), 2, id="before the start"),
        pytest.param(("--eval-slo", "x=1"), 2, id="unknown SLO"),
        pytest.param(("--input-tokens", "5000"), 1, id="beyond the context"),
        pytest.param(("--expected-model", "mine=2"), 2, id="models to follow"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden, arguments: tuple[str, ...], code: int
) -> None:
    given = {"--gpus": "a6000:2", "--models": str(model)}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    golden("cli-errors", simulate(trace, *(word for pair in given.items() for word in pair)).refused(code=code))


def test_whose_context_is_too_short_is_said(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path, golden: Golden
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2048})
    )
    given = ("--gpus", "a6000:2", "--models", f"chat={model},small={small}", "--context", "4096")
    golden("cli-errors", simulate(trace, *given).refused())


def test_what_the_model_cannot_hold_is_only_to_be_cut(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path, golden: Golden
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 130})
    )
    given = ("--gpus", "a6000:1", "--models", small, "--input-tokens", 110, "--output-tokens", 20, "--json")
    (warning,) = simulate(trace, *given).document["warnings"]
    golden("cli-errors", warning)
    assert simulate(trace, *given, "--cap-lengths").document["warnings"] == []


def test_consolidating_needs_replicas_to_choose_among(
    simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
) -> None:
    done = simulate(trace, "--gpus", "a6000:2", "--models", model, "--consolidate")
    golden("cli-errors", done.refused(code=2))


def test_traces_that_no_simulation_takes(
    simulate: Callable[..., Done], model: Path, tmp_path: Path, golden: Golden
) -> None:
    given = ("--gpus", "a6000:2", "--models", f"chat={model}")
    golden("cli-errors", simulate(tmp_path / "nowhere.csv", *given).refused(code=2), "nowhere")
    other = tmp_path / "other.csv"
    write_trace(other, [Request(0.0, 5, 5, "chat"), Request(1.0, 5, 5, "gpt-9")])
    golden("cli-errors", simulate(other, *given).refused(), "another model")
    nameless = tmp_path / "nameless.csv"
    write_trace(nameless, [Request(0.0, 5, 5)])
    two = simulate(nameless, "--gpus", "a6000:2", "--models", f"a={model},b={model}").refused()
    golden("cli-errors", two, "no models")
    empty = tmp_path / "empty.csv"
    header = nameless.read_text().splitlines()[0]
    empty.write_text(f"{header}\n")
    golden("cli-errors", simulate(empty, *given).refused(), "empty")


def test_a_rate_beyond_capacity_stops_and_says_so(
    simulate: Callable[..., Done], model: Path, tmp_path: Path, golden: Golden
) -> None:
    path = tmp_path / "burst.csv"
    write_trace(path, [Request(0.001 * i, 400, 100) for i in range(3000)])
    document = simulate(
        path, "--gpus", "a6000:1", "--models", model, "--abort-at-queue", 100, "--service", "fcfs", "--json"
    ).document
    golden("simulator-errors", document["stopped"])
    assert document["warnings"] == [document["stopped"]], "the trace has not ended: nobody waited at its end"
    assert {failure["kind"] for failure in document["summary"]["failures"]} == {"interrupted"}
    followed = simulate(path, "--gpus", "a6000:1", "--models", model, "--batch", 4, "--json").document
    assert followed["stopped"] is None
    golden("simulator-errors", followed["warnings"])


def test_who_is_too_late_is_refused_where_that_is_asked_for(
    simulate: Callable[..., Done], model: Path, tmp_path: Path, golden: Golden
) -> None:
    """A request every 0.1 s, of which one at a time is served in a second and more."""
    path, page = tmp_path / "busy.csv", tmp_path / "page.html"
    write_trace(path, [Request(0.1 * i, 100, 50) for i in range(200)])
    given = (path, "--gpus", "a6000:1", "--models", model, "--service", "fcfs", "--eval-slo", "e2e=5")
    given = (*given, "--startup", 0)
    served = simulate(*given, "--json").document
    refusing = simulate(*given, "--reject-late", "--report", page, "--json").document
    assert (served["rejects_late"], refusing["rejects_late"]) == (False, True)
    assert served["summary"]["completed"] == 200
    assert refusing["summary"]["slo"]["met"] == refusing["summary"]["completed"]
    assert refusing["summary"]["slo"]["met"] > 3 * served["summary"]["slo"]["met"]
    assert [failure["kind"] for failure in refusing["summary"]["failures"]] == ["too late"]
    golden("reports", page_words(page.read_text()))
    golden("cli", simulate(*given, "--reject-late").out)
    forecast = simulate(*given, "--reject-late", "--forecast-late", "--json").document
    assert forecast["rejects_by_forecast"]
    assert forecast["summary"]["slo"]["met"] > 3 * served["summary"]["slo"]["met"]
    assert forecast["summary"]["slo"]["met"] > 0.8 * forecast["summary"]["completed"]
    golden("cli-errors", simulate(*given, "--forecast-late").refused(code=2), "not refused")
    nobody = (path, "--gpus", "a6000:1", "--models", model, "--reject-late")
    golden("cli-errors", simulate(*nobody).refused(code=2), "without an SLO")
