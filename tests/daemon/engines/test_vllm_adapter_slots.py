"""Adapter slots on vLLM: the command line that makes them, what has none, and the note of a container."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engine_options import EngineOptions
from daemon.engines.base import Inside
from daemon.engines.registry import get_engine
from daemon.engines.tensorrt_llm.capabilities import TABLE as TENSORRT_LLM
from daemon.engines.vllm import launch
from daemon.engines.vllm.capabilities import TABLE
from daemon.engines.vllm.own_options import OWN_OPTIONS
from daemon.engines.vllm.release import keeps_adapters_apart
from daemon.worker_spec import WorkerSpec
from fingerprint.config import ADAPTER_RANKS, LOADED_PER_SLOT, DeploymentConfig, WeightFormat
from fingerprint.errors import ConfigError, EngineError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker
from tests.golden_words import Golden

SLOTS = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=64)
VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
FLAGS = {"--enable-lora", "--max-loras", "--max-lora-rank", "--max-cpu-loras"}
MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., WorkerSpec]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))

    def one(**config: object) -> WorkerSpec:
        return replace(worker(tmp_path, **config), dummy_weights=True)

    return one


def options(spec: WorkerSpec) -> dict[str, str]:
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    return {name: value for name, _, value in (word.partition("=") for word in words[2:])}


def refusal(spec: ModelSpec, config: DeploymentConfig = SLOTS) -> str | None:
    return TABLE.refusal(spec, config, gpu_spec("h200"))


class TestLaunch:
    @pytest.mark.parametrize("rank", ADAPTER_RANKS)
    def test_slots_their_rank_and_the_loaded_adapters_are_vllms_own_limits(self, make, rank):
        plain, slots = options(make()), options(make(adapter_slots=8, adapter_rank=rank))
        assert {name: value for name, value in slots.items() if name not in plain} == {
            "--enable-lora": "",
            "--max-loras": "8",
            "--max-lora-rank": str(rank),
            "--max-cpu-loras": str(8 * LOADED_PER_SLOT),
        }
        assert plain.items() <= slots.items()

    def test_the_routes_that_load_adapters_are_there_with_slots_alone(self, make):
        plain, slots = make(), make(adapter_slots=1, adapter_rank=8)
        added = set(launch.environment(slots, DEVICES)) - set(launch.environment(plain, DEVICES))
        assert added == {(VARIABLE, "1")}

    def test_several_gpus_have_slots_too(self, make):
        found = options(make(layers=(20, 12), tp=2, adapter_slots=4, adapter_rank=16))
        assert found["--max-loras"] == "4"
        assert found["--pipeline-parallel-size"] == "2"

    def test_drafts_with_slots_need_steps_for_all_drafts_of_all_sequences(self, make, golden: Golden):
        """vLLM refuses it at its start only; 8 sequences with 4 drafts each are 40 tokens."""
        drafting = make(draft_tokens=4, adapter_slots=4, adapter_rank=16)
        enough, few = (
            replace(drafting, limits=replace(drafting.limits, max_batched_tokens=tokens)) for tokens in (40, 39)
        )
        assert options(enough)["--max-num-batched-tokens"] == "40"
        with golden.raises("engines", ConfigError):
            options(few)
        options(replace(few, config=replace(few.config, adapter_slots=0, adapter_rank=0)))

    @pytest.mark.parametrize(
        "name",
        [
            *("enable-lora", "max-loras", "max_lora_rank", "max-cpu-loras", "lora-modules", "lora-dtype"),
            *("fully-sharded-loras", "lora-target-modules", "specialize-active-lora", "default-mm-loras"),
        ],
    )
    def test_no_option_of_a_user_makes_loads_or_changes_slots(self, name):
        with pytest.raises(ConfigError, match="adapter"):
            get_engine("vllm").check_options(EngineOptions(arguments=((name, "1"),)))

    def test_every_lora_option_of_every_release_is_refused_to_users(self):
        named = {flag[2:] for facts in recorded().values() for flag in facts.flags if "lora" in flag}
        assert named <= OWN_OPTIONS.keys()
        assert {flag[2:] for flag in FLAGS} <= named


class TestTable:
    def test_an_ordinary_model_has_slots_in_every_format(self):
        llama = read_spec(LLAMA_8B)
        for weights in (WeightFormat.BITS16, WeightFormat.FP8):
            assert refusal(llama, replace(SLOTS, weights=weights)) is None
        assert refusal(llama, replace(SLOTS, tp=2, pp=2)) is None

    def test_an_architecture_whose_class_takes_no_adapters_has_none(self, golden: Golden):
        falcon = replace(read_spec(LLAMA_8B), architecture="FalconForCausalLM")
        golden("engines", refusal(falcon))
        assert refusal(falcon, DeploymentConfig(engine="vllm")) is None

    def test_experts_have_slots_in_16_bits_alone(self, golden: Golden):
        experts = read_spec(MIXTRAL)
        fp8 = replace(SLOTS, weights=WeightFormat.FP8)
        assert refusal(experts) is None
        golden("engines", str(refusal(experts, fp8)))
        divided = replace(SLOTS, tp=2, expert_parallel=True)
        golden("engines", str(refusal(experts, divided)))
        assert refusal(experts, divided.without_slots) is None
        assert refusal(experts, replace(fp8, adapter_slots=0, adapter_rank=0)) is None

    def test_latent_attention_has_none(self):
        latent = replace(read_spec(LLAMA_8B), kv_head_elements=576)
        plain = replace(SLOTS, adapter_slots=0, adapter_rank=0)
        assert "kv_b_proj" in str(refusal(latent))
        assert refusal(latent, plain) is None

    def test_a_plan_with_slots_says_what_of_them_was_run(self, golden: Golden):
        llama, gpu = read_spec(LLAMA_8B), gpu_spec("h200")
        plain = TABLE.conditions(llama, replace(SLOTS, adapter_slots=0, adapter_rank=0), gpu)
        (added,) = set(TABLE.conditions(llama, SLOTS, gpu)) - set(plain)
        golden("engines", added)

    def test_tensorrt_llm_has_slots_but_for_classes_that_leave_adapters_out(self, golden: Golden):
        config, gpu = replace(SLOTS, engine="tensorrt-llm"), gpu_spec("h200")
        assert TENSORRT_LLM.refusal(read_spec(LLAMA_8B), config, gpu) is None
        experts = read_spec(MIXTRAL)
        golden("engines", str(TENSORRT_LLM.refusal(experts, config, gpu)))
        assert TENSORRT_LLM.refusal(experts, DeploymentConfig(engine="tensorrt-llm"), gpu) is None


@pytest.mark.parametrize(("version", "has_slots"), [("0.24.0", False), ("0.25.1", False), ("0.33.0", True)])
def test_a_release_that_may_mix_adapters_has_no_slots(
    make, tmp_path, monkeypatch, version, has_slots, golden: Golden
):
    """Neither a plan nor a launch of it has; the base is served as before."""
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", version)))
    table, spec, gpu = get_engine("vllm").capabilities(), read_spec(LLAMA_8B), gpu_spec("h200")
    said = table.refusal(spec, SLOTS, gpu)
    assert table.refusal(spec, DeploymentConfig(engine="vllm"), gpu) is None
    assert (said is None) is has_slots
    get_engine("vllm").command(make(), tmp_path, DEVICES)
    with nullcontext() if has_slots else golden.raises("engines", EngineError):
        get_engine("vllm").command(make(adapter_slots=4, adapter_rank=16), tmp_path, DEVICES)
    if not has_slots:
        golden("engines", str(said), "in a plan")


@pytest.mark.parametrize("version", ["unknown", "", "0.25.9", "0.26.0rc1.dev1", "1.0"])
def test_a_version_that_says_nothing_is_not_trusted_with_adapters(version):
    assert keeps_adapters_apart(version) == (version in ("0.26.0rc1.dev1", "1.0"))


def test_a_container_with_slots_has_flags_routes_and_a_warning(make, golden: Golden):
    inside = Inside(model="/models/chat", files="/iserve", release="0.33.0", is_whole=True)
    plain, slots = (
        get_engine("vllm").container(spec, inside, DEVICES)
        for spec in (make(), make(adapter_slots=4, adapter_rank=16))
    )
    assert {word.partition("=")[0] for word in set(slots.argv) - set(plain.argv)} == FLAGS
    assert set(slots.env) - set(plain.env) == {(VARIABLE, "1")}
    (note,) = slots.notes
    golden("engines", note)
    assert plain.notes == ()
