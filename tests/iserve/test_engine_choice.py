"""The engine that ``--engine auto`` means on a node, and the reasons against the remaining ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.tensorrt_llm.capabilities import TABLE as TENSORRT_LLM
from daemon.engines.torch import TorchEngine
from daemon.engines.vllm.capabilities import TABLE as VLLM
from fingerprint.capability import Verified
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import UnsupportedModelError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from iserve.planning import deployment_choice, offline
from iserve.planning.engine_choice import EngineChoice, by_preference, engine_choices, first_feasible
from iserve.planning.joint_plan import ChosenPlan, chosen_plan
from iserve.planning.offline import estimate_for_gpu, plan_for_gpus
from iserve.planning.pipeline import EngineChooser, PlanOptions
from planner.intent import CostModel, Quality
from tests.fingerprint.synthetic_machine import llama
from tests.golden_words import Golden
from tests.iserve.test_report import LLAMA_2_7B

TORCH = TorchEngine().capabilities()
TABLES = (TORCH, TENSORRT_LLM, VLLM)  # their order says nothing
FALCON = read_spec(
    {
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "bias": False,
    }
)
NOT_INSTALLED = replace(VLLM, unavailable="vllm is not installed: set ISERVE_VLLM_PYTHON")
RUN = replace(TENSORRT_LLM, verified=(Verified(max_tp=1, max_pp=1),))
A6000 = gpu_spec("a6000")


def choose(*tables, spec=None, gpu=A6000, quality=Quality.NEAR, on_gpus=True) -> EngineChoice:
    return engine_choices(spec or llama(), gpu, tables or TABLES, quality, on_gpus=on_gpus)[0]


def test_on_gpus_vllm_is_taken_where_it_is() -> None:
    assert choose() == EngineChoice("vllm")


def test_on_a_cpu_the_embedded_engine_is_and_nothing_is_said() -> None:
    assert choose(gpu=None, on_gpus=False) == EngineChoice("torch")


def test_an_engine_without_a_line_of_traits_is_taken_after_those_that_have_one() -> None:
    other = replace(VLLM, engine="other")
    choices = engine_choices(llama(), A6000, (other, VLLM), Quality.NEAR, on_gpus=True)
    assert [choice.engine for choice in choices] == ["vllm", "other"]
    assert by_preference((other, TORCH), A6000)[-1] is other


def test_what_is_not_installed_or_was_never_run_is_passed_over_with_the_reason(golden: Golden) -> None:
    choice = choose(NOT_INSTALLED, TENSORRT_LLM, TORCH)
    assert choice.engine == "torch"
    vllm, tensorrt = choice.passed_over
    golden("controller", vllm)
    golden("controller", tensorrt)


def test_an_installed_tensorrt_llm_is_not_taken_unasked_while_nothing_of_it_was_run() -> None:
    assert TENSORRT_LLM.unavailable is None
    assert choose(NOT_INSTALLED, TENSORRT_LLM, TORCH).engine == "torch"
    assert choose(NOT_INSTALLED, RUN, TORCH).engine == "tensorrt-llm"
    unmeasured = replace(RUN, unprofiled="it has no profiling worker")
    assert choose(NOT_INSTALLED, unmeasured, TORCH).engine == "torch"


def test_an_engine_that_refuses_every_format_is_passed_over() -> None:
    volta = replace(A6000, compute_capability=(7, 0))
    choice = choose(gpu=volta)
    assert choice.engine == "torch"
    assert "begin with Turing" in choice.passed_over[0]


def test_an_engine_with_only_formats_that_quality_forbids_is_passed_over(golden: Golden) -> None:
    """A single format that may be used is enough."""
    refused = dict.fromkeys(WeightFormat, "not here") | {WeightFormat.FP8: None}
    table = replace(VLLM, weights=refused)
    assert choose(table, TORCH, gpu=gpu_spec("h200"), quality=Quality.NEAR).engine == "vllm"
    choice = choose(table, TORCH, gpu=gpu_spec("h200"), quality=Quality.EXACT)
    assert choice.engine == "torch"
    golden("controller", choice.passed_over)


def test_formats_that_need_a_prepared_checkpoint_do_not_count() -> None:
    refused = dict.fromkeys(WeightFormat, "not here") | {WeightFormat.GPTQ4: None}
    assert choose(replace(VLLM, weights=refused), TORCH, quality=Quality.ANY).engine == "torch"


def test_a_gpu_of_which_nothing_is_known_is_the_embedded_engines(golden: Golden) -> None:
    choice = choose(gpu=None)
    assert choice.engine == "torch"
    golden("controller", choice.passed_over[0])


@pytest.mark.parametrize("gpu", [A6000, None])
def test_a_model_that_no_engine_runs_is_refused_with_each_reason(gpu, golden: Golden) -> None:
    with golden.raises("controller", UnsupportedModelError):
        choose(NOT_INSTALLED, TENSORRT_LLM, TORCH, spec=FALCON, gpu=gpu)
    if gpu is not None:
        assert choose(VLLM, TENSORRT_LLM, TORCH, spec=FALCON, gpu=gpu) == EngineChoice("vllm")


def test_the_next_engine_is_taken_where_nothing_is_feasible_on_the_preferred_one(golden: Golden) -> None:
    choices = engine_choices(llama(), A6000, (TORCH, RUN, VLLM), Quality.NEAR, on_gpus=True)
    assert [choice.engine for choice in choices] == ["vllm", "tensorrt-llm", "torch"]
    chosen = first_feasible(choices, lambda engine: engine == "torch")
    assert chosen.engine == "torch"
    golden("controller", [note.split(":")[0] for note in chosen.passed_over])
    assert first_feasible(choices, lambda _: True) == EngineChoice("vllm")
    assert first_feasible(choices, lambda _: False) == EngineChoice("vllm")


def test_an_engine_that_is_the_only_choice_is_not_planned_on() -> None:
    def never(_: str) -> bool:
        raise AssertionError("asked")

    (only,) = engine_choices(llama(), None, TABLES, Quality.NEAR, on_gpus=False)
    assert first_feasible([only], never) is only


# --- plans for GPUs that are not here ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [llama(), FALCON], ids=["llama", "falcon"])
@pytest.mark.parametrize("gpu", ["a6000", "h200"])
def test_where_all_are_installed_a_plan_names_what_a_deploy_takes(spec, gpu) -> None:
    tables = tuple(replace(table, unavailable=None) for table in TABLES)
    planned = EngineChooser(spec, gpu_spec(gpu), by_preference(tables, gpu_spec(gpu)))
    assert planned.name(DeploymentConfig()) == choose(*tables, spec=spec, gpu=gpu_spec(gpu)).engine


def test_what_is_installed_here_says_nothing_of_gpus_that_are_elsewhere() -> None:
    assert [table.engine for table in by_preference((TORCH, TENSORRT_LLM, NOT_INSTALLED), A6000)] == [
        "vllm",
        "torch",
        "tensorrt-llm",
    ]


def test_what_was_never_run_is_asked_last() -> None:
    """And takes its place before the embedded engine as soon as it was, and something can be measured on it."""
    assert [t.engine for t in by_preference((TORCH, RUN, VLLM), A6000)] == ["vllm", "tensorrt-llm", "torch"]
    unmeasured = replace(RUN, unprofiled="it has no profiling worker")
    assert by_preference((TORCH, unmeasured, VLLM), A6000)[-1] is unmeasured


def test_a_cpu_is_the_embedded_engine_s() -> None:
    cpu = replace(A6000, compute_capability=None)
    assert by_preference(TABLES, cpu)[0].engine == "torch"


def test_a_plan_for_an_h200_is_of_vllm_and_an_estimate_of_what_runs_it(tmp_path) -> None:
    """Only the embedded engine runs int8 weights of a dense model, and a deploy does not take it there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    plan = plan_for_gpus(str(tmp_path), gpu_spec("h200"), 1, PlanOptions(), "auto")
    assert {candidate.config.engine for candidate in plan.candidates} == {"vllm"}
    asked = plan_for_gpus(str(tmp_path), gpu_spec("h200"), 1, PlanOptions(), "torch")
    assert {candidate.config.engine for candidate in asked.candidates} == {"torch"}
    for weights, engine in ((WeightFormat.BITS16, "vllm"), (WeightFormat.INT8, "torch")):
        config = DeploymentConfig(weights=weights, engine="auto")
        one = estimate_for_gpu(str(tmp_path), gpu_spec("h200"), config, Workload(), CostModel.MEMORY_LATENCY)
        assert (one.config.engine, one.runnable) == (engine, True)


def test_the_plan_that_chose_the_engine_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare it with the plan of the engine by its name."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    by_name = plan_for_gpus(str(tmp_path), A6000, 2, PlanOptions(), "vllm")
    made = list[str]()

    def count(*arguments: Any, **named: Any) -> ChosenPlan:
        made.append(arguments[3][0].engine)
        return chosen_plan(*arguments, **named)

    for module in (offline, deployment_choice):
        monkeypatch.setattr(module, "chosen_plan", count)
    found = plan_for_gpus(str(tmp_path), A6000, 2, PlanOptions(), "auto")
    assert made == ["vllm"]
    assert (found.candidates, found.chosen, found.verdict) == (by_name.candidates, by_name.chosen, by_name.verdict)
