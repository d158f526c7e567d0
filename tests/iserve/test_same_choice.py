"""Agreement of the first of a plan, what is exported of the plan, and what a deploy launches."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import InfeasibleError, UnsupportedModelError
from fingerprint.gpus import parse_gpus
from fingerprint.measurements import Profile
from iserve.cli.app import make_app
from iserve.controller import deployer as deployer_module
from iserve.controller import engine_selection
from iserve.controller.deployer import Deployer
from iserve.export.worker_container import exported_worker
from iserve.model_source import ModelSource, resolve
from iserve.planning.document import PlanDocument
from iserve.planning.offline import launch_for_gpus, plan_for_gpus
from iserve.planning.pipeline import PlanOptions, datasheet_estimator
from iserve.settings import Settings
from planner.intent import Intent, IntentKind, Quality, Slo
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile
from tests.golden_words import Golden
from tests.iserve.test_report import LLAMA_2_7B
from traces.request import Request
from traces.writing import write_trace

GPU_SETS = ("a6000:1", "a6000:8", "h200:1", "t4:2")
WISHES = (
    PlanOptions(),
    PlanOptions(intent=Intent(kind=IntentKind.MIN_LATENCY), workload=Workload(batch=8)),
    PlanOptions(intent=Intent(kind=IntentKind.MIN_MEMORY, quality=Quality.ANY)),
    PlanOptions(intent=Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(tpot_s=0.05), rate_per_s=0.1)),
    PlanOptions(intent=Intent(kind=IntentKind.MAX_THROUGHPUT, quality=Quality.EXACT), replicas=2),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSource]:
    """Published configs of real models, without weights."""
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        pytest.skip("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    configs = json.loads((Path(folder) / "reference" / "model-configs.json").read_text())
    return [_source(tmp_path_factory.mktemp("model"), config) for config in configs.values()]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return take_profile(SyntheticMachine(llama()))


def _source(folder: Path, config: dict[str, Any]) -> ModelSource:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "planner"}))
    return resolve(str(folder), {}, need_weights=False)


class _Installed(NamedTuple):
    name: str
    table: EngineCapabilities

    def capabilities(self) -> EngineCapabilities:
        return self.table


def first_of(plan: PlanDocument) -> DeploymentConfig | None:
    return None if plan.chosen is None else plan.candidates[plan.chosen].config


def exported(source: ModelSource, gpus: str, options: PlanOptions, engine: str) -> DeploymentConfig | None:
    """Configuration of the container's command; None: the export is refused."""
    gpu, count = parse_gpus(gpus)
    try:
        launch = launch_for_gpus(str(source.directory), gpu, count, options, engine, name="chat")
    except InfeasibleError:
        return None
    config = launch.worker.config
    worker = exported_worker(launch, get_engine(config.engine), elsewhere=True, start_timeout_s=900.0)
    assert any(remark.startswith(f"{config} on {config.engine},") for remark in worker.remarks)
    if config.engine == "vllm":
        (tp,) = (int(n) for word in worker.argv for n in re.findall(r"^--tensor-parallel-size=(\d+)$", word))
        assert tp == config.tp
    return config


def launched(
    source: ModelSource,
    gpus: str,
    options: PlanOptions,
    profile: Profile,
    patch: pytest.MonkeyPatch,
    home: Path,
    name: str = "auto",
) -> DeploymentConfig | None:
    """Configuration that a deploy starts on a node with these idle GPUs, every engine installed, where the profile
    says what datasheets do; None: it is refused."""
    gpu, count = parse_gpus(gpus)
    devices = (
        DeviceStatus(
            device_id=f"GPU-{index}",
            index=index,
            kind="cuda",
            name=gpu.name,
            total_bytes=gpu.memory_bytes,
            free_bytes=gpu.memory_bytes,
            load_fraction=0.0,
        )
        for index in range(count)
    )
    node = NodeStatus(node_id="n", observed_at=0.0, devices=tuple(devices), workers=())
    installed = [_Installed(table.engine, replace(table, unavailable=None)) for table in capabilities_for("auto")]
    patch.setattr(deployer_module, "ask_daemon", lambda *_: node)
    patch.setattr(engine_selection, "_engines_in", lambda *_: installed)
    patch.setattr(engine_selection, "device_spec", lambda _: gpu)
    nothing: Any = None
    by_datasheet: Any = SimpleNamespace(
        estimator=lambda _, engine, __: datasheet_estimator(source.spec, gpu, [engine.capabilities()])
    )
    deployer = Deployer(Settings(home=home), nothing, by_datasheet, nothing, nothing, nothing)
    on_gpu = replace(profile, machine=replace(profile.machine, device=gpu))
    engine, of_gpu, notes = deployer.select(
        source, name, None, options, lambda engine, _: replace(on_gpu, engine=engine.name)
    )
    planned = deployer.plan(source, engine, of_gpu, options, notes)
    try:
        workers = planned.workers("chat", source, "chat-1", options.workload, of_gpu)
    except InfeasibleError:
        return None
    (config,) = {worker.config for worker in workers}
    return config


