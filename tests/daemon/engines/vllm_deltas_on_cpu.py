"""Cases of the deltas' plug-in in vLLM's own LoRA code on a CPU; prints a line of JSON for each.

    python -m tests.daemon.engines.vllm_deltas_on_cpu SITE [CASE ...]

``SITE`` is a folder with vLLM 0.33.0 and the Python of its dependencies. Kernels are the references in torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.daemon.engines.vllm_on_cpu import import_vllm
from tests.daemon.variant_kernels import VARIANTS_PATH

HIDDEN, HEADS, KV_HEADS, HEAD, INTERMEDIATE, VOCABULARY = 256, 4, 2, 64, 384, 320
SLOTS = 3
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case by its name."""
    CASES[function.__name__] = function
    return function


def tiny_model(
    *,
    has_vocabulary: bool = True,
    is_tied: bool = False,
    is_last_stage: bool = False,
    adapters_alone: bool = False,
    loads_adapters_aside: bool = False,
    **settings: Any,
) -> SimpleNamespace:
    """Return a model of two layers without attention, its runner and its manager.

    Args:
        has_vocabulary: whether the class takes adapters of embeddings and of the output layer, as Llama's does.
        is_tied: whether the output layer is the embedding.
        is_last_stage: whether another stage of a pipeline has the embedding and the first layer.
        adapters_alone: whether slots are vLLM's own, without deltas.
        loads_adapters_aside: whether a thread reads adapters.
        settings: of the plug-in, where they differ.
    """
    from iserve_variants.settings import Settings, adapter_loads_config
    from vllm.config.lora import LoRAConfig
    from vllm.model_executor.models.interfaces import SupportsLoRA
    from vllm.model_executor.models.utils import PPMissingLayer
    from vllm.v1.worker import lora_model_runner_mixin as mixin

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = _model_class(SupportsLoRA, has_vocabulary)()
    if is_tied:
        model.config.tie_word_embeddings = True
        model.lm_head = model.lm_head.tie_weights(model.embed_tokens)
    if is_last_stage:
        model.embed_tokens = PPMissingLayer()
        model.layers[0] = PPMissingLayer()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.05)
        if parameter.dim() == 1:
            parameter.data.add_(1)
    for module in model.modules():
        module.cpu_linear = torch.nn.functional.linear  # set by vLLM's loader, once weights are there
    lora = LoRAConfig(max_lora_rank=8, max_loras=SLOTS, max_cpu_loras=8, lora_dtype=torch.bfloat16)
    asked: dict[str, Any] = {"embedding_format": "int4", "output_format": "int2", "norms": True} | settings
    given = {} if adapters_alone else Settings(**asked).to_config()
    config = SimpleNamespace(
        additional_config=given | (adapter_loads_config() if loads_adapters_aside else {}),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=16),
        speculative_config=None,
        lora_config=lora,
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
        parallel_config=SimpleNamespace(enable_expert_parallel=False, world_size=1),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            get_vocab_size=lambda: VOCABULARY,
            hf_config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=512)),
            is_encoder_decoder=False,
            enable_sleep_mode=False,
        ),
    )
    runner = type("Runner", (mixin.LoRAModelRunnerMixin,), {})()
    runner.lora_config = lora
    runner.load_lora_model(model, config, torch.device("cpu"))
    return SimpleNamespace(model=model, runner=runner, manager=runner.lora_manager._adapter_manager)


