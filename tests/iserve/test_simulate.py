"""``iserve simulate``: its documents, its text, and one line for what cannot be simulated."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import to_json
from fingerprint.gpus import parse_gpus
from fingerprint.profile_checks import routing_caveat
from iserve.cli import main
from iserve.planning.offline import plan_for_gpus
from iserve.planning.pipeline import PlanOptions
from iserve.simulation.document import devices_told
from tests.fingerprint.mixture_machine import CONFIG, MixtureMachine
from tests.fingerprint.step_timed_machine import StepTimedMachine, take_depth_tied
from tests.golden_words import Golden
from tests.iserve.page_words import page_words
from traces.request import Request
from traces.writing import write_trace

_LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def refused(self, *, code: int = 1) -> str:
        assert (self.code, self.out) == (code, ""), (self.code, self.out, self.err)
        return " ".join(self.err.replace("│", " ").split())


@pytest.fixture
def simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    for name in os.environ:
        if name.startswith("ISERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["iserve", "simulate", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA_7B))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    write_trace(path, [Request(0.5 * i, 100 + i, 20) for i in range(60)])
    return path


def test_the_document(simulate: Callable[..., Done], trace: Path, model: Path) -> None:
    slo = ("--eval-slo", "ttft=2,tpot=1")
    given = ("--gpus", "a6000:2", "--models", model, "--batch", 8, "--startup", 0)
    document = simulate(trace, *given, *slo, "--json").document
    assert (document["hardware"], document["service"], document["stopped"]) == ("2 x a6000", "continuous", None)
    usual = {"batch": 8, "input_tokens": 512, "output_tokens": 128, "longest_tokens": 0}
    assert document["workload"] == usual | {"images": 0, "tokens_per_image": 0}
    summary = document["summary"]
    assert (summary["requests"], summary["completed"], summary["failures"]) == (60, 60, [])
    assert summary["slo"]["attainment_fraction"] == 1
    assert 0 < summary["ttft"]["p50_s"] < summary["e2e"]["p50_s"]
    (deployment,) = document["deployments"]
    assert (deployment["name"], deployment["replicas"]) == ("llama-7b", 1)
    assert [change["kind"] for change in document["changes"]] == ["deployed"]
    assert len(document["gpus"]) == 2
    assert document["times"] == ["llama-7b: roofline"]
    assert document["warnings"] == []


def test_what_the_run_cost_and_how_full_the_kv_was(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path
) -> None:
    """A lone deployment on one GPU: the cost is its held share, in JSON, text and page."""
    page = tmp_path / "page.html"
    given = (trace, "--gpus", "a6000:1", "--models", f"chat={model}", "--startup", 0, "--report", page)
    document = simulate(*given, "--json").document
    (held,), (deployment,), cost = document["held"], document["deployments"], document["cost"]
    assert (held["deployment"], held["device_id"]) == ("chat", "a6000:0")
    share = held["reserved_byte_s"] / document["gpus"][0]["total_bytes"]
    assert held["held_gpu_s"] == pytest.approx(max(share, held["busy_s"]), rel=0.05)
    assert cost["gpu_s"] == pytest.approx(held["held_gpu_s"])
    assert cost["gpu_s_per_request"] == pytest.approx(cost["gpu_s"] / 60)
    price = parse_gpus("a6000:1")[0].price_usd_per_gpu_hour
    assert price is not None
    assert cost["usd_per_request"] == pytest.approx(cost["gpu_s"] / 60 / 3600 * price)
    assert cost["requests_per_gpu_hour"] == pytest.approx(60 / document["gpu_hours"])
    assert deployment["cost"] == cost
    assert deployment["kv"]["preemptions"] == 0
    assert 0 < deployment["kv"]["mean_fraction"] < deployment["kv"]["peak_fraction"] < 1
    text = " ".join(simulate(*given).out.split())
    assert "cost under load: " in text
    assert "per completed request; " in text
    assert "preemptions" in text
    assert "KV and cost" in page.read_text()


def test_prefix_hits_shorten_prompts_of_a_vllm_alone(
    simulate: Callable[..., Done], tmp_path: Path, model: Path, golden: Golden
) -> None:
    trace = tmp_path / "long.csv"
    write_trace(trace, [Request(5.0 * i, 2000, 20) for i in range(20)])
    given = (trace, "--gpus", "a6000:1", "--models", model, "--input-tokens", 2000, "--startup", 0, "--json")

    def first_s(*more: object) -> float:
        return float(simulate(*given, *more).document["summary"]["ttft"]["p50_s"])

    assert first_s("--engine", "vllm", "--prefix-hits", 0.8) < 0.3 * first_s("--engine", "vllm")
    assert first_s("--engine", "torch", "--prefix-hits", 0.8) == first_s("--engine", "torch")
    refused = simulate(*given[:-1], "--prefix-hits", 1).refused(code=2)
    golden("cli", refused)


def test_accepted_drafts_shorten_answers_of_a_vllm_alone(
    simulate: Callable[..., Done], tmp_path: Path, model: Path, golden: Golden
) -> None:
    trace = tmp_path / "answers.csv"
    write_trace(trace, [Request(5.0 * i, 100, 200) for i in range(20)])
    given = (trace, "--gpus", "a6000:1", "--models", model, "--input-tokens", 100, "--startup", 0, "--json")

    def in_all_s(*more: object) -> float:
        return float(simulate(*given, *more).document["summary"]["e2e"]["p50_s"])

    assert in_all_s("--engine", "vllm", "--draft-acceptance", 0.8) < 0.5 * in_all_s("--engine", "vllm")
    assert in_all_s("--engine", "torch", "--draft-acceptance", 0.8) == in_all_s("--engine", "torch")
    golden("cli", simulate(*given[:-1], "--draft-acceptance", 1).refused(code=2))


def test_vllm_starts_in_60_s_unless_it_is_said_otherwise(
    simulate: Callable[..., Done], trace: Path, model: Path
) -> None:
    given = (trace, "--gpus", "a6000:1", "--models", model, "--json")

    def first_s(*more: object) -> tuple[float, float]:
        document = simulate(*given, *more).document
        return document["startup_s"], document["summary"]["ttft"]["max_s"]

    (vllm_s, slow_s), (none_s, quick_s) = first_s("--engine", "vllm"), first_s("--engine", "vllm", "--startup", 0)
    assert (vllm_s, none_s, first_s("--engine", "torch")[0]) == (60.0, 0.0, 0.0)
    assert slow_s == pytest.approx(59.5, abs=2.0)  # the first request arrives at 0 s, all wait together
    assert quick_s < 2.0


def test_by_default_a_replica_serves_what_a_deploy_serves(
    simulate: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    """Capacity that the KV cache holds, unless it is given, or figures rest on the planned one."""
    path = tmp_path / "long.csv"
    write_trace(path, [Request(0.05 * i, 100 + 15 * i, 20) for i in range(200)])
    given = (path, "--gpus", "a6000:2", "--models", f"chat={model}")

    def served(*more: object) -> tuple[int, tuple[int, int], str]:
        document = simulate(*given, *more, "--json").document
        (deployment,) = document["deployments"]
        sizes = deployment["limits"]["max_batch"], deployment["limits"]["max_context_tokens"]
        return document["summary"]["completed"], sizes, document["changes"][0]["text"]

    gpu, count = parse_gpus("a6000:2")
    options = PlanOptions(more_requests=True, longer_requests=True)
    deployed = plan_for_gpus(str(model), gpu, count, options, "auto").capacity
    assert deployed is not None
    completed, sizes, said = served()
    assert (completed, sizes) == (200, (deployed.requests_at_once, deployed.context_tokens))
    assert sizes[0] > 100
    assert f" {sizes[0]} requests at once" in said
    assert served("--batch", 1, "--context", 640)[:2] == (35, (1, 640))
    assert served("--batch", 4)[:2] == (200, (4, 4096))
    assert served("--rate", 0.1)[1] == (256, 4096)
    assert served("--rate", 0.1, "--policy", "hybrid")[1] == (1, 4096)
    assert served("--eval-slo", "e2e=9", "--reject-late")[1] == (1, 4096)
    assert served("--intent", "min-memory")[1] == (1, 640)
    assert served("--replicas", 2, "--intent", "min-gpu-hours")[1][0] > 100


@pytest.mark.parametrize("replicas", [1, 2])
def test_lengths_are_cut_to_what_is_served(
    simulate: Callable[..., Done], model: Path, tmp_path: Path, replicas: int
) -> None:
    """The model's context by default, of each model its own; with --context that."""
    small = tmp_path / "small"
    small.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1000}
    (small / "config.json").write_text(json.dumps(config))
    path = tmp_path / "long.csv"
    write_trace(path, [Request(9.0 * i, tokens, 20) for i, tokens in enumerate((100, 900, 3000, 9000))])

    def input_tokens(folder: Path, *more: object) -> int:
        given = ("--gpus", "a6000:2", "--models", f"chat={folder}", "--intent", "min-gpu-hours", "--json")
        document = simulate(path, *given, "--replicas", replicas, "--cap-lengths", *more).document
        assert (document["summary"]["completed"], document["warnings"]) == (4, [])
        return document["summary"]["lengths"]["input_tokens"]

    assert input_tokens(model) == 100 + 900 + 3000 + 4076
    assert input_tokens(small) == 100 + 900 + 980 + 980
    assert input_tokens(model, "--context", 640) == 100 + 620 + 620 + 620
    assert input_tokens(model, "--planner", "rule") == 100 + 620 + 620 + 620


