"""What `iserve simulate` refuses and cuts: options that say nothing, lengths, traces, rates beyond capacity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.iserve.test_simulate import Done, model, simulate, trace
from traces.request import Request
from traces.writing import write_trace

__all__ = ["model", "simulate", "trace"]  # fixtures


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("--gpus", "a6000:0"), 2, "must be a whole number from 1", id="zero GPUs"),
        pytest.param(("--gpus", "a6000:4,h200:4"), 2, "has GPUs of several kinds", id="mixed GPUs"),
        pytest.param(("--gpus", "abacus:4"), 2, "no datasheet figures for the GPU 'abacus'", id="unknown GPU"),
        pytest.param(("--gpus-per-node", "0"), 2, "at least one GPU in each node", id="empty nodes"),
        pytest.param(("--models", ","), 2, "names no model", id="no models"),
        pytest.param(("--service", "lifo"), 2, "--service is one of fcfs, fcfs-pipelined,", id="service"),
        pytest.param(("--models", "a=x,a=y"), 2, "every model needs a name of its own", id="a name twice"),
        pytest.param(("--models", "/nowhere"), 1, "there is no directory '/nowhere'", id="unknown model"),
        pytest.param(("--fail", "node0"), 2, "--fail is NODE:AT[:BACK], in seconds, got 'node0'", id="no time"),
        pytest.param(("--fail", "node7:1"), 2, "there is no node 'node7'", id="unknown node"),
        pytest.param(("--fail", "node0:5:4"), 2, "a node is back after it failed", id="back before"),
        pytest.param(("--planner", "best"), 2, "there is no planner 'best'", id="unknown planner"),
        pytest.param(("--planner", "aiconfigurator"), 2, "aiconfigurator:ANSWERS.json", id="no answers"),
        pytest.param(("--planner", "aiconfigurator:/nowhere"), 1, "/nowhere cannot be read", id="lost answers"),
        pytest.param(("--planner", "alpaserve"), 1, "give one with --judge", id="AlpaServe without an SLO"),
        pytest.param(("--harvest", "1:2"), 2, "--harvest is AT:SECONDS:GIB", id="no memory"),
        pytest.param(("--harvest", "1:nan:2"), 2, "--harvest is AT:SECONDS:GIB", id="not a number"),
        pytest.param(("--router", "x"), 2, "there is no routing policy 'x'", id="unknown router"),
        pytest.param(("--popularity", "x"), 2, "there is no popularity 'x'", id="unknown popularity"),
        pytest.param(("--replicas", "0"), 2, "at least one replica", id="no replicas"),
        pytest.param(("--replicas", "3:2"), 2, "--replicas is N or MIN:MAX", id="fewer at most than at least"),
        pytest.param(("--scale-to-zero", "0"), 2, "needs an idle time of 1 s or more", id="asleep at once"),
        pytest.param(("--policy", "look-ahead:x"), 2, "price of a GPU is a number", id="no such price"),
        pytest.param(("--policy", "x"), 2, "there is no placement policy 'x'", id="no policy"),
        pytest.param(
            ("--planner", "alpaserve", "--scale-to-zero", "9"),
            2,
            "places every replica beforehand",
            id="AlpaServe",
        ),
        pytest.param(("--replicas", "65"), 2, "has 1 to 64 replicas, got 65", id="too many replicas"),
        pytest.param(("--most-waiting", "0"), 2, "queue's bounds must be", id="no queue"),
        pytest.param(("--deploy-every", "nan"), 2, "finite times", id="no such time"),
        pytest.param(("--deploy-every", "-4"), 2, "--deploy-every is 0 s or more, got -4", id="before the start"),
        pytest.param(("--judge", "x=1"), 2, "is not one of ttft=, tpot=, e2e=", id="unknown SLO"),
        pytest.param(("--input-tokens", "5000"), 1, "the model's context is 4096", id="beyond the context"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    simulate: Callable[..., Done], trace: Path, model: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    given = {"--gpus": "a6000:2", "--models": str(model)}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert message in simulate(trace, *(word for pair in given.items() for word in pair)).refused(code=code)


def test_whose_context_is_too_short_is_said(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2048})
    )
    given = ("--gpus", "a6000:2", "--models", f"chat={model},small={small}", "--context", "4096")
    refused = simulate(trace, *given).refused()
    assert "small: requests of 4096 tokens are longer than the model's context of 2048" in refused


def test_what_the_model_cannot_hold_is_only_to_be_cut(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 130})
    )
    given = ("--gpus", "a6000:1", "--models", small, "--input-tokens", 110, "--output-tokens", 20, "--json")
    (warning,) = simulate(trace, *given).document["warnings"]
    assert warning == (
        "49 requests are longer than the 130 tokens that are served, and refused; the model's context holds no "
        "more: cut them with --cap-lengths"
    )
    assert simulate(trace, *given, "--cap-lengths").document["warnings"] == []


def test_consolidating_needs_replicas_to_choose_among(
    simulate: Callable[..., Done], trace: Path, model: Path
) -> None:
    done = simulate(trace, "--gpus", "a6000:2", "--models", model, "--consolidate")
    assert "it goes with --replicas MIN:MAX" in done.refused(code=2)


def test_traces_that_cannot_be_simulated(simulate: Callable[..., Done], model: Path, tmp_path: Path) -> None:
    given = ("--gpus", "a6000:2", "--models", f"chat={model}")
    assert "nowhere.csv" in simulate(tmp_path / "nowhere.csv", *given).refused(code=2)
    other = tmp_path / "other.csv"
    write_trace(other, [Request(0.0, 5, 5, "chat"), Request(1.0, 5, 5, "gpt-9")])
    refused = simulate(other, *given).refused()
    assert "request 2 at 1 s calls 'gpt-9', which is never deployed; deployed are chat" in refused
    nameless = tmp_path / "nameless.csv"
    write_trace(nameless, [Request(0.0, 5, 5)])
    two = simulate(nameless, "--gpus", "a6000:2", "--models", f"a={model},b={model}").refused()
    assert "the trace names no models and 2 are deployed" in two
    empty = tmp_path / "empty.csv"
    header = nameless.read_text().splitlines()[0]
    empty.write_text(f"{header}\n")
    assert "no request" in simulate(empty, *given).refused()


def test_a_rate_beyond_capacity_stops_and_says_so(
    simulate: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "burst.csv"
    write_trace(path, [Request(0.001 * i, 400, 100) for i in range(3000)])
    document = simulate(
        path, "--gpus", "a6000:1", "--models", model, "--most-waiting", 100, "--service", "fcfs", "--json"
    ).document
    assert document["stopped"].startswith("stopped at 0.1 s: 101 requests wait for llama-7b,")
    assert document["warnings"] == [document["stopped"]], "the trace has not ended: nobody waited at its end"
    assert {failure["kind"] for failure in document["summary"]["failures"]} == {"interrupted"}
    followed = simulate(path, "--gpus", "a6000:1", "--models", model, "--batch", 4, "--json").document
    assert followed["stopped"] is None
    assert any("still waited as the trace ended" in warning for warning in followed["warnings"])


def test_who_is_too_late_is_refused_where_that_is_asked_for(
    simulate: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    """A request every 0.1 s, of which one at a time is served in a second and more."""
    path, page = tmp_path / "busy.csv", tmp_path / "page.html"
    write_trace(path, [Request(0.1 * i, 100, 50) for i in range(200)])
    given = (path, "--gpus", "a6000:1", "--models", model, "--service", "fcfs", "--judge", "e2e=5")
    served = simulate(*given, "--json").document
    refusing = simulate(*given, "--refuse-late", "--report", page, "--json").document
    assert (served["refuses_late"], refusing["refuses_late"]) == (False, True)
    assert served["summary"]["completed"] == 200
    assert refusing["summary"]["slo"]["met"] == refusing["summary"]["completed"]
    assert refusing["summary"]["slo"]["met"] > 3 * served["summary"]["slo"]["met"]
    assert [failure["kind"] for failure in refusing["summary"]["failures"]] == ["too late"]
    assert "late requests rejected by their exact times" in page.read_text()
    assert "late requests rejected by their exact times" in " ".join(simulate(*given, "--refuse-late").out.split())
    forecast = simulate(*given, "--refuse-late", "--forecast-late", "--json").document
    assert forecast["forecasts_late"]
    assert forecast["summary"]["slo"]["met"] > 3 * served["summary"]["slo"]["met"]
    assert forecast["summary"]["slo"]["met"] > 0.8 * forecast["summary"]["completed"]
    assert "give that too" in simulate(*given, "--forecast-late").refused(code=2)
    nobody = (path, "--gpus", "a6000:1", "--models", model, "--refuse-late")
    assert "give the SLO with --judge" in simulate(*nobody).refused(code=2)
