"""Cases of places: what is refused, what each rank has of it, and the memory that all take."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    HEAD,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    SLOTS,
    VOCABULARY,
    case,
    changed_model,
    close,
    load_ahead,
    request,
    run,
    tiny_model,
    write_adapter,
    write_delta,
)


@case
def what_has_no_place_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as place:
        q = "layers.0.q_proj.weight"
        other = write_delta(Path(place) / "other", 1, formats={q: "int4"})
        whole = write_delta(Path(place) / "whole", 1)
        for settings, folder, name in (
            ({}, other, f"{q} of this delta cannot be served on vLLM: its format is int4"),
            ({"norms": False}, whole, "layers.0.norm.weight of this delta"),
            ({"embedding_format": None}, whole, "embed_tokens.weight of this delta"),
            ({"output_format": None}, whole, "lm_head.weight of this delta"),
        ):
            tiny = tiny_model(**settings)
            with pytest.raises(ValueError, match="iserve variant export") as refused:
                tiny.runner.add_lora(request(1, folder))
            assert name in str(refused.value), str(refused.value)
            assert tiny.manager.lora_index_to_id == [None] * SLOTS
            assert tiny.runner.list_loras() == set()


@case
def bits_of_each_matrix_by_itself_are_served_by_the_widest_slots() -> None:
    """``--max-error`` chooses them; q, k and v of one module have three widths."""
    with tempfile.TemporaryDirectory() as place:
        mixed = {"layers.0.q_proj.weight": "int3", "layers.0.k_proj.weight": "int4", "lm_head.weight": "int3"}
        mixed |= {"layers.1.down_proj.weight": "int4", "embed_tokens.weight": "int2"}
        delta = write_delta(Path(place) / "mixed", 1, formats=mixed)
        plain = write_delta(Path(place) / "plain", 2)
        slots = {"format": "int4", "output_format": "int4"}
        ids, tokens = [1, 0, 2, 1, 2, 0], torch.randint(0, VOCABULARY, (6,))
        at = torch.tensor(ids)
        for background in (False, True):
            tiny = tiny_model(background=background, **slots)
            if background:
                load_ahead(tiny, request(1, delta))
                load_ahead(tiny, request(2, plain))
            found = run(tiny, ids, [request(1, delta), request(2, plain)], tokens)
            for number, folder in ((1, delta), (2, plain)):
                want = run(changed_model(folder, **slots), [0] * 6, [], tokens)
                close(found[at == number], want[at == number])
        narrow = tiny_model()
        same = run(narrow, [2 if one == 2 else 0 for one in ids], [request(2, plain)], tokens)
        assert torch.equal(found[at == 2], same[at == 2])  # slots of 4 bits compute what those of 2 do
        with pytest.raises(ValueError, match="--delta-format int3"):
            narrow.runner.add_lora(request(1, delta))


@case
def deltas_alone_refuse_adapters() -> None:
    with tempfile.TemporaryDirectory() as place:
        tiny = tiny_model(adapters=False)
        delta = write_delta(Path(place) / "delta", 1)
        tokens = torch.randint(0, VOCABULARY, (6,))
        close(
            run(tiny, [1, 1, 0, 1, 0, 1], [request(1, delta)], tokens),
            run(tiny_model(), [1, 1, 0, 1, 0, 1], [request(1, delta)], tokens),
        )
        with pytest.raises(ValueError, match="started for deltas alone"):
            tiny.runner.add_lora(request(2, write_adapter(Path(place) / "adapter", 3)))


@case
def the_start_of_vllm_runs_with_its_dummy_adapters() -> None:
    import numpy as np

    tiny = tiny_model()
    with tiny.runner.maybe_dummy_run_with_lora(
        tiny.runner.lora_config, np.array([4, 4]), np.array([1, 1]), num_active_loras=SLOTS + 1
    ):
        assert tiny.manager.runtime.routes.launches(8)
        assert tiny.manager.runtime.routes.launches_adapters(8)
        assert not tiny.manager.runtime.routes.has_routed
        tiny.model(torch.zeros(8, dtype=torch.long))
    assert tiny.runner.list_loras() == set()


@case
def shards_add_up_to_the_whole() -> None:
    from unittest.mock import patch

    from iserve_variants.background import SlotPlaces
    from iserve_variants.formats import FORMATS
    from iserve_variants.reference import dequantize
    from iserve_variants.runtime import Runtime, building
    from iserve_variants.settings import Settings
    from iserve_variants.step_routes import StepRoutes
    from iserve_variants.vllm_layers import MergedColumnWithDeltas, MergedQkvWithDeltas, RowWithDeltas
    from vllm.config.lora import LoRAConfig
    from vllm.model_executor.layers import linear

    lora = LoRAConfig(max_lora_rank=8, max_loras=1, max_cpu_loras=1, lora_dtype=torch.bfloat16)
    int2 = FORMATS["int2"]

    def packed(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(-(2**15), 2**15, int2.codes_shape(*shape), dtype=torch.int16)
        return codes, (torch.rand(int2.scales_shape(*shape)) * 0.02).bfloat16()

    parts = {"qkv": [(256, 256), (128, 256), (128, 256)], "gate_up": [(384, 256)] * 2, "down": [(256, 512)]}
    for name, shapes in parts.items():
        deltas = [packed(shape) for shape in shapes]
        x, found = torch.randn(5, shapes[0][1]).bfloat16(), []
        for rank in range(2):
            with (
                patch.object(linear, "get_tensor_model_parallel_world_size", lambda: 2),
                patch.object(linear, "get_tensor_model_parallel_rank", lambda rank=rank: rank),
            ):
                torch.set_default_dtype(torch.bfloat16)
                layer, kind = {
                    "qkv": lambda: (linear.QKVParallelLinear(256, 64, 4, 2, bias=False), MergedQkvWithDeltas),
                    "gate_up": lambda: (
                        linear.MergedColumnParallelLinear(256, [384] * 2, bias=False),
                        MergedColumnWithDeltas,
                    ),
                    "down": lambda: (linear.RowParallelLinear(512, 256, bias=False), RowWithDeltas),
                }[name]()
                torch.set_default_dtype(torch.float32)
            layer.weight.data.zero_()
            layer.prefix, layer.cpu_linear = f"{name}.{rank}", torch.nn.functional.linear
            routes = StepRoutes(slots=1, max_rows=8, device="cpu", graph_rows=0, merged_from_rows=None)
            with building(Runtime(Settings(adapters=False), routes, SlotPlaces(1, has_spare=False))):
                made = kind(layer)
                made.create_lora_weights(1, lora)
            assert made.deltas is not None, made.refusal
            assert made.whole_shapes() == shapes
            codes, scales = ([one[at] for one in deltas] for at in (0, 1))
            made.fill(0, *((codes, scales) if len(shapes) > 1 else (codes[0], scales[0])))
            routes.update([7] * 5, [7] * 5, {7: 0})
            own = x if name != "down" else x[:, rank * 256 : (rank + 1) * 256]
            found.append(made.apply(own).float().split(list(made.output_slices), dim=-1))
        wants = [x.float() @ dequantize(*one, int2).t() for one in deltas]
        for at, want in enumerate(wants):
            both = [found[rank][at] for rank in range(2)]
            close(sum(both) if name == "down" else torch.cat(both, dim=-1), want, 1e-2)


@case
def a_stored_output_layer_that_is_tied_gets_nothing() -> None:
    """A delta with it, for exports, loads as the same one without it does."""
    with tempfile.TemporaryDirectory() as place:
        stored = write_delta(Path(place) / "stored", 1, formats={"lm_head.weight": "int4"})
        plain = Path(shutil.copytree(stored, Path(place) / "plain"))
        manifest = json.loads((plain / "delta.json").read_text())
        manifest["matrices"] = [one for one in manifest["matrices"] if one["name"] != "lm_head.weight"]
        (plain / "delta.json").write_text(json.dumps(manifest))
        for settings in ({}, {"has_head": False}, {"is_last_stage": True}):
            found = []
            for folder in (stored, plain):
                tiny = tiny_model(is_tied=True, output_format=None, **settings)
                tiny.runner._set_active_loras((1,), (1,), {request(1, folder)})
                found.append(tiny.manager.list_adapters()[1].pairs)
            assert found[0].keys() == found[1].keys()
            for module, pair in found[0].items():
                assert all(map(torch.equal, pair, found[1][module])), module


@case
def what_a_plan_promises_is_what_is_allocated() -> None:
    from fingerprint.config import DeploymentConfig, SlotFormat
    from fingerprint.delta.slots import delta_places
    from fingerprint.lora.slot_bytes import reserved_bytes, slot_bytes

    for format_name, is_tied in (("int2", False), ("int3", True)):
        settings = {"format": format_name, "output_format": format_name, "background": True, "is_tied": is_tied}
        manager = tiny_model(**settings).manager
        spec = planned_spec(is_tied=is_tied)
        config = DeploymentConfig(
            engine="vllm", adapter_slots=SLOTS, adapter_rank=8, delta_format=SlotFormat(format_name)
        )
        slots = [one.deltas for one in manager.modules.values() if getattr(one, "deltas", None) is not None]
        tables = [one.table for one in slots if hasattr(one, "table")]
        found = sum(one.codes.nbytes + one.scales.nbytes for one in slots if hasattr(one, "codes"))
        found += sum(one[1:].nbytes for one in tables)  # row 0 is the base's
        adapter = slot_bytes(spec, replace(config, delta_format=SlotFormat.NONE), 2)
        places = delta_places(config)
        assert manager.runtime.places.count == places
        assert found == places * (slot_bytes(spec, config, 2) - adapter), (format_name, found)
        merged = max(one.base_layer.weight.nbytes for one in manager.modules.values() if _is_linear(one))
        buffers = reserved_bytes(spec, config, 2) - SLOTS * adapter - found
        assert buffers == merged + sum(one[0].nbytes for one in tables) + 32 * 2**20


def planned_spec(*, is_tied: bool) -> Any:
    """Return what a plan knows of the model, which has one norm a layer."""
    from fingerprint.families import read_spec

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
    config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2, "head_dim": HEAD}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
    spec = read_spec(config | {"tie_word_embeddings": is_tied})
    return replace(spec, layer_params=spec.layer_params - HIDDEN)


def _is_linear(module: Any) -> bool:
    from iserve_variants.vllm_layers import LinearWithDeltas

    return isinstance(module, LinearWithDeltas)