def test_more_replicas_than_gpus_are_refused_by_their_number(
    simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
) -> None:
    done = simulate(trace, "--gpus", "a6000:2", "--models", model, "--replicas", 3, "--startup", 0)
    refused = done.out[done.out.index("refused llama-7b") :]
    golden("simulator-errors", " ".join(refused.partition("step times")[0].split()))


def test_it_is_deterministic_by_seed(simulate: Callable[..., Done], model: Path) -> None:
    def run(seed: int) -> Any:
        named = f"a={model},b={model}"
        given = ("--gpus", "a6000:2", "--models", named, "--popularity", "zipf", "--limit", 300, "--cap-lengths")
        return simulate("synthetic:azure-conv", *given, "--batch", 8, "--seed", seed, "--json").document

    assert run(1) == run(1)
    assert run(1)["summary"] != run(2)["summary"]


def test_the_text_tells_of_faults_profiles_and_what_to_be_wary_of(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path, golden: Golden
) -> None:
    events = ("--fail", "node0:10:20", "--background-profile", "1:5:2", "--startup", 1, "--replicas", 2)
    more = ("--gpus-per-node", 1, "--input-tokens", 110, "--output-tokens", 20, "--service", "fcfs")
    short = ("--context", 130)
    done = simulate(trace, "--gpus", "a6000:2", "--models", f"chat={model}", *events, *more, *short)
    assert done.code == 0, done.err
    golden("cli", done.out, "text")
    page = tmp_path / "page.html"
    wish = ("--slo", "ttft=9", "--rate", 0.5, "--report", page)
    assert simulate(trace, "--gpus", "a6000:2", "--models", model, *more, *short, *wish).code == 0
    html = page.read_text()
    golden("reports", page_words(html))
    longer = (*more, "--context", 179, "--startup", 0)
    roomy = simulate(trace, "--gpus", "a6000:2", "--models", model, *longer, "--json").document
    assert (roomy["summary"]["completed"], roomy["warnings"]) == (60, [])


