"""Model of two layers of vLLM's own modules, its deltas and adapters, and steps of it, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from fingerprint.tensor_hash import tensor_hash

__all__ = [
    "BEING_READ",
    "CASES",
    "HEAD",
    "HEADS",
    "HIDDEN",
    "INTERMEDIATE",
    "KV_HEADS",
    "SLOTS",
    "VOCABULARY",
    "case",
    "changed_model",
    "close",
    "load_ahead",
    "matrix_shapes",
    "request",
    "run",
    "tiny_model",
    "write_adapter",
    "write_delta",
]

HIDDEN, HEADS, KV_HEADS, HEAD, INTERMEDIATE, VOCABULARY = 256, 4, 2, 64, 384, 320
SLOTS = 3
BEING_READ = "is still being read"  # of a refusal, after which a load is asked for again
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case by its name."""
    CASES[function.__name__] = function
    return function


def tiny_model(
    *,
    has_vocabulary: bool = True,
    is_tied: bool = False,
    has_head: bool = True,
    is_last_stage: bool = False,
    adapters_alone: bool = False,
    loads_adapters_aside: bool = False,
    is_newer_runner: bool = False,
    ranks: int = 1,
    **settings: Any,
) -> SimpleNamespace:
    """Return a model of two layers without attention, its runner and its manager.

    Args:
        has_vocabulary: whether the class takes adapters of embeddings and of the output layer, as Llama's does.
        is_tied: whether the output layer is the embedding.
        has_head: whether a tied output layer has a module of its own; Gemma 2 has none.
        is_last_stage: whether another stage of a pipeline has the embedding and the first layer.
        adapters_alone: whether slots are vLLM's own, without deltas.
        loads_adapters_aside: whether a thread reads adapters.
        is_newer_runner: whether the runner keeps graphs by the number of adapters, as version 2 does.
        ranks: of the worker, this process being one.
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
    if not has_head:
        del model.lm_head
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
        parallel_config=SimpleNamespace(enable_expert_parallel=False, world_size=ranks),
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
    if is_newer_runner:
        from vllm.v1.worker.gpu.lora_utils import LoraState

        runner.lora_capture_cases, runner.lora_state = [0, SLOTS + 1], LoraState(16)
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
            return self.logits_processor(getattr(self, "lm_head", self.embed_tokens), hidden)

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
        hashes = {part: hash_of(tensors[f"{name}.{part}"]) for part in ("codes", "scales")}
        facts = {"name": name, "shape": list(shape), "format": format_name, "file": "delta.safetensors"}
        matrices.append(facts | hashes)
    for name in ("layers.0.norm.weight", "norm.weight"):
        if not any(part in name for part in leave):
            tensors[name] = (1 + 0.2 * torch.randn(HIDDEN, generator=generator)).bfloat16()
            facts = {"name": name, "shape": [HIDDEN], "dtype": "BF16", "file": "delta.safetensors"}
            exact.append(facts | {"sha256": hash_of(tensors[name])})
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "delta.safetensors"))
    manifest = {"version": 1, "matrices": matrices, "exact": exact}
    (folder / "delta.json").write_text(json.dumps(manifest))
    return folder


def hash_of(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor as a manifest has it."""
    dtype = {torch.int16: "I16", torch.bfloat16: "BF16"}[tensor.dtype]
    return tensor_hash(dtype, tuple(tensor.shape), (tensor.view(torch.uint8).numpy().tobytes(),))


def write_adapter(folder: Path, seed: int, *, rank: int = 4) -> Path:
    """Write a LoRA adapter of q and down of layer 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in ("layers.1.q_proj", "layers.1.down_proj"):
        outputs, inputs = matrix_shapes()[f"{name}.weight"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    facts = {"r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "peft_type": "LORA"}
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


def load_ahead(tiny: SimpleNamespace, asked: Any) -> None:
    """Load a delta in the background and give it a slot."""
    with pytest.raises(ValueError, match=BEING_READ):
        tiny.runner.add_lora(asked)
    tiny.manager.loader.wait()
    assert tiny.runner.add_lora(asked)