@pytest.mark.parametrize("gpus", GPU_SETS)
@pytest.mark.slow
def test_the_first_of_a_plan_is_what_is_exported_and_what_is_launched(
    gpus: str, sources: list[ModelSource], profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, count = parse_gpus(gpus)
    chosen = 0
    for number, source in enumerate(sources):
        for options in (WISHES[number % len(WISHES)], WISHES[(number + 2) % len(WISHES)]):
            first = first_of(plan_for_gpus(str(source.directory), gpu, count, options, "auto"))
            there = (
                exported(source, gpus, options, "auto"),
                launched(source, gpus, options, profile, monkeypatch, tmp_path),
            )
            assert there == (first, first), (source.name, gpus, options)
            chosen += first is not None
    assert chosen > 0


@pytest.fixture
def llama_7b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return str(tmp_path)


@pytest.mark.parametrize("gpus", GPU_SETS)
def test_vllms_command_is_of_the_plans_own_choice(gpus: str, llama_7b: str) -> None:
    """``plan --as vllm`` names the engine; the plan that names none takes it wherever it runs the model."""
    gpu, count = parse_gpus(gpus)
    options = PlanOptions(intent=Intent(kind=IntentKind.MIN_MEMORY))
    first = first_of(plan_for_gpus(llama_7b, gpu, count, options, "auto"))
    assert first == launch_for_gpus(llama_7b, gpu, count, options, "vllm").worker.config


def test_a_simulation_and_a_report_choose_as_a_plan_does(
    llama_7b: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    trace = tmp_path / "trace.csv"
    write_trace(trace, [Request(0.0, 100, 20)])
    asked = ("--gpus", "a6000:8", "--quality", "any", "--json")

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(make_app(), [*arguments, *asked], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    plan = run("plan", llama_7b)
    first = from_json(json.dumps(plan["candidates"][plan["chosen"]]["config"]).encode(), DeploymentConfig)
    (deployed,) = run("simulate", str(trace), "--models", f"chat={llama_7b}")["changes"]
    assert deployed["text"].startswith(f"{first} on {first.engine},")
    report = run("report", llama_7b)
    (ranking,) = (ranking for ranking in report["rankings"] if ranking["intent"] == "min-cost")
    assert (
        report["configurations"][ranking["rows"][0]["configuration"]]["config"]
        == (plan["candidates"][plan["chosen"]]["config"])
    )


@pytest.mark.parametrize("engine", ["torch", "vllm", "tensorrt-llm"])
def test_an_engine_that_is_named_is_planned_and_launched_alike(engine: str, llama_7b: str) -> None:
    gpu, count = parse_gpus("a6000:4")
    options = PlanOptions(intent=Intent(quality=Quality.ANY))
    plan = plan_for_gpus(llama_7b, gpu, count, options, engine)
    assert first_of(plan) == launch_for_gpus(llama_7b, gpu, count, options, engine).worker.config


def test_a_plan_refuses_what_needs_a_prepared_checkpoint_and_says_so(llama_7b: str, golden: Golden) -> None:
    """Four-bit weights rank first, and a 16-bit checkpoint cannot be served so."""
    gpu, count = parse_gpus("a6000:1")
    options = PlanOptions(intent=Intent(kind=IntentKind.MIN_MEMORY, quality=Quality.ANY))
    plan = plan_for_gpus(llama_7b, gpu, count, options, "vllm")
    four_bits = [c for c in plan.candidates if c.config.weights in (WeightFormat.INT4, WeightFormat.GPTQ4)]
    assert four_bits
    assert not any(c.feasible for c in four_bits)
    golden("controller", [better.reason for better in plan.why_not.better])


def notes_of(config: dict[str, Any], folder: Path, gpus: str, options: PlanOptions, engine: str) -> str:
    gpu, count = parse_gpus(gpus)
    source = _source(folder, config)
    plan = plan_for_gpus(str(source.directory), gpu, count, options, engine)
    assert plan.chosen is None
    return "; ".join(plan.notes)


# In 16 bits 24.7 GiB: too much for a GPU of 24 GiB on vLLM without fp8. The embedded engine has int8.
TWICE_AS_DEEP = LLAMA_2_7B | {"num_hidden_layers": 64}


def test_where_nothing_is_feasible_on_vllm_all_take_the_embedded_engine_and_say_so(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    source, (gpu, count), options = _source(tmp_path, TWICE_AS_DEEP), parse_gpus("a10g:1"), PlanOptions()
    folder = str(source.directory)
    plan = plan_for_gpus(folder, gpu, count, options, "auto")
    first = first_of(plan)
    assert first is not None
    assert (first.engine, first.weights) == ("torch", WeightFormat.INT8)
    there = (
        exported(source, "a10g:1", options, "auto"),
        launched(source, "a10g:1", options, profile, monkeypatch, tmp_path),
    )
    assert there == (first, first)
    (said,) = [note for note in plan.notes if note.startswith("engine vllm is passed over")]
    report = CliRunner().invoke(make_app(), ["report", folder, "--gpus", "a10g:1", "--markdown"])
    assert said in report.stdout


def test_an_engine_that_is_named_is_refused_where_another_would_do(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, (gpu, count) = _source(tmp_path, TWICE_AS_DEEP), parse_gpus("a10g:1")
    assert first_of(plan_for_gpus(str(source.directory), gpu, count, PlanOptions(), "vllm")) is None
    assert exported(source, "a10g:1", PlanOptions(), "vllm") is None
    # On a node where vllm is the only engine, as a deploy that names it finds it.
    tables = [table for table in capabilities_for("auto") if table.engine == "vllm"]
    monkeypatch.setattr(sys.modules[__name__], "capabilities_for", lambda _: tables)
    assert launched(source, "a10g:1", PlanOptions(), profile, monkeypatch, tmp_path, "vllm") is None


def test_where_nothing_works_the_checkpoint_that_would_is_named(tmp_path: Path, golden: Golden) -> None:
    options = PlanOptions(intent=Intent(quality=Quality.ANY))
    said = notes_of(TWICE_AS_DEEP, tmp_path, "a10g:1", options, "vllm")
    assert "weights=int4" in said
    golden("controller", said)
    assert "--engine" not in said


def test_an_architecture_that_a_named_engine_lacks_is_told_with_its_reason(tmp_path: Path, golden: Golden) -> None:
    gemma = LLAMA_2_7B | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    said = notes_of(gemma, tmp_path, "h200:1", PlanOptions(), "tensorrt-llm")
    golden("controller", said)


def test_a_model_that_no_engine_runs_is_refused_alike(tmp_path: Path) -> None:
    """A GPU older than vLLM's wheels, and a family that the embedded engine does not build."""
    gpu = replace(parse_gpus("t4")[0], compute_capability=(7, 0))
    falcon = {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65024}
    falcon |= {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True}
    falcon |= {"parallel_attn": True, "new_decoder_architecture": False, "alibi": False, "bias": False}
    folder = str(_source(tmp_path, falcon).directory)
    said = []
    for choose in (plan_for_gpus, launch_for_gpus):
        with pytest.raises(UnsupportedModelError) as refused:
            choose(folder, gpu, 1, PlanOptions(), "auto")
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "begin with Turing" in said[0]