def _model_class(supports: type, has_vocabulary: bool) -> type:
    from torch import nn
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    class Layer(nn.Module):
        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.norm = RMSNorm(HIDDEN, eps=1e-6)
            self.qkv_proj = QKVParallelLinear(
                HIDDEN, HEAD, HEADS, KV_HEADS, bias=True, prefix=f"{prefix}.qkv_proj"
            )
            self.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False, prefix=f"{prefix}.o_proj")
            self.gate_up_proj = MergedColumnParallelLinear(
                HIDDEN, [INTERMEDIATE] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
            )
            self.down_proj = RowParallelLinear(INTERMEDIATE, HIDDEN, bias=False, prefix=f"{prefix}.down_proj")

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
            if residual is None:
                residual, x = x, self.norm(x)
            else:
                x, residual = self.norm(x, residual)
            q, k, v = self.qkv_proj(x)[0].split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
            x = self.o_proj(q + torch.cat([k, v], -1))[0]
            gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
            return self.down_proj(torch.nn.functional.silu(gate) * up)[0], residual

    class Model(nn.Module, supports):  # type: ignore[misc]
        packed_modules_mapping: ClassVar = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        embedding_modules: ClassVar = (
            {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"} if has_vocabulary else {}
        )

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(tie_word_embeddings=False)
            self.embed_tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN)
            self.layers = nn.ModuleList(Layer(f"layers.{index}") for index in range(2))
            self.norm = RMSNorm(HIDDEN, eps=1e-6)
            self.lm_head = ParallelLMHead(VOCABULARY, HIDDEN)
            self.logits_processor = LogitsProcessor(VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, residual = self.embed_tokens(tokens), None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.norm(x, residual)[0]

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.logits_processor(self.lm_head, hidden)

    return Model


def matrix_shapes() -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each matrix, by the name of its tensor."""
    found = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for index in range(2):
        sizes = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
        sizes |= {"gate": (384, 256), "up": (384, 256), "down": (256, 384)}
        found |= {f"layers.{index}.{name}_proj.weight": shape for name, shape in sizes.items()}
    return found


def write_delta(folder: Path, seed: int, *, leave: Sequence[str] = (), formats: Mapping[str, str] = {}) -> Path:
    """Write a random delta; ``leave``: parts of names that stay as in the base."""
    from iserve_variants.formats import FORMATS

    generator = torch.Generator().manual_seed(seed)
    tensors, matrices, exact = {}, [], []
    for name, shape in matrix_shapes().items():
        if any(part in name for part in leave):
            continue
        format_name = formats.get(name, "int4" if "embed" in name else "int2")
        format_ = FORMATS[format_name]
        tensors[f"{name}.codes"] = torch.randint(
            -(2**15), 2**15, format_.codes_shape(*shape), dtype=torch.int16, generator=generator
        )
        scales = torch.rand(format_.scales_shape(*shape), generator=generator) * 0.02
        tensors[f"{name}.scales"] = scales.bfloat16()
        matrices.append({"name": name, "shape": list(shape), "format": format_name, "file": "delta.safetensors"})
    for name in ("layers.0.norm.weight", "norm.weight"):
        if not any(part in name for part in leave):
            tensors[name] = (1 + 0.2 * torch.randn(HIDDEN, generator=generator)).bfloat16()
            exact.append({"name": name, "shape": [HIDDEN], "dtype": "BF16", "file": "delta.safetensors"})
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "delta.safetensors"))
    manifest = {"version": 1, "matrices": matrices, "exact": exact}
    (folder / "delta.json").write_text(json.dumps(manifest))
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of q and down of layer 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in ("layers.1.q_proj", "layers.1.down_proj"):
        outputs, inputs = matrix_shapes()[f"{name}.weight"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    facts = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def request(number: int, folder: Path) -> Any:
    """Return vLLM's request of an adapter or a delta."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"v{number}", lora_int_id=number, lora_path=str(folder))


def run(tiny: SimpleNamespace, ids: Sequence[int], requests: Sequence[Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a step whose row i has the adapter or delta ``ids[i]``; every row is sampled."""
    used = {one for one in requests if one.lora_int_id in ids}
    tiny.runner._set_active_loras(tuple(ids), tuple(ids), used)
    return tiny.model.compute_logits(tiny.model(tokens)).float()


def changed_model(folder: Path, **settings: Any) -> SimpleNamespace:
    """Return the model with the delta's changes added to its weights, without slots of deltas in use."""
    from iserve_variants.folder import read_folder
    from iserve_variants.reference import dequantize

    tiny = tiny_model(**settings)
    delta = read_folder(folder, pin=False)
    parameters = dict(tiny.model.named_parameters())

    def weight(module: str) -> torch.Tensor:
        return next(
            value for name, value in parameters.items() if name.replace(".base_layer", "") == f"{module}.weight"
        )

    starts = {"q_proj": 0, "k_proj": 256, "v_proj": 384, "gate_proj": 0, "up_proj": 384}
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name, matrix in delta.matrices.items():
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        rows = slice(starts.get(leaf, 0), starts.get(leaf, 0) + matrix.shape[0])
        owner = weight(f"{parent}.{joined[leaf]}" if leaf in joined else module).data
        change = dequantize(matrix.codes, matrix.scales, matrix.format)[: matrix.shape[0], : matrix.shape[1]]
        owner[rows] = (owner[rows].float() + change).to(owner.dtype)
    for name, value in delta.exact.items():
        module = name.removesuffix(".weight")
        tiny.manager.modules[module].deltas.table[:] = value
    return tiny


def close(found: torch.Tensor, want: torch.Tensor, share: float = 0.02) -> None:
    """Assert that the error is a small part of what is wanted: weights are rounded to bfloat16 in one of both."""
    error = float((found - want).norm() / want.norm())
    assert error < share, f"relative error {error:.4f}"


@case
def rows_of_deltas_are_those_of_the_changed_model() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        adapter = write_adapter(Path(place) / "adapter", 3)
        tiny = tiny_model()
        requests = [request(i + 1, folder) for i, folder in enumerate([*folders, adapter])]
        tokens = torch.randint(0, VOCABULARY, (12,))
        ids = [0, 1, 2, 1, 3, 0, 2, 2, 1, 3, 0, 1]
        found = run(tiny, ids, requests, tokens)
        base = run(tiny, [0] * 12, [], tokens)
        adapted = run(tiny, [3] * 12, requests, tokens)
        at = torch.tensor(ids)
        assert torch.equal(found[at == 0], base[at == 0])
        assert torch.equal(found[at == 3], adapted[at == 3])
        assert float((adapted - base).norm() / base.norm()) > 0.05
        for number, folder in enumerate(folders, start=1):
            want = run(changed_model(folder), [0] * 12, [], tokens)
            close(found[at == number], want[at == number])
            assert float((base - want).norm() / want.norm()) > 0.2  # the change is one


@case
def long_prompts_are_multiplied_with_merged_weights() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        ids = [0] * 5 + [1] * 30 + [2] * 9 + [0] * 3 + [1] * 20 + [2] * 2
        tokens = torch.randint(0, VOCABULARY, (len(ids),))
        merged, plain = tiny_model(merged_from_rows=40), tiny_model(merged_from_rows=None)
        found, want = (run(one, ids, requests, tokens) for one in (merged, plain))
        routes = merged.manager.runtime.routes
        slot = merged.manager.lora_index_to_id.index(1)
        assert [(run.slot, run.end - run.start) for run in routes.runs] == [
            (-1, 5), (slot, 30), (-1, 12), (slot, 20), (-1, 2)
        ]  # fmt: skip
        assert plain.manager.runtime.routes.runs == ()
        close(found, want)
        at = torch.tensor(ids)
        close(found[at == 0], want[at == 0], 1e-2)


@case
def slots_are_given_to_the_deltas_used_last() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in range(1, 6)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tiny = tiny_model()
        tokens = torch.randint(0, VOCABULARY, (6,))
        alone = [run(tiny, [number] * 6, requests, tokens) for number in range(1, 6)]
        for mix in ([1, 2, 3, 1, 2, 3], [4, 5, 1, 4, 0, 0], [2, 2, 3, 5, 0, 0], [3, 4, 5, 5, 4, 3]):
            found = run(tiny, mix, requests, tokens)
            for row, number in enumerate(mix):
                if number:
                    close(found[row], alone[number - 1][row], 1e-2)


@case
def classes_without_adapters_of_their_vocabulary_take_its_deltas() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta, ids = write_delta(Path(place) / "delta", 1), [1, 0, 1, 1, 0, 0]
        tokens = torch.randint(0, VOCABULARY, (6,))
        with_adapters, without = (
            run(tiny_model(has_vocabulary=has), ids, [request(1, delta)], tokens) for has in (True, False)
        )
        close(without, with_adapters, 1e-2)


@case
def logprobs_of_prompts_have_the_output_layer_of_their_own_delta() -> None:
    """Compare logits by both model runners' own code, in a step whose samples are other rows than the prompts'."""
    for is_tied in (False, True):
        settings: dict[str, Any] = {"is_tied": True, "output_format": None} if is_tied else {}
        with tempfile.TemporaryDirectory() as place:
            leave = ("lm_head",) if is_tied else ()
            folders = [write_delta(Path(place) / str(seed), seed, leave=leave) for seed in (1, 2)]
            requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
            tiny = tiny_model(**settings)
            tokens = torch.randint(0, VOCABULARY, (15,))
            ids, prompts = [2, 1, *[0] * 4, *[1] * 5, *[2] * 4], {"a": (2, 6), "b": (6, 11), "c": (11, 15)}
            used = set(requests)
            tiny.runner._set_active_loras((2, 1, 0, 1), tuple(ids), used)  # "c" goes on in a later step
            hidden = tiny.model(tokens)
            sampled = tiny.model.compute_logits(hidden[torch.tensor([0, 1, 5, 10])])
            assert tiny.manager.runtime.routes.logits_route is not None
            found = {True: prompt_scores(tiny.model, hidden, tokens, prompts)}
            found[False] = prompt_token_scores(tiny.model, hidden, prompts)
            assert torch.equal(tiny.model.compute_logits(hidden[torch.tensor([0, 1, 5, 10])]), sampled)
            for name, (first, end) in prompts.items():
                number = ids[first]
                changed = changed_model(folders[number - 1], **settings) if number else tiny_model(**settings)
                logits = run(changed, [0] * (end - first), [], tokens[first:end])
                for from_first_runner, want in (
                    (True, logits[:-1].gather(1, tokens[first + 1 : end, None])),
                    (False, logits[:-1, :10]),
                ):
                    close(found[from_first_runner][name], want)
                    base = run(tiny_model(**settings), [0] * (end - first), [], tokens[first:end])[:-1, :10]
                    if number and not from_first_runner:
                        assert float((base - want).norm() / want.norm()) > 0.2


def prompt_scores(
    model: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, prompts: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the logits of each prompt's next tokens, by the code of vLLM's first model runner."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    starts = np.array([*(first for first, _ in prompts.values()), len(hidden)])
    state = SimpleNamespace(
        num_prompt_logprobs=dict.fromkeys(prompts, 0),
        requests={
            name: SimpleNamespace(
                prompt_token_ids=tokens[first:end].tolist(),
                in_progress_prompt_logprobs_cpu=None,
                num_computed_tokens=0,
            )
            for name, (first, end) in prompts.items()
        },
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_id_to_index={name: at for at, name in enumerate(prompts)}),
        query_start_loc=SimpleNamespace(np=starts),
        model=model,
        model_config=SimpleNamespace(logprobs_mode="raw_logits"),
        sampler=Sampler(),
        _sync_device=lambda: None,
    )
    scheduled = {name: end - first for name, (first, end) in prompts.items()}
    found = GPUModelRunner._get_prompt_logprobs_dict(state, hidden, scheduled)
    return {name: one.logprobs[:, :1] for name, one in found.items()}


def prompt_token_scores(
    model: torch.nn.Module, hidden: torch.Tensor, prompts: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the logits of the first ten tokens at each place of a prompt, by vLLM's second model runner."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    worker, lengths = PromptLogprobsWorker(8, torch.device("cpu"), "raw_logits"), []
    for at, (name, (first, end)) in enumerate(prompts.items()):
        asked = np.tile(np.arange(10), (end - first - 1, 1))
        parameters = SimpleNamespace(
            prompt_logprobs=None, prompt_logprob_token_ids=asked, prompt_logprob_start=None
        )
        worker.add_request(name, at, parameters)
        lengths.append(end - first)
    batch = SimpleNamespace(
        req_ids=list(prompts),
        idx_mapping_np=np.arange(len(prompts)),
        num_computed_prefill_tokens_np=np.zeros(len(prompts), dtype=int),
        num_scheduled_tokens=np.array(lengths),
        prefill_len_np=np.array(lengths),
        query_start_loc_np=np.array([*(first for first, _ in prompts.values()), len(hidden)]),
    )
    return worker.compute_prompt_token_id_logprobs(model.compute_logits, hidden, batch, np.array(lengths))


@case
def a_tied_output_layer_changes_with_its_embedding() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1, leave=("lm_head",))
        ids, tokens = [1, 0, 1, 1, 0, 0], torch.randint(0, VOCABULARY, (6,))
        tiny = tiny_model(is_tied=True, output_format=None)
        found = run(tiny, ids, [request(1, delta)], tokens)
        assert "lm_head" not in {name for name, _ in tiny.manager.places.taken.items()}
        want = changed_model(delta, is_tied=True, output_format=None)
        at = torch.tensor(ids)
        close(found[at == 1], run(want, [0] * 6, [], tokens)[at == 1])
        base = run(tiny, [0] * 6, [], tokens)
        assert torch.equal(found[at == 0], base[at == 0])


@case
def a_stage_takes_its_own_part_of_a_delta() -> None:
    """The last of a pipeline, whose output layer is the first stage's embedding."""
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1, leave=("lm_head",))
        whole, stage = (
            tiny_model(is_tied=True, output_format=None, is_last_stage=is_last) for is_last in (False, True)
        )
        theirs = dict(whole.model.named_parameters(remove_duplicate=False))
        for name, value in stage.model.named_parameters():
            value.data.copy_(theirs[name].data)
        for name in ("layers.1.norm", "norm"):
            stage.manager.modules[name].deltas.table[:] = whole.manager.modules[name].deltas.table
        x, ids = torch.randn(4, HIDDEN).bfloat16(), (1, 0, 1, 0)
        found = []
        for one in (whole, stage):
            one.runner._set_active_loras(ids, ids, {request(1, delta)})
            hidden, residual = one.model.layers[1](x, None)
            found.append(one.model.compute_logits(one.model.norm(hidden, residual)[0]).float())
        close(found[1], found[0], 1e-6)
        loaded = stage.manager.list_adapters()[1].pairs
        assert {name.partition(".")[0] for name in loaded} == {"layers", "norm", "lm_head"}
        assert not any(name.startswith("layers.0") for name in loaded)


@case
def a_slot_taken_by_another_kind_has_nothing_of_the_former() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1)
        adapter = write_adapter(Path(place) / "adapter", 3)
        part = write_delta(Path(place) / "part", 4, leave=("norm", "embed", "lm_head", "gate", "k_proj"))
        tokens = torch.randint(0, VOCABULARY, (6,))
        fresh = {}
        for number, folder in ((1, delta), (2, adapter), (3, part)):
            fresh[number] = run(tiny_model(), [number] * 6, [request(number, folder)], tokens)
        requests = [request(1, delta), request(2, adapter), request(3, part)]
        for background in (False, True):
            tiny = tiny_model(background=background)
            for number in (1, 2, 3, 1, 3, 2, 1, 2):
                for other in (1, 2, 3):
                    tiny.runner.remove_lora(other)  # the first slot is taken again
                if background and number != 2:
                    load_ahead(tiny, requests[number - 1])
                found = run(tiny, [number] * 6, requests, tokens)
                assert tiny.manager.lora_index_to_id[0] == number
                assert torch.equal(found, fresh[number]), number


def load_ahead(tiny: SimpleNamespace, asked: Any) -> None:
    """Load a delta in the background and give it a slot."""
    with pytest.raises(ValueError, match="is still being read"):
        tiny.runner.add_lora(asked)
    tiny.manager.loader.wait()
    assert tiny.runner.add_lora(asked)


@case
def a_delta_that_is_ready_gets_a_slot_without_work_for_each_module() -> None:
    """Even where another had the slot, and rows of the step that goes on are not routed anew."""
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in range(1, 6)]
        tiny = tiny_model(background=True)
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        ids, calls, called = (1, 0, 1), list[str](), ("fill", "clear", "put", "set_lora", "reset_lora")
        tiny.runner._set_active_loras(ids, ids, {requests[0]})
        for module in tiny.manager.modules.values():
            for one in (module, getattr(module, "deltas", None)):
                for name in called:
                    if hasattr(one, name):
                        setattr(one, name, lambda *given, name=name: calls.append(name))
        tiny.runner.remove_lora(1)
        run(tiny, [1] * 3, requests, torch.zeros(3, dtype=torch.long))
        assert calls.count("fill") + calls.count("clear") == len(tiny.manager.filler._modules)  # one that waits
        routes = tiny.manager.runtime.routes
        for asked in requests[1:]:
            with pytest.raises(ValueError, match="is still being read"):
                tiny.runner.add_lora(asked)
            tiny.manager.loader.wait()
            calls.clear()
            tiny.runner._set_active_loras(ids, ids, {requests[0]})
            slots, routes.token_slots[0] = int(routes.token_slots[0]), 77
            assert tiny.runner.add_lora(asked)
            tiny.runner._set_active_loras(ids, ids, {requests[0]})
            assert calls == []
            assert int(routes.token_slots[0]) == 77  # not written
            routes.token_slots[0] = slots
        assert len(set(tiny.manager.lora_index_to_id)) == SLOTS


