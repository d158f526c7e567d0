"""Plans as a whole, on GPUs that are not here: the paper's models and GPUs under every intent."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import parse_gpus
from fingerprint.model_spec import ModelSpec
from iserve.planning.document import PlanDocument
from iserve.planning.offline import OneEstimateDocument, estimate_for_gpu, plan_for_gpus
from iserve.planning.pipeline import (
    EngineChooser,
    FitsOn,
    Hardware,
    PlanOptions,
    datasheet_estimator,
    hypothetical_hardware,
    make_plan,
)
from placement.types import ClusterSnapshot, GpuState
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import LimitKind, NoRoom, Plan
from tests.fingerprint.synthetic_machine import CPU
from tests.golden_words import Golden

GIB = 2**30
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
CONFIGS = {
    "Llama-2-7b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "max_position_embeddings": 4096},
    "Llama-2-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "max_position_embeddings": 4096},
    "Falcon-7b": {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65024}
    | {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True}
    | {"parallel_attn": True, "new_decoder_architecture": False, "alibi": False, "bias": False},
    "GPT-J-6b": {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "vocab_size": 50400}
    | {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "n_inner": None}
    | {"tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp("models") / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def plan(folder: Path, gpus: str, intent: Intent, engine: str = "auto", **workload: int) -> PlanDocument:
    gpu, count = parse_gpus(gpus)
    return plan_for_gpus(
        str(folder), gpu, count, PlanOptions(intent=intent, workload=Workload(**workload)), engine
    )


def intent_of(kind: IntentKind) -> Intent:
    slo = Slo(ttft_s=5.0, tpot_s=0.5) if kind is IntentKind.LATENCY_SLO else None
    return Intent(kind=kind, slo=slo, budget=1e6 if kind is IntentKind.COST_SLO else None)


@pytest.mark.parametrize(("name", "gpus"), list(product(CONFIGS, ["a6000:8", "h200:4"])))
def test_every_intent_is_answered_by_something_that_runs_and_fits(
    folders: dict[str, Path], name: str, gpus: str
) -> None:
    gpu, count = parse_gpus(gpus)
    for kind in IntentKind:
        document = plan(folders[name], gpus, intent_of(kind))
        assert document.chosen == 0
        best = document.candidates[0]
        config, estimate = best.config, best.estimate
        assert estimate is not None
        assert config.num_gpus <= count
        assert estimate.memory_bytes_per_gpu <= gpu.memory_bytes
        assert sum(best.layers_per_stage or ()) == CONFIGS[name].get("num_hidden_layers", 28)
        assert config.weights in {WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.FP8}  # quality near
        # no token can be faster than the weights of one GPU at the datasheet's bandwidth
        element_bytes = 2 if config.weights is WeightFormat.BITS16 else 1
        floor_s = element_bytes * 5.7e9 / config.tp / gpu.memory_bytes_per_s
        assert estimate.tpot_s.low > floor_s
        assert all(candidate.reason for candidate in document.candidates if not candidate.feasible)


@pytest.mark.parametrize("name", ["Falcon-7b", "GPT-J-6b", "Llama-2-7b"])
def test_what_only_the_older_flow_runs_is_listed_and_refused(folders: dict[str, Path], name: str) -> None:
    """Falcon, GPT-J, int8 KV, GPTQ and 2:4 on TensorRT-LLM: each with that reason, and nothing else with it."""
    document = plan(folders[name], "a6000:8", Intent(quality=Quality.ANY), "tensorrt-llm")
    for candidate in document.candidates:
        config, reason = candidate.config, candidate.reason or ""
        older = name != "Llama-2-7b" or "gptq4" in config.weights or config.kv == "int8"
        older = older or config.pruning == "wanda-2:4"
        if "does not divide" not in reason:
            assert ("older engine flow" in reason) == older
        assert not (older and candidate.feasible)
    assert any(candidate.feasible for candidate in document.candidates) == (name == "Llama-2-7b")


def test_no_plan_offers_groups_that_are_cut() -> None:
    """11008 inputs over 4 ranks are 21.5 groups of 128, over 2 ranks 43; of a checkpoint that is in four bits."""
    gpu, count = parse_gpus("a6000:8")
    spec, hardware = spec_of("Llama-2-7b"), hypothetical_hardware(gpu, count)
    options = PlanOptions(intent=Intent(quality=Quality.ANY))
    made = make_plan(spec, hardware, RooflineEstimator(spec, gpu), capabilities_for("auto"), options)
    four_bits = {WeightFormat.INT4, WeightFormat.GPTQ4}
    runs = {c.config.tp for c in made.candidates if c.feasible and c.config.weights in four_bits}
    assert runs == {1, 2}


def test_the_context_is_the_limit_of_plan_and_estimate(folders: dict[str, Path], golden: Golden) -> None:
    with golden.raises("controller", ConfigError):
        plan(folders["Llama-2-7b"], "a6000:8", Intent(), input_tokens=4000, output_tokens=97)
    with golden.raises("controller", ConfigError):
        estimate(folders["Llama-2-7b"], "a6000", DeploymentConfig(engine="auto"), Workload(1, 4000, 97))


def estimate(
    folder: Path, gpu: str, config: DeploymentConfig, workload: Workload | None = None
) -> OneEstimateDocument:
    device, _ = parse_gpus(gpu)
    return estimate_for_gpu(str(folder), device, config, workload or Workload(), CostModel.MEMORY)


@pytest.mark.parametrize("batch", [1, 104, 105, 108, 109])
def test_estimate_and_plan_agree_on_what_fits(folders: dict[str, Path], batch: int) -> None:
    """Both judge the upper end of the interval: too much from 105 sequences on, the value itself from 109."""
    workload = Workload(batch, 512, 128)
    config = DeploymentConfig(engine="vllm")
    one = estimate(folders["Llama-2-7b"], "a6000", config, workload)
    document = plan(folders["Llama-2-7b"], "a6000:1", Intent(), "vllm", batch=batch)
    same = next(c for c in document.candidates if c.config == config)
    assert one.runnable == same.feasible == (batch < 105)
    assert one.reason == same.reason
    assert one.estimate.memory_bytes_per_gpu == (same.estimate and same.estimate.memory_bytes_per_gpu)


def spec_of(name: str) -> ModelSpec:
    return read_spec(CONFIGS[name])


def test_one_gpu_on_each_of_two_nodes_misses_gpus_not_memory() -> None:
    """tp=2 needs two GPUs of one node: no addition of memory helps, and none is advised."""
    gpu, _ = parse_gpus("a6000:1")
    scattered = ClusterSnapshot(
        tuple(
            GpuState(
                device_id=n, node_id=n, gpu_index=0, total_bytes=gpu.memory_bytes, free_bytes=gpu.memory_bytes
            )
            for n in ("a", "b")
        )
    )
    spec = spec_of("Llama-2-70b")
    hardware = Hardware(label="two nodes", gpu=gpu, snapshot=scattered)
    guess = RooflineEstimator(spec, gpu).estimate(DeploymentConfig(tp=2, engine="vllm"), Workload())
    answer = FitsOn(hardware, PlanOptions())(guess)
    assert isinstance(answer, NoRoom)
    assert answer.missing_gpus == 2
    made = make_plan(spec, hardware, RooflineEstimator(spec, gpu), capabilities_for("vllm"), PlanOptions())
    assert made.chosen is None
    assert all("tp=2" not in r.text for r in made.why_not.relaxations if "more free memory" in r.text)


def test_a_table_that_nobody_ran_is_said_to_be_one() -> None:
    gpu, _ = parse_gpus("a6000:1")
    chooser = EngineChooser(spec_of("Llama-2-70b"), gpu, capabilities_for("auto"))
    said = {name: chooser.conditions(DeploymentConfig(engine=name)) for name in ("torch", "vllm", "tensorrt-llm")}
    unseen = "{}: capability table not verified by running it"
    told = {name for name, conditions in said.items() if unseen.format(name) in conditions}
    assert told == {e.engine for e in capabilities_for("auto") if not e.verified} >= {"tensorrt-llm"}
    assert "torch" not in told


@pytest.mark.parametrize(
    ("gpu", "config", "ran"),
    [
        ("h200:1", DeploymentConfig(engine="vllm"), True),
        ("h200:2", DeploymentConfig(engine="vllm", tp=2), False),
        ("h200:1", DeploymentConfig(engine="vllm", weights=WeightFormat.FP8), True),
        ("h200:1", DeploymentConfig(engine="vllm", kv=KvFormat.INT8), False),
        ("a6000:1", DeploymentConfig(engine="vllm"), False),
    ],
)
def test_of_a_table_that_was_run_in_part_the_rest_is_said_to_be_unseen(gpu, config, ran) -> None:
    chooser = EngineChooser(spec_of("Llama-2-7b"), parse_gpus(gpu)[0], capabilities_for("vllm"))
    unseen = "vllm: not run yet with this family, these formats and degrees on this GPU"
    assert (unseen not in chooser.conditions(config)) is ran


@pytest.mark.parametrize(
    ("count", "options", "needed"),
    [
        pytest.param(1, PlanOptions(), 2, id="memory"),
        pytest.param(2, PlanOptions(intent=Intent(slo=Slo(tpot_s=0.1))), 4, id="an-slo"),
        pytest.param(1, PlanOptions(intent=Intent(slo=Slo(tpot_s=0.001))), None, id="no-number-of-them"),
    ],
)
def test_more_gpus_are_told_with_what_they_would_run(count: int, options: PlanOptions, needed: int | None) -> None:
    """Llama-2-70B in int8 is on two A6000 what it is not on one: in the space of two, and small enough."""
    gpu, _ = parse_gpus("a6000")
    spec = spec_of("Llama-2-70b")

    def plan_on(number: int) -> Plan:
        hardware = hypothetical_hardware(gpu, number)
        return make_plan(spec, hardware, RooflineEstimator(spec, gpu), capabilities_for("auto"), options)

    plan = plan_on(count)
    assert plan.chosen is None
    told = [r for r in plan.why_not.relaxations if r.limit is LimitKind.GPUS]
    if needed is None:
        assert told == []
        assert plan_on(2 * count).chosen is None
        return
    (advice,) = told
    assert (advice.allowed, advice.needed) == (count, needed)
    best = plan_on(needed).best
    assert best is not None
    assert (best.config, best.objective) == (advice.config, advice.objective)


def test_a_rate_that_is_not_served_names_the_batch_and_the_replicas_that_serve_it(
    folders: dict[str, Path], golden: Golden
) -> None:
    """The smallest numbers that do, with the configuration that a plan under each of them chooses."""
    gpu, count = parse_gpus("a6000:8")
    at_the_rate = PlanOptions(intent=Intent(rate_per_s=1.0), policy="hybrid")

    def planned(options: PlanOptions) -> PlanDocument:
        return plan_for_gpus(str(folders["Llama-2-7b"]), gpu, count, options, "vllm")

    def first(options: PlanOptions) -> DeploymentConfig | None:
        document = planned(options)
        return None if document.chosen is None else document.candidates[document.chosen].config

    refused = planned(at_the_rate)
    assert refused.chosen is None
    ways = {way.limit: way for way in refused.why_not.relaxations}
    batch, replicas = ways["batch"], ways["replicas"]
    assert (batch.allowed, replicas.allowed) == (1, 1)
    assert batch.text.startswith(f"--batch {batch.needed:g} ")
    assert replicas.text.startswith(f"--replicas {replicas.needed:g} ")
    golden("controller", [batch.text, replicas.text])

    def with_batch(size: int) -> PlanOptions:
        return replace(at_the_rate, workload=Workload(batch=size))

    assert first(with_batch(int(batch.needed))) == batch.config
    assert first(replace(at_the_rate, replicas=int(replicas.needed))) == replicas.config
    assert all(first(with_batch(size)) is None for size in (2, 4, 8) if size < batch.needed)
    assert all(first(replace(at_the_rate, replicas=n)) is None for n in range(2, int(replicas.needed)))


def test_neither_is_named_where_no_number_of_them_helps(folders: dict[str, Path]) -> None:
    """A request that is too slow alone, a model too large for the GPUs, and a rate beyond 256 at once."""
    too_slow = Intent(rate_per_s=1e-6, slo=Slo(tpot_s=1e-4))
    for name, intent in (
        ("Llama-2-7b", too_slow),
        ("Llama-2-70b", Intent(rate_per_s=0.01)),
        ("Llama-2-7b", Intent(rate_per_s=1e6)),
    ):
        document = plan(folders[name], "t4:2", intent, "vllm")
        assert document.chosen is None
        assert not {"batch", "replicas"} & {way.limit for way in document.why_not.relaxations}


def test_the_embedded_engine_has_its_own_times_on_gpus(folders: dict[str, Path]) -> None:
    """The embedded engine's own times are no bargain: half the weights and twice the time or more.

    It alone runs int8 of a 16-bit checkpoint there, and launches every kernel from Python.
    """
    best = plan(folders["Llama-2-7b"], "a100:1", Intent()).candidates[0]
    assert (best.config.engine, best.config.weights) == ("vllm", WeightFormat.BITS16)
    times = {
        engine: estimate(folders["Llama-2-7b"], "h200", DeploymentConfig(engine=engine)).estimate
        for engine in ("torch", "vllm")
    }
    assert times["torch"].tpot_s.value > 2 * times["vllm"].tpot_s.value


@pytest.mark.parametrize(
    ("config", "batch", "tpot_ms"),
    [
        (DeploymentConfig(), 1, 10.1),
        (DeploymentConfig(), 4, 15.3),
        (DeploymentConfig(weights=WeightFormat.INT8), 1, 14.3),
        (DeploymentConfig(weights=WeightFormat.INT8), 4, 17.0),
        (DeploymentConfig(tp=2), 1, 16.0),
        (DeploymentConfig(tp=2), 4, 21.6),
        (DeploymentConfig(pp=2), 1, 11.0),
        (DeploymentConfig(pp=2), 4, 18.4),
    ],
)
def test_the_embedded_engine_takes_about_what_it_was_measured_to_take(
    config: DeploymentConfig, batch: int, tpot_ms: float
) -> None:
    """On two H200, 16 layers of Llama-2-7B's width: docs/performance.md."""
    spec = read_spec(CONFIGS["Llama-2-7b"] | {"num_hidden_layers": 16})
    gpu, _ = parse_gpus("h200")
    guess = datasheet_estimator(spec, gpu, capabilities_for("torch")).estimate(config, Workload(batch, 512, 33))
    assert guess.tpot_s.value == pytest.approx(tpot_ms / 1e3, rel=0.25)
    assert guess.tpot_s.low < tpot_ms / 1e3 < guess.tpot_s.high


def test_on_a_cpu_every_engine_is_bound_by_its_work() -> None:
    gpu, spec = CPU, read_spec(CONFIGS["Llama-2-7b"])
    mine, plain = datasheet_estimator(spec, gpu, capabilities_for("torch")), RooflineEstimator(spec, gpu)
    assert mine.estimate(DeploymentConfig(), Workload()) == plain.estimate(DeploymentConfig(), Workload())
