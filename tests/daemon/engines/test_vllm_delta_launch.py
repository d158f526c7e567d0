"""Deltas on vLLM as iServe plans and starts them: command line, memory, and what is refused beforehand."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.devices import read_machine
from daemon.engines.base import Inside
from daemon.engines.registry import get_engine
from daemon.engines.vllm import launch, release, variant_plug_in
from daemon.engines.vllm.variant_plug_in import (
    DELTA_ARENA,
    PLUG_IN_NAME,
    PLUG_IN_PATH,
    additional_config,
    arena_mib,
    takes_release,
)
from daemon.worker_spec import WorkerSpec
from fingerprint.capability import DELTA_FAMILIES, EngineCapabilities
from fingerprint.config import DeploymentConfig, Pruning, SlotFormat, WeightFormat
from fingerprint.delta import EMBEDDING_FORMAT, FORMATS
from fingerprint.delta.slots import buffer_bytes, delta_places, layer_place_bytes, other_place_bytes
from fingerprint.errors import CheckpointError, ConfigError, EngineError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.lora.slot_bytes import reserved_bytes, slot_bytes
from fingerprint.model_spec import ModelSpec
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker
from tests.daemon.variant_kernels import variant_module
from tests.golden_words import Golden

H200 = gpu_spec("h200")
INT2 = DeploymentConfig(engine="vllm", adapter_slots=8, delta_format=SlotFormat.INT2)
LLAMA = read_spec(LLAMA_8B)


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take deltas as run with 0.33; ``release.RUN_WITH_DELTAS`` itself is the statement that they were."""
    monkeypatch.setattr(release, "RUN_WITH_DELTAS", frozenset({(0, 33)}))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    def one(version: str) -> Any:
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / version, version)))
        return get_engine("vllm")

    return one


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., WorkerSpec]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))

    def one(**config: object) -> WorkerSpec:
        return replace(worker(tmp_path, **config), dummy_weights=True)

    return one


def options(spec: WorkerSpec) -> dict[str, str]:
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    return {name: value for name, _, value in (word.partition("=") for word in words[2:])}


