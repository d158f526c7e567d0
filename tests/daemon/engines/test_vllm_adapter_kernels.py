"""Our kernels of adapters in vLLM's place: the operator, its groups of rows, and how a launch asks for them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from daemon.engines.base import Inside
from daemon.engines.registry import get_engine
from daemon.engines.vllm import launch
from daemon.engines.vllm.variant_plug_in import ADAPTER_KERNELS, PLUG_IN_NAME, PLUG_IN_PATH
from daemon.worker_spec import WorkerSpec
from fingerprint.config import SlotFormat
from fingerprint.errors import EngineError
from iserve.controller.profiling_validity import _other_versions as other_versions
from iserve.settings import load_settings
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_delta_names import recorded
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, profile_load, worker
from tests.daemon.variant_kernels import variant_module

adapters = variant_module("vllm_adapters")
settings = variant_module("settings")
SITE = os.environ.get("ISERVE_VLLM_SITE", "")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADAPTER_KERNELS, "1")


class TestOperator:
    def operator(self, calls: list[str]) -> Callable[..., None]:
        kernels = SimpleNamespace(
            Groups=lambda *tensors: tensors,
            takes=lambda x, a, b: x.shape[0] <= 64,
            add_adapters=lambda y, x, a, b, groups, scale, tiling: calls.append(
                f"{tiling} {[int(one[0]) for one in groups]}"
            ),
        )
        made: Callable[..., None] = adapters.linear_operator(
            kernels,
            {1: "own"},
            lambda x, a, buffer, *mixed: calls.append(f"shrink {tuple(buffer.shape)}"),
            lambda buffer, b, y, *mixed, offset_start, add_inputs: calls.append(f"expand {add_inputs}"),
        )
        return made

    def test_small_steps_take_our_kernels_and_all_else_vllms(self) -> None:
        calls: list[str] = []
        run = self.operator(calls)

        def call(
            rows: int, is_base: bool = False, adds: bool = True, width: int = 4, dtype: torch.dtype = torch.float32
        ) -> list[str]:
            calls.clear()
            mixed = [torch.full((1,), number) for number in range(5)]
            mixed += [torch.tensor([is_base]), torch.tensor([3])]
            pieces = [torch.full((1,), number) for number in (7, 8, 9)]
            a, b = [torch.zeros(2, 1, 16, 8)], [torch.zeros(2, 1, 4, 16)]
            run(torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, 8), a, b, *mixed, *pieces, 1.0, adds)
            return list(calls)

        assert call(64) == ["own [1, 7, 8, 9]"]
        assert call(65) == ["shrink (1, 65, 16)", "expand True"]
        assert call(8, adds=False) == ["shrink (1, 8, 16)", "expand False"]
        assert call(8, width=5) == call(8, dtype=torch.float64) == ["shrink (1, 8, 16)", "expand True"]
        assert call(8, is_base=True) == []
        assert call(0) == []

    def test_torch_takes_the_operator_and_its_fake(self) -> None:
        """The schema is inferred, as in vLLM, and a compiled graph traces it."""
        calls: list[str] = []
        run = self.operator(calls)
        library = torch.library.Library("iserve_adapters_test", "FRAGMENT")
        library.define("linear" + torch.library.infer_schema(run, mutates_args=["y"]))
        library.impl("linear", run, dispatch_key="CPU")
        library._register_fake("linear", adapters._nothing)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = x @ torch.ones(8, 4)
            a, b = (torch.zeros(2, 1, 16, 8),), (torch.zeros(2, 1, 4, 16),)
            torch.ops.iserve_adapters_test.linear(y, x, a, b, *self.meta, *self.pieces, 1.0, True)
            return y + 1

        mixed = [torch.zeros(1)] * 5 + [torch.tensor([False]), torch.tensor([3])]
        wrapper = SimpleNamespace(meta=mixed, pieces=(torch.zeros(1),) * 3)
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
        assert torch.equal(compiled(wrapper, torch.ones(3, 8)), torch.full((3, 4), 9.0))
        assert calls == ["own [0, 0, 0, 0]"]

    def test_it_takes_what_vllms_method_takes(self) -> None:
        theirs = recorded()["classes"]["lora/punica_wrapper/punica_gpu.py:PunicaWrapperGPU"]["methods"]
        ours = inspect.signature(adapters.add_lora_linear).parameters.values()
        plain = [one.name for one in ours if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
        assert [*plain, "buffer=", "**kwargs"] == theirs["add_lora_linear"]

    def test_the_output_layer_is_watched_by_what_vllm_has(self) -> None:
        classes = recorded()["classes"]
        wrapper = classes["lora/punica_wrapper/punica_gpu.py:PunicaWrapperGPU"]["methods"]
        assert wrapper["add_lora_logits"][:3] == ["y", "x", "lora_a_stacked"]
        assert wrapper["update_metadata"][:2] == ["mapping", "lora_index_to_id"]
        layer = classes["lora/layers/logits_processor.py:LogitsProcessorWithLoRA"]
        assert layer["methods"]["set_lora"] == ["index", "lora_a", "lora_b"]
        assert layer["methods"]["reset_lora"] == ["index"]
        assert "lora_a_stacked" in layer["attributes"]


class Meta:
    """vLLM's groups, of which a mapping gives the counts."""

    token_indices_sorted_by_lora_ids = torch.zeros(2)
    num_tokens_per_lora, lora_token_start_loc, active_lora_ids = torch.zeros(3, 1)

    @staticmethod
    def make(slots: int) -> Meta:
        return Meta()

    def prepare_tensors(self, mapping: torch.Tensor) -> None:
        self.num_tokens_per_lora = mapping


