"""Tables of the engines, and the start of the one that is there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import ENGINES, capabilities_for, get_engine
from daemon.sources.transformers_classes import recorded_transformers
from daemon.torch_engine.model.architectures import architectures_of
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.architectures import Architectures, Listed
from fingerprint.capability import EngineCapabilities, Exclusion, Verified
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, parse_config
from fingerprint.engines import TRAITS, EngineTraits, traits_of
from fingerprint.errors import ConfigError, EngineError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from tests.golden_words import Golden

GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_beside_torch(monkeypatch):
    """Hide engines that the machine of the tests may have installed."""
    for variable in ("ISERVE_VLLM_PYTHON", "ISERVE_TENSORRT_LLM_PYTHON"):
        monkeypatch.delenv(variable, raising=False)


def gpu(capability: tuple[int, int] | None) -> GpuSpec:
    return GpuSpec(
        name="test",
        memory_bytes=48 * GIB,
        memory_bytes_per_s=7e11,
        flops_16bit_per_s=1e14,
        flops_8bit_per_s=None,
        flops_fp8_per_s=None,
        compute_capability=capability,
        link_bytes_per_s=1e10,
        link_group_size=1,
        pcie_bytes_per_s=1e10,
    )


T4, A6000, H200, CPU = gpu((7, 5)), gpu((8, 6)), gpu((9, 0)), gpu(None)


ARCHITECTURES = {
    family: name for name, found in recorded_transformers().classes.items() for family in found.families
}
ARCHITECTURES |= {"tomorrow": "TomorrowForCausalLM"}


def model(family: str) -> ModelSpec:
    return ModelSpec(
        family=family,
        architecture=ARCHITECTURES[family],
        num_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        max_context_tokens=4096,
        tied_embeddings=False,
        layer_params=1,
        layer_linear_params=1,
        embedding_params=1,
        head_params=1,
        final_norm_params=1,
    )


def worker(engine: str) -> WorkerSpec:
    return WorkerSpec(
        worker_id="w1",
        served_model="m",
        checkpoint="/models/m",
        config=DeploymentConfig(engine=engine),
        stages=(StageAssignment(device_ids=("cpu:0",), num_layers=2),),
        limits=WorkerLimits(
            max_batch=1, max_batched_tokens=1, max_context_tokens=1, kv_tokens=1, memory_bytes_per_device=1
        ),
    )


@pytest.mark.parametrize(
    ("engine", "family", "device", "config", "runs"),
    [
        ("torch", "llama", CPU, "tp=2,pp=2,weights=int8", True),
        ("torch", "qwen3", H200, "", True),
        ("torch", "mixtral", CPU, "", True),
        ("torch", "mixtral", CPU, "weights=int8", False),
        ("torch", "qwen3_moe", CPU, "tp=2,pp=2", True),
        ("torch", "phi3", CPU, "tp=2", False),
        ("torch", "opt", CPU, "", True),
        ("torch", "opt", CPU, "pp=2", False),
        ("torch", "opt", CPU, "tp=2", False),
        ("torch", "olmo2", CPU, "weights=int8", True),
        ("torch", "olmo2", CPU, "pp=2", False),
        ("torch", "gpt2", CPU, "weights=int8", False),
        ("torch", "gpt_bigcode", CPU, "", False),
        ("torch", "dots1", CPU, "", False),
        ("torch", "gemma3_text", CPU, "", True),
        ("torch", "gpt_oss", CPU, "weights=int8", False),
        ("torch", "gpt_oss", CPU, "tp=2", False),
        ("vllm", "gemma3_text", H200, "", True),
        ("vllm", "olmo2", H200, "tp=2", True),
        ("vllm", "gpt_neo", H200, "", False),
        ("vllm", "deepseek_v3", H200, "tp=8", True),
        ("vllm", "qwen3_next", H200, "pp=2", True),
        ("vllm", "dots1", H200, "tp=2", True),
        ("vllm", "mamba2", H200, "pp=2", False),
        ("vllm", "gpt_bigcode", H200, "tp=2", False),
        ("vllm", "mpt", H200, "", False),
        ("vllm", "xlstm", H200, "", False),
        ("vllm", "tomorrow", H200, "", False),
        ("torch", "deepseek_v3", CPU, "", False),
        ("torch", "mamba2", CPU, "", False),
        ("torch", "biogpt", CPU, "", False),
        ("torch", "qwen2_vl", CPU, "", False),
        ("torch", "tomorrow", CPU, "", False),
        ("vllm", "gpt_oss", H200, "weights=fp8", False),
        ("vllm", "gpt_oss", H200, "kv=fp8", False),
        ("tensorrt-llm", "gemma2", H200, "", False),
        ("torch", "qwen3_moe", CPU, "weights=int8", False),
        ("vllm", "qwen3_moe", H200, "tp=2,weights=fp8", True),
        ("tensorrt-llm", "qwen2_moe", H200, "weights=int4", False),
        ("torch", "falcon", CPU, "", False),
        ("torch", "gptj", CPU, "", False),
        ("torch", "llama", CPU, "tp=4", False),
        ("torch", "llama", CPU, "pp=3", False),
        ("torch", "llama", CPU, "weights=gptq4", False),
        ("torch", "llama", CPU, "kv=int8", False),
        ("torch", "llama", CPU, "pruning=wanda", False),
        ("vllm", "llama", CPU, "", False),
        ("vllm", "falcon", A6000, "", True),
        ("vllm", "gptj", A6000, "weights=gptq4", True),
        ("vllm", "llama", A6000, "weights=int8", False),
        ("vllm", "llama", A6000, "kv=int8", True),
        ("vllm", "llama", A6000, "kv=fp8", False),
        ("vllm", "llama", H200, "kv=fp8", True),
        ("vllm", "llama", H200, "pruning=wanda-2:4", False),
        ("vllm", "llama", H200, "pruning=sparsegpt", True),
        ("tensorrt-llm", "falcon", A6000, "", False),
        ("tensorrt-llm", "gptj", A6000, "", False),
        ("tensorrt-llm", "llama", A6000, "weights=gptq4", False),
        ("tensorrt-llm", "llama", A6000, "kv=int8", False),
        ("tensorrt-llm", "llama", A6000, "pruning=wanda-2:4", False),
        ("tensorrt-llm", "llama", A6000, "weights=fp8", False),
        ("tensorrt-llm", "llama", A6000, "kv=fp8", False),
        ("tensorrt-llm", "llama", T4, "", False),
        ("tensorrt-llm", "mixtral", A6000, "weights=int4", False),
        ("tensorrt-llm", "mixtral", H200, "weights=fp8", True),
        ("tensorrt-llm", "llama", A6000, "weights=int8", True),
        ("tensorrt-llm", "llama", A6000, "pruning=wanda", True),
        ("tensorrt-llm", "llama", H200, "weights=fp8,kv=fp8", True),
        ("tensorrt-llm", "qwen3", H200, "kv=int8", False),
        # 4096 and 11008 inputs are 32 and 86 groups of 128: two ranks hold whole ones, four cut those of 11008
        ("vllm", "llama", A6000, "tp=2,weights=int4", True),
        ("vllm", "llama", A6000, "tp=4,weights=int4", False),
        ("vllm", "llama", A6000, "tp=4", True),
        ("tensorrt-llm", "llama", A6000, "tp=4,weights=int4", False),
        ("tensorrt-llm", "llama", A6000, "tp=4,weights=int8", True),
        ("tensorrt-llm", "qwen3", H200, "", True),
        ("tensorrt-llm", "bloom", H200, "", False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_runs_and_why_not(engine, family, device, config, runs, golden: Golden):
    (table,) = capabilities_for(engine)
    if engine == "torch":  # the classes of the release that the rows were written for
        table = replace(table, architectures=architectures_of(recorded_transformers()))
    said = table.refusal(model(family), parse_config(config, engine=engine), device)
    assert (said is None) is runs
    if not runs:
        assert said.startswith(engine)
        golden("engines", said)


@pytest.mark.parametrize(
    ("engine", "family", "config"),
    [
        ("torch", "llama", "weights=int8"),
        ("vllm", "falcon", ""),
        ("vllm", "llama", "weights=gptq4"),
        ("vllm", "llama", "weights=fp8,kv=int8"),
        ("vllm", "llama", "pruning=wanda"),
        ("tensorrt-llm", "llama", ""),
        ("tensorrt-llm", "llama", "weights=int8"),
        ("tensorrt-llm", "llama", "weights=fp8,kv=fp8"),
        ("tensorrt-llm", "llama", "kv=fp8"),
        ("tensorrt-llm", "llama", "pruning=wanda"),
    ],
)
def test_what_running_it_takes_is_told_per_configuration(engine, family, config, golden: Golden):
    (table,) = capabilities_for(engine)
    golden("engines", table.conditions(model(family), parse_config(config, engine=engine), H200))


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        ("weights=fp8", False),
        ("weights=int8", False),
        ("pruning=wanda", False),
        ("kv=fp8", True),
        ("tp=2,pp=2", True),
    ],
)
def test_a_plain_checkpoint_runs_only_what_needs_no_preparing(config, runs, golden: Golden):
    (table,) = capabilities_for("tensorrt-llm")
    asked = parse_config(config, engine="tensorrt-llm")
    assert table.refusal(model("llama"), asked, H200) is None
    said = table.unprepared().refusal(model("llama"), asked, H200)
    assert (said is None) is runs
    if not runs:
        golden("engines", said)


def test_traits_are_those_of_engines_that_there_are():
    assert TRAITS.keys() == ENGINES.keys()
    assert traits_of("another") == EngineTraits()


def test_auto_is_every_engine_with_the_deployable_first():
    tables = capabilities_for("auto")
    assert [table.engine for table in tables] == list(ENGINES)
    deployable, verified = ([getattr(t, n) for t in tables[:3]] for n in ("deployable", "verified"))
    assert deployable == [True, False, False]
    assert [bool(one) for one in verified] == [True, True, False]


@pytest.mark.parametrize("ask", [get_engine, capabilities_for])
def test_an_unknown_engine_is_named_with_the_known(ask):
    with pytest.raises(ConfigError, match=f"'abacus'; there are {', '.join(ENGINES)}"):
        ask("abacus")


@pytest.mark.parametrize("name", ENGINES)
class TestEveryEngine:
    """Every engine keeps the protocol; a new one is tested by being registered."""

    def test_it_is_called_what_its_table_is(self, name):
        assert get_engine(name).name == get_engine(name).capabilities().engine == name

    def test_its_table_speaks_of_every_format(self, name):
        table = get_engine(name).capabilities()
        assert set(table.weights) == set(WeightFormat)
        assert set(table.kv) == set(KvFormat)
        assert set(table.pruning) == set(Pruning)
        assert table.weights[WeightFormat.BITS16] is table.kv[KvFormat.BITS16] is None

    def test_it_starts_or_says_that_it_cannot(self, name, tmp_path, tiny_checkpoint):
        engine = get_engine(name)
        if engine.capabilities().deployable:
            spec = replace(worker(name), checkpoint=str(tiny_checkpoint("llama")))
            command = engine.command(spec, tmp_path, {})
            assert all(isinstance(word, str) for word in command.argv)
        else:
            with pytest.raises(EngineError, match=f"{name} is not installed"):
                engine.command(worker(name), tmp_path, {})

    def test_a_failure_is_an_engine_error_that_names_the_worker(self, name):
        error = get_engine(name).explain_failure(worker(name), 3, "")
        assert isinstance(error, EngineError)
        assert "w1" in str(error)


def test_the_embedded_engine_is_a_process_of_this_interpreter(tmp_path):
    command = get_engine("torch").command(worker("torch"), tmp_path, {})
    assert command.argv == (sys.executable, "-m", "daemon.torch_engine", "--spec", str(tmp_path / "spec.json"))
    assert ("HF_HUB_OFFLINE", "1") in command.env


@pytest.mark.parametrize(
    ("exit_code", "log_tail"),
    [
        pytest.param(98, "", id="port"),
        pytest.param(97, "x\n", id="memory"),
        pytest.param(96, 'noise\n{"error": "CheckpointError", "message": "no shard 2"}\n', id="checkpoint"),
        pytest.param(95, '{"error": "EngineError"}\n{"error"\nlast line\n', id="no-message"),
        pytest.param(3, "", id="unknown"),
    ],
)
def test_exit_codes_and_last_words_become_a_reason(exit_code, log_tail, golden: Golden):
    golden("engines", str(get_engine("torch").explain_failure(worker("torch"), exit_code, log_tail)))


def test_versions_are_those_installed():
    versions = dict(get_engine("torch").versions())
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["transformers"] == importlib.metadata.version("transformers")


def test_reading_the_tables_loads_no_engine():
    code = "import sys, daemon.engines.registry; print('torch' in sys.modules, 'transformers' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, env=env)
    assert out.stdout.split() == ["False", "False"]


# --- the value itself ------------------------------------------------------------------------------------------


INT8_WEIGHTS = frozenset({WeightFormat.INT8})


ARCHITECTURES_OF_E = Architectures(
    source="E 1",
    listed={"LlamaForCausalLM": Listed(), "GPTJForCausalLM": Listed(no_tp="whole", no_pp="deep", no_lora="alone")},
    reasons={"BloomForCausalLM": "ALiBi"},
    otherwise="E 1 lists no such class",
)


def table(**changes: object) -> EngineCapabilities:
    values = {
        "engine": "e",
        "architectures": ARCHITECTURES_OF_E,
        "weights": dict.fromkeys(WeightFormat),
        "kv": dict.fromkeys(KvFormat),
        "pruning": {Pruning.NONE: None},
        "max_tp": 2,
        "max_pp": 2,
    }
    return EngineCapabilities(**(values | changes))


@pytest.mark.parametrize(
    ("exclusion", "expected"),
    [
        pytest.param({}, True, id="everything"),
        pytest.param({"families": frozenset({"llama"})}, True, id="its-family"),
        pytest.param({"families": frozenset({"gptj"})}, False, id="another-family"),
        pytest.param(
            {"weights": frozenset({WeightFormat.INT8}), "kv": frozenset({KvFormat.FP8})}, True, id="both"
        ),
        pytest.param(
            {"weights": frozenset({WeightFormat.INT8}), "kv": frozenset({KvFormat.INT8})}, False, id="one"
        ),
        pytest.param({"below_compute_capability": (8, 9)}, True, id="older"),
        pytest.param({"below_compute_capability": (8, 6)}, False, id="as-old"),
    ],
)
def test_an_exclusion_holds_where_all_it_names_do(exclusion, expected):
    config = DeploymentConfig(weights=WeightFormat.INT8, kv=KvFormat.FP8)
    rule = Exclusion(reason="because", **exclusion)
    assert rule.applies(model("llama"), config, A6000) is expected
    said = table(exclusions=(rule,)).refusal(model("llama"), config, A6000)
    assert said == ("e: because" if expected else None)


def test_an_exclusion_by_age_is_about_nvidia_gpus():
    rule = Exclusion(reason="old", below_compute_capability=(9, 0))
    assert not rule.applies(model("llama"), DeploymentConfig(), CPU)


def test_degrees_are_refused_with_their_reason(golden: Golden):
    said = table(degree_reason="no more were tried").refusal(model("llama"), DeploymentConfig(tp=4), A6000)
    golden("engines", said)
    golden("engines", table().refusal(model("llama"), DeploymentConfig(pp=4), A6000))


def test_what_an_engine_has_is_limited_with_its_reason(golden: Golden):
    """A limit is that of one architecture, not of any other."""
    whole, split = model("gptj"), DeploymentConfig(tp=2)
    assert table().refusal(whole, DeploymentConfig(), A6000) is None
    said = table().refusal(whole, split, A6000)
    golden("engines", said)
    said = table().refusal(whole, DeploymentConfig(pp=2), A6000)
    golden("engines", said)
    said = table().lora_refusal(whole, DeploymentConfig(), A6000)
    golden("engines", said)
    for config in (split, DeploymentConfig(pp=2)):
        assert table().refusal(model("llama"), config, A6000) is None
    assert table().lora_refusal(model("llama"), DeploymentConfig(), A6000) is None


def test_adapter_slots_are_refused_of_an_engine_and_of_an_architecture_that_have_none(golden: Golden):
    slots = DeploymentConfig(adapter_slots=2, adapter_rank=16)
    said = table().refusal(model("llama"), slots, A6000)
    golden("engines", said)
    assert table(adapters=True).refusal(model("llama"), slots, A6000) is None
    said = table(adapters=True).refusal(model("gptj"), slots, A6000)
    golden("engines", said)
    assert table(adapters=True).refusal(model("gptj"), DeploymentConfig(), A6000) is None


def test_an_architecture_that_is_not_listed_is_refused_in_the_engines_words(golden: Golden):
    said = table().refusal(model("bloom"), DeploymentConfig(), A6000)
    golden("engines", said)
    said = table().refusal(model("tomorrow"), DeploymentConfig(), A6000)
    assert said is not None
    golden("engines", said)


def test_a_listed_architecture_that_nobody_ran_is_planned_and_says_so(golden: Golden):
    ran = table(verified=(Verified(families=frozenset({"llama"})),))
    assert ran.unseen(model("llama"), DeploymentConfig(), A6000) is None
    assert ran.refusal(model("gptj"), DeploymentConfig(), A6000) is None
    golden("engines", ran.unseen(model("gptj"), DeploymentConfig(), A6000))
    said = ran.unseen(model("llama"), DeploymentConfig(tp=2), A6000)
    golden("engines", said)