class TestLaunch:
    @pytest.mark.parametrize("format_name", [one for one in SlotFormat if one is not SlotFormat.NONE])
    @pytest.mark.parametrize("rank", [0, 16])
    def test_slots_are_for_all_that_a_fine_tune_may_change(
        self, make: Callable[..., WorkerSpec], format_name: SlotFormat, rank: int
    ) -> None:
        plain, found = (
            options(make()),
            options(make(adapter_slots=8, adapter_rank=rank, delta_format=format_name)),
        )
        added = {name: value for name, value in found.items() if name not in plain}
        config = json.loads(added.pop("--additional-config"))
        assert plain.items() <= found.items()
        assert added == {
            "--enable-lora": "",
            "--max-loras": "8",
            "--max-lora-rank": str(rank or 1),
            "--max-cpu-loras": "16",
        }
        settings = variant_module("settings")
        assert settings.read_settings(config) == settings.Settings(
            format=str(format_name),
            embedding_format="int4",
            output_format=str(format_name),
            norms=True,
            adapters=rank > 0,
            background=True,
            arena_mib=arena_mib(make(), DEVICES),
        )

    def test_each_gpu_keeps_deltas_in_its_share_of_the_memory(
        self, make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        default = arena_mib(make(), DEVICES)
        assert 0 < default <= 16384
        assert default & (default - 1) == 0
        assert default <= read_machine().memory_bytes / 8 / 2**20
        given_gpus = {("6000", 1): 4096, ("6000", 2): 2048, ("0", 1): 0, ("1", 2): 0, ("", 1): default}
        for (given, gpus), want in given_gpus.items():
            monkeypatch.setenv(DELTA_ARENA, given)
            assert arena_mib(make(tp=gpus), DEVICES) == want
        monkeypatch.setenv(DELTA_ARENA, "6000")
        spec = make(layers=(20, 12), tp=2, adapter_slots=4, adapter_rank=16, delta_format=SlotFormat.INT3)
        assert json.loads(options(spec)["--additional-config"])["iserve_deltas"]["arena_mib"] == 1024  # 4 GPUs
        assert additional_config(spec.config)["iserve_deltas"]["arena_mib"] == 0  # type: ignore[index]
        monkeypatch.setenv(DELTA_ARENA, "1 GiB")
        with golden.raises("engines", ConfigError):
            arena_mib(spec, DEVICES)

    @pytest.mark.parametrize("gib", [16, 64, 200, 256, 2048])
    @pytest.mark.parametrize(("tp", "share"), [(1, 0.9), (2, 0.9), (4, 0.9), (1, 0.45)])
    def test_workers_that_fill_a_node_keep_deltas_in_an_eighth_of_its_memory(
        self, make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch, gib: int, tp: int, share: float
    ) -> None:
        """Eight GPUs with a replica on each, on each two or four, or two on each, whatever memory the host has."""
        host = replace(read_machine(), memory_bytes=gib << 30)
        monkeypatch.setattr(variant_plug_in, "read_machine", lambda: host)
        devices = {name: replace(one, on_node=8) for name, one in DEVICES.items()}
        spec = make(tp=tp, adapter_slots=4, delta_format=SlotFormat.INT2)
        promised = int(share * 140 * 2**30)
        spec = replace(spec, limits=replace(spec.limits, memory_bytes_per_device=promised))
        words = launch.arguments(spec, launch.read_model(spec), devices)
        config = next(word for word in words if word.startswith("--additional-config="))
        each = json.loads(config.partition("=")[2])["iserve_deltas"]["arena_mib"]
        workers = 8 // tp * int(1 / share)
        assert workers * tp * each <= gib << 10 >> 3
        assert tp * each <= 16384
        fair = min(16384 / tp, (gib << 10) / 8 / 8 * share)
        assert fair / 2 < each <= fair

    def test_several_gpus_load_next_to_steps_too(self, make: Callable[..., WorkerSpec]) -> None:
        spec = make(layers=(20, 12), tp=2, adapter_slots=4, adapter_rank=16, delta_format=SlotFormat.INT3)
        assert json.loads(options(spec)["--additional-config"])["iserve_deltas"]["background"] is True

    def test_vllm_finds_the_plug_in_on_its_path(
        self, make: Callable[..., WorkerSpec], engine: Callable[[str], Any], tmp_path: Path
    ) -> None:
        found, plain = (
            engine("0.33.0").command(make(**slots), tmp_path, DEVICES).argv
            for slots in ({"adapter_slots": 8, "delta_format": SlotFormat.INT2}, {})
        )
        path, base_path = (argv[argv.index("--python-path") + 1] for argv in (found, plain))
        assert path == f"{base_path}{os.pathsep}{PLUG_IN_PATH}"
        (entry,) = (
            one
            for found in importlib.metadata.distributions(path=path.split(os.pathsep))
            for one in found.entry_points
        )
        assert (entry.group, entry.name) == ("vllm.general_plugins", PLUG_IN_NAME)

    @pytest.mark.parametrize(("given", "loaded"), [("", ""), ("ours,theirs", "ours,theirs,"), (None, None)])
    def test_a_choice_of_plug_ins_leaves_out_no_deltas(
        self,
        make: Callable[..., WorkerSpec],
        monkeypatch: pytest.MonkeyPatch,
        given: str | None,
        loaded: str | None,
    ) -> None:
        """vLLM loads none but those of ``VLLM_PLUGINS``, and then says of each delta that it is no adapter."""
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if given is not None:
            monkeypatch.setenv("VLLM_PLUGINS", given)
        env = dict(launch.environment(make(adapter_slots=8, delta_format=SlotFormat.INT2), DEVICES))
        assert env.get("VLLM_PLUGINS") == (None if loaded is None else f"{loaded}{PLUG_IN_NAME}")
        assert "VLLM_PLUGINS" not in dict(launch.environment(make(), DEVICES))

    def test_a_type_that_the_plug_in_has_no_kernels_for_is_refused(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, golden: Golden
    ) -> None:
        spec = make(adapter_slots=8, delta_format=SlotFormat.INT2)
        for name, dtype in (("dtype", "float16"), ("torch_dtype", "float32"), ("dtype", None)):
            (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {name: dtype}))
            with pytest.raises(CheckpointError) as refused:
                launch.read_model(spec)
            golden("engines", str(refused.value).replace(str(tmp_path), "TMP"), str(dtype))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"torch_dtype": "bfloat16"}))
        launch.read_model(spec)

    @pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
    def test_only_the_release_that_was_run_is_started(
        self, make: Callable[..., WorkerSpec], engine: Callable[[str], Any], tmp_path: Path, version: str
    ) -> None:
        assert not takes_release(version)
        assert not release.serves_deltas("0.33.0rc1")
        with pytest.raises(EngineError, match="iserve variant export"):
            engine(version).command(make(adapter_slots=8, delta_format=SlotFormat.INT2), tmp_path, DEVICES)

    def test_an_image_has_no_plug_in(self, make: Callable[..., WorkerSpec], golden: Golden) -> None:
        inside = Inside(model="/models/chat", files="/iserve", release="0.33.0", is_whole=True)
        with golden.raises("engines", ConfigError):
            get_engine("vllm").container(make(adapter_slots=8, delta_format=SlotFormat.INT2), inside, DEVICES)