class Groups(tuple[torch.Tensor, ...]):
    def __new__(cls, *tensors: torch.Tensor) -> Groups:
        return super().__new__(cls, tensors)

    def split(self, rows: int, into: Groups | None) -> Groups:
        new = into or Groups(*(torch.empty_like(tensor) for tensor in self))
        for tensor, source in zip(new[1:], self[1:], strict=True):
            tensor.copy_(source + rows)
        return new


def test_pieces_of_groups_stay_in_the_memory_that_graphs_read() -> None:
    make, prepare = adapters.splitting(Groups, 8, Meta)
    meta = make(3)
    captured = meta.iserve_pieces
    prepare(meta, torch.full((1,), 5.0))
    assert [int(tensor[0]) for tensor in captured] == [13, 8, 8]


class TestOutputLayer:
    """vLLM's dummy adapters change it, and leave their slots as they are when they go."""

    @pytest.fixture
    def parts(self) -> Any:
        class Layer:
            def __init__(self) -> None:
                self.lora_a_stacked = torch.zeros(4, 1, 2, 2)

            def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
                self.reset_lora(index)
                self.lora_a_stacked[index] = 1

            def reset_lora(self, index: int) -> None:
                self.lora_a_stacked[index] = 0

        class Wrapper:
            added = 0

            def update_metadata(
                self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int
            ) -> None:
                self.mapping = mapping

            def add_lora_logits(self, y: Any, x: Any, a: Any, b: Any, scale: float) -> None:
                self.added += 1

        adapters.OutputSlots().watch(Layer, Wrapper)
        return Layer(), Layer(), Wrapper()

    def test_its_product_is_left_out_while_no_adapter_in_a_slot_has_one(self, parts: Any) -> None:
        layer, other, wrapper = parts
        ids: list[int | None] = [7, 8, None, None]

        def is_added() -> bool:
            before = wrapper.added
            wrapper.add_lora_logits(None, None, layer.lora_a_stacked, None, 1.0)
            return bool(wrapper.added > before)

        wrapper.update_metadata("rows", ids, 5, 320)
        assert wrapper.mapping == "rows"
        assert not is_added()
        layer.set_lora(3, None, None)  # a dummy adapter, gone meanwhile
        other.set_lora(0, None, None)  # of another model
        assert not is_added()
        ids[3] = 9
        assert is_added()
        layer.reset_lora(3)  # the next one in its slot
        assert not is_added()
        layer.set_lora(1, None, None)
        assert is_added()
        assert int(layer.lora_a_stacked[1].sum()) == 4
        ids[1] = None
        assert not is_added()

    def test_it_is_kept_before_a_wrapper_knows_its_slots(self, parts: Any) -> None:
        layer, _, wrapper = parts
        layer.set_lora(0, None, None)
        wrapper.add_lora_logits(None, None, layer.lora_a_stacked, None, 1.0)
        assert wrapper.added == 1

    def test_slots_that_have_gone_are_forgotten(self, parts: Any) -> None:
        """Else the next model's memory, which may be the same, has their adapters."""
        slots = adapters.OutputSlots()

        class Linear:
            def __init__(self) -> None:
                self.lora_a_stacked = (torch.zeros(1),)

            def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None: ...
            def reset_lora(self, index: int) -> None: ...

        slots.watch_layer(Linear)
        head = Linear()
        head.set_lora(0, None, None)
        assert len(slots._changed) == 1
        del head
        assert len(slots._changed) == 0