@case
def loads_ahead_are_those_that_wait() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2, 3)]
        folders.append(write_delta(Path(place) / "part", 4, leave=("norm", "embed", "lm_head", "gate", "k_proj")))
        folders.append(write_adapter(Path(place) / "adapter", 5))
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        waits, ahead = tiny_model(), tiny_model(background=True)
        tokens = torch.randint(0, VOCABULARY, (6,))
        loader = ahead.manager.loader
        for number in (1, 2, 4, 5, 3, 1, 4, 2):
            ahead.runner.remove_lora(number)
            if number != 5:
                with pytest.raises(ValueError, match="is still being read"):
                    ahead.runner.add_lora(requests[number - 1])
                assert number not in ahead.runner.list_loras()
                loader.wait()
            assert ahead.runner.add_lora(requests[number - 1])
            places = [ahead.manager.runtime.places.of(slot) for slot in range(SLOTS)]
            assert sorted([*places, ahead.manager.runtime.places.spare]) == list(range(SLOTS + 1))
            others = [one for one in ahead.manager.lora_index_to_id if one not in (None, number)][:2]
            ids = [number, *others, 0, number, *others][:6]
            ids += [0] * (6 - len(ids))
            found, want = (run(one, ids, requests, tokens) for one in (ahead, waits))
            assert torch.equal(found, want), (number, ids)
        ahead.runner.remove_lora(3)
        close(run(ahead, [3] * 6, requests, tokens), run(waits, [3] * 6, requests, tokens), 1e-6)  # not asked for