@pytest.fixture
def bursts(tmp_path: Path) -> Path:
    """Two bursts of more than one replica serves in their time, ten minutes apart."""
    path = tmp_path / "bursts.csv"
    rows = [Request(start + 0.2 * i, 100, 20) for start in (0.0, 600.0) for i in range(300)]
    write_trace(path, rows)
    return path


def test_replicas_follow_the_load_to_none_and_back(
    simulate: Callable[..., Done], bursts: Path, model: Path, tmp_path: Path, golden: Golden
) -> None:
    given = (bursts, "--gpus", "a6000:4", "--models", f"chat={model}", "--service", "fcfs", "--startup", 5)
    given = (*given, "--intent", "min-memory")  # one GPU each
    fixed = simulate(*given, "--json").document
    assert fixed["cluster_policy"] is None
    (before,) = fixed["deployments"]
    assert (before["peak_replicas"], before["cold_starts"], before["scaled_to_zero_s"]) == (1, 0, 0)

    page = tmp_path / "page.html"
    scaled = (*given, "--replicas", "1:3", "--scale-to-zero", 150, "--report", page)
    document = simulate(*scaled, "--json").document
    assert (
        document["cluster_policy"]["scaling"] | {"max_replicas": 3, "idle_s": 150}
        == document["cluster_policy"]["scaling"]
    )
    (after,) = document["deployments"]
    assert (after["peak_replicas"], after["cold_starts"]) == (3, 1)
    assert (
        300 < after["scaled_to_zero_s"] <= 390
    )  # 540 s without a request, of which 150 and the last answers pass first
    assert document["summary"]["completed"] == 600, "who came while it slept was served"
    three = simulate(*given, "--replicas", 3, "--json").document
    assert document["gpu_hours"] < 0.6 * three["gpu_hours"], "each on a GPU of its own, while they are there"
    assert document["summary"]["e2e"]["p90_s"] < fixed["summary"]["e2e"]["p90_s"]

    text = " ".join(simulate(*scaled).out.split())
    golden("cli", text)
    html = page.read_text()
    golden("reports", page_words(html))
    assert html.count("<svg") == 6  # TTFT and E2E by percentile, four over time
    assert sum(b["scheduled"] for b in document["timeline"]) == 600
    (curves,) = document["curves"]
    assert curves["e2e"][-1]["value_s"] == pytest.approx(document["summary"]["e2e"]["max_s"])