class TestTable:
    def test_deltas_are_planned_with_the_release_that_was_run_alone(
        self, engine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        assert engine("0.33.0").capabilities().refusal(LLAMA, INT2, H200) is None
        assert engine("0.32.0").capabilities().refusal(LLAMA, INT2, H200) is not None
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", "/nowhere/python")
        elsewhere = get_engine("vllm").capabilities()  # for GPUs of another machine
        assert elsewhere.unavailable is not None
        assert elsewhere.refusal(LLAMA, INT2, H200) is None
        older = str(engine("0.26.0").capabilities().refusal(LLAMA, INT2, H200))
        monkeypatch.setattr(release, "RUN_WITH_DELTAS", frozenset())
        assert get_engine("vllm").capabilities().refusal(LLAMA, INT2, H200) is not None
        refused = [
            engine("0.33.0").capabilities().refusal(LLAMA, config, H200)
            for config in (INT2, replace(INT2, adapter_rank=16, delta_format=SlotFormat.NONE, delta_mib=2000))
        ]
        assert refused[0] == refused[1]  # as before there was a plug-in
        golden("engines", str(refused[0]))
        golden("engines", older)

    @pytest.mark.parametrize(
        ("model", "config"),
        [
            ({}, {"delta_format": SlotFormat.NONE, "adapter_rank": 16, "delta_mib": 2000}),
            ({}, {"draft_tokens": 4}),
            ({}, {"weights": WeightFormat.FP8}),
            ({}, {"pruning": Pruning.WANDA}),
            ({"intermediate_size": 11008}, {"tp": 4}),
            ({"hidden_size": 4032, "head_dim": 128}, {}),
            ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, {"tp": 2}),
            ({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}, {}),
            (
                {
                    "model_type": "mixtral",
                    "architectures": ["MixtralForCausalLM"],
                    "num_local_experts": 8,
                    "num_experts_per_tok": 2,
                },
                {},
            ),
        ],
    )
    def test_what_slots_do_not_hold_is_refused_by_a_plan(
        self, engine: Callable[[str], Any], model: dict[str, Any], config: dict[str, Any], golden: Golden
    ) -> None:
        table: EngineCapabilities = engine("0.33.0").capabilities()
        spec = read_spec(LLAMA_8B | model)
        golden("engines", str(table.refusal(spec, replace(INT2, **config), H200)), str((model, config)))

    def test_the_embedded_engines_slots_have_a_size(self, golden: Golden) -> None:
        table = get_engine("torch").capabilities()
        golden("engines", str(table.refusal(LLAMA, replace(INT2, engine="torch"), H200)))

    def test_every_family_is_one_that_compressing_takes(self) -> None:
        text = (Path(__file__).parents[3] / "docs" / "deltas.md").read_text()
        line = next(line for line in text.splitlines() if line.startswith("| compressed and served"))
        assert set(line.strip("| ").partition("|")[2].strip().split(", ")) >= DELTA_FAMILIES