@case
def a_delta_that_is_dropped_is_freed_by_a_thread() -> None:
    with tempfile.TemporaryDirectory() as place:
        asked = request(1, write_delta(Path(place) / "delta", 1))
        for background in (True, False):
            tiny = tiny_model(background=background)
            for ahead in (False, True) if background else (False,):
                if ahead:
                    load_ahead(tiny, asked)
                else:
                    tiny.runner._set_active_loras((1,), (1,), {asked})
                pairs = tiny.manager.list_adapters()[1].pairs
                assert pairs
                tiny.runner.remove_lora(1)
                for thread in threading.enumerate():
                    if thread.name == "iserve-free":
                        thread.join()
                assert bool(pairs) != background  # page-locked buffers are kept by torch


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
    tiny = tiny_model()
    with tiny.runner.maybe_dummy_run_with_lora(
        tiny.runner.lora_config, np.array([4, 4]), np.array([1, 1]), num_active_loras=SLOTS + 1
    ):
        assert tiny.manager.runtime.routes.has_variants
        assert not tiny.manager.runtime.routes.has_routed
        tiny.model(torch.zeros(8, dtype=torch.long))
    assert tiny.runner.list_loras() == set()


@case
def the_compiler_traces_the_model_once_for_all_mixes() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def count(lowered: Any, _: Any) -> Any:
            graphs.append(lowered.code)
            return make_boxed_func(lowered.forward)

        return aot_autograd(fw_compiler=count)(graph, inputs)

    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tiny = tiny_model(has_vocabulary=False)
        eager, compiled = (
            tiny.model.forward,
            torch.compile(tiny.model.forward, fullgraph=True, dynamic=False, backend=backend),
        )
        for ids in ([0, 1, 2, 1], [0, 0, 0], [2] * 9, [1, 0, 2, 2, 1, 0]):
            tokens = torch.randint(0, VOCABULARY, (len(ids),))
            tiny.runner._set_active_loras(tuple(ids), tuple(ids), {requests[one - 1] for one in set(ids) - {0}})
            torch._dynamo.mark_dynamic(tokens, 0)  # the number of tokens alone, as vLLM does
            close(compiled(tokens), eager(tokens), 1e-2)
    assert len(graphs) == 1, len(graphs)
    assert graphs[0].count("ops.vllm.iserve_delta_linear.default(") == 8
    assert "layers.0.qkv_proj" not in graphs[0]  # names are inputs: pieces of all layers are one graph


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


def main(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all of ``cases``, or those that are named."""
    import_vllm(Path(sys.argv[1]))
    sys.path.insert(0, VARIANTS_PATH)
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    vllm.__version__ = "0.33.0"  # a folder without its metadata does not know
    from iserve_variants.plugin import register

    register()
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        wanted = sys.argv[2:] or list(cases)
        for name, function in ((name, cases[name]) for name in wanted):
            try:
                function()
                said = ""
            except BaseException:  # noqa: BLE001 - each case is reported
                said = traceback.format_exc()
            print(json.dumps({"case": name, "error": said}), flush=True)


if __name__ == "__main__":
    main(CASES)
