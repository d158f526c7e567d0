"""Laws of the serving capacity of models that keep states, windows or latents; the same as before for the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import capabilities_for
from daemon.engines.vllm.cache import kv_cache_bytes
from fingerprint import description
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import kept_bytes_per_replica
from iserve.model_source import ModelSource
from iserve.planning.document import CacheSizesDocument, CapacityBound
from iserve.planning.pipeline import Hardware, make_plan
from iserve.planning.serving_capacity import ServingCapacity, serving_capacity
from iserve.planning.verdict_text import state_sizes
from iserve.planning.worker_launch import worker_spec
from iserve.simulation.running import launch_limits
from tests.fingerprint import family_truths
from tests.golden_words import Golden
from tests.iserve.test_serving_capacity import DEFAULTS, GIB, H100, idle, taken_bytes

PURE = description.described_config(family_truths.default("Mamba2ForCausalLM").config)
PUBLIC = {
    name: read_spec(family_truths.public(name).config)
    for name in (
        "Qwen/Qwen3.5-27B (text)",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "ibm-granite/granite-4.0-h-small",
        "LiquidAI/LFM2-1.2B",
        "google/gemma-3-27b-it (text)",
        "google/gemma-3-1b-it",
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V2-Lite",
        "mistralai/Mistral-7B-v0.1",
        "meta-llama/Llama-3.1-8B",
    )
}
HYBRID = PUBLIC["nvidia/NVIDIA-Nemotron-Nano-9B-v2"]
KINDS = PUBLIC | {"Mamba2ForCausalLM": PURE}


def found_for(
    spec: ModelSpec, *, taken_gib: int = 0, usual: tuple[int, int] = (512, 128), count: int = 1
) -> tuple[ServingCapacity | None, Hardware, RooflineEstimator]:
    hardware = idle(count, taken_bytes=taken_gib * GIB)
    options = replace(DEFAULTS, workload=Workload(input_tokens=usual[0], output_tokens=usual[1]))
    estimator = RooflineEstimator(spec, H100)
    tables = [replace(table, unavailable=None) for table in capabilities_for("vllm")]
    plan = make_plan(spec, hardware, estimator, tables, options)
    return serving_capacity(plan, spec, hardware, estimator, options), hardware, estimator


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("taken_gib", "usual"), [(0, (512, 128)), (20, (512, 128)), (30, (4000, 200)), (0, (40, 8))]
)
def test_what_the_worker_takes_fits_what_it_is_promised(
    name: str, taken_gib: int, usual: tuple[int, int], tmp_path: Path
) -> None:
    """Capacity times cost is no more than the room, where cost is what vLLM is started with."""
    spec = KINDS[name]
    found, hardware, estimator = found_for(spec, taken_gib=taken_gib, usual=usual)
    if found is None:
        pytest.skip("does not fit at all")
    planned = Workload(input_tokens=usual[0], output_tokens=usual[1])
    free = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    source: Any = ModelSource(name="m", directory=tmp_path, spec=spec, has_weights=False)
    placement = found.placements[0]
    config = DeploymentConfig(**_config_of(found, hardware, estimator, spec, planned))
    worker = worker_spec("m", source, "m-1", config, placement, planned, free, served=found.workload)
    memory = estimator.estimate(config, found.workload).memory
    rest = memory.per_gpu_bytes((spec.num_layers,)) - spec.num_layers * memory.layer_kv_bytes
    promised = worker.limits.memory_bytes_per_device
    assert rest + kv_cache_bytes(worker, spec) <= promised <= min(free.values())


def _config_of(
    found: ServingCapacity, hardware: Hardware, estimator: RooflineEstimator, spec: ModelSpec, planned: Workload
) -> dict[str, Any]:
    tables = [replace(table, unavailable=None) for table in capabilities_for("vllm")]
    best = make_plan(spec, hardware, estimator, tables, replace(DEFAULTS, workload=planned)).best
    assert best is not None
    assert len(found.placements) == 1
    names = ("engine", "tp", "pp", "weights", "kv", "pruning")
    return {name: getattr(best.config, name) for name in names}


@pytest.mark.parametrize(
    "name", ["Mamba2ForCausalLM", "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "meta-llama/Llama-3.1-8B"]
)
def test_more_memory_never_serves_fewer_or_shorter_requests(name: str) -> None:
    sizes = []
    for taken_gib in (0, 25, 45, 55, 60, 63, 66):
        found, _, _ = found_for(KINDS[name], taken_gib=taken_gib)
        if found is not None:
            sizes.append((found.workload.batch, found.workload.context_tokens))
    assert len(sizes) > 3
    assert len(set(sizes)) > 1
    assert sizes == sorted(sizes, reverse=True)
    assert [context for _, context in sizes] == sorted((context for _, context in sizes), reverse=True)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 6000), st.integers(1, 2000), st.integers(40, 60))
def test_states_alone_serve_as_many_requests_whatever_their_length(
    input_tokens: int, output_tokens: int, taken_gib: int
) -> None:
    usual, _, _ = found_for(PURE, taken_gib=taken_gib)
    other, _, _ = found_for(PURE, taken_gib=taken_gib, usual=(input_tokens, output_tokens))
    assert usual is not None
    assert other is not None
    assert usual.workload.batch == other.workload.batch
    assert usual.workload.context_tokens == other.workload.context_tokens


def test_states_alone_take_any_length_and_as_many_as_memory_holds() -> None:
    found, hardware, _ = found_for(PURE, taken_gib=55)
    assert found is not None
    assert found.bound is CapacityBound.MEMORY
    assert 1 < found.workload.batch < 256
    assert found.workload.context_tokens == 131_072
    of_one = kept_bytes_per_replica(PURE, DeploymentConfig(engine="vllm"))[1]
    room = hardware.snapshot.gpus[0].free_bytes - 0.05 * H100.memory_bytes - taken_bytes(found, hardware)
    assert room < 2 * of_one  # one more request does not fit


def test_a_document_says_what_is_kept() -> None:
    """Hand-computed for Nemotron Nano 9B v2: 27 Mamba-2 layers and 4 of attention with 8 heads of 128."""
    found, hardware, _ = found_for(HYBRID)
    assert found is not None
    document = found.document({gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus})
    assert document.cache_sizes is not None
    assert document.cache_sizes.state_bytes_per_request == 27 * 5_316_608
    element_bytes = 2 if document.cache_sizes.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2 else 1
    assert document.cache_sizes.kv_bytes_per_token == 4 * 2 * 8 * 128 * element_bytes
    assert document.kv_tokens == found.workload.kv_tokens("vllm")


def test_a_document_of_states_alone_has_no_tokens() -> None:
    found, hardware, _ = found_for(PURE)
    assert found is not None
    document = found.document({gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus})
    assert document.cache_sizes is not None
    assert (document.kv_tokens, document.cache_sizes.kv_bytes_per_token) == (0, 0)
    assert document.cache_sizes.state_bytes_per_request == 64 * 2_158_592


@pytest.mark.parametrize(
    ("model", "taken_gib", "batch", "context", "promised"),
    [
        ("meta-llama/Llama-3.1-8B", 30, 256, 131_072, 23_837_491_706),
        ("meta-llama/Llama-2-7b-hf", 0, 256, 4096, 56_527_624_643),
        ("meta-llama/Llama-2-7b-hf", 30, 215, 4096, 48_959_958_632),
        ("meta-llama/Llama-2-7b-hf", 45, 127, 4096, 32_757_093_081),
        ("Qwen/Qwen3-0.6B", 45, 256, 40_960, 13_046_846_833),
        ("mistralai/Mistral-7B-v0.1", 45, 256, 32_768, 22_016_730_175),
    ],
)
def test_a_model_without_states_is_served_as_before(
    model: str, taken_gib: int, batch: int, context: int, promised: int
) -> None:
    """Figures of the release before states were counted (commit 495eed1)."""
    found, hardware, _ = found_for(read_spec(family_truths.public(model).config), taken_gib=taken_gib)
    assert found is not None
    assert (found.workload.batch, found.workload.context_tokens) == (batch, context)
    assert taken_bytes(found, hardware) == promised


class TestSimulatedLimits:
    """Tokens bound what a simulated worker admits only where its model keeps them."""

    WORK = Workload(batch=8)

    def test_states_alone_are_bounded_by_requests(self) -> None:
        limits = launch_limits(self.WORK, "vllm", spec=PURE)
        assert (limits.max_batch, limits.kv_tokens, limits.kv_window) == (8, None, None)

    def test_windows_alone_keep_a_window(self) -> None:
        limits = launch_limits(self.WORK, "vllm", spec=PUBLIC["mistralai/Mistral-7B-v0.1"])
        assert (limits.kv_tokens, limits.kv_window) == (8 * 640, 4096)

    @pytest.mark.parametrize("name", ["nvidia/NVIDIA-Nemotron-Nano-9B-v2", "google/gemma-3-1b-it"])
    def test_one_layer_that_looks_all_the_way_keeps_all_tokens(self, name: str) -> None:
        limits = launch_limits(self.WORK, "vllm", spec=PUBLIC[name])
        assert (limits.max_batch, limits.kv_tokens, limits.kv_window) == (8, 8 * 640, None)

    def test_a_model_without_states_is_as_without_a_model(self) -> None:
        spec = PUBLIC["meta-llama/Llama-3.1-8B"]
        for engine in ("vllm", "torch"):
            assert launch_limits(self.WORK, engine, spec=spec) == launch_limits(self.WORK, engine)


def test_sizes_are_shown_only_of_a_model_with_states(golden: Golden) -> None:
    hybrid = CacheSizesDocument(kv_bytes_per_token=12_288, state_bytes_per_request=39_518_208)
    assert [size for _, size in state_sizes(hybrid)] == ["12.0 KiB", "37.7 MiB"]
    golden("controller", [name for name, _ in state_sizes(hybrid)])
    golden("controller", [name for name, _ in state_sizes(replace(hybrid, kv_bytes_per_token=0))])
    assert state_sizes(replace(hybrid, state_bytes_per_request=0)) == []
    assert state_sizes(None) == []