def allocated(spec: ModelSpec, config: DeploymentConfig, places: int) -> int:
    """Return the bytes of one layer's slots as the plug-in makes them for one rank of ``config.tp``."""
    slots, format_ = variant_module("slots"), variant_module("formats").FORMATS[str(config.delta_format)]
    hidden, mlp = spec.hidden_size, spec.intermediate_size // config.tp
    queries, keys = spec.hidden_size // config.tp, 128 * max(1, 8 // config.tp)
    shapes = [((queries, keys, keys), hidden), ((hidden,), queries), ((mlp, mlp), hidden), ((hidden,), mlp)]
    made = [
        slots.LinearSlots(slots=places, slices=slices, inputs=inputs, format_=format_, device="meta")
        for slices, inputs in shapes
    ]
    norm = slots.NormSlots(slots=places, weight=_bfloat16(hidden)).table[1:]
    return sum(one.codes.nbytes + one.scales.nbytes for one in made) + 2 * norm.nbytes


def _bfloat16(*shape: int) -> Any:
    import torch

    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


class TestMemory:
    """In vLLM's own classes: ``what_a_plan_promises_is_what_is_allocated`` of ``vllm_delta_cases.places``."""

    @pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("format_name", [one for one in SlotFormat if one is not SlotFormat.NONE])
    def test_a_place_has_the_bytes_that_the_plug_in_takes(self, tp: int, format_name: SlotFormat) -> None:
        config = replace(INT2, tp=tp, delta_format=format_name)
        assert layer_place_bytes(LLAMA, config) * 9 == allocated(LLAMA, config, 9)
        slots, formats = variant_module("slots"), variant_module("formats").FORMATS
        vocabulary = [
            slots.EmbeddingSlots(slots=9, shape=(128256, 4096), format_=formats[name], device="meta")
            for name in (EMBEDDING_FORMAT.name, str(format_name))
        ]
        found = sum(one.codes.nbytes + one.scales.nbytes for one in vocabulary) + 9 * 4096 * 2
        assert other_place_bytes(LLAMA, config) * 9 == found

    def test_a_plan_counts_the_spare_place_the_buffers_and_the_adapters(self) -> None:
        assert (delta_places(INT2), delta_places(replace(INT2, tp=2))) == (9, 9)
        one = slot_bytes(LLAMA, INT2, 32) - (adapter := slot_bytes(LLAMA, rank_of(INT2, 8), 32) // 8)
        assert one == 32 * layer_place_bytes(LLAMA, INT2) + other_place_bytes(LLAMA, INT2)
        assert reserved_bytes(LLAMA, INT2, 32) == 9 * one + 8 * adapter + buffer_bytes(LLAMA, INT2, 32)
        whole = 1.0 * LLAMA.num_params * FORMATS["int2"].bits_per_weight / 8
        assert whole < one < 1.2 * whole  # embeddings have 4 bits
        mixed = replace(INT2, adapter_rank=64)
        more = slot_bytes(LLAMA, rank_of(INT2, 64), 32) - adapter
        assert reserved_bytes(LLAMA, mixed, 32) == reserved_bytes(LLAMA, INT2, 32) + 8 * more


def rank_of(config: DeploymentConfig, rank: int) -> DeploymentConfig:
    """Return slots for adapters alone."""
    return replace(config, delta_format=SlotFormat.NONE, adapter_rank=rank)


def test_formats_of_slots_are_those_of_deltas() -> None:
    assert {str(one) for one in SlotFormat} == {"none", *FORMATS}
    assert set(variant_module("formats").FORMATS) == set(FORMATS)