def test_consolidating_and_moving(simulate: Callable[..., Done], model: Path, tmp_path: Path) -> None:
    """Two models packed onto one GPU of two, both busy: one moves away, and that is faster."""
    path = tmp_path / "both.csv"
    write_trace(path, [Request(0.8 * (i // 2), 100, 20, "ab"[i % 2]) for i in range(1000)])
    given = (
        path,
        "--gpus",
        "a6000:2",
        "--models",
        f"a={model},b={model}",
        "--service",
        "fcfs",
        "--engine",
        "vllm",
    )
    given = (*given, "--policy", "packing", "--intent", "min-memory", "--json")
    crowded, moving = simulate(*given).document, simulate(*given, "--migrate").document
    assert crowded["placement"] == "packing"
    assert sorted(d["moves"] for d in moving["deployments"]) == [0, 1]
    assert moving["summary"]["e2e"]["mean_s"] < crowded["summary"]["e2e"]["mean_s"]
    less = simulate(*given, "--replicas", "1:2", "--consolidate").document
    assert less["cluster_policy"]["consolidates"]


def test_look_ahead_places_beside_whoever_idles(
    simulate: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    """A busy model runs when another is deployed; a GPU's price decides whether they share it."""
    path = tmp_path / "busy.csv"
    write_trace(path, [Request(0.5 * i, 100, 20, "a") for i in range(600)])
    given = (
        path,
        "--gpus",
        "a6000:2",
        "--models",
        f"a={model},b={model}",
        "--service",
        "fcfs",
        "--engine",
        "vllm",
    )

    def gpus(policy: str) -> int:
        done = simulate(*given, "--deploy-interval", 200, "--intent", "min-memory", "--policy", policy, "--json")
        return sum(gpu["peak_bytes"] > 0 for gpu in done.document["gpus"])

    assert gpus("look-ahead:0.001") == 2
    assert gpus("look-ahead:1000") == 1


@pytest.mark.parametrize(
    "planner", ["iserve", "max-tp", "max-pp", "rule", "fsdp-offload", "alpaserve", "alpaserve-all"]
)
def test_every_baseline_serves_the_same_trace(
    simulate: Callable[..., Done], trace: Path, model: Path, planner: str, golden: Golden
) -> None:
    given = ("--gpus", "a6000:2", "--models", model, "--batch", 4, "--eval-slo", "e2e=20", "--planner", planner)
    document = simulate(trace, *given, "--context", 640, "--json").document
    assert document["planner"] == planner
    assert document["summary"]["completed"] == 60
    assert bool(document["notes"]) == planner.startswith("alpaserve")
    open_ended = simulate(trace, *given, "--json").document["notes"]
    assert (open_ended == []) is (planner == "iserve")
    if planner != "iserve":
        golden("cli", open_ended)


def test_the_text_says_whose_decision_it_was(
    simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
) -> None:
    given = ("--gpus", "a6000:1", "--models", model, "--eval-slo", "e2e=20", "--planner", "alpaserve")
    text = " ".join(simulate(trace, *given).out.split())
    golden("cli", text)


def test_aiconfigurator_says_where_it_has_no_answer(
    simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
) -> None:
    answers = Path(__file__).parents[1] / "bench" / "results" / "aiconfigurator_h200.json.gz"
    given = ("--gpus", "h200:1", "--models", f"chat={model}", "--planner", f"aiconfigurator:{answers}")
    out = " ".join(simulate(trace, *given).out.split())
    golden("cli", out)
    assert "AIConfigurator 0.12.0" in out


def test_measured_times(
    simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path, golden: Golden
) -> None:
    measured = take_depth_tied(StepTimedMachine())
    profile = tmp_path / "profile.json"
    profile.write_bytes(to_json(measured))
    for gpu in ("h200:1", "a6000:1"):
        done = simulate(trace, "--gpus", gpu, "--models", model, "--profile", profile, "--batch", 4)
        golden("cli", done.out + done.err)
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    refused = simulate(trace, "--gpus", "h200:1", "--models", model, "--profile", torn).refused()
    assert str(torn) in refused


def test_a_profile_with_the_graphs_of_former_deployments_says_so(
    simulate: Callable[..., Done], trace: Path, tmp_path: Path, golden: Golden
) -> None:
    """A mixture's was taken with graphs of up to 512 tokens; one of today's says how experts were drawn alone."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    taken, notes = take_depth_tied(MixtureMachine()), []
    profile = tmp_path / "profile.json"
    given = (trace, "--gpus", "h200:1", "--models", f"chat={tmp_path}", "--profile", profile, "--batch", 4)
    for tokens in (4096, 512):
        profile.write_bytes(to_json(replace(taken, graph_tokens=tokens)))
        notes.append(simulate(*given, "--json").document["notes"])
    assert notes[0] == [f"chat: {routing_caveat(taken)}"]
    (caveat,) = notes[1][1:]
    golden("cli", caveat)
    assert caveat in " ".join(simulate(*given).out.split())


def test_full_pipelines_serve_more_without_batching_too(
    simulate: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    """Four stages, asked for nearly twice what one request at a time serves."""
    path = tmp_path / "busy.csv"
    write_trace(path, [Request(0.6 * i, 100, 50) for i in range(100)])
    given = (path, "--gpus", "a6000:4", "--models", model, "--planner", "max-pp", "--engine", "vllm")
    given = (*given, "--startup", 0, "--json")
    one, full = (simulate(*given, "--service", service).document for service in ("fcfs", "fcfs-pipelined"))
    for document in (one, full):
        assert document["changes"][0]["text"].startswith("tp=1,pp=4,"), document["changes"]
        assert document["changes"][0]["text"].endswith("batch 1")
    assert full["summary"]["e2e"]["p50_s"] < one["summary"]["e2e"]["p50_s"] / 3


@pytest.mark.parametrize(
    ("device_ids", "told"),
    [
        ((), ""),
        (("a6000:0", "a6000:1", "a6000:2", "a6000:4"), "a6000:0-2, a6000:4"),
        (("a6000:7", "h200:8", "h200:9"), "a6000:7, h200:8-9"),
        (("GPU-1b17", "cpu"), "GPU-1b17, cpu"),
        (("a:2", "a:1"), "a:2, a:1"),
    ],
)
def test_devices_in_a_row_are_told_as_a_range(device_ids, told) -> None:
    assert devices_told(device_ids) == told
