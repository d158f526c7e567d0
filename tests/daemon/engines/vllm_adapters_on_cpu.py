"""Our kernels of adapters behind vLLM's own wrapper of LoRA, on a CPU in Triton's interpreter; ends with an error.

    python -m tests.daemon.engines.vllm_adapters_on_cpu SITE

``SITE`` is a folder with vLLM 0.33.0 and the Python of its dependencies. Triton 3.8 has to be there too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.daemon.engines.vllm_on_cpu import import_vllm
from tests.daemon.variant_kernels import VARIANTS_PATH

RANK, SLOTS, INPUTS, OUTPUTS, MOST_TOKENS = 16, 4, 96, (64, 32), 128
MIXES = ([1, 0, 2, 1], [3] * 40, [0] * 6, [1, 2, 3, 4] * 16, [2])
CUT = 2**-7  # of a value, where the interpreter cuts bfloat16 off


def wrapper() -> Any:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu

    punica_gpu.LoRAKernelMeta = LoRAKernelMeta  # which it imports where Triton has a GPU
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.bfloat16)
    return punica_gpu.PunicaWrapperGPU(MOST_TOKENS, 64, "cpu", lora_config=config)


def adapters() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS).bfloat16() * 0.1 for _ in OUTPUTS)
    return a, tuple(torch.randn(SLOTS, 1, size, RANK).bfloat16() for size in OUTPUTS)


def map_rows(punica: Any, ids: list[int]) -> None:
    """Map each row to an adapter; 0: to the base."""
    from vllm.lora.layers.utils import LoRAMapping

    mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=False)
    punica.update_metadata(mapping, [*range(1, SLOTS + 1)], SLOTS, 320)


def check_mixes() -> None:
    """Compare each mix with the reference, where the rows' groups stay in the same memory."""
    from iserve_variants.reference import adapter_change

    punica, (a, b) = wrapper(), adapters()
    memory = [piece.data_ptr() for piece in punica.token_mapping_meta.iserve_pieces]
    for ids in MIXES:
        map_rows(punica, ids)
        x = torch.randn(len(ids), INPUTS).bfloat16()
        base = torch.randn(len(ids), sum(OUTPUTS)).bfloat16()
        y = base.clone()
        punica.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
        slots = torch.tensor(ids) - 1
        change = adapter_change(x, [one[:, 0] for one in a], [one[:, 0] for one in b], slots, 1.0)
        error = (y.float() - base.float() - change).norm(dim=1)
        assert (error <= CUT * (y.float().norm(dim=1) + 2 * change.norm(dim=1))).all(), ids
        assert torch.equal(y[slots < 0], base[slots < 0]), ids
        assert any(ids) == bool((y != base).any()), ids
        pieces = punica.token_mapping_meta.iserve_pieces
        assert any(ids) == bool((pieces[2] >= 0).any()), ids  # a captured graph has nothing to do for the base
    assert [piece.data_ptr() for piece in punica.token_mapping_meta.iserve_pieces] == memory


def check_splits() -> None:
    """Count what a mapping costs: rows of a step are split, those of its logits are not."""
    from iserve_variants.adapter_kernels import Groups

    theirs, splits = Groups.split, list[int]()
    punica = wrapper()
    Groups.split = lambda self, rows, into: splits.append(rows) or theirs(self, rows, into)
    map_rows(punica, [1, 0, 2])
    Groups.split = theirs
    assert len(splits) == 1, splits