def test_settings_are_read_as_they_were_given() -> None:
    assert settings.wants_adapter_kernels(settings.adapters_config())
    assert not settings.wants_adapter_kernels({})
    assert not settings.wants_adapter_kernels(None)
    with pytest.raises(ValueError, match="iserve_adapters"):
        settings.wants_adapter_kernels({"iserve_adapters": {"kernels": 0}})


class TestLaunch:
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[..., WorkerSpec]:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))
        return lambda **config: replace(worker(tmp_path, **config), dummy_weights=True)

    def engine(self, folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(folder / version, version)))
        return get_engine("vllm")

    def excludes_slots(self, vllm: Any) -> bool:
        rules = vllm.capabilities().exclusions
        return any(one.has_slots and ADAPTER_KERNELS in one.reason for one in rules)

    def additional(self, spec: WorkerSpec) -> Any:
        words = launch.arguments(spec, launch.read_model(spec), DEVICES)
        given = [word.partition("=")[2] for word in words if word.startswith("--additional-config=")]
        return json.loads(given[0]) if given else {}

    def test_slots_of_adapters_have_the_setting_and_no_others(
        self, make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.additional(make()) == {}
        assert self.additional(make(adapter_slots=8, adapter_rank=16)) == settings.adapters_config()
        deltas = self.additional(make(adapter_slots=8, delta_format=SlotFormat.INT2))
        assert set(deltas) == {settings.KEY}
        both = self.additional(make(adapter_slots=8, adapter_rank=16, delta_format=SlotFormat.INT2))
        assert set(both) == {settings.KEY, settings.ADAPTERS_KEY}
        monkeypatch.delenv(ADAPTER_KERNELS)
        assert self.additional(make(adapter_slots=8, adapter_rank=16)) == {}

    def test_vllm_finds_the_plug_in_on_its_path(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm = self.engine(tmp_path, "0.33.0", monkeypatch)

        def paths(spec: WorkerSpec) -> list[str]:
            argv = vllm.command(spec, tmp_path, DEVICES).argv
            return list(argv[argv.index("--python-path") + 1].split(os.pathsep))

        slots = make(adapter_slots=8, adapter_rank=16)
        assert PLUG_IN_PATH in paths(slots)
        assert PLUG_IN_PATH not in paths(make())
        assert PLUG_IN_PATH in paths(replace(make(), profiling=True))  # slots are those of each order
        monkeypatch.setenv("VLLM_PLUGINS", "")
        assert dict(launch.environment(slots, DEVICES))["VLLM_PLUGINS"] == PLUG_IN_NAME
        monkeypatch.delenv(ADAPTER_KERNELS)
        assert PLUG_IN_PATH in paths(slots)  # it reads adapters' files

    def test_other_releases_load_adapters_by_themselves(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(ADAPTER_KERNELS)
        monkeypatch.setenv("VLLM_PLUGINS", "")
        command = self.engine(tmp_path, "0.26.0", monkeypatch).command(
            make(adapter_slots=8, adapter_rank=16), tmp_path, DEVICES
        )
        assert PLUG_IN_PATH not in " ".join(command.argv)
        assert "VLLM_PLUGINS" not in dict(command.env)

    def test_a_profile_has_the_setting_too(self, make: Callable[..., WorkerSpec]) -> None:
        spec = make()
        order = profile_load(spec, adapter_slots=8, adapter_rank=16)
        asked = get_engine("vllm").profile_order(spec, order)
        assert json.loads(asked.additional_config) == settings.adapters_config()

    def test_releases_that_it_was_not_written_for_are_refused(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm = self.engine(tmp_path, "0.26.0", monkeypatch)
        with pytest.raises(EngineError, match=ADAPTER_KERNELS):
            vllm.command(make(adapter_slots=8, adapter_rank=16), tmp_path, DEVICES)

    def test_other_releases_serve_and_are_profiled_without_slots(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm = self.engine(tmp_path, "0.26.0", monkeypatch)
        assert vllm.command(make(), tmp_path, DEVICES).argv
        profiled = vllm.command(replace(make(), profiling=True), tmp_path, DEVICES).argv
        assert PLUG_IN_PATH not in " ".join(profiled)  # it refuses this release in each of vLLM's processes
        assert self.excludes_slots(vllm)
        spec = replace(make(), profiling=True, engine_version="0.26.0")
        with pytest.raises(EngineError, match=ADAPTER_KERNELS):
            vllm.profile_order(spec, profile_load(spec, adapter_slots=8, adapter_rank=16))
        assert not vllm.profile_order(spec, profile_load(spec)).additional_config
        monkeypatch.delenv(ADAPTER_KERNELS)
        assert not self.excludes_slots(vllm)

    def test_its_own_release_takes_slots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        vllm = self.engine(tmp_path, "0.33.0", monkeypatch)
        assert not self.excludes_slots(vllm)

    def test_plans_know_whose_kernels_there_will_be(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.engine(tmp_path, "0.33.0", monkeypatch).capabilities().adapter_kernels
        assert not self.engine(tmp_path, "0.26.0", monkeypatch).capabilities().adapter_kernels
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(tmp_path / "none"))  # 0.33.0 would be installed
        assert get_engine("vllm").capabilities().adapter_kernels
        monkeypatch.delenv(ADAPTER_KERNELS)
        assert not get_engine("vllm").capabilities().adapter_kernels
        assert not self.engine(tmp_path, "0.33.0", monkeypatch).capabilities().adapter_kernels

    def test_profiles_with_other_kernels_are_not_used(
        self, make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm = self.engine(tmp_path, "0.33.0", monkeypatch)
        command = vllm.command(replace(make(), profiling=True), tmp_path, DEVICES)
        ours = vllm.versions()
        assert [*ours[-1]] in json.loads(dict(command.files)["machine.json"])["versions"]
        monkeypatch.delenv(ADAPTER_KERNELS)
        assert set(ours) - set(vllm.versions()) == {("adapter_kernels", "iserve")}
        assert len(other_versions(ours, vllm.versions())) == 1
        assert len(other_versions(vllm.versions(), ours)) == 1
        monkeypatch.setenv(ADAPTER_KERNELS, "1")
        assert "adapter_kernels" not in dict(self.engine(tmp_path, "0.26.0", monkeypatch).versions())

    def test_a_profile_names_it_where_not_all_plug_ins_are_loaded(
        self, make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else the order's settings are passed over, and vLLM's own kernels are measured."""
        monkeypatch.setenv("VLLM_PLUGINS", "theirs")
        spec = make()
        found = dict(launch.environment(replace(spec, profiling=True), DEVICES))
        assert found["VLLM_PLUGINS"] == f"theirs,{PLUG_IN_NAME}"
        assert "VLLM_PLUGINS" not in dict(launch.environment(spec, DEVICES))

    def test_images_are_not_given_the_hosts_plug_ins(
        self, make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", "theirs")
        inside = Inside(model="/model", files="/files", release="0.33.0")
        found = get_engine("vllm").container(make(adapter_slots=8, adapter_rank=16), inside, DEVICES)
        assert "VLLM_PLUGINS" not in dict(found.env)

    def test_images_have_no_plug_in(self, make: Callable[..., WorkerSpec]) -> None:
        spec = make(adapter_slots=8, adapter_rank=16)
        found = get_engine("vllm").container(
            spec, Inside(model="/model", files="/files", release="0.33.0"), DEVICES
        )
        assert not [word for word in found.argv if word.startswith("--additional-config")]


def test_the_setting_is_one_of_iserves() -> None:
    """Workers' daemons inherit the environment, and what is no yes or no is refused before."""
    assert load_settings({ADAPTER_KERNELS: "1"}).vllm_adapter_kernels


@pytest.mark.long
@pytest.mark.skipif(
    not SITE or importlib.util.find_spec("triton") is None,
    reason="ISERVE_VLLM_SITE names no folder with vLLM 0.33.0, or there is no Triton",
)
def test_in_vllms_own_code() -> None:
    command = (sys.executable, "-m", "tests.daemon.engines.vllm_adapters_on_cpu", SITE)
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_patched_is_recorded() -> None:
    """The contract with vLLM's sources has each attribute of the groups that the patch reads."""
    source = ast.parse(inspect.getsource(adapters.splitting))
    read = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and "lora" in node.attr}
    meta = recorded()["classes"]["lora/ops/triton_ops/lora_kernel_metadata.py:LoRAKernelMeta"]
    assert read <= set(meta["attributes"])
    assert list(meta["methods"]) == ["make", "prepare_tensors", "meta_args"]
    assert meta["methods"]["prepare_tensors"] == ["token_lora_mapping"]
    assert meta["methods"]["meta_args"] == ["token_nums", "specialize_active_lora"]