def check_logits() -> None:
    """Let adapters with and without an output layer take a slot, behind vLLM's own layer."""
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

    punica, layer = wrapper(), LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked = torch.zeros(SLOTS, 1, RANK, INPUTS).bfloat16()
    layer.lora_b_stacked = torch.zeros(SLOTS, 1, 320, RANK).bfloat16()
    launched: list[int] = []
    punica_gpu = sys.modules["vllm.lora.punica_wrapper.punica_gpu"]
    punica_gpu.lora_shrink = punica_gpu.lora_expand = lambda *_, **__: launched.append(1)

    def launches(a: torch.Tensor = layer.lora_a_stacked) -> int:
        launched.clear()
        x, y = torch.zeros(2, INPUTS).bfloat16(), torch.zeros(2, 320).bfloat16()
        punica.add_lora_logits(y, x, a, layer.lora_b_stacked, 1.0)
        return len(launched)

    map_rows(punica, [1, 2])
    assert launches() == 0
    layer.set_lora(1, torch.ones(RANK, INPUTS).bfloat16(), torch.ones(320, RANK).bfloat16())
    assert launches() == 2
    layer.reset_lora(1)
    assert launches() == 0
    head = classifier()
    assert launches(head.lora_a_stacked[0]) == 0
    head.set_lora(0, torch.ones(RANK, INPUTS).bfloat16(), torch.ones(320, RANK).bfloat16())
    assert launches(head.lora_a_stacked[0]) == 2


def classifier() -> Any:
    """Return vLLM's layer of a classifier with adapters, which adds to its outputs as to logits."""
    from vllm.lora.layers.classifier import ClassificationHeadWithLoRA

    head = ClassificationHeadWithLoRA.__new__(ClassificationHeadWithLoRA)
    torch.nn.Module.__init__(head)
    head.tp_size, head.n_slices = 1, 1
    head.lora_a_stacked = (torch.zeros(SLOTS, 1, RANK, INPUTS).bfloat16(),)
    head.lora_b_stacked = (torch.zeros(SLOTS, 1, 320, RANK).bfloat16(),)
    return head


def check_trace() -> None:
    """Compile a linear with adapters once for all mixes and sizes, as vLLM does."""
    graphs: list[str] = []
    punica, (a, b) = wrapper(), adapters()
    weights = torch.randn(sum(OUTPUTS), INPUTS).bfloat16()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x @ weights.t()
        punica.add_lora_linear(y, x, a, b, 1.0, OUTPUTS)
        return y

    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for ids in MIXES[:2]:
        map_rows(punica, ids)
        x = torch.randn(len(ids), INPUTS).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), forward(x))
    assert len(graphs) == 1, len(graphs)
    assert "iserve_adapter_linear" in graphs[0]


def check_settings() -> None:
    """Ask for results that are the same in each batch, which is refused before anything is replaced."""
    from iserve_variants.vllm_adapters import use_adapter_kernels
    from vllm.lora.ops.triton_ops import utils

    utils.is_batch_invariant, before = True, utils.is_batch_invariant
    refusals = []
    try:
        use_adapter_kernels()
    except ValueError as error:
        refusals.append(str(error))
    utils.is_batch_invariant = before
    assert any("VLLM_BATCH_INVARIANT" in one for one in refusals)


def check_start() -> None:
    """Make the manager of a worker's adapters as vLLM does, after the plug-in's entry point."""
    from iserve_variants.plugin import register
    from iserve_variants.settings import adapters_config
    from vllm.v1.worker import lora_model_runner_mixin as mixin

    made: list[tuple[Any, ...]] = []
    mixin.LRUCacheWorkerLoRAManager = lambda *given: made.append(given)
    register()

    def start(additional_config: dict[str, Any]) -> bool:
        given = (SimpleNamespace(additional_config=additional_config), "cpu", {})
        mixin.LRUCacheWorkerLoRAManager(*given)
        assert made.pop() == given  # vLLM's own, as there are no slots of deltas
        return hasattr(torch.ops.vllm, "iserve_adapter_linear")

    assert not start({})
    assert start(adapters_config())
    assert start(adapters_config())  # of a profile's next fingerprint, in the same process


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined
    import_vllm(Path(sys.argv[1]))
    sys.path.insert(0, VARIANTS_PATH)
    import vllm

    vllm.__version__ = "0.33.0"  # a folder without its metadata does not know
    check_settings()
    check_start()
    torch.manual_seed(0)
    check_mixes()
    check_splits()
    check_logits()
    check_trace()


if __name__ == "__main__":
    main()
